"""Whether the work of a client's grammar is bounded, tried in a process of its own.

llguidance has limits, but not of all its work: a deep chain of rules overflows the stack, and the
first state of `{"multipleOf": 9999991}` takes minutes. Run as a script, this module imports nothing
but llguidance, and starts in 0.1 s.
"""

import functools
import json
import resource
import subprocess
import sys

SECONDS = 2  # of CPU
MEMORY = 2**30  # bytes
STACK = 2**22  # bytes; threads have 8 MiB


def check(grammar: str, max_lexer_states: int) -> None:
    """Raises ValueError if the first mask of a grammar takes more than SECONDS or MEMORY.

    One with another error passes: compiling it says what is wrong.
    """
    if not _ends(grammar, max_lexer_states):
        raise ValueError(
            f"the grammar takes more than {SECONDS} s or {MEMORY // 2**20} MiB to compile, or its "
            "rules are nested too deeply: simplify it"
        )


@functools.lru_cache(maxsize=256)
def _ends(grammar: str, max_lexer_states: int) -> bool:
    request = json.dumps([grammar, max_lexer_states, SECONDS, MEMORY, STACK])
    command = [sys.executable, "-P", __file__]
    try:
        process = subprocess.run(
            command, input=request, text=True, capture_output=True, timeout=10 * SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return not process.returncode


def _main() -> None:
    grammar, max_lexer_states, seconds, memory, stack = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)
    tokenizer = llguidance.LLTokenizer("byte")
    llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits).compute_bitmask()


if __name__ == "__main__":
    _main()
