"""Inputs and oracles that the attention tests share."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import EMPTY_LSE, tree_attention
from pallas_kernels.benchmarks.shapes import Shape, random_inputs
from pallas_kernels.cpu import build
from pallas_kernels.xla import BLOCK

MASKS = ("chain", "expansion", "random")
CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
)


def edge_lengths(shape: Shape, block: int = BLOCK) -> np.ndarray:
    """Returns edge-case lengths [B]: empty, one, around the end of a block, full."""
    slots = shape.slots
    if slots > block:
        edges = [0, 1, block - 1, block, block + 1, slots]
    else:
        edges = [0, 1, slots // 2, slots]
    return np.resize(np.asarray(edges, np.int32), shape.batch)


def make_mask(kind: str, shape: Shape) -> np.ndarray:
    """Returns a mask [B, T, N]; the T queries are the last of the N new tokens."""
    batch, nodes, new = shape.batch, shape.nodes, shape.new
    if kind == "random":  # differs by row; some queries see no new token
        mask = np.random.default_rng(0).random((batch, nodes, new)) < 0.4
        mask[:, 0] = False
        return mask
    # The parent of node n: of a chain n - 1, of a tree with three children for each node (n-1)//3.
    seen = np.eye(new, dtype=bool)
    for node in range(1, new):
        seen[node] |= seen[node - 1 if kind == "chain" else (node - 1) // 3]
    return np.broadcast_to(seen[new - nodes :], (batch, nodes, new))


def make_inputs(shape: Shape, dtype, kind: str = "random", seed: int = 0) -> dict:
    """Returns the arguments of `tree_attention` for a shape, as numpy: changes compile nothing."""
    inputs = jax.tree.map(np.asarray, random_inputs(shape, dtype, seed))
    return inputs | {"lengths": edge_lengths(shape), "mask": make_mask(kind, shape)}


@functools.cache
def compiled(backend: str):
    """Returns one jitted function per backend, so that tests of a shape share a compilation."""
    return jax.jit(lambda inputs: tree_attention(**inputs, return_lse=True, backend=backend))


@functools.cache
def compiled_of_rows(backend: str):
    """Returns `compiled` with `first_row` as a second argument."""
    call = functools.partial(tree_attention, return_lse=True, backend=backend)
    return jax.jit(lambda inputs, first: call(**inputs, first_row=first))


def some_rows(inputs: dict, first: int, count: int) -> dict:
    """Returns the inputs of some rows with the caches of all rows."""
    rows = {
        name: x[first : first + count] for name, x in inputs.items() if not name.endswith("prefix")
    }
    return inputs | rows


def relative_error(actual, expected) -> float:
    """Returns the norm of the difference over the norm of the expected array, in float64."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def seen_by_nobody(inputs: dict) -> np.ndarray:
    """Returns [B, T]: True for a query that sees no key at all."""
    return (np.asarray(inputs["lengths"]) <= 0)[:, None] & ~np.asarray(inputs["mask"]).any(-1)


def oracle(
    q, k_prefix, v_prefix, lengths, k_new, v_new, mask, *, head_of=None, scale=None, extra=0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) by explicit loops in numpy's float64, independent of the package.

    head_of, scale and extra (slots seen beyond the length) replace a rule by a wrong one.
    """
    arrays = (q, k_prefix, v_prefix, k_new, v_new)
    q, k_prefix, v_prefix, k_new, v_new = (np.asarray(x, np.float64) for x in arrays)
    batch, nodes, heads, size = q.shape
    kv_heads, slots = k_prefix.shape[1:3]
    head_of = head_of or (lambda head: head // (heads // kv_heads))
    scale = scale or 1 / np.sqrt(size)
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], EMPTY_LSE)
    for b in range(batch):
        live = min(int(lengths[b]) + extra, slots)
        for t in range(nodes):
            chosen = [n for n in range(k_new.shape[1]) if mask[b, t, n]]
            for h in range(heads):
                kv = head_of(h)
                keys = [*k_prefix[b, kv, :live], *(k_new[b, n, kv] for n in chosen)]
                values = [*v_prefix[b, kv, :live], *(v_new[b, n, kv] for n in chosen)]
                if not keys:
                    continue
                scores = np.array([np.dot(q[b, t, h], key) for key in keys]) * scale
                peak = scores.max()
                weights = np.exp(scores - peak)
                out[b, t, h] = weights @ np.array(values) / weights.sum()
                lse[b, t, h] = peak + np.log(weights.sum())
    return out, lse
