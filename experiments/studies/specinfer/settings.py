"""Settings of the tables, and the cells that they describe."""

import dataclasses
import pathlib
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

import models
from experiments.schema import config, grid
from experiments.schema.fields import STRICT, ConfigError, Positive, Strict, checked, read_mapping
from experiments.schema.grid import Cell
from experiments.schema.method import VERIFIER
from experiments.schema.paths import from_working_directory
from magicjax import DynamicTree, TokenTree, parse_tree
from magicjax.sources import checkpoint_directory

AtLeast2 = Annotated[int, Field(ge=2)]
WIDTH = "{k}"  # placeholder for the width in the tree of table 2


class Merging(Strict):
    """Trees of table 4."""

    single: str = "expansion:4,1,1,1,1,1,1,1"  # of a single draft
    member: str = "expansion:2,1,1,1,1,1,1,1"  # of each member of the ensemble


class Size(Strict):
    """Trees of table 5 of one size; the optimal tree follows from measured acceptance."""

    nodes: AtLeast2  # the root included
    expansion: str  # a static tree with at most this many nodes
    dynamic: str  # dynamic:nodes,depth,width with exactly this many nodes

    @model_validator(mode="after")
    def _same_size(self) -> "Size":
        static, dynamic = parse_tree(self.expansion), parse_tree(self.dynamic)
        if not isinstance(static, TokenTree) or not isinstance(dynamic, DynamicTree):
            raise ValueError("expansion must be a static tree, dynamic a dynamic tree")
        if static.num_nodes > self.nodes or dynamic.num_nodes != self.nodes:
            raise ValueError(
                f"{self.expansion} has {static.num_nodes} nodes and {self.dynamic} has "
                f"{dynamic.num_nodes}: choose at most and exactly nodes={self.nodes}"
            )
        return self


SIZES = [
    Size(nodes=16, expansion="expansion:3,1,1,1,1", dynamic="dynamic:16,6,4"),
    Size(nodes=32, expansion="expansion:5,1,1,1,1,1", dynamic="dynamic:32,7,6"),
    Size(nodes=64, expansion="expansion:3,4,1,1,1,1", dynamic="dynamic:64,8,8"),
]


class Tables(BaseModel):
    """Tables of token trees: success rates, widths, verifiers, ensembles, shapes."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "specinfer"  # of the results folder
    results: str = "results"  # parent of the results folder
    tables: Annotated[list[Literal[1, 2, 3, 4, 5]], Field(min_length=1)] = [1, 2, 3, 4, 5]
    target: str = "experiments/zoo/target"
    drafts: Annotated[list[str], Field(min_length=1)] = [  # tables 2, 3 and 5 use the first
        "experiments/zoo/draft-1",
        "experiments/zoo/draft-2",
    ]
    dtype: Literal["float32", "bfloat16"] = "float32"
    context: Positive = 512  # tokens of each prompt
    new_tokens: Annotated[int, Field(ge=8)] = 64
    requests: AtLeast2 = 16  # prompts, one per call; errors are over requests
    seeds: Positive = 1  # runs of each sampled request, which are averaged
    probes: Positive = 8  # other prompts, to measure acceptance for the optimal trees
    candidates: Positive = 2  # text positions per prompt; the least repetitive are kept
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    seed: int = 0  # of the first request; later requests add their index
    windows: AtLeast2 = 16  # windows of held-out text for table 1
    window: AtLeast2 = 1024  # tokens of a window; the second half counts
    widths: Annotated[list[Positive], Field(min_length=2)] = [1, 2, 3, 4, 5]  # table 3: the last
    width_tree: str = "expansion:1,1,{k},1,1,1,1,1"  # of width {k} in tables 2 and 3
    merging: Merging = Merging()  # table 4
    sizes: Annotated[list[Size], Field(min_length=1)] = SIZES  # table 5
    probe_tree: str = "expansion:8,8"  # wide tree to measure the acceptance by rank
    optimal_depth: Positive = 8  # maximum depth of an optimal tree
    fresh: bool = False  # measure finished cells again

    @model_validator(mode="after")
    def _check_trees(self) -> "Tables":
        if WIDTH not in self.width_tree:
            raise ValueError(f"width_tree={self.width_tree!r} lacks the placeholder {WIDTH}")
        if sorted(set(self.widths)) != self.widths:
            raise ValueError(f"widths={self.widths} must increase")
        for spec in (*map(self.tree_of_width, self.widths), self.probe_tree):
            _static(spec)
        if 4 in self.tables:
            self._check_merging()
        return self

    def _check_merging(self) -> None:
        count = len(self.drafts)
        if count < 2:
            raise ValueError(f"table 4 merges at least 2 drafts, and drafts has {count}")
        single, member = _static(self.merging.single), _static(self.merging.member)
        merged = 1 + count * (member.num_nodes - 1)
        if merged > single.num_nodes:
            raise ValueError(
                f"merging.member={self.merging.member} has up to {merged} nodes for {count} "
                f"drafts, more than the {single.num_nodes} nodes of merging.single="
                f"{self.merging.single}: choose a smaller tree"
            )

    def tree_of_width(self, width: int) -> str:
        return self.width_tree.replace(WIDTH, str(width))


def _static(spec: str) -> TokenTree:
    tree = parse_tree(spec)
    if not isinstance(tree, TokenTree):
        raise ValueError(f"{spec!r} is not a static tree")
    return tree


def read(path: pathlib.Path) -> Tables:
    """Returns the settings in a YAML file.

    Raises:
      ConfigError: an unknown key, a value out of range, or a missing model.
    """
    raw = from_working_directory(read_mapping(path), path.parent, ("target", "drafts"))
    tables = checked(Tables, raw, str(path))
    for source in (tables.target, *tables.drafts):
        try:
            models.load_config(checkpoint_directory(source))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error
    return tables


def plain(tables: Tables, sampled: bool) -> Cell:
    """Returns the cell of plain decoding of one request."""
    experiment = config.Experiment(
        target=tables.target,
        dtype=tables.dtype,
        batch=1,
        context=tables.context,
        new_tokens=tables.new_tokens,
        temperature=tables.temperature if sampled else 0.0,
        seed=tables.seed if sampled else None,
        repeats=1,
        candidates=tables.candidates,
        agreement_tokens=0,
    )
    return grid.groups(experiment)[0][0]


def speculative(
    tables: Tables, sampled: bool, drafts: list[str], tree: str, draw: str = "", verifier: str = ""
) -> Cell:
    """Returns the cell of one draft with a tree, or of several merged drafts."""
    return dataclasses.replace(
        plain(tables, sampled),
        drafter=" + ".join(f"small:{path}:full" + f":draw={draw}" * bool(draw) for path in drafts),
        tree=tree,
        verifier=(verifier or VERIFIER) if sampled else "",
    )
