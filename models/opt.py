"""The OPT family as one Flax module, under the same contract as `models.llama`.

Positions are a learned table, added in `embed`; blocks have LayerNorm, biases and a ReLU. OPT-350m
differs: its norms come after each residual sum, and its embedding is narrower than the model.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.layers import Attend, LayerNorm, Projection, dot_precision, look_up
from sharding import EMBED, HEAD_DIM, HEADS, MLP, VOCAB, Split

NORM_EPS = 1e-5
# The first rows of the table belonged to padding in the code that OPT was trained with.
POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True)
class OptConfig:
    """Shapes and switches of an OPT model (letters as in the architecture notes).

    Attributes:
      vocab_size: V.
      hidden_size: E.
      intermediate_size: F.
      num_layers: L.
      num_heads: H; divides E.
      max_positions: rows of the position table, less its offset of 2.
      embedding_size: width of the token embedding; None becomes E. Another width is projected to E
        after the embedding and back before the logits (OPT-350m).
      norm_before: norms come before attention and MLP; False is OPT-350m, after each sum.
      final_norm: a norm before the logits; only with `norm_before`.
      use_bias: biases in every linear map of the blocks.
      tie_embeddings: the output matrix is the embedding.
      family: the Hugging Face `model_type` it is written back as.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    embedding_size: int | None = None
    norm_before: bool = True
    final_norm: bool = True
    use_bias: bool = True
    tie_embeddings: bool = True
    family: str = "opt"

    def __post_init__(self):
        if self.embedding_size is None:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"
            )
        if self.final_norm and not self.norm_before:
            raise ValueError(
                "final_norm=True needs norm_before=True: a model with norms after each sum has "
                "no norm before its logits; set final_norm=False"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def embedding_axis(self) -> tuple[int, str | None]:
        """Returns the (size, logical axis) of the token embedding's width.

        A narrow embedding has no axis name: its projection to E would carry EMBED twice, and one
        mesh axis cannot split two axes of an array.
        """
        assert self.embedding_size is not None  # `__post_init__` has filled it in
        return self.embedding_size, None if self.projects_embedding else EMBED

    @property
    def projects_embedding(self) -> bool:
        return self.embedding_size != self.hidden_size


class OptBlock(nn.Module):
    """One layer. A module of its own, so that a slice of stacked weights can be applied as one."""

    config: OptConfig
    dtype: Any
    split: Split = Split()

    @nn.compact
    def __call__(self, x, positions, attend: Attend, layer: int):
        del positions  # `embed` has added them
        c = self.config
        embed, shards = ((c.hidden_size, EMBED),), self.split.shards
        hidden = ((c.intermediate_size // shards, MLP),)
        heads = ((c.num_heads // shards, HEADS), (c.head_dim, HEAD_DIM))

        def project(name, inputs, outputs):
            over = () if inputs == embed else self.split.axes
            return Projection(inputs, outputs, c.use_bias, self.dtype, over, name=name)

        def norm(name):
            return LayerNorm(c.hidden_size, NORM_EPS, self.dtype, EMBED, name=name)

        attention_norm, mlp_norm = norm("attention_norm"), norm("mlp_norm")
        y = attention_norm(x) if c.norm_before else x
        q, k, v = (project(name, embed, heads)(y) for name in "qkv")
        out, kept = attend(layer, q, k, v)
        x = x + project("out", heads, embed)(out)
        x = x if c.norm_before else attention_norm(x)
        y = mlp_norm(x) if c.norm_before else x
        x = x + project("down", hidden, embed)(nn.relu(project("up", embed, hidden)(y)))
        return (x if c.norm_before else mlp_norm(x)), kept


class Opt(nn.Module):
    """An OPT decoder, used only through `init` and `apply`.

    Attributes:
      config: shapes and switches.
      dtype: of parameters and activations; norms and logits are computed in float32 at least.
      split: of which parameters this device has a part. Then it runs inside `jax.shard_map`, and
        its logits are this device's part of the vocabulary.
    """

    config: OptConfig
    dtype: Any = jnp.float32
    split: Split = Split()

    def setup(self):
        c = self.config
        width, axis = c.embedding_axis
        normal = nn.initializers.normal(0.02)
        init = nn.with_logical_partitioning(normal, (VOCAB, axis))
        vocab = (c.vocab_size // self.split.shards, width)
        self.embedding = self.param("embedding", init, vocab, self.dtype)
        init = nn.with_logical_partitioning(normal, (None, EMBED))
        shape = (c.max_positions + POSITION_OFFSET, c.hidden_size)
        self.position_embedding = self.param("position_embedding", init, shape, self.dtype)
        if c.projects_embedding:
            inner, outer = ((c.hidden_size, EMBED),), ((width, axis),)
            self.project_in = Projection(outer, inner, False, self.dtype)
            self.project_out = Projection(inner, outer, False, self.dtype)
        self.layers = [OptBlock(c, self.dtype, self.split) for _ in range(c.num_layers)]
        if c.final_norm:
            self.norm = LayerNorm(c.hidden_size, NORM_EPS, self.dtype, EMBED)
        if not c.tie_embeddings:
            init = nn.with_logical_partitioning(normal, (VOCAB, axis))
            self.unembedding = self.param("unembedding", init, vocab, self.dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Returns (hidden states before the final norm, what `attend` kept of each layer)."""
        x, kept = self.embed(tokens, positions), []
        for layer in range(self.config.num_layers):
            x, of_layer = self.block(x, positions, attend, layer)
            kept.append(of_layer)
        if self.is_initializing():
            self.unembed(x)  # so that `init` makes every parameter
        return x, tuple(kept)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Array:
        """Returns the input of the first block, [B,T,E]: token and position embeddings.

        Positions beyond the table read its last row. Callers refuse contexts that long before
        they compile; what still gets here is padding and tree nodes that will not be emitted, and
        those must be finite: 0 attention times NaN is NaN for their neighbours.
        """
        x = look_up(self.embedding, tokens, self.split)
        if self.config.projects_embedding:
            x = self.project_in(x)
        rows = positions + POSITION_OFFSET
        return x + jnp.take(self.position_embedding, rows, axis=0, mode="clip")

    def block(
        self, x: Float[Array, "B T E"], positions: Int[Array, "B T"], attend: Attend, layer: int
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Returns (the output of layer `layer`, what `attend` kept of it)."""
        with jax.named_scope(f"layer_{layer}"):
            return self.layers[layer](x, positions, attend, layer)

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns logits, float32 at least, of the given hidden states."""
        c = self.config
        weight = self.embedding if c.tie_embeddings else self.unembedding
        x = self.norm(hidden) if c.final_norm else hidden
        x = self.project_out(x) if c.projects_embedding else x
        wide = jnp.promote_types(self.dtype, jnp.float32)
        return jnp.einsum(
            "...e,ve->...v",
            x,
            weight,
            precision=dot_precision(self.dtype),
            preferred_element_type=wide,
        )
