"""A model: a Flax module, its parameters, and their layout, as one pytree."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import models
from magicjax.parallel.layouts import Layout, Resident
from models import Attend, PassResult
from sharding import Split, collectives

CAPACITY_MULTIPLE = 64  # slots; contexts of nearly the same length share a program
# Tokens by which a text in a ring can be shortened: the slots of a ring beyond its window.
RING_SPARE = 128

DTYPES = ("bfloat16", "float16", "float32")  # accepted by commands
KV_DTYPES = {None: None, "int8": 8}  # bits of an element of a model's own cache


_variants = weakref.WeakKeyDictionary["Model", dict[str | None, "Model"]]()  # by backend


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model with its parameters, tokenizer and special tokens.

    As a pytree it consists of parameters and layout, with the module as static data: programs
    specialize on the architecture, and all weights of that shape share them. Tokenizer, name and
    tokens stay on the host and do not pass through `jax.jit`.

    Attributes:
      module: the Flax module; `module.config` has the shapes.
      params: its parameters, plain arrays.
      tokenizer: a Hugging Face tokenizer, or None.
      name: the name in tables.
      eos_token_ids: tokens that end a text: those of its files, and the end of a turn in the chat
        template.
      pad_token_id: the default padding of rows that have ended.
      shards: static; number of devices along the mesh's `model` axis that divide it; None: all. A
        small draft may have fewer shards, and is then replicated.
      layout: where the layers are: on the device, streamed from host memory, or on pipeline stages.
      kv_bits: static; of an element of its cache, with a scale for each token and head; None: the
        cache is in the model's dtype.
      load: for a model without parameters, the function (mesh, stages) -> the model with them.
      mtp_head: for a model of files, the function () -> the head for multi-token prediction that
        they have, without parameters; it raises ValueError if there is none.
    """

    module: nn.Module
    params: Any = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(default=None, repr=False)
    name: str = ""
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    shards: int | None = None
    layout: Layout = dataclasses.field(default_factory=Resident, repr=False)
    kv_bits: int | None = None
    load: "Callable[..., Model] | None" = dataclasses.field(default=None, repr=False)
    mtp_head: "Callable[[], Model] | None" = dataclasses.field(default=None, repr=False)

    @property
    def config(self) -> models.DecoderConfig:
        return self.module.config

    @property
    def dtype(self) -> Any:
        """The dtype of parameters, activations, and caches that are not quantized."""
        return jnp.dtype(self.module.dtype)

    @property
    def weights(self) -> models.MatrixFormats:
        """The formats of quantized matrices."""
        return models.formats_of(self.module)

    def with_backend(self, backend: str | None) -> "Model":
        """Returns the model with a backend of its products (`models.linear.products`).

        Later calls return the same object, by which `quantized_blocks` finds the copy of a target.
        """
        if backend == getattr(self.module, "backend", backend):  # a module may have no such field
            return self
        variants = _variants.setdefault(self, {})
        if backend not in variants:
            module = self.module.clone(backend=backend)
            variants[backend] = dataclasses.replace(self, module=module)
        return variants[backend]

    @property
    def offload(self) -> bool:
        """Whether the blocks' weights are in host memory."""
        return self.layout.offload

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it sees the whole text."""
        config = self.config  # another decoder's than the package's may have no windows
        return getattr(config, "windows", (None,) * config.num_layers)

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """Whether each layer has a state in place of keys and values."""
        config = self.config
        return getattr(config, "linear", (False,) * config.num_layers)

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """The layer whose keys and values each layer reads; None: its own."""
        config = self.config
        return getattr(config, "kv_sources", (None,) * config.num_layers)

    @property
    def has_kv(self) -> tuple[bool, ...]:
        """Whether each layer has keys and values of its own in a cache."""
        layers = zip(self.recurrent, self.kv_sources, strict=True)
        return tuple(not is_recurrent and source is None for is_recurrent, source in layers)

    @property
    def pinnable(self) -> tuple[bool, ...]:
        """Whether a policy chooses entries of each layer, which sees the whole text in slots."""
        layers = zip(self.windows, self.has_kv, strict=True)
        return tuple(window is None and has_kv for window, has_kv in layers)

    @property
    def state_bytes(self) -> int:
        """The bytes of a row's states in all layers that have one."""
        return self.config.state_bytes(self.dtype.itemsize) if any(self.recurrent) else 0

    def kv_bytes(self, batch: int, slots: int) -> int:
        """Returns the bytes of a cache: of keys and values, and of states.

        Layers with a sliding window have fewer slots than `slots` (`layer_slots`).
        """
        entries = sum(
            layer_slots(window, slots) * self.slot_bytes(layer, self.kv_bits)
            for layer, window in enumerate(self.windows)
            if self.has_kv[layer]
        )
        return batch * (entries + self.state_bytes)

    def slot_bytes(self, layer: int, bits: int | None = None) -> int:
        """Returns the bytes of a token's key and value in a layer, with their float32 scales.

        `bits` are those of an element; None: it has the model's dtype.
        """
        config = self.layer_config(layer)
        size = config.kv_head_dim
        vector = size * self.dtype.itemsize if bits is None else size * bits // 8 + 4
        return 2 * config.num_kv_heads * vector

    def layer_config(self, layer: int) -> models.DecoderConfig:
        """Returns the config of a layer, whose heads may differ from those of others."""
        config = self.config  # another decoder's than the package's has equal layers
        return config.of_layer(layer) if isinstance(config, models.DecoderConfig) else config

    @property
    def kv_head_dims(self) -> tuple[int, ...]:
        """The sizes of heads in attention, in ascending order."""
        layers = range(self.config.num_layers)
        return tuple(sorted({self.layer_config(layer).kv_head_dim for layer in layers}))

    @property
    def split(self) -> Split:
        """How the model is sharded; unsharded except inside a program for a mesh."""
        return self.module.split

    @property
    def local_heads(self) -> int:
        """The number of query heads on this device."""
        return self.config.num_heads // self.split.shards

    def local_kv_heads(self, layer: int) -> int:
        """Returns the number of KV heads of a layer on this device."""
        return self.layer_config(layer).num_kv_heads // self.split.kv_shards

    @property
    def local_vocab(self) -> int:
        """The number of tokens whose logits are on this device."""
        return self.config.vocab_size // self.split.shards

    @property
    def empty_token(self) -> int | None:
        """A token whose embedding is zeros; None: the module may have none."""
        config = self.config
        embeds_all = isinstance(self.module, models.Transformer) and (
            config.draft_vocab_size is None or config.embeds_all
        )
        return config.vocab_size if embeds_all else None

    def sum_over_replicas(self, x: Array) -> Array:
        """Returns the sum of x over the devices that replicate this device's KV heads."""
        return collectives.psum(x, self.split.replica_axes)

    @property
    def first_layer(self) -> Int[Array, ""] | int:
        """The index of this device's first layer in the whole model."""
        return self.layout.first_layer(self.config.num_layers)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        return (self.params, self.layout), (self.module, self.shards, self.kv_bits)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple) -> "Model":
        (module, shards, kv_bits), (params, layout) = static, children
        return cls(module, params, shards=shards, layout=layout, kv_bits=kv_bits)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        layer_inputs: Sequence[int] = (),
    ) -> PassResult:
        """Returns hidden states, `attend`'s aux of each layer, and the inputs of `layer_inputs`.

        With pipeline stages, the first two are those of this stage's layers; the inputs are on
        every stage.

        Args:
          tokens, positions: the inputs of the pass.
          attend: the attention to the prefix.
          layer_inputs: the layers whose inputs [B,T,E] are returned, by layer; the number of layers
            stands for the last layer's output.
        """
        return self.layout.run(
            self.module, self.params, tokens, positions, attend, tuple(layer_inputs)
        )

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Array:
        """Returns the input of the first layer, [B,T,E]."""
        return self.module.apply(self.params, tokens, positions, method="embed")

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns the logits of hidden states; with several shards, this device's part of them.

        With pipeline stages, they are the last stage's, on every stage.
        """
        return self._logits(hidden, "unembed")

    def _logits(self, hidden: Array, method: str) -> Array:
        hidden = self.layout.last_hidden(hidden, self.split)
        return self.module.apply(self.params, hidden, method=method)

    @property
    def has_draft_vocab(self) -> bool:
        """Whether only some of the tokens have logits of their own."""
        return getattr(self.config, "draft_vocab_size", None) is not None

    def draft_logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B R"]:
        """Returns the logits of the draft vocabulary, or those of `unembed` without one.

        A row's token is that of `draft_tokens`. Choosing among R rows is faster than among V.
        """
        return self._logits(hidden, "draft_logits" if self.has_draft_vocab else "unembed")

    def draft_tokens(self, rows: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the tokens of rows of the draft vocabulary; without one, the rows."""
        if not self.has_draft_vocab:
            return rows
        return tokens_of_rows(self.params["params"]["vocab_map"], self.config.output_rows)[rows]

    def over_tokens(self, probs: Float[Array, "*B R"]) -> Float[Array, "*B V"]:
        """Returns probabilities of all tokens, given those of the rows of `draft_logits`."""
        if not self.has_draft_vocab:
            return probs
        row_of = self.params["params"]["vocab_map"]
        return jnp.take(probs, row_of, axis=-1, mode="fill", fill_value=0)


def softcap_of(config: Any) -> float | None:
    """Returns the bound of a decoder's attention scores; None: they have none."""
    return getattr(config, "attention_softcap", None)


def layer_slots(window: int | None, slots: int) -> int:
    """Returns the slots of a layer in a cache for texts of `slots` tokens.

    The layer's window determines the size of a ring, which has `RING_SPARE` more slots.
    """
    if window is None:
        return slots
    return min(slots, -(-(window + RING_SPARE) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE)


def tokens_of_rows(vocab_map: Int[Array, "V"], size: int) -> Int[Array, "R"]:
    """Returns the token of each of the `size` rows of a draft vocabulary, given each token's row.

    The token of a row that several tokens share is any of them.
    """
    tokens = jnp.arange(vocab_map.shape[0], dtype=jnp.int32)
    return jnp.zeros(size, jnp.int32).at[vocab_map].set(tokens, mode="drop")
