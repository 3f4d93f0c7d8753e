"""What `import magicjax` imports; a package that shadows one of magicjax's is reported."""

import ast
import pathlib
import subprocess
import sys

import pytest

import magicjax

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


def test_every_public_name_is_imported_when_it_is_first_used():
    assert [name for name in magicjax.__all__ if getattr(magicjax, name) is None] == []
    assert {*magicjax.__all__} <= {*dir(magicjax)}
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        magicjax.generat  # noqa: B018


def test_type_checkers_see_the_public_names():
    tree = ast.parse(pathlib.Path(magicjax.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    names = (alias.name for node in imports for alias in node.names)
    assert sorted(names) == magicjax.__all__


@pytest.mark.parametrize(
    ("code", "unused"),
    [
        ("import magicjax", ["jax", "flax", "transformers"]),
        ("import magicjax; magicjax.generate", ["scipy", "magicjax.prediction", "transformers"]),
        ("from magicjax.cli import main; main.parser(['--help'])", ["jax", "numpy"]),
    ],
)
def test_imports_that_are_not_used_are_not_made(code, unused):
    found = f"import sys; {code}; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", found], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
