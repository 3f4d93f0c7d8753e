"""The benchmark of a round's parts: what its drafter proposes, and a line for each part."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax import bench
from tests.magicjax import tiny


def generate(rate: float, inner=None):
    """Returns (plain text, output) of a chain of 3 of the text itself, right at a rate."""
    plain = tiny.generate(3)
    prompts = tiny.prompts(3)
    width = max(map(len, prompts)) + tiny.NEW
    text = np.zeros((3, width), np.int32)
    for row, prompt, new in zip(text, prompts, tiny.rows_of(plain), strict=True):
        row[: len(prompt) + len(new)] = np.concatenate([prompt, new])
    drafter = bench.Synthetic(inner, jnp.asarray(text), rate)
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
    monkeypatch.setattr(bench, "NEW_TOKENS", 24)


@pytest.mark.usefixtures("quick")
def test_a_line_is_printed_and_written_for_each_part(directory, tmp_path, capsys):
    out = tmp_path / "bench.json"
    shape = ["--batch", "2", "--context", "64", "--nodes", "2", "--budget", "32", "--gamma", "1"]
    arguments = ["--target", str(directory), "--dtype", "float32", *shape, "--steps", "2"]
    assert bench.main([*arguments, "--rate", "1.0", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == ["target", "verify 2", "draft 32", "loop 32"]
    assert rows[-1]["tau"] > 1.9  # the limit cuts a last round
    assert rows[0]["ms"] > 0 and rows[0]["floor ms"] > 0
    assert "synthetic acceptance 1.000" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1"], "--nodes must be at least 2"),
        (["--rate", "1.5"], "each must lie between 0 and 1"),
        (["--target", "lama"], "is no directory"),
    ],
)
def test_wrong_arguments_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
