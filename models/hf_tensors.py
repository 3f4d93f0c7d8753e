"""Which tensor of a Hugging Face checkpoint is which parameter, and how their shapes relate.

One declaration for each tensor serves both directions and the checks: a parameter is stored either
as it is, flattened (norms and biases), or as the matrix [outputs, inputs] of a linear map.
"""

import dataclasses
import math
import re

import numpy as np

from models.build import Config
from models.llama import LlamaConfig
from models.opt import OptConfig

# Buffers that some versions saved, and that follow from the config.
IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias|decoder\.version)")
UNEMBEDDING = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A stored tensor and its parameter.

    Attributes:
      name: in the checkpoint.
      path: in the tree of parameters, below "params".
      inputs: how many leading axes of the parameter a linear map sums over; 0: not a linear map.
      flat: stored as one axis.
    """

    name: str
    path: tuple[str, ...]
    inputs: int = 0
    flat: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in the checkpoint of a parameter of the given shape."""
        if self.flat:
            return (math.prod(shape),)
        if self.inputs:
            return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])
        return tuple(shape)

    def to_parameter(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the parameter of the given shape."""
        return (stored.T if self.inputs else stored).reshape(shape)

    def to_stored(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the array that the checkpoint holds, contiguous."""
        matrix = self.stored_shape(parameter.shape)
        if self.inputs:
            return np.ascontiguousarray(parameter.reshape(matrix[::-1]).T)
        return np.ascontiguousarray(parameter.reshape(matrix))


def tensors_of(config: Config) -> tuple[Tensor, ...]:
    """Returns every tensor of a checkpoint of `config`, in the order they are written."""
    return _opt(config) if isinstance(config, OptConfig) else _llama(config)


def full_name(name: str) -> str:
    """Returns the name with the prefix that checkpoints of a bare decoder leave out."""
    return name if name.startswith("model.") or name == UNEMBEDDING else "model." + name


def _linear(name: str, path: tuple[str, ...], inputs: int, bias: bool) -> list[Tensor]:
    made = [Tensor(f"{name}.weight", (*path, "weight"), inputs=inputs)]
    return made + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias


def _norm(name: str, path: tuple[str, ...], bias: bool = False) -> list[Tensor]:
    made = [Tensor(f"{name}.weight", (*path, "scale"), flat=True)]
    return made + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias


def _llama(c: LlamaConfig) -> tuple[Tensor, ...]:
    found = [Tensor("model.embed_tokens.weight", ("embedding",))]
    for i in range(c.num_layers):
        name, path = f"model.layers.{i}", (f"layers_{i}",)
        attention = (*path, "attention")
        found += _norm(f"{name}.input_layernorm", (*path, "attention_norm"))
        for part in "qkv":
            found += _linear(f"{name}.self_attn.{part}_proj", (*attention, part), 1, c.qkv_bias)
        if c.qk_norm:
            for part in ("q_norm", "k_norm"):
                found += _norm(f"{name}.self_attn.{part}", (*attention, part))
        found += _linear(f"{name}.self_attn.o_proj", (*attention, "out"), 2, c.out_bias)
        found += _norm(f"{name}.post_attention_layernorm", (*path, "mlp_norm"))
        for part in ("gate", "up", "down"):
            found += _linear(f"{name}.mlp.{part}_proj", (*path, "mlp", part), 1, c.mlp_bias)
    found += _norm("model.norm", ("norm",))
    if not c.tie_embeddings:
        found.append(Tensor(UNEMBEDDING, ("unembedding",)))
    return tuple(found)


def _opt(c: OptConfig) -> tuple[Tensor, ...]:
    root = "model.decoder"
    found = [
        Tensor(f"{root}.embed_tokens.weight", ("embedding",)),
        Tensor(f"{root}.embed_positions.weight", ("position_embedding",)),
    ]
    if c.projects_embedding:
        found += _linear(f"{root}.project_in", ("project_in",), 1, False)
        found += _linear(f"{root}.project_out", ("project_out",), 1, False)
    for i in range(c.num_layers):
        name, path = f"{root}.layers.{i}", (f"layers_{i}",)
        found += _norm(f"{name}.self_attn_layer_norm", (*path, "attention_norm"), True)
        for part in "qkv":
            found += _linear(f"{name}.self_attn.{part}_proj", (*path, part), 1, c.use_bias)
        found += _linear(f"{name}.self_attn.out_proj", (*path, "out"), 2, c.use_bias)
        found += _norm(f"{name}.final_layer_norm", (*path, "mlp_norm"), True)
        found += _linear(f"{name}.fc1", (*path, "up"), 1, c.use_bias)
        found += _linear(f"{name}.fc2", (*path, "down"), 1, c.use_bias)
    if c.final_norm:
        found += _norm(f"{root}.final_layer_norm", ("norm",), True)
    if not c.tie_embeddings:
        found.append(Tensor(UNEMBEDDING, ("unembedding",)))
    return tuple(found)
