"""The bytes that a workload takes on each device, counted from shapes; nothing is compiled."""

import dataclasses

from magicjax import placement
from magicjax.aot.aot_compile import Workload, caches_of, request_of
from magicjax.decoding.request import Request
from magicjax.decoding.runner import state_shapes
from magicjax.drafters import Ensemble, SmallModel
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.parallel import offloading
from pallas_kernels.xla import BLOCK
from sharding import abstract_mesh, part_bytes

FLOAT32 = 4
SCORES = 8  # arrays of the `xla` backend's scores that are there at the same time


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of each device.

    Attributes:
      weights, draft_weights: of the target, and of small drafts; of an offloaded target without
        its blocks.
      streamed: two layers of an offloaded target, the one that computes and the next.
      host: of its blocks, in host memory.
      target_kv, draft_kv: caches.
      rest: prompts, outputs, counters, what else a drafter holds.
      prefill, start, decode: temporaries of the programs, roughly: of the arrays that are certainly
        there, without what XLA adds. In `start` small drafts read the prompts, one that is to have
        a sparse cache into a full one.
      per_context_token: more bytes for one more token of context.
      positions: the most tokens of a row that all models accept.
      micro_batches: in how many parts the rows go through the stages.
    """

    weights: int
    draft_weights: int
    streamed: int
    host: int
    target_kv: int
    draft_kv: int
    rest: int
    prefill: int
    start: int
    decode: int
    per_context_token: float
    positions: int
    micro_batches: int

    @property
    def resident(self) -> int:
        """What is there all the time."""
        weights = self.weights + self.draft_weights + self.streamed
        return weights + self.target_kv + self.draft_kv + self.rest


def count(load: Workload) -> Bytes:
    """Returns the bytes of a workload.

    Raises:
      ValueError: what `ahead.request_of` refuses.
    """
    request = request_of(load, abstract_mesh(*load.mesh_size))
    state = state_shapes(request)
    drafts = placement.models_of(request.drafter)
    target_kv = part_bytes((state.cache.k, state.cache.v))
    caches = caches_of(state)[1:]
    draft_kv = sum(part_bytes((cache.k, cache.v)) for cache in caches)
    # A draft that keeps everything grows with the context, one of fixed size does not.
    full = [cache for cache in caches if isinstance(cache, KVCache)]
    read_first = sum(_read_first(draft, request) for draft in drafts)
    growing = target_kv + sum(part_bytes((cache.k, cache.v)) for cache in full) + read_first
    prompts = part_bytes((request.tokens, request.lengths, request.limits))
    everything = part_bytes(state)
    tokens = rows_of(request) * request.settings.chunk
    host = part_bytes(request.target.blocks)
    return Bytes(
        weights=part_bytes(request.target.params),
        draft_weights=sum(part_bytes(draft.params) for draft in drafts),
        streamed=offloading.two_layers(host, request.target.config.num_layers),
        host=host,
        target_kv=target_kv,
        draft_kv=draft_kv,
        rest=everything - target_kv - draft_kv + prompts,
        prefill=_activations(request.target, request, tokens, 1),
        start=read_first
        + max((_activations(draft, request, tokens, 1) for draft in drafts), default=0),
        decode=_activations(
            request.target,
            request,
            rows_of(request) * request.settings.shape.num_nodes,
            request.settings.shape.num_nodes,
        ),
        per_context_token=growing / request.settings.capacity,
        positions=min(
            model.config.max_positions for model in (request.target, *_reading_all(request))
        ),
        micro_batches=request.target.micro_batches,
    )


def rows_of(request: Request) -> int:
    """Returns the rows of a device."""
    return request.lengths.sharding.shard_shape(request.lengths.shape)[0]


def _reading_all(request: Request) -> list[Model]:
    """Returns the small drafts that read texts no longer than their positions."""
    return [one.model for one in _small(request) if one.sink_positions == "text"]


def _small(request: Request) -> list[SmallModel]:
    drafter = request.drafter
    drafters = drafter.drafters if isinstance(drafter, Ensemble) else (drafter,)
    return [one for one in drafters if isinstance(one, SmallModel)]


def _read_first(draft: Model, request: Request) -> int:
    """Returns the bytes of a full cache that a draft fills first, if it is to have a sparse one."""
    (small,) = [one for one in _small(request) if one.model is draft]
    if small.sparse is None or small.sink_positions != "text":
        return 0
    mesh = request.settings.mesh
    assert mesh is not None  # `request_of` has placed it
    split = placement.split_of(draft.config, draft.shards, mesh)
    return draft.kv_bytes(rows_of(request), request.settings.capacity) // split.kv_shards


def _activations(model: Model, request: Request, tokens: int, logits: int) -> int:
    """Returns the bytes of the largest arrays of a pass that are there at the same time.

    They are the new keys and values of all layers; of one layer the hidden states, as they are, in
    float32 for the norm, normed, and before and behind the sum over devices, beside the MLP's two
    halves and their product, or the queries, the attention's parts in float32 and a block's scores;
    and float32 logits, twice.

    Args:
      model: that runs.
      request: whose mesh it runs on.
      tokens: of a device's rows together.
      logits: how many tokens of a row get logits.
    """
    c, mesh = model.config, request.settings.mesh
    assert mesh is not None  # `request_of` has placed it
    split = placement.split_of(c, model.shards, mesh)
    item = model.dtype.itemsize
    hidden = c.hidden_size * (4 * item + FLOAT32)
    mlp = item * 3 * c.intermediate_size // split.shards
    attention = (2 * item + 2 * FLOAT32) * c.num_heads * c.head_dim // split.shards
    if request.settings.backend == "xla":  # several arrays of a block's scores (measured: 8 to 12)
        slots = min(BLOCK, request.settings.capacity)
        attention += SCORES * FLOAT32 * slots * c.num_heads // split.shards
    new = 2 * item * c.num_layers * c.num_kv_heads * c.head_dim // split.kv_shards
    if model.stages > 1:  # what a stage keeps of all rows, and of a micro-batch once more
        parts = model.micro_batches
        new = new * (parts + 1) // (parts * model.stages)
        hidden, mlp, attention = (x // parts for x in (hidden, mlp, attention))
        hidden += c.hidden_size * item * (parts + 1) // parts
    of_logits = 2 * FLOAT32 * rows_of(request) * logits * c.vocab_size // split.shards
    return tokens * (hidden + max(mlp, attention) + new) + of_logits
