"""`magicjax fit` without the compiler: memory of a device, and the largest workload."""

import json
import types

import pytest

from magicjax.cli import fit

ARGUMENTS = ["fit", "--target", "llama-3.1-8b", "--drafter", "self:streaming:512", "--analytic"]
LOAD = ["--batch", "128", "--context", "32768", "--device", "h200", "--mesh", "model=8"]


def test_a_workload_that_does_not_fit_exits_with_3_and_reports_the_missing_memory(run):
    code, out, _ = run(*ARGUMENTS, *LOAD[:4], "--device", "h100", "--mesh", "model=4")
    assert code == fit.DOES_NOT_FIT == 3
    sizes = {
        line[2:26].strip(): float(line[26:].split()[0])
        for line in out.splitlines()
        if line.startswith("  ")
    }
    over = sizes["total"] - sizes["usable"]
    assert over > 0 and f"DOES NOT FIT: {over:.2f}"[:-1] in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device", "b300"],
            "--device b300 is unknown: use a10, a100, b200, h100, h200, l4, l40",
        ),
        (["--mesh", "model=3"], "does not divide the model"),
        (["--mesh", "pipe=3"], "'pipe=3' is not a valid mesh: use stage=2,data=2,model=2"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--target", "llama-9"], "llama-9"),
        (
            ["--context", "200000"],
            "--context 200000 exceeds the 131072 positions of llama-3.1-8b: use at most 131072",
        ),
    ],
)
def test_invalid_input_is_an_error_before_compilation(run, arguments, message):
    code, _, errors = run(*ARGUMENTS, *LOAD, *arguments)
    assert code == 2 and message in errors


def test_without_the_compiler_the_report_is_an_estimate(run, monkeypatch):
    def fails(_):
        raise OSError("no network")

    monkeypatch.setattr(fit, "_compiler", fails)
    code, out, _ = run("fit", "--target", "llama-3.2-1b", *LOAD)
    assert code == 0 and "the compiler cannot be downloaded: no network" in out
    found = json.loads(run("fit", "--target", "llama-3.2-1b", *LOAD, "--json")[1])
    assert found["workload"]["weights"] is None


def test_a_cpu_is_counted_from_shapes_and_leaves_memory_to_other_programs(run, monkeypatch):
    monkeypatch.setattr(fit, "_compile_in_subprocess", lambda workload: pytest.fail("compiled"))
    load = ["--batch", "1", "--context", "8k", "--device", "cpu:16", "--json"]
    found = json.loads(run("fit", "--target", "llama-3.2-1b", *load)[1])
    assert found["workload"]["backend"] == "cpu" and "for a CPU" in found["estimate"]
    assert found["bytes on each device"]["usable"] == int(fit.USABLE_OF_CPU * (16 << 30))


def test_what_exceeds_the_memory_is_not_compiled(run, monkeypatch):
    monkeypatch.setattr(fit, "_compile_in_subprocess", lambda workload: pytest.fail("compiled"))
    code, out, _ = run("fit", "--target", "llama-3.1-8b", *LOAD[:4], "--device", "v5e")
    assert code == 3 and "not compiled (weights and caches exceed the memory)" in out


def test_options_for_less_memory_are_named(run):
    arguments = ["--target", "qwen3.5-27b", "--analytic", "--batch", "1", "--context", "4096"]
    code, out, _ = run("fit", *arguments, "--device", "v5e")
    assert code == 3 and "or --weights, --kv-dtype, --offload, --mesh for less memory" in out


def test_a_compiler_that_lacks_memory_is_one_line(run, monkeypatch, tmp_path):
    failed = types.SimpleNamespace(
        returncode=1, stderr="a trace\nJaxRuntimeError: RESOURCE_EXHAUSTED: 61.59G of 15.75G\n\n"
    )
    monkeypatch.setattr(fit, "_compiler", lambda kind: tmp_path)
    monkeypatch.setattr(fit.subprocess, "run", lambda *arguments, **options: failed)
    code, _, errors = run("fit", "--target", "llama-3.2-1b", *LOAD)
    assert code == 2 and "need more memory than h200 has" in errors and "a trace" not in errors


def test_a_cache_in_8_bits_has_half_the_bytes_and_a_scale_per_vector(run):
    arguments = (*ARGUMENTS, *LOAD, "--json")
    plain, rounded = (
        json.loads(run(*arguments, *more)[1]) for more in ((), ("--kv-dtype", "int8"))
    )
    name = "bytes on each device"
    assert rounded[name]["target KV"] / plain[name]["target KV"] == (128 + 4) / 256
    assert rounded[name]["draft KV"] == plain[name]["draft KV"]
    assert rounded["largest context"] > 1.8 * plain["largest context"]
    title = run(*ARGUMENTS, *LOAD, "--kv-dtype", "int8")[1].splitlines()[2]
    assert title.endswith(", int8 KV cache")
    plan = ("plan", "--target", "llama-3.1-8b", "--batch", 64, "--context", 32000, "--json")
    plan += ("--device", "h100", "--mesh", "model=8", "--acceptance", 0.8)
    steps = [
        json.loads(run(*plan, *more)[1])["plain"]["t_target_ms"]
        for more in ((), ("--kv-dtype", "int8"))
    ]
    assert 0.5 < steps[1] / steps[0] < 0.8  # the cache is most of what a step reads


def test_the_largest_context_fits_and_a_longer_one_does_not(run):
    """In gemma-3-12b, layers with a sliding window have caches that do not grow."""
    where = ("--target", "gemma-3-12b", "--batch", 8, "--device", "h100", "--analytic", "--json")

    def report(context: int) -> dict:
        return json.loads(run("fit", *where, "--context", context)[1])

    largest = report(30_000)["largest context"]
    assert 90_000 < largest < 131_072
    assert report(int(0.99 * largest))["fits"] and not report(int(1.01 * largest))["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.parametrize(
    ("weights", "form"), [((), "int4:8"), (("--weights", "none"), None), (("--offload",), "int4:8")]
)
def test_the_format_of_a_quantized_checkpoint_is_reported(command, weights, form, run):
    where = ("--target", "tests/models/golden_quantized/int4", "--batch", 1, "--context", 32)
    own = ("--max-tokens", 8, "--analytic")
    if command == "plan":
        own = ("--acceptance", 0.5, "--drafter", "full")
    arguments = (command, *where, "--device", "h100", *own, *weights)
    _, out, err = run(*arguments)
    assert not err
    titled = f", {form} weights" if form else ""
    (title,) = (line for line in out.splitlines() if line.startswith("tests/models"))
    assert title.endswith(titled + ", offloaded" * ("--offload" in weights))
    assert ("weights" in title) == (form is not None)
    found = json.loads(run(*arguments, "--json")[1])
    assert (found["workload"] if command == "fit" else found)["weights"] == form
