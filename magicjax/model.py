"""A model as the loop sees it: a Flax module and its parameters, one pytree."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

import models
from magicjax.parallel import offloading, pipeline_stages
from models import Attend
from sharding import Split, collectives, pipeline

DTYPES = ("bfloat16", "float16", "float32")  # that commands take


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model with its parameters, and what users need around it.

    As a pytree it is its parameters and blocks, with the module as static data: programs specialise
    on the architecture and are shared by all weights of that shape. The other fields live on the
    host and do not pass through `jax.jit`.

    Attributes:
      module: the Flax module; `module.config` has the shapes.
      params: its parameters, plain arrays.
      tokenizer: a Hugging Face tokenizer, or None.
      name: what to call it in tables.
      eos_token_ids: tokens that end a text.
      pad_token_id: what fills the rows that ended, when the user gives none.
      shards: static too; how many devices of a mesh's `model` axis it is divided over; None: all.
        A small draft may do with fewer, and is then held several times.
      stages: static too; over how many pipeline stages of a mesh its blocks are divided, and their
        parameters stacked (`magicjax.parallel.pipeline_stages`).
      micro_batches: static too; in how many parts a batch goes through the stages.
      blocks: the blocks' weights in host memory (`magicjax.offload`), which `params` then lacks;
        None: everything is on the device.
    """

    module: nn.Module
    params: Any = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(default=None, repr=False)
    name: str = ""
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    shards: int | None = None
    stages: int = 1
    micro_batches: int = 1
    blocks: Any = dataclasses.field(default=None, repr=False)

    @property
    def config(self) -> models.Config:
        return self.module.config

    @property
    def dtype(self) -> Any:
        """The parameters' dtype, which caches and activations have too."""
        return jax.tree.leaves(self.params)[0].dtype

    @property
    def offload(self) -> bool | Literal["int8"]:
        """Where its blocks are, as `magicjax.load` takes it."""
        return "int8" if offloading.is_int8(self.blocks) else self.blocks is not None

    def kv_bytes(self, batch: int, slots: int) -> int:
        """Returns the bytes of keys and values of so many rows and slots, in the model's dtype."""
        c = self.config
        entries = batch * slots * c.num_layers * c.num_kv_heads
        return 2 * entries * c.head_dim * self.dtype.itemsize

    @property
    def split(self) -> Split:
        """How it is divided: only inside a program for a mesh is that not the default."""
        return self.module.split

    @property
    def own_heads(self) -> int:
        """The query heads that this device has."""
        return self.config.num_heads // self.split.shards

    @property
    def own_kv_heads(self) -> int:
        """The KV heads that this device has."""
        return self.config.num_kv_heads // self.split.kv_shards

    @property
    def own_vocab(self) -> int:
        """The tokens of which this device has the logits."""
        return self.config.vocab_size // self.split.shards

    def of_all_queries(self, x: Array) -> Array:
        """Returns the sum of what this device's query heads paid to its KV heads, and others'."""
        return collectives.total(x, self.split.replica_axes)

    @property
    def first_layer(self) -> Int[Array, ""] | int:
        """The number of this device's first layer."""
        return pipeline.place() * self.config.num_layers if self.stages > 1 else 0

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        static = self.module, self.shards, self.stages, self.micro_batches
        return (self.params, self.blocks), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple) -> "Model":
        (module, shards, stages, micro_batches), (params, blocks) = static, children
        return cls(
            module=module,
            params=params,
            shards=shards,
            stages=stages,
            micro_batches=micro_batches,
            blocks=blocks,
        )

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Returns (hidden states, what `attend` kept of each layer).

        Of a model in stages they are those of this stage's last layer, and of its own layers.
        """
        if self.blocks is None and self.stages == 1:
            return self.module.apply(self.params, tokens, positions, attend)
        x = self.module.apply(self.params, tokens, positions, method="embed")
        if self.stages > 1:
            return pipeline_stages.run_blocks(self, x, positions, attend)
        return offloading.run_blocks(self.module, self.blocks, x, positions, attend)

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns the logits of some hidden states; of a divided model, this device's part.

        Of a model in stages they are the same on every stage: the last one's hidden states go to
        all.
        """
        if self.stages > 1:
            hidden = pipeline_stages.from_last(self, hidden)
        return self.module.apply(self.params, hidden, method="unembed")
