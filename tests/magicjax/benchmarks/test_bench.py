"""The benchmark of a round's parts: its synthetic drafter, tables, files and errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.benchmarks import bench, synthetic
from pallas_kernels import choose_backend
from tests.magicjax import keywords, tiny


def generate(rate: float, inner=None):
    """Returns the statistics of a chain of 3 with synthetic acceptance."""
    plain = tiny.generate(3)
    prompts = tiny.prompts(3)
    width = max(map(len, prompts)) + tiny.NEW
    text = np.zeros((3, width), np.int32)
    for row, prompt, new in zip(text, prompts, tiny.rows_of(plain), strict=True):
        row[: len(prompt) + len(new)] = np.concatenate([prompt, new])
    drafter = synthetic.Synthetic(inner, jnp.asarray(text), jnp.float32(rate))
    found = keywords.generate(
        tiny.model(),
        prompts,
        drafter=drafter,
        tree=magicjax.chain(3),
        max_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    return found.stats


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 5e9)


SHAPE = ["--batch", "2", "--context", "64", "--nodes", "2", "--budget", "32", "--new-tokens", "24"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_tables_are_printed_and_written(directory, tmp_path, capsys):
    out = tmp_path / "bench.json"
    model = ["--target", str(directory), "--dtype", "float32", "--repeats", "2", "--out", str(out)]
    assert bench.main([*model, *SHAPE, "--gamma", "1", "--rate", "0.0", "1.0"]) == 0
    result = json.loads(out.read_text())
    assert result["backend"] == choose_backend() and result["bandwidth"] == 1e10
    rows = result["rows"]
    parts = ["target", "verify 2", "draft 32", "plain loop", "loop 32", "loop 32"]
    assert [row["part"] for row in rows] == parts
    assert rows[0]["ms"] > 0 and rows[0]["floor ms"] > 0
    loops = {(row["gamma"], row["synthetic acceptance"]): row for row in rows[-2:]}
    assert set(loops) == {(1, 0.0), (1, 1.0)}
    for (gamma, rate), row in loops.items():
        assert row["tau"] == pytest.approx(
            gamma * rate + 1, abs=0.2
        )  # the token limit truncates the last round
        assert row["speedup"] > 0 and row["round ms"] > 0
    out = capsys.readouterr().out
    assert "| floor / time | time / T_target |" in out and "| synthetic acceptance |" in out


DRAFTERS = {
    "self": lambda: magicjax.SelfSpeculation(budget=32),
    "full": lambda: magicjax.FullCacheSpeculation(),
    "small": lambda: tiny.drafter("near"),
    "sparse": lambda: magicjax.SmallModel(tiny.model("near"), policy="streaming", budget=32),
    "prompt-lookup": lambda: magicjax.PromptLookup(),
    "ensemble": lambda: tiny.drafter("ensemble"),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_array_appears_twice_in_a_state(kind):
    setup = synthetic.Setup(tiny.model(), "xla", new_tokens=8)
    drafter = DRAFTERS[kind]()
    request = synthetic.synthetic_request(setup, 2, 64, drafter, magicjax.chain(2))
    state = synthetic.synthetic_state(request)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size}) == len(
        [leaf for leaf in leaves if leaf.size]
    )
    assert (state.cache.lengths == 64).all() and (state.rows.eos == -1).all()
    assert float(jnp.std(state.cache.k[0])) > 0.5
    states = state.drafter if kind == "ensemble" else (state.drafter,)
    assert len(states) == len(drafter.members())
    for each in states:  # every length is 64, and a backlog is empty
        path_leaves = jax.tree_util.tree_leaves_with_path(each)
        counts = {jax.tree_util.keystr(path): leaf for path, leaf in path_leaves}
        for path, leaf in counts.items():
            if path.endswith((".count", ".lengths", ".added")):
                assert (leaf == (0 if ".backlog" in path else 64)).all(), path


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1"], "--nodes must be at least 2"),
        (["--gamma", "2", "0"], "--gamma and --repeats at least 1"),
        (["--rate", "1.5"], "each must lie between 0 and 1"),
        (["--target", "lama"], "is not a directory"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
