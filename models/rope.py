"""Rotary position embeddings: `default`, `linear`, `llama3` and `yarn` scaling.

The rotation splits a head in halves (GPT-NeoX order), as Hugging Face checkpoints do.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary settings of a model, with Hugging Face's terms.

    Attributes:
      theta: the base; pair i of a head of size D rotates by theta**(-2i/D) radians per position.
      kind: one of `KINDS`.
      factor: ratio of the scaled to the original context (linear, llama3, yarn).
      original_max_positions: the original context (llama3, yarn).
      low_freq_factor, high_freq_factor: bounds of the band that llama3 interpolates.
      beta_fast, beta_slow: rotations over the original context that bound yarn's ramp.
      attention_factor: yarn's factor on cosine and sine; None: 0.1 ln(factor) + 1, or with `mscale`
        and `mscale_all_dim` the ratio of their factors.
      truncate: round the bounds of yarn's ramp outwards to integers.
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

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"rope kind {self.kind!r} is not supported: it must be one of {', '.join(KINDS)}"
            )
        if self.kind in ("llama3", "yarn") and not self.original_max_positions:
            raise ValueError(f"rope kind {self.kind!r} needs original_max_positions")


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns radians per position, float32 [D/2], and the factor on cosine and sine."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim), _yarn_attention_factor(rope)
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


def turn(
    x: Float[Array, "*B D"], cos: Float[Array, "*B D/2"], sin: Float[Array, "*B D/2"]
) -> Float[Array, "*B D"]:
    """Returns x with every pair (i, i + D/2) rotated, without scaling."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rotate(
    x: Float[Array, "B T H D"], positions: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T H D"]:
    """Returns x rotated by its absolute positions, in x's dtype; angles are float32."""
    inverse, factor = frequencies(rope, x.shape[-1])
    angles = positions[..., None].astype(jnp.float32) * inverse  # [B,T,D/2]
    cos = (jnp.cos(angles) * factor).astype(x.dtype)[:, :, None]
    sin = (jnp.sin(angles) * factor).astype(x.dtype)[:, :, None]
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    # One fused pass over x: (first, second) * cos + (second, first) * (-sin, sin).
    signed = jnp.stack([-sin, sin], axis=-2)
    return (halves * cos[..., None, :] + halves[..., ::-1, :] * signed).reshape(x.shape)
