"""Positions: rotary (RoPE), learned, or biases of the scores (ALiBi).

The rotation splits a head in halves (GPT-NeoX order), as Hugging Face checkpoints do. It may leave
the end of a head unchanged.

With ALiBi, scores have a bias that is linear in the distance of query and key. Softmax does not
change if a number is added to all scores of a query, so slope * (the key's position) is enough. It
is the product of two more elements of queries and keys. A cached key thus has its own position, and
neither attention backends nor caches have a case for ALiBi. With head size 2 and position 600, a
key (k0, k1) becomes (k0, k1, 2, 88), because 600 = 2 * 256 + 88 and both numbers are exact in
bfloat16; the query has 256 * slope and slope there, rounded to its dtype.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sharding import Split, collectives

ALIBI_BASE = 256  # bfloat16 represents integers up to 256
ALIBI_COLUMNS = 2
ALIBI_POSITIONS = ALIBI_BASE * ALIBI_BASE
KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary settings of a model, with Hugging Face's terms.

    Attributes:
      theta: the base; pair i of a head of size D rotates by theta**(-2i/D) radians per position.
      kind: one of `KINDS`.
      partial_rotary_factor: the part of a head that rotates; "D" above is its size. Of kind
        proportional, D is the size of the head, of whose pairs the first part rotates (Gemma 4).
      factor: ratio of the scaled to the original context (all kinds but default).
      original_max_positions: the original context (llama3, yarn, longrope).
      low_freq_factor, high_freq_factor: bounds of the band that llama3 interpolates.
      beta_fast, beta_slow: rotations over the original context that bound yarn's ramp.
      attention_factor: the factor on cosine and sine (yarn, longrope); None: yarn has
        0.1 ln(factor) + 1, or with `mscale` and `mscale_all_dim` the ratio of their factors;
        longrope has sqrt(1 + ln(factor) / ln(original_max_positions)).
      truncate: round the bounds of yarn's ramp outwards to integers.
      short_factor: longrope's divisors of the frequencies, one per pair.
      long_factor: those beyond the original context, which this package does not apply.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"rope kind {self.kind!r} is not supported: it must be one of {', '.join(KINDS)}"
            )
        if self.kind in ("llama3", "yarn", "longrope") and not self.original_max_positions:
            raise ValueError(f"rope kind {self.kind!r} needs original_max_positions")

    def rotary_dim(self, head_dim: int) -> int:
        """Returns the size of the part of a head whose pairs have a frequency, which may be 0."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor)


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """A table of position embeddings, added to those of the tokens.

    Attributes:
      offset: the table's row of position 0; earlier rows are for padding (OPT).
    """

    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Positions are biases of the scores (arXiv 2108.12409).

    Attributes:
      scaled: the bias is divided by sqrt(D), as the product of query and key is (Falcon).
    """

    scaled: bool = False


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns radians per position, float32, and the factor on cosine and sine.

    There is one frequency per pair: half the size of the part of a head that rotates.
    """
    head_dim = rope.rotary_dim(head_dim)
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if rope.kind == "proportional":
        pairs = int(rope.partial_rotary_factor * head_dim // 2)
        inverse = np.where(np.arange(head_dim // 2) < pairs, inverse, 0) / rope.factor
    elif rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim), _yarn_attention_factor(rope)
    elif rope.kind == "longrope":
        return _longrope(rope, inverse), _longrope_attention_factor(rope)
    return inverse.astype(np.float32), 1.0


def _llama3(rope: Rope, inverse: np.ndarray) -> np.ndarray:
    """Interpolates long wavelengths, keeps short ones, blends those between (Llama 3.1)."""
    assert rope.original_max_positions is not None  # validated by Rope
    wavelengths = 2 * math.pi / inverse
    rotations = rope.original_max_positions / wavelengths
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - smooth) * inverse / rope.factor + smooth * inverse
    stretched = np.where(rotations < rope.low_freq_factor, inverse / rope.factor, blend)
    return np.where(rotations > rope.high_freq_factor, inverse, stretched)


def _yarn(rope: Rope, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    """Interpolates slow pairs, keeps fast ones, blends between (arXiv 2309.00071, section 3.2)."""
    assert rope.original_max_positions is not None  # validated by Rope
    context = rope.original_max_positions

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    interpolate = np.clip(ramp, 0, 1)
    blended = inverse / rope.factor * interpolate + inverse * (1 - interpolate)
    return blended.astype(np.float32)


def _yarn_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: Rope, inverse: np.ndarray) -> np.ndarray:
    """Divides every frequency by its own factor (arXiv 2402.13753)."""
    return inverse / np.asarray(rope.short_factor, np.float32)


def _longrope_attention_factor(rope: Rope) -> float:
    assert rope.original_max_positions is not None  # validated by Rope
    if rope.attention_factor is not None or rope.factor <= 1:
        return rope.attention_factor or 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def rotate_pairs(
    x: Float[Array, "*B D"], cos: Float[Array, "*B R/2"], sin: Float[Array, "*B R/2"]
) -> Float[Array, "*B D"]:
    """Returns x with every pair (i, i + R/2) of its first R elements rotated.

    One fused pass over x: (first, second) * cos + (second, first) * (-sin, sin).
    """
    size = cos.shape[-1]
    halves = x[..., : 2 * size].reshape(*x.shape[:-1], 2, size)
    signed = jnp.stack([-sin, sin], axis=-2)
    rotated = halves * cos[..., None, :] + halves[..., ::-1, :] * signed
    rotated = rotated.reshape(*rotated.shape[:-2], 2 * size)
    rest = x[..., 2 * size :]
    return jnp.concatenate([rotated, rest], -1) if rest.size else rotated


def rotate(
    x: Float[Array, "B T H D"], positions: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T H D"]:
    """Returns x rotated by its absolute positions, in x's dtype; angles are float32."""
    return rotate_by(x, positions, *frequencies(rope, x.shape[-1]))


def rotate_by(
    x: Float[Array, "B T H D"],
    positions: Int[Array, "B T"],
    inverse: Float[Array, "R/2"] | np.ndarray,
    factor: Float[Array, ""] | float,
) -> Float[Array, "B T H D"]:
    """Returns what `rotate` does, given the frequencies.

    Args:
      x: queries or keys.
      positions: positions of the tokens.
      inverse, factor: as `frequencies` returns them.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse  # [B,T,R/2]
    cos, sin = ((f(angles) * factor).astype(x.dtype)[:, :, None] for f in (jnp.cos, jnp.sin))
    return rotate_pairs(x, cos, sin)


def slopes_of(num_heads: int) -> np.ndarray:
    """Returns the slope of each head, float64 [H].

    For a power of two they are 2**(-8/H), 2**(-16/H), …; otherwise those of the next smaller power
    of two, followed by every second one of its double.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power, 2))
    return np.concatenate([slopes, between])[:num_heads]


def local_slopes(num_heads: int, split: Split) -> Float[Array, "H"]:
    """Returns the slopes of this device's heads, float32."""
    slopes = jnp.asarray(slopes_of(num_heads), jnp.float32)
    if not split.axes:
        return slopes
    count = num_heads // split.shards
    first = collectives.axis_index(split.axes) * count
    return jax.lax.dynamic_slice_in_dim(slopes, first, count)


def add_biases(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    slopes: Float[Array, "H"],
    alibi: Alibi,
) -> tuple[Array, Array, Array]:
    """Returns q, k, v with head size D + 2, whose attention has the biases.

    Scores are divided by sqrt(D + 2), so q is scaled by sqrt((D + 2) / D), and slopes by
    sqrt(D + 2). The last two elements of the output are zeros.
    """
    size = q.shape[-1]
    augmented_size = size + ALIBI_COLUMNS
    slopes = slopes * math.sqrt(augmented_size / size if alibi.scaled else augmented_size)
    in_query = jnp.stack([ALIBI_BASE * slopes, slopes], -1).astype(q.dtype)  # [H,2]
    in_key = jnp.stack([positions // ALIBI_BASE, positions % ALIBI_BASE], -1).astype(
        k.dtype
    )  # [B,T,2]

    def join(x, columns):
        return jnp.concatenate([x, jnp.broadcast_to(columns, (*x.shape[:-1], ALIBI_COLUMNS))], -1)

    q = join(q * math.sqrt(augmented_size / size), in_query)
    return q, join(k, in_key[:, :, None]), join(v, jnp.zeros(ALIBI_COLUMNS, v.dtype))
