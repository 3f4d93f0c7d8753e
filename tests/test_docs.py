"""Runs the code blocks of README.md and docs/, and compares their tables with stored results."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

import pytest
from sybil import Sybil
from sybil.example import Example
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

from experiments.report import markdown
from tests.quick import quick

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


def run_shell(example: Example) -> None:
    """Runs the block with this checkout's `magicjax` and `python`; fails with its output."""
    program = f'python() {{ "{sys.executable}" "$@"; }}; magicjax() {{ python -m magicjax "$@"; }}'
    command = ["bash", "-euc", f"{program}\n{example.parsed}"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{example.parsed}\n{done.stdout}\n{done.stderr}"


def write_file(example: Example) -> None:
    """Writes a block whose first line is `# name.yaml` to that file."""
    name = example.parsed.partition("\n")[0].removeprefix("# ")
    assert name != example.parsed and "/" not in name, f"the block names no file: {name}"
    pathlib.Path(name).write_text(example.parsed)


SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser("bash", run_shell),
        CodeBlockParser("yaml", write_file),
        CodeBlockParser("toml", write_file),
        SkipParser(),
    ],
    encoding="utf-8",
)


@pytest.mark.parametrize("page", quick(PAGES, "README.md"))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "results":
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for example in SYBIL.parse(ROOT / page).examples():
        try:
            example.evaluate()
        except unittest.SkipTest:
            pass  # the page says why


@pytest.mark.parametrize("page", PAGES)
def test_tables_hold_the_stored_results(page):
    text = (ROOT / page).read_text()
    assert markdown.updated(text, ROOT) == text, "run python -m experiments.report.markdown"


def test_a_stale_table_and_a_broken_block_are_found(tmp_path):
    header = "<!-- table: a.csv | columns: x as y, z -->\n"
    (tmp_path / "a.csv").write_text("x,z\n1.5,20.26\n2,3\n")
    stale = f"{header}| y |\n<!-- end of table -->"
    fresh = (
        f"{header}| y | z |\n| --- | --- |\n| 1.50 | 20.3 |\n| 2.00 | 3.0 |\n<!-- end of table -->"
    )
    assert markdown.updated(stale, tmp_path) == fresh
    with pytest.raises(ValueError, match="unknown columns"):
        markdown.updated(stale.replace("x as", "w as"), tmp_path)
    (tmp_path / "page.md").write_text("```bash\nfalse\n```\n")
    (example,) = SYBIL.parse(tmp_path / "page.md").examples()
    with pytest.raises(AssertionError):
        example.evaluate()


def test_a_table_across_the_values_of_a_column(tmp_path):
    (tmp_path / "a.csv").write_text("m,k,x\nb,one,1\nb,two,2\na,one,3\n")
    request = "a.csv | columns: m as method, k, x as y | across: k"
    table = f"<!-- table: {request} -->\n{{}}<!-- end of table -->"
    rows = "| method | y, one | y, two |\n| --- | --- | --- |\n| b | 1 | 2 |\n| a | 3 |  |\n"
    assert markdown.updated(table.format(""), tmp_path) == table.format(rows)
    (tmp_path / "a.csv").write_text("m,k,x\nb,1,1\nb,,2\na,1,3\n")
    rows = "| method | y, 1 | y |\n| --- | --- | --- |\n| b | 1 | 2 |\n| a | 3 |  |\n"
    assert markdown.updated(table.format(""), tmp_path) == table.format(rows)


def test_documents_are_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8_000
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 10_000


def test_lines_of_prose_are_short():
    for page in [*PAGES, "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
        prose = (line for line in text.splitlines() if not re.match(r"[|<!\[]", line))
        assert [line for line in prose if len(line) > 120 and " " in line.strip()] == [], page
