"""The options of drafters and sampling, which `generate` and `chat` share."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import magicjax
from magicjax.cli import options
from magicjax.drafters import Drafter
from magicjax.drafters.spec import (
    BY_POLICY,
    DRAFTER_SYNTAX,
    DRAFTERS,
    GROUP,
    has_model,
    make_drafter,
    parse_all,
)
from magicjax.options import as_help, options_of
from magicjax.plugins import installed
from magicjax.trees.token_tree import Tree
from magicjax.verification.verify import VERIFIERS


def add_speculation(parser: Any, more: str = "") -> Any:
    """Adds the options of drafters and trees; returns their group.

    Args:
      parser: of a command.
      more: what the help of --drafter says besides.
    """
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        action="append",
        type=options.drafter,
        default=[],
        help=f"{DRAFTER_SYNTAX}; repeat the option for an ensemble, whose trees are merged; "
        f"{more}default: plain decoding",
    )
    group.add_argument(
        "--tree",
        action="extend",
        type=options.trees,
        default=[],
        help="chain:4 (default), expansion:2,2,1, parents:-1,0,0,1 or dynamic:16,6,4 (nodes, "
        "depth, width); one for all drafters, or one per drafter",
    )
    return group


def drafters_help() -> str:
    """Returns the drafters and their options, for the end of a command's help."""
    lines = ["drafters, written NAME:VALUE:OPTION=VALUE, and their options:"]
    by_policy = {":".join(words): kind for words, kind in BY_POLICY.items()}
    for name, kind in (DRAFTERS | by_policy).items():
        path = ":PATH" if has_model(kind) else ""
        lines += [name + path, as_help(options_of(kind).values())]
    others = ", ".join(installed(GROUP)) or "none"
    return "\n".join([*lines, f"drafters of installed packages: {others}"])


def add_sampling(parser: Any) -> None:
    """Adds the options of sampling."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy decoding")
    group.add_argument(
        "--top-k", type=int, default=0, help="number of tokens to sample from; default: 0, all"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, help="probability mass to sample from; default: 1, all"
    )
    group.add_argument("--seed", type=int, default=0, help="default: 0")
    group.add_argument(
        "--verifier",
        choices=VERIFIERS,
        help="rule that accepts drafted tokens; default: greedy, or mss with a temperature",
    )


def sampling_params(
    arguments: argparse.Namespace,
    max_tokens: int | None,
    stop: Sequence[str] = (),
    grammar: magicjax.Grammar | None = None,
    logprobs: int | None = None,
) -> magicjax.SamplingParams:
    """Returns the parameters of a text, with those of `add_sampling`."""
    return magicjax.SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=max_tokens,
        stop=stop,
        grammar=grammar,
        logprobs=logprobs,
    )


def check(
    arguments: argparse.Namespace,
    drafters: Sequence[str],
    sampled: bool,
    without: str,
    greedy: str,
) -> None:
    """Raises ValueError for options without effect, and for a wrong number of trees.

    Args:
      arguments: the parsed options.
      drafters: the texts of the drafters.
      sampled: whether tokens are sampled.
      without: a phrase for when there are none, such as "without --drafter".
      greedy: a phrase for when nothing is sampled.
    """
    effects: list[tuple[str, object, str]] = [("tree", drafters, without)]
    options.check_effects(arguments, effects)
    drawn = [text for text in drafters if any("draw" in part.values for part in parse_all(text))]
    if drawn and not sampled:
        raise ValueError(
            f"draw has no effect in greedy decoding, {greedy}: remove it from {drawn[0]}"
        )
    count = sum(len(parse_all(text)) for text in drafters)
    if len(arguments.tree) not in (0, 1, max(1, count)):
        raise ValueError(
            f"{len(arguments.tree)} --tree for {count} --drafter: pass one, or one per drafter"
        )


def speculation(
    arguments: argparse.Namespace, load: Callable[[str], magicjax.Model]
) -> tuple[Drafter | None, Tree | None]:
    """Returns (drafter, tree) for `magicjax.generate`, with draft models that `load` returns."""
    if not arguments.drafter:
        return None, None
    drafter = make_drafter(" + ".join(arguments.drafter), load)
    if len(arguments.tree) > 1:
        return magicjax.Ensemble(drafter.members(), tuple(arguments.tree)), None
    return drafter, next(iter(arguments.tree), None)
