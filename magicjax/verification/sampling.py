"""Sampling: warping of target and drafts, and an independent random number for each use.

A number's key is (seed, request, position, purpose, drafter, draw number), and no two uses share
one; the request is the row's index in the user's list of prompts. So a row's text does not depend
on other rows, a rerun is identical, and the target's draw for a position does not depend on the
drafter.
"""

import dataclasses
import enum
import math
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from sharding import collectives
from sharding.collectives import AxisNames

MAX_DRAFTERS = 64


class Purpose(enum.IntEnum):
    """What a random number is for.

    A number of the target is keyed by the position of the sampled token, one of a draft or of an
    acceptance by the position of the round's root, which no other round shares.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


@struct.dataclass
class Sampling:
    """How each row samples.

    Attributes:
      temperature: float32 [B], above 0; logits are divided by it.
      top_k: int32 [B], how many of the most likely tokens are kept; 0: all.
      top_p: float32 [B], in (0, 1]; after top_k, the fewest most likely tokens whose probabilities
        sum to at least top_p are kept; 1: all.
      min_p: float32 [B], tokens whose probability is below min_p times the highest one are left
        out, before top_k; 0: none.
      top_n_sigma: float32 [B], tokens whose logits are more than top_n_sigma standard deviations
        below the highest one are excluded, before the temperature; 0: none.
      keys: [B], each row's key, from the seed and the request.
      top_k_used, top_p_used: static; whether any row may use it: top_k above 1 and top_p cost
        passes over the logits in rounds in which a row does, and so does top_n_sigma.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    top_n_sigma: Float[Array, "B"]
    keys: Array
    top_k_used: bool = struct.field(pytree_node=False)
    top_p_used: bool = struct.field(pytree_node=False)

    def only(self, rows: Bool[Array, "B"]) -> Self:
        """Returns the same without filters in other rows, where they would cost."""
        top_k, top_p = jnp.where(rows, self.top_k, 0), jnp.where(rows, self.top_p, 1)
        top_n_sigma = jnp.where(rows, self.top_n_sigma, 0)
        return dataclasses.replace(self, top_k=top_k, top_p=top_p, top_n_sigma=top_n_sigma)


@jax.jit  # each request of an engine has a key of its own
def row_keys(seeds: Int[Array, "*B"], requests: Int[Array, "B"]) -> Array:
    """Returns a key for each request id, from one seed or one for each."""

    def key(seed, request):
        # Explicit, because vmapped keys of other generators do not give independent numbers.
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request)

    return jax.vmap(key)(jnp.broadcast_to(seeds, requests.shape), requests)


def warp(
    sampling: Sampling, logits: Float[Array, "B *N V"], axis_names: AxisNames = ()
) -> Float[Array, "B *N V"]:
    """Returns the probabilities to sample from.

    The order is top_n_sigma, temperature, min_p, top_k, top_p. Computed in float32 (float64 for
    such logits). Tokens that tie with the last one kept are kept too, so the result does not depend
    on the order of a sort.

    Args:
      sampling: the rows' sampling parameters.
      logits: logits of all tokens, or of this device's shard.
      axis_names: the mesh axes that shard the vocabulary, here and in the functions below.
    """

    def per_row(x):
        return x.reshape(-1, *[1] * (logits.ndim - 1))

    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    scaled = logits.astype(dtype)
    highest = collectives.pmax(scaled.max(-1, keepdims=True), axis_names)
    scaled = scaled - highest  # a low temperature cannot overflow
    sigmas = per_row(sampling.top_n_sigma).astype(dtype)
    scaled = jax.lax.cond(
        (sigmas > 0).any(),
        lambda: jnp.where(sigmas > 0, _keep_near(scaled, sigmas, axis_names), scaled),
        lambda: scaled,
    )
    scaled = scaled / per_row(sampling.temperature).astype(dtype)
    least = jnp.log(per_row(sampling.min_p).astype(dtype))  # the highest one is 0
    scaled = jnp.where(scaled >= least, scaled, -jnp.inf)
    if sampling.top_k_used:
        vocab = logits.shape[-1] * collectives.axis_size(axis_names)
        count = per_row(jnp.where(sampling.top_k == 0, vocab, jnp.minimum(sampling.top_k, vocab)))
        scaled = jnp.where((count > 1) | (scaled == 0), scaled, -jnp.inf)  # the highest one is 0
        scaled = jax.lax.cond(
            ((count > 1) & (count < vocab)).any(),
            lambda: _keep_highest(scaled, jnp.ones_like(scaled), count, axis_names),
            lambda: scaled,
        )
    p = collectives.softmax(scaled, axis_names)
    if not sampling.top_p_used:
        return p
    mass = per_row(sampling.top_p).astype(dtype)

    def most_likely():
        kept = collectives.softmax(_keep_highest(scaled, p, mass, axis_names), axis_names)
        return jnp.where(mass < 1, kept, p)  # at top_p = 1, rounding must not cut the tail

    return jax.lax.cond((mass < 1).any(), most_likely, lambda: p)


def _keep_near(
    logits: Float[Array, "*B V"], sigmas: Float[Array, "*B 1"], axis_names: AxisNames
) -> Float[Array, "*B V"]:
    """Returns the logits at most `sigmas` standard deviations below the highest, -inf for others.

    The highest one is 0. Tokens that are excluded already, with -inf, do not count. Source: top-nσ
    (arXiv 2411.07641), as llama.cpp computes it.
    """
    counted = logits > -jnp.inf

    def mean(x):
        total = collectives.psum(jnp.where(counted, x, 0).sum(-1, keepdims=True), axis_names)
        return total / collectives.psum(counted.sum(-1, keepdims=True), axis_names)

    deviation = jnp.sqrt(mean((logits - mean(logits)) ** 2))
    return jnp.where(logits >= -sigmas * deviation, logits, -jnp.inf)


def _keep_highest(
    scores: Float[Array, "*B V"],
    weights: Float[Array, "*B V"],
    total: Float[Array, "*B 1"],
    axis_names: AxisNames,
) -> Float[Array, "*B V"]:
    """Returns the fewest highest scores whose weights sum to `total`, and -inf for the others.

    The lowest score that is kept is found bit by bit, the highest bit first. One pass over the
    vocabulary for each bit is about five times faster than XLA's sort on a CPU.
    """
    bits = jnp.finfo(scores.dtype).bits
    unsigned = jnp.uint64 if bits == 64 else jnp.uint32
    raw = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), unsigned)  # -0.0 is 0.0
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    ordered = jnp.where(raw & sign, ~raw, raw | sign)  # integers in the order of the scores

    def set_bit(i, lowest):
        higher = lowest | (sign >> i.astype(unsigned))
        weight = jnp.where(ordered >= higher, weights, 0).sum(-1, keepdims=True)
        return jnp.where(collectives.psum(weight, axis_names) >= total, higher, lowest)

    lowest = jnp.zeros((*scores.shape[:-1], 1), unsigned)
    lowest = jax.lax.fori_loop(0, bits, set_bit, lowest)
    best = collectives.pmax(ordered.max(-1, keepdims=True), axis_names)
    return jnp.where(ordered >= jnp.minimum(lowest, best), scores, -jnp.inf)  # keeps at least one


def uniforms(
    keys: Array,
    position: Int[Array, "B *N"],
    purpose: Purpose,
    number: Int[Array, "B *N"] | int = 0,
    drafter: int = 0,
) -> Float[Array, "B *N 2"]:
    """Returns two random numbers in [0, 1) for each position and draw number.

    Args:
      keys: [B], of the rows.
      position: in the row's text (see `Purpose`).
      purpose: what the numbers are for.
      number: the index of the draw among this drafter's draws of the round.
      drafter: its index in the ensemble, below MAX_DRAFTERS.
    """
    shape = jnp.broadcast_shapes(position.shape, jnp.shape(number))
    position = jnp.broadcast_to(position, shape)
    code = jnp.broadcast_to(number, shape) * MAX_DRAFTERS * len(Purpose)
    code = code + drafter * len(Purpose) + int(purpose)

    def one(key, position, code):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, position), code), (2,))

    for _ in shape[1:]:
        one = jax.vmap(one, (None, 0, 0))
    return jax.vmap(one)(keys, position, code)


def keys_within_round(keys: Array, position: Int[Array, "B"]) -> Array:
    """Returns a key for each row, of the numbers for drafts that are verified within a round.

    They share no key with those of the round, whose positions and purposes are the same.

    Args:
      keys: [B], of the rows.
      position: position of the round's root.
    """
    fold_in = jax.vmap(jax.random.fold_in)
    return fold_in(fold_in(keys, position), jnp.full_like(position, -1))  # no code of `uniforms`


def shares(vocab: int) -> int:
    """Returns how many equal shares `sample` divides a vocabulary into: a power of two up to 16.

    It does not depend on the number of devices, so 1 to 16 of them draw the same tokens.
    """
    return math.gcd(vocab, 16)


def sample(
    probs: Float[Array, "*B V"], uniform: Float[Array, "*B 2"], axis_names: AxisNames = ()
) -> Int[Array, "*B"]:
    """Returns a token drawn from `probs`, which need not sum to 1.

    The first number draws a block of tokens by the cumulative sum of blocks, the second a token of
    the block. A single number has 23 bits and would be off by some thousandths in total for 128k
    tokens. Blocks have about sqrt(V) tokens, and each lies within one share of the vocabulary. A
    token of probability 0 is never returned, despite rounding, unless all are 0.
    """
    vocab = probs.shape[-1] * collectives.axis_size(axis_names)
    share, count = vocab // shares(vocab), shares(vocab) // collectives.axis_size(axis_names)
    size = 1 << math.ceil(math.log2(vocab) / 2)
    blocks = -(-share // size)  # of a share
    pads = [(0, 0)] * probs.ndim + [(0, blocks * size - share)]
    probs = jnp.pad(probs.reshape(*probs.shape[:-1], count, share), pads)
    probs = probs.reshape(*probs.shape[:-2], count * blocks, size)
    block = _pick(collectives.all_gather(probs.sum(-1), axis_names), uniform[..., 0])
    local_block = block - collectives.axis_index(axis_names) * count * blocks
    is_local = (local_block >= 0) & (local_block < count * blocks)
    local_block = local_block.clip(0, count * blocks - 1)[..., None, None]
    inside = jnp.take_along_axis(probs, local_block, -2)[..., 0, :]
    picked = collectives.psum(jnp.where(is_local, _pick(inside, uniform[..., 1]), 0), axis_names)
    return (block // blocks * share + block % blocks * size + picked).astype(jnp.int32)


def _pick(weights: Float[Array, "*B M"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Returns the first entry whose cumulative weight exceeds `uniform` times the total."""
    reached = jnp.where(weights > 0, jnp.cumsum(weights, -1), 0)
    passed = reached > uniform[..., None] * reached.max(-1, keepdims=True)
    return passed.argmax(-1).astype(jnp.int32)


def remove_token(
    q: Float[Array, "*B V"], token: Int[Array, "*B"], axis_names: AxisNames = ()
) -> Float[Array, "*B V"]:
    """Returns q with one token removed, renormalized; zeros if it had no other token."""
    masked = jnp.where(collectives.global_indices(q, axis_names) == token[..., None], 0, q)
    mass = collectives.psum(masked.sum(-1, keepdims=True), axis_names)
    return masked / jnp.where(mass > 0, mass, 1)


def draw(
    sampling: Sampling,
    q: Float[Array, "B T V"],
    count: int,
    replacement: bool,
    root_position: Int[Array, "B"],
    number: Int[Array, "T"],
    drafter: int,
    axis_names: AxisNames = (),
) -> tuple[Int[Array, "B T C"], Bool[Array, "B T C"]]:
    """Returns `count` tokens drawn from each q, in order, and which of them could be drawn.

    Without replacement, a q of fewer tokens than `count` runs out. `number` is the index of each
    q's first random number; it uses `count` of them.
    """
    tokens, live = [], []
    for i in range(count):
        index = (number + i)[None]
        u = uniforms(sampling.keys, root_position[:, None], Purpose.DRAFT, index, drafter)
        tokens.append(sample(q, u, axis_names))
        live.append(collectives.pmax(q.max(-1), axis_names) > 0)
        if not replacement:
            q = remove_token(q, tokens[-1], axis_names)
    return jnp.stack(tokens, -1), jnp.stack(live, -1)


def accept_or_residual(
    p: Float[Array, "*B V"],
    q: Float[Array, "*B V"],
    token: Int[Array, "*B"],
    axis_names: AxisNames = (),
) -> tuple[Float[Array, "*B"], Float[Array, "*B V"]]:
    """Returns the probability of accepting `token`, and the residual distribution if rejected.

    The rule of speculative sampling (arXiv 2211.17192): a token drawn from q is accepted with
    probability min(1, p / q); if rejected, the target's distribution becomes max(p - q, 0),
    normalized. Multi-step speculative sampling (SpecInfer) applies it to one draw after the other.
    A token that was not drawn at random has a one-hot q.
    """
    p_token, q_token = (collectives.take_global(x, token, axis_names) for x in (p, q))
    accept = jnp.minimum(p_token / jnp.where(q_token > 0, q_token, 1), 1)
    residual = jnp.maximum(p - q, 0)
    mass = collectives.psum(residual.sum(-1, keepdims=True), axis_names)
    return accept, jnp.where(mass > 0, residual / jnp.where(mass > 0, mass, 1), p)
