"""What a file of tables may say, and the cells that its settings describe."""

import dataclasses
import pathlib
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from experiments.schema import config, grid
from experiments.schema.fields import STRICT, ConfigError, Positive, checked, read_mapping
from experiments.schema.grid import Cell
from magicjax import DynamicTree, TokenTree, parse_tree

WIDTH = "{k}"  # stands for the width in the tree of table 2


class Merging(BaseModel):
    """Trees of table 4: one of a single draft, one of each member of the ensemble."""

    model_config = STRICT

    single: str = Field("expansion:4,1,1,1,1,1,1,1", description="What a single draft proposes.")
    member: str = Field("expansion:2,1,1,1,1,1,1,1", description="What each member proposes.")


class Size(BaseModel):
    """Trees of table 5 of one size; the optimal tree follows from what is measured."""

    model_config = STRICT

    nodes: Annotated[int, Field(ge=2)] = Field(description="Nodes, the root included.")
    expansion: str = Field(description="Static tree of at most as many nodes.")
    dynamic: str = Field(description="dynamic:nodes,depth,width of as many nodes.")

    @model_validator(mode="after")
    def _same_size(self) -> "Size":
        static, dynamic = parse_tree(self.expansion), parse_tree(self.dynamic)
        if not isinstance(static, TokenTree) or not isinstance(dynamic, DynamicTree):
            raise ValueError("expansion must be a static tree, and dynamic a dynamic one")
        if static.num_nodes > self.nodes or dynamic.num_nodes != self.nodes:
            raise ValueError(
                f"{self.expansion} has {static.num_nodes} nodes and {self.dynamic} "
                f"{dynamic.num_nodes}: at most and exactly nodes={self.nodes} are compared"
            )
        return self


class Tables(BaseModel):
    """Tables of token trees: success rates, widths, verifiers, ensembles, shapes."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = Field(
        "specinfer", description="Folder of the results."
    )
    results: str = Field("results", description="Where the folders of results lie.")
    tables: list[Literal[1, 2, 3, 4, 5]] = Field(
        [1, 2, 3, 4, 5], min_length=1, description="Which tables to make."
    )
    target: str = Field("experiments/zoo/target", description="Directory of the target.")
    drafts: list[str] = Field(
        ["experiments/zoo/draft-1", "experiments/zoo/draft-2"],
        min_length=1,
        description="Directories of the drafts; tables 2, 3 and 5 use the first.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of weights and caches.")
    context: Positive = Field(512, description="Tokens of each prompt.")
    new_tokens: Annotated[int, Field(ge=8)] = Field(64, description="Tokens generated for each.")
    requests: Annotated[int, Field(ge=2)] = Field(
        16, description="Prompts, each run alone; errors are over these."
    )
    seeds: Positive = Field(
        1, description="Runs of each request under sampling, of which the mean counts."
    )
    probes: Positive = Field(
        8,
        description="Other prompts, on which the acceptance behind the optimal trees is measured.",
    )
    candidates: Positive = Field(
        2, description="Places of the text tried for each prompt; those that loop least are kept."
    )
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="Of the sampled halves of the tables."
    )
    seed: int = Field(0, description="Of the first request; the others count on from it.")
    windows: Annotated[int, Field(ge=2)] = Field(
        16, description="Stretches of held-out text on which success rates are measured."
    )
    window: Annotated[int, Field(ge=2)] = Field(
        1024, description="Tokens of such a stretch; the second half counts."
    )
    widths: list[Positive] = Field(
        [1, 2, 3, 4, 5], min_length=2, description="Widths of table 2; the largest is table 3's."
    )
    width_tree: str = Field(
        "expansion:1,1,{k},1,1,1,1,1", description="The tree of width {k} in tables 2 and 3."
    )
    merging: Merging = Field(Merging(), description="Trees of table 4.")
    sizes: list[Size] = Field(
        [
            Size(nodes=16, expansion="expansion:3,1,1,1,1", dynamic="dynamic:16,6,4"),
            Size(nodes=32, expansion="expansion:5,1,1,1,1,1", dynamic="dynamic:32,7,6"),
            Size(nodes=64, expansion="expansion:3,4,1,1,1,1", dynamic="dynamic:64,8,8"),
        ],
        min_length=1,
        description="Sizes and trees of table 5.",
    )
    probe_tree: str = Field(
        "expansion:8,8", description="Wide tree with which the acceptance by rank is measured."
    )
    optimal_depth: Positive = Field(8, description="The most depth of an optimal tree.")
    fresh: bool = Field(False, description="Measure also what is finished.")

    @model_validator(mode="after")
    def _trees_can_be_compared(self) -> "Tables":
        if WIDTH not in self.width_tree:
            raise ValueError(f"width_tree={self.width_tree!r} has no {WIDTH} for the width")
        if sorted(set(self.widths)) != self.widths:
            raise ValueError(f"widths={self.widths} must rise")
        for spec in (*map(self.tree_of_width, self.widths), self.probe_tree):
            _static(spec)
        if 4 in self.tables:
            self._check_merging()
        return self

    def _check_merging(self) -> None:
        count = len(self.drafts)
        if count < 2:
            raise ValueError(f"table 4 merges drafts, and drafts lists {count}: list at least 2")
        single, member = _static(self.merging.single), _static(self.merging.member)
        merged = 1 + count * (member.num_nodes - 1)
        if merged > single.num_nodes:
            raise ValueError(
                f"{count} trees {self.merging.member} have up to {merged} nodes, more than the "
                f"{single.num_nodes} of {self.merging.single}: the ensemble must not have more"
            )

    def tree_of_width(self, width: int) -> str:
        return self.width_tree.replace(WIDTH, str(width))


def _static(spec: str) -> TokenTree:
    tree = parse_tree(spec)
    if not isinstance(tree, TokenTree):
        raise ValueError(f"{spec!r} grows: a static tree is needed here")
    return tree


def read(path: pathlib.Path) -> Tables:
    """Returns the settings in a YAML file.

    Raises:
      ConfigError: a key that does not exist, a value out of range, a directory that is not there.
    """
    tables = checked(Tables, read_mapping(path), str(path))
    for directory in (tables.target, *tables.drafts):
        if not (pathlib.Path(directory) / "config.json").is_file():
            raise ConfigError(f"{path}: {directory} is no model directory: it has no config.json")
    return tables


def plain(tables: Tables, sampled: bool) -> Cell:
    """Returns the cell of plain decoding of one request."""
    experiment = config.Experiment(
        target=tables.target,
        dtype=tables.dtype,
        batch=1,
        context=tables.context,
        new_tokens=tables.new_tokens,
        do_sample=sampled,
        temperature=tables.temperature if sampled else None,
        seed=tables.seed if sampled else None,
        repeats=1,
        candidates=tables.candidates,
        agreement_tokens=0,
    )
    return grid.groups(experiment)[0][0]


def speculative(
    tables: Tables, sampled: bool, drafts: list[str], tree: str, draw: str = "", verifier: str = ""
) -> Cell:
    """Returns the cell of one draft, or of several merged, whose tree is given."""
    return dataclasses.replace(
        plain(tables, sampled),
        draft="small" if len(drafts) == 1 else "ensemble",
        models=tuple(drafts),
        tree=tree,
        draw=draw,
        verifier=(verifier or grid.VERIFIER) if sampled else "",
    )
