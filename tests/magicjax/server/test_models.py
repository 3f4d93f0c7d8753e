"""Several models behind one port: requests, the status page in a browser, and files of options."""

import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess

import httpx
import openai
import pytest

import magicjax
import models
from magicjax import loading
from magicjax.cli import serve, served_models
from magicjax.decoding import memory
from tests.magicjax.server import serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
# Headless, and without connections of its own.
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
QUIET += " --disable-background-networking --disable-component-update --enable-logging=stderr"


@pytest.fixture(scope="module")
def targets(directory):
    """Two models of one architecture, with different weights."""
    first = serving.target_of(directory)
    second = dataclasses.replace(first, params=models.init_params(first.module, 5))
    return {"first": first, "org/second": second}


@pytest.fixture(scope="module")
def server(targets):
    engines = {name: serving.make_engine(target) for name, target in targets.items()}
    with serving.running(engines) as made:
        yield made


def test_each_model_answers_with_its_own_text_at_the_same_time(server, targets):
    params, client = magicjax.SamplingParams(max_tokens=serving.NEW), server.client()

    def asked(name: str) -> str:
        options = dict(prompt="two", max_tokens=serving.NEW, temperature=0)
        return client.completions.create(model=name, **options).choices[0].text

    names = [*targets] * 6
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(asked, names))
    expected = {
        name: magicjax.generate(target, ["two"], params).texts[0]
        for name, target in targets.items()
    }
    assert texts == [expected[name] for name in names]
    assert expected["first"] != expected["org/second"]


def test_names_are_listed_and_others_are_refused(server, targets):
    client = server.client()
    assert [model.id for model in client.models.list()] == [*targets]
    assert client.models.retrieve("org/second").id == "org/second"
    with pytest.raises(openai.NotFoundError, match="use 'first' or 'org/second'"):
        client.completions.create(model="third", prompt="x")
    missing = server.post("completions", json=dict(prompt="x"))
    assert missing.status_code == 400 and "2 are served" in missing.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_each_metric_is_described_once_and_has_a_value_for_each_model(server, targets):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    described = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(described) == len(set(described))
    slots = [line for line in lines if line.startswith("magicjax_slots{")]
    assert slots == [f'magicjax_slots{{model="{name}"}} {serving.SLOTS}.0' for name in targets]


def browse(url: str, folder) -> tuple[str, str]:
    """Returns the document of a page after its first events, and what the browser logged."""
    command = [BROWSER, *QUIET.split(), f"--user-data-dir={folder}", "--timeout=5000"]
    done = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, timeout=serving.SECONDS
    )
    return done.stdout, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_state_of_each_model(server, targets, tmp_path):
    for name in targets:
        server.client().completions.create(model=name, prompt="x", max_tokens=9)

    def shown(name: str, document: str) -> list[str]:
        return re.findall(rf'class="{name}">([^<]*)<', document)

    pages = []

    def is_live() -> bool:
        pages.append(browse(server.url, tmp_path / str(len(pages))))
        return "live, every second" in pages[-1][0] and bool(shown("in_use", pages[-1][0])[1:])

    serving.until(is_live)
    document, log = pages[-1]
    document = document.partition("<template>")[0]
    assert shown("model", document) == [*targets]
    assert shown("in_use", document) == [f"0 of {serving.SLOTS}"] * 2
    assert all(int(count) >= 9 for count in shown("new_tokens", document))
    seconds = re.findall(r"<td>([^<]*)</td>", document)
    assert len(seconds) == 2 * 4 * 3 and all(float(each) >= 0 for each in seconds)
    assert "Uncaught" not in log
    _, log = browse("data:text/html,<script>missing()</script>", tmp_path / "error")
    assert "Uncaught" in log


FILES = {
    "no mapping": ("[1]", "it must map the name of each model to its options"),
    "empty": ("", "it must map the name of each model to its options"),
    "no YAML": ("a: [", "is not YAML"),
    "no options": ("a: 3", "a: options must be a mapping"),
    "no target": ("a: {slots: 2}", "a: target is missing"),
    "unknown": ("a: {target: x, slot: 2}", "a: unknown option 'slot'; did you mean 'slots'?"),
    "the server's": ("a: {target: x, port: 1}", "options of the server are on the command line"),
    "the name": ("a: {target: x, served-model-name: b}", "unknown option 'served-model-name'"),
    "a value": ("a: {target: x, slots: many}", "a: argument --slots: invalid int value: 'many'"),
    "another model": ("a: {target: DIR, slots: 0}", "--slots 0: it must be at least 1"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_refused_before_weights_are_loaded(name, directory, tmp_path, run):
    text, message = FILES[name]
    file = tmp_path / "models.yaml"
    file.write_text(text.replace("DIR", str(directory)))
    code, _, errors = run("serve", "--models", file)
    assert code == 2 and message in errors and str(errors).count("\n") == 1


def test_options_of_a_model_beside_a_file_are_refused(tmp_path, run):
    code, _, errors = run("serve", "--models", tmp_path / "a.yaml", "--slots", 2)
    assert code == 2 and "--slots beside --models describes no model" in errors
    assert run("serve")[0] == 2


def test_the_memory_of_all_models_is_checked_before_the_first_is_loaded(
    directory, tmp_path, run, monkeypatch
):
    file = tmp_path / "models.yaml"
    file.write_text(f"a: {{target: {directory}}}\nb: {{target: {directory}, drafter: none}}\n")
    monkeypatch.setattr(loading, "with_weights", None)
    monkeypatch.setattr(memory, "free_memory", lambda *_: 1e6)
    monkeypatch.setattr(served_models.memory, "new_bytes", lambda *_: 0.6e6)
    code, _, errors = run("serve", "--models", file, "--port", 0)
    assert code == 2 and re.search(r"models need 0.00 GB of memory \(a 0.00 GB, b 0.00", errors)


def test_a_file_gives_lists_and_flags(tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text(
        "a: {target: x, greedy: true, no-adaptive: false, capacity: 4k,\n"
        "    drafter: [prompt-lookup, 'self:streaming:64'], tree: [chain:2, chain:3]}\n"
    )
    (found,) = served_models.read(str(file), serve.add_model)
    assert found.served_model_name == "a" and found.greedy and not found.no_adaptive
    assert found.capacity == 4096 and len(found.drafter) == 2 and len(found.tree) == 2
