"""`magicjax plan`: its output as text and as JSON, and its errors."""

import dataclasses
import json
import re

import pytest

import models
from magicjax.cli import plan
from magicjax.prediction import cost_model
from magicjax.trees.token_tree import chain, expansion

WHERE = ("--target", "llama-3.1-8b", "--batch", 64, "--context", 32000)
COPY = "self:streaming:512:weights=int4"
H100 = ("--device", "h100", "--mesh", "model=8")


def test_text_names_the_best_drafter_the_runner_up_and_the_break_even(run):
    code, out, err = run("plan", *WHERE, *H100, "--acceptance", 0.81)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "llama-3.1-8b, bfloat16, batch 64, context 32000, on 8 x h100 (data=1,model=8)"
    )
    assert re.match(r"plain decoding: predicted T_target [\d.]+ ms, [\d,]+ tokens/s", lines[1])
    best = (
        r"fastest drafter: self:streaming:256, chain:\d+: "
        r"predicted speedup [\d.]+x, [\d,]+ tokens/s"
    )
    assert re.match(best, lines[2])
    round_ = r"    [\d.]+ tokens per round, [\d.]+ ms per round: \d x T_draft [\d.]+, T_verify\("
    assert re.match(round_, lines[3])
    assert lines[4].startswith("runner-up: self:streaming:256, chain:")
    assumed = "assumed with --acceptance, never measured on this device"
    assert lines[6] == f"acceptance of self:streaming:256: {assumed}"
    assert lines[7] == "times from: T_target roofline, T_verify roofline, T_draft roofline"
    break_even = "break-even: chains of self:streaming:256 are faster than plain decoding above"
    assert lines[8].startswith("h100 is not calibrated: the roofline is its datasheet's")
    assert lines[9].startswith(f"{break_even} acceptance 0")
    assert lines[10] == "recommendation: speculative decoding"


def planned(run, *arguments):
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_numbers_of_json_are_consistent(run):
    found = planned(run, *WHERE, *H100, "--acceptance", 0.81, "--drafter", "self:snapkv:1024")
    best, plain = found["best"], found["plain"]
    assert (best["drafter"], best["policy"], best["budget"]) == ("self:snapkv:1024", "snapkv", 1024)
    assert found["speculate"] is True and found["mesh"] == {"data": 1, "model": 8}
    gamma = int(best["tree"].removeprefix("chain:"))
    assert best["tokens_per_round"] == pytest.approx(sum(0.81**i for i in range(gamma + 1)))
    rest = best["round_ms"] - gamma * best["t_draft_ms"] - best["t_verify_ms"]
    assert rest == pytest.approx(1e3 * cost_model.find_device("h100").round_seconds)
    speedup = best["tokens_per_round"] * plain["t_target_ms"] / best["round_ms"]
    assert best["speedup"] == pytest.approx(speedup)
    assert best["tokens_per_s"] / plain["tokens_per_s"] == pytest.approx(speedup)
    assert 0 < found["break_even_acceptance"] < 0.81


def test_plain_decoding_is_recommended_where_it_is_faster(run):
    where = ("--target", "llama-3.1-8b", "--batch", 64, "--context", 1000)
    code, out, _ = run("plan", *where, *H100, "--acceptance", 0.84)
    assert code == 0
    assert re.search(
        r"^plain is fastest; best drafter: self:streaming:256, chain:1: predicted speedup 0\.",
        out,
        re.M,
    )
    assert out.endswith("recommendation: plain decoding\n")
    found = planned(run, *where, *H100, "--acceptance", 0.84)
    assert found["speculate"] is False and found["best"]["speedup"] < 1


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    rows = ["streaming,512,8000,0.8", "streaming,512,32000,0.7", "snapkv,2048,32000,0.85"]
    path.write_text("\n".join(["policy,budget,context,acceptance", *rows]))
    return path


def test_a_table_is_searched_for_policy_and_budget(run, table):
    found = planned(run, *WHERE, *H100, "--acceptance", table)
    assert found["best"]["drafter"] == "self:snapkv:2048"
    assert found["runner_up"]["drafter"] == "self:streaming:512"
    assert found["best"]["acceptance_from"] == "measured at 32000"
    shorter = planned(run, *WHERE[:-1], 16000, *H100, "--acceptance", table)
    sources = {
        shorter[which]["drafter"]: shorter[which]["acceptance_from"]
        for which in ("best", "runner_up")
    }
    assert sources == {
        "self:streaming:512": "interpolated between 8000 and 32000",
        "self:snapkv:2048": "measured at 32000, the nearest context",
    }


def test_ranks_give_trees_that_generate_takes(run):
    small = ("--drafter", "small:llama-3.2-1b:streaming:512")
    found = planned(run, *WHERE, *H100, "--acceptance", "0.5,0.3,0.1", *small)
    assert found["best"]["tree"].startswith("parents:-1,0,0")
    assert plan.tree_spec(chain(3)) == "chain:3"
    assert plan.tree_spec(expansion((2, 1))) == "parents:-1,0,0,1,2"


def test_the_source_of_times_is_reported(run, tmp_path):
    sizes = cost_model.sizes_of(models.preset("llama-68m"), "bfloat16", "llama-68m")
    passes = cost_model.Steps(sizes.key, cost_model.PASS, (1, 4), (1024,), (1, 2), (1e-3, 2e-3) * 2)
    drafts = cost_model.Steps(sizes.key, cost_model.DRAFT, (1, 4), (64,), (1,), (1e-4, 1e-4))
    device = dataclasses.replace(cost_model.find_device("h200"), measured=(passes, drafts))
    cost_model.save_profile(tmp_path / "mine.json", device, {})

    def times(batch):
        where = ("--target", "llama-68m", "--batch", batch, "--context", 1024)
        # Where nothing is accepted a chain of 1 is the least slow.
        given = ("--device", tmp_path / "mine.json", "--acceptance", 0)
        return planned(run, *where, *given, "--drafter", "self:streaming:64")["times_from"]

    assert times(4) == dict.fromkeys(["T_target", "T_verify", "T_draft"], "measured")
    assert set(times(2).values()) == {"interpolated"}
    assert set(times(8).values()) == {"extrapolated"}


REFUSED = {
    "no acceptance": ((*WHERE, *H100), "--acceptance is required and has no default: pass a"),
    "a device": (
        (*WHERE, "--device", "h10", "--acceptance", 0.8),
        "profile from `magicjax calibrate`; did you mean 'h100'?",
    ),
    "a preset": (
        ("--target", "llama-3.1-8", *WHERE[2:], *H100, "--acceptance", 0.8),
        "did you mean 'llama-3.1-8b'?",
    ),
    "heads": (
        (*WHERE, "--device", "h100", "--mesh", "model=3", "--acceptance", 0.8),
        "model=3 does not divide the model: its 8 KV heads are not a multiple of 3",
    ),
    "a copy of a quantized target": (
        (*WHERE, *H100, "--acceptance", 0.8, "--weights", "int8", "--drafter", COPY),
        "quantize a target on the device, and the target has --weights 'int8' already",
    ),
    "memory": (
        ("--target", "llama-3.1-8b", "--batch", 400, "--context", 32000, *H100, "--acceptance", 1),
        "--batch 400 with --context 32000 needs 211.7 GB on each of 8 h100 with 80 GB: at most 148 "
        "rows fit",
    ),
    "context": (
        (*WHERE[:-1], 200000, *H100, "--acceptance", 0.8),
        "--context 200000 exceeds the 131072 positions of llama-3.1-8b",
    ),
    "another vocabulary": (
        (*WHERE, *H100, "--acceptance", 0.8, "--drafter", "small:llama-68m:streaming:256"),
        "the drafter's vocabulary has 32000 rows and the target's 128256",
    ),
    "a small model's context": (
        (
            *("--target", "llama-2-7b-32k", "--batch", 1, "--context", 4096, *H100),
            *("--acceptance", 0.8, "--drafter", "small:llama-68m:snapkv:256"),
        ),
        "need 4096 positions and the drafter has 2048",
    ),
    "a dtype": (
        (*WHERE, *H100, "--acceptance", 0.8, "--dtype", "float32"),
        "the rates of h100 are for bfloat16, and --dtype float32: use bfloat16, or",
    ),
    "a drafter beside a table": (
        (*WHERE, *H100, "--acceptance", "TABLE", "--drafter", "self:snapkv:256"),
        "lists its drafters: remove it",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_input_is_an_error_in_terms_of_options(what, run, table):
    arguments, message = REFUSED[what]
    given = [table if argument == "TABLE" else argument for argument in arguments]
    code, out, err = run("plan", *given)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
