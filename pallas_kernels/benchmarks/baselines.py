"""Attention of other libraries on the same inputs: T query nodes against S + T keys.

The last T keys are new tokens under the mask of a tree; queries see all other keys. Each baseline
gets its inputs in its preferred layout; transposing and concatenating are not timed. A baseline
that is not installed, does not support the call, or is wrong is skipped with the reason.

A baseline is called with grouped heads, as its users do, or `packed`: the G heads that share a KV
head become rows of one query, so that the keys are read once.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Relative error of the whole output. Some baselines round weights before normalization, and float32
# products to TF32. A mask that is wrong for one token causes an error above 0.1.
TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 5e-3}

ALIGNED = 64  # slots; most kernels read whole blocks fastest

Inputs = Mapping[str, Array]
Program = Callable[[], Any]


class UnavailableError(Exception):
    """A baseline is not available here; the message is the reason."""


def _concatenated(inputs: Inputs, live: int, dead: int = 0) -> tuple[Array, Array]:
    """Returns keys and values [B, live + T + dead, K, D]: the live prefix, then the new tokens."""
    pairs = (("k_prefix", "k_new"), ("v_prefix", "v_new"))

    @jax.jit
    def concatenated(prefix, new):
        both = jnp.concatenate([prefix[:, :, :live].swapaxes(1, 2), new], axis=1)
        return jnp.pad(both, ((0, 0), (0, dead), (0, 0), (0, 0)))

    keys, values = (concatenated(inputs[a], inputs[b]) for a, b in pairs)
    return keys, values


def _packed(q: Array, kv_heads: int) -> Array:
    """Returns q [B, T, H, D] as [B, T * G, K, D]."""
    batch, nodes, heads, size = q.shape
    q = q.reshape(batch, nodes, kv_heads, heads // kv_heads, size).swapaxes(2, 3)
    return q.reshape(batch, -1, kv_heads, size)


def _unpacked(out: Array, shape: tuple[int, ...]) -> Array:
    batch, nodes, heads, size = shape
    kv_heads = out.shape[2]
    out = out.reshape(batch, nodes, heads // kv_heads, kv_heads, size).swapaxes(2, 3)
    return out.reshape(shape)


def _full_mask(mask: np.ndarray, live: int) -> np.ndarray:
    """Returns bool [T, live + T]: True for the prefix, then the mask over the new tokens."""
    return np.concatenate([np.ones((len(mask), live), bool), mask], axis=1)


def _jax_program(
    attend: Callable, packed: bool, layers: Sequence[Inputs], mask: np.ndarray, live: int
) -> Program:
    """Returns a program for a function like `jax.nn.dot_product_attention`."""
    first = layers[0]["q"]
    kv_heads, group = layers[0]["k_new"].shape[2], first.shape[2] // layers[0]["k_new"].shape[2]
    queries = _packed(first, kv_heads) if packed else first
    dead = -(live + mask.shape[1]) % ALIGNED  # lengths are passed, so the cache may be longer
    rows = np.pad(np.repeat(mask, group if packed else 1, axis=0), ((0, 0), (0, dead)))
    seen = None if mask.all() else jnp.asarray(_full_mask(rows, live))[None, None]
    lengths = jnp.full(first.shape[0], live + mask.shape[1], jnp.int32)

    @jax.jit
    def run(q, caches, seen, lengths):
        for keys, values in caches:  # the output is the next query, so layers do not overlap
            q = attend(q, keys, values, mask=seen, key_value_seq_lengths=lengths)
        return _unpacked(q, first.shape) if packed else q

    caches = [_concatenated(inputs, live, dead) for inputs in layers]
    return functools.partial(run, queries, caches, seen, lengths)


def _jax_nn(implementation: str, packed: bool, layers, mask, live: int) -> Program:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise UnavailableError("needs an NVIDIA GPU with cuDNN")
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return _jax_program(attend, packed, layers, mask, live)


def _tokamax(packed: bool, layers, mask, live: int) -> Program:
    if importlib.util.find_spec("tokamax") is None:
        raise UnavailableError("tokamax is not installed")
    import tokamax

    return _jax_program(tokamax.dot_product_attention, packed, layers, mask, live)


def _torch(device: str) -> Any:
    """Returns torch if it supports this device."""
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise UnavailableError("torch is installed without CUDA")
    return torch


def _sdpa(packed: bool, layers, mask, live: int) -> Program:
    torch = _torch(jax.default_backend())
    seen = None if mask.all() else _full_mask(mask, live)

    def attend(q, keys, values, seen):
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, enable_gqa=not packed
        )

    return _torch_program(torch, attend, packed, layers, seen, live)


def _flex(layers, mask, live: int) -> Program:
    torch = _torch(jax.default_backend())
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # it stops compiling after a few masks

    nodes = mask.shape[1]
    device = torch.from_dlpack(layers[0]["q"]).device
    new_mask = torch.from_numpy(mask).to(device)

    def visible(batch, head, query, key):
        return (key < live) | new_mask[query, (key - live).clamp(0, nodes - 1)]

    blocks = flex.create_block_mask(visible, None, None, len(mask), live + nodes, device=device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def attend(q, keys, values, seen):
        return compiled(q, keys, values, block_mask=blocks, enable_gqa=True)

    return _torch_program(torch, attend, False, layers, None, live)


def _torch_program(torch: Any, attend: Callable, packed: bool, layers, seen, live: int) -> Program:
    """Returns a program for a function of q [B, H, T, D] and keys, values [B, K, S, D]."""
    shape, kv_heads = layers[0]["q"].shape, layers[0]["k_new"].shape[2]

    def heads_first(x):
        return torch.from_dlpack(jax.block_until_ready(jax.jit(lambda x: x.swapaxes(1, 2))(x)))

    q = heads_first(_packed(layers[0]["q"], kv_heads) if packed else layers[0]["q"])
    caches = [tuple(map(heads_first, _concatenated(inputs, live))) for inputs in layers]
    if seen is not None:
        rows = np.repeat(seen, shape[2] // kv_heads if packed else 1, axis=0)
        seen = torch.from_numpy(rows).to(q.device)[None, None]

    def run():
        with torch.inference_mode():
            out = q
            for keys, values in caches:
                out = attend(out, keys, values, seen)
            return out

    def unpack(out) -> Array:
        out = jnp.asarray(out.transpose(1, 2).float().cpu().numpy())
        return _unpacked(out, shape) if packed else out

    run.unpack = unpack  # type: ignore[attr-defined]
    return run


BASELINES: dict[str, Callable[..., Program]] = {
    "jax.nn xla": functools.partial(_jax_nn, "xla", False),
    "jax.nn xla packed": functools.partial(_jax_nn, "xla", True),
    "jax.nn cudnn": functools.partial(_jax_nn, "cudnn", False),
    "jax.nn cudnn packed": functools.partial(_jax_nn, "cudnn", True),
    "tokamax": functools.partial(_tokamax, False),
    "tokamax packed": functools.partial(_tokamax, True),
    "torch sdpa": functools.partial(_sdpa, False),
    "torch sdpa packed": functools.partial(_sdpa, True),
    "torch flex": _flex,
}


def wait(result: Any) -> Any:
    """Blocks until the result of a program, of JAX or torch, is computed; returns it."""
    if hasattr(result, "is_cuda"):  # a torch tensor
        if result.is_cuda:
            import torch

            torch.cuda.synchronize()
        return result
    return jax.block_until_ready(result)


def make_program(name: str, layers: Sequence[Inputs], mask: np.ndarray, live: int) -> Program:
    """Returns a program without arguments that runs a baseline layer after layer.

    Args:
      name: from BASELINES.
      layers: q, k_prefix, v_prefix, k_new, v_new of each layer; only the first q is used.
      mask: bool [T, T], which of the new tokens each query may see.
      live: live slots of the prefix, the same in all rows.

    Raises:
      UnavailableError: the baseline is not available. The library may raise other errors.
    """
    return BASELINES[name](layers, np.asarray(mask, bool), live)


def skip_reason(
    name: str,
    layers: Sequence[Inputs],
    mask: np.ndarray,
    live: int,
    expected: Float[Array, "B T H D"],
) -> str | None:
    """Returns why a baseline cannot be timed: unavailable, failed, or wrong; None if it can.

    Args:
      name, layers, mask, live: as for `make_program`.
      expected: the attention of the first layer.
    """
    dtype = layers[0]["q"].dtype.name
    try:
        program = make_program(name, layers[:1], mask, live)
        out = wait(program())
    except UnavailableError as error:
        return str(error)
    except Exception as error:  # another library may raise anything
        return f"failed: {type(error).__name__}: {_first_line(error)}"
    unpack = getattr(program, "unpack", None)
    out = np.asarray(unpack(out) if unpack else out, np.float32)
    reference = np.asarray(expected, np.float32)
    deviation = float(np.linalg.norm(out - reference) / np.linalg.norm(reference))
    if not deviation <= TOLERANCE[dtype]:  # NaN is wrong too
        return f"wrong: relative error {deviation:.1e}, at most {TOLERANCE[dtype]:.0e} in {dtype}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
