"""GGUF files: weights of the same Hugging Face directory, tokens of other tokenizers, errors."""

import flax.traverse_util
import jax
import numpy as np
import pytest

import models
from models.gguf.files import read_gguf, write_directory
from pallas_kernels.cpu import build
from pallas_kernels.cpu.packed import Packed, dequantize
from tests import gguf_cases as cases

LLAMA3_ROPE = models.Rope(500000.0, "llama3", 8.0, original_max_positions=8192)
CONFIGS = {
    "llama": cases.config(tie_embeddings=True),
    "llama, untied, head size 32": cases.config(head_dim=32, num_heads=2),
    "llama with biases": cases.config(qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama, linear": cases.config(positions=models.Rope(kind="linear", factor=4.0)),
    "llama 3.1": cases.config(positions=LLAMA3_ROPE, head_dim=64, num_heads=1, num_kv_heads=1),
    "qwen2": cases.config("qwen2", norm_eps=1e-6),
    "qwen2, yarn": cases.config(
        "qwen2", positions=models.Rope(1e6, "yarn", 4.0, original_max_positions=32)
    ),
    "qwen3": cases.config("qwen3", head_dim=32, tie_embeddings=True),
}


def rope_of(config):
    """The metadata and tensors of the rotary settings, as llama.cpp's converter writes them."""
    rope, prefix = config.rope, f"{config.family}.rope.scaling"
    if rope.kind == "llama3":
        inverse = rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        smooth = (8192 * inverse / (2 * np.pi) - 1) / 3
        divisors = 1 / ((1 - smooth) / rope.factor + smooth)
        divisors = np.where(smooth < 0, rope.factor, np.where(smooth > 1, 1, divisors))
        return {}, {"rope_freqs.weight": divisors.astype(np.float32)}
    if rope.kind == "default":
        return {}, {}
    metadata = {f"{prefix}.type": rope.kind, f"{prefix}.factor": rope.factor}
    if rope.kind == "yarn":
        metadata[f"{prefix}.original_context_length"] = rope.original_max_positions
    return metadata, {}


def write(path, config, tokenizer=None, drop=(), tensors=None, **changes):
    """Writes the GGUF file of a config; changes are metadata, with __ for dots."""
    rope_metadata, rope_tensors = rope_of(config)
    metadata = cases.metadata_of(config) | rope_metadata | (tokenizer or {})
    stored = cases.tensors_for(config)[0] | rope_tensors | (tensors or {})
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return cases.write(path, metadata, {k: v for k, v in stored.items() if k not in drop})


def converted(file, folder):
    folder.mkdir()
    write_directory(read_gguf(file), folder)
    return folder


def dense_params(checkpoint):
    """Yields the path and the values of each parameter; packed matrices are dequantized."""
    for path, x in flax.traverse_util.flatten_dict(checkpoint.params["params"]).items():
        name = "/".join(path).removesuffix("/weight")
        if kind := checkpoint.module.weights.of(name):
            x = dequantize(Packed(np.asarray(x), kind, (16 * len(x),)), np)
        yield path, np.asarray(x)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_model_is_the_hugging_face_one(name, tmp_path, logits_of):
    config = CONFIGS[name]
    folder = converted(write(tmp_path / "model.gguf", config), tmp_path / "converted")
    expected = cases.save_directory(tmp_path / "hf", config, cases.tensors_for(config)[1])
    found = models.load_checkpoint(folder, weights="none")
    right = models.load_checkpoint(expected)
    assert found.config == right.config
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, right.params))
    packed = models.load_checkpoint(folder)
    if not build.is_available():
        assert packed.module.weights is None
        return
    dense = {path: x for path, x in dense_params(packed)}
    expected_params = flax.traverse_util.flatten_dict(right.params["params"])
    assert dense.keys() == expected_params.keys()
    for path, x in dense.items():
        np.testing.assert_array_equal(x.reshape(expected_params[path].shape), expected_params[path])
    if name == "llama":
        tokens = np.arange(24).reshape(2, 12) % config.vocab_size
        both = [logits_of(c.module, c.params, tokens) for c in (found, right)]
        np.testing.assert_array_equal(*both)


# Tokenizers


def tokenizer_of(metadata, tmp_path):
    family = "qwen2" if metadata["tokenizer.ggml.pre"] == "qwen2" else "llama"
    config = cases.config(family, vocab_size=len(tokens(metadata)))
    file = write(tmp_path / "model.gguf", config, metadata)
    return models.load_tokenizer(converted(file, tmp_path / "out"))


def tokens(metadata):
    return metadata["tokenizer.ggml.tokens"]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "tekken", "falcon"])
def test_byte_level_tokens_decode_to_the_text(pre, tmp_path):
    metadata = cases.byte_level_metadata(pre)
    found = tokenizer_of(metadata, tmp_path)
    text = cases.TEXT if pre != "qwen2" else cases.TEXT.replace("e\u0301", "é")  # NFC
    assert found.decode(found(cases.TEXT, add_special_tokens=False)["input_ids"]) == text
    first = [0] if pre in ("llama-bpe", "tekken") else []  # as llama.cpp by default
    a = tokens(metadata).index("a")
    assert found("<think>a<e>")["input_ids"] == [*first, 297, a, 298]
    assert found.eos_token == "<e>" and "<think>" not in found.all_special_tokens


def test_tokens_may_be_empty(tmp_path):
    """llama.cpp names each by its id; here they have no text."""
    metadata = cases.byte_level_metadata("gpt-2")
    a, null = (tokens(metadata).index(token) for token in "aĀ")
    tokens(metadata)[null] = tokens(metadata)[299] = ""
    found = tokenizer_of(metadata, tmp_path)
    assert found("a<e>")["input_ids"] == [a, 298]
    assert found.decode([a, null, a, 299, a]) == "aaa"


def test_special_tokens_and_settings_of_a_tokenizer_are_kept(tmp_path):
    template = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}"
    tokenizer = cases.byte_level_metadata(
        "smollm", eot_token_id=297, padding_token_id=299, add_bos_token=True, add_eos_token=True
    )
    tokenizer["tokenizer.chat_template"] = template
    file = write(tmp_path / "model.gguf", cases.config(), tokenizer)
    folder = converted(file, tmp_path / "out")
    checkpoint, found = models.load_checkpoint(folder), models.load_tokenizer(folder)
    assert checkpoint.eos_token_ids == (298, 297)  # the end of a turn is one
    assert (checkpoint.bos_token_id, checkpoint.pad_token_id) == (0, 299)
    ids = found("a")["input_ids"]
    assert (ids[0], ids[-1]) == (0, 298)
    chat = [{"role": "user", "content": "a"}]
    assert found.apply_chat_template(chat, tokenize=False) == "<s>a<e>"


def test_the_end_of_a_turn_is_found_by_its_text(tmp_path):
    metadata = cases.byte_level_metadata("smollm")
    metadata["tokenizer.ggml.tokens"][299] = "<end_of_turn>"
    metadata["tokenizer.ggml.token_type"][299] = 3  # CONTROL
    folder = converted(write(tmp_path / "m.gguf", cases.config(), metadata), tmp_path / "out")
    assert models.load_checkpoint(folder).eos_token_ids == (298, 299)


def test_a_file_without_a_tokenizer_makes_a_directory_without_one(tmp_path):
    folder = converted(write(tmp_path / "model.gguf", cases.config()), tmp_path / "out")
    assert models.load_tokenizer(folder) is None


def sentencepiece_ids(text, metadata):
    """SentencePiece's BPE: merges the leftmost of the adjacent pairs with the highest score."""
    index = {token: i for i, token in enumerate(tokens(metadata))}
    scores = metadata["tokenizer.ggml.scores"]
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        merged = [a + b for a, b in zip(pieces, pieces[1:])]
        known = [(-scores[index[m]], i) for i, m in enumerate(merged) if m in index]
        if not known:
            break
        i = min(known)[1]
        pieces[i : i + 2] = [merged[i]]
    ids = []
    for piece in pieces:
        some = [f"<0x{byte:02X}>" for byte in piece.encode()] if piece not in index else [piece]
        ids += [index[token] for token in some]
    return ids


def test_sentencepiece_tokens_are_those_of_its_algorithm(tmp_path):
    metadata = cases.sentencepiece_metadata()
    found = tokenizer_of(metadata, tmp_path)
    for text in (cases.TEXT, " two  spaces", "x"):
        assert found(text)["input_ids"] == [1, *sentencepiece_ids(text, metadata)]
        assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text


# Errors


def without(metadata, name):
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


SMALL = cases.config(num_layers=1)
BYTES = cases.byte_level_metadata("smollm")
YARN = {"llama__rope__scaling__type": "yarn"}
ONES = {"tensors": {"rope_freqs.weight": np.full(8, 2, np.float32)}}
REFUSED = {
    "architecture": (
        {"general__architecture": "command-r"},
        "general.architecture='command-r' is not supported: it must be one of llama, qwen2, qwen3",
    ),
    "experts": ({"llama__expert_count": 8}, "a token uses from 1 to num_local_experts experts"),
    "rope": (
        {"llama__rope__scaling__type": "longrope"},
        "rope.scaling.type='longrope' is not supported: it must be one of none, linear, yarn",
    ),
    "unknown setting": ({"llama__logit_scale": 2.0}, "llama.logit_scale=2.0 is not supported"),
    "part of a head": ({"llama__rope__dimension_count": 8}, "8 is not supported: it must be 16"),
    "rope of several kinds": (YARN | ONES, "type='yarn' with rope_freqs.weight is not supported"),
    "other frequencies": (ONES, "rope_freqs.weight has other divisors than Llama 3.1"),
    "longrope": (
        {"tensors": {"rope_factors_short.weight": np.ones(8, np.float32)}},
        "(LongRoPE) is not supported: load the model's Hugging Face directory",
    ),
    "incomplete rope": (YARN, "llama.rope.scaling.factor is missing"),
    "no setting": ({"llama__block_count": None}, "llama.block_count is missing"),
    "no embedding": ({"drop": ["token_embd.weight"]}, "token_embd.weight is missing"),
    "unexpected tensor": (
        {"tensors": {"x.weight": np.ones((2, 64), np.float32)}},
        "unexpected x.w",
    ),
    "no such token": ({"tokenizer": BYTES | {"tokenizer.ggml.eos_token_id": 999}}, "=999 exceeds"),
    "parts": ({"split__count": 3}, "one of 3 parts: merge them with llama-gguf-split --merge"),
    "missing tensor": ({"drop": ["blk.0.attn_k.weight"]}, "missing blk.0.attn_k.weight"),
    "wrong shape": (
        {"tensors": {"output_norm.weight": np.ones(32, np.float32)}},
        "output_norm.weight has shape (32,), expected (64,)",
    ),
    "pre-tokenizer": (
        {"tokenizer": BYTES | {"tokenizer.ggml.pre": "command-r"}},
        "tokenizer.ggml.pre='command-r' is not supported: it must be one of gpt-2, mpt, smollm",
    ),
    "no merges": ({"tokenizer": without(BYTES, "merges")}, "tokenizer.ggml.merges is missing"),
    "more tokens than the model": (
        {"tokenizer": BYTES | {"tokenizer.ggml.tokens": [*tokens(BYTES), "<new>"]}},
        "tokenizer.ggml.tokens has 301 tokens, and token_embd.weight has 300 rows",
    ),
    "a token twice": (
        {"tokenizer": BYTES | {"tokenizer.ggml.tokens": [*tokens(BYTES)[:-1], "a"]}},
        f"tokenizer.ggml.tokens has 'a' with the ids {tokens(BYTES).index('a')} and 299: the file",
    ),
    "normalization": (
        {"tokenizer": BYTES | {"tokenizer.ggml.precompiled_charsmap": [1, 2]}},
        "SentencePiece's normalization is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_files_are_refused_with_their_name(name, tmp_path):
    changes, message = REFUSED[name]
    file = write(tmp_path / "model.gguf", SMALL, **changes)
    with pytest.raises(ValueError) as error:
        read_gguf(file)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value)


# Metadata of a merged file, as `llama-gguf-split --merge` leaves it.
MERGED = {"split__count": 0, "split__no": 0, "split__tensors__count": 12}


@pytest.mark.parametrize(
    ("wrong", "message", "right"),
    [
        ({"split__count": 3}, "merge them with llama-gguf-split --merge", MERGED),
        (
            {"llama__rope__dimension_count": 8},
            "it must be 16",
            {"llama__rope__dimension_count": 16},
        ),
        (
            {"llama__attention__causal": False},
            "it must be True",
            {"llama__attention__causal": True},
        ),
        (
            {"llama__rope__scaling__type": "longrope"},
            "it must be one of none, linear, yarn",
            {"llama__rope__scaling__type": "none"},
        ),
    ],
    ids=["parts", "part of a head", "causal", "rope"],
)
def test_what_an_error_about_a_file_asks_for_gives_the_model(wrong, message, right, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_gguf(write(tmp_path / "wrong.gguf", SMALL, **wrong))
    folders = [
        converted(write(tmp_path / f"{name}.gguf", SMALL, **changes), tmp_path / name)
        for name, changes in (("right", right), ("plain", {}))
    ]
    found, plain = (models.load_checkpoint(folder) for folder in folders)
    assert found.module == plain.module
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, plain.params))


def test_damaged_files_are_refused(tmp_path):
    whole = write(tmp_path / "model.gguf", SMALL, BYTES).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    sizes = {6, 20, 40, 200, len(whole) // 50, len(whole) // 2, len(whole) - 40}
    for size in sizes:
        damaged.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"not a complete GGUF file .it has {size} bytes"):
            read_gguf(damaged)
    for content in (b"", b"{}", b"PK\3\4 a wheel"):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match="is not a GGUF file: it begins with"):
            read_gguf(damaged)
    name = b"output_norm.weight"
    kind = whole.index(name) + len(name) + 4 + 8  # one dimension
    damaged.write_bytes(whole[:kind] + b"\xe7" + whole[kind + 1 :])
    with pytest.raises(ValueError, match="has an unknown tensor type: .*231.*; upgrade the"):
        read_gguf(damaged)
