"""Other libraries' attention, asked the same question: T query nodes against S + T keys.

The last T keys are new tokens under the mask of a tree; queries see all others. Each peer gets its
inputs in the layout it wants, made beforehand: no transposition or joining is timed. A peer that
is not installed, does not serve the call, or is wrong is reported so, and not timed.

Two ways to ask: with grouped heads, as users of these libraries do, and `packed`, where the G heads
that share a KV head are rows of one query, so that its keys are read once.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Relative error of the whole output, against ours. Some peers round weights before they are
# divided, and float32 products to TF32; a mask that is off by one token errs by more than a tenth.
TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 5e-3}

ALIGNED = 64  # slots; kernels of other libraries read whole blocks fastest

Inputs = Mapping[str, Array]
Program = Callable[[], Any]


class NotHereError(Exception):
    """A peer cannot be asked; the message says why."""


def _joined(inputs: Inputs, live: int, dead: int = 0) -> tuple[Array, Array]:
    """Returns keys and values [B, live + T + dead, K, D]: the live prefix, then the new tokens."""
    pairs = (("k_prefix", "k_new"), ("v_prefix", "v_new"))

    @jax.jit
    def joined(prefix, new):
        both = jnp.concatenate([prefix[:, :, :live].swapaxes(1, 2), new], axis=1)
        return jnp.pad(both, ((0, 0), (0, dead), (0, 0), (0, 0)))

    keys, values = (joined(inputs[a], inputs[b]) for a, b in pairs)
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


def _seen(mask: np.ndarray, live: int) -> np.ndarray:
    """Returns bool [T, live + T]: all of the prefix, and of the new tokens what the mask says."""
    return np.concatenate([np.ones((len(mask), live), bool), mask], axis=1)


def _of_jax(
    attend: Callable, packed: bool, layers: Sequence[Inputs], mask: np.ndarray, live: int
) -> Program:
    """Returns a program of a function with the signature of `jax.nn.dot_product_attention`."""
    first = layers[0]["q"]
    kv_heads, group = layers[0]["k_new"].shape[2], first.shape[2] // layers[0]["k_new"].shape[2]
    queries = _packed(first, kv_heads) if packed else first
    dead = -(live + mask.shape[1]) % ALIGNED  # they are given lengths, so a cache may be longer
    rows = np.pad(np.repeat(mask, group if packed else 1, axis=0), ((0, 0), (0, dead)))
    seen = None if mask.all() else jnp.asarray(_seen(rows, live))[None, None]
    lengths = jnp.full(first.shape[0], live + mask.shape[1], jnp.int32)

    @jax.jit
    def run(q, caches, seen, lengths):
        for keys, values in caches:  # the output is the next query, so no two layers overlap
            q = attend(q, keys, values, mask=seen, key_value_seq_lengths=lengths)
        return _unpacked(q, first.shape) if packed else q

    caches = [_joined(inputs, live, dead) for inputs in layers]
    return functools.partial(run, queries, caches, seen, lengths)


def _jax_nn(implementation: str, packed: bool, layers, mask, live: int) -> Program:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotHereError("needs an NVIDIA GPU with cuDNN")
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return _of_jax(attend, packed, layers, mask, live)


def _tokamax(packed: bool, layers, mask, live: int) -> Program:
    if importlib.util.find_spec("tokamax") is None:
        raise NotHereError("tokamax is not installed")
    import tokamax

    return _of_jax(tokamax.dot_product_attention, packed, layers, mask, live)


def _torch(device: str) -> Any:
    """Returns torch, if it can use this device."""
    if importlib.util.find_spec("torch") is None:
        raise NotHereError("torch is not installed")
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise NotHereError("torch is installed without CUDA")
    return torch


def _sdpa(packed: bool, layers, mask, live: int) -> Program:
    torch = _torch(jax.default_backend())
    seen = None if mask.all() else _seen(mask, live)

    def attend(q, keys, values, seen):
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, enable_gqa=not packed
        )

    return _of_torch(torch, attend, packed, layers, seen, live)


def _flex(layers, mask, live: int) -> Program:
    torch = _torch(jax.default_backend())
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # after a few masks it would go on without compiling

    nodes = mask.shape[1]
    device = torch.from_dlpack(layers[0]["q"]).device
    of_new = torch.from_numpy(mask).to(device)

    def visible(batch, head, query, key):
        return (key < live) | of_new[query, (key - live).clamp(0, nodes - 1)]

    blocks = flex.create_block_mask(visible, None, None, len(mask), live + nodes, device=device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def attend(q, keys, values, seen):
        return compiled(q, keys, values, block_mask=blocks, enable_gqa=True)

    return _of_torch(torch, attend, False, layers, None, live)


def _of_torch(torch: Any, attend: Callable, packed: bool, layers, seen, live: int) -> Program:
    """Returns a program of a function of q [B, H, T, D] and keys, values [B, K, S, D]."""
    shape, kv_heads = layers[0]["q"].shape, layers[0]["k_new"].shape[2]

    def heads_first(x):
        return torch.from_dlpack(jax.block_until_ready(jax.jit(lambda x: x.swapaxes(1, 2))(x)))

    q = heads_first(_packed(layers[0]["q"], kv_heads) if packed else layers[0]["q"])
    caches = [tuple(map(heads_first, _joined(inputs, live))) for inputs in layers]
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


PEERS: dict[str, Callable[..., Program]] = {
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
    """Returns the result of a program when it is computed, ours or a peer's."""
    if hasattr(result, "is_cuda"):  # a torch tensor
        if result.is_cuda:
            import torch

            torch.cuda.synchronize()
        return result
    return jax.block_until_ready(result)


def make(name: str, layers: Sequence[Inputs], mask: np.ndarray, live: int) -> Program:
    """Returns a program of no arguments: a peer's attention in every layer, one after another.

    Args:
      name: from PEERS.
      layers: q, k_prefix, v_prefix, k_new, v_new of each; the first one's q is asked.
      mask: bool [T, T], which of the new tokens each query may see.
      live: slots of the prefix that are seen, of all rows.

    Raises:
      NotHereError: it cannot be asked here. Other errors are the peer's own.
    """
    return PEERS[name](layers, np.asarray(mask, bool), live)


def why_not(
    name: str, layers: Sequence[Inputs], mask: np.ndarray, live: int, ours: Float[Array, "B T H D"]
) -> str | None:
    """Returns why a peer cannot be timed: not here, failed, or wrong; None if it can.

    Args:
      name, layers, mask, live: as for `make`.
      ours: attention of the first layer, as we compute it.
    """
    dtype = layers[0]["q"].dtype.name
    try:
        program = make(name, layers[:1], mask, live)
        found = wait(program())
    except NotHereError as error:
        return str(error)
    except Exception as error:  # whatever another library raises is its answer
        return f"failed: {type(error).__name__}: {_first_line(error)}"
    unpack = getattr(program, "unpack", None)
    found = np.asarray(unpack(found) if unpack else found, np.float32)
    wanted = np.asarray(ours, np.float32)
    off = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    if not off <= TOLERANCE[dtype]:  # NaN is wrong too
        return f"wrong: differs by {off:.1e} of ours, at most {TOLERANCE[dtype]:.0e} in {dtype}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
