"""Reading of compiled programs: operations, copies and collectives."""

import pytest

from magicjax.prediction import hlo


def test_copies_are_distinguished_from_other_operations():
    text = """
      %copy.1 = bf16[2,8,64,16]{3,2,1,0} copy(%p.1)
      %copy-start = (bf16[4,4]{1,0}, bf16[4,4]{1,0}, u32[]) copy-start(%p.2)
      %copied = f32[2,2]{1,0} fusion(%p.3), calls=%copy
      %copy.2 = bf16[7,7]{1,0} copy(%broadcast.21)
      %copy.3 = bf16[7,7]{1,0} copy(%loop_broadcast_fusion.1), metadata={}
      %copy.4 = bf16[5]{0} copy(%broadcast_add_fusion.1)
      %copy-start.5 = (bf16[6]{0:T(128)S(1)}, bf16[6]{0:T(128)}, u32[]{:S(2)}) copy-start(%a.6)
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
def test_collectives_between_groups_are_counted_separately(who, between):
    """Of four devices, two in each group."""
    line = f"  %x = f32[4]{{0}} all-reduce(%p), {who}, to_apply=%sum"
    program = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{line}\n}}\n"
    (found,) = hlo.collectives(program, 2)
    assert (found.count, found.bytes, found.between) == (1, 16, between)
    (found,) = hlo.collectives(program)
    assert not found.between


def test_collectives_in_loops_are_counted_as_often_as_they_run():
    counted = {c.kind: (c.count, c.bytes) for c in hlo.collectives(PROGRAM)}
    assert counted == {
        # Three levels, the round, and the branch with more traffic.
        "all-reduce": (5, 3 * 4 * 8 * 4 + 4 * 8 * 4 + 4 * 4 + 4 * 8 * 4),
        "all-gather": (1, 2 * 16 * 2),
    }


def test_operations_have_operands_references_and_scopes():
    text = """HloModule jit_f

%fused (a: f32[2,4]) -> f32[2,8] {
  ROOT %dot.1 = f32[2,8]{1,0} dot(%a, %b), metadata={op_name="jit(f)/mlp/dot"}
}

ENTRY %main (p: f32[2,4]) -> f32[2,8] {
  %p = f32[2,4]{1,0} parameter(0)
  ROOT %fusion = f32[2,8]{1,0} fusion(%p, %p), kind=kOutput, calls=%fused
}
"""
    found = hlo.operations(text)
    assert list(found) == ["fused", "main"]
    (dot,), (parameter, fusion) = found.values()
    assert (dot.name, dot.opcode, dot.operands) == ("dot.1", "dot", ["a", "b"])
    assert dot.scope == "jit(f)/mlp/dot" and dot.fused is None
    assert (parameter.opcode, parameter.operands) == ("parameter", [])
    assert fusion.operands == ["p", "p"] and fusion.references == ["fused"]
    assert fusion.fused == "fused" and fusion.scope is None


# The matrix has 64 elements, as many as the cache and the queries of the attention.
FUSIONS = {
    "dequantizing": ("s4[8,8]", "bf16[8,8]", "bf16[8,8] convert(%p)", 1),
    "of a slice": ("s8[4,8,8]", "f32[8,8]", "f32[8,8] convert(%slice)", 1),
    "of float8": ("f8e4m3fn[64]", "f16[64]", "f16[64] convert(%p)", 1),
    "a product": ("s4[8,8]", "bf16[8,8]", "bf16[8,8] convert(%p)\n  %d = bf16[8,8] dot(%c, %c)", 0),
    "a smaller result": ("s8[8,8]", "bf16[8]", "bf16[8,8] convert(%p)", 0),
    "a float8 copy": ("s8[8,8]", "f8e4m3fn[8,8]", "f8e4m3fn[8,8] convert(%p)", 0),
    "a cache write": ("bf16[1,8,8]", "bf16[1,8,8]", "bf16[1,8,8] dynamic-update-slice(%p)", 0),
    "an attention block": ("bf16[2,8,4]", "f32[2,8,4]", "f32[2,8,4] convert(%p)", 0),
}


@pytest.mark.parametrize("what", FUSIONS)
def test_only_conversions_of_quantized_arrays_are_counted(what):
    argument, result, operation, count = FUSIONS[what]
    text = f"""HloModule jit_f

%fused (p: {argument}) -> {result} {{
  %p = {argument}{{0}} parameter(0)
  %slice = s8[8,8]{{1,0}} dynamic-slice(%p)
  %c = {operation}
}}

ENTRY %main (p: {argument}) -> {result} {{
  %p = {argument}{{0}} parameter(0)
  ROOT %fusion = {result}{{0}} fusion(%p), kind=kLoop, calls=%fused
}}
"""
    assert hlo.dequantized(text, {64}) == count
    assert hlo.dequantized(text, {32}) == 0
