"""The study of serving: its workload, and its statistics by hand."""

import csv
import json
import pathlib

import numpy as np
import pytest

import magicjax
from experiments.studies.serving import __main__ as serving
from experiments.studies.serving import arrivals, workload


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
    arriving = workload.arrivals("poisson", settings.rate, settings.requests, settings.seed)
    made = workload.make_workload(settings, target.tokenizer, arriving)
    lengths = [len(row) - 70 for row in made.rows]
    assert lengths[2] == 40 and all(8 <= n <= 16 for n in lengths[:2] + lengths[3:])
    assert all((row[:70] == made.rows[0][:70]).all() for row in made.rows)
    assert all(2 <= limit <= 6 for limit in made.limits)
    assert np.all(np.diff(made.arrivals) > 0) and made.arrivals[-1] < 1
    again = workload.make_workload(settings, target.tokenizer, arriving)
    assert again.limits == made.limits and again.arrivals == made.arrivals


def test_arrivals_have_their_rate_and_bursts():
    assert workload.arrivals("at once", 2.0, 3, 0) == [0, 0, 0]
    assert workload.arrivals("burst", 2.0, 7, 0, burst=3) == [0, 0, 0, 1.5, 1.5, 1.5, 3]
    slow, fast = (workload.arrivals("poisson", rate, 4000, 0) for rate in (1.0, 4.0))
    assert slow[-1] == pytest.approx(4000, rel=0.1)
    np.testing.assert_allclose(np.array(slow), 4 * np.array(fast))


def test_percentiles_of_a_run():
    served = workload.Served(
        [np.zeros(n) for n in (1, 3, 5)], 2.0, [0.1, 0.2, 0.3], [0.1, 1.2, 2.3], 0.5, 0.7
    )
    record = served.record()
    assert record["tokens/s"] == 4.5 and record["longest stall s"] == 0.7
    assert record["TTFT p50 s"] == pytest.approx(0.2)
    assert record["total p50 s"] == pytest.approx(1.2)
    assert record["TPOT p50 ms"] == pytest.approx(500)
    assert served.goodput(0.2, 1.0) == 1.0  # two requests in 2 s
    assert served.goodput(0.3, 0.6) == 1.5
    assert served.goodput(0.25, 0.4) == 0.5


@pytest.mark.slow
def test_all_ways_of_serving_give_the_same_texts(settings, capsys):
    serving.main(settings)
    with open(f"{settings.results}/serving.json") as file:
        records = json.load(file)["records"]
    assert len(records) == 6 and all(record["differing"] == 0 for record in records)
    assert "generate, static batches" in capsys.readouterr().out


@pytest.mark.slow
def test_arrival_rates_write_a_table_and_a_figure(settings, capsys):
    chosen = arrivals.Settings(
        results=settings.results,
        requests=4,
        prompt_tokens=(8, 16),
        new_tokens=(2, 6),
        slots=(2,),
        rates=(50.0, 100.0),
        burst=2,
    )
    arrivals.main(chosen)
    with open(f"{settings.results}/arrivals.csv") as file:
        records = list(csv.DictReader(file))
    assert len(records) == 3 * 2 * 2  # plain, fixed and adaptive; arrivals; rates
    drafters = ["none", "prompt-lookup:4", "prompt-lookup:4, adaptive"]
    assert list(dict.fromkeys(r["drafter"] for r in records)) == drafters
    assert {r["mean depth"] for r in records if r["drafter"] == drafters[0]} == {"0.0"}
    assert {r["mean depth"] for r in records if r["drafter"] == drafters[1]} == {"4.0"}
    assert (pathlib.Path(settings.results) / "goodput.png").stat().st_size > 1000
    assert "Goodput" in capsys.readouterr().out
