"""Heads for multi-token prediction: one decoder layer that is trained and stored with its target.

At position t the head reads the target's last hidden state, after its final norm, and the embedding
of token t + 1, and predicts token t + 2. Where the target has not run, its own output takes the
place of the hidden state. Source: DeepSeek-V3 (arXiv 2412.19437), in the wiring of Qwen3-Next.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.decoder import Block
from models.decoder_config import BY_POSITIONS, NORMS, DecoderConfig
from models.eagle import EagleConfig, EagleHead
from models.layers import Attend
from models.linear import Projection
from sharding import EMBED, VOCAB

# The head attends to the whole text, whatever the target's layers do.
_WHOLE_TEXT: dict[str, Any] = dict(
    sliding_window=None,
    full_layers=(),
    full_head_dim=None,
    full_kv_heads=None,
    window_positions=None,
    unrotated_layers=(),
    shared_kv_layers=0,
    linear_layers=(),
    delta_net=None,
)


@dataclasses.dataclass(frozen=True)
class MtpConfig(EagleConfig):
    """Shapes and settings of a head: those of an attention layer of its target.

    It has the wiring of an EAGLE head of one layer input, the target's last hidden state. Embedding
    and output matrix are the target's.
    """

    norm_output: bool = True
    own_unembedding: bool = False

    @classmethod
    def of_target(cls, target: DecoderConfig, **changes: Any) -> Self:
        """Returns the config of the head of a target.

        Raises:
          ValueError: a target without rotary positions, or without RMSNorm before its logits.
        """
        fields = {f.name: getattr(target, f.name) for f in dataclasses.fields(DecoderConfig)}
        fields |= dict(num_layers=1, tie_embeddings=False, **_WHOLE_TEXT)
        return cls(**fields | {"target_hidden_size": target.hidden_size} | changes)

    def _check_layer(self) -> None:
        is_rms = self.norm in ("rms", "rms_plus_one")
        if self.rope is None or not self.final_norm or not is_rms:
            raise ValueError(
                "a head for multi-token prediction needs rotary positions, and RMSNorm before the "
                "logits (norm rms or rms_plus_one): use another drafter with this target"
            )

    @property
    def num_features(self) -> int:
        return 1

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        return (target_layers,)  # stands for the last layer's output


class MtpHead(EagleHead):
    """A head for multi-token prediction, applied as an `EagleHead`."""

    config: MtpConfig

    def setup(self):
        c = self.config
        norm = functools.partial(
            NORMS[c.norm],
            size=c.hidden_size,
            eps=c.norm_eps,
            dtype=self.dtype,
            axis=EMBED,
            backend=self.backend,
        )
        self.target_norm, self.embedding_norm, self.feature_norm, self.norm = (
            norm() for _ in range(4)
        )
        self.fc = Projection(
            inputs=((2 * c.hidden_size, None),),
            outputs=((c.hidden_size, EMBED),),
            use_bias=False,
            dtype=self.dtype,
            backend=self.backend,
        )
        self.layers = [Block(c.layer, self.dtype, backend=self.backend)]
        if c.own_unembedding:
            init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (VOCAB, EMBED))
            shape = (c.vocab_size, c.hidden_size)
            self.unembedding = self.param("unembedding", init, shape, self.dtype)

    def fuse(self, inputs: Sequence[Float[Array, "*B E"]]) -> Float[Array, "*B E"]:
        """Returns the features of tokens: the target's hidden states after its final norm."""
        (hidden,) = inputs
        return self.target_norm(hidden.astype(self.dtype))

    def decode(
        self,
        x: Float[Array, "B T E"],
        feature: Float[Array, "B T E"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> tuple[Float[Array, "B T E"], tuple]:
        normed = self.embedding_norm(x), self.feature_norm(feature)
        joined = self.fc(jnp.concatenate(normed, -1))
        hidden, aux = self.layers[0](joined, positions, attend(0), BY_POSITIONS)
        return self.norm(hidden), (aux,)
