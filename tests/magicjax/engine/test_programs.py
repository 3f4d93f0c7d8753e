"""An engine on a mesh decodes what it decodes on one device; inserting a row copies no cache."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import magicjax
import models
from magicjax import EngineConfig, SamplingParams
from magicjax.decoding import program_cache, slots
from magicjax.decoding.decoder import Clock, Decoder
from magicjax.engine.loops import Loops
from magicjax.engine.setup import make_setup, validated_row
from magicjax.prediction import hlo
from sharding import abstract_mesh, make_mesh
from tests.magicjax import keywords, mesh_cases, oracle, tiny
from tests.magicjax.engine import engines
from tests.quick import quick
from tests.two_processes import Two

NEW, EOS, SLOTS = 24, 63, 4
GREEDY = (
    *("plain", "self", "snapkv", "h2o int8", "small"),
    *("prompt-lookup", "suffix", "several", "dynamic"),
)
SAMPLED = ("plain sampled", "self sampled", "small sampled", "several sampled")
# (data, model) of each case; others on a few.
SERVED = [
    *((case, (2, 2)) for case in GREEDY),
    *[("plain", (2, 1)), ("several", (2, 1)), ("small", (4, 1)), ("several", (4, 2))],
]
SAMPLES = [*((case, (2, 1)) for case in SAMPLED), ("several sampled", (2, 2))]


def engine(case: str, mesh: Sequence[int] | None, own=None, **options) -> magicjax.Engine:
    """Returns an engine of a case on a mesh (data, model), or with a drafter of its own."""
    drafter, tree, _, kv_heads = mesh_cases.CASES[case]
    defaults = dict(slots=SLOTS, capacity=128, max_tokens=NEW, eos_token_id=EOS)
    defaults |= dict(prefill_chunk=32, rounds_per_step=3, sampling="sampled" in case)
    return magicjax.Engine(
        mesh_cases.target(kv_heads),
        drafter(kv_heads, None) if own is None else own,
        tree,
        EngineConfig(**defaults | options),
        mesh=None if mesh is None else make_mesh(*mesh),
    )


def requests() -> list[tuple[np.ndarray, SamplingParams]]:
    """Returns prompts with limits; the second prompt and its answer begin later ones."""
    prompts = mesh_cases.prompts()[:6]
    longer = [np.concatenate([prompts[1], tail]) for tail in ([1, 2, 3], [4, 5])]
    limits = (20, 9, 24, 16, 24, 7, 12, 1)
    params = [SamplingParams(max_tokens=limit) for limit in limits]
    return list(zip([*prompts, *longer], params, strict=True))


def served(case: str, mesh: list[int] | None, **options) -> dict:
    """Returns the tokens of requests that share the slots, and what happened meanwhile.

    One is cancelled in its slot, and one has a deadline in the past.
    """
    running = engine(case, mesh, **options)
    setup, drafter = running._setup, running._setup.row.drafter
    running.warm_up()
    compiled = program_cache.totals()[0]
    handles = [running.submit(prompt, params) for prompt, params in requests()]
    late = running.submit([1, 2], deadline_s=1e-9)
    groups, rows = set(), 0
    while running.unfinished:
        running.step()
        rounds = [int(part.data) for part in running._state.rounds.addressable_shards]
        assert len(set(rounds)) == 1, f"the devices have different rounds: {rounds}"
        groups |= {
            slot * setup.slots.settings.groups // SLOTS for slot in running._scheduler.running
        }
        state, texts = engines.rows_of(running)
        if len(texts) > 1 and not rows:
            engines.check_state(state, texts, setup.row.target, drafter)
            rows = len(texts)
        if len(handles[2].tokens) and not handles[2].finished:
            handles[2].cancel()
    assert late.result().finish_reason == "deadline" and running._ended.all()
    return dict(
        tokens=[handle.result().tokens.tolist() for handle in handles],
        cancelled=handles[2].result().finish_reason,
        compiled=program_cache.totals()[0] - compiled,
        hits=running.stats.prefix_hits,
        reused=running.stats.reused_tokens,
        groups=sorted(groups),
        checked=rows,
    )


def check_served(found: dict, case: str, tally) -> None:
    target = mesh_cases.target(mesh_cases.CASES[case][3])
    prompts = [prompt for prompt, _ in requests()]
    rows = [np.array(row, np.int32) for row in found["tokens"]]
    plain = [
        oracle.cut(oracle.greedy(target, prompt, limit), EOS, limit)
        for prompt, limit in ((prompt, params.max_tokens) for prompt, params in requests())
    ]
    assert 0 < len(rows[2]) < len(plain[2]) and found["cancelled"] == "cancelled"
    plain[2] = plain[2][: len(rows[2])]
    tally.compare(target, prompts, plain, rows)
    assert found["compiled"] == 0 and found["checked"] > 1
    assert len(found["groups"]) > 1
    if "h2o" not in case:
        assert found["hits"] == 2 and found["reused"] >= 80


@pytest.mark.parametrize(("case", "mesh"), quick(SERVED, ("snapkv", (2, 2))))
def test_slots_divided_over_groups_of_devices_give_each_request_its_text_alone(
    case, mesh, eight, tally
):
    check_served(eight(served, case=case, mesh=mesh), case, tally)


def samples(case: str, mesh: list[int] | None) -> tuple[list[list[int]], list[list[float]]]:
    """Returns the tokens of samples of one prompt, and their log-probabilities."""
    running = engine(case, mesh, logprobs=1)
    params = SamplingParams(seed=3, temperature=0.8, logprobs=1, max_tokens=NEW)
    handles = running.submit_samples(mesh_cases.prompts()[1], 5, params)
    running.run()
    results = [handle.result() for handle in handles]
    return [r.tokens.tolist() for r in results], [r.logprobs.chosen.tolist() for r in results]


@pytest.mark.parametrize(("case", "mesh"), quick(SAMPLES))
def test_samples_on_a_data_mesh_are_those_of_generate_alone(case, mesh, eight):
    drafter, tree, _, kv_heads = mesh_cases.CASES[case]
    found, logprobs = eight(samples, case=case, mesh=mesh)
    for seed in range(5):
        alone = keywords.generate(
            mesh_cases.target(kv_heads),
            [mesh_cases.prompts()[1]],
            drafter=drafter(kv_heads, None),
            tree=tree,
            max_tokens=NEW,
            eos_token_id=EOS,
            seed=3 + seed,
            temperature=0.8,
            top_k=0,
            logprobs=1,
        )
        assert found[seed] == tiny.rows_of(alone)[0].tolist()
        np.testing.assert_allclose(logprobs[seed], alone.logprobs[0].chosen, atol=1e-4)


@struct.dataclass
class Own(magicjax.PromptLookup):
    """Prompt lookup that replaces and copies rows in another way."""

    def insert(self, state, row, slot):
        def select(old, new):
            is_slot = jnp.arange(len(old)) == slot
            return jnp.where(is_slot.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return jax.tree.map(select, state, row)

    def extract(self, state, slot):
        return jax.tree.map(lambda x: x[slot][None], state)


def with_a_wrong_rule(mesh: list[int]) -> list[bool]:
    """Returns whether the tokens are right if groups ignore whose slot it is."""
    in_group, found = slots._in_group, []
    expected = served("plain", None)["tokens"]
    wrong_rules = {
        "all groups write": lambda *x: (in_group(*x)[0], True),
        "the first group writes": lambda *x: (in_group(*x)[0], jax.lax.axis_index("data") == 0),
    }
    for rule in [in_group, *wrong_rules.values()]:
        program_cache.clear()
        slots._in_group = rule
        try:
            found.append(served("plain", mesh)["tokens"] == expected)
        except AssertionError:
            found.append(False)
        finally:
            slots._in_group = in_group
            program_cache.clear()
    return found


@pytest.mark.slow
def test_a_row_that_is_written_in_another_group_is_detected(eight):
    assert eight(with_a_wrong_rule, mesh=[2, 1]) == [True, False, False]


def texts(case: str, mesh: list[int] | None) -> list[list[int]]:
    """Returns the tokens of requests that share the slots."""
    running = engine(case, mesh)
    handles = [running.submit(prompt, params) for prompt, params in requests()]
    running.run()
    return [handle.result().tokens.tolist() for handle in handles]


def compiled_after_warm_up(mesh: list[int]) -> int:
    """Returns the programs that requests compile beside a draft model that is not divided."""
    kv_heads = mesh_cases.CASES["small"][3]
    drafter = magicjax.SmallModel(mesh_cases.draft(kv_heads, 1))
    running = engine("small", mesh, own=drafter, capacity=64, prefill_chunk=16)
    running.warm_up()
    before = program_cache.totals()[0]
    for prompt in mesh_cases.prompts()[:2] * 2:  # the last two begin with a stored prefix
        running.submit(prompt[:30], SamplingParams(max_tokens=9))
    running.run()
    return program_cache.totals()[0] - before


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[1, 2], [2, 2]])
def test_an_engine_on_a_mesh_compiles_nothing_after_warm_up(mesh, eight):
    assert eight(compiled_after_warm_up, mesh=mesh) == 0


def test_slots_that_do_not_divide_over_the_groups_are_an_error():
    with pytest.raises(ValueError, match="slots=6 do not divide over data=4 .* such as 8"):
        magicjax.Engine(tiny.model(), config=EngineConfig(slots=6), mesh=abstract_mesh(4, 1))


def test_a_mesh_that_divides_layers_is_an_error():
    with pytest.raises(ValueError, match="the mesh has stage=2, and an engine cannot divide"):
        magicjax.Engine(tiny.model(), mesh=abstract_mesh(1, 1, 2))


@pytest.fixture(scope="module")
def two():
    processes = Two()
    yield processes
    processes.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "several", "suffix"])
@pytest.mark.parametrize("mesh", [[1, 8], [2, 4], [4, 2]])
def test_an_engine_in_two_processes_gives_the_texts_of_one(case, mesh, two):
    assert two(texts, case=case, mesh=mesh) == texts(case, None)


def refused_in_two_processes(mesh: list[int]) -> list[str]:
    running, messages = engine("plain", mesh), []
    for options in (dict(deadline_s=5.0), dict(priority=1)):
        with pytest.raises(ValueError) as error:
            running.submit([1], **options)
        messages.append(str(error.value))
    return messages


@pytest.mark.slow
def test_requests_that_depend_on_the_clock_are_errors_in_two_processes(two):
    messages = two(refused_in_two_processes, mesh=[2, 4])
    assert messages == [
        f"{what} on a mesh of 2 processes, whose clocks differ: omit {what.split('=')[0]}"
        for what in ("deadline_s=5.0", "priority=1")
    ]


def wide_drafter(name: str):
    """Returns a drafter whose caches are distinguishable by their sizes."""
    from tests.magicjax.decoding.test_compiled import SMALL

    if name == "int8":
        return magicjax.SelfSpeculation("h2o", 1000, refresh_every=4, kv_dtype="int8")
    small = magicjax.SmallModel(wide_model(SMALL))
    return magicjax.Ensemble([magicjax.SelfSpeculation(budget=1000), small, Own()])


def wide_model(config) -> magicjax.Model:
    return magicjax.Model(models.build(config), tiny.put(tiny.drawn(config, 0)))


def row_programs(name: str, data: int) -> dict:
    """Returns what `insert` and `extract` move, exchange and allocate, in bytes and elements."""
    from tests.magicjax.decoding.test_compiled import WIDE, is_cache, moves

    mesh = None if data == 1 else make_mesh(data, 1)
    config = EngineConfig(slots=SLOTS, capacity=16_000, max_tokens=32, prefix_bytes=0)
    drafter, tree = wide_drafter(name), magicjax.chain(3)
    setup = make_setup(wide_model(WIDE), drafter, tree, config, mesh)
    state, row = (Decoder(x).state_shapes() for x in (setup.slots, setup.row))
    slot = jax.ShapeDtypeStruct((), np.int32, sharding=state.rounds.sharding)
    parts = setup.row.target, setup.row.drafter, state
    programs = {
        "insert": program_cache.program("insert", setup.slots.settings, *parts, row, slot),
        "extract": program_cache.program("extract", setup.row.settings, *parts, slot),
    }
    caches = jax.tree.leaves((state.cache, state.drafter), is_leaf=is_cache)
    sizes = [jax.tree.leaves(cache.k)[0].size // data for cache in caches if is_cache(cache)]
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((row.cache, row.drafter)))
    found: dict = dict(row=held, caches=len(sizes))
    for what, program in programs.items():
        text, memory = program.as_text(), program.memory_analysis()
        found[what] = dict(
            moved=sum(sum(moves(text, size).values()) for size in sizes),
            collectives=sorted({c.kind for c in hlo.collectives(text)}),
            largest=mesh_cases.largest_collective(text),
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
        )
    return found


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
@pytest.mark.parametrize(
    ("name", "data"), quick([*itertools.product(["ensemble", "int8"], [1, 2])], ("ensemble", 2))
)
def test_inserting_and_extracting_a_row_copy_no_cache(name, data, eight):
    found = row_programs(name, 1) if data == 1 else eight(row_programs, name=name, data=data)
    insert, extract = found["insert"], found["extract"]
    assert found["caches"] == (3 if name == "ensemble" else 2)
    assert insert["moved"] == extract["moved"] == 0
    assert insert["collectives"] == []
    assert insert["aliased"] >= SLOTS // data * 0.99 * found["row"]
    assert insert["temporary"] < found["row"] / 100
    assert extract["collectives"] == ([] if data == 1 else ["all-reduce"])
    assert extract["largest"] <= found["row"]
    assert extract["temporary"] <= (1e5 if data == 1 else 1.01 * found["row"])


def loop_collectives(mesh: list[int]) -> dict:
    """Returns what the engine's loop exchanges."""
    running = engine("self", mesh, slots=8)
    request, state = running._setup.slots, running._state
    loop = Decoder(request).loop(state, "any")
    text = loop.as_text()
    return dict(
        collectives={c.kind: c.count for c in hlo.collectives(text)},
        largest=mesh_cases.largest_collective(text),
    )


def test_groups_exchange_one_number_after_the_loop(eight):
    found = eight(loop_collectives, mesh=[8, 1])
    assert found == dict(collectives={"all-reduce": 1}, largest=1)


def test_replicated_rows_are_counted_on_every_device():
    from magicjax.decoding import memory
    from magicjax.engine.memory_check import check

    config = EngineConfig(slots=8, capacity=300, max_tokens=NEW, prefix_bytes=0)
    config, row = validated_row(tiny.model(), None, None, config)
    size = sum(row.kv_bytes)
    settings = dataclasses.replace(row.settings, mesh=abstract_mesh(4, 1))
    row = dataclasses.replace(row, settings=settings)
    config = dataclasses.replace(config, prefix_bytes=3 * size)
    rows = 8 // 4 + config.prefill_rows + 3
    check(row, config, available=rows * size)
    with pytest.raises(memory.OutOfMemoryError, match="slots=4 or capacity=.* prefix_bytes"):
        check(row, config, available=(rows - 1) * size)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
def test_prefill_in_a_row_copies_no_cache():
    from tests.magicjax.decoding.test_compiled import WIDE, moved_caches, shaped

    config = EngineConfig(slots=1, capacity=16_000, max_tokens=32)
    _, row = validated_row(shaped(WIDE), tiny.drafter("self"), tiny.TREES["chain4"], config)
    cache = Decoder(row).state_shapes().cache
    arguments = row.target, row.rows, cache
    program = program_cache.program("prefill", row.prefill_settings, *arguments)
    assert moved_caches(program, {"target": cache.k[0].size}) == {}
    held = 2 * WIDE.num_layers * cache.k[0].size * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 4


SOME_SLOTS = [magicjax.chain(3), magicjax.DynamicTree(6, 3, 2)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
@pytest.mark.parametrize("tree", quick(SOME_SLOTS, SOME_SLOTS[1]))
def test_a_loop_for_some_slots_copies_no_cache(tree):
    from tests.magicjax.decoding.test_compiled import SMALL, WIDE, moved_caches

    config = EngineConfig(slots=8, capacity=16_000, max_tokens=32, prefix_bytes=0)
    small = magicjax.SmallModel(wide_model(SMALL))
    setup = make_setup(wide_model(WIDE), small, tree, config, None)
    request, state = setup.slots, Decoder(setup.slots).state_shapes()
    some = Loops(request, adaptive=False)
    assert some.sizes == (1, 4, 8)
    loop = some.decoder(request, Clock(), *some.settings, 4).loop(state, "any")
    caches = {"target": state.cache.k[0].size, "draft": state.drafter.cache.k[0].size}
    of_part = {f"part of {name}": size // 2 for name, size in caches.items()}
    assert moved_caches(loop, caches | of_part) == {}
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.cache, state.drafter)))
    memory = loop.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * held
    assert memory.temp_size_in_bytes < held / 100
