"""Tiny GGUF files and the same models as Hugging Face directories, for tests."""

import pathlib

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from models import DecoderConfig
from models.hf_config_writing import write_config
from models.hf_tensors import tensors_of

TEXT = (
    "The cat's 12 hats: 3,456 or 7.89?\n\n\tdef f(x):\n        return x + 1  \r\n"
    "été ½ Ⅷ ² नमस्ते 你好 🙂 don't DON'T   end \u0301e\u0301 — “quoted”. "
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
MATRICES = ("F32", "F16", "BF16", "Q8_0", "Q4_1")


def config(family="llama", **changes) -> DecoderConfig:
    """Returns a config whose matrices have rows of 32, the block size of Q8_0 and Q4_1."""
    shapes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": 128,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "family": family,
    }
    return DecoderConfig(**{**shapes, **changes})


def shapes_of(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes in Hugging Face format."""
    e, m, v, d = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    q, k = config.num_heads * d, config.num_kv_heads * d
    rows = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": e, "gate_proj": m, "up_proj": m}
    rows |= {"down_proj": e, "q_norm": d, "k_norm": d, "embed_tokens": v, "lm_head": v}
    columns = {"o_proj": q, "down_proj": m}
    found = {}
    for tensor in tensors_of(config):
        part, kind = tensor.name.split(".")[-2:]
        is_matrix = kind == "weight" and "norm" not in part
        found[tensor.name] = (rows.get(part, e), *[columns.get(part, e)] * is_matrix)
    return found


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """As `permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def metadata_of(config: DecoderConfig) -> dict:
    """Returns the architecture's metadata as llama.cpp's converter writes it."""
    return {
        "general.architecture": config.family,
        f"{config.family}.context_length": config.max_positions,
        f"{config.family}.embedding_length": config.hidden_size,
        f"{config.family}.block_count": config.num_layers,
        f"{config.family}.feed_forward_length": config.intermediate_size,
        f"{config.family}.attention.head_count": config.num_heads,
        f"{config.family}.attention.head_count_kv": config.num_kv_heads,
        f"{config.family}.attention.key_length": config.head_dim,
        f"{config.family}.attention.value_length": config.head_dim,
        f"{config.family}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{config.family}.rope.freq_base": config.rope.theta,
    }


def write(path: pathlib.Path, metadata: dict, tensors: dict) -> pathlib.Path:
    """Writes a GGUF file; `tensors` has arrays, or pairs of values or bytes and a type's name."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            adders[type(value)](key, value)
    for name, value in tensors.items():
        values, kind = value if isinstance(value, tuple) else (value, "F32")
        kind = gguf.GGMLQuantizationType[kind]
        stored = values if values.dtype == np.uint8 else gguf.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_for(config: DecoderConfig, seed: int = 0) -> tuple[dict, dict]:
    """Returns (a GGUF file's tensors, the same dequantized in Hugging Face format).

    Matrices have all of `MATRICES`' types in turn.
    """
    draw = np.random.default_rng(seed)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    stored, expected = {}, {}
    for i, (name, shape) in enumerate(shapes_of(config).items()):
        values = draw.normal(0, 0.5, shape).astype(np.float32)
        kind = MATRICES[i % len(MATRICES)] if len(shape) > 1 else "F32"
        kind_id = gguf.GGMLQuantizationType[kind]
        expected[name] = gguf.dequantize(gguf.quantize(values, kind_id), kind_id)
        stem, _, suffix = name.rpartition(".")
        if config.family == "llama" and (part := stem.rpartition(".")[2]) in heads:
            values = permute(values, heads[part])
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[rest]}"
        else:
            stem = NAMES[stem]
        stored[f"{stem}.{suffix}"] = values, kind
    return stored, expected


def save_directory(path: pathlib.Path, config: DecoderConfig, tensors: dict) -> pathlib.Path:
    """Writes a directory in Hugging Face format, independently of the conversion."""
    import json

    path.mkdir()
    (path / "config.json").write_text(json.dumps(write_config(config)))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def trained(pre: pre_tokenizers.PreTokenizer | None, text: str = TEXT, size: int = 300):
    """Returns the JSON of a BPE model trained on a text: `vocab` and `merges`."""
    import json

    tokenizer = Tokenizer(models.BPE())
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    alphabet = pre_tokenizers.ByteLevel.alphabet() if pre is not None else []
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>"]
    )
    tokenizer.train_from_iterator([text], trainer)
    return json.loads(tokenizer.to_str())["model"]


def byte_level_metadata(pre: str, **changes) -> dict:
    """Returns the metadata of a byte-level tokenizer of 300 tokens with BOS <s> and EOS <e>."""
    model = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), size=297)
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<think>", "<e>", "[PAD]"]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] + [1] * (len(tokens) - 4) + [4, 3, 5],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": len(tokens) - 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentencepiece_metadata(**changes) -> dict:
    """Returns the metadata of a SentencePiece BPE tokenizer with all bytes, as Llama 2's."""
    model = trained(None, TEXT[:90].replace(" ", "▁"), size=80)
    merged = ["".join(merge) for merge in model["merges"]]
    letters = sorted(set(model["vocab"]) - set(merged) - {"<s>"})
    pieces = [*merged, *letters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
