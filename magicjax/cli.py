"""The command `magicjax`: so far `magicjax generate`, which streams text and prints statistics."""

import argparse
import dataclasses
import functools
import logging
import pathlib
import sys

import magicjax
import models
from magicjax.generation import Output, preset_of
from magicjax.request import DEFAULT_TREE

DESCRIPTION = "Long-context speculative decoding."
DTYPES = ("float32", "bfloat16", "float16")


def _tree(text: str) -> magicjax.TokenTree | magicjax.DynamicTree:
    try:
        return magicjax.parse_tree(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_drafter(text: str, dtype: str | None) -> magicjax.SelfSpeculation | magicjax.SmallModel:
    """Returns the drafter that `self:streaming:256` or `small:DIRECTORY` describes.

    Raises:
      ValueError: neither of them.
    """
    kind, _, rest = text.partition(":")
    if kind == "small" and rest:
        return magicjax.SmallModel(magicjax.load(rest, dtype))
    policy, _, budget = rest.partition(":")
    if kind == "self" and (budget.isdigit() or not budget):
        of_default = magicjax.SelfSpeculation()
        return magicjax.SelfSpeculation(
            policy=policy or of_default.policy, budget=int(budget) if budget else of_default.budget
        )
    raise ValueError(
        f"--drafter {text!r} is not known: write self:streaming:256 (policy and budget) or "
        "small:PATH (a model directory or preset)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="magicjax", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt with a model, plainly or by speculative decoding.",
    )
    generate.add_argument(
        "--target", required=True, help="model directory, or a preset (random weights)"
    )
    generate.add_argument("--tokenizer", help="directory of the tokenizer, where --target has none")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to continue")
    source.add_argument("--prompt-file", type=pathlib.Path, help="a file with the text to continue")
    generate.add_argument(
        "--drafter",
        help="self:POLICY:BUDGET (self:streaming:256) or small:PATH; without it: plain decoding",
    )
    generate.add_argument(
        "--tree",
        type=_tree,
        help="chain:4 (the default), expansion:2,2,1 or parents:-1,0,0,1; needs a drafter",
    )
    generate.add_argument("--max-new-tokens", type=int, default=128)
    generate.add_argument("--dtype", choices=DTYPES, help="of the models; the default: as stored")
    generate.add_argument("--backend", help="of the attention; the default: by platform")
    generate.add_argument("--show-tree", action="store_true", help="draw the tree first")
    generate.add_argument("--verbose", action="store_true", help="log each compilation")
    return parser


def report(output: Output) -> str:
    """Returns the statistics of a run as a few lines of text."""
    stats = output.stats
    lines = [
        f"{stats.emitted} tokens in {stats.decode_s:.3f} s: {stats.tokens_per_s:.1f} tokens/s "
        f"({stats.rounds} rounds, attention: {stats.attention_backend})",
        f"prefill {stats.prefill_s:.3f} s, compiling {stats.compile_s:.1f} s "
        f"({stats.compilations} programs)",
        f"KV cache: target {stats.kv_bytes_target / 1e6:.1f} MB, "
        f"draft {stats.kv_bytes_draft / 1e6:.1f} MB",
    ]
    if stats.acceptance_by_depth:
        depths = "  ".join(f"{d}: {a:.2f}" for d, a in enumerate(stats.acceptance_by_depth, 1))
        lines.insert(1, f"tau {stats.tau:.2f}; accepted by depth  {depths}")
    return "\n".join(lines)


def _generate(arguments: argparse.Namespace) -> None:
    prompt = arguments.prompt
    if arguments.prompt_file is not None:
        prompt = arguments.prompt_file.read_text("utf-8")
    if not pathlib.Path(arguments.target).is_dir():
        preset_of(arguments.target)  # no such preset: say so before anything is loaded
    tokenizer = models.load_tokenizer(arguments.tokenizer or arguments.target)
    if tokenizer is None:
        raise ValueError(
            f"{arguments.tokenizer or arguments.target} has no tokenizer, and text needs one: "
            "give a directory that has one with --tokenizer"
        )
    target = magicjax.load(arguments.target, arguments.dtype)
    target = dataclasses.replace(target, tokenizer=tokenizer)
    drafter = None
    if arguments.drafter is not None:
        drafter = parse_drafter(arguments.drafter, arguments.dtype)
    if arguments.show_tree and drafter is not None:
        print(arguments.tree or DEFAULT_TREE)
    rounds = magicjax.stream(
        target,
        [prompt],
        drafter=drafter,
        tree=arguments.tree,
        max_new_tokens=arguments.max_new_tokens,
        backend=arguments.backend,
    )
    print(report(_print_stream(rounds, target.tokenizer)), file=sys.stderr)


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


def main() -> None:
    """Runs the command line; bad input ends with its message and exit code 2."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO)
    try:
        _generate(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"magicjax: {error}\n")


if __name__ == "__main__":
    main()
