"""Small tokenizers of each kind of decoder, trained on a few words."""

import functools
import json

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from magicjax.decoding.reasoning import CHANNEL, END_THINK, MESSAGE, ROLE, THINK

TEXT = "The cat's 12 hats: don't end - \"quoted\". Hello world, who are you? (Nobody.) "
FOREIGN = "été ½ नमस्ते 你好 🙂 "
UNKNOWN, BEGIN, END, TURN = SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
# A conversation and its answer in channels, as gpt-oss writes them.
ASKED = f"{ROLE}user{MESSAGE}hi{TURN}{ROLE}assistant"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}A greeting. 你{TURN}"
ANSWER = f"{ANALYSIS}{ROLE}assistant{CHANNEL}final{MESSAGE}Hello!"
CHANNELS = (
    f"{{% for m in messages %}}{ROLE}{{{{ m.role }}}}{MESSAGE}{{{{ m.content }}}}{TURN}"
    f"{{% endfor %}}{ROLE}assistant"
)
# The begin of an answer as templates render it: Qwen3's, and that of DeepSeek-R1's distillations.
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
QWEN3 = (
    TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
DEEPSEEK = TURNS.replace("m.content", "m.content.split('</think>')[-1]") + "{{ '<think>\n' }}"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _trained(tokenizer, trainer, texts=(TEXT, FOREIGN)):
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level():
    """As GPT-2's, Llama 3's and Qwen's."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    return _trained(made, trainers.BpeTrainer(vocab_size=320, **options))


def _byte_fallback():
    """As Llama 2's: other characters are bytes, and the first space is stripped."""
    made = tokenizers.Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = [*SPECIAL, *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special, show_progress=False)
    described = json.loads(_trained(made, trainer, (TEXT,)).to_str())
    described["pre_tokenizer"] = None
    described["model"] |= dict(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    described["added_tokens"] = described["added_tokens"][: len(SPECIAL)]
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return made


def _metaspace():
    """As T5's."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    options = dict(unk_token=UNKNOWN, special_tokens=SPECIAL, show_progress=False)
    return _trained(made, trainers.UnigramTrainer(vocab_size=120, **options))


def _word_piece():
    """As BERT's."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    options = dict(special_tokens=SPECIAL, show_progress=False)
    return _trained(made, trainers.WordPieceTrainer(vocab_size=150, **options))


def _suffixes():
    """As GPT-1's: tokens say where words end."""
    made = tokenizers.Tokenizer(models.BPE(unk_token=UNKNOWN, end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder()
    options = dict(special_tokens=SPECIAL, show_progress=False, end_of_word_suffix="</w>")
    return _trained(made, trainers.BpeTrainer(vocab_size=150, **options))


KINDS = {
    "byte-level": _byte_level,
    "byte-fallback": _byte_fallback,
    "metaspace": _metaspace,
    "WordPiece": _word_piece,
    "suffixes": _suffixes,
}


@functools.cache
def make(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of a kind, with the tokens `SPECIAL`."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), bos_token=BEGIN, eos_token=END, unk_token=UNKNOWN
    )


@functools.cache
def with_channels() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer with the special tokens of gpt-oss."""
    backend = KINDS["byte-level"]()
    backend.add_special_tokens([ROLE, CHANNEL, MESSAGE])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHANNELS)


@functools.cache
def with_thinking(markers: str = "added", template: str = QWEN3):
    """Returns a tokenizer whose template marks reasoning.

    Args:
      markers: what they are in the vocabulary: "text", "added" tokens with text, or "special" ones.
      template: of chats.
    """
    backend = KINDS["byte-level"]()
    names = [THINK, END_THINK, "<tool_call>", "</tool_call>"]
    if markers != "text":
        backend.add_tokens([tokenizers.AddedToken(x, special=False) for x in names])
    if markers == "special":
        backend.add_special_tokens(names[:2])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, chat_template=template
    )
