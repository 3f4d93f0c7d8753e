"""Profiles by phase: small programs and traces, then real ones."""

import gzip
import json

import numpy as np
import pytest

import magicjax
from magicjax.benchmarks import profile_phases
from magicjax.benchmarks.profile_ops import Event
from magicjax.benchmarks.profile_phases import PHASES, Span
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


def test_an_operand_of_one_phase_belongs_to_it():
    program = PROGRAM.replace("copy(%get-tuple-element.1)\n  %tuple.1", "copy(%k)\n  %tuple.1")
    found, _ = profile_phases.phases_of_operations(program)
    assert found["made_for_the_draft"] == "draft"  # through the tuple that the loop takes


def test_without_a_drafter_nothing_is_drafted():
    found, _ = profile_phases.phases_of_operations(PROGRAM, drafting=False)
    assert found["inside"] == "score" and "draft" not in found.values()


PHASE_OF = {"draw": "draft", "dot": "score", "argmax": "verify", "loop": "draft"}


def timeline(*events, control=("while", "loop")):
    events = [Event(name, name, begin, end) for name, begin, end in events]
    return profile_phases.timeline(events, PHASE_OF, set(control))


def seconds(spans):
    total = dict.fromkeys((*PHASES, "rest"), 0)
    for span in spans:
        total[span.phase] += span.end - span.begin
    return {phase: x for phase, x in total.items() if x}


def test_the_same_operation_on_several_threads_counts_once():
    assert seconds(timeline(("dot", 0, 10), ("dot", 0, 8), ("dot", 2, 12))) == {"score": 12}


def test_nested_operations_count_once():
    events = ("while", 0, 30), ("loop", 1, 20), ("draw", 2, 8), ("draw", 9, 19), ("dot", 21, 29)
    assert seconds(timeline(*events)) == {"draft": 16, "score": 8}


def test_a_nested_operation_takes_precedence():
    assert timeline(("dot", 0, 10), ("argmax", 4, 6)) == [
        Span(0, 4, "score"),
        Span(4, 6, "verify"),
        Span(6, 10, "score"),
    ]


def test_a_loop_without_nested_events_counts_as_one_operation():
    assert seconds(timeline(("loop", 0, 5), ("dot", 5, 6))) == {"draft": 5, "score": 1}


def test_an_operation_outside_the_phases_yields_to_one_of_a_phase():
    assert seconds(timeline(("dot", 0, 10), ("", 4, 14))) == {"score": 10, "rest": 4}


def test_every_instant_counts_once_whatever_overlaps():
    rng = np.random.default_rng(0)
    names = np.array(["draw", "dot", "argmax", "other"])
    events = [(names[i], b, b + n) for i, b, n in rng.integers(0, (4, 200, 30), (120, 3))]
    covered = {t for _, begin, end in events for t in range(begin, end)}
    spans = timeline(*events)
    assert sum(seconds(spans).values()) == len(covered)
    assert all(a.end <= b.begin for a, b in zip(spans, spans[1:]))


def test_consecutive_spans_of_a_phase_are_merged():
    spans = timeline(("draw", 0, 2), ("other", 2, 3), ("draw", 4, 6), ("dot", 6, 9))
    assert profile_phases.merge_spans(spans) == [Span(0, 6, "draft"), Span(6, 9, "score")]


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


def test_the_phases_add_up_to_the_loops_wall_time(monkeypatch):
    calls = []
    real = profile_phases.runner.timed

    def timed(*arguments):
        calls.append(real(*arguments))
        return calls[-1]

    monkeypatch.setattr(profile_phases.runner, "timed", timed)
    plain = traced(rounds=4)
    assert plain.wall_s == pytest.approx(calls[-1][1]) and plain.rounds == 4


def test_plain_decoding_drafts_nothing():
    plain = traced()
    assert plain.draft == 0 and plain.rounds == tiny.NEW - 1
    assert min(plain.score, plain.verify, plain.commit) > 0


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


def test_a_choice_is_traced_with_its_tree():
    drafter = magicjax.PromptLookup()
    auto = magicjax.Auto([drafter])
    choice = magicjax.Choice(drafter, tiny.TREES["chain3"], None, (), {}, {}, {}, auto)
    assert traced(drafter=choice, rounds=2).draft > 0


def test_at_least_one_round_is_traced():
    with pytest.raises(ValueError, match="rounds=0 is too small: trace at least 1"):
        traced(rounds=0)
