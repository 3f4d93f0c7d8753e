"""An engine on a mesh decodes what it decodes on one device; inserting a row copies no cache."""

import jax
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from sharding import make_mesh
from tests.magicjax import mesh_cases, oracle, tiny

LIMITS = (20, 9, 24, 16)


def texts(case: str, mesh: list[int] | None) -> list[list[int]]:
    """Returns the tokens of requests that share two slots."""
    drafter, tree, _, kv_heads = mesh_cases.CASES[case]
    engine = magicjax.Engine(
        mesh_cases.target(kv_heads),
        drafter(kv_heads, None),
        tree,
        slots=2,
        capacity=128,
        max_new_tokens=24,
        eos_token_id=63,
        prefill_chunk=32,
        mesh=None if mesh is None else make_mesh(*mesh),
    )
    handles = [
        engine.submit(prompt, max_new_tokens=limit)
        for prompt, limit in zip(mesh_cases.prompts(), LIMITS, strict=False)
    ]
    engine.run()
    return [handle.result().tokens.tolist() for handle in handles]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "snapkv", "several"])
def test_an_engine_divides_models_over_the_axis_model(case, eight):
    found, expected = eight(texts, case=case, mesh=[1, 2]), texts(case, None)
    target = mesh_cases.target(mesh_cases.CASES[case][3])
    rows = [np.array(row, np.int32) for row in found]
    wanted = [np.array(row, np.int32) for row in expected]
    oracle.Tally().compare(target, mesh_cases.prompts()[: len(LIMITS)], wanted, rows)


def compiled_after_warm_up(mesh: list[int]) -> int:
    """Returns the programs that requests compile beside a draft model that is not divided."""
    drafter, tree, _, kv_heads = mesh_cases.CASES["small"]
    options = dict(slots=1, capacity=64, max_new_tokens=24, prefill_chunk=16, eos_token_id=63)
    engine = magicjax.Engine(
        mesh_cases.target(kv_heads), drafter(kv_heads, 1), tree, mesh=make_mesh(*mesh), **options
    )
    engine.warm_up()
    before = program_cache.totals()[0]
    for prompt in mesh_cases.prompts()[:2] * 2:  # the last two begin with a stored prefix
        engine.submit(prompt[:30], max_new_tokens=9)
    engine.run()
    return program_cache.totals()[0] - before


@pytest.mark.slow
def test_an_engine_on_a_mesh_compiles_nothing_after_warm_up(eight):
    assert eight(compiled_after_warm_up, mesh=[1, 2]) == 0


def refused(mesh: list[int]) -> str:
    with pytest.raises(ValueError) as error:
        magicjax.Engine(tiny.model(), mesh=make_mesh(*mesh))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axis"), [([2, 1], "data=2"), ([1, 1, 2], "stage=2")])
def test_a_mesh_that_divides_rows_or_layers_is_an_error(mesh, axis, eight):
    message = eight(refused, mesh=mesh)
    assert f"the mesh has {axis}: an engine runs on a mesh of which only the axis model" in message


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
def test_inserting_a_row_copies_no_cache():
    from magicjax.decoding import runner
    from magicjax.engine.templates import make_templates
    from tests.magicjax.decoding.test_compiled import WIDE, moved_caches, shaped

    options = dict(drafter=tiny.drafter("self"), tree=tiny.TREES["chain4"])
    templates = make_templates(shaped(WIDE), 4, 16_000, 32, None, 8, 0, options)
    state, row = (runner.state_shapes(x) for x in (templates.slots, templates.row))
    slot = jax.ShapeDtypeStruct((), np.int32)
    models = templates.row.target, templates.row.drafter
    program = program_cache.program("insert", templates.row.settings, *models, state, row, slot)
    sizes = {"slots": state.cache.k[0].size, "row": row.cache.k[0].size}
    assert moved_caches(program, sizes) == {}
    held = 2 * WIDE.num_layers * state.cache.k[0].size * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 16
