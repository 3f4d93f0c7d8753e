"""`magicjax generate`: continues a prompt, streams the text, and prints statistics."""

import argparse
import contextlib
import functools
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

import magicjax
from magicjax.checks import check_number, counted
from magicjax.cli import INTERRUPTED, arg_utils, drafting, model_options, printing
from magicjax.cli.arg_utils import AUTO, NONE
from magicjax.decoding.output import Output
from magicjax.decoding.prompts import token_ids
from magicjax.decoding.validation import DEFAULT_TREE
from magicjax.drafters import Drafter
from magicjax.drafters.spec import make_drafter, resolve
from magicjax.model import DTYPES
from magicjax.options import token_count
from magicjax.sources import Source
from magicjax.trees.token_tree import Tree
from magicjax.verification.logprobs import MAX_ALTERNATIVES
from magicjax.verification.verify import VERIFIERS
from magicjax.version import version
from sharding import parse_mesh, processes

MAX_TOKENS = magicjax.SamplingParams.max_tokens
FINISH_REASONS = {"eos": "stop (EOS)", "stop": "stop (a stop string or token)"}


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "generate",
        description="Continues a prompt by plain or speculative decoding.",
        epilog=drafting.drafters_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target",
        required=True,
        help="model directory, GGUF file, name that `magicjax fetch` lists, or preset (random "
        "weights; requires --tokenizer)",
    )
    parser.add_argument("--tokenizer", help="tokenizer directory, if --target has no tokenizer")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--prompt-file", type=pathlib.Path, help="file with the text to continue")
    source.add_argument("--chat", metavar="MESSAGE", help="message to answer, in a chat template")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--regex", help="regular expression that the whole text must match")
    grammar.add_argument(
        "--json-schema",
        type=pathlib.Path,
        metavar="FILE",
        help="file with the JSON schema of the text",
    )
    grammar.add_argument("--json", action="store_true", help="the text is a JSON object")
    grammar.add_argument(
        "--lark",
        type=pathlib.Path,
        metavar="FILE",
        help="file with the context-free grammar of the text, in Lark's syntax",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of all models; default: as stored")
    model_options.add_backend(parser)
    parser.add_argument(
        "--mesh",
        metavar="stage=1,data=1,model=8",
        help="shard the target's heads, MLP and vocabulary (model) and its layers (stage); a "
        "single prompt requires data=1",
    )
    model_options.add_weights(parser)
    model_options.add_activations(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="log compilations and the size of the caches"
    )
    _add_speculation(parser)
    drafting.add_sampling(
        parser,
        max_tokens=dict(
            type=token_count, default=MAX_TOKENS, help=f"the most new tokens; default: {MAX_TOKENS}"
        ),
        logprobs=dict(
            metavar="K",
            help="print each token's log-probability under the target, and the K most likely "
            f"tokens, 0 to {MAX_ALTERNATIVES}, after the text",
        ),
    )
    _add_processes(parser.add_argument_group("multiple processes"))
    parser.set_defaults(run=run)


def _add_speculation(parser: Any) -> None:
    group = drafting.add_speculation(
        parser,
        f"{NONE}; {AUTO} runs trials on the prompt and uses the fastest drafter",
    )
    group.add_argument(
        "--verifier",
        choices=VERIFIERS,
        help="rule that accepts drafted tokens; default: greedy, or mss with a temperature",
    )
    group.add_argument(
        "--candidate",
        action="append",
        type=drafting.candidate,
        default=[],
        help=f"a drafter for --drafter {AUTO} to try; repeat the option for several; default: "
        "prompt and suffix lookup, and self-speculation with budgets of 64, 256 and 1,024 slots",
    )
    group.add_argument(
        "--profile",
        help=f"device profile with which {AUTO} skips drafters that cannot be faster: a file from "
        "`magicjax calibrate`, or a preset; default: the default output of calibrate, if any",
    )
    group.add_argument(
        "--draft-shards",
        type=int,
        metavar="N",
        help="number of devices of the mesh axis `model` over which a small:PATH draft model is "
        "sharded, and then replicated; default: all",
    )
    group.add_argument("--show-tree", action="store_true", help="draw the tree first")


def _add_processes(group: Any) -> None:
    group.add_argument(
        "--distributed",
        action="store_true",
        help="run in all processes that were started with these options, on a mesh of all their "
        "devices; rank 0 prints",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of rank 0; default: from srun",
    )
    group.add_argument(
        "--processes", type=int, metavar="N", help="their number; default: from srun"
    )
    group.add_argument(
        "--rank", type=int, metavar="I", help="rank of this process, 0 to N - 1; default: from srun"
    )


def run(arguments: argparse.Namespace) -> int:
    """Generates in this process, or in every process of a multi-process run; rank 0 prints.

    Returns the exit code. In a single process Ctrl-C ends the text after the current round.

    Raises:
      ValueError, OSError: invalid input.
    """
    source = Source(arguments.target, arguments.tokenizer)
    drafting.resolve_sampling(arguments, source)
    _check(arguments)
    if not arguments.distributed:
        return _generate(arguments, source, printing.interruptible())
    _join(arguments, source)
    with _silent() if jax.process_index() > 0 else contextlib.nullcontext():
        return _generate(arguments, source, contextlib.nullcontext(threading.Event()))


def _join(arguments: argparse.Namespace, source: Source) -> None:
    """Joins the other processes.

    Raises:
      ValueError: times that differ choose the drafter, or see `processes.join`.
    """
    if AUTO in (*arguments.drafter, *arguments.tree):
        raise ValueError(
            f"{AUTO} depends on measured times, which differ between processes: select a "
            "drafter and a tree"
        )
    local = ("run", "rank", "coordinator", "prompt", "prompt_file")
    shared = [(name, value) for name, value in vars(arguments).items() if name not in local]
    run = (*shared, _prompt(arguments), version(), source.config)
    processes.join(
        arguments.coordinator,
        arguments.processes,
        arguments.rank,
        meshes=[arguments.mesh or ""],
        run=run,
    )


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for no tokens, options without effect, and drafters beside `auto`."""
    check_number("max_tokens", arguments.max_tokens, ge=1)
    arguments.drafter = drafting.without_none(arguments.drafter)
    auto = AUTO in arguments.drafter
    if auto and len(arguments.drafter) > 1:
        raise ValueError(
            f"--drafter {AUTO} excludes other drafters: list them with --candidate instead"
        )
    auto_tree = AUTO in arguments.tree
    if auto_tree and (auto or len(arguments.drafter) != 1 or len(arguments.tree) != 1):
        raise ValueError(f"--tree {AUTO} chooses the tree of one --drafter: name one drafter")
    drafters = arguments.candidate if auto else arguments.drafter
    paths = [spec.path for parsed in drafters for spec in parsed.parts]
    without_auto = f"without --drafter {AUTO}"
    without_drafter = "without --candidate" if auto else "without --drafter"
    effects: list[tuple[str, object, str]] = [
        ("tree", not auto, f"with --drafter {AUTO}, which chooses the tree"),
        ("show_tree", not (auto or auto_tree), f"with {AUTO}, which chooses the tree"),
        ("candidate", auto, without_auto),
        ("profile", auto or auto_tree, f"{without_auto} or --tree {AUTO}"),
        ("show_tree", drafters, without_drafter),
        ("draft_shards", arguments.mesh, "without --mesh"),
        ("draft_shards", any(paths), "without --drafter small:PATH"),
    ]
    ranks = ("coordinator", "processes", "rank")
    effects += [(name, arguments.distributed, "without --distributed") for name in ranks]
    arg_utils.check_effects(arguments, effects)
    sampled = arguments.temperature != 0
    drafting.check(arguments, drafters, sampled, without_drafter, "without --temperature")


def _generate(
    arguments: argparse.Namespace,
    source: Source,
    interruptible: AbstractContextManager[threading.Event],
) -> int:
    """Prints the text while it is generated. Options are validated before weights are loaded."""
    target = model_options.unloaded_target(arguments, source)
    drafter, tree = speculation(arguments)
    drafting.show_sampling_defaults(arguments, source)
    settings = arg_utils.settings_from(arguments, magicjax.SamplingParams)
    params = magicjax.SamplingParams(**settings, grammar=_grammar(arguments))
    prompts = token_ids(target, [_prompt(arguments)])
    rounds = magicjax.stream(
        target,
        prompts,
        params,
        drafter=drafter,
        tree=tree,
        verifier=arguments.verifier,
        backend=arguments.backend,
        mesh=magicjax.make_mesh(*parse_mesh(arguments.mesh)) if arguments.mesh else None,
    )
    if arguments.show_tree:
        trees = [tree for parsed in arguments.tree for tree in parsed.parts]
        print(*trees or [DEFAULT_TREE], sep="\n")
    with interruptible as interrupted:
        output = printing.print_stream(rounds, interrupted.is_set)
    (result,) = output.results
    if result.logprobs is not None:
        lines = printing.log_prob_lines(target.tokenizer, result.tokens, result.logprobs)
        print(lines, file=sys.stderr)
    if output.choice is not None:
        print(output.choice, file=sys.stderr)
    print(report(output), file=sys.stderr)
    return INTERRUPTED if interrupted.is_set() else 0


def _grammar(arguments: argparse.Namespace) -> magicjax.Grammar | None:
    """Returns what the text must match."""
    try:
        if arguments.regex is not None:
            return magicjax.Grammar.regex(arguments.regex)
        if arguments.json_schema is not None:
            return magicjax.Grammar.json_schema(_read("--json-schema", arguments.json_schema))
        if arguments.lark is not None:
            return magicjax.Grammar.lark(_read("--lark", arguments.lark))
        return magicjax.Grammar.json_object() if arguments.json else None
    except ImportError as error:
        raise ValueError(str(error)) from error


def _prompt(arguments: argparse.Namespace) -> Any:
    """Returns the text to continue, or the conversation to answer."""
    if arguments.prompt_file is not None:
        return _read("--prompt-file", arguments.prompt_file)
    if arguments.chat is not None:
        return [{"role": "user", "content": arguments.chat}]
    return arguments.prompt


def _read(option: str, path: pathlib.Path) -> str:
    """Returns the text of the file of an option."""
    if not path.exists():
        raise ValueError(f"{option} {path} does not exist")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory: pass a text file")
    try:
        return path.read_bytes().decode("utf-8-sig")  # with line ends as they are
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option} {path} is not UTF-8 text: byte {error.object[error.start]:#04x} "
            f"at position {error.start}"
        ) from error


def speculation(
    arguments: argparse.Namespace,
) -> "tuple[Drafter | magicjax.Auto | None, Tree | None]":
    """Returns (drafter, tree) for `magicjax.stream`, with draft models without weights."""
    shards = arguments.draft_shards
    load = functools.partial(model_options.unloaded, arguments, None, shards=shards)
    if AUTO in arguments.tree:
        from magicjax.prediction.choosing import for_tree  # imports the planner

        return for_tree(make_drafter(arguments.drafter[0], load), arguments.profile), None
    if AUTO not in arguments.drafter:
        return resolve(*drafting.combined(arguments.drafter, arguments.tree), load)
    candidates = [make_drafter(candidate, load) for candidate in arguments.candidate]
    return magicjax.Auto(candidates or None, profile=arguments.profile), None


def report(output: Output) -> str:
    """Returns why the text of a run has ended, and its statistics, as a few lines of text."""
    stats, (reason,) = output.stats, output.finish_reasons
    return (
        f"{counted(output.lengths.sum(), 'token')}, "
        f"finish_reason {FINISH_REASONS.get(reason, reason)}, backend {stats.attention_backend}\n"
        f"{stats}"
    )
