"""The loop: propose, score, verify, commit. One `step`, run compiled or one round at a time.

`prefill` runs the target over the prompts, and `start` makes the state of that. The state is
immutable and holds everything that a round reads or writes; `decode` runs rounds in one compiled
`while_loop` until every row has ended, or as many as are left; `step` runs one, for streaming.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.drafters.base import Drafter, Round
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.kv_cache.attention_stats import Seen, Watch
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.model import Model
from magicjax.trees import token_tree
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Shape, Tree
from magicjax.verification import verify
from magicjax.verification.sampling import Purpose, Sampling, sample, uniforms, warp
from sharding import AnyMesh, collectives, pipeline

ALL_ROUNDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a program is specialised on, besides the shapes of its arguments.

    Attributes:
      tree: what the drafter is asked for in every round.
      shape: the bounds of what it proposes then.
      verifier: one of `verify.VERIFIERS`.
      capacity: S, the slots of the target's cache.
      chunk: tokens of a prefill step.
      max_new_tokens: the longest output of any row.
      backend: of the attention; None: xla.
      lead: the most committed tokens that a drafter's own cache may lack.
      index: the drafter's place in an ensemble.
      mesh: of devices, factored; None: one device.
    """

    tree: Tree
    shape: Shape
    verifier: str
    capacity: int
    chunk: int
    max_new_tokens: int
    backend: str | None = None
    lead: int = 1
    index: int = 0
    mesh: AnyMesh | None = None

    def with_tree(self, tree: Tree) -> "Settings":
        """Returns the settings for another tree of one drafter, no deeper and no wider.

        Without a child nothing is drafted, and the drafter only keeps up with the text.
        """
        rule = self.verifier
        if tree.num_nodes == 1 and rule != "greedy":
            rule = "naive"  # nothing was drawn that a rule could judge
        return dataclasses.replace(self, tree=tree, shape=tree.shape, verifier=rule)


@dataclasses.dataclass(frozen=True)
class PrefillSettings:
    """What `prefill` is specialised on: nothing of trees, so that they share a program.

    (But for the capacity: a deeper tree may need 64 slots more.)

    Attributes:
      capacity, chunk, backend, mesh: as in `Settings`.
      watch: what the drafter wants to be shown of attention.
    """

    capacity: int
    chunk: int
    backend: str | None
    watch: Watch
    mesh: AnyMesh | None = None


@struct.dataclass
class Prefilled:
    """What the target made of the prompts, besides its cache.

    Attributes:
      first: int32 [B], each row's first new token.
      seen: what was watched.
    """

    first: Int[Array, "B"]
    seen: Seen


@struct.dataclass
class DecodeState:
    """Everything between two rounds.

    Attributes:
      cache: the target's; it holds exactly the prompt and the emitted tokens, less the pending one.
      drafter: the drafter's own state.
      pending: int32 [B], the newest emitted token, whose keys and values are in no cache yet.
      output: int32 [B, max_new_tokens + A], emitted tokens; rubbish behind `emitted`.
      emitted: int32 [B].
      limits: int32 [B], each row's own max_new_tokens.
      ended: bool [B].
      eos: int32 [E], tokens that end a row (E may be 0).
      sampling: how each row samples; None: greedily.
      histogram: int32 [B, A], how many rounds of the row accepted 0, 1, … A-1 speculated tokens.
      ranks: int32 [B, A, W], how often the row's path went on, from each depth, with a node's 1st,
        2nd, … W-th or later try; 0 from the deepest.
      nodes: int32 [B], how many nodes were proposed, padding and roots aside.
      rounds_left: int32 [], how many rounds `decode` may still run.
    """

    cache: KVCache
    drafter: Any
    pending: Int[Array, "B"]
    output: Int[Array, "B M"]
    emitted: Int[Array, "B"]
    limits: Int[Array, "B"]
    ended: Bool[Array, "B"]
    eos: Int[Array, "E"]
    sampling: Sampling | None
    histogram: Int[Array, "B A"]
    ranks: Int[Array, "B A W"]
    nodes: Int[Array, "B"]
    rounds_left: Int[Array, ""]


def prefill(
    settings: PrefillSettings,
    target: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    sampling: Sampling | None,
) -> tuple[KVCache, Prefilled]:
    """Returns (the target's cache of the prompts, what else it made of them)."""
    cache, last, seen = prefill_cache(target, tokens, lengths, settings, settings.watch)
    return cache, Prefilled(_first_token(target, last, lengths, sampling), seen)


def start(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    cache: KVCache,
    prefilled: Prefilled,
    tokens: Int[Array, "B T"],
    limits: Int[Array, "B"],
    eos: Int[Array, "E"],
    sampling: Sampling | None,
) -> DecodeState:
    """Returns the state behind the prompts, each row's first token emitted and pending."""
    first, seen = prefilled.first, prefilled.seen
    rows, deepest = tokens.shape[0], settings.shape.depth + 1
    output = jnp.zeros((rows, settings.max_new_tokens + deepest), jnp.int32)
    emitted = jnp.ones(rows, jnp.int32)
    return DecodeState(
        cache=cache,
        drafter=None if drafter is None else drafter.prefill(target, tokens, cache, seen, settings),
        pending=first,
        output=output.at[:, 0].set(first),
        emitted=emitted,
        limits=limits,
        ended=_is_eos(first, eos) | (emitted >= limits),
        eos=eos,
        sampling=sampling,
        histogram=jnp.zeros((rows, deepest), jnp.int32),
        ranks=jnp.zeros((rows, deepest, max(1, settings.shape.width)), jnp.int32),
        nodes=jnp.zeros(rows, jnp.int32),
        rounds_left=jnp.full((), ALL_ROUNDS, jnp.int32),
    )


def _first_token(target: Model, hidden, lengths, sampling: Sampling | None) -> Int[Array, "B"]:
    logits, over = target.unembed(hidden), target.split.axes
    if sampling is None:
        first = collectives.argmax(logits, over)
    else:
        u = uniforms(sampling.keys, lengths, Purpose.TARGET)
        first = sample(warp(sampling, logits, over), u, over)
    return pipeline.of_first(first) if target.stages > 1 else first


def step(
    settings: Settings, target: Model, drafter: Drafter | None, state: DecodeState
) -> DecodeState:
    """Returns the state after one round: every row that has not ended emits 1 to A tokens."""
    with jax.named_scope("propose"):
        if drafter is None:
            proposal, draft = Proposal(state.pending[:, None], token_tree.ROOT_ONLY.array), None
        else:
            proposal, draft = drafter.propose(
                target, state.drafter, state.pending, state.cache, state.sampling, settings
            )
        if target.stages > 1:
            proposal = _of_first_stage(proposal)
        proposal = _without_draws(proposal, state.ended)
    with jax.named_scope("score"):
        positions = state.cache.lengths[:, None] + token_tree.depths(proposal.parents)
        mask = jnp.asarray(token_tree.ancestor_mask(proposal.parents))
        watched = drafter is not None and drafter.watch().rounds
        attend = AttendTo(state.cache, mask, settings.backend, watched)
        hidden, scored = target(proposal.tokens, positions, attend)
        new, queries = zip(*scored, strict=True)
        logits = target.unembed(hidden)
    with jax.named_scope("verify"):
        verdict = verify.judge(
            settings.verifier,
            logits,
            proposal,
            settings.shape.depth,
            state.sampling,
            state.cache.lengths,
            target.split.axes,
        )
        if target.stages > 1:
            verdict = pipeline.of_first(verdict)
        emitting = _emitted_tokens(proposal.tokens, verdict)
        kept, ended = _cut(emitting, verdict, state)
    with jax.named_scope("commit"):
        kept = kept + full_cache.zero_after(verdict.bonus)
        cache = full_cache.append(state.cache, new, verdict.path, kept)
        of_round = Round(verdict.path, kept, new, queries, cache, settings.backend)
        return _commit(target, drafter, state, draft, proposal, of_round, emitting, verdict, ended)


def decode(
    settings: Settings, target: Model, drafter: Drafter | None, state: DecodeState
) -> DecodeState:
    """Returns the state when every row has ended, or no round is left.

    It is one `while_loop`, without a word with the host. Where the state was made for a deeper
    tree, a shallower one may run on it.
    """

    def goes_on(state):
        running = ~state.ended.all()
        if target.stages > 1:
            running = pipeline.anywhere(running)
        return running & (state.rounds_left > 0)

    return jax.lax.while_loop(goes_on, lambda state: step(settings, target, drafter, state), state)


def _of_first_stage(proposal: Proposal) -> Proposal:
    """Returns what the first stage proposes, whose tokens are those that the target reads."""
    if proposal.parents.ndim == 1:  # the same for all
        tokens = pipeline.of_first(proposal.tokens)
        return dataclasses.replace(proposal, tokens=tokens)
    tokens, parents = pipeline.of_first((proposal.tokens, jnp.asarray(proposal.parents)))
    return dataclasses.replace(proposal, tokens=tokens, parents=parents)


def _without_draws(proposal: Proposal, ended: Bool[Array, "B"]) -> Proposal:
    """Returns the proposal without the draws of rows that have ended: nobody waits for them."""
    if proposal.draws is None:
        return proposal
    parent = jnp.where(ended[:, None], token_tree.NO_NODE, proposal.draws.parent)
    return dataclasses.replace(proposal, draws=dataclasses.replace(proposal.draws, parent=parent))


def _is_eos(tokens: Int[Array, "*B"], eos: Int[Array, "E"]) -> Bool[Array, "*B"]:
    return (tokens[..., None] == eos).any(-1)


def _emitted_tokens(tokens: Int[Array, "B N"], verdict: verify.Verdict) -> Int[Array, "B A"]:
    """Returns what a round would emit: the accepted tokens, then the bonus (to the end).

    A path of nodes 0 2 5 with bonus 9, A = 4, emits [token 2, token 5, 9, 9].
    """
    follows = jnp.take_along_axis(tokens, verdict.path[:, 1:], 1)
    follows = jnp.concatenate([follows, verdict.bonus[:, None]], 1)
    places = jnp.arange(follows.shape[1])
    return jnp.where(places < verdict.accepted[:, None], follows, verdict.bonus[:, None])


def _cut(
    emitting: Int[Array, "B A"], verdict: verify.Verdict, state: DecodeState
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Returns (how many of the tokens each row keeps, which rows have ended after that).

    A row keeps all accepted + 1 tokens unless its limit or an EOS among them comes first; a row
    that had ended keeps none.
    """
    places = jnp.arange(emitting.shape[1])
    ends = _is_eos(emitting, state.eos) & (places <= verdict.accepted[:, None])
    first_eos = ends.argmax(-1).astype(jnp.int32)  # an int64 in 64-bit mode
    up_to_eos = jnp.where(ends.any(-1), first_eos, verdict.accepted) + 1
    kept = jnp.minimum(up_to_eos, state.limits - state.emitted)
    kept = jnp.where(state.ended, 0, kept)
    saw_eos = (ends & (places < kept[:, None])).any(-1)
    return kept, state.ended | saw_eos | (state.emitted + kept >= state.limits)


def _commit(
    target, drafter, state, draft, proposal, of_round, emitting, verdict, ended
) -> DecodeState:
    kept = of_round.kept
    last = jnp.take_along_axis(emitting, jnp.maximum(kept - 1, 0)[:, None], 1)[:, 0]
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    depths = jnp.arange(state.histogram.shape[1])
    counted = (depths == verdict.accepted[:, None]) & ~state.ended[:, None]
    tries = jnp.arange(state.ranks.shape[2])
    ranks = jnp.minimum(verdict.ranks, len(tries) - 1)  # folding may have made more tries
    at_rank = (ranks[..., None] == tries) & ~state.ended[:, None, None]
    real = (
        jnp.broadcast_to(~token_tree.padding(proposal.parents), proposal.tokens.shape).sum(-1) - 1
    )
    of_drafter = state.drafter
    if drafter is not None:
        of_drafter = drafter.commit(target, state.drafter, draft, proposal, of_round)
    return state.replace(
        cache=of_round.cache,
        drafter=of_drafter,
        pending=jnp.where(kept > 0, last, state.pending),
        output=write(state.output, emitting, state.emitted),
        emitted=state.emitted + kept,
        ended=ended,
        histogram=state.histogram + counted,
        ranks=state.ranks.at[:, : at_rank.shape[1]].add(at_rank),
        nodes=state.nodes + jnp.where(state.ended, 0, real).astype(jnp.int32),
        rounds_left=state.rounds_left - 1,
    )
