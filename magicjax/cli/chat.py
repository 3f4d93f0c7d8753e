"""`magicjax chat`: a conversation with a model in the terminal or from a pipe."""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import magicjax
from magicjax.checks import OptionError, counted
from magicjax.cli import arg_utils, drafting, model_options, printing
from magicjax.decoding.counts import Counts
from magicjax.decoding.prompts import chat_tokens, token_ids
from magicjax.decoding.text import Result
from magicjax.decoding.validation import DEFAULT_TREE
from magicjax.drafters.spec import Drafters, Trees, resolve
from magicjax.engine.handle import RequestStats
from magicjax.files import write_atomically
from magicjax.model import DTYPES, Model
from magicjax.options import token_count
from magicjax.sources import Source
from magicjax.suggest import did_you_mean

PROMPT = "> "
MAX_CONTEXT = 8192  # default limit: a model's own one can need more memory than the device has
MAX_TOKENS = 1024
HELP = """\
/stats      tokens, tokens/s, tau and prefill of the last answer and of all answers
/save FILE  write the conversation to a JSON file
/reset      start a new conversation
/help       list the commands
/quit       end, as Ctrl-D does
Ctrl-C stops an answer; what was generated stays in the conversation."""

Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class AnswerStats:
    """The statistics of an answer, and the seconds of its programs."""

    stats: RequestStats
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True)
class Session:
    """The state between two lines of input.

    Attributes:
      engine: an engine with one slot; its prefix store has the text so far.
      params: sampling parameters of all answers.
      target: the engine's.
      messages: the conversation so far.
      answers: all answers, also those before a /reset.
      template_kwargs: variables of the chat template; None: none.
    """

    engine: magicjax.Engine
    params: magicjax.SamplingParams
    target: magicjax.Model
    messages: Messages
    answers: tuple[AnswerStats, ...] = ()
    template_kwargs: dict[str, Any] | None = None


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "chat",
        description="Answers messages line by line. The KV cache of the conversation is stored, so "
        "each answer prefills only new tokens.",
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
    parser.add_argument(
        "--chat-template-kwargs",
        type=_template_kwargs,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}' of Qwen3's",
    )
    parser.add_argument("--system", metavar="TEXT", help="first message, of the role system")
    parser.add_argument(
        "--max-context",
        type=token_count,
        metavar="TOKENS",
        help="the most tokens of the conversation; default: the model's positions, at most "
        f"{MAX_CONTEXT:,}",
    )
    parser.add_argument(
        "--max-tokens",
        type=token_count,
        default=MAX_TOKENS,
        help=f"the most tokens of an answer; default: {MAX_TOKENS:,}",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of all models; default: as stored; on a CPU bfloat16 with the native kernels "
        "or with instructions for it, else float32",
    )
    model_options.add_backend(parser)
    model_options.add_weights(parser)
    model_options.add_activations(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="log compilations and the size of the caches"
    )
    drafting.add_adaptive_speculation(parser)
    drafting.add_sampling(parser, ("max_tokens", "logprobs"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Answers messages until the input ends.

    Raises:
      ValueError, OSError: invalid options; all checks run before weights are loaded.
    """
    source = Source(arguments.target, arguments.tokenizer)
    drafting.resolve_sampling(arguments, source)
    sampled = arguments.temperature != 0
    drafters, trees = drafting.engine_speculation(arguments, sampled, "without --temperature")
    settings = arg_utils.settings_from(arguments, magicjax.SamplingParams)
    params = magicjax.SamplingParams(**settings | {"max_tokens": None})  # the engine has the limit
    dtype = model_options.default_dtype(arguments.backend)
    target = model_options.unloaded_target(arguments, source, dtype)
    shortest = [*_first_messages(arguments), {"role": "user", "content": "a"}]
    # An error if the template rejects such messages.
    template_kwargs = arguments.chat_template_kwargs
    min_context = len(chat_tokens(target.tokenizer, shortest, template_kwargs)) + 1
    drafting.show_sampling_defaults(arguments, source)
    adaptive = bool(drafters) and not arguments.no_adaptive
    config = _engine_config(arguments, target, min_context, adaptive)
    load = functools.partial(model_options.unloaded, arguments, dtype)
    drafter, tree = resolve(drafters, trees, load)
    engine = magicjax.Engine(target, drafter, tree, config)
    _note(_drafting(drafters, trees, is_default=not arguments.drafter))
    first = _first_messages(arguments)
    session = Session(engine, params, target, first, template_kwargs=template_kwargs)
    for line in _lines():
        if line.startswith("/"):
            next_session = _command(session, line, _first_messages(arguments))
            if next_session is None:
                return
            session = next_session
        elif line.strip():
            session = _answer(session, line)


def _drafting(drafters: Drafters | None, trees: Trees | None, is_default: bool) -> str:
    """Returns the drafter and its tree in words."""
    if drafters is None:
        return f"drafter {arg_utils.NONE}"
    tree = f"chain:{DEFAULT_TREE.depth}" if trees is None else trees.text
    hint = f"; --drafter {arg_utils.NONE} turns it off" * is_default
    return f"drafter {drafters.text}, {tree}{hint}"


def _engine_config(
    arguments: argparse.Namespace, target: Model, min_context: int, adaptive: bool
) -> magicjax.EngineConfig:
    """Returns the configuration of an engine of one slot, which stores one text.

    Args:
      arguments: the parsed options.
      target: without weights.
      min_context: the fewest tokens of a conversation with an answer.
      adaptive: whether the engine chooses what drafts.

    Raises:
      ValueError: --max-context is smaller, or exceeds the target's positions.
    """
    positions = target.config.max_positions
    limit = arguments.max_context
    limit = min(positions, MAX_CONTEXT) if limit is None else limit
    if not min_context <= limit <= positions:
        raise OptionError(
            f"{{}}: it must be at least {min_context} tokens, for a message in the chat template "
            f"and an answer, and at most the {positions} positions of the target",
            "max_context",
            limit,
        )
    return magicjax.EngineConfig(
        slots=1,
        capacity=limit,
        sampling=arguments.temperature != 0,
        adaptive=adaptive,
        rounds_per_step=1,  # text appears after every round
        logits_processors=True,
        **arg_utils.settings_from(arguments, magicjax.EngineConfig),
    )


def _first_messages(arguments: argparse.Namespace) -> Messages:
    return [] if arguments.system is None else [{"role": "system", "content": arguments.system}]


def _template_kwargs(text: str) -> dict[str, Any]:
    """Returns the variables of --chat-template-kwargs, for `argparse`."""
    try:
        kwargs = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return kwargs


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
            _note("(new conversation)")
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
    """Prints an answer and returns the session after it.

    A message that does not fit, that the model cannot read, whose prefill is stopped, or whose
    answer ends within its reasoning, is dropped.
    """
    engine, before = session.engine, session.engine.stats
    messages = [*session.messages, {"role": "user", "content": message}]
    tokens = chat_tokens(session.target.tokenizer, messages, session.template_kwargs)
    limit = engine.config.capacity
    assert limit is not None
    if len(tokens) >= limit:
        reset = any(each["role"] == "user" for each in session.messages)
        _note(
            f"the conversation has {len(tokens)} tokens with this message, and --max-context "
            f"{limit} leaves no room for an answer: shorten the message, set a larger --max-context"
            + ", or start a new conversation (/reset)"
            * reset
        )
        return session
    try:
        prompt = token_ids(session.target, [tokens])[0]
    except ValueError as error:  # a token of the tokenizer that the model lacks
        _note(str(error))
        return session
    handle = engine.submit(prompt, session.params)
    if not session.answers:
        _note("(loading or compiling programs; once per start)")
    display = printing.Display()
    with printing.interruptible() as stop:
        while not handle.finished:
            engine.step()
            if stop.is_set():
                handle.cancel()
            pieces = (display.add(new.reasoning, new.text or "") for new in handle.arrived())
            print("".join(pieces), end="", flush=True)
    print(flush=True)
    result, after = handle.result(), engine.stats
    if ending := _ending(result, limit):
        _note(ending)
    if not result.text:
        return session
    messages.append({"role": "assistant", "content": result.text})
    answer = AnswerStats(
        result.stats, after.prefill_s - before.prefill_s, after.loop_s - before.loop_s
    )
    return dataclasses.replace(session, messages=messages, answers=(*session.answers, answer))


def _ending(result: Result, limit: int) -> str:
    """Returns why an answer ended, if it was not the model that ended it."""
    stats = result.stats
    if result.finish_reason == "cancelled":
        return "(stopped)"
    if result.finish_reason == "error":
        return f"({result.error})"
    if result.finish_reason in ("eos", "stop"):
        return ""
    if stats.prompt_tokens + stats.new_tokens >= limit:
        return f"(the context of {limit} tokens is full: /reset starts a new conversation)"
    return f"(ended at --max-tokens {stats.new_tokens})"


def report(session: Session) -> str:
    """Returns the statistics of the last answer and of all answers, a line each."""
    if not session.answers:
        return "no answers yet"
    newest, limit = session.answers[-1].stats, session.engine.config.capacity
    cached = newest.prompt_tokens + newest.new_tokens - 1  # the last token is not
    return "\n".join(
        [
            f"last answer: {_summary(session.answers[-1:])}",
            f"in total:    {_summary(session.answers)}",
            f"context:     {cached} of {limit} tokens in the cache",
        ]
    )


def _summary(answers: Sequence[AnswerStats]) -> str:
    stats = [answer.stats for answer in answers]
    counts = sum(stats, Counts())
    parts = [counted(sum(request.new_tokens for request in stats), "token")]
    if counts.target_passes:
        parts.append(f"{counts.emitted / sum(answer.decode_s for answer in answers):.1f} tokens/s")
        if len(counts.histogram) > 1:
            parts.append(f"tau {counts.tau:.2f}")
    prefilled = counted(sum(request.prefilled_tokens for request in stats), "token")
    seconds = sum(answer.prefill_s for answer in answers)
    return ", ".join([*parts, f"{prefilled} prefilled in {seconds:.3f} s"])
