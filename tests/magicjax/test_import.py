"""A package that shadows one of magicjax's is reported, not used."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def importing(*path) -> subprocess.CompletedProcess:
    """Imports magicjax in a fresh process with the given folders first on its path."""
    folders = [str(folder) for folder in path]
    code = f"import sys; sys.path[:0] = {folders}; import magicjax"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=path[0], timeout=300
    )


@pytest.mark.parametrize(
    ("file", "name"), [("models.py", "models"), ("sharding/__init__.py", "sharding")]
)
def test_a_shadowing_file_is_reported_with_the_remedy(file, name, tmp_path):
    hiding = tmp_path / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("")
    done = importing(tmp_path, ROOT)
    assert done.returncode != 0
    assert (
        f"ImportError: {hiding} shadows the package '{name}' of magicjax in {ROOT}" in done.stderr
    )
    assert "rename that file, or put magicjax's folder first" in done.stderr
