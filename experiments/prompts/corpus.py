"""The source of Python's standard library, a text that every machine has.

Whole modules are held out, chosen by a hash of their path, so that prompts contain no training
text. Files of a package are adjacent, so that distant context is informative.
"""

import dataclasses
import hashlib
import pathlib
import platform
import sysconfig

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data"}
HELD_OUT_SHARE = 16  # one module in 16 is held out


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its path below the library's root, and its text."""

    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class TokenizedCorpus:
    """A tokenized corpus.

    Attributes:
      train, held_out: int32 tokens.
      bytes_per_token: of the held-out text.
      digest: SHA-256 of all modules.
      source: its name in model cards.
      selection: what is held out.
    """

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float
    digest: str
    source: str
    selection: str = "whole modules, selected by a hash of their path"


def library(root: str | pathlib.Path | None = None) -> list[Module]:
    """Returns the modules of the standard library, sorted by path, without tests and tables.

    Raises:
      FileNotFoundError: `root` contains no Python source.
    """
    root = pathlib.Path(root or sysconfig.get_path("stdlib"))
    paths = sorted(
        p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts[:-1])
    )
    modules = []
    for path in paths:
        try:
            modules.append(Module(path.relative_to(root).as_posix(), path.read_text("utf-8")))
        except UnicodeDecodeError:
            continue  # some library files declare another encoding
    if not modules:
        raise FileNotFoundError(
            f"no Python source below {root}: give the root of a standard library"
        )
    return modules


def split(modules: list[Module]) -> tuple[list[Module], list[Module]]:
    """Returns (training modules, held-out modules), split by the hash of each path."""

    def held_out(module: Module) -> bool:
        digest = hashlib.sha256(module.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0

    return [m for m in modules if not held_out(m)], [m for m in modules if held_out(m)]


def data_hash(modules: list[Module]) -> str:
    """Returns the SHA-256 of all paths and texts, which identifies the data in model cards."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(module.path.encode() + b"\0" + module.text.encode() + b"\0")
    return digest.hexdigest()


def train_tokenizer(modules: list[Module], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE of exactly `vocab_size` tokens; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m.text for m in modules), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, modules: list[Module], end: int | None = None) -> np.ndarray:
    """Returns one int32 stream: every module's tokens, each followed by `end` (None: by `END`)."""
    end = tokenizer.token_to_id(END) if end is None else end
    encoded = tokenizer.encode_batch([m.text for m in modules], add_special_tokens=False)
    parts = [np.array([*e.ids, end], np.int32) for e in encoded]
    return np.concatenate([np.zeros(0, np.int32), *parts])


def read(
    tokenizer: Tokenizer, end: int | None = None, root: str | pathlib.Path | None = None
) -> TokenizedCorpus:
    """Returns the tokens of the modules below `root` (None: of the standard library), split."""
    modules = library(root)
    trained_on, held_out = split(modules)
    held_out_tokens = encode(tokenizer, held_out, end)
    size = sum(len(module.text.encode()) for module in held_out)
    return TokenizedCorpus(
        train=encode(tokenizer, trained_on, end),
        held_out=held_out_tokens,
        bytes_per_token=size / max(1, len(held_out_tokens)),
        digest=data_hash(modules),
        source=f"the Python source in `{pathlib.Path(root).name}`"
        if root
        else f"the source of Python {platform.python_version()}'s standard library (without tests)",
    )
