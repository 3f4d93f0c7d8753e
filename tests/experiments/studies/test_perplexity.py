"""Perplexity by format of weights."""

import jax
import numpy as np
import pandas as pd
import pytest

import magicjax
from experiments import prompts
from experiments.runner import teacher
from experiments.studies import perplexity

TARGET = "experiments/zoo/target"


@pytest.mark.slow
def test_it_is_that_of_the_logits(tmp_path, capsys):
    path = tmp_path / "found.csv"
    sizes = ["--requests", "2", "--context", "24", "--out", str(path)]
    assert perplexity.main(["--target", TARGET, "--weights", "none", "int4:32", *sizes]) == 0
    rows = pd.read_csv(path).to_dict("records")
    assert [row["weights"] for row in rows] == ["none", "int4:32"]
    assert "int4:32" in capsys.readouterr().out
    plain, quantized = rows
    model = magicjax.load(TARGET, "float32")
    texts = prompts.make("stdlib", model.tokenizer, "", 2, 24)
    text = np.stack([prompt.tokens for prompt in texts])
    logs = jax.nn.log_softmax(teacher.logits(model, text))[:, :-1]
    chosen = np.take_along_axis(np.asarray(logs), text[:, 1:, None], -1)
    assert plain["perplexity"] == pytest.approx(np.exp(-chosen.mean()), rel=1e-4)
    assert quantized["perplexity"] != plain["perplexity"]
    assert plain["same token"] == 1 > quantized["same token"] > 0.2
    assert quantized["MB of weights"] < plain["MB of weights"]
