"""Argument checks of this package's functions; errors name the argument, limit and remedy."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


def check_heads(q: Any, k_prefix: Any) -> None:
    """Raises ValueError unless q is [B, T, H, D], k_prefix [B, K, S, D], and K divides H."""
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}: it must be [B, T, H, D]; add the missing axes")
    if k_prefix.ndim != 4:
        raise ValueError(
            f"k_prefix has shape {k_prefix.shape}: it must be [B, K, S, D]; pass one layer's cache"
        )
    heads, kv_heads = q.shape[2], k_prefix.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q has H={heads} heads and k_prefix has K={kv_heads}: H must be a multiple of K; "
            "check num_heads and num_kv_heads, or the sharding of heads"
        )


def check_shapes(
    q: Any, k_prefix: Any, expected: Mapping[str, tuple[Any, str, tuple[int, ...]]]
) -> None:
    """Raises ValueError at the first array that differs from its (array, axis letters, shape)."""
    for name, (x, letters, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(
                f"{name} has shape {x.shape}: with q {q.shape} and k_prefix {k_prefix.shape} "
                f"it must be {letters} = {shape}"
            )


def check_dtypes(q: Any, floating: Mapping[str, Any], integers: Mapping[str, Any]) -> None:
    """Raises ValueError unless q is floating, `floating` has its dtype, and `integers` are ints."""
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q is {q.dtype}: it must be a floating dtype; cast it before the call")
    for name, x in floating.items():
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} and q is {q.dtype}: they must be the same; cast the smaller "
                "one (usually q and the new tokens, to the dtype of the cache)"
            )
    for name, x in integers.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} is {x.dtype}: it must be an integer dtype; cast it")
