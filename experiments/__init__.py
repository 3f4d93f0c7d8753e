"""Experiments on magicjax: data, training of the bundled models, launcher, reports."""

import os
import signal
import sys
from typing import Any, NoReturn


def _end_imports(number: int, frame: Any) -> NoReturn:
    """Ends the launcher on Ctrl-C while it imports, without a traceback."""
    print("interrupted", file=sys.stderr)
    os._exit(130)


_is_launcher = sys.argv[:1] == ["-m"] and "experiments.launch" in sys.orig_argv
if _is_launcher and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_imports)  # until `launch.main`
