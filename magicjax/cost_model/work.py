"""The work of one pass through a model, part by part: bytes, FLOPs, and what devices must exchange.

A pass runs n new tokens of every row against some slots of a cache each. Plain decoding is n = 1 on
the whole context, verification n = N nodes, a draft n = 1 on its budget.
"""

import dataclasses
import functools
from typing import Literal

import flax.linen as nn
import jax

import models
from magicjax.cost_model.device import Machine
from magicjax.parallel.offloading import two_layers, wants_int8

LOGIT_BYTES = 4  # float32
LOGIT_PASSES = 2  # written once, and read once to choose a token
BLOCKS = ("projections", "MLP", "attention", "collectives", "overhead")  # a layer's parts
HOST = "host link"  # the part that is fetched from the host


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a pass depends on, of a model.

    Attributes:
      name: for messages.
      num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: of its config.
      attention: elements of the matrices of q, k, v and out, all layers together.
      mlp: of the MLP's matrices.
      unembedding: of the output matrix.
      small: of norms and biases.
      tables: of what a pass looks up few rows of: positions, an embedding that is no output matrix.
      itemsize: bytes of an element, of weights and caches alike.
      streamed: bytes of an element of the blocks' weights in host memory, from which every pass
        fetches them; 0: they are on the device.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attention: int
    mlp: int
    unembedding: int
    small: int
    tables: int
    itemsize: int
    streamed: int = 0

    @property
    def key(self) -> str:
        """Names all sizes: two models with the same key cost the same."""
        *numbers, streamed = dataclasses.astuple(self)[1:]
        return "-".join(map(str, numbers)) + (f"-streamed-{streamed}" if streamed else "")

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a pass fetches from the host (int8 matrices' scales and norms left out)."""
        return self.streamed * (self.attention + self.mlp)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads: all but tables of which it reads a few rows."""
        return self.itemsize * (self.attention + self.mlp + self.unembedding + self.small)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def draft_kv_bytes(self, bits: int | None) -> float:
        """Returns the bytes of one slot of a draft cache, quantized ones with a float32 scale."""
        if bits is None:
            return self.kv_bytes
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * bits / 8 + 4)


@functools.lru_cache(maxsize=64)
def sizes_of(
    config: models.Config,
    dtype: str = "bfloat16",
    name: str = "the model",
    offload: bool | Literal["int8"] = False,
) -> Sizes:
    """Returns the sizes of a model, counted in the shapes of its own parameters.

    `offload` is as for `magicjax.load`.
    """
    module = models.build(config, dtype)
    params = nn.meta.unbox(models.abstract_params(module))
    counted = dict.fromkeys(("attention", "mlp", "unembedding", "small", "tables"), 0)
    output = "embedding" if config.tie_embeddings else "unembedding"
    itemsize = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [entry.key for entry in path]
        itemsize = leaf.dtype.itemsize
        if keys[-1] == output:
            counted["unembedding"] += leaf.size
        elif keys[-1] in ("embedding", "position_embedding"):
            counted["tables"] += leaf.size
        elif keys[-1] != "weight":
            counted["small"] += leaf.size
        else:
            counted["attention" if keys[-2] in ("q", "k", "v", "out") else "mlp"] += leaf.size
    return Sizes(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        itemsize=itemsize,
        streamed=1 if wants_int8(offload) else itemsize * bool(offload),
        **counted,
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """The work of one part of a pass, on one device.

    Attributes:
      bytes: read from and written to its memory.
      flops: of matrix products.
      messages: collectives.
      sent: bytes that it sends in them.
      fetched: bytes from the host's memory.
      layers: whose kernels must be started.
    """

    bytes: float = 0.0
    flops: float = 0.0
    messages: int = 0
    sent: float = 0.0
    fetched: float = 0.0
    layers: int = 0


def pass_parts(
    sizes: Sizes,
    machine: Machine,
    batch: int,
    nodes: int,
    slots: float,
    slot_bytes: float | None = None,
) -> dict[str, Part]:
    """Returns the work of each part of a pass, on one device.

    Args:
      sizes: of the model.
      machine: heads, MLP and vocabulary are divided among `machine.model` devices, and two
        all-reduces of a layer put the hidden states together again, as a ring would: each device
        sends 2 (g - 1) / g times their bytes. Choosing a token of a divided vocabulary is one more,
        of a few bytes.
      batch: B; of rows that do not divide evenly, the fullest group counts.
      nodes: n, the new tokens of a row.
      slots: of the cache that each of them sees, on average.
      slot_bytes: of keys and values of one slot in all layers; None: the model's own.

    Raises:
      ValueError: no row, node or slot, or KV heads that do not go with `machine.model`.
    """
    for name, value, least in (("batch", batch, 1), ("nodes", nodes, 1), ("slots", slots, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    check_heads(sizes, machine)
    g, rows = machine.model, machine.rows(batch)
    tokens = rows * nodes
    padded = rows * machine.device.tile * -(-nodes // machine.device.tile)
    per_slot = sizes.kv_bytes if slot_bytes is None else slot_bytes
    new = tokens * sizes.kv_bytes  # of the new tokens themselves, written
    of_block = sizes.itemsize  # bytes moved for an element
    if 0 < sizes.streamed < sizes.itemsize:  # int8: first read, and written as the dtype's numbers
        of_block += sizes.streamed + sizes.itemsize

    def linear(elements: int, moved: int, small: int = 0) -> Part:
        moved = moved * elements + sizes.itemsize * small
        return Part(bytes=moved / g, flops=2 * elements * padded / g)

    scores = sizes.num_layers * sizes.num_heads * sizes.head_dim * (slots + nodes)
    hidden = tokens * sizes.hidden_size * sizes.itemsize
    messages = 2 * sizes.num_layers if g > 1 else 0
    fetched = {HOST: Part(fetched=sizes.streamed_bytes / g)} if sizes.streamed else {}
    return {
        "projections": linear(sizes.attention, of_block),
        "MLP": linear(sizes.mlp, of_block, sizes.small),
        "attention": Part(
            bytes=(rows * slots * per_slot + new) / kv_shards(sizes, machine),
            flops=4 * padded * scores / g,
        ),
        "logits": linear(sizes.unembedding, sizes.itemsize),
        "selection": Part(
            bytes=LOGIT_PASSES * LOGIT_BYTES * tokens * sizes.vocab_size / g, messages=int(g > 1)
        ),
        "collectives": Part(messages=messages, sent=messages * 2 * (g - 1) / g * hidden),
        "overhead": Part(layers=sizes.num_layers),
        **fetched,
    }


def memory_bytes(
    sizes: Sizes, machine: Machine, batch: int, slots: int, slot_bytes: float
) -> float:
    """Returns the bytes that weights and a cache of `slots` slots a row take on one device."""
    weights = sizes.weight_bytes + sizes.itemsize * sizes.tables
    if sizes.streamed:  # two layers, the one that computes and the next
        blocks = sizes.attention + sizes.mlp
        held = two_layers(sizes.streamed * blocks, sizes.num_layers)
        weights += held - sizes.itemsize * blocks
    cache = machine.rows(batch) * slots * slot_bytes
    return weights / machine.model + cache / kv_shards(sizes, machine)


def kv_shards(sizes: Sizes, machine: Machine) -> int:
    """Returns over how many devices of a group keys and values are divided.

    Where there are fewer KV heads than devices, several devices hold the same ones.
    """
    return min(sizes.num_kv_heads, machine.model)


def divides(sizes: Sizes, machine: Machine) -> bool:
    """Returns whether a group's devices can share the heads.

    Where there are more devices than KV heads, several hold the same ones.
    """
    heads, group = sizes.num_kv_heads, machine.model
    return heads % group == 0 or (group % heads == 0 and sizes.num_heads % group == 0)


def check_heads(sizes: Sizes, machine: Machine) -> None:
    """Raises ValueError if a group's devices cannot share the heads, with the numbers that can."""
    heads = sizes.num_kv_heads
    if not divides(sizes, machine):
        groups = range(heads, sizes.num_heads + 1, heads)
        fit = [n for n in range(1, heads) if heads % n == 0]
        fit += [n for n in groups if sizes.num_heads % n == 0]
        raise ValueError(
            f"model={machine.model} does not divide the {heads} KV heads of {sizes.name}: "
            f"use one of {', '.join(map(str, fit))}, and `data` for the other devices"
        )
