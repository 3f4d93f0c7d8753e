"""The command `magicjax`, and its sub-command `generate`, which streams text and its statistics.

An option that would be ignored is an error, and errors speak of options, not of Python.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

import magicjax
import models
from magicjax.autotune.auto import check as check_auto
from magicjax.cli import calibrate, fit, plan
from magicjax.decoding.request import DEFAULT_TREE, prepare
from magicjax.decoding.runner import Output
from magicjax.drafters import DRAWINGS, Drafter
from magicjax.drafters.small_model import SINK_POSITIONS
from magicjax.drafters.sparse import KV_DTYPES
from magicjax.drafters.spec import CACHE, DRAFTERS, has_use, make_drafter, parts
from magicjax.generation import config_of, skeleton
from magicjax.model import DTYPES
from magicjax.parallel import offloading
from magicjax.trees.token_tree import Tree
from magicjax.verification.verify import VERIFIERS
from magicjax.version import version
from sharding import parse_mesh, processes

DESCRIPTION = "Long-context speculative decoding."
AUTO = "auto"
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "seed", "verifier")


class _Command(argparse.ArgumentParser):
    """A parser that names the nearest option to one that does not exist, before all else."""

    def parse_known_args(self, args=None, namespace=None):
        for argument in args:
            if argument == "--":
                break
            name = argument.partition("=")[0]
            if name.startswith("--") and " " not in argument and not self._knows(name):
                self._refuse(name)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return found, unknown

    def _knows(self, name: str) -> bool:
        return name in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """Ends with the message alone: all options are many lines, and --help has them."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists all options)\n")

    def _refuse(self, name: str) -> NoReturn:
        nearest = difflib.get_close_matches(name, self._option_string_actions, 1)
        self.error(f"no such option: {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))


def _tree(text: str) -> Tree:
    try:
        return magicjax.parse_tree(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _drafter(text: str) -> str:
    """Returns the text, checked to be a drafter's and to name a policy that exists, or "auto"."""
    try:
        if text != AUTO:
            parts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _candidate(text: str) -> str:
    if text == AUTO:
        raise argparse.ArgumentTypeError(f"{AUTO} cannot try itself: write {DRAFTERS}")
    return _drafter(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="magicjax", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"magicjax {version()}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Command)
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt with a model, plainly or by speculative decoding.",
        allow_abbrev=False,
    )
    generate.add_argument(
        "--target",
        required=True,
        help="model directory, or a preset (random weights; needs --tokenizer)",
    )
    generate.add_argument("--tokenizer", help="directory of the tokenizer, where --target has none")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to continue")
    source.add_argument("--prompt-file", type=pathlib.Path, help="a file with the text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=128, help="128 if not given")
    generate.add_argument("--dtype", choices=DTYPES, help="of the models; the default: as stored")
    generate.add_argument("--backend", help="of the attention; xla if not given")
    generate.add_argument(
        "--mesh",
        metavar="stage=1,data=1,model=8",
        help="divide the target's heads, MLP and vocabulary over devices (model), and its layers "
        "(stage); one prompt needs data=1",
    )
    _add_processes(generate.add_argument_group("many processes"))
    offloading.add_option(generate)
    generate.add_argument(
        "--verbose", action="store_true", help="log each compilation, and the bytes of caches"
    )
    _add_speculation(generate.add_argument_group("speculation"))
    _add_sampling(generate.add_argument_group("sampling"))
    generate.set_defaults(run=_generate)
    plan.add(commands)
    fit.add(commands)
    calibrate.add(commands)
    return parser


def _add_processes(group) -> None:
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of rank 0, where processes on one host or several generate together; each is started "
        "with the same options. Told by srun and, on one host, by mpirun",
    )
    group.add_argument(
        "--processes", type=int, metavar="N", help="how many they are. Told by srun and mpirun"
    )
    group.add_argument(
        "--rank",
        type=int,
        metavar="I",
        help="which of them this is, from 0, which prints. Told by srun, mpirun and Kubernetes",
    )
    group.add_argument(
        "--join-seconds",
        type=float,
        metavar="S",
        help=f"for which they wait for each other; {processes.SECONDS} if not given",
    )


def _add_speculation(group) -> None:
    group.add_argument(
        "--drafter",
        action="append",
        type=_drafter,
        default=[],
        help=f"{DRAFTERS}; several: an ensemble, its trees merged; none: plain decoding; {AUTO}: "
        "tries some on the prompt, and takes what pays most, if anything does",
    )
    group.add_argument(
        "--candidate",
        action="append",
        type=_candidate,
        default=[],
        help=f"what --drafter {AUTO} tries, written like a drafter; several: one after the other; "
        "the default: the target on caches of 64, 256 and 1,024 slots, and a look-up",
    )
    group.add_argument(
        "--profile",
        help=f"of this device, for --drafter {AUTO}: a file that `magicjax calibrate` wrote, or "
        "one of its presets; the default: where calibrate writes",
    )
    group.add_argument(
        "--tree",
        action="append",
        type=_tree,
        default=[],
        help="chain:4 (if none is given), expansion:2,2,1, parents:-1,0,0,1 or dynamic:16,6,4 "
        "(nodes, depth, width); one for all drafters, or one for each",
    )
    sparse = "of drafters with a policy other than full"
    group.add_argument(
        "--refresh-every",
        type=int,
        metavar="ROUNDS",
        help="of self:POLICY: after how many rounds the cache's pinned entries are chosen again; "
        "the default: never",
    )
    group.add_argument(
        "--kv-dtype",
        choices=[name for name in KV_DTYPES if name],
        help=f"of the draft's cache, {sparse}; the default: the model's own",
    )
    group.add_argument(
        "--sink-positions",
        choices=SINK_POSITIONS,
        help="of small:PATH:streaming: where the pinned first tokens stand, in the text (the "
        "default) or just before the newest tokens, so that a draft can read texts longer than "
        "its own context",
    )
    group.add_argument(
        "--draft-shards",
        type=int,
        metavar="N",
        help="of small:PATH under --mesh: over how many devices of `model` it is divided, and then "
        "held several times; the default: all",
    )
    group.add_argument("--show-tree", action="store_true", help="draw the tree first")


def _add_sampling(group) -> None:
    group.add_argument(
        "--do-sample", action="store_true", help="draw tokens, instead of taking the most likely"
    )
    group.add_argument("--temperature", type=float, help="1 if not given")
    group.add_argument("--top-k", type=int, help="how many tokens can be drawn; 0: all")
    group.add_argument("--top-p", type=float, help="probability of the tokens that can be drawn")
    group.add_argument("--seed", type=int, help="0 if not given; the same seed, the same text")
    group.add_argument(
        "--verifier",
        choices=VERIFIERS,
        help="who decides on drafted tokens; the default: greedy, or under --do-sample mss",
    )
    group.add_argument(
        "--draw",
        choices=DRAWINGS,
        help="how drafters with a model draw a node's children; the default: without_replacement, "
        "in a dynamic tree top (the most likely)",
    )


def report(output: Output) -> str:
    """Returns the statistics of a run as a few lines of text."""
    stats = output.stats
    tokens = int(output.lengths.sum())
    lines = [
        f"{tokens} tokens, {stats.emitted} of them decoded in {stats.decode_s:.3f} s: "
        f"{stats.tokens_per_s:.1f} tokens/s ({stats.rounds} rounds, "
        f"attention: {stats.attention_backend})",
    ]
    if not stats.rounds:
        lines = [f"{tokens} token, from prefill (attention: {stats.attention_backend})"]
    elif stats.acceptance_by_depth:
        lines += [
            f"tau {stats.tau:.2f} tokens a round, of {stats.nodes_per_round:.1f} nodes",
            f"accepted by depth  {_by_depth(stats.acceptance_by_depth)}",
            f"  where reached    {_by_depth(stats.acceptance_if_reached)}",
        ]
    return "\n".join(
        [
            *lines,
            f"prefill {stats.prefill_s:.3f} s, compiling {stats.compile_s:.1f} s "
            f"({stats.compilations} programs)",
            f"KV cache: target {stats.kv_bytes_target / 1e6:.1f} MB, "
            f"draft {stats.kv_bytes_draft / 1e6:.1f} MB",
        ]
    )


def _by_depth(shares: Sequence[float]) -> str:
    return "  ".join(f"{depth}: {share:.2f}" for depth, share in enumerate(shares, 1))


def _check_used(arguments: argparse.Namespace) -> None:
    """Raises ValueError if an option that was given would change nothing."""
    drafters, trees = arguments.drafter, arguments.tree
    if AUTO in drafters:
        drafters = arguments.candidate
        for option, given in {"--tree": trees, "--show-tree": arguments.show_tree}.items():
            if given:
                raise ValueError(f"--drafter {AUTO} chooses the tree: leave {option} out")
        if len(arguments.drafter) > 1:
            raise ValueError(f"--drafter {AUTO} stands alone: name what it tries with --candidate")
    else:
        for option, given in {
            "--candidate": arguments.candidate,
            "--profile": arguments.profile,
        }.items():
            if given:
                raise ValueError(f"{option} is for --drafter {AUTO}: give that, or leave it out")
    cache = [name for name in CACHE if getattr(arguments, name) is not None]
    given = {"--tree": trees, "--show-tree": arguments.show_tree, "--draw": arguments.draw}
    for option in [*(option for option, value in given.items() if value), *map(_option, cache)]:
        if not drafters:
            kind = "--candidate" if AUTO in arguments.drafter else "--drafter"
            raise ValueError(f"{option} needs a {kind}: give one, or leave {option} out")
    for name in cache:
        if not any(has_use(text, name) for text in drafters):
            raise ValueError(
                f"{_option(name)} is for the sparse cache of {CACHE[name]}: give such a --drafter, "
                f"or leave {_option(name)} out"
            )
    if arguments.draft_shards is not None:
        if not arguments.mesh:
            raise ValueError("--draft-shards says how a --mesh is used: give one, or leave it out")
        if not any(parts(text)["path"] for text in drafters):
            raise ValueError("--draft-shards is for small:PATH: give one, or leave it out")
    if len(trees) not in (0, 1, max(1, len(drafters))):
        raise ValueError(
            f"{len(trees)} --tree for {len(drafters)} --drafter: give one, or one for each drafter"
        )
    if not arguments.draw:
        return
    if not arguments.do_sample:
        raise ValueError("--draw is for sampling: pass --do-sample, or leave --draw out")
    if all(text.startswith("look-up") for text in drafters):
        raise ValueError("--draw has no meaning for a look-up, which draws nothing: leave it out")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _prompt(arguments: argparse.Namespace) -> str:
    """Returns the text to continue."""
    path = arguments.prompt_file
    if path is None:
        return arguments.prompt
    if not path.exists():
        raise ValueError(f"--prompt-file {path} does not exist")
    if path.is_dir():
        raise ValueError(f"--prompt-file {path} is a directory: give a file of text")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt-file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} "
            f"at position {error.start}"
        ) from error


def _tokenizer(arguments: argparse.Namespace) -> Any:
    """Returns the target's tokenizer."""
    config_of(arguments.target)
    source = arguments.tokenizer or arguments.target
    tokenizer = models.load_tokenizer(source)
    if tokenizer is None:
        raise ValueError(
            f"{source} has no tokenizer, and text needs one: "
            "give a directory that has one with --tokenizer"
        )
    return tokenizer


def _speculation(
    arguments: argparse.Namespace, load: Callable[[str], Any]
) -> tuple[Drafter | magicjax.Auto | None, Tree | None]:
    """Returns (the drafter, its tree), as `magicjax.generate` takes them."""
    trees = arguments.tree
    cache = {name: getattr(arguments, name) for name in CACHE}
    texts = arguments.candidate if AUTO in arguments.drafter else arguments.drafter
    drafters = [make_drafter(text, load, arguments.draw, **cache) for text in texts]
    if AUTO in arguments.drafter:
        return magicjax.Auto(drafters or None, arguments.profile), None
    if len(drafters) < 2:
        return next(iter(drafters), None), next(iter(trees), None)
    if len(trees) < 2:
        return magicjax.Ensemble(tuple(drafters)), next(iter(trees), None)
    return magicjax.Ensemble(tuple(drafters), tuple(trees)), None


def _generate(arguments: argparse.Namespace) -> None:
    _check_used(arguments)
    who = processes.find(arguments.coordinator, arguments.processes, arguments.rank)
    if who is None:
        if arguments.join_seconds is not None:
            raise ValueError("--join-seconds is for many processes: leave it out")
        _generate_here(arguments)
        return
    if AUTO in arguments.drafter:
        raise ValueError(
            f"--drafter {AUTO} decides by measured times, which differ between {who.count} "
            "processes: name the drafter"
        )
    prompt = _prompt(arguments)
    stray = ("run", "rank", "coordinator", "join_seconds", "prompt", "prompt_file")
    run = {name: str(value) for name, value in vars(arguments).items() if name not in stray}
    run |= {"prompt": prompt, "version": version(), "config": str(config_of(arguments.target))}
    processes.join(who, run, arguments.join_seconds or processes.SECONDS)
    with processes.leaving():
        devices = parse_mesh(arguments.mesh).devices if arguments.mesh else 1
        if devices != jax.device_count():
            raise ValueError(
                f"mesh={arguments.mesh} has {devices} devices, and the {who.count} processes have "
                f"{jax.device_count()}: give a mesh of all of them"
            )
        with contextlib.ExitStack() as stack:
            if who.rank > 0:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            _generate_here(arguments)


def _generate_here(arguments: argparse.Namespace) -> None:
    prompt, tokenizer = _prompt(arguments), _tokenizer(arguments)
    names = ("max_new_tokens", "backend", *SAMPLING)
    options = {name: getattr(arguments, name) for name in names}

    mesh = magicjax.make_mesh(*parse_mesh(arguments.mesh)) if arguments.mesh else None

    def made(
        load: Callable[..., magicjax.Model], **of_target: Any
    ) -> tuple[magicjax.Model, dict[str, Any]]:
        small = functools.partial(load, shards=arguments.draft_shards)
        if mesh is not None and load is not skeleton:
            small = functools.partial(small, stages=1)
        drafter, tree = _speculation(arguments, small)
        target = dataclasses.replace(load(arguments.target, **of_target), tokenizer=tokenizer)
        return target, options | {"drafter": drafter, "tree": tree, "mesh": mesh}

    target, given = made(skeleton)
    check = check_auto if isinstance(given["drafter"], magicjax.Auto) else prepare
    check(target, [prompt], **given)  # says what is wrong before weights are loaded
    load = functools.partial(magicjax.load, dtype=arguments.dtype, mesh=mesh)
    target, given = made(load, offload=arguments.offload)
    if isinstance(given["drafter"], magicjax.Auto):
        given["drafter"] = magicjax.choose_drafter(target, [prompt], **given)
        print(given["drafter"], file=sys.stderr)
    rounds = magicjax.stream(target, [prompt], **given)
    if arguments.show_tree:
        print(*arguments.tree or [DEFAULT_TREE], sep="\n")
    print(report(_print_stream(rounds, tokenizer)), file=sys.stderr)


def _print_stream(rounds, tokenizer) -> Output:
    """Prints text as it comes, and returns the output behind the last round.

    A character of several tokens is held back until it is whole.
    """
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    tokens, told = [], ""
    while True:
        try:
            tokens.extend(next(rounds)[0].tolist())
        except StopIteration as end:
            print(decode(tokens)[len(told) :], flush=True)
            return end.value
        text = decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(told) :], end="", flush=True)
            told = text


def in_words_of_options(message: str) -> str:
    """Returns an error of `magicjax.generate` in the command line's words.

    "top_k=-1: ..., pass do_sample=True" becomes "--top-k -1: ..., pass --do-sample".
    """
    arguments = rf"(max_new_tokens|do_sample|top_k|top_p|{'|'.join(CACHE)})\b(=True|=|)"
    plain_words = "temperature|seed|verifier|backend|draw|drafter|batch|context|device|mesh|tree"
    plain_words += "|draft_shards|micro_batches|coordinator|processes|rank"
    plain_words = rf"({plain_words})(=)"

    def option(match: re.Match) -> str:
        name, value = (part for part in match.groups() if part is not None)
        return "--" + name.replace("_", "-") + (" " if value == "=" else "")

    return re.sub(rf"(?<![\w./-])(?:{arguments}|{plain_words})", option, message)


def main() -> None:
    """Runs the command line; bad input ends with its message and exit code 2."""
    parser = _parser()
    arguments = parser.parse_args()
    if getattr(arguments, "verbose", False):
        logging.basicConfig()
        logging.getLogger("magicjax").setLevel(logging.INFO)
    try:
        code = arguments.run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"magicjax: {in_words_of_options(str(error))}\n")
    if code:  # only `fit` has a code of its own
        sys.exit(code)


if __name__ == "__main__":
    main()
