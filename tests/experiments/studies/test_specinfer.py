"""The tables compare equal sizes, and verdicts follow from the figures."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.schema import config
from experiments.studies.specinfer import report, settings, success

FILE = pathlib.Path(config.__file__).parents[1] / "configs" / "specinfer_tables.yaml"


def tables(**changes):
    return config.checked(settings.Tables, changes, "test")


def test_the_file_that_comes_with_the_project_is_valid():
    file = pathlib.Path(os.path.relpath(FILE))
    assert settings.read(file).drafts == settings.Tables().drafts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": ["a"]}, "table 4 merges at least 2 drafts, and drafts has 1"),
        ({"widths": [3, 1]}, "widths=[3, 1] must increase"),
        (
            {"sizes": [{"nodes": 8, "expansion": "chain:8", "dynamic": "dynamic:8,3,3"}]},
            "chain:8 has 9 nodes",
        ),
        (
            {"sizes": [{"nodes": 8, "expansion": "chain:7", "dynamic": "dynamic:7,3,3"}]},
            "exactly nodes=8",
        ),
    ],
)
def test_settings_with_unequal_comparisons_are_refused(changes, message):
    with pytest.raises(config.ConfigError) as error:
        tables(**changes)
    assert message in str(error.value)


def test_a_directory_without_a_model_is_named_before_anything_is_loaded(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"target: {tmp_path}\n")
    with pytest.raises(config.ConfigError, match="config.json does not exist"):
        settings.read(path)


def test_success_of_a_window_against_counting_by_hand():
    """With the target as draft, the first draw is always accepted."""
    logits = jax.random.normal(jax.random.key(0), (1, 400, 8)) * 2
    rates = success._window_rates(success.sampling_of(1.0, 0, 0), logits, logits, 3)
    np.testing.assert_allclose(rates[success.MSS], 1, atol=1e-5)
    np.testing.assert_allclose(rates[success.GREEDY], 1)
    p = np.sort(np.asarray(jax.nn.softmax(logits)), -1)[0, :, ::-1]
    np.testing.assert_allclose(rates[success.TOP], p[:, :3].cumsum(-1).mean(0), rtol=1e-5)
    # one draw of q = p is the token sampled with probability sum p²
    assert float(rates[success.NAIVE][0]) == pytest.approx((p**2).sum(-1).mean(), abs=0.03)


def test_joint_success_counts_equally_many_tries_of_each_draft():
    target = jnp.array([[1, 2, 3, 9]])
    first = jnp.array([[[1, 5], [4, 2], [0, 0], [0, 0]]])
    second = jnp.array([[[0, 0], [0, 0], [3, 0], [0, 0]]])
    shares = success._joint(target, [first, second], 2)
    np.testing.assert_array_equal(shares, [np.nan, 0.5])


def made(gain, error=0.01):
    """Rows of table 2 whose last width gains that much."""

    def row(width, tau, gain, error):
        known = {"draft": "draft-1", "tree": "", "depth": 8, "nodes": 9, "nodes_per_round": 9.0}
        known |= {"exact": 1.0, "ties": 0, "requests": 4, "tau": tau, "tau_error": 0.01}
        return known | {"width": width, "gain": gain, "gain_error": error}

    return {
        2: [
            {"decoding": decoding} | row(width, tau, of, err)
            for decoding in ("greedy", "sampled")
            for width, tau, of, err in ((1, 2.0, 1.0, 0.0), (5, 2.0 * gain, gain, error))
        ]
    }


def claims(text):
    """The rows of the table of verdicts, the last one of the report."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.split("\n\n")[-1].strip().splitlines()
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("gain", "error", "verdict", "position", "falls"),
    [
        (1.34, 0.01, "follows", "within", "none"),
        (1.15, 0.1, "undecided", "within", "none"),
        (1.02, 0.05, "does not follow", "below", "none"),
        (0.8, 0.01, "does not follow", "below", "1 to 5"),
        (1.05, 0.01, "follows in direction, not in size", "below", "none"),
        (1.8, 0.01, "follows in direction, not in size", "above", "none"),
    ],
)
def test_the_verdict_follows_the_figures(gain, error, verdict, position, falls):
    rows = claims(report.write(tables(widths=[1, 5]), made(gain, error)))
    assert [row["decoding"] for row in rows] == ["greedy", "sampled"]
    for row in rows:
        assert (row["verdict"], row["position"]) == (verdict, position)
        assert row["fewer tokens at a larger width"] == falls
