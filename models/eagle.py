"""EAGLE-3 heads: one decoder layer that drafts from hidden states of its target.

The head reads the embedding of a token, and a feature of the token before it: of the target's
hidden states, fused by one matrix, or the head's own output where the target has not run. Source:
EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (arXiv 2605.09992).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.decoder import FeedForward
from models.decoder_config import DecoderConfig
from models.layers import NEVER, Attend, PassResult, RMSNorm, in_every_layer, scaled
from models.linear import Projection, products, project
from models.positions import rotate
from models.quantized import MatrixFormats
from pallas_kernels.cpu.linear import Matrix
from pallas_kernels.scores import capped
from sharding import EMBED, HEAD_DIM, HEADS, KV_HEADS, VOCAB, Split

FEATURES = 3  # hidden states that are fused by default


@dataclasses.dataclass(frozen=True)
class EagleConfig(DecoderConfig):
    """Shapes and settings of a head; those of its layer are a decoder's of one layer.

    `vocab_size` is the target's, and `draft_vocab_size` the number of tokens that the head can
    propose; None: all of them. The parameter `vocab_map`, int32 [V], has the row of each token's
    logit, and `draft_vocab_size` for a token that is never proposed.

    Attributes:
      target_hidden_size: the width of the target's hidden states.
      layer_inputs: the target's layers whose inputs are fused, any number of them; None: 2, L // 2
        and L - 3 of its L.
      norm_before_residual: the residual of the attention is the normalized feature.
      norm_before_fc: RMSNorm over the joined hidden states before they are fused.
      fc_norm: RMSNorm of each hidden state before they are fused.
      norm_output: the output that is the next token's feature is normalized (EAGLE-3.1).
      acceptance: at what share of a text's positions the head and the target chose the same token
        after training; None: not stored.
      own_embedding: the head has an embedding; False: it reads the target's.
      own_unembedding: the head has an output matrix; False: it uses rows of the target's.
    """

    target_hidden_size: int = 0
    layer_inputs: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    acceptance: float | None = None
    own_embedding: bool = False
    own_unembedding: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.num_layers != 1:
            raise ValueError(f"num_layers={self.num_layers} of an EAGLE head: it must be 1")
        self._check_layer()
        if self.layer_inputs == ():
            raise ValueError("layer_inputs=() of an EAGLE-3 head: name a layer, or omit it")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance={self.acceptance} of an EAGLE head: it must be 0 to 1")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm of an EAGLE-3 head exclude each other: use one of them"
            )

    def _check_layer(self) -> None:
        if self.rope is None or not self.norm_before or self.norm != "rms" or self.parallel:
            raise ValueError("an EAGLE head needs rotary positions and RMSNorm before each part")

    @property
    def layer(self) -> DecoderConfig:
        """The config of the layer alone."""
        names = (field.name for field in dataclasses.fields(DecoderConfig))
        return DecoderConfig(
            **{name: getattr(self, name) for name in names if name != "draft_vocab_size"}
        )

    @property
    def num_features(self) -> int:
        """The number of hidden states that are fused."""
        return FEATURES if self.layer_inputs is None else len(self.layer_inputs)

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are fused, of a target of so many layers."""
        if self.layer_inputs is not None:
            return self.layer_inputs
        return 2, target_layers // 2, target_layers - 3


class EagleLayer(nn.Module):
    """The decoder layer of a head, whose q, k, v read a token's embedding and its feature."""

    config: EagleConfig
    dtype: Any
    backend: str | None = None

    def setup(self):
        c = self.config
        norm = functools.partial(RMSNorm, c.hidden_size, c.norm_eps, self.dtype, EMBED)
        self.embedding_norm, self.feature_norm, self.mlp_norm = (
            norm(backend=self.backend) for _ in range(3)
        )
        projection = functools.partial(Projection, dtype=self.dtype, backend=self.backend)
        both, embed = ((2 * c.hidden_size, None),), ((c.hidden_size, EMBED),)
        heads = ((c.num_heads, HEADS), (c.head_dim, HEAD_DIM))
        kv_heads = ((c.num_kv_heads, KV_HEADS), (c.head_dim, HEAD_DIM))
        self.q = projection(both, heads, c.qkv_bias)
        self.k, self.v = (projection(both, kv_heads, c.qkv_bias) for _ in "kv")
        self.out = projection(heads, embed, c.out_bias)
        self.mlp = FeedForward(c, self.dtype, backend=self.backend)

    def __call__(self, x, feature, positions, attend: Attend):
        rope: Any = self.config.rope
        normed = self.feature_norm(feature)
        joined = jnp.concatenate([self.embedding_norm(x), normed], -1)
        q, k, v = project(joined, self.q, self.k, self.v)
        out, aux = attend(0)(rotate(q, positions, rope), rotate(k, positions, rope), v)
        hidden = (normed if self.config.norm_before_residual else feature) + self.out(out)
        return hidden + self.mlp(self.mlp_norm(hidden)), aux


class EagleHead(nn.Module):
    """An EAGLE-3 head; `fuse`, `decode`, `keys_values` and `unembed` are applied by name.

    Attributes:
      config: shapes and settings.
      dtype: dtype of parameters and activations; norms and logits use at least float32.
      split: the split of one device, as every device has the whole head.
      weights: none; the matrices of a head are not quantized.
      backend: backend of the products; None: the native kernels on a CPU that has them.
    """

    config: EagleConfig
    dtype: Any = jnp.float32
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None

    def setup(self):
        c = self.config
        norm = functools.partial(
            RMSNorm, eps=c.norm_eps, dtype=self.dtype, axis=EMBED, backend=self.backend
        )
        fused = c.num_features * c.target_hidden_size
        if c.norm_before_fc:
            self.joined_norm = norm(fused)
        if c.fc_norm:
            self.hidden_norms = [norm(c.target_hidden_size) for _ in range(c.num_features)]
        self.fc = Projection(
            inputs=((fused, None),),
            outputs=((c.hidden_size, EMBED),),
            use_bias=False,
            dtype=self.dtype,
            backend=self.backend,
        )
        self.layers: list[Any] = [EagleLayer(c, self.dtype, self.backend)]
        self.norm = norm(c.hidden_size)
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (VOCAB, EMBED))
        if c.own_embedding:
            shape = (c.vocab_size, c.hidden_size)
            self.embedding = self.param("embedding", init, shape, self.dtype)
        if c.own_unembedding:
            shape = (c.output_rows, c.hidden_size)
            self.unembedding = self.param("unembedding", init, shape, self.dtype)
        if c.draft_vocab_size is not None:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
            self.vocab_map = self.param("vocab_map", zeros, (c.vocab_size,), jnp.int32)

    def __call__(self, tokens: Int[Array, "B T"], positions, attend: Attend) -> PassResult:
        """Initializes the parameters: a head has no pass without its target's hidden states."""
        c = self.config
        inputs = jnp.zeros((*tokens.shape, c.target_hidden_size), self.dtype)
        feature = self.fuse([inputs] * c.num_features)
        x = self.embed(tokens, positions) if c.own_embedding else jnp.zeros_like(feature)
        hidden, aux = self.decode(x, feature, positions, attend)
        self.norm(hidden)  # of a head without an output matrix, too
        if c.own_unembedding:
            self.unembed(hidden)
        return hidden, aux, {}

    def embed(self, tokens: Int[Array, "B T"], positions) -> Float[Array, "B T E"]:
        """Returns the head's own embeddings."""
        return jnp.take(self.embedding, tokens, axis=0)

    def fuse(self, inputs: Sequence[Float[Array, "*B Et"]]) -> Float[Array, "*B E"]:
        """Returns the features of tokens, given the target's inputs of `layer_inputs`."""
        c = self.config
        inputs = [x.astype(self.dtype) for x in inputs]
        if c.fc_norm:
            inputs = [norm(x) for norm, x in zip(self.hidden_norms, inputs, strict=True)]
        joined = jnp.concatenate(inputs, -1)
        return self.fc(self.joined_norm(joined) if c.norm_before_fc else joined)

    def decode(
        self,
        x: Float[Array, "B T E"],
        feature: Float[Array, "B T E"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Returns the head's outputs, which are features of the next tokens, and `attend`'s aux.

        Args:
          x: embeddings of the tokens.
          feature: the target's features at the token before each.
          positions: positions of the tokens; only their differences matter.
          attend: the attention to the prefix.
        """
        hidden, aux = self.layers[0](x, feature, positions, attend)
        return self.norm(hidden) if self.config.norm_output else hidden, (aux,)

    def keys_values(self, x, feature, positions) -> tuple[Array, Array]:
        """Returns keys and values [B, T, K, D], which do not depend on other tokens."""

        def keep(q, k, v, **options):
            return jnp.zeros_like(q), (k, v)

        # XLA removes what only the output needs.
        _, (kept,) = self.decode(x, feature, positions, in_every_layer(keep))
        return kept

    def draft_logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B R"]:
        """Returns the logits of the tokens that the head can propose, at least float32."""
        x = hidden if self.config.norm_output else self.norm(hidden)
        logits_dtype = jnp.promote_types(self.dtype, jnp.float32)
        (logits,) = products(x, [Matrix(self.unembedding)], 1, self.backend, logits_dtype)
        return capped(scaled(logits, 1 / self.config.logits_divisor), self.config.logits_softcap)

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns the logits of all tokens; `NEVER` for those outside the draft vocabulary."""
        logits = self.draft_logits(hidden)
        if self.config.draft_vocab_size is None:
            return logits
        never = jnp.full((*logits.shape[:-1], 1), NEVER, logits.dtype)
        return jnp.concatenate([logits, never], -1)[..., self.vocab_map]
