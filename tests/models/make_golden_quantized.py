"""Makes `golden_quantized/`: tiny quantized models by compressed-tensors, and their logits.

Needs torch, transformers and compressed-tensors, which the tests that read the result do not:
`python tests/models/make_golden_quantized.py`. The logits are those of transformers with the
weights that compressed-tensors dequantizes. `lm_head` is not quantized.
"""

import copy
import pathlib
import shutil

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils.helpers import calculate_qparams, is_module_quantized

GOLDEN = pathlib.Path(__file__).parent / "golden_quantized"
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IGNORE = ["lm_head"]
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float"}
TOKEN = {"symmetric": True, "dynamic": True, "strategy": "token"}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
# Settings of the weights, settings of the activations.
CASES = {
    "int4": (GROUPS, None),
    "int4_zeros": ({**GROUPS, "symmetric": False}, None),
    "int8_packed": (INT8, None),
    "int8": (INT8, {**INT8, **TOKEN}),
    "float8": ({**FLOAT8, "strategy": "channel"}, {**FLOAT8, **TOKEN}),
    "float8_tensor": ({**FLOAT8, "strategy": "tensor"}, {**FLOAT8, **TOKEN}),
}


def set_scales(module: torch.nn.Module) -> None:
    """Sets the scales and zero points of a linear map from the extremes of each group."""
    args = module.quantization_scheme.weights
    weight = module.weight.data
    if args.strategy == "group":
        grouped = weight.unflatten(-1, (-1, args.group_size))
        low, high = grouped.amin(-1), grouped.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero_point = calculate_qparams(low, high, args)
    module.weight_scale.data = scale.to(weight.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero_point.to(module.weight_zero_point.dtype)


def make(name: str, seed: int) -> None:
    """Writes golden_quantized/<name>: the model, and expected.npz with tokens and logits."""
    weights, activations = CASES[name]
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM(config).float().eval()
    plain = copy.deepcopy(model)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    settings = {"config_groups": {"group_0": group}, "ignore": IGNORE}
    apply_quantization_config(model, QuantizationConfig(**settings))
    for module in model.modules():
        if is_module_quantized(module):
            set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    plain.load_state_dict({key: model.state_dict()[key] for key in plain.state_dict()})
    with torch.no_grad():
        tokens = torch.randint(0, config.vocab_size, (2, 20))
        logits = plain(tokens).logits
    np.savez_compressed(
        folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy()
    )


if __name__ == "__main__":
    for seed, case in enumerate(CASES):
        make(case, seed)
