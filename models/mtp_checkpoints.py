"""Reads and writes the heads for multi-token prediction that are stored with their targets.

The layout is that of Qwen3-Next and Qwen3.5: the tensors `mtp.*` beside those of the target, with
the names of its layers below `mtp.layers.0`.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from models import hf_tensors
from models.decoder_config import DecoderConfig
from models.families import FAMILIES
from models.hf_config_keys import check_type
from models.hf_tensors import Stored, Tensor
from models.mtp import MtpConfig

PREFIX = "mtp."
ARCHITECTURE = "MTP"  # the end of the name, in a directory of a head alone
# The number of layers, by the keys of Qwen3.5 and of DeepSeek-V3.
LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_NORMS = {
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "feature_norm",
    "norm": "norm",
}


def is_head(raw: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is that of a directory that has only a head."""
    return any(str(name).endswith(ARCHITECTURE) for name in raw.get("architectures") or ())


def read_config(
    raw: Mapping[str, Any],
    tensors: Collection[str],
    read_target: Callable[..., DecoderConfig],
) -> MtpConfig:
    """Returns the config of the head in a directory.

    Args:
      raw: the contents of config.json, of the text decoder.
      tensors: the names in the files; empty if the weights are not there.
      read_target: returns the config of the contents of a decoder's config.json.

    Raises:
      ValueError: there is no head, one of several layers, or the target's config is not supported.
    """
    if tensors and not any(name.startswith(PREFIX) for name in tensors):
        raise ValueError(
            f"the directory has no head for multi-token prediction (tensors {PREFIX}*): name that "
            "of a checkpoint of this target that has one (mtp:PATH), or use another drafter, such "
            "as prompt-lookup:4"
        )
    for key in LAYERS:
        if raw.get(key) is not None:
            check_type(key, raw[key], int)
            if raw[key] > 1:
                raise ValueError(
                    f"{key}={raw[key]}: heads for multi-token prediction of one layer are "
                    "supported; use another drafter, such as prompt-lookup:4"
                )
    if is_head(raw):
        raw = {key: value for key, value in raw.items() if key != "architectures"}
    return MtpConfig.of_target(read_target(raw))


def of_model(config: DecoderConfig, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors of a head, or of the target beside it, given those of both by name."""
    if not isinstance(config, MtpConfig):
        return {name: location for name, location in stored.items() if not name.startswith(PREFIX)}
    prefixes = PREFIX, f"{FAMILIES[config.family].names['norm']}."
    return {name: location for name, location in stored.items() if name.startswith(prefixes)}


def write_config(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of config.json of a head alone, given those of its layer's decoder."""
    (name,) = layer["architectures"]
    return {**layer, "architectures": [name.removesuffix("ForCausalLM") + ARCHITECTURE]}


def tensors_of(config: MtpConfig) -> tuple[Tensor, ...]:
    """Returns every parameter of a head with its tensor, in file order."""
    names = FAMILIES[config.family].names
    target_norm = f"{names['norm']}.weight"
    tensors = [Tensor(target_norm, ("target_norm", "scale"), flat=True)]
    tensors.append(Tensor(f"{PREFIX}fc.weight", ("fc", "weight"), inputs=1))
    layer: DecoderConfig = config.layer
    for tensor in hf_tensors.tensors_of(layer):
        if tensor.path[0] == "layers_0":
            name = tensor.name.replace(f"{names['layer']}.", f"{PREFIX}layers.", 1)
            tensors.append(dataclasses.replace(tensor, name=name))
    for name, module in _NORMS.items():
        tensors.append(Tensor(f"{PREFIX}{name}.weight", (module, "scale"), flat=True))
    return tuple(tensors)
