"""The Llama family as one Flax module: LLaMA, TinyLlama, Yi, Mistral, Qwen2, Qwen2.5, Qwen3.

Members differ only in their configuration. The module is independent of caches, masks and trees:
each block passes its rotated q, k, v to `attend`, which determines the visible positions.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.layers import (
    NEVER,
    Attend,
    Projection,
    RMSNorm,
    at_least_two_rows,
    dot_precision,
    embedding_lookup,
)
from models.rope import Rope, rotate
from sharding import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB, Split


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shapes and switches of a Llama-like model (letters as in the architecture notes).

    Attributes:
      vocab_size: V, the tokens of the vocabulary.
      hidden_size: E, the width.
      intermediate_size: F, the width of the MLP.
      num_layers: L, the blocks.
      num_heads: H query heads.
      num_kv_heads: K key/value heads; divides H.
      head_dim: D; need not be E / H.
      max_positions: the longest context that the model accepts.
      rope: rotary settings.
      norm_eps: epsilon of RMSNorm.
      tie_embeddings: use the embedding as the output matrix.
      qkv_bias: biases on q, k, v (Qwen2).
      out_bias: bias on the attention's output (Llama's `attention_bias` sets both).
      mlp_bias: biases in the MLP.
      qk_norm: RMSNorm over each head of q and k before the rotation (Qwen3).
      family: the Hugging Face `model_type` in config.json.
      sliding_window: the attention window of the checkpoint's layers, which this module does not
        apply. It makes no difference up to that many tokens, so `max_positions` must not exceed it.
      draft_vocab_size: for a draft model with embeddings of its most frequent tokens only, the
        number of embeddings. The last stands for all other tokens, and is never predicted. The
        parameter `vocab_map`, int32 [V], has the embedding of each token. None: every token has
        its own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope = Rope()
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    family: str = "llama"
    sliding_window: int | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: the rotation pairs its halves"
            )
        if self.draft_vocab_size is not None and not 2 <= self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must be at least 2 and smaller than "
                f"vocab_size={self.vocab_size}"
            )
        if self.sliding_window is not None and self.max_positions > self.sliding_window:
            raise ValueError(
                f"max_positions={self.max_positions} exceeds sliding_window={self.sliding_window}, "
                f"which is not applied: use max_positions of at most {self.sliding_window}"
            )

    @property
    def embedding_rows(self) -> int:
        """The number of rows of the embedding."""
        return self.draft_vocab_size or self.vocab_size


class Attention(nn.Module):
    config: LlamaConfig
    dtype: Any
    split: Split = Split()

    @nn.compact
    def __call__(self, x, positions, attend: Attend, layer: int):
        c = self.config
        heads = ((c.num_heads // self.split.shards, HEADS), (c.head_dim, HEAD_DIM))
        kv_heads = ((c.num_kv_heads // self.split.kv_shards, KV_HEADS), (c.head_dim, HEAD_DIM))
        embed = ((c.hidden_size, EMBED),)
        q = Projection(embed, heads, c.qkv_bias, self.dtype, name="q")(x)
        k = Projection(embed, kv_heads, c.qkv_bias, self.dtype, name="k")(x)
        v = Projection(embed, kv_heads, c.qkv_bias, self.dtype, name="v")(x)
        if c.qk_norm:
            q = RMSNorm(c.head_dim, c.norm_eps, self.dtype, HEAD_DIM, name="q_norm")(q)
            k = RMSNorm(c.head_dim, c.norm_eps, self.dtype, HEAD_DIM, name="k_norm")(k)
        q, k = rotate(q, positions, c.rope), rotate(k, positions, c.rope)
        out, kept = attend(layer, q, k, v)
        axis_names = self.split.axes
        return Projection(heads, embed, c.out_bias, self.dtype, axis_names, name="out")(out), kept


class SwiGLU(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    config: LlamaConfig
    dtype: Any
    split: Split = Split()

    @nn.compact
    def __call__(self, x):
        c = self.config
        embed = ((c.hidden_size, EMBED),)
        hidden = ((c.intermediate_size // self.split.shards, MLP),)
        gate = Projection(embed, hidden, c.mlp_bias, self.dtype, name="gate")(x)
        up = Projection(embed, hidden, c.mlp_bias, self.dtype, name="up")(x)
        down = Projection(hidden, embed, c.mlp_bias, self.dtype, self.split.axes, name="down")
        return down(nn.silu(gate) * up)


class Block(nn.Module):
    """One layer; a separate module, so that it can be applied to a slice of stacked weights."""

    config: LlamaConfig
    dtype: Any
    split: Split = Split()

    @nn.compact
    def __call__(self, x, positions, attend: Attend, layer: int):
        c = self.config
        normed = RMSNorm(c.hidden_size, c.norm_eps, self.dtype, EMBED, name="attention_norm")(x)
        attention = Attention(c, self.dtype, self.split, name="attention")
        out, kept = attention(normed, positions, attend, layer)
        x = x + out
        normed = RMSNorm(c.hidden_size, c.norm_eps, self.dtype, EMBED, name="mlp_norm")(x)
        return x + SwiGLU(c, self.dtype, self.split, name="mlp")(normed), kept


class Llama(nn.Module):
    """A Llama-like decoder, used only through `init` and `apply`.

    Attributes:
      config: shapes and switches.
      dtype: of parameters and activations; norms and logits use at least float32.
      split: the division over devices. With several shards the module runs inside `jax.shard_map`,
        on this device's part of the parameters, and returns its part of the logits.
    """

    config: LlamaConfig
    dtype: Any = jnp.float32
    split: Split = Split()

    def setup(self):
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (VOCAB, EMBED))
        shape = (c.embedding_rows // self.split.shards, c.hidden_size)
        self.embedding = self.param("embedding", init, shape, self.dtype)
        self.layers = [Block(c, self.dtype, self.split) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.hidden_size, c.norm_eps, self.dtype, EMBED)
        if not c.tie_embeddings:
            init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (VOCAB, EMBED))
            self.unembedding = self.param("unembedding", init, shape, self.dtype)
        if c.draft_vocab_size is not None:
            init = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
            self.vocab_map = self.param("vocab_map", init, (c.vocab_size,), jnp.int32)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Returns hidden states before the final norm, and what `attend` kept of each layer."""
        x, kept = self.embed(tokens, positions), []
        for layer in range(self.config.num_layers):
            x, layer_kept = self.block(x, positions, attend, layer)
            kept.append(layer_kept)
        if self.is_initializing():
            self.unembed(x)  # so that `init` creates every parameter
        return x, tuple(kept)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Array:
        """Returns the first block's input, [B,T,E]; rotary positions are applied in attention."""
        del positions
        if self.config.draft_vocab_size is not None:
            tokens = self.vocab_map[tokens]
        return embedding_lookup(self.embedding, tokens, self.split)

    def block(
        self, x: Float[Array, "B T E"], positions: Int[Array, "B T"], attend: Attend, layer: int
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Returns the output of one layer, and what `attend` kept of it."""
        with jax.named_scope(f"layer_{layer}"):
            return self.layers[layer](x, positions, attend, layer)

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns the logits of hidden states, at least float32.

        Tokens outside a draft vocabulary have the logit `NEVER`.
        """
        weight = self.embedding if self.config.tie_embeddings else self.unembedding
        wide = jnp.promote_types(self.dtype, jnp.float32)
        product = functools.partial(
            jnp.einsum,
            "...e,ve->...v",
            precision=dot_precision(self.dtype),
            preferred_element_type=wide,
        )
        logits = at_least_two_rows(lambda x: product(x, weight), self.norm(hidden), 1)
        if self.config.draft_vocab_size is None:
            return logits
        return logits.at[..., -1].set(NEVER)[..., self.vocab_map]
