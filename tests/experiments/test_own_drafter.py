"""The drafter of the documentation, written to one file, in Python, a command, and a grid."""

import csv
import pathlib
import re
import sys

import pytest

import magicjax
from experiments import launch
from magicjax.cli import main
from tests.magicjax import keywords

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "extending" / "drafter.md"


@pytest.fixture
def one_file(tmp_path, monkeypatch):
    """Makes `repeat_last.py` of the page's first block of code."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "repeat_last.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    yield "repeat_last.RepeatLast"
    sys.modules.pop("repeat_last", None)


@pytest.mark.slow
def test_one_file_gives_a_drafter_in_python_commands_and_grids(
    one_file, zoo, here, monkeypatch, capsys
):
    target = magicjax.load(zoo / "target", dtype="float32")
    arguments = {"max_tokens": 12, "eos_token_id": []}
    plain = keywords.generate(target, ["def f1(x):"], **arguments)
    drafted = keywords.generate(
        target, ["def f1(x):"], drafter=f"{one_file}:2", tree="chain:3", **arguments
    )
    assert drafted.texts == plain.texts and drafted.stats.drafted > 0

    command = ["magicjax", "generate", "--target", str(zoo / "target"), "--dtype", "float32"]
    command += ["--prompt", "def f1(x):", "--max-tokens", "12"]
    monkeypatch.setattr(sys, "argv", [*command, "--drafter", f"{one_file}:period=2"])
    main.main()
    out, err = capsys.readouterr()
    assert out.startswith(keywords.generate(target, ["def f1(x):"], max_tokens=12).texts[0])
    assert "tau" in err

    here()
    path = zoo / "own.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\nresults: {zoo / 'results'}\n"
        "new_tokens: 12\nrepeats: 0\ncandidates: 1\nagreement_tokens: 0\ncontext: 48\n"
        "methods:\n"
        f"  - {{drafter: '{one_file}:2 + prompt-lookup', tree: 'chain:2 + chain:3'}}\n"
    )
    assert launch.main([str(path)]) == 0
    with (zoo / "results" / "own" / "summary.csv").open() as file:
        _, ensemble = csv.DictReader(file)
    assert ensemble["method"] == f"{one_file}:2 + prompt-lookup:4, chain:2 + chain:3"
    assert ensemble["exact_match"] == "1.0"
