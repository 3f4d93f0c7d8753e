"""From an experiment to its cells: what is measured once, and the key its result is kept under.

Cells of one batch and context form a group. They share prompts and the measurement of plain
decoding, and are timed in turns, so that a machine that slows down slows all of them.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib

from experiments.config import ConfigError, Experiment
from magicjax import parse_tree

BUDGET, SINKS = 256, 16


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of the results, every setting resolved.

    Attributes:
      target: directory or preset.
      draft: "none" (plain decoding), "self" or "small".
      model: directory of the small model, else "".
      policy: of the draft's cache, else "".
      kv_budget, sinks: of the draft's cache, else 0.
      tree: its name, else "".
      dtype, batch, context, new_tokens, repeats, candidates, agreement_tokens: as given.
    """

    target: str
    draft: str
    model: str
    policy: str
    kv_budget: int
    sinks: int
    tree: str
    dtype: str
    batch: int
    context: int
    new_tokens: int
    repeats: int
    candidates: int
    agreement_tokens: int

    @property
    def gamma(self) -> int:
        return parse_tree(self.tree).depth if self.tree else 0

    @property
    def nodes(self) -> int:
        return parse_tree(self.tree).num_nodes if self.tree else 1

    @property
    def method(self) -> str:
        """The method's name in tables and plots."""
        if self.draft == "none":
            return "plain"
        if self.draft == "self":
            return f"self {self.policy} {self.kv_budget}, {self.tree}"
        return f"{pathlib.PurePath(self.model).name}, {self.tree}"

    @property
    def label(self) -> str:
        """The cell's name in messages."""
        return f"batch {self.batch}, context {self.context}: {self.method}"


def groups(experiment: Experiment) -> list[list[Cell]]:
    """Returns the cells by (batch, context), plain decoding first in each group.

    Raises:
      ConfigError: two methods or two shapes are the same.
    """
    shapes = [shape for s in experiment.shapes for shape in itertools.product(s.batch, s.context)]
    if len(set(shapes)) < len(shapes):
        raise ConfigError(f"shapes name a (batch, context) twice: {shapes}")
    return [_group(experiment, batch, context) for batch, context in shapes]


def _group(experiment: Experiment, batch: int, context: int) -> list[Cell]:
    plain = Cell(
        target=experiment.target,
        draft="none",
        model="",
        policy="",
        kv_budget=0,
        sinks=0,
        tree="",
        dtype=experiment.dtype,
        batch=batch,
        context=context,
        new_tokens=experiment.new_tokens,
        repeats=experiment.repeats,
        candidates=experiment.candidates,
        agreement_tokens=experiment.agreement_tokens,
    )
    cells = [plain]
    for method in experiment.methods:
        small = method.draft == "small"
        budgets = [0] if small else method.kv_budget or [BUDGET]
        for spec, budget in itertools.product(method.tree, budgets):
            cell = dataclasses.replace(
                plain,
                draft=method.draft,
                model=method.model,
                policy="" if small else method.policy or "streaming",
                kv_budget=budget,
                sinks=0 if small else method.sinks or SINKS,
                tree=spec,
            )
            if cell in cells:
                raise ConfigError(f"methods name {cell.method!r} twice: remove one")
            cells.append(cell)
    return cells


def key(cell: Cell, surroundings: dict[str, str]) -> str:
    """Returns 16 hexadecimal digits that name the cell's result.

    `surroundings` is what else a result depends on (device, versions, weights): when that
    changes, the old result no longer counts as finished.
    """
    resolved = json.dumps([dataclasses.asdict(cell), surroundings], sort_keys=True)
    return hashlib.sha256(resolved.encode()).hexdigest()[:16]


def fingerprint(directory: str) -> str:
    """Returns a hash of a model directory's files, or "" of a preset, whose weights are random."""
    root = pathlib.Path(directory)
    if not root.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(root.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
