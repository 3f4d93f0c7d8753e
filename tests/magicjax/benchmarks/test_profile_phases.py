"""Profiles by phase: small programs and traces, then real ones."""

import gzip
import json

import numpy as np
import pytest
from jax.profiler import ProfileData

import magicjax
from magicjax.benchmarks import profile_phases
from magicjax.benchmarks.profile_phases import PHASES, Event
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.request import RequestOptions
from tests.magicjax import tiny

PROGRAM = """HloModule jit_decode, is_scheduled=true

%draft_body (t: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %get-tuple-element.9 = f32[2,4]{1,0} get-tuple-element(%t), index=1
  %inside = f32[2,4]{1,0} fusion(%get-tuple-element.9), kind=kLoop, calls=%f, metadata={stack_frame_id=3}
  %verify_of_a_drafter = f32[2,4]{1,0} add(%inside, %inside), metadata={op_name="jit(decode)/while/body/propose/while/body/verify/add"}
}

%body (t: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %get-tuple-element.1 = f32[2,4]{1,0} get-tuple-element(%t), index=1
  %made_for_the_draft = f32[2,4]{1,0} copy(%get-tuple-element.1)
  %tuple.1 = (s32[], f32[2,4]{1,0}) tuple(%get-tuple-element.1, %made_for_the_draft)
  %while.2 = (s32[], f32[2,4]{1,0}) while(%tuple.1), condition=%c, body=%draft_body, metadata={op_name="jit(decode)/while/body/propose/while"}
  %dot.1 = f32[2,8]{1,0} dot(%x, %y), metadata={op_name="jit(decode)/while/body/score/mlp/dot_general"}
  %window = f32[2,8]{1,0} fusion(%dot.1), kind=kLoop, calls=%g
  %argmax = s32[2]{0} fusion(%window), kind=kLoop, calls=%h, metadata={op_name="jit(decode)/while/body/verify/argmax"}
  %update = f32[2,4]{1,0} fusion(%argmax), kind=kLoop, calls=%i, metadata={op_name="jit(decode)/while/body/commit/scatter"}
  %copy.5 = s32[] copy(%get-tuple-element.1)
  ROOT %tuple.2 = (s32[], f32[2,4]{1,0}) tuple(%copy.5, %update)
}

%c (t: (s32[], f32[2,4])) -> pred[] {
  ROOT %done = pred[] fusion(%t), kind=kLoop, calls=%j, metadata={op_name="jit(decode)/while/cond/and"}
}

ENTRY %main (p: f32[2,4]) -> f32[2,4] {
  %while.1 = (s32[], f32[2,4]{1,0}) while(%p), condition=%c, body=%body, metadata={op_name="jit(decode)/while"}
}
"""  # noqa: E501


def test_operations_of_a_program_have_phases():
    found, control = profile_phases.phases_of_operations(PROGRAM)
    assert control == {"while.1", "while.2"}
    expected = {
        "while.2": "draft",
        "inside": "draft",  # without a scope, in the draft's loop
        "verify_of_a_drafter": "draft",  # the outermost scope counts
        "dot.1": "score",
        "window": "score",  # without a scope, it reads an operation of the pass
        "argmax": "verify",
        "update": "commit",
    }
    assert {name: found[name] for name in expected} == expected
    # Outside the phases: the loop, its condition, and a value that only its end reads.
    assert not {"while.1", "done", "copy.5"} & found.keys()


GPU = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #7(Compute)"
    events { metadata_id: 1 offset_ps: 100000000 duration_ps: 40000000 stats { metadata_id: 1 str_value: "while.1" } }
    events { metadata_id: 2 offset_ps: 100000000 duration_ps: 20000000 stats { metadata_id: 1 str_value: "dot.1" } }
    events { metadata_id: 3 offset_ps: 120000000 duration_ps: 20000000 stats { metadata_id: 1 str_value: "dot.1" } }
    events { metadata_id: 4 offset_ps: 150000000 duration_ps: 5000000 }
  }
  lines { name: "XLA Ops" events { metadata_id: 2 offset_ps: 100000000 duration_ps: 60000000 } }
  event_metadata { key: 1 value { id: 1 name: "while.1" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_1" } }
  event_metadata { key: 3 value { id: 3 name: "gemm_fusion_2" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2H" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 } } }
"""  # noqa: E501


def test_gpu_kernels_and_copies_are_summed_by_operation():
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(GPU))
    events = profile_phases.events_of(data, "jit_decode", on_cpu=False)
    assert [(e.name, e.begin, e.end) for e in events[1:]] == [
        ("dot.1", 100, 120),
        ("dot.1", 120, 140),
        ("", 150, 155),
    ]
    found = profile_phases.by_operation(events, {"while.1"})
    assert found == pytest.approx({"gemm_fusion": 40e-6, "MemcpyD2H": 5e-6})
    host = ProfileData.from_text_proto('planes { name: "/host:CPU" }')
    for on_cpu, message in ((False, "the trace has no device"), (True, "no event of jit_decode")):
        with pytest.raises(ValueError, match=message):
            profile_phases.events_of(host, "jit_decode", on_cpu)


PHASE_OF = {"draw": "draft", "dot": "score", "argmax": "verify", "loop": "draft"}


def timeline(*events, control=("while", "loop")):
    events = [Event(name, name, begin, end) for name, begin, end in events]
    return profile_phases.timeline(events, PHASE_OF, set(control))


def seconds(spans):
    total = dict.fromkeys((*PHASES, "rest"), 0)
    for span in spans:
        total[span.phase] += span.end - span.begin
    return {phase: x for phase, x in total.items() if x}


def test_every_instant_counts_once_whatever_overlaps():
    rng = np.random.default_rng(0)
    names = np.array(["draw", "dot", "argmax", "other"])
    events = [(names[i], b, b + n) for i, b, n in rng.integers(0, (4, 200, 30), (120, 3))]
    covered = {t for _, begin, end in events for t in range(begin, end)}
    spans = timeline(*events)
    assert sum(seconds(spans).values()) == len(covered)
    assert all(a.end <= b.begin for a, b in zip(spans, spans[1:]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def speculative(folder):
    options = dict(drafter=tiny.drafter("self"), tree=tiny.TREES["chain3"])
    return traced(folder, **options)


def traced(folder=None, rounds=profile_phases.ROUNDS, **options):
    params = magicjax.SamplingParams(max_tokens=tiny.NEW)
    options = RequestOptions(eos_token_id=tiny.NEVER, **options)
    return profile_phases.trace(
        tiny.model(), tiny.prompts(3), params, options, folder=folder, rounds=rounds
    )


def test_a_speculative_loop_has_time_in_every_phase(speculative):
    assert all(getattr(speculative, phase) > 0 for phase in PHASES)
    assert speculative.rest >= 0 and speculative.host >= 0
    assert list(speculative.seconds) == [*PHASES, "rest", "host"]
    seconds = list(speculative.operations.values())
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 0


def test_the_phases_add_up_to_the_loops_wall_time(monkeypatch):
    calls = []
    real = Decoder.decode

    def timed(decoder, *arguments):
        state = real(decoder, *arguments)
        calls.append(decoder.clock.newest_s)
        return state

    monkeypatch.setattr(Decoder, "decode", timed)
    plain = traced(rounds=4)
    assert plain.wall_s == pytest.approx(calls[-1]) and plain.rounds == 4


def test_the_trace_has_a_track_of_phases_at_the_top(speculative, folder):
    with gzip.open(folder / "trace.perfetto.json.gz", "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e]  # JAX ends with an empty one
    assert [path.name for path in folder.iterdir()] == ["trace.perfetto.json.gz"]
    orders = {e["args"]["sort_index"]: e["pid"] for e in events if "sort_index" in e["name"]}
    top = [e for e in events if e["pid"] == orders[min(orders)] and e["ph"] == "X"]
    assert {e["name"] for e in top} == set(PHASES)
    assert sum(e["name"] == "score" for e in top) >= speculative.rounds
    operations = [e for e in events if "hlo_op" in e.get("args", {})]
    assert min(e["ts"] for e in operations) <= top[0]["ts"]
    assert max(e["ts"] + e["dur"] for e in operations) >= top[-1]["ts"] + top[-1]["dur"]
