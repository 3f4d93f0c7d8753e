"""Sliding windows, rings and capped scores: all backends against loops over positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import prefix_mass, tree_attention
from pallas_kernels.cpu import build
from pallas_kernels.mosaic_gpu import mosaic
from pallas_kernels.xla import BLOCK
from tests.pallas_kernels.attention_cases import CPU, relative_error
from tests.quick import quick

H, K, D = 4, 2, 16
every_backend = pytest.mark.parametrize("backend", ["reference", "xla", CPU, "tpu_interpreted"])
# Committed tokens of each row, the window, and the slots: full caches, rings that have wrapped
# never, once and often, windows within a block and over chunks of the kernel.
CASES = {
    "full": ([0, 1, 63, 200], 20, 256),
    "ring": ([0, 1, 100, 5000], 40, 64),
    "exact ring": ([64, 65, 129, 700], 64, 64),
    "long window": ([600, 1100, 2000, 3001], 1000, 1088),
    "blocks": ([0, 700, 2 * BLOCK + 300, 3 * BLOCK], 300, 3 * BLOCK),
}


@functools.cache
def compiled(backend: str, softcap: float | None = None):
    options = dict(softcap=softcap, return_lse=True, backend=backend)
    return jax.jit(lambda inputs: tree_attention(**inputs, **options))


def text(lengths, nodes: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """Returns queries, keys and values of a chain, and of all committed tokens before it."""
    rng, batch = np.random.default_rng(0), len(lengths)
    total = max(lengths) + 1

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    return {
        "q": normal(batch, nodes, H, D),
        "k": normal(batch, K, total, D),
        "v": normal(batch, K, total, D),
        "k_new": normal(batch, nodes, K, D),
        "v_new": normal(batch, nodes, K, D),
    }


def in_slots(x: np.ndarray, lengths, slots: int) -> np.ndarray:
    """Returns a cache in which position p is in slot p mod S, and garbage where there is none."""
    cache = np.full((*x.shape[:2], slots, x.shape[3]), 7, x.dtype)
    for b, length in enumerate(lengths):
        for position in range(max(0, length - slots), length):
            cache[b, :, position % slots] = x[b, :, position]
    return cache


def inputs_of(lengths, window: int, slots: int, nodes: int = 5, dtype=np.float32) -> dict:
    x = text(lengths, nodes, dtype)
    first = np.array(lengths)[:, None] + np.arange(nodes) - window + 1
    return {
        "q": x["q"],
        "k_prefix": in_slots(x["k"], lengths, slots),
        "v_prefix": in_slots(x["v"], lengths, slots),
        "lengths": np.array(lengths, np.int32),
        "k_new": x["k_new"],
        "v_new": x["v_new"],
        "mask": np.tri(nodes, dtype=bool),
        "seen_from": first.astype(np.int32),
    }


def oracle(lengths, window: int, nodes: int = 5, softcap=None, shift: int = 0):
    """Returns (out, lse) of a chain of nodes, query by query, from the positions that it sees.

    `shift` is added to the first position, for controls.
    """
    x = {name: value.astype(np.float64) for name, value in text(lengths, nodes).items()}
    out, lse = np.zeros(x["q"].shape), np.zeros(x["q"].shape[:3])
    for b, length in enumerate(lengths):
        for t in range(nodes):
            seen = slice(max(0, length + t - window + 1 + shift), length)
            for h in range(H):
                keys, values = (
                    np.concatenate([x[name][b, h // 2, seen], x[f"{name}_new"][b, : t + 1, h // 2]])
                    for name in "kv"
                )
                scores = keys @ x["q"][b, t, h] / np.sqrt(D)
                scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ values / weights.sum()
                lse[b, t, h] = scores.max() + np.log(weights.sum())
    return out, lse


@every_backend
@pytest.mark.parametrize("case", quick(CASES, "full", "ring", "blocks"))
def test_queries_see_the_positions_of_their_window(backend, case):
    lengths, window, slots = CASES[case]
    out, lse = compiled(backend)(inputs_of(lengths, window, slots))
    expected_out, expected_lse = oracle(lengths, window)
    assert relative_error(out, expected_out) < 1e-5
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    for shift in (-1, 1):  # a window off by one
        assert relative_error(out, oracle(lengths, window, shift=shift)[0]) > 1e-3


@every_backend
def test_a_ring_that_wraps_elsewhere_is_detected(backend):
    lengths, window, slots = CASES["ring"]
    inputs = inputs_of(lengths, window, slots)
    moved = inputs | {name: np.roll(inputs[name], 1, 2) for name in ("k_prefix", "v_prefix")}
    right, wrong = (compiled(backend)(x)[0] for x in (inputs, moved))
    assert relative_error(wrong[2:], right[2:]) > 0.1


@every_backend
def test_a_cache_without_slots_has_nothing_to_see(backend):
    lengths, window, slots = CASES["ring"]
    inputs = inputs_of(lengths, window, slots)
    empty = inputs | {name: inputs[name][:, :, :0] for name in ("k_prefix", "v_prefix")}
    found = compiled(backend)(empty)[0]
    expected = compiled("reference")(inputs | {"lengths": np.zeros_like(inputs["lengths"])})[0]
    assert relative_error(found, expected) < 1e-5


@every_backend
@pytest.mark.parametrize("case", quick(["full", "ring", "blocks"], "ring"))
def test_scores_are_capped(backend, case):
    lengths, window, slots = CASES[case]
    out, lse = compiled(backend, 0.5)(inputs_of(lengths, window, slots))
    expected_out, expected_lse = oracle(lengths, window, softcap=0.5)
    assert relative_error(out, expected_out) < 1e-5
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    assert relative_error(out, oracle(lengths, window)[0]) > 1e-2


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_bits_depend_on_neither_the_ring_nor_the_other_queries(dtype):
    lengths, window = [70, 600, 1200, 3001], 500
    ring = compiled("cpu")(inputs_of(lengths, window, 512, dtype=dtype))
    full = compiled("cpu")(inputs_of(lengths, window, 3072, dtype=dtype))
    for a, b in zip(ring, full, strict=True):
        np.testing.assert_array_equal(a, b)
    inputs = inputs_of(lengths, window, 512, dtype=dtype)
    for t in range(5):
        one = {name: inputs[name][:, t : t + 1] for name in ("q", "seen_from")}
        alone = compiled("cpu")(inputs | one | {"mask": inputs["mask"][t : t + 1]})
        for a, b in zip(alone, ring, strict=True):
            np.testing.assert_array_equal(a[:, 0], b[:, t])


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
def test_bits_do_not_depend_on_which_tokens_are_committed():
    """A node of a chain has the bits of the same token in plain decoding."""
    length, window, slots, nodes = 1000, 300, 320, 5
    x = text([length + nodes], 1)
    q = np.random.default_rng(1).standard_normal((1, nodes, H, D)).astype(np.float32)

    def attend(committed, queries):
        at = slice(committed, length + queries)
        new = {f"{name}_new": x[name][:, :, at].swapaxes(1, 2) for name in "kv"}
        count = length + queries - committed
        positions = committed + np.arange(count)
        return compiled("cpu")(
            {
                "q": jnp.asarray(q[:, queries - count : queries]),
                **{f"{n}_prefix": jnp.asarray(in_slots(x[n], [committed], slots)) for n in "kv"},
                "lengths": jnp.array([committed], jnp.int32),
                **jax.tree.map(jnp.asarray, new),
                "mask": jnp.asarray(np.tri(count, dtype=bool)),
                "seen_from": jnp.asarray(positions[None] - window + 1, jnp.int32),
            }
        )

    tree = attend(length, nodes)
    for t in range(nodes):
        plain = attend(length + t, t + 1)
        for a, b in zip(plain, tree, strict=True):
            np.testing.assert_array_equal(a[:, 0], b[:, t])


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_the_mass_of_capped_scores(backend):
    lengths, slots, softcap = [40, 90], 96, 0.7
    inputs = inputs_of(lengths, 200, slots, nodes=3)
    seen = jnp.asarray(np.array(lengths)[:, None] * np.ones(3), jnp.int32)
    found = prefix_mass(inputs["q"], inputs["k_prefix"], seen, softcap=softcap, backend=backend)
    q, k = (np.asarray(inputs[name], np.float64) for name in ("q", "k_prefix"))
    scores = np.einsum("bthd,bhsd->bhts", q, np.repeat(k, H // K, 1)) / np.sqrt(D)
    scores = softcap * np.tanh(scores / softcap)
    live = np.arange(slots) < np.asarray(seen)[:, None, :, None]
    weights = np.where(live, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    expected = weights.reshape(2, K, -1, 3, slots).sum((2, 3))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_a_backend_does_not_support_is_an_error():
    inputs = inputs_of([3, 4], 3, 64)
    with pytest.raises(ValueError, match=r"seen_from has shape .*\[B, T\] = \(2, 5\)"):
        tree_attention(**(inputs | {"seen_from": inputs["seen_from"][:, :2]}))
    with pytest.raises(ValueError, match="seen_from is float32: it must be an integer"):
        tree_attention(**(inputs | {"seen_from": inputs["seen_from"].astype(jnp.float32)}))


def test_windows_run_in_xla_where_the_kernel_for_hopper_has_none(monkeypatch):
    monkeypatch.setattr(mosaic, "unsupported_reason", lambda *_: None)
    inputs = inputs_of(*CASES["ring"])
    found, expected = (compiled(backend, 1.0)(inputs)[0] for backend in ("mosaic", "xla"))
    np.testing.assert_array_equal(found, expected)
