"""EAGLE-3: a head of one layer drafts from the target's hidden states."""

import dataclasses
import functools
import os
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

import models
from magicjax.drafters import eagle_check
from magicjax.drafters.base import Drafter, Previous, RoundOutcome
from magicjax.drafters.draft_pass import (
    DraftContext,
    check_width,
    embed_for,
    resolve_draw_method,
)
from magicjax.drafters.dynamic_tree import draft_tree
from magicjax.drafters.sparse import DRAW_HELP
from magicjax.kv_cache import full_cache, sparse_cache
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.kv_cache.sparse_cache import DraftCache
from magicjax.model import Model, tokens_of_rows
from magicjax.options import option
from magicjax.settings import Settings, StatsSpec
from magicjax.trees.proposal import DrawMethod, Proposal
from magicjax.trees.token_tree import ROOT_ONLY, Tree
from magicjax.verification.sampling import Sampling
from models.positions import frequencies, rotate_pairs
from pallas_kernels.cpu.packed import Packed, dequantize


@struct.dataclass
class EagleState:
    """The state of a head between two rounds.

    A head reads each token together with the target's hidden states at the token before, so its
    cache has no entry for the first token: token p + 1 is in slot p.

    Attributes:
      cache: the head's keys and values of the committed tokens but the first.
      feature: [B, E], of the newest committed token; the pending token's pass reads it.
    """

    cache: KVCache
    feature: Float[Array, "B E"]


@struct.dataclass
class Eagle(Drafter):
    """A learned head that drafts from hidden states of the target (EAGLE-3, arXiv 2503.01840).

    Keys and values of committed tokens come from the target's hidden states, never from the head's
    own outputs, so that errors of a draft do not accumulate. The layer's keys and values do not
    depend on attention: prefill and commits are only projections.

    Attributes:
      model: the head, as `magicjax.load` returns it.
      budget: C, the entries of its cache that a draft step reads: the first `sinks` and the newest.
        The sinks have positions just before the newest ones, so that a head reads texts longer than
        those of its training. None: all entries.
      sinks: how many of the first entries are read.
      draw: how children are drawn under sampling (`DRAW_METHODS`); None: without replacement, or
        the most likely tokens in a dynamic tree.
      check_agreement: whether the first request compares the tokens that head and target choose on
        a short text (`magicjax.drafters.eagle_check`).

    Raises:
      ValueError: a budget without entries besides the sinks, or negative sinks.
      TypeError: a path in place of the model.
    """

    model: Model
    budget: int | None = option(
        None,
        "entries of its cache that a draft step reads: sinks and the newest; default: all",
        positional=True,
    )
    sinks: int = option(4, "first tokens that a budget always includes")
    draw: DrawMethod | None = option(None, DRAW_HELP)
    check_agreement: bool = option(
        True, "compare the tokens that head and target choose on a short text, at first use"
    )

    _HEAD: ClassVar[str] = "EAGLE-3 head"
    _CONFIG: ClassVar[type] = models.EagleConfig

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.model, str | os.PathLike):
            raise TypeError(
                f"model={self.model!r} is a path: pass the model that magicjax.load returns, "
                f"magicjax.{type(self).__name__}(magicjax.load({str(self.model)!r}))"
            )
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: use 0 or more")
        if self.budget is not None and self.budget <= self.sinks:
            raise ValueError(
                f"budget={self.budget} has no entries besides sinks={self.sinks}: use at least "
                f"{self.sinks + 1}, or fewer sinks"
            )

    @property
    def config(self) -> models.EagleConfig:
        """The head's shapes and settings."""
        assert isinstance(self.model.config, models.EagleConfig)  # since `check`
        return self.model.config

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises if the head was not made for the target, or `tree` is too wide."""
        head = self.model
        if not isinstance(head, Model) or type(head.config) is not self._CONFIG:
            name = repr(head.name) if isinstance(head, Model) else type(head).__name__
            raise TypeError(
                f"{type(self).__name__} needs the {self._HEAD} that magicjax.load returns, not "
                f"{name}; a model that drafts alone is SmallModel"
            )
        config, target_config = self.config, target.config
        sizes = {
            "vocab_size": (config.vocab_size, target_config.vocab_size),
            "target_hidden_size": (config.target_hidden_size, target_config.hidden_size),
        }
        if not config.own_embedding:
            sizes["hidden_size"] = config.hidden_size, target_config.hidden_size
        for name, (head_size, target_size) in sizes.items():
            if head_size != target_size:
                raise ValueError(
                    f"the {self._HEAD} has {name}={head_size}, and the target {target_size}: use "
                    "the head that was trained for this target"
                )
        layers = config.layers_of(target_config.num_layers)
        if min(layers) < 0 or max(layers) > target_config.num_layers:
            raise ValueError(
                f"the {self._HEAD} reads the inputs of layers {', '.join(map(str, layers))}, and "
                f"the target has {target_config.num_layers}: use the head that was trained for "
                "this target"
            )
        resolve_draw_method(self.draw, tree)
        check_width(tree, config.output_rows, "draft vocabulary")

    def draw_methods(self, tree: Tree) -> set[str]:
        return {resolve_draw_method(self.draw, tree)}

    def for_target(self, target: Model) -> Self:
        """Returns the drafter with the target's layers by number, and its rows of the output."""
        model, config = self.model, self.config
        layers = config.layers_of(target.config.num_layers)
        resolved = dataclasses.replace(config, layer_inputs=layers, own_unembedding=True)
        params = model.params
        if params is not None and target.params is not None:
            inner = params["params"]
            if "unembedding" not in inner:
                rows = functools.partial(_output_rows, config, dtype=model.dtype)
                vocab_map = inner.get("vocab_map")
                output_matrix = models.output_matrix(target.module, target.params)
                if isinstance(vocab_map, jax.ShapeDtypeStruct):
                    unembedding = jax.eval_shape(rows, vocab_map, output_matrix)
                else:  # on the host, because the target can be on other devices
                    unembedding = rows(jax.device_get(vocab_map), output_matrix)
                params = {"params": inner | {"unembedding": unembedding}}
        module = model.module.clone(config=resolved)
        model = dataclasses.replace(model, module=module, params=params)
        if self.check_agreement:
            eagle_check.check_once(model, target)
        return dataclasses.replace(self, model=model)

    def stats_spec(self) -> StatsSpec:
        return StatsSpec(layer_inputs=tuple(sorted(self._layers)))

    @property
    def _layers(self) -> tuple[int, ...]:
        layers = self.config.layer_inputs
        assert layers is not None  # since `for_target`
        return layers

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return self.model.kv_bytes(batch, capacity)

    def _fuse(self, layer_inputs: dict[int, Array]) -> Array:
        inputs = [layer_inputs[layer] for layer in self._layers]
        return self.model.module.apply(self.model.params, inputs, method="fuse")

    def _keys_values(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        features: Float[Array, "B T E"],
        positions: Int[Array, "B T"],
    ) -> tuple[Array, Array]:
        """Returns keys and values of tokens, given the features of the tokens before them."""
        x = embed_for(self.model, target, tokens, positions)
        return self.model.module.apply(
            self.model.params, x, features, positions, method="keys_values"
        )

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> EagleState:
        lengths, size = cache.lengths, min(tokens.shape[1], settings.capacity)
        features = self._fuse(stats.layer_inputs)
        slots = jnp.arange(size)
        following = jnp.roll(tokens, -1, 1)[:, :size]
        positions = jnp.broadcast_to(slots + 1, following.shape)
        k, v = self._keys_values(target, following, features[:, :size], positions)
        head_cache = full_cache.empty(self.model, tokens.shape[0], settings.capacity)
        if previous is not None:
            head_cache = previous.state.cache
            # The last token of the earlier text has another token after it.
            is_new = slots >= previous.reused[:, None] - 1
        else:
            is_new = jnp.ones((1, size), bool)

        def write(old, new):
            new = jnp.where(is_new[:, None, :, None], new.swapaxes(1, 2), old[:, :, :size])
            return jax.lax.dynamic_update_slice_in_dim(old, new, 0, 2)

        head_cache = dataclasses.replace(
            head_cache,
            k=(write(head_cache.k[0], k),),
            v=(write(head_cache.v[0], v),),
            lengths=lengths - 1,
        )
        return EagleState(head_cache, _at(features, lengths - 1))

    def propose(
        self,
        target: Model,
        state: EagleState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, None]:
        if settings.tree.num_nodes == 1:  # `commit` runs no pass of the head
            return Proposal(root[:, None], ROOT_ONLY.array), None
        context = DraftContext(
            model=self.model,
            target=target,
            cache=self._visible(state.cache),
            root=root,
            root_position=cache.lengths,
            sampling=sampling,
            backlog=None,
            draw_method=resolve_draw_method(self.draw, settings.tree),
            backend=settings.backend,
            drafter_index=settings.drafter_index,
            feature=state.feature[:, None],
        )
        return draft_tree(context, settings.tree)[0], None

    def _visible(self, cache: KVCache) -> KVCache | DraftCache:
        """Returns the entries that a draft reads, with sinks at positions just before the ring."""
        if self.budget is None:
            return cache
        shape = *cache.k[0].shape[:2], self.sinks
        pinned = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32), shape)
        visible = sparse_cache.gather(cache, (pinned,), (self.budget - self.sinks,))
        shift = jnp.maximum(cache.lengths - self.budget, 0)
        rope: Any = self.config.rope
        inverse, _ = frequencies(rope, self.config.head_dim)
        angles = (shift[:, None] * inverse)[:, None, None]
        k: Any = visible.k[0]
        sinks = rotate_pairs(k[:, :, : self.sinks], jnp.cos(angles), jnp.sin(angles))
        k = k.at[:, :, : self.sinks].set(sinks.astype(k.dtype))
        return dataclasses.replace(visible, k=(k,))

    def commit(
        self,
        target: Model,
        state: EagleState,
        draft: None,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> EagleState:
        """Returns the state with the path's tokens, and the feature of the last committed one.

        A row of 10 committed tokens whose path commits the nodes 0 2 5 has in slots 9, 10, 11
            token        of node 0      of node 2   of node 5
            feature      of the state   of node 0   of node 2
            position     10             11          12
        and the feature of node 5 is the new state's.
        """
        path, committed = outcome.path, outcome.committed
        inputs = {
            layer: jnp.take_along_axis(x, path[:, :, None], 1)
            for layer, x in outcome.layer_inputs.items()
            if layer in self._layers
        }
        features = jnp.concatenate([state.feature[:, None], self._fuse(inputs)], 1)
        steps = jnp.arange(path.shape[1])
        tokens = jnp.take_along_axis(proposal.tokens, path, 1)
        positions = state.cache.lengths[:, None] + 1 + steps
        kv = self._keys_values(target, tokens, features[:, :-1], positions)
        path_indices = jnp.broadcast_to(steps, path.shape)
        cache = full_cache.append(state.cache, (kv,), path_indices, committed)
        return EagleState(cache, _at(features, committed))

    def rewind(self, before: EagleState, after: EagleState) -> EagleState:
        return dataclasses.replace(before, cache=full_cache.restore(before.cache, after.cache))


def _at(x: Float[Array, "B T E"], index: Int[Array, "B"]) -> Float[Array, "B E"]:
    return jnp.take_along_axis(x, index[:, None, None], 1)[:, 0]


def _output_rows(
    config: models.EagleConfig, vocab_map: Any, output_matrix: Any, dtype: Any
) -> Array:
    """Returns the target's output matrix, or its rows of the draft tokens in their order.

    Args:
      config: the head's config.
      vocab_map: the head's map of draft tokens; None without a draft vocabulary.
      output_matrix: the target's, an array or packed.
      dtype: dtype of the result.
    """
    matrix = dequantize(output_matrix) if isinstance(output_matrix, Packed) else output_matrix
    if config.draft_vocab_size is None:
        return matrix.astype(dtype)
    tokens = tokens_of_rows(vocab_map, config.draft_vocab_size)
    return jnp.take(matrix, tokens, axis=0).astype(dtype)
