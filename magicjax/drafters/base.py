"""The contract between a drafter and the decoding loop."""

import abc
from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model
from magicjax.options import check_options, options_of
from magicjax.settings import Settings, StatsSpec
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Tree, TreeShape
from magicjax.verification.sampling import Sampling


@struct.dataclass
class Previous:
    """A drafter's state after an earlier text of the same row, such as a turn of a conversation.

    Attributes:
      state: the drafter's own; without an earlier text, zeros.
      reused: int32 [B], the number of tokens that the earlier text and the new one begin with; 0
        without an earlier text.
    """

    state: Any
    reused: Int[Array, "B"]


@struct.dataclass
class RoundOutcome:
    """The outcome of one verified proposal of N nodes.

    Attributes:
      path: int32 [B, A], the accepted nodes of each row, the root first; A is the tree depth + 1.
        The last accepted node repeats to the end.
      committed: int32 [B], how many nodes of the path were committed, 0..A; 0 in rows that had
        ended.
      kv: for each layer the target's keys and values [B, N, K, D] of all nodes.
      queries: for each layer the target's queries [B, N, H, D] and the log-sum-exp of their scores
        [B, N, H] if `stats_spec().rounds`, else None.
      layer_inputs: [B, N, E], of all nodes, for each layer of `stats_spec().layer_inputs`.
      cache: the target's cache after the commit.
      backend: static; of the attention.
    """

    path: Int[Array, "B A"]
    committed: Int[Array, "B"]
    kv: tuple[tuple[Array, Array], ...]
    queries: tuple[Any, ...]
    layer_inputs: dict[int, Float[Array, "B N E"]]
    cache: KVCache
    backend: str | None = struct.field(pytree_node=False)


class Drafter(abc.ABC):
    """Proposes a token tree in every round.

    A drafter is a pytree. Its static fields specialize the compiled programs; its arrays are
    arguments of them. Five methods are required. `check` and `draw_methods` run on the host before
    compilation. `prefill` runs once per request, then every round calls `propose` and `commit`;
    these three are pure functions that are traced into the programs. The other methods are hooks
    with defaults.

    On a mesh, arrays of a state are divided by rows along their first axis; other divisions are
    declared with `sharding.logical_axes`. Implementations need not repeat the types below. A
    drafter that repeats the pending token::

        @flax.struct.dataclass
        class Repeat(Drafter):
            def check(self, target, tree, depth, context): pass
            def draw_methods(self, tree): return {"top"}  # nothing is drawn at random
            def prefill(self, target, tokens, cache, stats, settings, previous=None): return ()
            def propose(self, target, state, root, cache, sampling, settings):
                parents = settings.tree.array  # [N]
                tokens = jnp.repeat(root[:, None], len(parents), axis=1)  # [B, N]
                draws = None
                if sampling is not None:
                    below = jnp.broadcast_to(parents[1:], tokens[:, 1:].shape)  # [B, N - 1]
                    draws = deterministic_draws(below, target.local_vocab)
                return Proposal(tokens, parents, draws), None
            def commit(self, target, state, draft, proposal, outcome): return state
    """

    def __post_init__(self) -> None:
        """Raises TypeError if an option has a value of another type."""
        check_options(self, options_of(type(self)).values())

    @abc.abstractmethod
    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if it cannot draft `tree` for `target` in texts of `context` tokens.

        `depth` is the longest path that it may have to commit, in edges. In an ensemble it can
        exceed the depth of `tree`.
        """

    @abc.abstractmethod
    def draw_methods(self, tree: Tree) -> set[str]:
        """Returns the `DRAW_METHODS` by which it chooses children under sampling."""

    @abc.abstractmethod
    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> Any:
        """Returns its state after the prompts.

        Args:
          target: the target model.
          tokens: the prompts, right-padded; `cache.lengths` [B] has their lengths.
          cache: the target's keys and values of the prompts.
          stats: covers `stats_spec()`; in an ensemble it can hold more.
          settings: settings of the program, such as the tree.
          previous: in an engine, its state after an earlier text, which it may reuse; T is then at
            least `cache.lengths` plus a chunk. None without an earlier text.
        """

    @abc.abstractmethod
    def propose(
        self,
        target: Model,
        state: Any,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, Any]:
        """Returns a proposal, and any pytree that `commit` needs of this draft.

        Args:
          target: the target model.
          state: the drafter's state.
          root: each row's pending token, at position `cache.lengths`.
          cache: the target's, of all tokens before the root; of length 0 in rows that have ended.
          sampling: how each row samples; the proposal must then have `draws`. None: greedy.
          settings: settings of the program.
        """

    @abc.abstractmethod
    def commit(
        self, target: Model, state: Any, draft: Any, proposal: Proposal, outcome: RoundOutcome
    ) -> Any:
        """Returns its state after the committed nodes of each path.

        Args:
          target: the target model.
          state: the drafter's state before the round.
          draft: what `propose` returned besides the proposal.
          proposal: all drafters' nodes in an ensemble; `outcome.path` indexes them.
          outcome: the accepted nodes.
        """

    def renumber(self, draft: Any, node_of: Int[Array, "B N"], num_nodes: int) -> Any:
        """Returns what `propose` returned for `commit`, by the nodes of another tree.

        The other tree is the merged one of an ensemble, or the chain of a cascade. By default the
        draft is returned as it is, which is right if it has no entries by node.

        Args:
          draft: the draft, by its own N nodes.
          node_of: the other tree's node of each of its nodes; below 0 for padding, and for nodes
            that the other tree lacks. Several of its nodes can be one node.
          num_nodes: number of nodes of the other tree.
        """
        return draft

    def rewind(self, before: Any, after: Any) -> Any:
        """Returns the state `before`, in the arrays of `after` where they differ in dead entries.

        A cascade commits drafted tokens to its first drafter within a round, and drops them at the
        end. Reading arrays of `before` then would make XLA copy them in every round. A drafter with
        this method may read no more of the target's cache in `propose` than its lengths, and no
        queries in `commit`.

        Args:
          before: its state at the beginning of a round.
          after: its state after further commits, which may differ by row.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define rewind")

    def for_target(self, target: Model) -> "Drafter":
        """Returns the drafter with arrays that it derives from the target's parameters.

        It runs on the host after `check`: first for a target without parameters (`params=None`),
        so that the models that it derives are validated and counted, then for the target.
        """
        return self

    def shape(self, tree: Tree) -> TreeShape:
        """Returns the bounds of its proposals for `tree`."""
        return tree.shape

    def stats_spec(self) -> StatsSpec:
        """Returns the attention statistics and hidden states of the target that it needs."""
        return StatsSpec()

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        """Returns the bytes of its own caches and states; a full one has `capacity` slots."""
        return 0

    def state_bytes(self, batch: int) -> int:
        """Returns how many of `cache_bytes` are of states; 0 if those are the target's."""
        return 0

    def insert(self, state: Any, row: Any, slot: Int[Array, ""]) -> Any:
        """Returns the state with one row replaced by that of a request which joins the batch.

        A row's later drafts must not depend on the other rows: nothing of the state is shared.

        Args:
          state: the drafter's state of all rows; on a mesh, of the rows of one group of devices.
          row: the drafter's state of the row that joins.
          slot: int32 [], the index of the row.
        """
        return insert_row(state, row, slot)

    def extract(self, state: Any, slot: Int[Array, ""]) -> Any:
        """Returns its state of one row, as `insert` takes it and `prefill` continues it."""
        return extract_row(state, slot)

    def with_forced(self, state: Any, forced: Callable[[int], Int[Array, "B D"]]) -> Any:
        """Returns its state with the tokens that the rows' grammars force next.

        It runs on the host before each round in which a row has a grammar. By default they are not
        used.

        Args:
          state: the drafter's state of all rows.
          forced: returns the first D of these tokens, given D: int32 [B, D]; -1 for none.
        """
        return state

    def simulated(self, state: Any) -> Int[Array, "B A"] | None:
        """Returns how many simulated rounds of each row accepted 0, 1, … A - 1 tokens.

        A drafter whose drafts cost little can simulate its rounds while another drafter, or none,
        drafts, so that its acceptance is known. None: it does not.
        """
        return None

    @property
    def takes_partial_batch(self) -> bool:
        """Whether `propose` and `commit` take the first rows of an engine's batch alone.

        Each `KVCache` then has the arrays of all rows, and other arrays are those of the part.
        """
        return False

    @property
    def can_be_disabled(self) -> bool:
        """Whether plain rounds of an engine need not run it.

        `propose` and `commit` then find rows whose newest tokens the state lacks, and do nothing
        for them.
        """
        return False

    @property
    def remembers(self) -> bool:
        """Whether `remember` changes what it proposes."""
        return False

    def remember(self, text: Any, prompt: int = 0) -> "Drafter":
        """Returns the drafter after a text of an engine has finished, with arrays of equal shapes.

        It runs on the host, between two calls of the loop; on a mesh, in all processes in the same
        order. Texts of a seed then depend on earlier requests unless `naive` verifies them.

        Args:
          text: int32 [T], a prompt and its answer.
          prompt: how many of the tokens are the prompt's.
        """
        return self

    def members(self) -> tuple["Drafter", ...]:
        """Returns the drafters of an ensemble or a cascade, or the drafter itself."""
        return (self,)


REQUIRED = tuple(sorted(Drafter.__abstractmethods__))


def commit_checked(
    drafter: Drafter,
    target: Model,
    state: Any,
    draft: Any,
    proposal: Proposal,
    outcome: RoundOutcome,
) -> Any:
    """Returns `drafter.commit`, whose arrays are those of the state before; runs while tracing.

    Raises:
      TypeError: they have another structure, shape or dtype, which a compiled loop cannot carry.
    """
    committed = drafter.commit(target, state, draft, proposal, outcome)
    name = f"{type(drafter).__name__}.commit"
    before: Any = jax.tree.structure(state)
    after: Any = jax.tree.structure(committed)
    if after != before:
        raise TypeError(
            f"{name} returned a state of the structure {after}, and the state before has {before}: "
            "return the structure that `prefill` returns"
        )

    def check(path, old: Any, new: Any) -> None:
        if _described(old) != _described(new):
            raise TypeError(
                f"{name} returned the state{jax.tree_util.keystr(path)} as {_described(new)}, and "
                f"the state before has {_described(old)}: return the shapes and dtypes that "
                "`prefill` returns"
            )

    jax.tree_util.tree_map_with_path(check, state, committed)
    return committed


def _described(x: Any) -> str:
    aval = jax.typeof(x)
    return f"{aval.dtype}{list(aval.shape)}"


def with_length(state: Any, length: int) -> Any:
    """Returns a state whose rows have `length` tokens of no meaning, for timing.

    A part of it with a method `with_length`, such as a cache, sets its own lengths.
    """

    def has_length(x: Any) -> bool:
        return hasattr(x, "with_length")

    def change(x: Any) -> Any:
        return x.with_length(length) if has_length(x) else x

    return jax.tree.map(change, state, is_leaf=has_length)


def insert_row(rows: Any, row: Any, slot: Int[Array, ""]) -> Any:
    """Returns a pytree of arrays [B, ...] with row `slot` replaced by that of arrays [1, ...].

    Raises:
      ValueError: an array has no axis of rows.
    """

    def write(path, old: Array, new: Array) -> Array:
        if old.ndim == 0 or new.shape != (1, *old.shape[1:]):
            raise ValueError(
                f"the state{jax.tree_util.keystr(path)} has shapes {old.shape} for all rows and "
                f"{new.shape} for one, so that a row cannot be inserted: give it a first axis of "
                "rows, or define the drafter's `insert`"
            )
        return jax.lax.dynamic_update_slice_in_dim(old, new, slot, 0)

    return jax.tree_util.tree_map_with_path(write, rows, row)


def extract_row(rows: Any, slot: Int[Array, ""]) -> Any:
    """Returns row `slot` of a pytree of arrays [B, ...] as arrays [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), rows)
