"""The benchmark of a round's parts: what its drafter proposes, and a line for each part."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.benchmarks import bench
from tests.magicjax import tiny


def generate(rate: float, inner=None):
    """Returns (plain text, output) of a chain of 3 of the text itself, right at a rate."""
    plain = tiny.generate(3)
    prompts = tiny.prompts(3)
    width = max(map(len, prompts)) + tiny.NEW
    text = np.zeros((3, width), np.int32)
    for row, prompt, new in zip(text, prompts, tiny.rows_of(plain), strict=True):
        row[: len(prompt) + len(new)] = np.concatenate([prompt, new])
    drafter = bench.Synthetic(inner, jnp.asarray(text), jnp.float32(rate))
    found = magicjax.generate(
        tiny.model(),
        prompts,
        drafter=drafter,
        tree=magicjax.chain(3),
        max_new_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    return found.stats


def test_acceptance_is_what_was_asked_for():
    assert generate(1.0).acceptance_rate == 1
    assert generate(0.0).acceptance_rate == 0
    assert 0.3 < generate(0.8).acceptance_by_depth[0] < 1


def test_a_draft_that_runs_for_its_cost_changes_nothing():
    assert generate(1.0, tiny.drafter("self")).acceptance_rate == 1


def test_the_tokens_of_a_chain_that_is_right_at_a_rate():
    assert bench.expected_tokens(0.0, 4) == 1
    assert bench.expected_tokens(1.0, 4) == 5
    assert bench.expected_tokens(0.5, 2) == 1.75


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 5e9)


SHAPE = ["--batch", "2", "--context", "64", "--nodes", "2", "--budget", "32", "--new-tokens", "24"]


@pytest.mark.usefixtures("quick")
def test_a_line_is_printed_and_written_for_each_part(directory, tmp_path, capsys):
    out = tmp_path / "bench.json"
    model = ["--target", str(directory), "--dtype", "float32", "--steps", "2", "--out", str(out)]
    assert bench.main([*model, *SHAPE, "--gamma", "1", "2", "--rate", "0.0", "1.0"]) == 0
    result = json.loads(out.read_text())
    assert result["backend"] == "xla" and result["bandwidth"] == 1e10
    rows = result["rows"]
    parts = ["target", "verify 2", "verify 3", *["draft 32"] * 2, "plain loop", *["loop 32"] * 4]
    assert [row["part"] for row in rows] == parts
    assert rows[0]["ms"] > 0 and rows[0]["floor ms"] > 0
    loops = {(row["gamma"], row["synthetic acceptance"]): row for row in rows[-4:]}
    assert set(loops) == {(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)}
    for (gamma, rate), row in loops.items():
        assert row["tau"] == pytest.approx(gamma * rate + 1, abs=0.2)  # the limit cuts a last round
        assert row["speed-up"] > 0 and row["round ms"] > 0 and row["overhead"] < 1
    assert "synthetic acceptance 1.000" in capsys.readouterr().out


def test_a_muted_target_says_the_same_whatever_it_reads():
    target = bench.muted(tiny.model())
    found = magicjax.generate(target, tiny.prompts(3), max_new_tokens=8, eos_token_id=[])
    assert (found.tokens == 0).all()
    usual = magicjax.generate(tiny.model(), tiny.prompts(3), max_new_tokens=8, eos_token_id=[])
    assert (usual.tokens != 0).any()


def test_a_model_without_a_final_norm_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "FINAL_NORMS", {"another"})
    with pytest.raises(ValueError, match="has no final norm"):
        bench.muted(tiny.model())


def test_acceptance_is_exact_in_few_bits_too():
    """With the usual weights a pass of one node and one of several would part by rounding."""
    setup = bench.Setup(bench.muted(tiny.model(dtype="bfloat16")), "xla", new_tokens=24, steps=1)
    loop = bench.synthetic(setup, 2, 64, budget=32, gamma=2, rate=1.0)
    assert loop.rounds == 8 and loop.tau == pytest.approx(23 / 8)  # the first token is prefill's


def test_no_array_stands_twice_in_a_state():
    setup = bench.Setup(tiny.model(), "xla", new_tokens=8)
    drafter = magicjax.SelfSpeculation(budget=32)
    state = bench.state_of(bench.request_of(setup, 2, 64, drafter, magicjax.chain(2)))
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size}) == len(
        [leaf for leaf in leaves if leaf.size]
    )
    assert (state.cache.lengths == 64).all()
    assert float(jnp.std(state.cache.k[0])) > 0.5


@pytest.mark.usefixtures("quick")
def test_hugging_face_stands_beside_ours_or_says_why_not(directory, tmp_path, monkeypatch):
    out, asked = tmp_path / "bench.json", []

    def ask(*question):
        asked.append(question)
        return {"ms": 1e6} if len(asked) == 1 else {"why": "torch is not installed"}

    monkeypatch.setattr(bench.hf_baseline, "ask", ask)
    model = ["--target", str(directory), "--dtype", "float32", "--steps", "1", "--out", str(out)]
    shape = [*SHAPE, "--batch", "1", "2"]  # that of the other test's programs, and one more
    assert bench.main([*model, *shape, "--gamma", "1", "--rate", "--hugging-face"]) == 0
    assert asked == [(str(directory), "float32", batch, 64, "cpu") for batch in (1, 2)]
    rows = [r for r in json.loads(out.read_text())["rows"] if r["part"] == "hugging face"]
    assert rows[0]["of target"] > 1 and rows[1]["why"] == "torch is not installed"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1"], "--nodes must be at least 2"),
        (["--gamma", "2", "0"], "--gamma and --steps at least 1"),
        (["--rate", "1.5"], "each must lie between 0 and 1"),
        (["--target", "lama"], "is no directory"),
    ],
)
def test_wrong_arguments_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_a_backend_that_does_not_serve_is_refused(directory, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--target", str(directory), "--context", "64", "--backend", "mosaic"])
    assert "backend='mosaic' takes" in capsys.readouterr().err
