"""Rates, percentiles and ratios by hand, and the files of the report."""

import csv
import xml.etree.ElementTree

import pytest

from magicjax.benchmarks.http_load import report, summary
from magicjax.benchmarks.http_load.client import OK, Sample, Server
from magicjax.benchmarks.http_load.load import Level, Run
from magicjax.benchmarks.http_load.summary import Targets

ON, OFF = Server("on & <fast>", "http://on", "a"), Server("off", "http://off", "a")


def sample(ttft_s=0.1, tpot_s=0.01, new=11, accepted=5, **options) -> Sample:
    return Sample(OK, "", 0.0, 1.0, ttft_s, tpot_s, 20, 5, new, accepted, **options)


def failed(status="429") -> Sample:
    return Sample(status, "the reason", 0.0, 0.1)


def row(runs, **targets) -> dict:
    (found,) = summary.summarize(runs, Targets(**targets))
    return found


def test_rates_and_percentiles_by_hand():
    samples = [sample(ttft_s=n / 10) for n in (4, 1, 3, 2, 5)]
    found = row([Run(ON, Level(concurrency=2), samples, 5.0)])
    assert found["tokens_per_s"] == 11 and found["requests_per_s"] == 1
    assert found["ttft_ms_p50"] == pytest.approx(300)
    assert found["ttft_ms_p95"] == pytest.approx(480)  # 400 + 0.8 * 100: the index is 0.95 * 4
    assert found["tpot_ms_p99"] == pytest.approx(10) and found["e2e_s_p50"] == 1
    assert found["cached"] == pytest.approx(0.25)
    assert found["goodput_per_s"] is found["speedup"] is None and found["errors"] == ""


def test_goodput_counts_requests_within_all_limits():
    slow = [sample(ttft_s=0.3), sample(tpot_s=0.03), sample(tpot_s=None), sample(), failed()]
    runs = [Run(ON, Level(rate=2.0), slow, 2.0)]
    assert row(runs, ttft_s=0.2, tpot_s=0.02)["goodput_per_s"] == 1
    assert row(runs, ttft_s=0.2)["goodput_per_s"] == 1.5
    assert row(runs, tpot_s=0.02)["goodput_per_s"] == 1.5


def two_servers() -> list[Run]:
    one, two = Level(concurrency=1), Level(rate=0.5)
    counted, unknown = [sample()] * 2, [sample(new=None, accepted=None), failed("<500>")]
    return [
        *(Run(ON, one, counted, 1.0), Run(OFF, one, counted, 2.0)),
        *(Run(OFF, two, counted, 1.0), Run(ON, two, unknown, 1.0)),
        *(Run(ON, one, counted, 1.0), Run(OFF, one, counted, 4.0)),
    ]


def test_repeats_are_pooled_and_the_last_server_is_the_baseline():
    rows = summary.summarize(two_servers(), Targets())
    names = [(row["level"], row["server"]) for row in rows]
    labels = (ON.label, OFF.label)
    assert names == [(level, label) for level in ("1 at once", "0.5/s") for label in labels]
    assert [row["speedup"] for row in rows] == [3, 1, None, 1]
    assert rows[0]["requests"] == 4 and rows[0]["seconds"] == 2


def test_categories_pool_the_requests_of_all_levels():
    low = [sample(category="low", tpot_s=0.01), sample(category="low", tpot_s=0.03)]
    high = [sample(category="high", accepted=0), failed()]
    levels = [Run(ON, Level(concurrency=n), [each, *high], 1.0) for n, each in enumerate(low, 1)]
    rows = summary.by_category(levels)
    assert [row["category"] for row in rows] == ["high", "low"]
    assert rows[0]["requests"] == 2 and rows[0]["tau"] == 1 and rows[1]["tau"] == 2
    assert rows[1]["tpot_ms_p50"] == pytest.approx(20) and rows[1]["prompt_tokens"] == 20
    assert rows[1]["user_tokens_per_s"] == pytest.approx(50)
    table = report.terminal_table(summary.summarize(levels, Targets()), rows)
    assert "tokens/s of a user" in table
    assert "By category" in report.page([], rows, {})
    assert not summary.by_category([Run(ON, Level(concurrency=1), low, 1.0)])


def test_files_of_the_report(tmp_path):
    runs = two_servers()
    rows = summary.summarize(runs, Targets(ttft_s=1.0))
    table = report.terminal_table(rows)
    assert "vs off" in table and "3×" in table and "100 / 100" in table and "<500>: 1" in table
    report.write(tmp_path, runs, rows, [], {"a": "<b>"})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(report.FILES)
    levels, requests = (
        list(csv.DictReader((tmp_path / name).read_text("utf-8").splitlines()))
        for name in report.FILES[:2]
    )
    assert [row["speedup"] for row in levels] == ["3.0", "1.0", "", "1.0"]
    assert len(requests) == 12 and requests[7]["error"] == "the reason"
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "on &amp; &lt;fast&gt;" in page and "<b>" not in page and "<fast>" not in page
    assert "http://" not in page and "src=" not in page  # needs nothing else
    for part in page.split("<svg")[1:]:
        plot = xml.etree.ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
        heights = [float(dot.get("cy")) for dot in plot.iter("circle")]
        assert all(0 < height < report.HEIGHT for height in heights)
        assert len(heights) in (5, 6)  # with two of the legend
