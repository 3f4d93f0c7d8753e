"""The study of serving: its workload and its texts."""

import json

import numpy as np
import pytest

import magicjax
from experiments.studies.serving import __main__ as serving


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return serving.Settings(
        results=str(tmp_path_factory.mktemp("serving")),
        slots=2,
        requests=5,
        rate=200.0,
        prompt_tokens=(8, 16),
        new_tokens=(2, 6),
        shared_tokens=70,
        long_tokens=40,
        repeats=1,
    )


def test_the_requests_have_the_lengths_and_arrivals_of_the_settings(settings):
    target = magicjax.load(settings.target, dtype="float32")
    made = serving.make_workload(settings, target.tokenizer)
    lengths = [len(row) - 70 for row in made.rows]
    assert lengths[2] == 40 and all(8 <= n <= 16 for n in lengths[:2] + lengths[3:])
    assert all((row[:70] == made.rows[0][:70]).all() for row in made.rows)
    assert all(2 <= limit <= 6 for limit in made.limits)
    assert np.all(np.diff(made.arrivals) > 0) and made.arrivals[-1] < 1
    again = serving.make_workload(settings, target.tokenizer)
    assert again.limits == made.limits and again.arrivals == made.arrivals


@pytest.mark.slow
def test_all_ways_of_serving_give_the_same_texts(settings, capsys):
    serving.main(settings)
    with open(f"{settings.results}/serving.json") as file:
        records = json.load(file)["records"]
    assert len(records) == 6 and all(record["differing"] == 0 for record in records)
    assert "generate, static batches" in capsys.readouterr().out
