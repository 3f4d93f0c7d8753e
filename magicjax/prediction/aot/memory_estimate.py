"""Estimates the memory of a workload on each device from shapes, without compilation."""

import dataclasses

from magicjax import placement
from magicjax.decoding import memory
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.footprint import Footprint
from magicjax.decoding.request import Request
from magicjax.drafters import SmallModel
from magicjax.model import Model
from magicjax.prediction.aot.aot_compile import AotWorkload, abstract_request
from pallas_kernels.xla import BLOCK
from sharding import abstract_mesh, part_bytes

FLOAT32 = 4
SCORES = 8  # simultaneously live score arrays of the `xla` backend (measured: 8 to 12)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a workload on each device.

    Attributes:
      request: the workload's request; its arrays are shapes.
      footprint: bytes of weights and KV caches.
      rest: prompts, outputs, counters, and other state of drafters.
      host: bytes of an offloaded target's blocks, in host memory.
      prefill, init, decode: temporaries of the programs, a lower bound without XLA's copies. In
        `init` draft models read the prompts; one with a sparse cache fills a full one first.
      positions: the longest context that all models accept.
    """

    request: Request
    footprint: Footprint
    rest: int
    host: int
    prefill: int
    init: int
    decode: int
    positions: int

    @property
    def resident(self) -> int:
        """Bytes that are always allocated."""
        return self.footprint.resident + self.rest

    def growth(self, tokens: int) -> int:
        """Returns the additional bytes if the context has so many more tokens; negative: fewer."""
        capacity = self.request.settings.capacity
        before, after = (
            memory.count(self.request, capacity=n).resident + _full_prefill_bytes(self.request, n)
            for n in (capacity, capacity + tokens)
        )
        return after - before


def count(workload: AotWorkload) -> MemoryEstimate:
    """Returns the bytes of a workload.

    Raises:
      ValueError: the workload is invalid, or its sizes do not divide over the mesh.
    """
    request = abstract_request(workload, abstract_mesh(*workload.mesh_size))
    resident, target = memory.count(request), request.target
    state = part_bytes(Decoder(request).state_shapes())
    prompts = part_bytes((request.rows.tokens, request.rows.lengths, request.rows.limits))
    rows, nodes = local_rows(request), request.settings.shape.num_nodes
    tokens = rows * request.settings.chunk
    drafts = [small.model for small in _small_models(request)]
    prompt_reading = max((_activations(draft, request, tokens, 1) for draft in drafts), default=0)
    full_context = [
        small.model for small in _small_models(request) if small.sink_positions == "text"
    ]
    return MemoryEstimate(
        request=request,
        footprint=resident,
        rest=state - resident.target_kv - resident.draft_kv + prompts,
        host=part_bytes(target.layout),
        prefill=_activations(target, request, tokens, 1),
        init=_full_prefill_bytes(request, request.settings.capacity) + prompt_reading,
        decode=_activations(target, request, rows * nodes, nodes),
        positions=min(model.config.max_positions for model in (target, *full_context)),
    )


def local_rows(request: Request) -> int:
    """Returns the number of rows on a device."""
    return request.rows.lengths.sharding.shard_shape(request.rows.lengths.shape)[0]


def _small_models(request: Request) -> list[SmallModel]:
    members = request.drafter.members() if request.drafter else ()
    return [drafter for drafter in members if isinstance(drafter, SmallModel)]


def _full_prefill_bytes(request: Request, capacity: int) -> int:
    """Returns the bytes of the full caches that drafts with a sparse cache fill first."""
    mesh, size = request.settings.mesh, 0
    assert mesh is not None  # `abstract_request` sets it
    for small in _small_models(request):
        if small.sparse is not None and small.sink_positions == "text":
            split = placement.split_of(small.model.config, small.model.shards, mesh)
            size += small.model.kv_bytes(local_rows(request), capacity) // split.kv_shards
    return size


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
    itemsize = model.dtype.itemsize
    hidden = c.hidden_size * (4 * itemsize + FLOAT32)
    widest = max(c.of_layer(layer).intermediate_size for layer in range(c.num_layers))
    mlp = itemsize * 3 * widest // split.shards
    head_dim = model.kv_head_dims[-1]
    attention = (2 * itemsize + 2 * FLOAT32) * c.num_heads * head_dim // split.shards
    if request.settings.backend == "xla":
        slots = min(BLOCK, request.settings.capacity)
        attention += SCORES * FLOAT32 * slots * c.num_heads // split.shards
    layers = [layer for layer, has_kv in enumerate(model.has_kv) if has_kv]
    kv_bytes = sum(model.slot_bytes(layer) for layer in layers) // split.kv_shards
    kv_bytes += itemsize * c.num_layers * (c.layer_input_size or 0)
    if model.layout.stages > 1:  # of a stage, for all rows and one more micro-batch
        micro_batches = model.layout.micro_batches
        kv_bytes = kv_bytes * (micro_batches + 1) // (micro_batches * model.layout.stages)
        hidden, mlp, attention = (x // micro_batches for x in (hidden, mlp, attention))
        hidden += c.hidden_size * itemsize * (micro_batches + 1) // micro_batches
    logit_bytes = 2 * FLOAT32 * local_rows(request) * logits * c.vocab_size // split.shards
    return tokens * (hidden + max(mlp, attention) + kv_bytes) + logit_bytes
