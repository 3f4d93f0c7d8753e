"""The rules of the layout, read from the sources: who may import whom, and how long a file may be.

Each rule is a function from sources to a list of offences, so that it can be shown to catch one.
"""

import ast
import pathlib
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = {"pallas_kernels": 0, "sharding": 0, "models": 1, "magicjax": 2, "experiments": 3}
CORE = [package for package, floor in FLOORS.items() if floor < 3]
# A bare GPU image has none of these, and the core runs there. torch is needed nowhere.
NOT_IN_CORE = {"pydantic", "tyro", "yaml", "pandas", "matplotlib", "rich", "tqdm", "torch"} | {
    *("wandb", "tensorboardX", "lm_eval")
}
MOST_LINES = 500


def sources(folders: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (path below the root, text) of every Python file in the folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def imported(node: ast.AST) -> list[str]:
    """Returns the top-level packages that one statement or call imports from outside its own."""
    match node:
        case ast.Import(names=names):
            return [alias.name.split(".")[0] for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module.split(".")[0]]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module.split(".")[0]]
    return []


def run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when the module is imported: not functions, nor TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from run_on_import(node)


def wrong_floors(path: str, text: str) -> list[str]:
    """Returns the imports that go up, or to another room of the same floor, anywhere in a file."""
    room = path.split("/")[0]
    return [
        f"{path}:{node.lineno}: {room} imports {package}"
        for node in ast.walk(ast.parse(text))
        for package in imported(node)
        if package in FLOORS and package != room and FLOORS[package] >= FLOORS[room]
    ]


def heavy_imports(path: str, text: str) -> list[str]:
    """Returns what a core file imports, as soon as it is imported, that a bare image has not."""
    return [
        f"{path}:{node.lineno}: imports {package}"
        for node in run_on_import(ast.parse(text))
        for package in imported(node)
        if package in NOT_IN_CORE
    ]


def too_long(path: str, text: str) -> list[str]:
    """Returns a line for a file with more than `MOST_LINES` lines."""
    lines = len(text.splitlines())
    return [f"{path}: {lines} lines, at most {MOST_LINES}"] if lines > MOST_LINES else []


def without_init(paths: list[str]) -> list[str]:
    """Returns the folders of code without an `__init__.py`: an installation leaves them out."""
    folders = {path.rpartition("/")[0] for path in paths}
    return sorted(folder for folder in folders if f"{folder}/__init__.py" not in paths)


def test_an_import_goes_down_and_never_between_rooms_of_one_floor():
    assert [o for path, text in sources([*FLOORS]) for o in wrong_floors(path, text)] == []


def test_the_core_imports_nothing_that_a_bare_gpu_image_lacks():
    assert [o for path, text in sources(CORE) for o in heavy_imports(path, text)] == []


def test_no_file_is_longer_than_one_subject_needs():
    assert [o for path, text in sources([*FLOORS, "tests"]) for o in too_long(path, text)] == []


def test_every_folder_of_code_is_a_package_and_gets_installed():
    assert without_init([path for path, _ in sources([*FLOORS])]) == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name for name in settings["packages"]["find"]["include"] if "*" not in name} == {
        *FLOORS
    }


# Negative controls: every rule catches what it is there for, and lets pass what is right.


@pytest.mark.parametrize(
    ("path", "text", "offences"),
    [
        ("models/a.py", "import magicjax", 1),
        ("models/a.py", "def f():\n    from magicjax.trees.token_tree import chain", 1),
        ("models/a/b.py", "import jax, experiments.launch as launch", 1),
        ("magicjax/a.py", "import importlib\nimportlib.import_module('experiments.launch')", 1),
        ("sharding/a.py", "from pallas_kernels import tree_attention", 1),
        ("pallas_kernels/a.py", "try:\n    import sharding\nexcept ImportError:\n    pass", 1),
        ("sharding/a.py", "import models\nimport magicjax", 2),
        ("magicjax/a.py", "import models, sharding, pallas_kernels\nfrom magicjax import b", 0),
        ("experiments/a.py", "import magicjax\nfrom models import Llama", 0),
        ("models/a.py", "from . import magicjax\nfrom .experiments import b", 0),
        ("models/a.py", "import magicjax_extras", 0),
    ],
)
def test_the_rule_of_floors_catches_what_goes_up_or_across(path, text, offences):
    assert len(wrong_floors(path, text)) == offences


@pytest.mark.parametrize(
    ("text", "offences"),
    [
        ("import torch", 1),
        ("from rich.console import Console", 1),
        ("try:\n    import tqdm\nexcept ImportError:\n    tqdm = None", 1),
        ("class A:\n    import yaml", 1),
        ("import matplotlib.pyplot as plt, pandas", 2),
        ("def show():\n    import matplotlib.pyplot", 0),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", 0),
        ("import transformers, jax.numpy as jnp", 0),
    ],
)
def test_the_rule_of_the_core_catches_imports_that_run_at_once(text, offences):
    assert len(heavy_imports("magicjax/a.py", text)) == offences


def test_the_rule_of_length_counts_lines():
    assert too_long("magicjax/a.py", "x = 0\n" * MOST_LINES) == []
    assert len(too_long("magicjax/a.py", "x = 0\n" * (MOST_LINES + 1))) == 1


def test_the_rule_of_packages_names_the_folder_without_init():
    paths = ["models/__init__.py", "models/llama.py"]
    assert without_init(paths) == []
    assert without_init([*paths, "models/vision/clip.py"]) == ["models/vision"]


def test_the_rules_read_real_files():
    paths = [path for path, _ in sources([*FLOORS, "tests"])]
    assert "models/__init__.py" in paths and "tests/test_layout.py" in paths
