"""The cells of an experiment: their settings, arguments of `generate`, columns, and keys.

Cells that differ only in the method form a group: they share prompts. Plain decoding runs beside
every method, and has cells of its own only in an experiment without methods.
"""

import dataclasses
import functools
import inspect
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

import magicjax
from experiments.prompts import TEXTS
from experiments.prompts.sources import hash_files
from experiments.schema import axes, method, store
from experiments.schema.columns import RESERVED
from experiments.schema.config import PARAMETERS, Experiment
from experiments.schema.fields import ConfigError
from experiments.schema.method import AUTO, OPTIONS, PLAIN
from experiments.schema.paths import PATHS
from experiments.schema.settings import columns_of, declared
from magicjax.decoding.request import RequestOptions
from magicjax.drafters import spec
from magicjax.sources import Source
from magicjax.trees.token_tree import ROOT_ONLY, TreeShape
from sharding import parse_mesh

_Settings: Any = dataclasses.make_dataclass(
    "_Settings", [*declared(Experiment), *PLAIN], frozen=True
)


class Cell(_Settings):
    """One row of the results: every setting of `Experiment`, and one combination of a `Method`.

    It is frozen and hashable. Settings that do not apply are None, "" or (). `drafter` is the text
    with all options, "none" for plain decoding, or "auto".
    """

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding."""
        return self.drafter == PLAIN["drafter"]

    @functools.cached_property
    def parsed(self) -> list[spec.Drafters]:
        """The drafter, those that "auto" tries, or [] in plain decoding."""
        texts = self.drafter, *self.drafters
        return [spec.parse(text) for text in texts if text not in (AUTO, PLAIN["drafter"])]

    @functools.cached_property
    def trees(self) -> spec.Trees:
        """The trees of its drafters."""
        return spec.parse_trees(self.tree)

    @functools.cached_property
    def speculation(self) -> tuple[Any, Any]:
        """(drafter, tree) with stand-ins for models."""
        return make_drafter(self, method.named)

    @property
    def drafts(self) -> list[spec.Spec]:
        """The drafters, several of an ensemble, a cascade or of those that "auto" tries."""
        return [draft for parsed in self.parsed for draft in parsed.parts]

    @property
    def draft(self) -> str:
        """The kind of the drafter: its name, "none", "auto", "ensemble" or "cascade"."""
        if self.is_plain or self.drafter == AUTO:
            return self.drafter
        if len(self.drafts) == 1:
            return self.drafts[0].name
        return "cascade" if self.parsed[0].is_cascade else "ensemble"

    @property
    def options(self) -> dict[str, Any]:
        """The options of its only drafter, by name; the policy's are one text."""
        if self.draft in (PLAIN["drafter"], AUTO, "ensemble", "cascade"):
            return {}
        (draft,) = self.drafts
        values = spec.values_of(self.speculation[0])
        policy_options = " ".join(f"{name}={values.pop(name)}" for name in draft.policy_values)
        return values | ({"policy_options": policy_options} if policy_options else {})

    @property
    def models(self) -> tuple[str, ...]:
        """The directories of draft models."""
        return tuple(dict.fromkeys(draft.path for draft in self.drafts if draft.path))

    @property
    def model(self) -> str:
        """The drafts' directories as one text."""
        return " + ".join(self.models)

    @property
    def num_requests(self) -> int:
        """The number of prompts."""
        return self.requests or self.batch

    @property
    def shape(self) -> TreeShape:
        """The bounds of the tree of a round."""
        if self.is_plain:
            return ROOT_ONLY.shape
        drafter, tree = self.speculation
        return drafter.tree.shape if self.drafter == AUTO else drafter.shape(tree)

    @property
    def gamma(self) -> int:
        return self.shape.depth

    @property
    def nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def draw_methods(self) -> str:
        """How children are drawn, "" in greedy decoding."""
        if self.is_plain or self.drafter == AUTO or not self.temperature:
            return ""
        drafter, tree = self.speculation
        return " + ".join(sorted(drafter.draw_methods(tree)))

    @property
    def params(self) -> magicjax.SamplingParams:
        """The parameters of the texts."""
        names = declared(Experiment).keys() & PARAMETERS.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return magicjax.SamplingParams(max_tokens=self.new_tokens, **given)

    @property
    def storage(self) -> dict[str, Any]:
        """The arguments `weights`, `kv_dtype` and `offload` of `magicjax.load` for the target."""
        return {
            "weights": self.target_weights or None,
            "kv_dtype": self.target_kv_dtype or None,
            "offload": self.offload == "yes",
        }

    @property
    def packed(self) -> bool:
        """Whether matrices of GGUF files stay in the file's types, if the device has kernels."""
        return self.activations == "int8" and not self.mesh

    @property
    def devices(self) -> Mesh | None:
        """The mesh; None: one device."""
        return magicjax.make_mesh(*parse_mesh(self.mesh)) if self.mesh else None

    @property
    def names(self) -> list[str]:
        """The names of the drafter and of those that "auto" tries, without paths of models."""
        first = {PLAIN["drafter"]: ["plain"], AUTO: [AUTO]}.get(self.drafter, [])
        return [*first, *map(method.short_name, self.parsed)]

    @property
    def method(self) -> str:
        """The method's name in tables and figures, the same greedily and sampled by default."""
        verifier = "" if self.verifier == method.VERIFIER else self.verifier
        adaptive = "adaptive" * self.adaptive
        parts = self.names[0], self.tree, verifier, adaptive
        return ", ".join(filter(None, parts))

    @property
    def label(self) -> str:
        """The cell's name in messages."""
        size = "slots" if self.slots else "batch"
        return f"{size} {self.batch}, context {self.context}: {self.method}"


def groups(experiment: Experiment) -> list[list[Cell]]:
    """Returns the cells, one group for each combination of the axes.

    Raises:
      ConfigError: wrong axes, duplicate cells, or an `exclude` that names an unknown setting,
        matches no cell, or leaves none.
    """
    grouped = [_group(expanded) for expanded in axes.expand(experiment)]
    cells = [cell for group in grouped for cell in group]
    _check_keys(cells)
    excluded = {cell for where in experiment.exclude for cell in _excluded(where, cells)}
    grouped = [[cell for cell in group if cell not in excluded] for group in grouped]
    if not any(grouped):
        raise ConfigError("exclude leaves no cell of the grid: remove a line of it")
    return [group for group in grouped if group]


def _check_keys(cells: Sequence[Cell]) -> None:
    """Raises ConfigError if two cells have one key."""
    known: dict[str, Cell] = {}
    for cell in cells:
        if (other := known.setdefault(key(cell), cell)) is cell:
            continue
        if other == cell:
            raise ConfigError(
                f"{cell.label}: two combinations of the grid give this cell: remove one"
            )
        paths = [
            (getattr(other, name), getattr(cell, name)) for name in (*PATHS, "drafter", "drafters")
        ]
        first, second = next(pair for pair in paths if pair[0] != pair[1])
        raise ConfigError(
            f"{first} and {second} have the same name in the results: rename a folder or a file"
        )


def _excluded(where: dict[str, Any], cells: Iterable[Cell]) -> list[Cell]:
    """Returns the cells that match one line of `exclude`.

    Raises:
      ConfigError: an unknown setting, or no such cell.
    """
    known = sorted(_facts(next(iter(cells))))
    for name in where:
        if name not in known:
            raise ConfigError(f"exclude: {axes.unknown(name, known)}")

    def matches(cell: Cell, name: str, values: Any) -> bool:
        # "" and 0 mean that a setting is not set, as in a method.
        listed = values if isinstance(values, list) else [values]
        return (_facts(cell)[name] or None) in [value or None for value in listed]

    matching = [
        cell for cell in cells if all(matches(cell, name, values) for name, values in where.items())
    ]
    if not matching:
        raise ConfigError(f"exclude: no cell has {where}: remove the line or correct a value")
    return matching


def _facts(cell: Cell) -> dict[str, Any]:
    """Returns what `exclude` can name: settings with a single value, and those of the method.

    A drafter is named without its options.
    """
    settings = dataclasses.asdict(cell) | dict.fromkeys(OPTIONS) | cell.options
    settings["rate"] = "inf" if cell.rate == math.inf else cell.rate
    single = {name: value for name, value in settings.items() if not isinstance(value, tuple)}
    return single | {"drafter": cell.draft, "model": cell.model, "method": cell.method}


def resolved(cell: Cell) -> dict[str, Any]:
    """Returns the cell's settings as plain values, for YAML and JSON."""
    return json.loads(json.dumps(dataclasses.asdict(cell)))


def restored(settings: dict[str, Any]) -> Cell:
    """Returns the cell of `resolved` settings."""
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    return Cell(**settings | lists)


def plain_of(cell: Cell) -> Cell:
    """Returns the cell of plain decoding of the same prompts."""
    return dataclasses.replace(cell, **PLAIN)


def columns(cell: Cell) -> dict[str, Any]:
    """Returns the cell's columns of summary.csv."""
    settings = {column: getattr(cell, name) for name, column in columns_of(Experiment).items()}
    if cell.slots:
        settings["rate"] = f"{cell.rate:g}"  # JSON has no infinity
    return (
        {"method": cell.method, "draft": cell.draft, "draft_model": cell.model}
        | settings
        | dict.fromkeys(OPTIONS)
        | cell.options
        | {
            "drafters": " ".join(cell.drafters),
            "profile": cell.profile,
            "tree": cell.tree,
            "draw": cell.draw_methods,
            "verifier": cell.verifier or ("" if cell.is_plain else "greedy"),
            "adaptive": cell.adaptive,
            "gamma": cell.gamma,
            "nodes": cell.nodes,
        }
    )


def _group(experiment: Experiment) -> list[Cell]:
    sampled = experiment.temperature > 0
    settings = {
        name: setting.resolve(
            getattr(experiment, name),
            applies=not setting.needs or bool(getattr(experiment, setting.needs)),
        )
        for name, setting in declared(Experiment).items()
    }
    if experiment.candidates is None and experiment.prompts not in TEXTS:
        settings["candidates"] = 1
    if experiment.slots:
        settings |= {"batch": experiment.slots, "candidates": 1}
        settings |= {"agreement_tokens": 0, "phases": False}
    plain = Cell(**settings, **PLAIN)
    cells = [] if experiment.methods else [plain]
    for described in experiment.methods:
        for fields in described.cells(sampled):
            cell = dataclasses.replace(plain, **fields)
            _check_names(cell)
            if cell in cells:
                raise ConfigError(f"methods list {cell.method!r} twice: remove one")
            if cell.method in [other.method for other in cells]:
                raise ConfigError(
                    f"two methods have the name {cell.method!r} in tables and figures: rename a "
                    "model's folder, or make two experiments"
                )
            cells.append(cell)
    return cells


def _check_names(cell: Cell) -> None:
    """Raises ConfigError if an option of a drafter has the name of another column."""
    for name in cell.options.keys() - {*OPTIONS}:
        if name in RESERVED:
            raise ConfigError(
                f"{cell.drafter}: the option {name} has the name of a column of the results: "
                "rename it"
            )


def make_drafter(cell: Cell, load: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns (drafter, tree) of a cell, as arguments of `magicjax.generate`.

    `load` returns the model of a path.
    """
    if cell.is_plain:
        return None, None
    if cell.drafter == AUTO:
        candidates = [spec.make_drafter(parsed, load) for parsed in cell.parsed]
        return method.make_auto(candidates, cell.profile, cell.trees), None
    return method.resolve(cell.parsed[0], cell.trees, load)


def options(cell: Cell, load: Callable[..., Any]) -> RequestOptions:
    """Returns the options of the cell's call of `generate`; `load` returns a directory's model."""
    drafter, tree = make_drafter(cell, load)
    return RequestOptions(
        drafter=drafter,
        tree=tree,
        verifier=cell.verifier or None,
        eos_token_id=[],  # all rows generate new_tokens
        mesh=cell.devices,
        micro_batches=cell.micro_batches,
    )


def key(cell: Cell) -> str:
    """Returns 16 hexadecimal digits that identify the cell's result.

    Of a path only the name counts, so that the key is the same on every machine and from every
    working directory.
    """
    names = {path: pathlib.PurePath(getattr(cell, path)).name for path in PATHS}
    settings = resolved(cell) | names | {"drafter": cell.names[0], "drafters": cell.names[1:]}
    return store.digest(json.dumps(settings, sort_keys=True))


def fingerprint(source: str) -> str:
    """Returns a hash of a model directory's files, "" for a preset, whose weights are random."""
    model = Source(source)
    paths = [] if model.directory is None else sorted(model.checkpoint_directory.glob("*"))
    return hash_files(path for path in paths if path.suffix in (".json", ".jinja", ".safetensors"))


def drafters_fingerprint(cell: Cell) -> str:
    """Returns a hash of the files that define a cell's drafters and policies."""
    drafters = [spec.make_one(draft, method.named) for draft in cell.drafts]
    policies = [getattr(drafter, "policy", None) for drafter in drafters]
    policies = [policy for policy in policies if isinstance(policy, magicjax.Policy)]
    files = {inspect.getfile(type(defined)) for defined in (*drafters, *policies)}
    return hash_files(map(pathlib.Path, sorted(files))) if files else ""
