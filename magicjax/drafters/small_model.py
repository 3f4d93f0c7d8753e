"""A draft model with its own cache (SpecInfer's SSM, MagicDec's stand-alone draft)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Drafter, RoundOutcome
from magicjax.drafters.draft_pass import (
    NOT_RUN,
    Backlog,
    DraftBlock,
    DraftContext,
    check_width,
    resolve_draw_method,
)
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.sink_rotation import SinkKeys, prefill_sliding_window, rotate_sinks
from magicjax.drafters.sparse import (
    BUDGET_HELP,
    DRAW_HELP,
    KV_DTYPE_HELP,
    POLICY_HELP,
    KVDtype,
    SparseSettings,
    resolve_policy,
    sparse_settings,
)
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.prefill import extend_cache, prefill_cache
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring
from magicjax.model import Model
from magicjax.options import option
from magicjax.policies import Policy, Quest, StreamingLLM
from magicjax.settings import AttentionStatsSpec, Settings
from magicjax.trees.proposal import DrawMethod, Proposal
from magicjax.trees.token_tree import Tree
from models import parse_weights
from sharding import BATCH, KV_HEADS, Split, logical_axes

SinkPositions = Literal["text", "in_cache"]


@struct.dataclass
class SmallModelState:
    """A draft model's state between two rounds.

    Attributes:
      cache: its keys and values.
      backlog: the newest committed tokens that it has not run: an accepted leaf, or another
        drafter's branch.
      sinks: the sinks' keys before rotation if the sinks move with the ring, else None.
    """

    cache: KVCache | DraftCache
    backlog: Backlog
    sinks: SinkKeys | None = struct.field(metadata=logical_axes(BATCH, KV_HEADS))

    @property
    def split(self) -> Split:
        """The model's division over devices."""
        return self.cache.split


@struct.dataclass
class SmallModel(Drafter):
    """A smaller model of the same vocabulary, on its full cache or a sparse one.

    With a sparse cache it prefills in full, keeps `budget` entries of each layer and KV head, and
    from then on its newest ones (MagicDec's stand-alone draft, arXiv 2408.11049).

    Attributes:
      model: as `magicjax.load` returns it.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      policy: which entries of its cache are pinned, a name or a `Policy`; "full" keeps all.
      budget: C, the slots for each layer and KV head of a sparse cache; None: 256.
      kv_dtype: of a sparse cache, as for `SelfSpeculation`.
      sink_positions: "text": pinned entries keep their positions in the text. "in_cache": they
        move to just before the ring, so that a draft model can read texts beyond its own context;
        for policy "streaming" and rotary positions. The prompt is then prefilled through the same
        sliding window.
      weights: the format in which a path is loaded, as for `magicjax.load`; of a loaded model it
        must be the model's.

    Raises:
      ValueError: an unknown policy, or "quest"; a budget or kv_dtype of a full cache;
        sink_positions="in_cache" with another policy than streaming, or with a kv_dtype.
      TypeError: the policy is neither a name nor a `Policy`, the budget is not an integer, or an
        unknown draw, kv_dtype or sink_positions.
    """

    model: Model
    draw: DrawMethod | None = option(None, DRAW_HELP)
    policy: Policy | str = option("full", POLICY_HELP, positional=True)
    budget: int | None = option(None, BUDGET_HELP, positional=True)
    kv_dtype: KVDtype | None = option(None, KV_DTYPE_HELP)
    sink_positions: SinkPositions = option(
        "text",
        "positions of the sinks of policy streaming: those in the text, or just before the newest "
        "tokens, which lets the draft model read texts longer than its context",
    )
    weights: str | None = option(
        None, "quantized matrices of the draft model: int8, int4 or int4:32"
    )

    def __post_init__(self):
        resolve_policy(self, "keeps all of its cache")
        if isinstance(self.policy, Quest):
            raise ValueError(
                "policy='quest' chooses pages of the target's cache, which only self-speculation "
                "reads: use another policy"
            )
        if self._moves_sinks and (not isinstance(self.policy, StreamingLLM) or self.kv_dtype):
            raise ValueError(
                "sink_positions='in_cache' needs policy 'streaming' and no kv_dtype, not "
                f"policy={self.policy!r}, kv_dtype={self.kv_dtype!r}"
            )

    @property
    def _moves_sinks(self) -> bool:
        return self.sink_positions == "in_cache"

    @property
    def sparse(self) -> SparseSettings | None:
        """The settings of its sparse cache; None: its cache is full."""
        return sparse_settings(self)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises if the models do not fit, or context or tree are too large."""
        if not isinstance(self.model, Model):
            raise TypeError(f"SmallModel needs what magicjax.load returns, not {self.model!r}")
        form, own = parse_weights(self.weights), self.model.weights
        without_zeros = own and dataclasses.replace(own, zeros=False)
        if form is not None and (None if form == "none" else form) not in (own, without_zeros):
            raise ValueError(
                f"weights={self.weights!r} differs from the draft model's, {self.model.weights}: "
                "load it with magicjax.load(path, weights=...), or remove weights"
            )
        vocab, target_vocab = self.model.config.vocab_size, target.config.vocab_size
        if vocab != target_vocab:
            raise ValueError(
                f"the drafter's vocabulary has {vocab} tokens and the target's {target_vocab}: "
                "they must be the same; use a drafter of the target's family"
            )
        resolve_draw_method(self.draw, tree)
        draft_vocab = getattr(self.model.config, "draft_vocab_size", None)
        check_width(tree, vocab if draft_vocab is None else draft_vocab - 1)
        if self.model.tokenizer is not None and target.tokenizer is not None:
            _check_tokenizers(self.model, target)
        self._check_positions(context, depth)
        if self.sparse is not None:
            # A round commits a backlog and a path, each of at most `depth` tokens, and the root.
            self.sparse.check(self.model, 2 * depth + 1, f"2 x tree depth ({depth}) + 1")

    def _check_positions(self, context: int, depth: int) -> None:
        config = self.model.config
        limit = config.max_positions
        if not self._moves_sinks:
            if context > limit:
                raise ValueError(
                    f"prompt and new tokens need {context} positions and the drafter has {limit}: "
                    "use a drafter with a longer context, a shorter prompt, or policy='streaming' "
                    "with sink_positions='in_cache'"
                )
            return
        assert self.sparse is not None
        if getattr(config, "rope", None) is None:
            raise ValueError(
                "sink_positions='in_cache' needs a drafter with rotary positions, and those of "
                f"this one are learned or ALiBi: use sink_positions='text' and at most {limit} "
                "tokens"
            )
        round_size = 2 * depth + 1
        needed, largest = self.sparse.budget + round_size, limit - round_size
        if needed > limit:
            fits = self.sparse.policy.ring(largest) >= round_size  # `SparseSettings.check`
            remedy = f"use a budget of at most {largest}" if fits else "use a shallower tree"
            raise ValueError(
                f"budget={self.sparse.budget} and a round need {needed} positions and the drafter "
                f"has {limit}: {remedy}"
            )

    def draw_methods(self, tree: Tree) -> set[str]:
        return {resolve_draw_method(self.draw, tree)}

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        if self.sparse is None:
            return self.model.kv_bytes(batch, capacity)
        # The keys of sinks that move are stored a second time, before rotation.
        sinks = self.sparse.num_pinned if self._moves_sinks else 0
        return self.sparse.num_bytes(self.model, batch) + self.model.kv_bytes(batch, sinks) // 2

    def prefill(self, target, tokens, cache, stats, settings: Settings) -> SmallModelState:
        local_cache, sinks = self._prefill(tokens, cache.lengths, settings)
        return SmallModelState(local_cache, _no_backlog(cache, settings), sinks)

    def extend(
        self, target, state: SmallModelState, kept, tokens, cache, stats, settings: Settings
    ) -> SmallModelState:
        own, lengths = state.cache, cache.lengths
        if isinstance(own, KVCache):
            own = dataclasses.replace(own, lengths=jnp.minimum(own.lengths, kept))
            own, *_ = extend_cache(self.model, own, tokens, lengths, settings, AttentionStatsSpec())
            return SmallModelState(own, _no_backlog(cache, settings), None)
        # A sparse cache has dropped entries that the policy may choose for the longer text.
        sparse_cache, sinks = self._prefill(tokens, lengths, settings, _extend_from_nothing)
        return SmallModelState(sparse_cache, _no_backlog(cache, settings), sinks)

    def _prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        settings: Settings,
        prefill: Callable = prefill_cache,
    ) -> tuple[KVCache | DraftCache, SinkKeys | None]:
        sparse = self.sparse
        if sparse is not None and self._moves_sinks:
            size = sparse.num_pinned, sparse.ring
            return prefill_sliding_window(self.model, tokens, lengths, settings, *size)
        spec = AttentionStatsSpec() if sparse is None else sparse.attention_stats_spec()
        full, _, stats = prefill(self.model, tokens, lengths, settings, spec)
        if sparse is None:
            return full, None
        return sparse.make_cache(self.model, full, stats, settings.backend), None

    def propose(
        self, target, state: SmallModelState, root, cache, sampling, settings: Settings
    ) -> tuple[Proposal, DraftBlock]:
        context = DraftContext(
            model=self.model,
            target=target,
            cache=state.cache,
            root=root,
            root_position=cache.lengths,
            sampling=sampling,
            backlog=state.backlog,
            draw_method=resolve_draw_method(self.draw, settings.tree),
            backend=settings.backend,
            drafter_index=settings.drafter_index,
        )
        return draft_tree(context, settings.tree)

    def commit(
        self, target, state: SmallModelState, draft: DraftBlock, proposal, outcome: RoundOutcome
    ) -> SmallModelState:
        """Returns the state with the backlog and the kept nodes that ran in the cache.

        A node runs only if its parent has run, so the nodes that ran are a prefix of the path. The
        kept nodes after that prefix are the new backlog. A row with N = 4 nodes, F = 2, one token
        in its backlog (entry N = 4), and a path that ends in the leaf 3, which did not run:
            path                0   2   3         kept = 3
            its entries         0   2   NOT_RUN   ran = 2
            entries to commit   4   0   2         count = 1 + ran = 3
            new backlog         token of node 3   count = kept - ran = 1
        A row that had ended (kept = 0) commits nothing and keeps its backlog.
        """
        path, kept, old = outcome.path, outcome.kept, state.backlog
        path_entries = jnp.take_along_axis(draft.entries, path, 1)
        has_run = (path_entries != NOT_RUN) & (jnp.arange(path.shape[1]) < kept[:, None])
        ran = has_run.sum(-1, dtype=jnp.int32)

        entries = _backlog_then_path(draft, old, path_entries)
        count = jnp.where(kept > 0, old.count + ran, 0)

        size = old.tokens.shape[1]
        not_run = jnp.minimum(ran[:, None] + jnp.arange(size), path.shape[1] - 1)
        nodes = jnp.take_along_axis(path, not_run, 1)
        tokens = jnp.take_along_axis(proposal.tokens, nodes, 1)
        backlog = Backlog(
            jnp.where(kept[:, None] > 0, tokens, old.tokens),
            jnp.where(kept > 0, kept - ran, old.count),
        )

        cache, sinks = state.cache, state.sinks
        if isinstance(cache, KVCache):
            cache = full_cache.append(cache, draft.kv, entries, count)
            return SmallModelState(cache, backlog, sinks)
        count_before, cache = cache.count, append_ring(cache, draft.kv, entries, count)
        if sinks is not None:
            cache, sinks = rotate_sinks(self.model, cache, sinks, count_before)
        return SmallModelState(cache, backlog, sinks)

    def synthetic_state(self, state: SmallModelState, lengths: Int[Array, "B"]) -> SmallModelState:
        cache, count = state.cache, jnp.array(lengths)
        if isinstance(cache, KVCache):
            cache = dataclasses.replace(cache, lengths=count)
        else:
            cache = dataclasses.replace(cache, count=count)
        backlog = dataclasses.replace(state.backlog, count=jnp.zeros_like(lengths))
        return dataclasses.replace(state, cache=cache, backlog=backlog)


def _extend_from_nothing(model: Model, tokens: Int[Array, "B T"], *arguments: Any) -> tuple:
    """Returns what `prefill_cache` does, in as many chunks as the longest text needs."""
    settings = arguments[1]
    cache = full_cache.empty(model, tokens.shape[0], settings.capacity)
    return extend_cache(model, cache, tokens, *arguments)


def _no_backlog(cache: KVCache, settings: Settings) -> Backlog:
    rows = cache.lengths.shape[0]
    empty = jnp.zeros((rows, settings.max_backlog), jnp.int32)
    return Backlog(empty, jnp.zeros(rows, jnp.int32))


def _backlog_then_path(
    draft: DraftBlock, backlog: Backlog, path_entries: Int[Array, "B A"]
) -> Int[Array, "B F+A"]:
    """Returns the entries of each row's backlog, then those of its path; undefined after that.

    Backlog entries 4 5 with count 1, and path entries 0 2 NOT_RUN, give 4 0 2 0 0.
    """
    size, length = backlog.tokens.shape[1], path_entries.shape[1]
    first = draft.kv[0][0].shape[1] - size
    index, count = jnp.arange(size + length), backlog.count[:, None]
    along_path = jnp.clip(index - count, 0, length - 1)
    entries = jnp.maximum(jnp.take_along_axis(path_entries, along_path, 1), 0)
    return jnp.where(index < count, first + index, entries)


def _check_tokenizers(drafter: Model, target: Model) -> None:
    ids, target_ids = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    differing = sorted(t for t in ids.keys() | target_ids.keys() if ids.get(t) != target_ids.get(t))
    if differing:
        example = differing[0]
        raise ValueError(
            f"the drafter's tokenizer differs from the target's in {len(differing)} tokens, such "
            f"as {example!r} (id {ids.get(example)} and {target_ids.get(example)}): they must be "
            "the same; use a drafter of the target's family"
        )
