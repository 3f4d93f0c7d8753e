"""`magicjax chat`: a conversation with a model in the terminal or from a pipe."""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import magicjax
from magicjax.cli import drafting, options, text
from magicjax.cli.options import AUTO, in_option_names
from magicjax.decoding import memory
from magicjax.decoding.chat_template import chat_tokens
from magicjax.decoding.conversation import MAX_CONTEXT, MAX_NEW_TOKENS, validate_conversation
from magicjax.files import write_atomically
from magicjax.loading import skeleton, stored_dtype
from magicjax.model import DTYPES
from magicjax.suggest import did_you_mean

PROMPT = "> "
HELP = """\
/stats      tokens, tokens/s, acceptance and prefill of the last answer and of all answers
/save FILE  write the conversation to a JSON file
/reset      start a new conversation
/help       list the commands
/quit       end, as Ctrl-D does
Ctrl-C stops an answer; what was generated stays in the conversation."""

Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The statistics of an answer, its tokens, and the tokens that its prefill ran."""

    stats: magicjax.Stats
    tokens: int
    prefilled: int


@dataclasses.dataclass(frozen=True)
class Session:
    """The state between two lines of input.

    Attributes:
      conversation: holds the target and its tokenizer.
      messages: of the conversation so far.
      answers: all answers, also those before a /reset.
    """

    conversation: magicjax.Conversation
    messages: Messages
    answers: tuple[Answer, ...] = ()


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Answers messages line by line. The target's KV cache is kept, so each answer "
        "prefills only new tokens.",
        epilog=f"{HELP}\n\n{drafting.drafters_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target",
        required=True,
        help="model directory, GGUF file, or name that `magicjax fetch` lists",
    )
    parser.add_argument("--tokenizer", help="tokenizer directory, if --target has no tokenizer")
    parser.add_argument("--system", metavar="TEXT", help="first message, of the role system")
    parser.add_argument(
        "--max-context",
        type=int,
        metavar="TOKENS",
        help=f"of the whole conversation; default: the model's positions, at most {MAX_CONTEXT:,}",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=MAX_NEW_TOKENS,
        help=f"of an answer; default: {MAX_NEW_TOKENS:,}",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of all models; default: as stored; on a CPU bfloat16 if it has instructions for it, "
        "else float32",
    )
    options.add_backend(parser)
    options.add_weights(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="log compilations and the size of the caches"
    )
    drafting.add_speculation(parser)
    drafting.add_sampling(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Answers messages until the input ends.

    Raises:
      ValueError, OSError: invalid options; all checks run before weights are loaded.
    """
    if AUTO in arguments.drafter:
        raise ValueError(
            f"--drafter {AUTO} measures a single prompt: find a drafter with `magicjax generate "
            f"--drafter {AUTO}`, and pass it"
        )
    drafting.check(arguments, arguments.drafter, "without --drafter")
    tokenizer = text.tokenizer_of(arguments)
    greeting = [*_first_messages(arguments), {"role": "user", "content": "Hello"}]
    chat_tokens(tokenizer, greeting)  # an error if the template rejects such messages
    dtype = arguments.dtype or options.default_dtype(arguments.backend)

    def without_weights(source: str, **options) -> magicjax.Model:
        return skeleton(source, dtype or stored_dtype(source), **options)

    drafter, tree = drafting.speculation(arguments, without_weights)
    keywords = {name: getattr(arguments, name) for name in ("backend", *drafting.SAMPLING)}
    keywords |= {"drafter": drafter, "tree": tree}
    limits = arguments.max_context, arguments.max_new_tokens
    stored = {"weights": arguments.weights, "offload": arguments.offload}
    target = without_weights(arguments.target, **stored)
    target = dataclasses.replace(target, tokenizer=tokenizer)
    request, _ = validate_conversation(target, *limits, keywords)
    memory.check(request)

    load = functools.partial(magicjax.load, dtype=dtype)
    target = load(arguments.target, **stored)
    target = dataclasses.replace(target, tokenizer=tokenizer)
    keywords["drafter"], _ = drafting.speculation(arguments, load)
    context, new_tokens = limits
    conversation = magicjax.Conversation.create(
        target, max_context=context, max_new_tokens=new_tokens, **keywords
    )
    session = Session(conversation, _first_messages(arguments))
    for line in _lines():
        if line.startswith("/"):
            next_session = _command(session, line, _first_messages(arguments))
            if next_session is None:
                return
            session = next_session
        elif line.strip():
            session = _answer(session, line)


def _first_messages(arguments: argparse.Namespace) -> Messages:
    return [] if arguments.system is None else [{"role": "system", "content": arguments.system}]


def _lines() -> Iterator[str]:
    """Yields the lines of the input. At a terminal, the second of two Ctrl-C interrupts."""
    interactive, interrupted = sys.stdin.isatty(), False
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` editing and a history)
    while True:
        try:
            line = input(PROMPT if interactive else "")
        except EOFError:
            if interactive:
                print()  # after the prompt
            return
        except KeyboardInterrupt:
            if interrupted or not interactive:
                raise
            interrupted = True
            _note("\nCtrl-C again, Ctrl-D or /quit ends; /help lists the commands")
            continue
        interrupted = False
        yield line


def _note(message: str) -> None:
    """Prints what is not an answer."""
    print(message, file=sys.stderr, flush=True)


def _command(session: Session, line: str, first_messages: Messages) -> Session | None:
    """Returns the session after a command; None ends it."""
    name, _, argument = line.strip().partition(" ")
    match name:
        case "/quit":
            return None
        case "/reset":  # the next answer reuses the caches as far as its text is the same
            return dataclasses.replace(session, messages=first_messages)
        case "/save":
            _save(session.messages, argument.strip())
        case "/stats":
            _note(report(session))
        case "/help":
            _note(HELP)
        case _:
            hint = did_you_mean(name, ("/stats", "/save", "/reset", "/help", "/quit"))
            _note(f"unknown command {name}{hint}; /help lists the commands")
    return session


def _save(messages: Messages, path: str) -> None:
    if not path:
        _note("/save needs a file: /save conversation.json")
        return
    try:
        write_atomically(path, json.dumps(messages, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        _note(f"/save {path}: {error.strerror}")
    else:
        _note(f"saved {len(messages)} messages in {path}")


def _answer(session: Session, message: str) -> Session:
    """Prints an answer and returns the session after it; a message that does not fit is dropped."""
    conversation, tokenizer = session.conversation, session.conversation.request.target.tokenizer
    messages = [*session.messages, {"role": "user", "content": message}]
    with text.interruptible() as stop:
        try:
            rounds = conversation.reply(chat_tokens(tokenizer, messages))
        except ValueError as error:
            _note(f"{in_option_names(str(error), ['max_context'])} (/reset)")
            return session
        if not session.answers:
            _note("(compiling; this happens once)")
        reply = text.print_stream(rounds, tokenizer, stop.is_set)
    if ending := _ending(reply, stop.is_set()):
        _note(ending)
    output = reply.output
    messages.append({"role": "assistant", "content": output.texts[0]})
    answer = Answer(output.stats, int(output.lengths[0]), reply.prefilled)
    return Session(reply.conversation, messages, (*session.answers, answer))


def _ending(reply: magicjax.Reply, stopped: bool) -> str:
    """Returns why an answer ended, if it was not the model that ended it."""
    conversation, output = reply.conversation, reply.output
    if output.sequences[0][-1] in np.asarray(conversation.request.eos):
        return ""
    if len(output.sequences[0]) >= conversation.max_context:
        limit = conversation.max_context
        return f"(the context of {limit} tokens is full: /reset starts a new conversation)"
    if stopped:
        return "(stopped)"
    return f"(ended at --max-new-tokens {output.lengths[0]})"


def report(session: Session) -> str:
    """Returns the statistics of the last answer and of all answers, a line each."""
    if not session.answers:
        return "no answers yet"
    held, limit = len(session.conversation.tokens), session.conversation.max_context
    return "\n".join(
        [
            f"last answer: {_summary(session.answers[-1:])}",
            f"in total:    {_summary(session.answers)}",
            f"context:     {held} of {limit} tokens in the cache",
        ]
    )


def _summary(answers: Sequence[Answer]) -> str:
    stats = [answer.stats for answer in answers]
    emitted, passes, accepted = (
        sum(getattr(one, name) for one in stats)
        for name in ("emitted", "target_passes", "accepted")
    )
    parts = [f"{sum(answer.tokens for answer in answers)} tokens"]
    if passes:
        parts.append(f"{emitted / sum(one.decode_s for one in stats):.1f} tokens/s")
        depth = len(stats[0].histogram) - 1
        if depth:
            parts.append(f"tau {emitted / passes:.2f}")
            parts.append(f"acceptance {accepted / (depth * passes):.2f}")
    prefilled, seconds = (
        sum(answer.prefilled for answer in answers),
        sum(one.prefill_s for one in stats),
    )
    return ", ".join([*parts, f"{prefilled} tokens prefilled in {seconds:.3f} s"])
