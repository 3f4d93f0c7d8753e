"""Tokenizers of Hugging Face directories: the ids of tokenizer.json, the names of other files."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.processors import TemplateProcessing

import models
from tests.models.tokenizer_texts import texts

TEXTS = texts()
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
TO_SPACES = decoders.Replace("▁", " ")
FROM_SPACES = normalizers.Replace(" ", "▁")
BOS = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def trained(model, trainer, normalizer=None, pre=None, decoder=None, bos=False, train_with=None):
    """Returns a tokenizer of 600 tokens, trained on the texts with one pre-tokenizer or another."""
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if (first := train_with or pre) is not None:
        made.pre_tokenizer = first
    settings = dict(vocab_size=600, show_progress=False, special_tokens=SPECIAL)
    made.train_from_iterator(TEXTS, trainer(**settings))
    made.pre_tokenizer, made.decoder = pre, decoder
    if bos:
        made.post_processor = BOS
    return made


def byte_level(pre, normalizer=None, bos=False, **options):
    """Returns a tokenizer of bytes whose tokens reach across the pieces of the pre-tokenizer."""

    def trainer(**settings):
        return trainers.BpeTrainer(initial_alphabet=GPT2.alphabet(), **settings)

    model = BPE(**options)
    return trained(model, trainer, normalizer, pre, decoders.ByteLevel(), bos, train_with=BYTES)


def byte_fallback(*steps, pre=None, strip=False, bos=False):
    """Returns a tokenizer as SentencePiece's: BPE of characters, and bytes for unknown ones."""

    def trainer(**settings):
        every = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
        return trainers.BpeTrainer(**settings | dict(special_tokens=every, limit_alphabet=60))

    after = [decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * strip]
    model = BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    normalizer = normalizers.Sequence(list(steps))
    made = trained(model, trainer, normalizer, pre, decoders.Sequence([TO_SPACES, *after]), bos)
    raw = json.loads(made.to_str())
    raw["added_tokens"] = raw["added_tokens"][:3]  # bytes are no added tokens
    return Tokenizer.from_str(json.dumps(raw))


FALCON = sequence(
    *(pre_tokenizers.Punctuation("contiguous"), GPT2, pre_tokenizers.Digits()),
    split("[0-9][0-9][0-9]"),
)
GEMMA = pre_tokenizers.Split(" ", "merged_with_previous")
PREPEND = normalizers.Prepend("▁")
# (model_type, tokenizer_class, the tokenizer, further settings) of published models.
KINDS = {
    "GPT-2": ("gpt2", "GPT2Tokenizer", lambda: byte_level(GPT2), {}),
    "Llama 3": (
        *("llama", "PreTrainedTokenizerFast"),
        lambda: byte_level(sequence(split(WORDS), BYTES), bos=True, ignore_merges=True),
        {},
    ),
    "DeepSeek-R1-Distill-Llama": (
        *("llama", "LlamaTokenizerFast"),
        lambda: byte_level(sequence(split(WORDS), BYTES), bos=True),
        {"add_bos_token": True, "legacy": True},
    ),
    "SmolLM2": (
        *("llama", "GPT2Tokenizer"),
        lambda: byte_level(sequence(DIGITS, GPT2)),
        {"add_prefix_space": False},
    ),
    "Qwen2.5": (
        *("qwen2", "Qwen2Tokenizer"),
        lambda: byte_level(sequence(split(WORDS), BYTES), normalizers.NFC()),
        {"add_bos_token": False},
    ),
    "Mistral Nemo": (
        *("mistral", "GPT2Tokenizer"),
        lambda: byte_level(sequence(split(WORDS), BYTES), bos=True),
        {"add_bos_token": True},
    ),
    "Falcon": ("falcon", "PreTrainedTokenizerFast", lambda: byte_level(FALCON), {}),
    "MPT": (
        *("mpt", "GPTNeoXTokenizer"),
        lambda: byte_level(GPT2, normalizers.NFC()),
        {"add_prefix_space": True},
    ),
    "Llama 2": (
        *("llama", "LlamaTokenizer"),
        lambda: byte_fallback(PREPEND, FROM_SPACES, strip=True, bos=True),
        {"add_bos_token": True, "legacy": False},
    ),
    "Yi": (
        *("llama", "LlamaTokenizer"),
        lambda: byte_fallback(FROM_SPACES),
        {"add_bos_token": False, "legacy": True},
    ),
    "Gemma 2": (
        *("gemma2", "GemmaTokenizer"),
        lambda: byte_fallback(FROM_SPACES, pre=GEMMA, bos=True),
        {},
    ),
    "Phi-3": (
        *("phi3", "LlamaTokenizer"),
        lambda: byte_fallback(PREPEND, FROM_SPACES, strip=True),
        {"add_bos_token": True, "bos_token": None},  # no BOS to add
    ),
    "Unigram": (
        *("llama", "T5Tokenizer"),
        lambda: trained(
            *(Unigram(), lambda **settings: trainers.UnigramTrainer(unk_token="<unk>", **settings)),
            *(normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace()),
        ),
        {},
    ),
    "WordPiece": (
        *("llama", "BertTokenizer"),
        lambda: trained(
            *(WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
            *(normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()),
            decoders.WordPiece(),
        ),
        {"do_lower_case": True, "clean_up_tokenization_spaces": True},
    ),
    "words": (
        *("llama", "TokenizersBackend"),
        lambda: trained(
            *(WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
            *(None, pre_tokenizers.Whitespace()),
        ),
        {},
    ),
}


def write(path, tokenizer=None, **files):
    """Writes tokenizer.json and other files; a name has __ for the dot."""
    path.mkdir(exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_tokenizer_json(kind, tmp_path):
    model_type, named, make, settings = KINDS[kind]
    own = make()
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": named, **settings}
    path = write(
        tmp_path, own, tokenizer_config__json=names, config__json={"model_type": model_type}
    )
    own, found = Tokenizer.from_file(str(path / "tokenizer.json")), models.load_tokenizer(path)
    assert found.get_vocab() == own.get_vocab(with_added_tokens=True)
    assert any(len(own.encode(text).ids) > 3 for text in TEXTS)
    for text in (*TEXTS, "", "<s>a</s> b"):
        ids = own.encode(text).ids
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == own.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def plain():
    """A tokenizer of bytes that adds no token."""
    return byte_level(GPT2)


TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


def test_other_files_name_special_tokens_and_have_the_template(plain, tmp_path):
    path = write(
        tmp_path,
        plain,
        config__json="not read",
        tokenizer_config__json={
            "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True},
            "eos_token": "</s>",
            "unk_token": None,
            "pad_token": "",
            "image_token": "<unk>",
            "additional_special_tokens": ["<|im_end|>"],
            "added_tokens_decoder": {},
            "chat_template": "from the settings",
            "add_special_tokens": True,  # the name of a method
            "model_max_length": 4096,
            "padding_side": "left",
        },
        special_tokens_map__json={"bos_token": "</s>"},  # older than added_tokens_decoder
        chat_template__jinja=TEMPLATE + "{{ image_token }}",
    )
    found = models.load_tokenizer(path)
    assert (found.bos_token_id, found.eos_token_id) == (1, 2)
    assert (found.unk_token, found.pad_token) == (None, None)
    assert found.extra_special_tokens == ["<|im_end|>"]
    assert found.convert_tokens_to_ids("<|im_end|>") == len(plain.get_vocab())
    assert found.decode([1, 2, *plain.encode("a").ids], skip_special_tokens=True) == "a"
    assert found.apply_chat_template(HI, tokenize=False) == "<s>hi<unk>"
    assert (found.model_max_length, found.padding_side) == (4096, "left")
    found.save_pretrained(tmp_path / "saved")
    again = models.load_tokenizer(tmp_path / "saved")
    assert again.special_tokens_map == found.special_tokens_map
    assert again.apply_chat_template(HI, tokenize=False) == "<s>hi<unk>"


def test_older_files_name_special_tokens_in_a_file_of_their_own(plain, tmp_path):
    path = write(
        tmp_path,
        plain,
        tokenizer_config__json={"bos_token": "</s>", "chat_template": TEMPLATE},
        special_tokens_map__json={
            "bos_token": {"content": "<s>", "lstrip": False},
            "additional_special_tokens": ["<unk>"],
        },
    )
    found = models.load_tokenizer(path)
    assert (found.bos_token, found.extra_special_tokens) == ("<s>", ["<unk>"])
    assert found.apply_chat_template(HI, tokenize=False) == "<s>hi"


def test_templates_have_names(plain, tmp_path):
    path = write(tmp_path, plain, chat_template__jinja=TEMPLATE)
    write(path / "additional_chat_templates", tool_use__jinja="tools")
    assert models.load_tokenizer(path).chat_template == {"default": TEMPLATE, "tool_use": "tools"}
    named = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "documents"}]
    path = write(tmp_path / "older", plain, tokenizer_config__json={"chat_template": named})
    assert models.load_tokenizer(path).chat_template == {"default": TEMPLATE, "rag": "documents"}


@pytest.mark.parametrize("adds", [{}, {"bos": True}, {"eos": True}, {"bos": True, "eos": True}])
def test_bos_and_eos_are_added_if_tokenizer_json_adds_none(adds, plain, tmp_path):
    settings = {f"add_{name}_token": name in adds for name in ("bos", "eos")}
    settings |= {"bos_token": "<s>", "eos_token": "</s>"}
    (a,) = plain.encode("a").ids
    found = models.load_tokenizer(write(tmp_path, plain, tokenizer_config__json=settings))
    assert found("a")["input_ids"] == [1] * ("bos" in adds) + [a] + [2] * ("eos" in adds)
    own = Tokenizer.from_str(plain.to_str())
    own.post_processor = BOS
    found = models.load_tokenizer(write(tmp_path, own, tokenizer_config__json=settings))
    assert found("a")["input_ids"] == [1, a]  # as tokenizer.json says


def test_tokens_that_tokenizer_json_lacks_get_their_ids(plain, tmp_path):
    size, flags = len(plain.get_vocab()), {"lstrip": False, "normalized": False}
    own = Tokenizer.from_str(plain.to_str())
    own.add_tokens([AddedToken("<own>", rstrip=True, normalized=False)])
    listed = {
        size + 2: {"content": "<end>", "special": True, **flags},
        size + 1: {"content": "<think>", "special": False, **flags},
        size: {"content": "<own>", "rstrip": False, **flags},
    }
    settings = {"eos_token": "<end>", "added_tokens_decoder": listed}
    found = models.load_tokenizer(write(tmp_path / "a", own, tokenizer_config__json=settings))
    ids = [size + 1, size, *plain.encode("a").ids, size + 2]  # the space belongs to <own>
    assert found("<think><own> a<end>")["input_ids"] == ids
    assert found.decode(ids, skip_special_tokens=True) == "<think><own>a"
    added = {"<end>": size + 2, "<think>": size + 1, "<own>": size}
    files = {"tokenizer_config__json": {"eos_token": "<end>"}, "added_tokens__json": added}
    assert models.load_tokenizer(write(tmp_path / "b", own, **files))("<end>")["input_ids"] == [
        size + 2
    ]


def test_other_files_are_read_by_transformers_if_there_is_no_tokenizer_json(plain, tmp_path):
    raw = json.loads(plain.to_str())["model"]
    path = write(
        tmp_path,
        vocab__json=raw["vocab"],
        merges__txt="\n".join(["#version: 0.2", *map(" ".join, raw["merges"])]),
        tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>"},
        config__json={"model_type": "gpt2"},
    )
    expected = [plain.encode(text).ids for text in TEXTS]
    assert [models.load_tokenizer(path)(text)["input_ids"] for text in TEXTS] == expected
    (path / "tokenizer_config.json").unlink()  # as of files of 2020
    assert [models.load_tokenizer(path)(text)["input_ids"] for text in TEXTS] == expected
    (path / "merges.txt").unlink()  # transformers makes a tokenizer without tokens of some families
    assert models.load_tokenizer(path) is None


def test_a_length_at_which_tokenizer_json_cuts_or_pads_has_no_effect(plain, tmp_path):
    own = Tokenizer.from_str(plain.to_str())
    own.enable_truncation(4)
    own.enable_padding(length=8)
    found = models.load_tokenizer(write(tmp_path, own, tokenizer_config__json={}))
    ids = [plain.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert any(len(row) > 8 for row in ids) and any(len(row) < 8 for row in ids)
    assert [found(text)["input_ids"] for text in TEXTS] == ids
    assert [found.encode(text, add_special_tokens=False) for text in TEXTS] == ids


def test_a_byte_order_mark_before_tokenizer_json_has_no_effect(plain, tmp_path):
    own = Tokenizer.from_str(plain.to_str())
    own.add_tokens([AddedToken("<own>", rstrip=True)])
    own.enable_truncation(4)
    size = len(plain.get_vocab())
    listed = {size: {"content": "<own>"}, size + 1: {"content": "<end>", "special": True}}
    settings = {"eos_token": "<end>", "added_tokens_decoder": listed}
    path = write(tmp_path, own, tokenizer_config__json=settings)
    right, file = models.load_tokenizer(path), path / "tokenizer.json"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    found = models.load_tokenizer(path)
    for text in (*TEXTS, "a<own> b<end>"):
        assert found(text)["input_ids"] == right(text)["input_ids"]
    assert (found.eos_token_id, len(found)) == (size + 1, size + 2)
    assert str(found.added_tokens_decoder) == str(right.added_tokens_decoder)


def test_the_names_of_all_models_are_not_imported(plain, tmp_path):
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}
    path = write(tmp_path, plain, tokenizer_config__json=settings)
    code = (
        "import sys, models; models.load_tokenizer(sys.argv[1]); "
        "print([name for name in sys.modules if name.startswith('transformers.models.')])"
    )
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
