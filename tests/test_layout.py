"""Rules of the layout: import levels, import cycles, packages and scripts.

Each rule is a function from sources to a list of offences, so that a test can show that it catches
one.
"""

import ast
import graphlib
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "sharding", "models", "magicjax", "experiments")
CORE = PACKAGES[:-1]
DIVIDED = ("magicjax", "experiments")  # their sub-packages and top modules are units of their own

# Units from the lowest level to the highest. A module imports only units of lower levels and
# modules of its own unit; units of one level do not import each other.
LEVELS = (
    ("pallas_kernels", "sharding"),
    ("models",),
    ("magicjax.version", "magicjax.checks", "magicjax.files", "magicjax.hub", "magicjax.suggest"),
    ("magicjax.trees", "magicjax.downloads", "magicjax.options", "magicjax.plugins")
    + ("magicjax.compilation_cache",),
    ("magicjax.settings", "magicjax.parallel", "magicjax.verification", "magicjax.grammars")
    + ("magicjax.sources",),
    ("magicjax.model", "magicjax.sampling_params"),
    ("magicjax.kv_cache",),
    ("magicjax.policies",),
    ("magicjax.drafters",),
    ("magicjax.placement",),
    ("magicjax.loading",),
    ("magicjax.decoding",),
    ("magicjax.prediction",),
    ("magicjax.generation", "magicjax.engine"),
    ("magicjax",),  # the public names
    ("magicjax.benchmarks", "magicjax.server"),
    ("magicjax.cli",),
    ("magicjax.__main__",),
    ("experiments",),
    ("experiments.prompts",),
    ("experiments.schema",),
    ("experiments.runner",),
    ("experiments.report",),
    ("experiments.training",),
    ("experiments.launch",),
    ("experiments.demo", "experiments.notebooks", "experiments.studies"),
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}

# The core runs on a bare GPU image, which has none of these. Nothing needs torch.
NOT_IN_CORE = {"pydantic", "tyro", "yaml", "pandas", "matplotlib", "rich", "tqdm", "torch"} | {
    *("altair", "optax", "orbax"),
    *("pydantic_core", "starlette", "uvicorn", "prometheus_client"),
}
SERVER = "magicjax/server/"  # needs the extra `serve`; `magicjax serve` imports it when it runs,
SERVER_CONFIG = "magicjax/server/config.py"  # except for this file


def sources(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (path below the root, text) of every Python file in the folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def module_name(path: str) -> str:
    """Returns the dotted name of a file: "a/b.py" is a.b, and "a/__init__.py" is a."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(node: ast.AST, path: str) -> list[str]:
    """Returns the dotted names that one statement or call imports, `from a import b` as a.b."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=up):
            folders = path.split("/")[:-up] if up else []
            return [".".join([*folders, *filter(None, [module]), alias.name]) for alias in names]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module]
    return []


def unit_of(module: str) -> str:
    """Returns the unit of a module: two parts of its name in a divided package, else one."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in DIVIDED else parts[0]


def imported_unit(name: str) -> str:
    """Returns the unit that an imported name is from; public names are the package's own."""
    unit = unit_of(name)
    return unit if unit in LEVEL else unit.split(".")[0]


def wrong_levels(path: str, text: str) -> list[str]:
    """Returns the imports of a file, in functions too, that do not go down."""
    unit = unit_of(module_name(path))
    if unit not in LEVEL:
        return [f"{path}: {unit} has no level"]
    return [
        f"{path}:{node.lineno}: {unit} imports {other}"
        for node in ast.walk(ast.parse(text))
        for name in imported(node, path)
        if (other := imported_unit(name)) in LEVEL and other != unit and LEVEL[other] >= LEVEL[unit]
    ]


def import_cycle(files: Mapping[str, str]) -> list[str]:
    """Returns the modules of one import cycle, [] if there is none."""
    modules = {module_name(path) for path in files}
    graph = {
        module_name(path): {
            target
            for node in ast.walk(ast.parse(text))
            for name in imported(node, path)
            if (target := name if name in modules else name.rpartition(".")[0]) in modules
        }
        - {module_name(path)}
        for path, text in files.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when a module is imported: no functions, no TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from run_on_import(node)


def heavy_imports(path: str, text: str) -> list[str]:
    """Returns the packages missing on a bare image that a file imports when it is imported."""
    if path.startswith(SERVER) and path != SERVER_CONFIG:
        return []
    return [
        f"{path}:{node.lineno}: imports {name}"
        for node in run_on_import(ast.parse(text))
        for name in imported(node, path)
        if name.split(".")[0] in NOT_IN_CORE
        or (unit_of(name) == "magicjax.server" and not name.startswith("magicjax.server.config."))
    ]


def without_init(paths: Sequence[str]) -> list[str]:
    """Returns the folders of code without an `__init__.py`, which an installation omits."""
    folders = {path.rpartition("/")[0] for path in paths}
    return sorted(folder for folder in folders if f"{folder}/__init__.py" not in paths)


def test_imports_go_down():
    offences = [o for path, text in sources(PACKAGES) for o in wrong_levels(path, text)]
    assert not offences, "\n".join(offences)


def test_no_modules_import_each_other_in_a_cycle():
    assert import_cycle(dict(sources(PACKAGES))) == []


def test_the_core_imports_only_what_a_bare_gpu_image_has():
    offences = [o for path, text in sources(CORE) for o in heavy_imports(path, text)]
    assert not offences, "\n".join(offences)


def test_every_folder_of_code_is_a_package_and_is_installed():
    assert without_init([path for path, _ in sources(PACKAGES)]) == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    included = {name for name in settings["packages"]["find"]["include"] if "*" not in name}
    assert included == {*PACKAGES}


def undefined_tests(script: str, defined: set[str]) -> list[str]:
    """Returns the tests that a shell script names and no test file defines."""
    return [name for name in re.findall(r"::(test_\w+)", script) if name not in defined]


def test_shell_scripts_name_tests_that_exist():
    trees = (ast.parse(text) for _, text in sources(["tests"]))
    functions = (node for tree in trees for node in ast.walk(tree))
    defined = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
    for path in sorted((ROOT / "tools").glob("*.sh")):
        assert undefined_tests(path.read_text("utf-8"), defined) == [], path


# Negative controls: every rule catches an offence and passes what is right.


@pytest.mark.parametrize(
    ("path", "text", "offences"),
    [
        ("models/a.py", "import magicjax", 1),
        ("magicjax/cli/a.py", "import importlib\nimportlib.import_module('experiments.launch')", 1),
        ("magicjax/trees/a.py", "from magicjax import verification", 1),
        ("magicjax/trees/a.py", "def f():\n    from ..decoding import loop", 1),
        (
            "magicjax/kv_cache/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import magicjax.policies",
            1,
        ),
        ("magicjax/unheard_of.py", "", 1),
        ("magicjax/drafters/__init__.py", "from magicjax.drafters import base", 0),
        ("models/a.py", "import magicjax_extras", 0),
    ],
)
def test_the_rule_of_levels_catches_imports_that_go_up_or_across(path, text, offences):
    assert len(wrong_levels(path, text)) == offences


@pytest.mark.parametrize(
    ("files", "cycle"),
    [
        ({"a/__init__.py": "", "a/b.py": "import a.c", "a/c.py": "from a import b"}, True),
        ({"a/b.py": "from a.c import x", "a/c.py": "def f():\n    from .b import y"}, True),
        ({"a/__init__.py": "from a.b import x", "a/b.py": "from a import y"}, True),
        ({"a/__init__.py": "from a.b import x", "a/b.py": "import a.c", "a/c.py": ""}, False),
        ({"a/b.py": "import a.b\nimport jax", "a/c.py": "from a import b"}, False),
    ],
)
def test_the_rule_of_cycles_finds_modules_that_import_each_other(files, cycle):
    assert bool(import_cycle(files)) == cycle


@pytest.mark.parametrize(
    ("text", "offences"),
    [
        ("import torch", 1),
        ("from magicjax.server.app import create_app", 1),
        ("def show():\n    import matplotlib.pyplot", 0),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", 0),
    ],
)
def test_the_rule_of_the_core_catches_imports_that_run_at_once(text, offences):
    assert len(heavy_imports("magicjax/a.py", text)) == offences
