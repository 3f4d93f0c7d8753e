"""Sums and choices along an axis of an array that is divided over devices.

Each takes `over`, the mesh axes that divide the last axis of the array (the first varies slowest),
and gives what the same function of the undivided array would; with () that is what it is. What
travels is a number or a few for each row, never the array.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Over = tuple[str, ...]


def devices(over: Over) -> int:
    """Returns how many devices divide the axis, an int."""
    return lax.psum(1, over) if over else 1


def place(over: Over) -> Int[Array, ""] | int:
    """Returns which part of the axis this device has, from 0."""
    return lax.axis_index(over) if over else 0


def total(x: Array, over: Over) -> Array:
    """Returns the sum of x over the devices, elementwise."""
    return lax.psum(x, over) if over else x


def highest(x: Array, over: Over) -> Array:
    """Returns the maximum of x over the devices, elementwise."""
    return lax.pmax(x, over) if over else x


def joined(x: Float[Array, "*B M"], over: Over) -> Float[Array, "*B N"]:
    """Returns the parts of all devices side by side: N = M * devices."""
    return lax.all_gather(x, over, axis=x.ndim - 1, tiled=True) if over else x


def argmax(x: Float[Array, "*B V"], over: Over) -> Int[Array, "*B"]:
    """Returns the place of the maximum in the whole axis; the first, of equal ones."""
    at = x.argmax(-1).astype(jnp.int32)
    if not over:
        return at
    best = joined(x.max(-1, keepdims=True), over)
    at = joined((at + place(over) * x.shape[-1])[..., None], over)
    return jnp.take_along_axis(at, best.argmax(-1, keepdims=True), -1)[..., 0]


def top_k(
    x: Float[Array, "*B V"], count: int, over: Over
) -> tuple[Float[Array, "*B C"], Int[Array, "*B C"]]:
    """Returns the `count` highest and their places in the whole axis, best first.

    Of equal ones the first comes first.
    """
    best, at = lax.top_k(x, min(count, x.shape[-1]))
    if not over:
        return best, at
    best, at = joined(best, over), joined(at + place(over) * x.shape[-1], over)
    best, chosen = lax.top_k(best, count)
    return best, jnp.take_along_axis(at, chosen, -1)


def at(x: Float[Array, "*B V"], index: Int[Array, "*B"], over: Over) -> Float[Array, "*B"]:
    """Returns the element at a place of the whole axis."""
    if not over:
        return jnp.take_along_axis(x, index[..., None], -1)[..., 0]
    own = index - place(over) * x.shape[-1]
    found = jnp.take_along_axis(x, own.clip(0, x.shape[-1] - 1)[..., None], -1)[..., 0]
    return total(jnp.where((own >= 0) & (own < x.shape[-1]), found, 0), over)


def places(x: Float[Array, "*B V"], over: Over) -> Int[Array, "V"]:
    """Returns where this device's part lies in the whole axis."""
    return place(over) * x.shape[-1] + jnp.arange(x.shape[-1])


def narrowed(x: Float[Array, "*B V"], over: Over, finer: Over) -> Array:
    """Returns this device's part under a finer division, of its part under `over`.

    Args:
      x: the part.
      over: the first axes of `finer`.
      finer: the axes of the finer division.

    Raises:
      ValueError: `finer` does not begin with `over`.
    """
    if finer[: len(over)] != over:
        raise ValueError(f"{finer} does not divide further what {over} divides")
    rest = finer[len(over) :]
    size = x.shape[-1] // devices(rest)
    if not rest:
        return x
    return lax.dynamic_slice_in_dim(x, place(rest) * size, size, x.ndim - 1)


def softmax(x: Float[Array, "*B V"], over: Over) -> Float[Array, "*B V"]:
    """Returns the softmax over the whole axis."""
    if not over:
        return jax.nn.softmax(x)
    shifted = jnp.exp(x - highest(x.max(-1, keepdims=True), over))
    return shifted / total(shifted.sum(-1, keepdims=True), over)


def log_softmax(x: Float[Array, "*B V"], over: Over) -> Float[Array, "*B V"]:
    """Returns the logarithm of the softmax over the whole axis."""
    if not over:
        return jax.nn.log_softmax(x)
    shifted = x - highest(x.max(-1, keepdims=True), over)
    return shifted - jnp.log(total(jnp.exp(shifted).sum(-1, keepdims=True), over))
