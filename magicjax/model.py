"""A model as the loop sees it: a Flax module and its parameters, one pytree."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

import models
from models import Attend


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model with its parameters, and what users need around it.

    As a pytree it is its parameters, with the module as static data: programs specialise on the
    architecture and are shared by all weights of that shape. The other fields live on the host
    and do not pass through `jax.jit`.

    Attributes:
      module: the Flax module; `module.config` has the shapes.
      params: its parameters, plain arrays.
      tokenizer: a Hugging Face tokenizer, or None.
      name: what to call it in tables.
      eos_token_ids: tokens that end a text.
      pad_token_id: what fills the rows that ended, when the user gives none.
    """

    module: nn.Module
    params: Any = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(default=None, repr=False)
    name: str = ""
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def config(self) -> models.Config:
        return self.module.config

    @property
    def dtype(self) -> Any:
        """The parameters' dtype, which caches and activations have too."""
        return jax.tree.leaves(self.params)[0].dtype

    def kv_bytes(self, batch: int, slots: int) -> int:
        """Returns the bytes of keys and values of so many rows and slots, in the model's dtype."""
        c = self.config
        entries = batch * slots * c.num_layers * c.num_kv_heads
        return 2 * entries * c.head_dim * self.dtype.itemsize

    def tree_flatten(self) -> tuple[tuple[Any], nn.Module]:
        return (self.params,), self.module

    @classmethod
    def tree_unflatten(cls, module: nn.Module, children: tuple[Any]) -> "Model":
        return cls(module, *children)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Returns (hidden states, what `attend` kept of each layer)."""
        return self.module.apply(self.params, tokens, positions, attend)

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns the logits of some hidden states."""
        return self.module.apply(self.params, hidden, method="unembed")
