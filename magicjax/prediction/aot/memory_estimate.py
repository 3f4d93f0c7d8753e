"""Estimates the memory of a workload on each device from shapes, without compilation."""

import dataclasses
from typing import Any

import jax

from magicjax import placement
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.request import Request
from magicjax.drafters import SmallModel
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.pages import PageBounds
from magicjax.model import Model
from magicjax.parallel import offloading
from magicjax.prediction.aot.aot_compile import Workload, abstract_request, all_caches
from pallas_kernels.xla import BLOCK
from sharding import abstract_mesh, part_bytes

FLOAT32 = 4
SCORES = 8  # simultaneously live score arrays of the `xla` backend (measured: 8 to 12)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes on each device.

    Attributes:
      weights, draft_weights: of the target and of draft models; an offloaded target without blocks.
      streamed: two layers of an offloaded target, the current and the next.
      host: of its blocks, in host memory.
      target_kv, draft_kv: caches.
      rest: prompts, outputs, counters, and other state of drafters.
      prefill, init, decode: temporaries of the programs, a lower bound without XLA's copies. In
        `init` draft models read the prompts; one with a sparse cache fills a full one first.
      per_context_token: additional bytes per token of context.
      positions: the longest context that all models accept.
      micro_batches: number of parts of the rows in the pipeline stages.
      backend: of attention.
    """

    weights: int
    draft_weights: int
    streamed: int
    host: int
    target_kv: int
    draft_kv: int
    rest: int
    prefill: int
    init: int
    decode: int
    per_context_token: float
    positions: int
    micro_batches: int
    backend: str

    @property
    def resident(self) -> int:
        """Bytes that are always allocated."""
        weights = self.weights + self.draft_weights + self.streamed
        return weights + self.target_kv + self.draft_kv + self.rest


def count(load: Workload) -> Bytes:
    """Returns the bytes of a workload.

    Raises:
      ValueError: as for `abstract_request`.
    """
    request = abstract_request(load, abstract_mesh(*load.mesh_size))
    state = Decoder(request).state_shapes()
    drafts = placement.models_of(request.drafter)
    target_kv = part_bytes((state.cache.k, state.cache.v))
    caches = all_caches(state)[1:]
    bounds = part_bytes(_page_bounds(state.drafter))
    draft_kv = bounds + sum(part_bytes((cache.k, cache.v)) for cache in caches)
    # Full caches and bounds of their pages grow with the context, sparse ones do not.
    full = [cache for cache in caches if isinstance(cache, KVCache)]
    small_models = _small_models(request)
    full_prefill = sum(_full_prefill_bytes(small, request) for small in small_models)
    growing = target_kv + bounds + full_prefill
    growing += sum(part_bytes((cache.k, cache.v)) for cache in full)
    prompts = part_bytes((request.rows.tokens, request.rows.lengths, request.rows.limits))
    rows, nodes = local_rows(request), request.settings.shape.num_nodes
    tokens = rows * request.settings.chunk
    host = part_bytes(request.target.layout)
    return Bytes(
        weights=part_bytes(request.target.params),
        draft_weights=sum(part_bytes(draft.params) for draft in drafts),
        streamed=offloading.two_layers(host, request.target.config.num_layers),
        host=host,
        target_kv=target_kv,
        draft_kv=draft_kv,
        rest=part_bytes(state) - target_kv - draft_kv + prompts,
        prefill=_activations(request.target, request, tokens, 1),
        init=full_prefill
        + max((_activations(small.model, request, tokens, 1) for small in small_models), default=0),
        decode=_activations(request.target, request, rows * nodes, nodes),
        per_context_token=growing / request.settings.capacity,
        positions=min(
            model.config.max_positions
            for model in (
                request.target,
                *(small.model for small in small_models if small.sink_positions == "text"),
            )
        ),
        micro_batches=request.target.layout.micro_batches,
        backend=request.settings.backend or "xla",
    )


def _page_bounds(state: Any) -> list[PageBounds]:
    """Returns the bounds of pages in the state of a drafter."""

    def is_bounds(x: Any) -> bool:
        return isinstance(x, PageBounds)

    return list(filter(is_bounds, jax.tree.leaves(state, is_leaf=is_bounds)))


def local_rows(request: Request) -> int:
    """Returns the number of rows on a device."""
    return request.rows.lengths.sharding.shard_shape(request.rows.lengths.shape)[0]


def _small_models(request: Request) -> list[SmallModel]:
    members = request.drafter.members() if request.drafter else ()
    return [drafter for drafter in members if isinstance(drafter, SmallModel)]


def _full_prefill_bytes(small: SmallModel, request: Request) -> int:
    """Returns the bytes of the full cache that a draft with a sparse cache fills first."""
    if small.sparse is None or small.sink_positions != "text":
        return 0
    mesh, draft = request.settings.mesh, small.model
    assert mesh is not None  # `abstract_request` sets it
    split = placement.split_of(draft.config, draft.shards, mesh)
    return draft.kv_bytes(local_rows(request), request.settings.capacity) // split.kv_shards


def _activations(model: Model, request: Request, tokens: int, logits: int) -> int:
    """Returns the bytes of the largest simultaneously live arrays of a pass.

    These are the new keys and values of all layers; for one layer the hidden states (four copies,
    and one in float32) and either the MLP's two halves and their product, or the queries, float32
    attention and scores; and two copies of the float32 logits. `tokens` are those of all rows of a
    device, `logits` those of a row whose logits are computed.
    """
    c, mesh = model.config, request.settings.mesh
    assert mesh is not None  # `abstract_request` sets it
    split = placement.split_of(c, model.shards, mesh)
    item = model.dtype.itemsize
    hidden = c.hidden_size * (4 * item + FLOAT32)
    mlp = item * 3 * c.intermediate_size // split.shards
    attention = (2 * item + 2 * FLOAT32) * c.num_heads * c.kv_head_dim // split.shards
    if request.settings.backend == "xla":
        slots = min(BLOCK, request.settings.capacity)
        attention += SCORES * FLOAT32 * slots * c.num_heads // split.shards
    new = 2 * item * c.num_layers * c.num_kv_heads * c.kv_head_dim // split.kv_shards
    if model.layout.stages > 1:  # of a stage, for all rows and one more micro-batch
        parts = model.layout.micro_batches
        new = new * (parts + 1) // (parts * model.layout.stages)
        hidden, mlp, attention = (x // parts for x in (hidden, mlp, attention))
        hidden += c.hidden_size * item * (parts + 1) // parts
    logit_bytes = 2 * FLOAT32 * local_rows(request) * logits * c.vocab_size // split.shards
    return tokens * (hidden + max(mlp, attention) + new) + logit_bytes
