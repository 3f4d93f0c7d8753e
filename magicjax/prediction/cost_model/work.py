"""The work of a pass through a model, by part: bytes, FLOPs, and communication.

A pass runs n new tokens per row against a number of cache slots: n = 1 on the whole context for
plain decoding, n = N nodes for verification, n = 1 on its budget for a draft.
"""

import dataclasses
import functools

import flax.linen as nn
import jax

import models
from magicjax.prediction.cost_model.device import Machine
from pallas_kernels.cpu.packed import FORMATS
from sharding import array_bytes

LOGIT_BYTES = 4  # float32
LOGIT_PASSES = 2  # written once, and read once to select a token
BLOCKS = ("projections", "MLP", "attention", "collectives", "overhead")  # parts of a layer
HOST = "host link"  # copies from host memory


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model that determine the cost of a pass.

    Attributes:
      name: for error messages.
      num_layers, hidden_size, num_heads, num_kv_heads, vocab_size: from its config.
      head_dim: head size of the KV cache.
      attention: elements of the matrices of attention, gated delta nets and shared experts in all
        layers: every token uses them whole.
      mlp: elements of the other MLP matrices.
      unembedding: elements of the output matrix.
      small: elements of norms and biases.
      tables: elements of tables of which a pass reads few rows: positions, an untied embedding, the
        map of a draft vocabulary.
      itemsize: bytes per element of weights, and of caches that are not quantized.
      matrix_itemsize: bytes per element of the blocks' matrices; of quantized ones, with scales.
      output_itemsize: bytes per element of the output matrix.
      streamed: whether the blocks are offloaded: every pass copies them from host memory.
      window, windowed_layers: the sliding window, and the number of layers that have it.
      experts, experts_per_token: numbers of experts of a mixture, all of whose elements `mlp`
        counts; 0: no mixture.
      kv_bits: bits per element of the cache; None: `itemsize` counts.
      joint_norms: whether layers have norms over all heads, which devices sum.
      full_layers, full_kv_heads, full_head_dim: the layers with other heads, and those (Gemma 4).
      state_layers, state_bytes: the number of layers that have a state in place of keys and values,
        and the bytes of a row's states in all of them.
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
    matrix_itemsize: float
    output_itemsize: float
    streamed: bool = False
    window: int = 0
    windowed_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    kv_bits: int | None = None
    joint_norms: bool = False
    full_layers: int = 0
    full_kv_heads: int = 0
    full_head_dim: int = 0
    state_layers: int = 0
    state_bytes: int = 0

    @property
    def key(self) -> str:
        """Identifies the sizes: two models with the same key have the same cost."""
        numbers = dataclasses.astuple(self)[1:13]  # up to `itemsize`
        quantized = f"-matrices-{self.matrix_itemsize:.4g}" * (
            self.matrix_itemsize != self.itemsize
        )
        quantized += f"-output-{self.output_itemsize:.4g}" * (self.output_itemsize != self.itemsize)
        windows = f"-window-{self.window}-{self.windowed_layers}" * bool(self.windowed_layers)
        mixture = f"-experts-{self.experts}-{self.experts_per_token}" * bool(self.experts)
        cache = f"-kv-{self.kv_bits}" * (self.kv_bits is not None)
        norms = "-joint-norms" * self.joint_norms
        states = f"-states-{self.state_layers}-{self.state_bytes}" * bool(self.state_layers)
        streamed = "-streamed" * self.streamed
        full = f"-full-{self.full_layers}-{self.full_kv_heads}-{self.full_head_dim}"
        full *= bool(self.full_layers)
        suffixes = quantized, windows, mixture, cache, norms, full, states, streamed
        return "-".join(map(str, numbers)) + "".join(suffixes)

    def with_layers(self, count: int) -> "Sizes":
        """Returns the sizes of a model of `count` of the layers."""
        return dataclasses.replace(
            self,
            num_layers=count,
            attention=self.attention * count // self.num_layers,
            mlp=self.mlp * count // self.num_layers,
            small=self.small * count // self.num_layers,
            windowed_layers=self.windowed_layers * count // self.num_layers,
            full_layers=self.full_layers * count // self.num_layers,
            state_layers=self.state_layers * count // self.num_layers,
            state_bytes=self.state_bytes * count // self.num_layers,
        )

    def slots_per_layer(self, slots: float) -> float:
        """Returns the mean over layers with slots of those that see a text of `slots` tokens.

        Layers count by the elements of a key.
        """
        windowed = self.windowed_layers * self.num_kv_heads * self.head_dim
        return slots - max(0, slots - self.window) * windowed / max(1, self.key_elements)

    @property
    def kv_heads(self) -> int:
        """The number of KV heads of all layers."""
        default_layers = self.slot_layers - self.full_layers
        return default_layers * self.num_kv_heads + self.full_layers * self.full_kv_heads

    @property
    def key_elements(self) -> int:
        """The elements of a token's keys in all layers."""
        default_layers = self.slot_layers - self.full_layers
        full = self.full_layers * self.full_kv_heads * self.full_head_dim
        return default_layers * self.num_kv_heads * self.head_dim + full

    def score_products(self, slots: float, nodes: int) -> float:
        """Returns the products of a new token's queries with keys, in all layers."""
        default_layers = self.slot_layers - self.full_layers
        width = default_layers * self.head_dim + self.full_layers * self.full_head_dim
        saved = max(0, slots - self.window) * self.windowed_layers * self.head_dim
        return self.num_heads * (width * (slots + nodes) - saved)

    @property
    def slot_layers(self) -> int:
        """The number of layers with keys and values."""
        return self.num_layers - self.state_layers

    def active_share(self, tokens: int) -> float:
        """Returns the expected part of the experts that any of the tokens uses; 1 without experts.

        As if every token chose its experts independently, each as likely as another.
        """
        if not self.experts:
            return 1.0
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens

    def read_bytes(self, tokens: int) -> float:
        """Returns the bytes of weights that a pass of so many tokens reads: all but `tables`."""
        idle = self.mlp * (1 - self.active_share(tokens))
        return self.weight_bytes - self.matrix_itemsize * idle

    @property
    def matrix_bytes(self) -> float:
        """Bytes of the blocks' matrices."""
        return self.matrix_itemsize * (self.attention + self.mlp)

    @property
    def streamed_bytes(self) -> float:
        """Bytes that a pass copies from the host, without norms."""
        return self.matrix_bytes * self.streamed

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights but `tables`."""
        output = self.output_itemsize * self.unembedding
        return self.matrix_bytes + output + self.itemsize * self.small

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token, if all layers keep it."""
        return self.slot_bytes(self.kv_bits)

    def slot_bytes(self, bits: int | None) -> float:
        """Returns the bytes of a slot of a cache in all layers, with the float32 scales of `bits`.

        None: elements have the model's dtype.
        """
        if bits is None:
            return 2 * self.key_elements * self.itemsize
        return 2 * (self.key_elements * bits / 8 + 4 * self.kv_heads)


@functools.lru_cache(maxsize=64)
def sizes_of(
    config: models.DecoderConfig,
    dtype: str = "bfloat16",
    name: str = "the model",
    offload: bool = False,
    weights: models.MatrixFormats | models.WeightFormat | None = None,
    kv_bits: int | None = None,
) -> Sizes:
    """Returns the sizes of a model, from the shapes of its parameters.

    Args:
      config, dtype, name, weights, kv_bits: the model's.
      offload: whether the blocks are in host memory.
    """
    module = models.build(config, dtype, weights)
    params = nn.meta.unbox(models.abstract_params(module))
    elements_of = dict.fromkeys(("attention", "mlp", "unembedding", "small", "tables"), 0)
    output = "embedding" if config.tie_embeddings else "unembedding"
    matrix_bytes = output_bytes = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [entry.key for entry in path]
        elements = leaf.size
        matrix_format = module.weights.of("/".join(keys[1:]).removesuffix("/weight"))
        if isinstance(matrix_format, str):
            elements = FORMATS[matrix_format].elements(leaf.shape)
        if keys[-1] == output:
            elements_of["unembedding"] += elements
            output_bytes += array_bytes(leaf.shape, leaf.dtype)
        elif keys[-1] in ("embedding", "position_embedding", "layer_embedding", "vocab_map"):
            elements_of["tables"] += elements
        elif keys[-1] == "weight":
            is_dense = keys[-3] in ("attention", "delta_net", "shared")
            elements_of["attention" if is_dense else "mlp"] += elements
            matrix_bytes += array_bytes(leaf.shape, leaf.dtype)
        elif keys[-1] in ("scale", "zero") and len(leaf.shape) > 1:  # a norm's scale is a vector
            matrix_bytes += array_bytes(leaf.shape, leaf.dtype)
        else:
            elements_of["small"] += leaf.size
    layers = [config.of_layer(layer) for layer in range(config.num_layers)]
    heads = config.num_kv_heads, config.kv_head_dim
    full_layers = [layer for layer in layers if (layer.num_kv_heads, layer.kv_head_dim) != heads]
    return Sizes(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.kv_head_dim,
        vocab_size=config.output_rows,
        itemsize=module.dtype.itemsize,
        matrix_itemsize=matrix_bytes / (elements_of["attention"] + elements_of["mlp"]),
        output_itemsize=(
            output_bytes / elements_of["unembedding"] if output_bytes else module.dtype.itemsize
        ),
        streamed=offload,
        window=config.sliding_window or 0,
        windowed_layers=config.num_layers - config.windows.count(None),
        experts=config.num_experts or 0,
        experts_per_token=config.experts_per_token,
        kv_bits=kv_bits,
        joint_norms=getattr(config, "joint_qk_norm", False),
        full_layers=len(full_layers),
        full_kv_heads=full_layers[0].num_kv_heads if full_layers else 0,
        full_head_dim=full_layers[0].kv_head_dim if full_layers else 0,
        state_layers=sum(config.linear),
        state_bytes=config.state_bytes(module.dtype.itemsize),
        **elements_of,
    )


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one part of a pass, on one device.

    Attributes:
      bytes: read from and written to device memory.
      flops: floating-point operations of matrix products.
      messages: number of collectives.
      sent: bytes sent in collectives.
      fetched: bytes copied from host memory.
      layers: number of layers whose kernels are launched.
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
) -> dict[str, Work]:
    """Returns the work of each part of a pass, on one device.

    Args:
      sizes: the model's sizes.
      machine: heads, MLP and vocabulary are divided over `machine.model` devices. A layer has two
        ring all-reduces of the hidden states: each device sends 2 (g - 1) / g times their bytes.
        Norms over all heads of q and of k are two more, of a number for each token.
        Token selection over a divided vocabulary is one more collective, of a few bytes.
      batch: B; the largest group counts if rows do not divide evenly.
      nodes: n, the new tokens of a row.
      slots: cache slots that a new token attends to, on average.
      slot_bytes: bytes of the keys and values of a slot in all layers; None for those of the
        model's cache.

    Raises:
      ValueError: batch, nodes or slots that are too small, or KV heads that do not divide over
        `machine.model`.
    """
    for name, value, least in (("batch", batch, 1), ("nodes", nodes, 1), ("slots", slots, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    check_heads(sizes, machine)
    g, rows = machine.model, machine.rows(batch)
    tokens = rows * nodes
    padded = rows * machine.device.tile * -(-nodes // machine.device.tile)
    per_slot = sizes.kv_bytes if slot_bytes is None else slot_bytes
    new_kv = tokens * sizes.kv_bytes  # written
    scores = sizes.score_products(slots, nodes)
    slots = sizes.slots_per_layer(slots)

    def matrix_work(
        elements: float, itemsize: float, small: int = 0, used: float | None = None
    ) -> Work:
        num_bytes = itemsize * elements + sizes.itemsize * small
        used = elements if used is None else used
        return Work(bytes=num_bytes / g, flops=2 * used * padded / g)

    hidden = tokens * sizes.hidden_size * sizes.itemsize
    messages = 2 * sizes.num_layers if g > 1 else 0
    norm_messages = messages * sizes.joint_norms  # of a number for each token
    sent = messages * 2 * (g - 1) / g * hidden
    fetched = {HOST: Work(fetched=sizes.streamed_bytes / g)} if sizes.streamed else {}
    return {
        "projections": matrix_work(sizes.attention, sizes.matrix_itemsize),
        "MLP": matrix_work(
            sizes.mlp * sizes.active_share(tokens),
            sizes.matrix_itemsize,
            sizes.small,
            sizes.mlp * (sizes.experts_per_token / sizes.experts if sizes.experts else 1),
        ),
        "attention": Work(
            bytes=(rows * slots * per_slot + new_kv) / kv_shards(sizes, machine)
            + 2 * rows * sizes.state_bytes / g,  # read and written
            flops=4 * padded * scores / g,
        ),
        "logits": matrix_work(sizes.unembedding, sizes.output_itemsize),
        "selection": Work(
            bytes=LOGIT_PASSES * LOGIT_BYTES * tokens * sizes.vocab_size / g, messages=int(g > 1)
        ),
        "collectives": Work(messages=messages + norm_messages, sent=sent),
        "overhead": Work(layers=sizes.num_layers),
        **fetched,
    }


def kv_shards(sizes: Sizes, machine: Machine) -> int:
    """Returns the number of devices of a group over which KV heads are divided.

    With fewer KV heads than devices, heads are replicated.
    """
    return min(sizes.num_kv_heads, machine.model)


def divides(sizes: Sizes, group: int) -> bool:
    """Returns whether the heads divide over a group's devices, with replicated KV heads or not."""
    heads = sizes.num_kv_heads
    return heads % group == 0 or (group % heads == 0 and sizes.num_heads % group == 0)


def check_heads(sizes: Sizes, machine: Machine) -> None:
    """Raises ValueError, with the valid numbers, if the heads do not divide over a group."""
    if not divides(sizes, machine.model):
        valid = [str(n) for n in range(1, sizes.num_heads + 1) if divides(sizes, n)]
        raise ValueError(
            f"model={machine.model} does not divide the {sizes.num_kv_heads} KV heads of "
            f"{sizes.name}: use one of {', '.join(valid)}, and `data` for the other devices"
        )
