"""A draft model with its own cache (SpecInfer's SSM, MagicDec's stand-alone draft)."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Drafter, Previous, RoundOutcome
from magicjax.drafters.draft_pass import (
    NOT_RUN,
    Backlog,
    DraftContext,
    DraftedKV,
    check_width,
    resolve_draw_method,
)
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.sink_rotation import SinkKeys, prefill_sliding_window, rotate_sinks
from magicjax.drafters.sparse import (
    BUDGET,
    BUDGET_HELP,
    DRAW_HELP,
    KV_DTYPE_HELP,
    POLICY_HELP,
    KVDtype,
    SparseSettings,
    check_budget,
)
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring
from magicjax.model import Model
from magicjax.options import option
from magicjax.policies import Policy, StreamingLLM, get_policy
from magicjax.settings import Settings, StatsSpec
from magicjax.trees.proposal import DrawMethod, Proposal
from magicjax.trees.token_tree import Tree
from magicjax.verification.sampling import Sampling
from models import EagleConfig, parse_weights
from sharding import BATCH, KV_HEADS, Split, logical_axes

SinkPositions = Literal["text", "in_cache"]
FULL = "full"  # instead of a policy


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

    @property
    def tokens(self) -> Int[Array, "B"]:
        """The committed tokens that it has of each row, backlog included."""
        cache = self.cache
        cached = cache.lengths if isinstance(cache, KVCache) else cache.count
        return cached + self.backlog.count


@struct.dataclass
class SmallModel(Drafter):
    """A smaller model with the same tokens, on its full cache or a sparse one.

    With a sparse cache it prefills in full, keeps `budget` entries of each layer and KV head, and
    from then on its newest ones (MagicDec's stand-alone draft, arXiv 2408.11049).

    Attributes:
      model: as `magicjax.load` returns it.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      policy: which entries of its cache are pinned, a name or a `Policy`; "full": its cache has all
        entries.
      budget: C, the slots for each layer and KV head of a sparse cache; None: 256.
      kv_dtype: dtype of a sparse cache: "int8" or "int4", with one float32 scale for each token and
        head; None: the model's dtype.
      sink_positions: "text": pinned entries keep their positions in the text. "in_cache": they
        move to just before the ring, so that a draft model can read texts beyond its own context;
        for policy "streaming" and rotary positions. The prompt is then prefilled through the same
        sliding window.
      weights, draft_vocab: arguments of `magicjax.load` for a path; a loaded model must have them.

    Raises:
      ValueError: an unknown policy, a budget below 1, a budget or kv_dtype of a full cache;
        sink_positions="in_cache" with another policy than streaming, or with a kv_dtype.
      TypeError: the model is not one, the policy is neither a name nor a `Policy`, the budget is
        not an integer, or an unknown draw, kv_dtype or sink_positions.
    """

    model: Model
    draw: DrawMethod | None = option(None, DRAW_HELP)
    policy: Policy | str = option(FULL, POLICY_HELP, positional=True)
    budget: int | None = option(None, f"{BUDGET_HELP}; default: {BUDGET}", positional=True)
    kv_dtype: KVDtype | None = option(None, KV_DTYPE_HELP)
    sink_positions: SinkPositions = option(
        "text",
        "positions of the sinks of policy streaming: those in the text, or just before the newest "
        "tokens, which lets the draft model read texts longer than its context",
    )
    weights: str | None = option(
        None, "quantized matrices of the draft model: int8, int4, int4:32, or Q4_0 or Q8_0 on a CPU"
    )
    draft_vocab: int | None = option(
        None,
        "rows of the draft model's output matrix, a multiple of 16: it proposes only the first "
        "tokens of its vocabulary; default: all tokens",
    )

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.model, Model):
            raise TypeError(f"model={self.model!r}: pass the model that magicjax.load returns")
        if self.policy == FULL:
            self._check_full()
        else:
            object.__setattr__(self, "policy", get_policy(self.policy))
            budget = BUDGET if self.budget is None else self.budget
            check_budget(budget)
            object.__setattr__(self, "budget", budget)
        if self._moves_sinks and (not isinstance(self.policy, StreamingLLM) or self.kv_dtype):
            raise ValueError(
                "sink_positions='in_cache' needs policy 'streaming' and no kv_dtype, not "
                f"policy={self.policy!r}, kv_dtype={self.kv_dtype!r}"
            )

    def _check_full(self) -> None:
        for name in ("budget", "kv_dtype"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}={value!r}: with policy 'full' the draft keeps all of its cache; use "
                    f"another policy, or omit {name}"
                )

    @property
    def _moves_sinks(self) -> bool:
        return self.sink_positions == "in_cache"

    @property
    def sparse(self) -> SparseSettings | None:
        """The settings of its sparse cache; None: its cache is full."""
        if not isinstance(self.policy, Policy):
            return None
        assert self.budget is not None  # since `__post_init__`
        return SparseSettings(self.policy, self.budget, self.kv_dtype)

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises if the models do not fit, or context or tree are too large."""
        if isinstance(self.model.config, EagleConfig):
            raise ValueError(
                f"the draft model {self.model.name!r} is a learned head, which reads its target's "
                "hidden states: use magicjax.Eagle or magicjax.MTP, in a command eagle:PATH or "
                "mtp:PATH"
            )
        if self.model.kv_bits is not None:
            raise ValueError(
                f"the draft model {self.model.name!r} has its cache in {self.model.kv_bits} bits, "
                "which only a target supports: load it without kv_dtype"
            )
        if any(self.model.recurrent) and self.sparse is not None:
            raise ValueError(
                f"the draft model {self.model.name!r} of family {self.model.config.family!r} has "
                "layers with a state (gated delta nets), which no policy can choose entries of: "
                f"omit policy={self.policy!r}"
            )
        self._check_loaded()
        vocab, target_vocab = self.model.config.vocab_size, target.config.vocab_size
        has_tokenizers = None not in (self.model.tokenizer, target.tokenizer)
        if vocab != target_vocab and not has_tokenizers:
            raise ValueError(
                f"the drafter's vocabulary has {vocab} rows and the target's {target_vocab}: they "
                "may differ only in padding, which both models' tokenizers must show"
            )
        resolve_draw_method(self.draw, tree)
        draft_vocab = getattr(self.model.config, "draft_vocab_size", None)
        check_width(tree, vocab if draft_vocab is None else draft_vocab - 1)
        if has_tokenizers:
            _check_tokenizers(self.model, target)
        self._check_positions(context, depth)
        if self.sparse is not None:
            # A round commits a backlog and a path, each of at most `depth` tokens, and the root.
            self.sparse.check(self.model, 2 * depth + 1, f"2 x tree depth ({depth}) + 1")

    def _check_loaded(self) -> None:
        """Raises ValueError unless the model was loaded with the drafter's options."""
        weight_format, loaded = parse_weights(self.weights), self.model.weights
        formats = ["None", str(loaded)]
        if len(loaded.in_blocks) == 1:
            (text,) = loaded.in_blocks
            formats += [text, text.removesuffix("+zeros")]
        size = getattr(self.model.config, "draft_vocab_size", None)
        for name, matches, value in (
            ("weights", str(weight_format) in formats, loaded),
            ("draft_vocab", self.draft_vocab in (None, size), size),
        ):
            if not matches:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} differs from the draft model's, {value}: load "
                    f"it with magicjax.load(path, {name}=...), or remove {name}"
                )

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
        if getattr(config, "unrotated_layers", False):
            raise ValueError(
                "sink_positions='in_cache' rotates sinks, and some layers of the drafter have no "
                f"rotary positions: use sink_positions='text' and at most {limit} tokens"
            )
        if any(self.model.windows):
            raise ValueError(
                "sink_positions='in_cache' does not support a drafter with sliding windows: use "
                f"sink_positions='text' and at most {limit} tokens"
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

    @property
    def takes_partial_batch(self) -> bool:
        return self.sparse is None

    @property
    def can_be_disabled(self) -> bool:
        return True

    def draw_methods(self, tree: Tree) -> set[str]:
        return {resolve_draw_method(self.draw, tree)}

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        if self.sparse is None:
            return self.model.kv_bytes(batch, capacity)
        # The keys of sinks that move are stored a second time, before rotation.
        sinks = self.sparse.num_pinned if self._moves_sinks else 0
        return self.sparse.num_bytes(self.model, batch) + self.model.kv_bytes(batch, sinks) // 2

    def state_bytes(self, batch: int) -> int:
        return batch * self.model.state_bytes

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> SmallModelState:
        draft_cache, sinks = self._prefill(tokens, cache.lengths, settings, previous)
        rows = cache.lengths.shape[0]
        empty = jnp.zeros((rows, settings.max_backlog), jnp.int32)
        return SmallModelState(draft_cache, Backlog(empty, jnp.zeros(rows, jnp.int32)), sinks)

    def _prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        settings: Settings,
        previous: Previous | None,
    ) -> tuple[KVCache | DraftCache, SinkKeys | None]:
        model, sparse, initial_cache = self.model, self.sparse, None
        if sparse is not None and self._moves_sinks:
            return prefill_sliding_window(
                model, tokens, lengths, settings, sparse.num_pinned, sparse.ring
            )
        if previous is not None:
            initial_cache = full_cache.empty(model, tokens.shape[0], settings.capacity)
            # A sparse cache has dropped entries that the policy may choose for the longer text.
            if sparse is None:
                previous_cache = previous.state.cache
                reused = jnp.minimum(previous_cache.lengths, previous.reused)
                if previous_cache.states:  # which cannot be shortened
                    reused = jnp.where(reused == previous_cache.lengths, reused, 0)
                initial_cache = dataclasses.replace(previous_cache, lengths=reused)
        spec = StatsSpec() if sparse is None else sparse.stats_spec()
        full, _, stats = prefill_cache(model, tokens, lengths, settings, spec, initial_cache)
        if sparse is None:
            return full, None
        return sparse.make_cache(model, full, stats, settings.backend), None

    def propose(
        self,
        target: Model,
        state: SmallModelState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, DraftedKV]:
        context = DraftContext(
            model=self.model,
            target=target,
            cache=state.cache,
            root=root,
            root_position=jnp.where(state.tokens == cache.lengths, cache.lengths, 0),
            sampling=sampling,
            backlog=state.backlog,
            draw_method=resolve_draw_method(self.draw, settings.tree),
            backend=settings.backend,
            drafter_index=settings.drafter_index,
        )
        return draft_tree(context, settings.tree)

    def commit(
        self,
        target: Model,
        state: SmallModelState,
        draft: DraftedKV,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> SmallModelState:
        """Returns the state with the backlog and the committed nodes that ran in the cache.

        A node runs only if its parent has run, so the nodes that ran are a prefix of the path. The
        committed nodes after that prefix are the next backlog. A row with N = 4 nodes, F = 2, one
        token in its backlog (entry N = 4), and a path that ends in the leaf 3, which did not run:
            path                0   2   3         committed = 3
            its entries         0   2   NOT_RUN   ran = 2
            entries to commit   4   0   2         count = 1 + ran = 3
            new backlog         token of node 3   count = committed - ran = 1
        A row that had ended (committed = 0), or whose newest tokens the state lacks, commits
        nothing and keeps its backlog.
        """
        path, old = outcome.path, state.backlog
        lengths_before = outcome.cache.lengths - outcome.committed
        committed = jnp.where(state.tokens == lengths_before, outcome.committed, 0)
        path_entries = jnp.take_along_axis(draft.entries, path, 1)
        has_run = (path_entries != NOT_RUN) & (jnp.arange(path.shape[1]) < committed[:, None])
        ran = has_run.sum(-1, dtype=jnp.int32)

        entries = _backlog_then_path(draft, old, path_entries)
        count = jnp.where(committed > 0, old.count + ran, 0)

        size = old.tokens.shape[1]
        not_run = jnp.minimum(ran[:, None] + jnp.arange(size), path.shape[1] - 1)
        nodes = jnp.take_along_axis(path, not_run, 1)
        tokens = jnp.take_along_axis(proposal.tokens, nodes, 1)
        backlog = Backlog(
            jnp.where(committed[:, None] > 0, tokens, old.tokens),
            jnp.where(committed > 0, committed - ran, old.count),
        )

        cache, sinks = state.cache, state.sinks
        if isinstance(cache, KVCache):
            cache = full_cache.append(cache, draft.kv, entries, count)
            return SmallModelState(cache, backlog, sinks)
        count_before, cache = cache.count, append_ring(cache, draft.kv, entries, count)
        if sinks is not None:
            cache, sinks = rotate_sinks(self.model, cache, sinks, count_before)
        return SmallModelState(cache, backlog, sinks)

    def renumber(self, draft: DraftedKV, node_of: Int[Array, "B N"], num_nodes: int) -> DraftedKV:
        return draft.renumber(node_of, num_nodes)

    def rewind(self, before: SmallModelState, after: SmallModelState) -> SmallModelState:
        old, new = before.cache, after.cache
        if not isinstance(old, KVCache) or not isinstance(new, KVCache):
            return before  # commits overwrite live entries of a ring, so it is copied
        return dataclasses.replace(before, cache=full_cache.restore(old, new))


def _backlog_then_path(
    draft: DraftedKV, backlog: Backlog, path_entries: Int[Array, "B A"]
) -> Int[Array, "B F+A"]:
    """Returns the entries of each row's backlog, then those of its path; undefined after that.

    Backlog entries 4 5 with count 1, and path entries 0 2 NOT_RUN, give 4 0 2 0 0.
    """
    size, length = backlog.tokens.shape[1], path_entries.shape[1]
    first_backlog_entry = jax.tree.leaves(draft.kv)[0].shape[1] - size
    index, count = jnp.arange(size + length), backlog.count[:, None]
    along_path = jnp.clip(index - count, 0, length - 1)
    entries = jnp.maximum(jnp.take_along_axis(path_entries, along_path, 1), 0)
    return jnp.where(index < count, first_backlog_entry + index, entries)


def _check_tokenizers(drafter: Model, target: Model) -> None:
    """Raises ValueError if a token that both models can read or produce is another one.

    A tokenizer can have tokens beyond an embedding: they are not in texts.
    """
    ids, target_ids = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    size = min(drafter.config.vocab_size, target.config.vocab_size)
    lowest_id = {
        token: min(ids.get(token, math.inf), target_ids.get(token, math.inf))
        for token in ids.keys() | target_ids.keys()
        if ids.get(token) != target_ids.get(token)
    }
    differing = [token for token, i in lowest_id.items() if i < size]
    if differing:
        example = min(differing, key=lambda token: (lowest_id[token], token))
        raise ValueError(
            f"the tokenizer of the drafter {drafter.name!r} differs from that of the target "
            f"{target.name!r} in {len(differing)} tokens, such as {example!r} (id "
            f"{ids.get(example)} and {target_ids.get(example)}): they must be the same; use a "
            "drafter of the target's family"
        )
