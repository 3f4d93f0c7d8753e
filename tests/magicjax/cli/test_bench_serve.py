"""`magicjax bench-serve`: refused input, and measuring a tiny server on loopback."""

import collections
import csv
import json

import pytest

from magicjax.benchmarks.http_load import load
from magicjax.benchmarks.http_load.client import OK, Request, Sample
from magicjax.benchmarks.http_load.load import Run
from magicjax.benchmarks.http_load.prompts import read_prompts, with_text_before
from magicjax.cli.serve import API_KEY
from tests.magicjax.server import serving

KEY = "a key of 16 byte"
REFUSED = {
    "no URL": (["--url", "localhost"], "--url localhost: it must be like http://127.0.0.1:8000"),
    "a label twice": (
        ["--url", "a=http://b", "--url", "a=http://c"],
        "--url a=http://c: the label 'a' is used twice",
    ),
    "rate 0": (["--rates", "1,0"], "--rates: '1,0' must be positive numbers, such as 1,4,16"),
    "few requests": (
        ["--concurrency", "4", "--requests", "3"],
        "--requests 3 is less than the concurrency 4",
    ),
    "an empty file": (["--prompts", "FILE"], "is empty: it must have a JSON object per line"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_options_exit_with_code_2_and_the_reason(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[name]
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    code, _, errors = run("bench-serve", *[file if a == "FILE" else a for a in arguments])
    assert code == 2 and message in errors and errors.count("\n") == 1
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", 'line 2: it must have one of "prompt"'),
        ('{"turns": []}', 'line 2: it must have one of "prompt"'),
        ('{"prompt": "a", "category": 3}', "line 2: category=3: it must be a text"),
        (json.dumps({"messages": [dict(role="user", content="a")] * 2}), "line 2: 2 messages are"),
    ],
)
def test_wrong_lines_of_prompts_are_named(line, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(path), "completions")


def test_lines_go_to_the_api_that_they_name_or_to_the_chosen_one(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "b"}]
    lines = [{"prompt": "a", "id": 3}, {"messages": messages}]
    path.write_text("\n".join(map(json.dumps, lines)))

    def found(api):
        return [(request.path, request.body) for request in read_prompts(str(path), api)]

    chat, completions = "chat/completions", "completions"
    assert found(None) == [(completions, {"prompt": "a"}), (chat, {"messages": messages})]
    user = [{"role": "user", "content": "a"}]
    assert found("chat") == [(chat, {"messages": user}), (chat, {"messages": messages})]
    assert found("completions") == [(completions, {"prompt": "a"}), (completions, {"prompt": "b"})]
    bundled = read_prompts(None, None)
    assert {request.path for request in bundled} == {chat}
    counts = collections.Counter(request.category for request in bundled)
    assert counts == dict(low=4, mixed=4, high=4)


def test_rows_of_speed_bench_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    row = dict(question_id="1", category="coding", sub_category="", turns=["a", "b"])
    path.write_text(json.dumps(row))
    (request,) = read_prompts(str(path), None)
    assert request.category == "coding"
    assert request.body == {"messages": [dict(role="user", content="a")]}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_text_before_a_prompt_makes_it_longer_and_differs(path):
    body = {"prompt": "ask"} if path == "completions" else {}
    body = body or {"messages": [dict(role="user", content="ask")]}
    request = Request(path, body | {"max_tokens": 3}, "low")
    longer = [with_text_before(request, 500, number) for number in range(3)]
    texts = [str(each.body.get("prompt") or each.body["messages"][0]["content"]) for each in longer]
    assert len(set(texts)) == 3
    for each, text in zip(longer, texts, strict=True):
        assert len(text) == 505 and text.endswith("\n\nask")
        assert each.body["max_tokens"] == 3 and each.category == "low"


@pytest.fixture(scope="module")
def server(directory):
    engine = serving.make_engine(serving.target_of(directory))
    with serving.running(engine, api_key=KEY) as made:
        yield made


@pytest.fixture
def bench(server, run, tmp_path, monkeypatch):
    """Runs `magicjax bench-serve` on the tiny server; returns (code, output, errors, levels)."""
    monkeypatch.setenv(API_KEY, KEY)

    def call(*arguments):
        chosen = () if "--url" in arguments else ("--url", server.url)
        common = ("--max-tokens", 24, "--output", tmp_path / "out")
        code, output, errors = run("bench-serve", *chosen, *common, *arguments)
        written = tmp_path / "out" / "levels.csv"
        rows = list(csv.DictReader(written.open())) if written.is_file() else []
        return code, output, errors, rows

    return call


@pytest.mark.slow
def test_two_servers_are_compared(server, bench, tmp_path):
    urls = ("--url", f"on={server.url}", "--url", f"off={server.url}/v1")
    code, output, errors, rows = bench(*urls, "--concurrency", "1,3", "--requests", 6)
    assert code == 0
    assert [(row["level"], row["server"]) for row in rows] == [
        *(("1 at once", "on"), ("1 at once", "off")),
        *(("3 at once", "on"), ("3 at once", "off")),
    ]
    for row in rows:
        assert row["requests"] == "6" and row["errors"] == ""
        assert 6 <= int(row["new_tokens"]) <= 6 * 24
        assert float(row["ttft_ms_p50"]) <= 1e3 * float(row["e2e_s_p50"])
        assert 1 <= float(row["tau"]) <= 6
    assert "vs off" in output and "| high     | on" in output
    assert "on, 1 at once: 6 requests in" in errors
    assert "tiny at http://127.0.0.1" in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert KEY not in "".join(path.read_text("utf-8") for path in (tmp_path / "out").iterdir())


def test_refused_requests_are_no_failure(server, bench, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add("}')
    options = ("--prompts", prompts, "--max-ttft", 60, "--max-tpot", 60_000)
    with serving.slow(server.engine):
        code, output, errors, (row,) = bench("--rates", "10000", "--requests", 40, *options)
    assert code == 0, errors
    assert row["errors"].startswith("429: ") and "goodput/s" in output
    assert float(row["goodput_per_s"]) == float(row["requests_per_s"]) > 0


def test_prompts_have_about_the_asked_tokens(server, bench, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [dict(prompt="a", category="low"), dict(prompt="b", category="high")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ("--concurrency", 1, "--requests", 4, "--prompt-tokens", 120, "--prompts", prompts)
    code, output, errors, (row,) = bench(*options)
    assert code == 0, errors
    assert float(row["prompt_tokens"]) == pytest.approx(120, rel=0.25)
    assert "| category | server" in output.replace("  ", " ") and "low" in output


def test_an_interrupt_writes_what_there_is(bench, monkeypatch):
    async def measure(*_, runs, **__):
        server, level = load.Server("on", "http://on", "a"), load.Level(concurrency=1)
        runs.append(Run(server, level, [Sample(OK, "", 0.0, 0.1, 0.1)], 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "measure", measure)
    code, output, errors, rows = bench()
    assert code == 130 and rows[0]["requests"] == "1" and "1 at once" in output
    assert "interrupted: the report has the requests that have ended" in errors
