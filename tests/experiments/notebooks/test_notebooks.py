"""The notebooks run in a fresh clone and are stored with outputs.

They run in the slow suite only.
"""

import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from experiments.notebooks import __main__ as command
from experiments.notebooks import running
from magicjax.downloads import DOWNLOADS
from tests.quick import quick

ROOT = pathlib.Path(__file__).parents[3]
NAMES = [path.stem for path in running.find()]
DOWNLOADED = 'MODEL = "smollm2"'
FOR_DOWNLOADED = ("eagle",)  # whose head is of the downloaded model
CODE = ("magicjax", "models", "sharding", "pallas_kernels", "experiments")


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository's code without caches, whose notebooks use a bundled model."""
    made = tmp_path / "clone"
    for package in CODE:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, made / package, ignore=ignore)
    for path in running.find(folder=made / "experiments" / "notebooks"):
        if path.stem in FOR_DOWNLOADED:
            continue
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            cell.source = cell.source.replace(DOWNLOADED, 'MODEL = "experiments/zoo/target"')
            assert '"smollm2"' not in cell.source
        nbformat.write(notebook, path)
    return made


@pytest.mark.parametrize("name", quick(NAMES))
def test_a_notebook_runs_in_a_fresh_clone_and_uses_its_code(name, clone):
    if name in FOR_DOWNLOADED and not DOWNLOADS["smollm2"].directory.is_dir():
        pytest.skip("smollm2 is not downloaded: run `magicjax fetch smollm2`")
    path = clone / "experiments" / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, 4)
    asked = "import magicjax\nprint(magicjax.__file__)"
    notebook.cells.append(nbformat.v4.new_code_cell(asked, id="asked"))
    nbformat.write(notebook, path)
    ran = running.execute(path)
    assert ran.cells[-1].outputs[0].text.strip() == str(clone / "magicjax" / "__init__.py")
    assert not [o for cell in ran.cells for o in cell.get("outputs", ()) if o.get("ename")]


def first_cell() -> str:
    return nbformat.read(running.find([NAMES[0]])[0], 4).cells[1].source


def test_the_first_cell_finds_the_clone_from_any_folder_of_it(clone):
    printing = "\nprint(os.getcwd(), sys.path[0])"
    for folder in (clone, clone / "experiments" / "notebooks", clone / "magicjax" / "policies"):
        ran = subprocess.run(
            [sys.executable, "-c", first_cell() + printing],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.split() == [str(clone), str(clone)]


def test_the_first_cell_asks_for_a_restart_if_it_replaces_jax(tmp_path, monkeypatch):
    versions = iter(["0.7.2", "0.12.0", "0.12.0", "0.12.0"])
    commands = []

    def run(command, **options):
        commands.append(command)
        (tmp_path / "magicjax").mkdir(exist_ok=True)

    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: next(versions))
    with pytest.raises(SystemExit, match="JAX 0.7.2 is replaced by 0.12.0. Restart the session"):
        exec(first_cell(), {})
    exec(first_cell(), {})  # after the restart, in the same folder
    assert [command[0] for command in commands] == ["git", sys.executable, sys.executable]
    assert pathlib.Path.cwd() == tmp_path / "magicjax" == pathlib.Path(sys.path[0])


def test_all_notebooks_have_the_same_first_cell():
    assert len({nbformat.read(path, 4).cells[1].source for path in running.find()}) == 1


# The command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes notebooks of these sources in a folder that the command uses."""

    def make(**sources):
        for name, source in sources.items():
            cell = nbformat.v4.new_code_cell(source, id="cell-0")
            notebook = nbformat.v4.new_notebook(cells=[cell], metadata=running.KEPT_METADATA)
            nbformat.write(notebook, tmp_path / f"{name}.ipynb")
        find = running.find
        monkeypatch.setattr(running, "find", lambda names=(): find(names, tmp_path))
        return tmp_path

    return make


@pytest.mark.slow
def test_a_run_is_stored_with_its_outputs(folder):
    path = folder(good="print('seen')") / "good.ipynb"
    assert command.main([]) == 0
    stored = path.read_bytes()
    assert json.loads(stored)["cells"][0]["outputs"][0]["text"] == ["seen\n"]
    assert command.main(["good"]) == 0
    assert path.read_bytes() == stored  # a second run changes nothing


def test_a_notebook_that_fails_is_reported_and_not_changed(folder, capsys):
    path = folder(bad="print(1 / 0)", good="print('seen')") / "bad.ipynb"
    before = path.read_bytes()
    assert command.main([]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert nbformat.read(path.with_name("good.ipynb"), 4).cells[0].outputs  # others are stored


# What is stored


def notebook_of(*outputs, tags=(), **fields):
    cell = nbformat.v4.new_code_cell("1", id="a", outputs=[*outputs], **fields)
    cell.metadata = nbformat.from_dict({"tags": list(tags)} if tags else {})
    return nbformat.v4.new_notebook(cells=[cell])


def test_cleaning_keeps_outputs_and_tags_only():
    said = nbformat.v4.new_output("stream", text="seen\n")
    value = nbformat.v4.new_output("execute_result", {"text/plain": "1"}, execution_count=7)
    raw = notebook_of(said, value, execution_count=7)
    raw.cells[0].metadata["execution"] = {"iopub.execute_input": "now"}
    raw.metadata["language_info"] = {"name": "python", "version": "3.11.1"}
    kept = running.cleaned(raw)
    assert "now" not in nbformat.writes(kept) and "3.11.1" not in nbformat.writes(kept)
    assert kept.cells[0].execution_count is None
    assert [o.output_type for o in kept.cells[0].outputs] == ["stream", "execute_result"]
    assert kept.cells[0].outputs[1].execution_count is None
    assert raw.cells[0].execution_count == 7  # the argument does not change
    assert running.problems(kept) == []
    unstored = running.cleaned(notebook_of(said, tags=["unstored"]))
    assert unstored.cells[0].outputs == [] and unstored.cells[0].metadata.tags == ["unstored"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("stdout", f"in {ROOT}/experiments", "cell 0 contains .*, a path of one machine"),
        ("stdout", f"in {pathlib.Path.home()}/x", "cell 0 contains .*, a path of one machine"),
        ("stderr", "a warning", "cell 0 wrote to stderr: a warning"),
    ],
)
def test_paths_of_a_machine_and_warnings_are_problems(name, text, message):
    output = nbformat.v4.new_output("stream", name=name, text=text)
    lines = running.problems(running.cleaned(notebook_of(output)))
    assert lines and all(re.search(message, line) for line in lines)


# Pictures
