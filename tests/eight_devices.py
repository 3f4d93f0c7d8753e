"""A process with eight CPU devices that runs functions of the tests, so that others keep one.

`python -m tests.eight_devices` reads lines of JSON, [module, function, arguments], and answers each
with [result, null] or [null, traceback].
"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import traceback
from typing import TextIO

COUNT = 8


class Eight:
    """The process, and a way to call functions in it; what they take and give is JSON."""

    def __init__(self):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={COUNT}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.eight_devices"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(__file__).parent.parent,
            env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "NPROC": "8"},
        )

    def __call__(self, function, **arguments):
        line = json.dumps([function.__module__, function.__name__, arguments])
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process with {COUNT} devices died of {line}"
        result, failure = json.loads(answer)
        assert failure is None, failure
        return result

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


def taken_output() -> TextIO:
    """Returns where answers go; what else is printed, by functions or by Gloo, is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(devices: int, answers: TextIO) -> None:
    """Answers lines until there are none; this process must have so many devices."""
    import jax

    assert jax.device_count() == devices
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        try:
            answer = getattr(importlib.import_module(module), name)(**arguments), None
        except Exception:  # told to whoever asked, whose test fails with it
            answer = None, traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(COUNT, taken_output())
