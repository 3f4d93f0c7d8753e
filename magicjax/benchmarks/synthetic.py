"""Requests and states without prompts, and a drafter with synthetic acceptance, for timing.

Caches hold random numbers, because times do not depend on values, so no prompt is prefilled.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.decoding import loop
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.preparation import prepare
from magicjax.decoding.request import Request, RequestOptions
from magicjax.drafters import Drafter, SelfSpeculation
from magicjax.drafters.base import RoundOutcome, with_length
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.settings import StatsSpec
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Tree

FINAL_NORMS = {"norm", "final_norm"}  # parameter names in the model families


@struct.dataclass
class Synthetic(Drafter):
    """Proposes a chain of a known text with a given error rate; greedy decoding only.

    Attributes:
      inner: a drafter that runs for its cost; its proposals are dropped. None: nothing runs.
      text: int32 [B, M], prompts and their plain continuations; arbitrary where only time matters.
      rate: the probability that a token is right if those before it are; a scalar, or one number
        for each position of the text.
    """

    inner: Drafter | None
    text: Int[Array, "B M"]
    rate: Float[Array, "*M"]

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(target, tree, depth, context)

    def draw_methods(self, tree: Tree) -> set[str]:
        return {"top"}

    def stats_spec(self) -> StatsSpec:
        return StatsSpec() if self.inner is None else self.inner.stats_spec()

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return 0 if self.inner is None else self.inner.cache_bytes(target, batch, capacity)

    def state_bytes(self, batch: int) -> int:
        return 0 if self.inner is None else self.inner.state_bytes(batch)

    def prefill(self, target, tokens, cache, stats, settings, previous=None) -> Any:
        if self.inner is None:
            return None
        return self.inner.prefill(target, tokens, cache, stats, settings, previous)

    def propose(self, target, state, root, cache, sampling, settings) -> tuple[Proposal, Any]:
        draft, draft_tokens = None, root[:, None]
        if self.inner is not None:
            proposal, draft = self.inner.propose(target, state, root, cache, sampling, settings)
            draft_tokens = proposal.tokens
        gamma = settings.tree.depth
        positions = cache.lengths[:, None] + 1 + jnp.arange(gamma)
        positions = jnp.minimum(positions, self.text.shape[1] - 1)
        continuation = jnp.take_along_axis(self.text, positions, axis=1)
        # One number for each row and position, whichever rounds lead there.
        key = jax.random.key(0, impl="threefry2x32")
        draw = jax.vmap(jax.vmap(lambda r, p: jax.random.uniform(_fold(key, r, p)), (None, 0)))
        rate = jnp.broadcast_to(self.rate, self.text.shape[1:])[positions]
        is_correct = draw(jnp.arange(positions.shape[0]), positions) < rate
        vocabulary = target.config.vocab_size
        tokens = jnp.where(is_correct, continuation, (continuation + 1) % vocabulary)
        # Always 0, but the compiler cannot prove it and so must run the draft.
        zero = jnp.minimum(draft_tokens.min(1, keepdims=True), 0)
        tokens = jnp.concatenate([root[:, None], tokens + zero], axis=1)
        return Proposal(tokens, settings.tree.array), draft

    def commit(self, target, state, draft, proposal: Proposal, outcome: RoundOutcome) -> Any:
        if self.inner is None:
            return state
        return self.inner.commit(target, state, draft, proposal, outcome)


def _fold(key: Array, row: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, row), position)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings that all timings of a run share.

    Attributes:
      target: the model.
      backend: attention backend.
      new_tokens: per row of a loop.
    """

    target: Model
    backend: str | None = None
    new_tokens: int = 96


def synthetic_request(setup: Setup, batch: int, context: int, drafter: Any, tree: Any) -> Request:
    """Returns a request with prompts of `context` tokens; nothing runs."""
    rows = np.zeros((batch, context), np.int32)
    return prepare(
        setup.target,
        list(rows),
        SamplingParams(max_tokens=setup.new_tokens),
        RequestOptions(drafter=drafter, tree=tree, eos_token_id=[], backend=setup.backend),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns repeated random numbers, or zeros for an integer dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return jnp.resize(jax.random.normal(jax.random.key(0), (4096,), dtype), shape)


def synthetic_state(request: Request) -> loop.DecodeState:
    """Returns a state after prefill whose caches hold random numbers."""
    rows = jax.tree.map(jnp.array, request.rows.without_prompts())
    return filled(request, Decoder(request).state_shapes()).replace(
        rows=rows,
        emitted=jnp.ones_like(rows.limits),
        rounds=jnp.int32(0),
    )


def filled(request: Request, shapes: Any) -> Any:
    """Returns a state, or a part of it, with random numbers and the length of the prompts."""
    state = jax.tree.map(lambda x: _filled(x.shape, x.dtype), shapes)
    return with_length(state, len(request.prompts[0]))


def zero_logits(target: Model) -> Model:
    """Returns the target with a final norm of zeros: all logits are 0, the next token is 0.

    The text is then known in advance and the same in every pass. With the usual weights, passes of
    one and of several nodes round differently, and rows would diverge from the known text.

    Raises:
      ValueError: the model has no final norm.
    """

    def change(path, x):
        return jnp.zeros_like(x) if FINAL_NORMS & {key.key for key in path} else x

    params = jax.tree_util.tree_map_with_path(change, target.params)
    changed = zip(jax.tree.leaves(params), jax.tree.leaves(target.params), strict=True)
    if all(new is old for new, old in changed):
        raise ValueError(f"{target.name} has no final norm: synthetic acceptance needs one")
    return dataclasses.replace(target, params=params)


def synthetic_draft(setup: Setup, batch: int, context: int, budget: int, rate: float) -> Synthetic:
    """Returns a self-speculating draft with synthetic acceptance, for a `zero_logits` target."""
    text = jnp.zeros((batch, context + setup.new_tokens), jnp.int32)
    return Synthetic(SelfSpeculation(budget=budget), text, jnp.float32(rate))
