"""The decoding loop. One round, `step`, proposes, scores, verifies and commits.

`propose`, `score` and `verify_and_commit` are its parts; `magicjax.decoding.grammar_rounds` runs
them as programs of their own.

`prefill` runs the target over the prompts, or over what follows the tokens of a given cache, and
`init_state` builds the initial state. The state is immutable and holds everything that a round
reads or writes. `decode` runs rounds in one compiled `while_loop` until all rows have ended or
`max_rounds` have run; `step` runs one. In an engine, `magicjax.decoding.slots`
replaces rows of the state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.decoding.rows import Rows
from magicjax.drafters.base import Drafter, Previous, RoundOutcome, commit_checked
from magicjax.grammars import masking
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.model import Model
from magicjax.settings import PrefillSettings, Settings, StatsSpec
from magicjax.trees import token_tree
from magicjax.trees.proposal import Proposal
from magicjax.verification import logits_processor, verify
from magicjax.verification.logits_processor import LogitsProcessor
from magicjax.verification.logprobs import LogProbs, log_probs
from magicjax.verification.sampling import Purpose, Sampling, sample, uniforms, warp
from sharding import collectives

ALL_ROUNDS = 2**31 - 1
NAN = -1  # in place of a first token that NaN logits would choose


@struct.dataclass
class Prefilled:
    """The results of prefill besides the target's cache.

    Attributes:
      first: int32 [B], each row's first new token; NAN: its logits are NaN.
      stats: the target's attention over the prompts.
      logprobs: [B, 1], of the first tokens; None if they are not computed.
      processor: processes the rows' logits, after the first tokens; None without.
    """

    first: Int[Array, "B"]
    stats: ModelStats
    logprobs: LogProbs | None
    processor: LogitsProcessor | None


@struct.dataclass
class DecodeState:
    """The state between two rounds.

    Attributes:
      rows: without the prompts; the processor is after the pending tokens.
      cache: the target's; holds the prompt and the emitted tokens except the pending one.
      drafter: the drafter's own state.
      pending: int32 [B], the newest emitted token; its keys and values are in no cache yet.
      output: int32 [B, max_tokens + A], emitted tokens; undefined from `emitted` on.
      emitted: int32 [B], number of emitted tokens.
      ended: bool [B]; without EOS and before its limit, a row ends at a node with NaN logits.
      histogram: int32 [B, A], number of rounds of the row that accepted 0, 1, … A-1 drafted tokens.
      ranks: int32 [B, A, W], number of rounds whose path continued, at each depth, with a node's
        1st, 2nd, … W-th or later try; 0 at the last depth.
      nodes: int32 [B], number of proposed nodes without padding and roots.
      rounds: int32 [], number of rounds since the newest call of `decode` began; on a mesh the
        largest number of any group.
      logprobs: [B, max_tokens + A], of the tokens in `output`; None if they are not computed.
    """

    rows: Rows
    cache: KVCache
    drafter: Any
    pending: Int[Array, "B"]
    output: Int[Array, "B M"]
    emitted: Int[Array, "B"]
    ended: Bool[Array, "B"]
    histogram: Int[Array, "B A"]
    ranks: Int[Array, "B A W"]
    nodes: Int[Array, "B"]
    rounds: Int[Array, ""]
    logprobs: LogProbs | None


@struct.dataclass
class Proposed:
    """The drafter's part of a round.

    Attributes:
      proposal: with tokens of the vocabulary; only the root in rows that do not speculate.
      draft: what the drafter's `commit` needs besides.
    """

    proposal: Proposal
    draft: Any


@struct.dataclass
class Scored:
    """The target's pass over the nodes of a round.

    Attributes:
      logits: [B, N, V], after the rows' processor, except for the end of their reasoning.
      kv, queries, layer_inputs: one per node, as in `RoundOutcome`.
      is_nan: bool [B, N], whether the logits are NaN before they are processed.
    """

    logits: Float[Array, "B N V"]
    kv: Any
    queries: Any
    layer_inputs: Any
    is_nan: Bool[Array, "B N"]


def prefill(
    settings: PrefillSettings,
    target: Model,
    rows: Rows,
    cache: KVCache | None = None,
    layer_inputs: dict[int, Array] | None = None,
) -> tuple[KVCache, Prefilled]:
    """Returns the target's cache of the prompts, and the other results of prefill.

    Given a cache of the first tokens of each row, only the other tokens are computed. Inputs of
    layers can be those of earlier calls, to which these tokens are added.
    """
    cache, last, stats = prefill_cache(
        target, rows.tokens, rows.lengths, settings, settings.stats_spec, cache, layer_inputs
    )
    return cache, _prefilled(settings, target, last, rows, stats)


def prompt_logprobs(
    settings: PrefillSettings,
    target: Model,
    rows: Rows,
    cache: KVCache | None = None,
) -> LogProbs:
    """Returns the log-probabilities [B, T] of the prompts' tokens, by a pass of its own.

    Entry t is of token t + 1, given those up to t; from `lengths` - 1 on it is undefined.

    Args:
      settings: with `logprobs`, and the statistics of the last layer's outputs.
      target: the model.
      rows: with the prompts.
      cache: without tokens, so that one program serves all lengths; None: of `settings.capacity`.
    """
    assert settings.logprobs is not None
    (last_layer,) = settings.stats_spec.layer_inputs
    chunk = settings.chunk
    count = settings.logprobs
    shape = rows.tokens.shape
    _, _, stats = prefill_cache(
        target, rows.tokens, rows.lengths, settings, settings.stats_spec, cache
    )
    hidden = stats.layer_inputs[last_layer]
    next_tokens = jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, 1)))

    def chunk_of(x, i):
        return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, 1)

    def write_chunk(x, new, i):
        return jax.lax.dynamic_update_slice_in_dim(x, new, i * chunk, 1)

    def run_chunk(i, logprobs):
        logits = target.unembed(chunk_of(hidden, i))
        new = log_probs(logits, chunk_of(next_tokens, i), count, target.split.axes)
        return jax.tree.map(lambda x, new: write_chunk(x, new, i), logprobs, new)

    empty = LogProbs(
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, count), jnp.float32),
        jnp.zeros((*shape, count), jnp.int32),
    )
    chunks = shape[1] // chunk if cache is None else -(-rows.lengths.max() // chunk)
    return jax.lax.fori_loop(0, chunks, run_chunk, empty)


def init_state(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    cache: KVCache,
    prefilled: Prefilled,
    rows: Rows,
    previous: Previous | None = None,
) -> DecodeState:
    """Returns the state after prefill; each row's first token is emitted and pending.

    If `prefill` was given a cache, `previous` is the drafter's state of the same text.
    """
    drafter_state = None
    if drafter is not None:
        drafter_state = drafter.prefill(
            target, rows.tokens, cache, prefilled.stats, settings, previous
        )
    is_nan = prefilled.first == NAN
    first = jnp.where(is_nan, 0, prefilled.first)
    batch = first.shape[0]
    path_length = settings.shape.depth + 1
    output_length = settings.max_tokens + path_length

    def buffer(x):  # [B, 1, ...]
        return jnp.zeros((batch, output_length, *x.shape[2:]), x.dtype).at[:, 0].set(x[:, 0])

    emitted = jnp.where(is_nan, 0, 1).astype(jnp.int32)
    return DecodeState(
        rows=dataclasses.replace(rows.without_prompts(), processor=prefilled.processor),
        cache=cache,
        drafter=drafter_state,
        pending=first,
        output=buffer(first[:, None]),
        emitted=emitted,
        ended=is_nan | _is_eos(first[:, None], rows.eos)[:, 0] | (emitted >= rows.limits),
        histogram=jnp.zeros((batch, path_length), jnp.int32),
        ranks=jnp.zeros((batch, path_length, max(1, settings.shape.width)), jnp.int32),
        nodes=jnp.zeros(batch, jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
        logprobs=jax.tree.map(buffer, prefilled.logprobs),
    )


def _prefilled(
    settings: PrefillSettings,
    target: Model,
    hidden: Float[Array, "B E"],
    rows: Rows,
    stats: ModelStats,
) -> Prefilled:
    """Returns the first tokens, chosen from the hidden states of the prompts' last tokens."""
    logits = target.unembed(hidden)
    axis_names = target.split.axes
    processor = rows.processor
    is_nan = _is_nan(logits)
    if processor is not None:  # the text is empty: no token is at the root
        root = jnp.full_like(rows.lengths, logits_processor.NO_TOKEN)[:, None]
        parents = token_tree.ROOT_ONLY.array
        emitted = jnp.zeros_like(rows.lengths)
        logits = logits_processor.process(
            processor, logits[:, None], root, parents, emitted, rows.eos, axis_names
        )[:, 0]
    if rows.allowed is not None:
        logits = masking.mask(logits, rows.allowed, target.config.vocab_size, axis_names)
    if processor is not None:
        logits = logits_processor.end_reasoning(
            processor, logits[:, None], root, parents, emitted, axis_names
        )[:, 0]
    if rows.sampling is None:
        first = collectives.argmax(logits, axis_names)
    else:
        u = uniforms(rows.sampling.keys, rows.lengths, Purpose.TARGET)
        first = sample(warp(rows.sampling, logits, axis_names), u, axis_names)
    first = target.layout.broadcast_decision(jnp.where(is_nan, NAN, first))
    logprobs = None
    if settings.logprobs is not None:
        logprobs = log_probs(logits[:, None], first[:, None], settings.logprobs, axis_names)
    if processor is not None:
        processor = logits_processor.with_tokens(processor, first[:, None], jnp.ones_like(first))
    return Prefilled(first, stats, logprobs, processor)


def step(
    settings: Settings, target: Model, drafter: Drafter | None, state: DecodeState
) -> DecodeState:
    """Returns the state after one round, in which every active row emits 1 to A tokens."""
    proposed = propose(settings, target, drafter, state)
    scored = score(settings, target, drafter, state, proposed)
    return verify_and_commit(settings, target, drafter, state, proposed, scored)


def propose(
    settings: Settings, target: Model, drafter: Drafter | None, state: DecodeState
) -> Proposed:
    """Returns the nodes of a round; without a drafter, the roots."""
    with jax.named_scope("propose"):
        if drafter is None:
            proposal = Proposal(state.pending[:, None], token_tree.ROOT_ONLY.array)
            draft = None
        else:
            proposed = drafter.propose(
                target,
                state.drafter,
                state.pending,
                _live_cache(state),
                _live_sampling(state),
                settings,
            )
            proposal, draft = _validated_proposal(proposed, type(drafter).__name__, state)
            proposal = proposal.in_vocabulary(state.pending, target.config.vocab_size)
        decision = target.layout.broadcast_decision((proposal.tokens, proposal.parents))
        proposal = dataclasses.replace(proposal, tokens=decision[0], parents=decision[1])
        return Proposed(proposal.root_only(state.ended | ~state.rows.speculative), draft)


def score(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    proposed: Proposed,
) -> Scored:
    """Returns the target's logits of all nodes, by one pass."""
    proposal, without_draft = proposed.proposal, state.ended | ~state.rows.speculative
    with jax.named_scope("score"):
        positions = state.cache.lengths[:, None] + token_tree.depths(proposal.parents)
        mask = jnp.asarray(token_tree.ancestor_mask(proposal.parents))
        stats_spec = StatsSpec() if drafter is None else drafter.stats_spec()
        positions = jnp.broadcast_to(positions, proposal.tokens.shape)
        # Nodes without tokens and rows that have ended are zeros. Without biases after the
        # attention and learned positions they remain zeros, which native products skip.
        is_root = jnp.arange(proposal.tokens.shape[1]) == 0
        empty = token_tree.padding(proposal.parents) | (without_draft[:, None] & ~is_root)
        live = ~(state.ended[:, None] | empty)
        tokens = proposal.tokens
        if target.empty_token is not None:
            tokens = jnp.where(live, tokens, target.empty_token)
        attend = AttendTo(
            _live_cache(state),
            mask,
            settings.backend,
            stats_spec.rounds,
            positions=positions,
            live=live,
        )
        hidden, aux, layer_inputs = target(tokens, positions, attend, stats_spec.layer_inputs)
        kv, queries = zip(*aux, strict=True)
        logits = target.unembed(hidden)
        is_nan = _is_nan(logits)
        if state.rows.processor is not None:
            logits = logits_processor.process(
                state.rows.processor,
                logits,
                proposal.tokens,
                proposal.parents,
                state.emitted,
                state.rows.eos,
                target.split.axes,
            )
        return Scored(logits, kv, queries, layer_inputs, is_nan)


def verify_and_commit(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    proposed: Proposed,
    scored: Scored,
) -> DecodeState:
    """Returns the state after a round, whose accepted tokens are emitted."""
    proposal, logits = proposed.proposal, scored.logits
    with jax.named_scope("verify"):
        if state.rows.processor is not None:
            logits = logits_processor.end_reasoning(
                state.rows.processor,
                logits,
                proposal.tokens,
                proposal.parents,
                state.emitted,
                target.split.axes,
            )
        result = verify.verify_tree(
            settings.verifier,
            logits,
            proposal,
            settings.shape.depth,
            _live_sampling(state),
            state.cache.lengths,
            target.split.axes,
        )
        result = target.layout.broadcast_decision(result)
        is_nan = jnp.take_along_axis(scored.is_nan, result.path, 1)
        tokens = result.emitted(proposal.tokens)
        committed, ended = _truncate(tokens, result, state)
        up_to_nan = jnp.where(is_nan.any(-1), is_nan.argmax(-1).astype(jnp.int32), committed)
        committed, ended = jnp.minimum(committed, up_to_nan), ended | is_nan.any(-1)
        logprobs = None
        if settings.logprobs is not None:
            logprobs = _logprobs_if_wanted(settings, target, state, result, logits, tokens)
    with jax.named_scope("commit"):
        committed = committed + full_cache.zero_after(result.bonus)
        cache = full_cache.append(state.cache, scored.kv, result.path, committed)
        outcome = RoundOutcome(
            path=result.path,
            committed=committed,
            kv=scored.kv,
            queries=scored.queries,
            layer_inputs=scored.layer_inputs,
            cache=cache,
            backend=settings.backend,
        )
        if drafter is not None:
            drafter_state = commit_checked(
                drafter, target, state.drafter, proposed.draft, proposal, outcome
            )
            state = dataclasses.replace(state, drafter=drafter_state)
        state = _count(state, proposal, result)
        state = _emit(dataclasses.replace(state, cache=cache), tokens, logprobs, committed, ended)
        if state.rows.processor is not None:
            processor = logits_processor.with_tokens(state.rows.processor, tokens, committed)
            rows = dataclasses.replace(state.rows, processor=processor)
            state = dataclasses.replace(state, rows=rows)
        return state


def _live_cache(state: DecodeState) -> KVCache:
    """Returns the target's cache, of length 0 in rows that have ended."""
    lengths = jnp.where(state.ended, 0, state.cache.lengths)
    return dataclasses.replace(state.cache, lengths=lengths)


def _live_sampling(state: DecodeState) -> Sampling | None:
    return None if state.rows.sampling is None else state.rows.sampling.only(~state.ended)


def _logprobs_if_wanted(
    settings: Settings,
    target: Model,
    state: DecodeState,
    result: verify.VerifyResult,
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B A"],
) -> LogProbs:
    """Returns the log-probabilities of the tokens of a round; zeros if no row wants them."""

    def compute():
        assert settings.logprobs is not None
        path_logits = result.along_path(logits)
        return log_probs(path_logits, tokens, settings.logprobs, target.split.axes)

    shapes = jax.eval_shape(compute)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond((state.rows.wants_logprobs & ~state.ended).any(), compute, lambda: zeros)


def decode(
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    max_rounds: Int[Array, ""],
) -> DecodeState:
    """Returns the state after all rows have ended or `max_rounds` rounds have run.

    Runs one `while_loop` without host synchronization. The state may have been created for a deeper
    tree than the settings'.
    """

    def cond(state):
        return ~state.ended.all()

    return run_while(cond, settings, target, drafter, state, max_rounds)


def run_while(
    cond: Callable,
    settings: Settings,
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    max_rounds: Int[Array, ""],
) -> DecodeState:
    """Returns the state after `max_rounds` rounds, or when `cond` of it is false."""

    def any_running(state):
        return target.layout.any_running(cond(state)) & (state.rounds < max_rounds)

    state = dataclasses.replace(state, rounds=jnp.zeros_like(state.rounds))

    def body(state):
        return step(settings, target, drafter, state)

    state = jax.lax.while_loop(any_running, body, state)
    rounds = collectives.pmax(state.rounds, settings.data_axes)
    return dataclasses.replace(state, rounds=rounds)


def _validated_proposal(proposed: Any, name: str, state: DecodeState) -> tuple[Proposal, Any]:
    """Returns what a drafter proposes, if its types and shapes are right; runs while tracing.

    Raises:
      TypeError: they are not.
    """
    if not (isinstance(proposed, tuple) and len(proposed) == 2):
        raise TypeError(
            f"{name}.propose returned {type(proposed).__name__}: return (Proposal, what "
            "`commit` needs of it)"
        )
    proposal, rows = proposed[0], len(state.pending)
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{name}.propose returned {type(proposal).__name__}, not a Proposal")
    tokens, nodes = proposal.tokens, proposal.parents.shape[-1]
    if tokens.shape != (rows, nodes) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(
            f"{name}.propose returned tokens {tokens.dtype}{list(tokens.shape)} for parents of "
            f"{nodes} nodes: they must be int32 [rows, nodes] = {[rows, nodes]}"
        )
    if state.rows.sampling is not None and nodes > 1 and proposal.draws is None:
        raise TypeError(
            f"{name}.propose returned no draws under sampling: give Proposal its draws, for "
            "tokens that are not drawn at random `magicjax.trees.proposal.deterministic_draws`"
        )
    return proposed


def _is_nan(logits: Float[Array, "*B V"]) -> Bool[Array, "*B"]:
    """Returns where logits are NaN: a hidden state that is not finite makes all of them NaN."""
    return jnp.isnan(logits[..., 0])


def _is_eos(tokens: Int[Array, "B A"], eos: Int[Array, "B E"]) -> Bool[Array, "B A"]:
    return (tokens[..., None] == eos[:, None]).any(-1)


def _truncate(
    tokens: Int[Array, "B A"], result: verify.VerifyResult, state: DecodeState
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Returns the number of tokens that each row keeps, and which rows have ended.

    A row keeps all accepted + 1 tokens unless it reaches an EOS or its limit; a row that had ended
    keeps none.
    """
    steps = jnp.arange(tokens.shape[1])
    is_eos = _is_eos(tokens, state.rows.eos) & (steps <= result.accepted[:, None])
    first_eos = is_eos.argmax(-1).astype(jnp.int32)  # int64 in 64-bit mode
    up_to_eos = jnp.where(is_eos.any(-1), first_eos, result.accepted) + 1
    committed = jnp.minimum(up_to_eos, state.rows.limits - state.emitted)
    committed = jnp.where(state.ended, 0, committed)
    reached_eos = (is_eos & (steps < committed[:, None])).any(-1)
    return committed, state.ended | reached_eos | (state.emitted + committed >= state.rows.limits)


def _count(state: DecodeState, proposal: Proposal, result: verify.VerifyResult) -> DecodeState:
    """Returns the state with the counters of a round added, before its tokens are."""
    active = ~state.ended
    speculates = active & state.rows.speculative
    depths = jnp.arange(state.histogram.shape[1])
    accepted = (depths == result.accepted[:, None]) & active[:, None]
    tries = jnp.arange(state.ranks.shape[2])
    ranks = jnp.minimum(result.ranks, len(tries) - 1)  # folding may have made more tries
    at_rank = (ranks[..., None] == tries) & active[:, None, None]
    nodes = jnp.broadcast_to(~token_tree.padding(proposal.parents), proposal.tokens.shape).sum(-1)
    return dataclasses.replace(
        state,
        histogram=state.histogram + accepted,
        ranks=state.ranks.at[:, : at_rank.shape[1]].add(at_rank),
        nodes=state.nodes + jnp.where(speculates, nodes - 1, 0).astype(jnp.int32),
        rounds=state.rounds + 1,
    )


def _emit(
    state: DecodeState,
    tokens: Int[Array, "B A"],
    logprobs: LogProbs | None,
    committed: Int[Array, "B"],
    ended: Bool[Array, "B"],
) -> DecodeState:
    """Returns the state with `committed` tokens of each row emitted, the last one pending."""
    last = jnp.take_along_axis(tokens, jnp.maximum(committed - 1, 0)[:, None], 1)[:, 0]
    write = jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice_in_dim(row, new, i, 0))
    output, logprobs = jax.tree.map(
        lambda old, new: write(old, new, state.emitted),
        (state.output, state.logprobs),
        (tokens, logprobs),
    )
    return dataclasses.replace(
        state,
        pending=jnp.where(committed > 0, last, state.pending),
        output=output,
        emitted=state.emitted + committed,
        ended=ended,
        logprobs=logprobs,
    )
