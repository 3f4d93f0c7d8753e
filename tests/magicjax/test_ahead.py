"""What is asked of the compiler for GPUs that are not here, and read out of its programs."""

import dataclasses
import types

import jax
import pytest

from magicjax.aot import aot_compile, hlo
from sharding import abstract_mesh

LOAD = aot_compile.Workload("llama-3.2-1b", "self:streaming:512", "chain:4", 16, 32768, "h200")


def request_of(**changes):
    load = dataclasses.replace(LOAD, **changes)
    return aot_compile.request_of(load, abstract_mesh(load.data, load.model))


@pytest.fixture
def two_layers(monkeypatch):
    """Cuts every model to two layers: the others' caches are the same, and take long to trace."""
    whole = aot_compile.skeleton

    def cut(source):
        config = dataclasses.replace(whole(source).config, num_layers=2)
        return types.SimpleNamespace(config=config)

    monkeypatch.setattr(aot_compile, "skeleton", cut)


def test_a_model_too_large_for_this_machine_is_described_without_its_arrays():
    request = request_of()
    assert request.settings.backend == "mosaic"
    leaves = jax.tree.leaves(request.target.params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    state = aot_compile.state_shapes(request)
    slots = request.settings.capacity
    assert 32768 <= slots < 32768 + 128
    assert state.cache.k[0].shape == (16, 8, slots, 64) and len(state.cache.k) == 16
    assert state.drafter.cache.k[0].shape == (16, 8, 512, 64)


@pytest.mark.usefixtures("two_layers")
def test_on_a_mesh_every_device_has_its_rows_and_heads():
    request = request_of(data=2, model=4)
    slots = request.settings.capacity
    assert aot_compile.cache_sizes(request) == {
        "target": {8 * 2 * slots * 64},
        "draft 1": {8 * 2 * 512 * 64},
    }


@pytest.mark.usefixtures("two_layers")
def test_a_small_draft_may_be_divided_less_than_the_target():
    request = request_of(drafter="small:llama-3.2-1b:streaming:512", model=8, draft_shards=2)
    assert aot_compile.cache_sizes(request)["draft 1"] == {16 * 4 * 512 * 64}


@pytest.mark.usefixtures("two_layers")
def test_the_draft_cache_can_be_in_integers():
    keys = aot_compile.state_shapes(request_of(kv_dtype="int8")).drafter.cache.k[0]
    assert keys.values.dtype == "int8" and keys.shape == (16, 8, 512, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(device="a100", backend="mosaic"), "backend=mosaic is for Hopper, not a100"),
        (dict(context=64), "context=64 must hold more than max_new_tokens=128"),
        (dict(model=64), "does not divide the model: its 32 query heads are no multiple of 64"),
        (dict(drafter="", tree="chain:4"), "tree=chain:4 needs a drafter"),
        (dict(draft_shards=2), "draft_shards=2 is for small models"),
        (dict(batch=-1), "batch=-1 must be at least 1"),
        (dict(data=3), "16 prompts do not divide over data=3"),
        (dict(device="b300"), "device=b300 is unknown: use a100, h100, h200, or the path"),
        (dict(kv_dtype="int8", drafter="look-up:4"), "kv_dtype=int8 is of a draft's sparse cache"),
        (dict(target="llama-9"), "llama-9"),
    ],
)
def test_what_cannot_be_compiled_is_refused(changes, message):
    with pytest.raises(ValueError) as error:
        request_of(**changes)
    assert message in str(error.value)


def test_a_device_may_be_described_in_a_file(tmp_path):
    own = tmp_path / "own.txtpb"
    own.write_text(aot_compile.DEVICES["h200"].read_text().replace("150000000000", "160000000000"))
    assert aot_compile.memory_of(str(own)) == 160_000_000_000 and aot_compile.is_hopper(str(own))
    own.write_text("cuda_compute_capability {\n  major: 9\n  minor: 0\n}")
    assert aot_compile.is_hopper(str(own))
    own.write_text("")
    with pytest.raises(ValueError, match="says no device_memory_size"):
        aot_compile.memory_of(str(own))


def test_kernels_are_read_from_what_the_compiler_dumped(tmp_path):
    dumped = tmp_path / "a.ptxas"
    dumped.write_text(
        "    16 bytes stack frame, 12 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem\n"
    )
    assert aot_compile.kernels([dumped]) == [{"registers": 232, "spilled bytes": 52}]


def test_each_size_of_shared_memory_is_read_once(tmp_path):
    paths = []
    for name, size in {"a": 231424, "a_1": 200704, "a_2": 231424}.items():
        paths.append(tmp_path / f"{name}.resources.txt")
        paths[-1].write_text(f"Resources(smem_scratch_bytes={size}, ...)")
    assert aot_compile.shared_bytes(paths) == [200704, 231424]


def test_copies_are_told_from_other_operations_by_name_and_size():
    text = """
      %copy.1 = bf16[2,8,64,16]{3,2,1,0} copy(%p.1)
      %copy-start = (bf16[4,4]{1,0}, bf16[4,4]{1,0}, u32[]) copy-start(%p.2)
      %copied = f32[2,2]{1,0} fusion(%p.3), calls=%copy
      %copy.2 = bf16[7,7]{1,0} copy(%broadcast.21)
      %copy.3 = bf16[7,7]{1,0} copy(%loop_broadcast_fusion.1), metadata={}
      %copy.4 = bf16[5]{0} copy(%broadcast_add_fusion.1)
    """
    assert list(hlo.copied_sizes(text)) == [2 * 8 * 64 * 16, 16, 5]


PROGRAM = """HloModule jit_run

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%level (p: (f32[4,8])) -> (f32[4,8]) {
  %all-reduce.1 = f32[4,8]{1,0} all-reduce(%p), to_apply=%sum
  ROOT %t = (f32[4,8]{1,0}) tuple(%all-reduce.1)
}

%nothing (p: (f32[4,8])) -> (f32[4,8]) {
  ROOT %t = (f32[4,8]{1,0}) tuple(%p)
}

%round (p: (f32[4,8])) -> (f32[4,8]) {
  %while.1 = (f32[4,8]{1,0}) while(%p), body=%level, backend_config={"known_trip_count":{"n":"3"}}
  %ag = (bf16[2,2]{1,0}, bf16[2,16]{1,0}) all-gather-start(%q), dimensions={1}
  %ar = (f32[4,8]{1,0}, s32[4]{0}) all-reduce-start(%x, %y), to_apply=%sum
  %due = (f32[4,8]{1,0}) conditional(%i, %p, %p), branch_computations={%level, %nothing}
  ROOT %t = (f32[4,8]{1,0}) tuple(%while.1)
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  ROOT %while.2 = (f32[4,8]{1,0}) while(%p), condition=%never, body=%round
}
"""


@pytest.mark.parametrize(
    ("who", "between"),
    [
        ("replica_groups={{0,1},{2,3}}", False),
        ("replica_groups={{0,2},{1,3}}", True),
        ("replica_groups=[2,2]<=[4]", False),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", True),
        ("replica_groups=mesh['stage'=2,'model'=2] {'model'}", False),
        ("replica_groups=mesh['stage'=2,'model'=2] {'stage'}", True),
        ("source_target_pairs={{0,1},{2,3}}", False),
        ("source_target_pairs={{0,2},{1,3}}", True),
        ("replica_groups={}", True),
    ],
)
def test_what_goes_between_groups_of_devices_is_told_apart(who, between):
    """Of four devices, two in each group."""
    line = f"  %x = f32[4]{{0}} all-reduce(%p), {who}, to_apply=%sum"
    program = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{line}\n}}\n"
    (found,) = hlo.collectives(program, 2)
    assert (found.count, found.bytes, found.between) == (1, 16, between)
    (found,) = hlo.collectives(program)
    assert not found.between


def test_what_is_exchanged_is_counted_as_often_as_it_runs():
    counted = {c.kind: (c.count, c.bytes) for c in hlo.collectives(PROGRAM)}
    assert counted == {
        # Three levels, the round's own, and the dearer branch.
        "all-reduce": (5, 3 * 4 * 8 * 4 + 4 * 8 * 4 + 4 * 4 + 4 * 8 * 4),
        "all-gather": (1, 2 * 16 * 2),
    }
    assert hlo.largest_collective(PROGRAM) == 32
