"""The command `magicjax`."""

import argparse
import importlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from magicjax.cli import INTERRUPTED
from magicjax.suggest import did_you_mean
from magicjax.version import version

INTERRUPTED_MESSAGE = "magicjax: interrupted\n"
COMMANDS = {  # the module of each is imported when it runs, because most import JAX
    "generate": "continue a prompt",
    "chat": "talk to a model",
    "serve": "serve a model over HTTP, with OpenAI's API",
    "plan": "predict the speedup of speculative decoding on a machine",
    "fit": "check whether a workload fits GPUs or TPUs that are not attached",
    "calibrate": "measure this device for `magicjax plan`",
    "fetch": "download a model, or list those that can be downloaded",
}


class _SubCommand(argparse.ArgumentParser):
    """A parser that reports an unknown option first, with the nearest known one."""

    def parse_known_args(self, args=None, namespace=None):
        for argument in args:
            if argument == "--":
                break
            name = argument.partition("=")[0]
            is_option = name.startswith("--") and " " not in argument
            if is_option and name not in self._option_string_actions:
                self._refuse(name)
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        """Exits with the message, without the usage, which takes many lines."""
        names_it = message.startswith("argument ") or "did you mean" in message
        more = "" if names_it else " (--help lists all options)"
        self.exit(2, f"{self.prog}: error: {message}{more}\n")

    def _refuse(self, name: str) -> NoReturn:
        self.error(f"unknown option {name}{did_you_mean(name, self._option_string_actions)}")


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command line, with the options of its subcommand only."""
    main_parser = argparse.ArgumentParser(
        prog="magicjax",
        description="Lossless speculative decoding for long contexts.",
        allow_abbrev=False,
    )
    main_parser.add_argument("--version", action="version", version=f"magicjax {version()}")
    commands = main_parser.add_subparsers(dest="command", required=True, parser_class=_SubCommand)
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    chosen = None if {"-h", "--help"} & {*options} else words[len(options) : len(options) + 1]
    for name, summary in COMMANDS.items():
        if [name] == chosen:
            importlib.import_module(f"magicjax.cli.{name.replace('-', '_')}").add(commands)
        else:
            commands.add_parser(name, help=summary)
    return main_parser


def main() -> None:
    """Runs the command line.

    Invalid input exits with a message and code 2, an interrupt by the user with code 130. If the
    reader of the output has ended, as `head` does, the command ends with code 0.
    """
    # The parser imports the command's module, which takes seconds; a KeyboardInterrupt in an import
    # can become another error.
    handler = signal.signal(signal.SIGINT, _exit_at_once)
    try:
        main_parser = parser(sys.argv[1:])
    finally:
        signal.signal(signal.SIGINT, handler)
    arguments = main_parser.parse_args()
    if getattr(arguments, "verbose", False):
        logging.basicConfig()
        logging.getLogger("magicjax").setLevel(logging.INFO)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        code = 0
    except (ValueError, OSError) as error:
        from magicjax.cli.arg_utils import explain

        main_parser.exit(2, f"magicjax: {explain(error, arguments)}\n")
    except KeyboardInterrupt:
        main_parser.exit(INTERRUPTED, INTERRUPTED_MESSAGE)
    if code:
        sys.exit(code)


def _exit_at_once(number: int, frame: Any) -> NoReturn:
    """Handles a signal during imports."""
    sys.stderr.write(INTERRUPTED_MESSAGE)
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
