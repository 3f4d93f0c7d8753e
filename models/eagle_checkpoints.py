"""Reads and writes the configs and tensors of EAGLE-3 heads.

The layouts of SafeAILab and SpecForge have one config of a Llama layer and tensors below
`midlayer`; that of speculators has the layer's config below `transformer_layer_config` and tensors
below `layers.0`. `d2t` is the target's token of each draft token, less the draft token.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from models import hf_tensors, mtp_checkpoints
from models.decoder_config import DecoderConfig
from models.eagle import EagleConfig
from models.hf_config_keys import check_type
from models.hf_tensors import UNEMBEDDING, Stored, Tensor
from models.mtp import MtpConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."
EMBEDDING, FC = "embed_tokens.weight", "fc.weight"
D2T, T2D = "d2t", "t2d"
# Of the target, which speculators reads in training.
OF_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_IDS, _TARGET_WIDTH = "eagle_aux_hidden_state_layer_ids", "target_hidden_size"
_ACCEPTANCE = "first_token_acceptance"  # of this package's trainer
# Settings of TensorRT Model Optimizer: only heads with these features and norms are supported.
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
_TYPES: dict[str, type] = {
    "draft_vocab_size": int,
    _TARGET_WIDTH: int,
    "eagle_config": dict,
    "transformer_layer_config": dict,
    _LAYER_IDS: list,
    _ACCEPTANCE: float,
    **dict.fromkeys((*_NORMS, *_FIXED), bool),
}


def may_be_head(raw: Mapping[str, Any]) -> bool:
    """Returns whether `is_head` can hold, given the names of the tensors."""
    return "draft_vocab_size" in raw or is_head(raw)


def is_head(raw: Mapping[str, Any], names: Collection[str] = ()) -> bool:
    """Returns whether a config.json, or the tensors beside it, are those of an EAGLE-3 head."""
    architectures = " ".join(map(str, raw.get("architectures") or ())).lower()
    by_name = "eagle3" in architectures or raw.get("speculators_model_type") == "eagle3"
    return by_name or ("draft_vocab_size" in raw and FC in names)


def read_config(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    read_layer: Callable[..., DecoderConfig],
) -> EagleConfig:
    """Returns the config of a head.

    Args:
      raw: the contents of config.json.
      tensors: by their names in SpecForge's layout; {} if the weights are not there.
      read_layer: returns the config of a Llama config.json's contents.

    Raises:
      ValueError: a head of several layers, or whose matrix reads other hidden states than those of
        the config; missing keys, values of another type, or unsupported ones.
    """
    head_settings = _head_settings(raw)
    head_settings = _head_settings(head_settings.get("eagle_config", {})) | head_settings
    layer = head_settings.get("transformer_layer_config", raw)
    entries = {"num_hidden_layers": layer.get("num_hidden_layers")} | head_settings
    for key, value in {"num_hidden_layers": 1, **_FIXED}.items():
        if entries.get(key) not in (None, value):
            raise ValueError(
                f"{key}={json.dumps(entries[key])} of an EAGLE-3 head is not supported: use a head "
                f"with {key}={json.dumps(value)}"
            )
    llama = {
        key: value
        for key, value in layer.items()
        if key not in (*_TYPES, "architectures") and not key.startswith("speculators")
    }
    llama |= {"model_type": "llama", "tie_word_embeddings": False}
    config = read_layer(llama)
    settings: Any = {name: head_settings.get(name, False) for name in _NORMS}
    vocab = head_settings.get("draft_vocab_size", config.vocab_size)
    fields: dict[str, Any] = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(DecoderConfig)
    }
    fields["draft_vocab_size"] = None if vocab == config.vocab_size else vocab
    head = EagleConfig(
        **fields,
        target_hidden_size=head_settings.get(_TARGET_WIDTH, config.hidden_size),
        layer_inputs=_layer_inputs(head_settings.get(_LAYER_IDS)),
        acceptance=head_settings.get(_ACCEPTANCE),
        own_embedding=EMBEDDING in tensors,
        own_unembedding=UNEMBEDDING in tensors if tensors else True,
        **settings,
    )
    if FC in tensors:
        _check_features(head, tensors[FC].shape[-1], head_settings.get(_LAYER_IDS))
    return head


def _check_features(config: EagleConfig, columns: int, ids: Sequence[int] | None) -> None:
    """Raises ValueError unless `fc.weight` has the columns of the layers that a head reads."""
    count, width = config.num_features, config.target_hidden_size
    if columns == count * width:
        return
    remedies = []
    if columns % width == 0:
        layers = columns // width
        remedies.append(f"set {_LAYER_IDS} to the {layers} that the head was trained with")
    if columns % count == 0:
        remedies.append(f"set {_TARGET_WIDTH} to {columns // count} if that is the target's")
    if remedies:  # other shapes are compared with all tensors
        named = f"{_LAYER_IDS}={list(ids)}" if ids else f"no {_LAYER_IDS}"
        raise ValueError(
            f"{FC} has {columns} columns, and config.json has {named}, which stands for {count} "
            f"layers of a target with hidden_size={width}: {', or '.join(remedies)}"
        )


def _head_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a head that are not null.

    Raises:
      ValueError: a value is not of its key's type.
    """
    settings = {key: raw[key] for key in _TYPES if raw.get(key) is not None}
    for key, value in settings.items():
        check_type(key, value, _TYPES[key])
    for i in settings.get(_LAYER_IDS, ()):
        check_type(f"a layer of {_LAYER_IDS}", i, int)
    return settings


def _layer_inputs(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the layers whose inputs a head reads, given the stored ids; None: the default.

    Ids that begin with 1 name layers whose outputs are read, as SpecForge writes them; others name
    layers whose inputs are read, as in vLLM and speculators. SGLang has the same rule.
    """
    if not ids:
        return None
    return tuple(i + 1 if ids[0] == 1 else i for i in ids)


def write_config(config: EagleConfig, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of config.json in SpecForge's layout, given those of the layer's.

    Raises:
      ValueError: layers whose ids would be read as others.
    """
    if (
        config.layer_inputs is not None
        and _layer_inputs(config.layer_inputs) != config.layer_inputs
    ):
        raise ValueError(
            f"layer_inputs={config.layer_inputs} cannot be written: ids that begin with 1 are read "
            "as layers whose outputs are read; begin with another layer"
        )
    written = {key: value for key, value in layer.items() if key != "draft_vocab_size"}
    extra = {_LAYER_IDS: config.layer_inputs, _ACCEPTANCE: config.acceptance}
    return {
        **written,
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": config.output_rows,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {key: value for key, value in extra.items() if value is not None},
        **{name: getattr(config, name) for name in _NORMS},
    }


def canonical(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors by their names in SpecForge's layout."""
    return {_canonical(name): location for name, location in tensors.items()}


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith(SPECULATORS_LAYER):
        return LAYER + name.removeprefix(SPECULATORS_LAYER)
    return {"embed_tokens": EMBEDDING}.get(name, name)


def unused(config: EagleConfig) -> tuple[str, ...]:
    """Returns the names of tensors that a head does not need; `t2d` follows from `d2t`."""
    return (T2D, *OF_TARGET) + (D2T,) * (config.draft_vocab_size is None)


@dataclasses.dataclass(frozen=True)
class DraftTokens(Tensor):
    """`d2t`, of which the parameter is the draft token of each of the target's tokens.

    Attributes:
      size: the number of draft tokens, which stands for tokens that have none.
    """

    size: int = 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.size,)

    def to_parameter(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        tokens = np.arange(self.size) + np.asarray(stored)
        if tokens.min() < 0 or tokens.max() >= shape[0] or len(np.unique(tokens)) < self.size:
            raise ValueError(
                f"{self.name} has tokens outside 0 to {shape[0] - 1} or twice: it must be the "
                "target's token less the draft token, not the target's token"
            )
        draft = np.full(shape, self.size, np.int32)
        draft[tokens] = np.arange(self.size)
        return draft


def to_stored(tensors: Sequence[Tensor], parameters: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the contiguous arrays of a tensor by name, given all its parameters in order.

    `t2d` comes with `d2t`: whether the head can propose each of the target's tokens.
    """
    first = tensors[0]
    if not isinstance(first, DraftTokens):
        return {first.name: hf_tensors.to_stored(tensors, parameters)}
    can_propose = parameters[0] < first.size
    (known,) = np.nonzero(can_propose)
    tokens = np.empty(first.size, np.int64)
    tokens[parameters[0][known]] = known
    return {D2T: tokens - np.arange(first.size), T2D: can_propose}


def tensors_of(config: DecoderConfig) -> tuple[Tensor, ...]:
    """Returns every parameter of a model or a head with its tensor, in file order.

    The names of an EAGLE head's are those of SpecForge's layout.
    """
    if isinstance(config, MtpConfig):
        return mtp_checkpoints.tensors_of(config)
    if not isinstance(config, EagleConfig):
        return hf_tensors.tensors_of(config)
    layer = ("layers_0",)
    tensors = []
    if config.own_embedding:
        tensors.append(Tensor(EMBEDDING, ("embedding",)))
    if config.norm_before_fc:
        tensors.append(_norm("input_norm", ("joined_norm",)))
    if config.fc_norm:
        numbers = range(config.num_features)
        tensors += [_norm(f"fc_norm.{i}", (f"hidden_norms_{i}",)) for i in numbers]
    tensors.append(Tensor(FC, ("fc", "weight"), inputs=1))
    names = {
        "hidden_norm": "feature_norm",
        "input_layernorm": "embedding_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    tensors += [_norm(LAYER + name, (*layer, module)) for name, module in names.items()]
    for module in "qkv":
        tensors += _linear(f"self_attn.{module}_proj", (*layer, module), 1, config.qkv_bias)
    tensors += _linear("self_attn.o_proj", (*layer, "out"), 2, config.out_bias)
    for module in ("gate",) * config.gated + ("up", "down"):
        tensors += _linear(f"mlp.{module}_proj", (*layer, "mlp", module), 1, config.mlp_bias)
    tensors.append(_norm("norm", ("norm",)))
    if config.own_unembedding:
        tensors.append(Tensor(UNEMBEDDING, ("unembedding",)))
    if config.draft_vocab_size is not None:
        tensors.append(DraftTokens(D2T, ("vocab_map",), size=config.draft_vocab_size))
    return tuple(tensors)


def _norm(name: str, path: tuple[str, ...]) -> Tensor:
    return Tensor(f"{name}.weight", (*path, "scale"), flat=True)


def _linear(name: str, path: tuple[str, ...], inputs: int, bias: bool) -> list[Tensor]:
    tensors = [Tensor(f"{LAYER}{name}.weight", (*path, "weight"), inputs=inputs)]
    return tensors + [Tensor(f"{LAYER}{name}.bias", (*path, "bias"), flat=True)] * bias
