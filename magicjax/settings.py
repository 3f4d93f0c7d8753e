"""Static, hashable settings that compiled programs are specialized on."""

import dataclasses

from magicjax.trees.token_tree import Tree, TreeShape
from sharding import DATA, AnyMesh


@dataclasses.dataclass(frozen=True)
class StatsSpec:
    """Which attention statistics and hidden states of the target a drafter needs.

    Attributes:
      window: W, how many of each row's newest queries are kept.
      total: sum the attention of all queries to each entry.
      rounds: collect attention statistics in every round, not only during prefill.
      layer_inputs: the layers whose inputs are kept, in prefill and in every round; the number of
        layers stands for the last layer's output.
    """

    window: int = 0
    total: bool = False
    rounds: bool = False
    layer_inputs: tuple[int, ...] = ()

    def __or__(self, other: "StatsSpec") -> "StatsSpec":
        """Returns the smallest spec that covers both."""
        return StatsSpec(
            max(self.window, other.window),
            self.total or other.total,
            self.rounds or other.rounds,
            tuple(sorted({*self.layer_inputs, *other.layer_inputs})),
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a program is specialized on, besides the shapes of its arguments.

    Attributes:
      tree: the tree that the drafter proposes in every round.
      shape: bounds of the proposals.
      verifier: one of `verify.VERIFIERS`.
      capacity: S, the slots of the target's cache.
      chunk: tokens of a prefill step.
      max_tokens: the longest output of any row.
      backend: backend of attention and products; None: that of `choose_backend`.
      max_backlog: the most committed tokens that a draft model's cache may lack.
      drafter_index: index of the drafter in its ensemble.
      mesh: the factored device mesh; None: one device.
      replicated_rows: whether all groups of devices have the same rows; else `data` divides them.
      logprobs: for how many of the most likely tokens the log-probabilities are returned, besides
        those of the emitted tokens; None: no log-probabilities are computed.
      member_trees: trees of an ensemble's members in this program; None: those of the ensemble.
      rows: in an engine, the number of slots, from the first, that a program decodes; None: all.
    """

    tree: Tree
    shape: TreeShape
    verifier: str
    capacity: int
    chunk: int
    max_tokens: int
    backend: str | None = None
    max_backlog: int = 1
    drafter_index: int = 0
    mesh: AnyMesh | None = None
    replicated_rows: bool = False
    logprobs: int | None = None
    member_trees: tuple[Tree, ...] | None = None
    rows: int | None = None

    @property
    def groups(self) -> int:
        """The number of groups of devices that divide the rows of a batch."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes along which the groups of devices differ; () for one group."""
        return (DATA,) if self.groups > 1 else ()

    def with_tree(self, tree: Tree) -> "Settings":
        """Returns the settings for another tree of one drafter, no deeper and no wider.

        With a tree of only a root nothing is drafted, and the drafter only commits tokens.
        """
        return dataclasses.replace(self, tree=tree)._with_shape(tree.shape)

    def with_member_trees(self, trees: tuple[Tree, ...], shape: TreeShape) -> "Settings":
        """Returns the same for the trees of an ensemble's members; `shape` is the ensemble's."""
        return dataclasses.replace(self, member_trees=trees)._with_shape(shape)

    def _with_shape(self, shape: TreeShape) -> "Settings":
        verifier = self.verifier
        if shape.num_nodes == 1 and verifier != "greedy":
            verifier = "naive"  # the other rules need draws
        return dataclasses.replace(self, shape=shape, verifier=verifier)


@dataclasses.dataclass(frozen=True)
class PrefillSettings:
    """What `prefill` is specialized on: no tree, so different trees share a program.

    A deeper tree may still need a larger capacity, in steps of 64 slots.

    Attributes:
      capacity, chunk, backend, mesh, replicated_rows, logprobs: as in `Settings`.
      stats_spec: the statistics and hidden states to collect.
    """

    capacity: int
    chunk: int
    backend: str | None
    stats_spec: StatsSpec
    mesh: AnyMesh | None = None
    replicated_rows: bool = False
    logprobs: int | None = None
