"""The study of serving: its workload, and its statistics by hand."""

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
    workload = serving.make_workload(settings, target.tokenizer)
    lengths = [len(row) - 70 for row in workload.rows]
    assert lengths[2] == 40 and all(8 <= n <= 16 for n in lengths[:2] + lengths[3:])
    assert all((row[:70] == workload.rows[0][:70]).all() for row in workload.rows)
    assert all(2 <= limit <= 6 for limit in workload.limits)
    assert np.all(np.diff(workload.arrivals) > 0) and workload.arrivals[-1] < 1
    again = serving.make_workload(settings, target.tokenizer)
    assert again.limits == workload.limits and again.arrivals == workload.arrivals


def test_percentiles_of_a_run():
    served = serving.Served(
        [np.zeros(n) for n in (1, 3, 5)], 2.0, [0.1, 0.2, 0.3], [0.1, 1.2, 2.3], 0.5, 0.7
    )
    record = served.record()
    assert record["tokens/s"] == 4.5 and record["longest stall s"] == 0.7
    assert record["TTFT p50 s"] == pytest.approx(0.2)
    assert record["total p50 s"] == pytest.approx(1.2)
    assert record["TPOT p50 ms"] == pytest.approx(500)


@pytest.mark.slow
def test_all_ways_of_serving_give_the_same_texts(settings, capsys):
    serving.main(settings)
    with open(f"{settings.results}/serving.json") as file:
        records = json.load(file)["records"]
    assert len(records) == 6 and all(record["differing"] == 0 for record in records)
    assert "generate, static batches" in capsys.readouterr().out
