"""The status page in a browser."""

import os
import re
import shutil
import subprocess

import pytest

from tests.magicjax.server import serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
# Headless, and without connections of its own.
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
QUIET += " --disable-background-networking --disable-component-update --enable-logging=stderr"


def browse(url: str, folder) -> tuple[str, str]:
    """Returns the document of a page after its first events, and what the browser logged."""
    command = [BROWSER, *QUIET.split(), f"--user-data-dir={folder}", "--timeout=5000"]
    done = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, timeout=serving.SECONDS
    )
    return done.stdout, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.slow
def test_a_browser_shows_the_state_of_the_engine(directory, tmp_path):
    def shown(name: str, document: str) -> str:
        return re.findall(rf'class="{name}">([^<]*)<', document)[0]

    pages = []

    def is_live() -> bool:
        pages.append(browse(server.url, tmp_path / str(len(pages))))
        return "live, every second" in pages[-1][0] and bool(shown("in_use", pages[-1][0]))

    with serving.running(serving.make_engine(serving.target_of(directory))) as server:
        body = dict(prompt="x", max_tokens=10, ignore_eos=True)
        assert server.post("completions", json=body).status_code == 200
        serving.until(is_live)
    document, log = pages[-1]
    assert shown("model", document) == serving.NAME
    assert shown("in_use", document) == f"0 of {serving.SLOTS}"
    assert int(shown("new_tokens", document)) >= 9
    seconds = re.findall(r"<td>([^<]*)</td>", document)
    assert len(seconds) == 4 * 3 and all(float(each) >= 0 for each in seconds)
    assert "<main>" in document and "Uncaught" not in log
    _, log = browse("data:text/html,<script>missing()</script>", tmp_path / "error")
    assert "Uncaught" in log
