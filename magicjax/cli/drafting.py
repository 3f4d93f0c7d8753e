"""The options of drafters and sampling, which `generate` and `chat` share."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import magicjax
from magicjax.cli import arg_utils
from magicjax.downloads import fetched_draft
from magicjax.drafters.spec import (
    DRAFTER_SYNTAX,
    DRAFTERS,
    GROUP,
    Drafters,
    Trees,
    has_model,
    joined,
    needs_model,
    parse,
    parse_trees,
)
from magicjax.options import as_help, options_of
from magicjax.plugins import installed
from magicjax.sampling_params import FILTERS
from magicjax.sources import Source
from magicjax.trees.token_tree import DynamicTree
from magicjax.verification.verify import VERIFIERS
from pallas_kernels.cpu import build

SERVED = "prompt-lookup:4"  # the default drafter of an engine
# Of default draft models. An engine compiles a dynamic tree at one depth, and a chain at several.
DRAFT_VOCAB, DRAFT_TREE = 32_000, "dynamic:5,4,1"


def _trees_of(text: str) -> str | Trees:
    """Returns the trees of a --tree option, or "auto", for `argparse`."""
    return text if text == arg_utils.AUTO else arg_utils.parsed(parse_trees, text)


def drafter(text: str) -> str | Drafters:
    """Returns the drafter of a --drafter option, "auto" or "none", for `argparse`."""
    return text if text in (arg_utils.AUTO, arg_utils.NONE) else arg_utils.parsed(parse, text)


def without_none[Drafter](drafters: list[Drafter]) -> list[Drafter]:
    """Returns the drafters of --drafter options, an empty list for "none".

    Raises ValueError for "none" with another drafter.
    """
    if arg_utils.NONE not in drafters:
        return drafters
    if len(drafters) > 1:
        raise ValueError(f"--drafter {arg_utils.NONE} with another drafter: remove one of them")
    return []


def candidate(text: str) -> Drafters:
    """Returns the drafter of a --candidate option."""
    if text in (arg_utils.AUTO, arg_utils.NONE):
        raise argparse.ArgumentTypeError(f"{text} is not a candidate: use {DRAFTER_SYNTAX}")
    return arg_utils.parsed(parse, text)


def add_speculation(
    parser: Any,
    default_help: str = arg_utils.NONE,
    default_tree: str = "chain:4; auto: the fastest for this prompt",
) -> Any:
    """Adds the options of drafters and trees; returns their group.

    Args:
      parser: the parser of a command.
      default_help: the end of the help of --drafter.
      default_tree: the end of the help of --tree.
    """
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        action="append",
        type=drafter,
        default=[],
        help=f"{DRAFTER_SYNTAX}; repeat the option for an ensemble, whose trees are merged; "
        f"{arg_utils.NONE}: plain decoding; default: {default_help}",
    )
    group.add_argument(
        "--tree",
        action="append",
        type=_trees_of,
        default=[],
        help="chain:4, expansion:2,2,1, parents:-1,0,0,1, dynamic:16,6,4 (nodes, depth, "
        "width) or dynamic:6,5,2,0.6 (and min_prob); one for all drafters, or one per drafter; "
        "for a cascade that of its first drafter, or 'chain:4 -> chain:8': its tree, and the chain "
        f"that the target verifies; default: {default_tree}",
    )
    return group


def add_adaptive_speculation(parser: Any) -> None:
    """Adds the options of drafters and trees of a command that runs an engine."""
    default = f"the downloaded draft model of the target, if there is one, else {SERVED}"
    group = add_speculation(parser, default, f"{DRAFT_TREE} for that draft model, else chain:4")
    group.add_argument(
        "--no-adaptive",
        action="store_true",
        help="always draft the whole tree; default: plain decoding, or the drafter and depth with "
        "the most expected tokens per second, chosen while decoding",
    )
    group.add_argument(
        "--verifier",
        choices=VERIFIERS,
        help="rule that accepts drafted tokens; default: greedy without sampling, else naive, or "
        "mss with --no-adaptive and a drafter that remembers no texts",
    )


def engine_speculation(
    arguments: argparse.Namespace, sampled: bool, greedy: str
) -> tuple[Drafters | None, Trees | None]:
    """Returns (drafters, trees) of an engine; (None, None) for plain decoding.

    Args:
      arguments: the parsed options of a command that has those of `add_adaptive_speculation`.
      sampled: whether tokens are sampled.
      greedy: a phrase for when nothing is sampled.

    Raises:
      ValueError: options that cannot be combined, or have no effect.
    """
    drafters, trees = arguments.drafter, arguments.tree
    if not drafters:
        drafters = [parse(default_drafter(arguments))]
        if drafters[0].text != SERVED:
            trees = trees or [parse_trees(DRAFT_TREE)]
    if arg_utils.AUTO in drafters:
        raise ValueError(
            f"--drafter {arg_utils.AUTO} measures a single prompt: find a drafter with `magicjax "
            f"generate --drafter {arg_utils.AUTO}`, and pass it"
        )
    if arg_utils.AUTO in trees:
        raise ValueError(
            f"--tree {arg_utils.AUTO} measures a single prompt, and an engine adapts the depth of "
            "a chain to its requests: omit --tree, or find one with `magicjax generate`"
        )
    drafters = without_none(drafters)
    check(arguments, drafters, sampled, f"with --drafter {arg_utils.NONE}", greedy)
    with_min_prob = next(filter(_has_min_prob, trees), None)
    if drafters and not arguments.no_adaptive and with_min_prob:
        raise ValueError(
            f"--tree {with_min_prob.text} has min_prob, and an adaptive engine times rounds before "
            "the first request, which depend on the text: add --no-adaptive, or omit min_prob"
        )
    effects = [("no_adaptive", drafters, f"with --drafter {arg_utils.NONE}")]
    arg_utils.check_effects(arguments, effects)
    if sampled and drafters and not arguments.no_adaptive and arguments.verifier == "mss":
        raise ValueError(
            "--verifier mss gives a seed a text that depends on what drafts: add --no-adaptive, or "
            "omit --verifier"
        )
    return combined(drafters, trees)


def _has_min_prob(trees: Trees) -> bool:
    """Returns whether some tree of a --tree option is a dynamic one with `min_prob`."""
    return any(isinstance(tree, DynamicTree) and tree.min_prob for tree in trees.parts)


def default_drafter(arguments: argparse.Namespace) -> str:
    """Returns the text of the drafter of an engine if none is given."""
    draft = fetched_draft(arguments.target)
    if draft is None or getattr(arguments, "mesh", None) or arguments.tokenizer:
        return SERVED
    weights = ":weights=Q4_0" * (build.is_default() and arguments.activations == "int8")
    return f"small:{draft}{weights}:draft_vocab={DRAFT_VOCAB}"


def drafters_help() -> str:
    """Returns the drafters and their options, for the end of a command's help."""
    lines = ["drafters, written NAME:VALUE:OPTION=VALUE, and their options:"]
    for name, drafter_class in DRAFTERS.items():
        path = ":PATH" if needs_model(drafter_class) else "[:PATH]" * has_model(drafter_class)
        lines += [name + path, as_help(options_of(drafter_class).values())]
    others = ", ".join(installed(GROUP)) or "none"
    return "\n".join([*lines, f"drafters of installed packages: {others}"])


def add_sampling(parser: Any, omitted: Sequence[str] = (), **changes: Any) -> None:
    """Adds the options of sampling, except for the verifier.

    Args:
      parser: the parser of a command.
      omitted: parameters that are no options of the command, besides those of no command.
      **changes: as in `arg_utils.add_settings`.
    """
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--do-sample",
        action="store_true",
        help="sample as the target's generation_config.json asks; other options have precedence",
    )
    omitted = ("grammar", "speculative", "prompt_logprobs", *omitted)
    changes |= dict(logit_bias=dict(action="append", type=_bias, metavar="TOKEN=BIAS"))
    arg_utils.add_settings(group, magicjax.SamplingParams, omitted, **changes)


def _bias(text: str) -> tuple[int, float]:
    """Returns (token, bias) of a text such as 17=-2.5."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be TOKEN=BIAS, such as 17=-2.5") from None


def resolve_sampling(arguments: argparse.Namespace, target: Source) -> None:
    """Sets the options of sampling that are not given: with --do-sample, to the target's.

    Raises:
      ValueError: the target's files ask for no sampling, or for one that is not supported; options
        that filter samples without a temperature, which can be 0.
    """
    samples = arguments.do_sample or arguments.temperature is not None
    arg_utils.check_effects(
        arguments, [(name, samples, "without --temperature") for name in FILTERS]
    )
    defaults = target.sampling_defaults if arguments.do_sample else {}
    if unsupported := sorted(set(defaults) - set(options_of(magicjax.SamplingParams))):
        raise ValueError(
            f"--do-sample: generation_config.json asks for {', '.join(unsupported)}, which is not "
            "supported: pass --temperature and other options of sampling instead"
        )
    if arguments.do_sample and not defaults:
        raise ValueError(
            "--do-sample: the target has no generation_config.json that asks for sampling: pass "
            "--temperature instead"
        )
    for name, value in {"temperature": 0.0, **defaults}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def show_sampling_defaults(arguments: argparse.Namespace, target: Source) -> None:
    """Says on stderr if the target's files ask for sampling, and decoding is greedy."""
    defaults = {} if arguments.temperature else target.sampling_defaults
    if not defaults:
        return
    values = ", ".join(f"{key} {value:g}" for key, value in defaults.items())
    unsupported = ", ".join(sorted(set(defaults) - set(options_of(magicjax.SamplingParams))))
    hint = f"{unsupported}: not supported" if unsupported else "--do-sample"
    print(
        f"greedy decoding; the model's generation_config.json asks for {values} ({hint})",
        file=sys.stderr,
    )


def check(
    arguments: argparse.Namespace,
    drafters: Sequence[Drafters],
    sampled: bool,
    without: str,
    greedy: str,
) -> None:
    """Raises ValueError for options without effect.

    Args:
      arguments: the parsed options.
      drafters: those of the options.
      sampled: whether tokens are sampled.
      without: a phrase for when there are none, such as "without --drafter".
      greedy: a phrase for when nothing is sampled.
    """
    effects: list[tuple[str, object, str]] = [("tree", drafters, without)]
    arg_utils.check_effects(arguments, effects)
    with_draw = [
        parsed.text for parsed in drafters if any("draw" in spec.values for spec in parsed.parts)
    ]
    if with_draw and not sampled:
        raise ValueError(
            f"draw has no effect in greedy decoding, {greedy}: remove it from {with_draw[0]}"
        )


def combined(
    drafters: Sequence[Drafters], trees: Sequence[Trees]
) -> tuple[Drafters | None, Trees | None]:
    """Returns (drafters, trees) of repeated options; (None, None) for plain decoding.

    Raises:
      ValueError: a cascade and another drafter.
    """
    if not drafters:
        return None, None
    if len(drafters) > 1 and (cascade := next((x for x in drafters if x.is_cascade), None)):
        raise ValueError(
            f"--drafter {cascade.text!r} is a cascade, which cannot be a member of an ensemble: "
            "remove the other --drafter"
        )
    return joined(drafters), joined(trees) if trees else None
