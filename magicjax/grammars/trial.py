"""Whether a grammar compiles within limits of time and memory, tried in a process of its own.

An expression of 20 characters can have billions of states, and outlines-core determinizes all of
them. Run as a script, this module imports nothing but outlines-core, and starts in 0.1 s.
"""

import functools
import json
import resource
import subprocess
import sys

SECONDS = 10  # of CPU
MEMORY = 2**30  # bytes


def check(expression: str) -> None:
    """Raises ValueError if a regular expression takes more than SECONDS or MEMORY to compile.

    One with another error passes: compiling it says what is wrong.
    """
    if not _ends(expression):
        raise ValueError(
            f"the grammar takes more than {SECONDS} s or {MEMORY // 2**20} MiB to compile: use "
            "fewer or smaller bounded repetitions, and fewer references"
        )


@functools.lru_cache(maxsize=256)
def _ends(expression: str) -> bool:
    request = json.dumps([expression, SECONDS, MEMORY])
    command = [sys.executable, "-P", __file__]
    return not subprocess.run(command, input=request, text=True, capture_output=True).returncode


def _main() -> None:
    expression, seconds, memory = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import outlines_core

    single_bytes = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        outlines_core.Index(expression, single_bytes)
    except ValueError:
        pass


if __name__ == "__main__":
    _main()
