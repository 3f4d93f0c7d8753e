"""Maps the tensors of a Hugging Face checkpoint to parameters.

One declaration per tensor serves reading, writing and validation. A parameter is stored unchanged,
flattened (norms and biases), or as the matrix [outputs, inputs] of a linear map.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from models.build import Config
from models.llama import LlamaConfig
from models.opt import OptConfig

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


def tensors_of(config: Config) -> tuple[Tensor, ...]:
    """Returns every tensor of a checkpoint of `config`, in file order."""
    families: dict[type, Callable[[Any], tuple[Tensor, ...]]]
    families = {LlamaConfig: _llama, OptConfig: _opt}
    return families[type(config)](config)


def full_name(name: str) -> str:
    """Returns the name with the prefix that checkpoints of a bare decoder omit."""
    return name if name.startswith(("model.", "lm_head.")) else "model." + name


def _linear(name: str, path: tuple[str, ...], inputs: int, bias: bool) -> list[Tensor]:
    made = [Tensor(f"{name}.weight", (*path, "weight"), inputs=inputs)]
    return made + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias


def _norm(name: str, path: tuple[str, ...], bias: bool = False) -> list[Tensor]:
    made = [Tensor(f"{name}.weight", (*path, "scale"), flat=True)]
    return made + [Tensor(f"{name}.bias", (*path, "bias"), flat=True)] * bias


def _llama(c: LlamaConfig) -> tuple[Tensor, ...]:
    tensors = [Tensor("model.embed_tokens.weight", ("embedding",))]
    for i in range(c.num_layers):
        name, path = f"model.layers.{i}", (f"layers_{i}",)
        attention = (*path, "attention")
        tensors += _norm(f"{name}.input_layernorm", (*path, "attention_norm"))
        for part in "qkv":
            tensors += _linear(f"{name}.self_attn.{part}_proj", (*attention, part), 1, c.qkv_bias)
        if c.qk_norm:
            for part in ("q_norm", "k_norm"):
                tensors += _norm(f"{name}.self_attn.{part}", (*attention, part))
        tensors += _linear(f"{name}.self_attn.o_proj", (*attention, "out"), 2, c.out_bias)
        tensors += _norm(f"{name}.post_attention_layernorm", (*path, "mlp_norm"))
        for part in ("gate", "up", "down"):
            tensors += _linear(f"{name}.mlp.{part}_proj", (*path, "mlp", part), 1, c.mlp_bias)
    tensors += _norm("model.norm", ("norm",))
    if not c.tie_embeddings:
        tensors.append(Tensor(UNEMBEDDING, ("unembedding",)))
    if c.draft_vocab_size is not None:
        tensors.append(Tensor("model.vocab_map", ("vocab_map",)))
    return tuple(tensors)


def _opt(c: OptConfig) -> tuple[Tensor, ...]:
    root = "model.decoder"
    tensors = [
        Tensor(f"{root}.embed_tokens.weight", ("embedding",)),
        Tensor(f"{root}.embed_positions.weight", ("position_embedding",)),
    ]
    if c.projects_embedding:
        tensors += _linear(f"{root}.project_in", ("project_in",), 1, False)
        tensors += _linear(f"{root}.project_out", ("project_out",), 1, False)
    for i in range(c.num_layers):
        name, path = f"{root}.layers.{i}", (f"layers_{i}",)
        tensors += _norm(f"{name}.self_attn_layer_norm", (*path, "attention_norm"), True)
        for part in "qkv":
            tensors += _linear(f"{name}.self_attn.{part}_proj", (*path, part), 1, c.use_bias)
        tensors += _linear(f"{name}.self_attn.out_proj", (*path, "out"), 2, c.use_bias)
        tensors += _norm(f"{name}.final_layer_norm", (*path, "mlp_norm"), True)
        tensors += _linear(f"{name}.fc1", (*path, "up"), 1, c.use_bias)
        tensors += _linear(f"{name}.fc2", (*path, "down"), 1, c.use_bias)
    if c.final_norm:
        tensors += _norm(f"{root}.final_layer_norm", ("norm",), True)
    if not c.tie_embeddings:
        tensors.append(Tensor(UNEMBEDDING, ("unembedding",)))
    return tuple(tensors)
