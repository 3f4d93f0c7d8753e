"""States that a mesh divides over devices or stages are those of one device, round by round."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax import placement
from magicjax.decoding.decoder import Decoder
from magicjax.kv_cache import attend, full_cache
from models.gated_delta import GatedDeltaNet
from sharding import collectives, factored, make_mesh
from tests.forget import forget_programs
from tests.magicjax import keywords, mesh_cases, tiny
from tests.quick import quick

ROWS, LENGTHS = 2, (9, 5)
PARENTS = (-1, 0, 0, 1, 2)
ACCEPTED = ((0, 2, 4), (0, 1, 1))  # with the last one repeated
COUNTS = (3, 2)


@functools.cache
def one_layer() -> magicjax.Model:
    shape = tiny.HYBRID | dict(delta_net=mesh_cases.DELTA_NET, num_layers=1)
    module = models.build(tiny.config(**shape, num_heads=8, num_kv_heads=2))
    return magicjax.Model(module, tiny.put(tiny.drawn(module.config, 0)))


def run_layer(model, tokens, tree_tokens):
    """Returns hidden states of prompts and of trees after them, and the cache after a commit."""
    lengths, path, counts = (jnp.array(x, jnp.int32) for x in (LENGTHS, ACCEPTED, COUNTS))
    cache = full_cache.empty(model, ROWS, 64)
    triangle = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    prompt = attend.AttendTo(cache, triangle, None, chain=lengths, positions=positions)
    hidden, aux, _ = model(tokens, positions, prompt)
    cache = full_cache.write_chunk(cache, tuple(kv for kv, _ in aux), jnp.int32(0), lengths)
    cache = cache.replace(lengths=lengths)
    tree = magicjax.TokenTree.from_parents(PARENTS)
    positions = lengths[:, None] + jnp.asarray(tree.node_depths)
    nodes = attend.AttendTo(cache, jnp.asarray(tree.mask), None, positions=positions)
    of_nodes, aux, _ = model(tree_tokens, positions, nodes)
    return hidden, of_nodes, full_cache.append(cache, tuple(kv for kv, _ in aux), path, counts)


def errors_of_a_layer(devices: int) -> list[float]:
    """Returns the largest errors on a mesh, relative to the largest element of an array.

    One is that of the layer, and one that of a mistake: the parameter of the convolution is divided
    as if its channels were in the order of the heads.
    """
    rng = np.random.default_rng(0)
    texts = (rng.integers(0, tiny.VOCAB, (ROWS, n)).astype(np.int32) for n in (9, len(PARENTS)))
    model, *texts = one_layer(), *map(jnp.asarray, texts)
    expected = jax.jit(run_layer)(model, *texts)
    mesh = factored(make_mesh(1, devices))
    texts = jax.device_put(texts, jax.sharding.NamedSharding(mesh, placement.EVERYWHERE))
    placed = placement.shard_model(model, mesh), *texts
    shapes = placement.result_shapes(run_layer, mesh, placed, replicated_rows=True)

    def error() -> float:
        found = jax.jit(placement.on_mesh(run_layer, mesh, placed, shapes))(*placed)
        (state,) = found[2].states
        for x in (state.s, state.inputs):  # each device has its part
            assert x.addressable_shards[0].data.size == x.size // devices
        pairs = [*zip(*map(jax.tree.leaves, (found[1:], expected[1:])), strict=True)]
        pairs += [(found[0][row, :n], expected[0][row, :n]) for row, n in enumerate(LENGTHS)]
        return max(float(np.abs(a - b).max() / (np.abs(b).max() or 1)) for a, b in pairs)

    errors = [error()]
    with contextlib.ExitStack() as stack:
        jax.clear_caches()
        stack.callback(jax.clear_caches)
        stack.callback(setattr, GatedDeltaNet, "_kernel", GatedDeltaNet._kernel)
        GatedDeltaNet._kernel = part_of_parameter
        return [*errors, error()]


def part_of_parameter(self):
    """Replaces `GatedDeltaNet._kernel`."""
    s, zeros = self.config.delta_net, nn.initializers.zeros
    whole = self._vector("conv", zeros, ((s.channels, None), (1, None), (s.conv_width, None)))
    return collectives.local_slice(whole[:, 0].T, (), self.split.axes).T


@pytest.mark.parametrize("devices", quick([2, 4, 8], 4))
def test_devices_have_the_states_of_their_heads(eight, devices):
    right, wrong = eight(errors_of_a_layer, devices=devices)
    assert right < 1e-5 and wrong > 1e-2


def of_layers(slots, stages: int) -> list:
    """Returns a cache's arrays by layer, of which a slot has those of all stages."""
    return [
        jax.tree.map(lambda x, stage=stage: np.split(np.asarray(x), stages)[stage], slot)
        for stage in range(stages)
        for slot in slots
    ]


def caches(case: str, mesh: list[int] | None, micro_batches: int | None, rounds: int) -> tuple:
    """Returns the lengths after some rounds, and the states, keys and values of each layer."""
    drafter, tree, options, kind = mesh_cases.CASES[case]
    request = keywords.prepare(
        mesh_cases.target(kind),
        mesh_cases.prompts(),
        drafter=drafter(kind, None),
        tree=tree,
        max_tokens=24,
        eos_token_id=[],
        mesh=None if mesh is None else make_mesh(*mesh),
        micro_batches=micro_batches,
        **options,
    )
    cache = Decoder(request).decode(Decoder(request).start(), rounds).cache
    stages = mesh[2] if mesh is not None and len(mesh) > 2 else 1
    return np.asarray(cache.lengths), *(
        of_layers(x, stages) for x in (cache.states, cache.k, cache.v)
    )


def error_of_caches(case: str, mesh: list[int], micro_batches: int | None) -> float:
    """Returns the largest relative error of the caches on a mesh after three rounds."""
    (lengths, *expected), (found_lengths, *found) = (
        caches(case, on, parts, 3) for on, parts in ((None, None), (mesh, micro_batches))
    )
    np.testing.assert_array_equal(lengths, found_lengths)
    errors = []
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if b.ndim == 4 and b.shape[2] > 64:  # keys or values, of which some slots have no entry
            live = (np.arange(b.shape[2]) < lengths[:, None])[:, None, :, None]
            a, b = np.where(live, a, 0), np.where(live, b, 0)
        errors.append(np.abs(a - b).max() / np.abs(b).max())
    assert len(errors) == 2 * mesh_cases.target(mesh_cases.CASES[case][3]).config.num_layers
    return float(max(errors))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "micro_batches"),
    [((1, 4), None), ((2, 2), None), ((1, 1, 2), 2), ((1, 2, 2), 4), ((2, 1, 2), 1)],
)
@pytest.mark.parametrize("case", ["states", "states, quest"])
def test_caches_on_a_mesh_are_those_of_one_device(eight, case, mesh, micro_batches):
    assert eight(error_of_caches, case=case, mesh=mesh, micro_batches=micro_batches) < 1e-4


def served(case: str, mesh: list[int] | None) -> list[list[int]]:
    """Returns the answers of an engine, of which some go on from stored states."""
    drafter, tree, _, kind = mesh_cases.CASES[case]
    config = magicjax.EngineConfig(
        slots=4, capacity=128, max_tokens=12, eos_token_id=[], prefill_chunk=32
    )
    on = None if mesh is None else make_mesh(*mesh)
    running = magicjax.Engine(mesh_cases.target(kind), drafter(kind, None), tree, config, mesh=on)
    params = magicjax.SamplingParams(max_tokens=12)
    prompts = mesh_cases.prompts()[:5]
    first = [running.submit(prompt, params) for prompt in prompts]
    running.run()
    answer = first[1].result().tokens
    turns = [np.concatenate([prompts[1], answer, [3, 4]]), np.concatenate([prompts[1][:34], [5]])]
    later = [running.submit(turn.astype(np.int32), params) for turn in turns]
    running.run()
    known = len(prompts[1]) + len(answer) - 1
    assert later[0].result().stats.reused_tokens == known
    return [handle.result().tokens.tolist() for handle in (*first, *later)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
@pytest.mark.parametrize("case", ["states", "states, quest"])
def test_an_engine_on_a_mesh_gives_the_texts_of_one_device(eight, case, mesh):
    assert eight(served, case=case, mesh=mesh) == eight(served, case=case, mesh=None)


def differs(wrong: bool) -> bool:
    """Returns whether the text on two stages is another one than on one device.

    With `wrong`, all micro-batches read the states of the first rows.
    """
    right, shape = attend._Rows.slice, mesh_cases.DELTA_NET
    sizes = shape.key_dim, shape.value_dim

    def mistaken(self, x):
        is_state = x.ndim == 4 and x.shape[2:] == sizes and self.first_row is not None
        return x[: self.num_rows] if is_state else right(self, x)

    forget_programs()
    try:
        attend._Rows.slice = mistaken if wrong else right
        found = mesh_cases.generate("states", (1, 1, 2), micro_batches=4)
    finally:
        attend._Rows.slice = right
        forget_programs()
    return not np.array_equal(found.tokens, mesh_cases.on_one("states").tokens)


@pytest.mark.slow
def test_micro_batches_with_the_states_of_other_rows_are_detected(eight):
    """Negative control."""
    assert eight(differs, wrong=True) and not eight(differs, wrong=False)
