"""Sampling: one way of warping for target and drafts, and a random number of its own for each use.

A number's key is (seed, request, position, purpose, drafter, draw number), and no two uses share
one; the request is the row's place in the user's list. So a row's text does not depend on its
neighbours, a rerun is identical, and what the target draws for a position is the same whoever
drafts.
"""

import enum
import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from sharding import collectives
from sharding.collectives import Over

MAX_DRAFTERS = 64


class Purpose(enum.IntEnum):
    """What a random number is for. Target: a token of the text, at that token's own position.

    Draft and accept: keyed by the position of the round's root, which no other round shares.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


@struct.dataclass
class Sampling:
    """How each row samples.

    Attributes:
      temperature: float32 [B], above 0; logits are divided by it.
      top_k: int32 [B], how many most likely tokens are kept; 0: all.
      top_p: float32 [B], in (0, 1]; of what top_k left, the fewest most likely tokens whose
        probabilities reach top_p are kept; 1: all.
      keys: [B], each row's key, made of the seed and the request.
      top_k_used, top_p_used: static; whether any row uses it, which costs passes over the logits.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    keys: Array
    top_k_used: bool = struct.field(pytree_node=False)
    top_p_used: bool = struct.field(pytree_node=False)


def row_keys(seed: int, requests: Int[Array, "B"]) -> Array:
    """Returns a key for each request id."""
    # Not JAX's default: under another generator vmapped keys would not give independent numbers.
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(requests)


def warp(
    sampling: Sampling, logits: Float[Array, "B *N V"], over: Over = ()
) -> Float[Array, "B *N V"]:
    """Returns the probabilities to sample from: temperature, then top_k, then top_p.

    Computed in float32 (float64 for such logits). Tokens that tie with the last one kept are kept
    too, so the result does not depend on how a sort orders equals.

    Args:
      logits: of all tokens, or this device's part of them.
      over: the mesh axes that divide the vocabulary, here and in the functions below.
    """

    def of_row(x):
        return x.reshape(-1, *[1] * (logits.ndim - 1))

    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    scaled = logits.astype(dtype)
    highest = collectives.highest(scaled.max(-1, keepdims=True), over)
    scaled = scaled - highest  # or a low temperature would overflow
    scaled = scaled / of_row(sampling.temperature).astype(dtype)
    if sampling.top_k_used:
        vocab = logits.shape[-1] * collectives.devices(over)
        count = of_row(jnp.where(sampling.top_k == 0, vocab, jnp.minimum(sampling.top_k, vocab)))
        scaled = _keep(scaled, jnp.ones_like(scaled), count, over)
    p = collectives.softmax(scaled, over)
    if not sampling.top_p_used:
        return p
    mass = of_row(sampling.top_p).astype(dtype)
    kept = collectives.softmax(_keep(scaled, p, mass, over), over)
    return jnp.where(mass < 1, kept, p)  # at 1, rounding must not cut the tail


def _keep(
    scores: Float[Array, "*B V"],
    weights: Float[Array, "*B V"],
    wanted: Float[Array, "*B 1"],
    over: Over,
) -> Float[Array, "*B V"]:
    """Returns the highest scores, as few as weigh `wanted` together, and -inf for the others.

    Without sorting: the score of the last one kept is found bit by bit, the highest first. A pass
    over the vocabulary for each bit is some five times faster than XLA's sort on a CPU.
    """
    bits = jnp.finfo(scores.dtype).bits
    unsigned = jnp.uint64 if bits == 64 else jnp.uint32
    raw = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), unsigned)  # -0.0 is 0.0
    top = jnp.asarray(1 << (bits - 1), unsigned)
    ordered = jnp.where(raw & top, ~raw, raw | top)  # as integers, in the order of the scores

    def set_bit(i, last):
        higher = last | (top >> i.astype(unsigned))
        weight = jnp.where(ordered >= higher, weights, 0).sum(-1, keepdims=True)
        return jnp.where(collectives.total(weight, over) >= wanted, higher, last)

    last = jnp.zeros((*scores.shape[:-1], 1), unsigned)
    last = jax.lax.fori_loop(0, bits, set_bit, last)
    best = collectives.highest(ordered.max(-1, keepdims=True), over)
    last = jnp.minimum(last, best)  # the best is kept in any case
    return jnp.where(ordered >= last, scores, -jnp.inf)


def uniforms(
    keys: Array,
    position: Int[Array, "B *N"],
    purpose: Purpose,
    number: Int[Array, "B *N"] | int = 0,
    drafter: int = 0,
) -> Float[Array, "B *N 2"]:
    """Returns two random numbers in [0, 1) for each position and draw number: one draw's worth.

    Args:
      keys: [B], of the rows.
      position: in the row's text (see `Purpose`).
      purpose: what for.
      number: which draw it is of this drafter in this round.
      drafter: its place in an ensemble, below MAX_DRAFTERS.
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


def shares(vocab: int) -> int:
    """Returns into how many equal shares `sample` cuts a vocabulary: those of 2, 4, 8, 16 devices.

    As many as can be, up to 16, whether or not there are devices: the same token is drawn anyhow.
    """
    return math.gcd(vocab, 16)


def sample(
    probs: Float[Array, "*B V"], uniform: Float[Array, "*B 2"], over: Over = ()
) -> Int[Array, "*B"]:
    """Returns a token drawn from `probs`, which need not sum to 1.

    In two steps, each by its cumulated sums and its own number: a block of tokens, then a token of
    the block. A single number of 23 bits against the sums of a large vocabulary would be off by
    some thousandths in all (128k tokens). Blocks are as long as there are blocks, about, and none
    reaches over the end of a share. A token of probability 0 is never returned, whatever rounding
    does to the sums, unless all are 0.
    """
    vocab = probs.shape[-1] * collectives.devices(over)
    share, count = vocab // shares(vocab), shares(vocab) // collectives.devices(over)
    size = 1 << math.ceil(math.log2(vocab) / 2)
    blocks = -(-share // size)  # of a share
    pads = [(0, 0)] * probs.ndim + [(0, blocks * size - share)]
    probs = jnp.pad(probs.reshape(*probs.shape[:-1], count, share), pads)
    probs = probs.reshape(*probs.shape[:-2], count * blocks, size)
    block = _pick(collectives.joined(probs.sum(-1), over), uniform[..., 0])
    here = block - collectives.place(over) * count * blocks
    mine = (here >= 0) & (here < count * blocks)
    here = here.clip(0, count * blocks - 1)[..., None, None]
    inside = jnp.take_along_axis(probs, here, -2)[..., 0, :]
    picked = collectives.total(jnp.where(mine, _pick(inside, uniform[..., 1]), 0), over)
    return (block // blocks * share + block % blocks * size + picked).astype(jnp.int32)


def _pick(weights: Float[Array, "*B M"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Returns the first entry at which the cumulated weight passes that share of the whole."""
    reached = jnp.where(weights > 0, jnp.cumsum(weights, -1), 0)
    passed = reached > uniform[..., None] * reached.max(-1, keepdims=True)
    return passed.argmax(-1).astype(jnp.int32)


def without(
    q: Float[Array, "*B V"], token: Int[Array, "*B"], over: Over = ()
) -> Float[Array, "*B V"]:
    """Returns q with one token masked out, renormalised (zeros, if no other was left)."""
    rest = jnp.where(collectives.places(q, over) == token[..., None], 0, q)
    mass = collectives.total(rest.sum(-1, keepdims=True), over)
    return rest / jnp.where(mass > 0, mass, 1)


def draw(
    sampling: Sampling,
    q: Float[Array, "B T V"],
    count: int,
    replacement: bool,
    root_position: Int[Array, "B"],
    number: Int[Array, "T"],
    drafter: int,
    over: Over = (),
) -> tuple[Int[Array, "B T C"], Bool[Array, "B T C"]]:
    """Returns (`count` tokens drawn from each q, in the order drawn; which of them could be drawn).

    Without replacement, a q of fewer tokens than `count` runs out, and the rest are no draws.

    Args:
      number: the first draw number of each q; a q uses `count` of them.
      replacement: whether a token can be drawn twice.
    """
    tokens, live = [], []
    at = root_position[:, None]
    for i in range(count):
        u = uniforms(sampling.keys, at, Purpose.DRAFT, (number + i)[None], drafter)
        tokens.append(sample(q, u, over))
        live.append(collectives.highest(q.max(-1), over) > 0)
        if not replacement:
            q = without(q, tokens[-1], over)
    return jnp.stack(tokens, -1), jnp.stack(live, -1)


def attempt(
    p: Float[Array, "*B V"], q: Float[Array, "*B V"], token: Int[Array, "*B"], over: Over = ()
) -> tuple[Float[Array, "*B"], Float[Array, "*B V"]]:
    """Returns (the probability of accepting `token`, the distribution left if it is rejected).

    The rule of speculative sampling (arXiv 2211.17192): a token drawn from q is accepted with
    min(1, p / q), else the target's distribution becomes max(p - q, 0), normalised. SpecInfer's
    multi-step speculative sampling does so for one try after the other. A deterministic try is
    one whose q is all on it.
    """
    p_token, q_token = collectives.at(p, token, over), collectives.at(q, token, over)
    accept = jnp.minimum(p_token / jnp.where(q_token > 0, q_token, 1), 1)
    left = jnp.maximum(p - q, 0)
    mass = collectives.total(left.sum(-1, keepdims=True), over)
    return accept, jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), p)
