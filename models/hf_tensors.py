"""Maps the tensors of a Hugging Face checkpoint to parameters.

One declaration per tensor serves reading, writing and validation. A parameter is stored unchanged,
flattened (norms and biases), or as the matrix [outputs, inputs] of a linear map.
"""

import dataclasses
import math
import re

import numpy as np

from models.decoder import DecoderConfig, LearnedPositions
from models.families import FAMILIES

# Buffers that some versions save; they follow from the config.
IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias|decoder\.version)")
UNEMBEDDING = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A stored tensor and its parameter.

    Attributes:
      name: in the checkpoint.
      path: in the tree of parameters, below "params".
      inputs: number of leading axes that a linear map contracts; 0: not a linear map.
      flat: whether it is stored with one axis.
    """

    name: str
    path: tuple[str, ...]
    inputs: int = 0
    flat: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in the checkpoint of a parameter of shape `shape`."""
        if self.flat:
            return (math.prod(shape),)
        if self.inputs:
            return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])
        return tuple(shape)

    def to_parameter(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the parameter, of shape `shape`."""
        return (stored.T if self.inputs else stored).reshape(shape)

    def to_stored(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the contiguous array for the checkpoint."""
        matrix = self.stored_shape(parameter.shape)
        if self.inputs:
            return np.ascontiguousarray(parameter.reshape(matrix[::-1]).T)
        return np.ascontiguousarray(parameter.reshape(matrix))


def tensors_of(config: DecoderConfig) -> tuple[Tensor, ...]:
    """Returns every tensor of a checkpoint of `config`, in file order."""
    c, names = config, FAMILIES[config.family].names
    bias = c.norm == "layer"
    tensors = [Tensor(f"{names['embedding']}.weight", ("embedding",))]
    if isinstance(c.positions, LearnedPositions):
        name = names["position_embedding"]
        tensors.append(Tensor(f"{name}.weight", ("position_embedding",)))
    if c.embedding_size is not None:
        for part in ("project_in", "project_out"):
            tensors += _linear(names[part], (part,), 1, False)
    for i in range(c.num_layers):
        tensors += _layer(c, f"{names['layer']}.{i}", (f"layers_{i}",))
    if c.final_norm:
        tensors += _norm(names["norm"], ("norm",), bias)
    if not c.tie_embeddings:
        tensors.append(Tensor(UNEMBEDDING, ("unembedding",)))
    if c.draft_vocab_size is not None:
        tensors.append(Tensor(names["vocab_map"], ("vocab_map",)))
    return tuple(tensors)


def _layer(c: DecoderConfig, layer: str, path: tuple[str, ...]) -> list[Tensor]:
    """Returns the tensors of a layer, whose names begin with `layer`."""
    name = {part: f"{layer}.{name}" for part, name in FAMILIES[c.family].names.items()}
    attention, mlp, bias = (*path, "attention"), (*path, "mlp"), c.norm == "layer"
    tensors = _norm(name["attention_norm"], (*path, "attention_norm"), bias)
    for part in "qkv":
        tensors += _linear(name[part], (*attention, part), 1, c.qkv_bias)
    if c.qk_norm:
        for part in ("q_norm", "k_norm"):
            tensors += _norm(name[part], (*attention, part))
    tensors += _linear(name["out"], (*attention, "out"), 2, c.out_bias)
    tensors += _norm(name["mlp_norm"], (*path, "mlp_norm"), bias)
    for part in ("gate",) * c.gated + ("up", "down"):
        tensors += _linear(name[part], (*mlp, part), 1, c.mlp_bias)
    return tensors


def _linear(name: str, path: tuple[str, ...], inputs: int, bias: bool) -> list[Tensor]:
    made = [Tensor(f"{name}.weight", (*path, "weight"), inputs=inputs)]
    return made + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias


def _norm(name: str, path: tuple[str, ...], bias: bool = False) -> list[Tensor]:
    made = [Tensor(f"{name}.weight", (*path, "scale"), flat=True)]
    return made + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias
