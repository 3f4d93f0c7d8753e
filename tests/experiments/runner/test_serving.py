"""Cells with slots: their workload, statistics by hand, bad settings, and a grid that resumes."""

import csv
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import launch
from experiments.report import page
from experiments.runner import preflight
from experiments.runner.serving import workload
from experiments.runner.workload import Bench
from experiments.schema import config, grid, method
from magicjax.parallel import offloading


def test_arrivals_have_their_rate_and_bursts():
    assert workload.arrivals("poisson", math.inf, 3, 0) == [0, 0, 0]
    assert workload.arrivals("burst:3", math.inf, 4, 0) == [0, 0, 0, 0]
    assert workload.arrivals("burst:3", 2.0, 7, 0) == [0, 0, 0, 1.5, 1.5, 1.5, 3]
    slow, fast = (workload.arrivals("poisson", rate, 4000, 0) for rate in (1.0, 4.0))
    assert slow[0] == 0 and slow[-1] == pytest.approx(4000, rel=0.1)
    np.testing.assert_allclose(np.array(slow), 4 * np.array(fast))


def test_goodput_counts_requests_that_meet_both_limits():
    stats = tuple(SimpleNamespace(tpot_s=tpot_s) for tpot_s in (None, 0.5, 0.5))
    texts = [np.zeros(n) for n in (1, 3, 5)]
    served = workload.ServingRun(texts, 2.0, [0.1, 0.2, 0.3], [0.1, 1.2, 2.3], 0.5, stats, {})
    assert served.goodput(0.2, 1.0) == 1.0  # two requests in 2 s
    assert served.goodput(0.3, 0.6) == 1.5
    assert served.goodput(0.25, 0.4) == 0.5  # one that has no time per output token
    assert workload.percentiles([0.1, None, 0.3])[50] == pytest.approx(0.2)


ADAPTIVE = "methods: [{drafter: prompt-lookup, adaptive: true}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate: 4\nmin_context: 8", "rate, min_context has no effect without slots: set slots, or"),
        (ADAPTIVE, "methods.0.adaptive has no effect without slots: set slots"),
        ("slots: 2\ncontext: 8\nmin_context: 9", "min_context=9 is larger than context=8"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert launch.main([str(path), "--dry-run"]) == 2
    source, line = capsys.readouterr().err.splitlines()
    assert source == f"{path}:" and message in line


def test_cells_share_a_plain_cell_and_only_those_with_slots_have_its_settings():
    described = method.Method(drafter=["prompt-lookup"], adaptive=[False, True])
    experiment = config.Experiment(slots=2, rate=8.0, methods=[described])
    ((fixed, adaptive),) = grid.groups(experiment)
    plain = grid.plain_of(fixed)
    assert [cell.adaptive for cell in (plain, fixed, adaptive)] == [False, False, True]
    assert adaptive.method == f"{fixed.method}, adaptive" and grid.plain_of(adaptive) == plain
    assert (plain.batch, plain.rate, plain.arrivals, plain.ttft_limit_s) == (2, 8.0, "poisson", 1.0)
    assert grid.restored(grid.resolved(plain)) == plain
    everything = grid.groups(config.Experiment(slots=2))[0][0]
    assert everything.rate == math.inf and grid.columns(everything)["rate"] == "inf"
    assert grid.restored(grid.resolved(everything)) == everything
    batch = grid.groups(config.Experiment())[0][0]
    assert (batch.rate, batch.arrivals, batch.tpot_limit_ms) == (None, None, None)


def test_an_engine_that_does_not_fit_the_memory_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 20e6)
    path = tmp_path / "mine.yaml"
    path.write_text(f"results: {tmp_path}\nslots: 512\ncontext: 512\nnew_tokens: 64\nmethods: []\n")
    assert launch.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert "slots 512, context 512: plain: an engine with slots=512" in error


def test_both_engines_of_a_cell_must_fit_the_memory():
    described = method.Method(drafter=["self:streaming:64"], tree=["chain:2"])
    experiment = config.Experiment(slots=512, context=512, new_tokens=64, methods=[described])
    ((drafted,),) = grid.groups(experiment)
    plain = grid.plain_of(drafted)
    single = next(n for n in range(10**8, 10**11, 10**8) if not preflight.too_large([plain], n))
    ((_, reason),) = preflight.too_large([plain, drafted], single).items()
    assert "beside the engine of plain decoding, an engine with slots=512" in reason
    assert not preflight.too_large([plain, drafted], 3 * single)


@pytest.mark.slow
def test_a_grid_of_rates_is_exact_reported_and_resumed(zoo, here, capsys, monkeypatch):
    measured = []
    here(Bench(), lambda folder: measured.append(folder.name))
    path = zoo / "rates.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\n"
        f"results: {zoo / 'results'}\n"
        "slots: 2\nrequests: 5\nrepeats: 2\n"
        "context: 48\nmin_context: 8\nnew_tokens: 12\nmin_new_tokens: 2\n"
        "grid: {rate: [200, inf]}\narrivals: burst:2\n"
        "exclude: [{rate: 200, adaptive: true}]\n"
        "methods: [{drafter: prompt-lookup, tree: chain:2, adaptive: [false, true]}]\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(page, "write", lambda *_: None)
        assert launch.main([str(path), "--limit", "2"]) == 0
    assert launch.main([str(path)]) == 0
    assert len(measured) == len(set(measured)) == 3  # finished cells are not measured again
    directory = zoo / "results" / "rates"
    with (directory / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["plain", "prompt-lookup:4, chain:2", "prompt-lookup:4, chain:2, adaptive"]
    expected = [*itertools.product(["200"], names[:2]), *itertools.product(["inf"], names)]
    assert [(row["rate"], row["method"]) for row in rows] == expected
    for row in rows:
        assert (row["status"], row["exact_match"], row["slots"]) == ("ok", "1.0", "2")
        assert 0 < float(row["ttft_s_p50"]) <= float(row["ttft_s_p95"]) <= float(row["e2e_s_p95"])
        assert float(row["goodput"]) > 0 and float(row["tpot_ms_p95"]) >= 0
        rate = float(row["decode_tok_s"]) / float(row["ar_decode_tok_s"])
        assert float(row["speedup"]) == pytest.approx(rate)
    rates = [row["acceptance_rate"] for row in rows]
    assert [bool(rate) for rate in rates] == [False, True, False, True, False]
    assert all(0 <= float(rate) <= 1 for rate in rates if rate)
    assert [bool(row["rounds_by_arm"]) for row in rows] == [False] * 4 + [True]
    assert {row["tau"] for row in rows if row["method"] == "plain"} == {"1.0"}
    folder = directory / "cells" / rows[1]["key"]
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [request["arrival_s"] for request in requests] == [0, 0, 0.01, 0.01, 0.02]
    assert all(len(request["tokens"]) == request["new_tokens"] for request in requests)
    metrics = json.loads((folder / "metrics.json").read_text())
    accepted = sum(n * count for n, count in enumerate(metrics["histogram"]))
    assert len(metrics["histogram"]) == 3 and sum(metrics["acceptance_by_depth"]) == pytest.approx(
        accepted / sum(metrics["histogram"])
    )
    assert all(sum(request["histogram"]) == request["rounds"] for request in requests)
    report = (directory / "report.html").read_text()
    for text in ("goodput", "TTFT p95", "plain goodput", 'id="speedup"'):
        assert text in report
    assert "goodput" in capsys.readouterr().out


@pytest.mark.slow
def test_sampled_requests_have_the_texts_of_plain_sampling_with_naive(zoo, here):
    here()
    path = zoo / "sampled.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\nresults: {zoo / 'results'}\n"
        "slots: 2\nrequests: 3\nrepeats: 0\ncontext: 48\nnew_tokens: 12\n"
        "temperature: 0.7\n"
        "methods: [{drafter: prompt-lookup, tree: chain:2, verifier: [naive, mss]}]\n"
    )
    assert launch.main([str(path)]) == 0
    with (zoo / "results" / "sampled" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["exact_match"] for row in rows] == ["1.0", "1.0", ""]
    assert {row["goodput"] for row in rows} == {""}  # without times
