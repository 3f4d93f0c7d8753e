"""Trials of drafters on a request's prompts: acceptance, and the seconds of their rounds.

All trials start from one prefilled cache of the target, one at a time.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import jax

from magicjax.decoding.counts import Counts, by_row
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.output import texts_of
from magicjax.decoding.paired_timing import PrefilledPrompts, median_ratio, time_decoders
from magicjax.decoding.rounds import decode_texts, push_tokens
from magicjax.decoding.text import TextError
from magicjax.drafters import Cascade, Ensemble
from magicjax.trees.sequoia import expected_tokens, optimal
from magicjax.trees.token_tree import ROOT_ONLY, TokenTree, Tree, chain

DEPTHS = (1, 2, 4, 6, 8)  # of the timed chains
NODES = (4, 8, 16, 32)  # of the timed trees
REPEATS, MIN_SECONDS = 5, 2.0  # of the comparison
CALL_ROUNDS = 8  # of a trial's call; the first call loads the program and is not counted
TRIAL_ROUNDS = 4 * CALL_ROUNDS
TRIAL_KEYS = 2**31 - 1  # folded into the keys of trials; no position is as high


@dataclasses.dataclass(frozen=True)
class Trial:
    """Measurements of a drafter on the prompts.

    Attributes:
      name: the drafter as commands write it.
      tree: that ran.
      ratio: the seconds of a round divided by those of a plain step.
      acceptance: [depths, ranks], the format of `magicjax.optimal`.
      tau: mean acceptance length.
    """

    name: str
    tree: Tree
    ratio: float
    acceptance: tuple[tuple[float, ...], ...]
    tau: float

    def tokens(self, tree: Tree) -> float:
        """Returns the expected tokens of a round with a tree."""
        if tree == self.tree or not isinstance(tree, TokenTree):
            return self.tau
        return expected_tokens(tree, self.acceptance) if self.acceptance else 1.0

    def trees(self, is_static: bool) -> list[Tree]:
        """Returns the trees that may be faster than that of the trial, and itself."""
        if not (is_static and isinstance(self.tree, TokenTree)):
            return [self.tree]
        depths = [depth for depth in DEPTHS if depth <= self.tree.depth]
        trees: list[Tree] = [self.tree, *map(chain, depths)]
        if self.tree.width > 1 and self.acceptance:
            most = self.tree.depth
            trees += [optimal(self.acceptance, nodes, most) for nodes in NODES]
        return [*dict.fromkeys(trees)]

    @property
    def best(self) -> float:
        """The highest expected speedup of a chain, or of the tree of the trial.

        The time of a shallower chain is taken from a line between a plain step and the trial.
        """
        speedups = [self.tau / self.ratio]
        if isinstance(self.tree, TokenTree):
            for tree in map(chain, range(1, self.tree.depth)):
                ratio = 1 + (self.ratio - 1) * tree.num_nodes / self.tree.num_nodes
                speedups.append(self.tokens(tree) / max(ratio, 0.1))
        return max(speedups)

    def __str__(self) -> str:
        """Returns the measurements as a line of text."""
        depths = ", ".join(f"{sum(row):.2f}" for row in self.acceptance) or "none"
        return (
            f"{self.name}: tau {self.tau:.2f}, a round {self.ratio:.2f} plain steps, "
            f"acceptance if reached {depths}"
        )


def run_trial(
    decoder: Decoder, prefilled: PrefilledPrompts
) -> tuple[tuple[Counts, float], PrefilledPrompts]:
    """Returns (the counts and the seconds of some rounds, the prompts for the next run).

    The rounds draw random numbers of their own. With those of the run, a drafter whose tokens
    happen to match would be chosen, and the text would be biased towards its drafts.
    """
    request = decoder.request
    if (sampling := request.rows.sampling) is not None:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, TRIAL_KEYS))(sampling.keys)
        keys = jax.device_put(keys, sampling.keys.sharding)
        rows = dataclasses.replace(request.rows, sampling=dataclasses.replace(sampling, keys=keys))
        request = dataclasses.replace(request, rows=rows)
        decoder = dataclasses.replace(decoder, request=request)
    state, texts = prefilled.start(decoder), texts_of(request)
    times: list[float] = []
    done = 0
    while done < TRIAL_ROUNDS:
        try:
            state, _ = push_tokens(state, texts)
        except TextError:  # the run may draw other tokens
            break
        if all(text.ended for text in texts):
            break
        state = decode_texts(decoder, state, texts, CALL_ROUNDS)
        done += int(state.rounds)
        times.append(decoder.clock.newest_s / int(state.rounds))
    counts = jax.device_get((state.emitted, state.histogram, state.ranks, state.nodes))
    seconds = statistics.median(times[1:] or times or [0.0])
    return (sum(by_row(*counts), Counts()), seconds), prefilled.reset(state)


def trial_of(name: str, tree: Tree, counted: Counts, ratio: float) -> Trial:
    """Returns the measurements of a drafter, given its counts and `Trial.ratio`."""
    by_rank = counted.acceptance_by_rank
    reached = next((d for d, row in enumerate(by_rank) if not sum(row)), len(by_rank))
    return Trial(name, tree, ratio, by_rank[: max(1, reached)], counted.tau)


def time_trees(
    plain: Decoder,
    decoders: Mapping[str, Decoder],
    trials: Sequence[Trial],
    prefilled: PrefilledPrompts,
) -> tuple[dict[tuple[str, Tree], float], dict[tuple[str, Tree], float], PrefilledPrompts]:
    """Returns (speedup, seconds of a round) by name and tree, and the prompts.

    The fastest tree is first. All are timed interleaved with plain decoding, ("", ROOT_ONLY).
    """
    if not trials:
        return {}, {}, prefilled
    trial_trees = [
        (trial, tree)
        for trial in trials
        for tree in trial.trees(not isinstance(decoders[trial.name].drafter, Ensemble | Cascade))
    ]
    running = [plain, *(with_tree(decoders[trial.name], tree) for trial, tree in trial_trees)]
    (baseline, *measured), prefilled = time_decoders(prefilled, running, REPEATS, MIN_SECONDS)
    speedups: dict[tuple[str, Tree], float] = {}
    seconds: dict[tuple[str, Tree], float] = {("", ROOT_ONLY): statistics.median(baseline)}
    for (trial, tree), times in zip(trial_trees, measured, strict=True):
        ratio = float(median_ratio(times, baseline))
        speedups[trial.name, tree] = trial.tokens(tree) / ratio
        seconds[trial.name, tree] = ratio * seconds["", ROOT_ONLY]
    return dict(sorted(speedups.items(), key=lambda each: -each[1])), seconds, prefilled


def with_tree(decoder: Decoder, tree: Tree) -> Decoder:
    """Returns the decoder with another tree."""
    return dataclasses.replace(decoder, settings=decoder.loop_settings.with_tree(tree))
