"""Prompts of an exact length, deterministic for given settings.

The kinds are those of the table in docs/experiment_prompts.md, which has the commands that fetch
files.

Prompts of text begin with the special tokens that the target's tokenizer puts before a text. All
others are conversations by the tokenizer's chat template, if it has one (`conversation.py`). The
text of a special token inside a prompt is encoded as text.
"""

from typing import Any

import numpy as np

from experiments.prompts import excerpts, sources
from experiments.prompts.conversation import uses_template
from experiments.prompts.excerpts import cut, least_repetitive, stdlib_stream
from experiments.prompts.prompt import Prompt, leading_tokens, score
from experiments.prompts.sources import (
    CHAT,
    DATASET,
    FILES,
    LONGBENCH,
    PG19,
    QA,
    RANDOM,
    STDLIB,
    fingerprint,
)
from experiments.prompts.tasks import dialog, longbench, ruler
from magicjax.suggest import did_you_mean

__all__ = [
    "KINDS",
    "RANDOM",
    "STDLIB",
    "TEXTS",
    "Prompt",
    "check",
    "cut",
    "fingerprint",
    "known_kind",
    "least_repetitive",
    "make",
    "random",
    "score",
    "stdlib_stream",
    "uses_template",
]

TEXTS = (STDLIB, FILES, PG19)  # plain text without a task
KINDS = (*TEXTS, CHAT, DATASET, LONGBENCH, *ruler.TASKS, RANDOM)
PATHS = {
    FILES: "a text file, a .jsonl file with the field 'text', or a folder of them",
    PG19: "a folder of PG-19's <book id>.txt, or a .jsonl file with the field 'text'",
    LONGBENCH: "a folder of LongBench's <task>.jsonl files, or one of them",
    DATASET: "a benchmark's .jsonl or .json file, or a folder of them",
    QA: "a .json file in SQuAD's format",
}


def known_kind(kind: str) -> str:
    """Returns a kind of prompts; raises ValueError if it does not exist."""
    if kind not in KINDS:
        raise ValueError(
            f"{kind!r} is not a kind of prompts{did_you_mean(kind, KINDS)} "
            f"(kinds: {', '.join(KINDS)})"
        )
    return kind


def check(kind: str, path: str) -> None:
    """Raises ValueError if a kind does not exist or cannot be made from a path ("": no path).

    Reads at most the beginning of one file.
    """
    known_kind(kind)
    if path and kind in (STDLIB, CHAT, RANDOM, *ruler.WITHOUT_PATH):
        raise ValueError(f"{kind} takes no path: remove {path!r}, or choose {FILES}")
    if kind in PATHS and not path:
        raise ValueError(f"{kind} needs a path: give {PATHS[kind]}")
    if path:
        sources.check(kind, path)


def make(
    kind: str,
    tokenizer: Any,
    path: str,
    count: int,
    context: int,
    seed: int = 0,
    chat_template: bool | None = None,
) -> list[Prompt]:
    """Returns `count` different prompts of `context` tokens each.

    Args:
      kind: one of `KINDS` except `random`.
      tokenizer: the target's.
      path: of the files that the kind reads; "" where none are needed.
      count, context: number and length of the prompts.
      seed: at least 0; selects positions in texts, questions, and all random parts of tasks.
      chat_template: whether tasks are conversations by the tokenizer's chat template; None: if it
        has one. Kinds of text have none.

    Raises:
      ValueError: as `check`; the text or the context is too short, a file has another format, or
        the tokenizer is None, or `chat_template` is True and the tokenizer has no chat template.
    """
    check(kind, path)
    if kind == RANDOM:
        raise ValueError("random prompts need no tokenizer: call prompts.random")
    if min(count, context) < 1 or seed < 0:
        raise ValueError(
            f"count={count}, context={context}, seed={seed}: the first two must be at least 1, the "
            "seed at least 0"
        )
    if context <= len(leading_tokens(tokenizer)):
        raise ValueError(
            f"context={context} is too small: the tokenizer puts "
            f"{len(leading_tokens(tokenizer))} special tokens before a text"
        )
    if kind in (STDLIB, FILES):
        prompts = excerpts.from_stream(kind, tokenizer, path, count, context, seed)
    elif kind == PG19:
        prompts = excerpts.from_books(tokenizer, path, count, context, seed)
    elif kind == LONGBENCH:
        prompts = longbench.make(tokenizer, path, count, context, seed, chat_template)
    elif kind in (CHAT, DATASET):
        prompts = dialog.make(kind, tokenizer, path, count, context, seed, chat_template)
    else:
        prompts = ruler.make(kind, tokenizer, path, count, context, seed, chat_template)
    _check_distinct(kind, [prompt.tokens for prompt in prompts])
    return prompts


def random(vocab_size: int, count: int, context: int, seed: int = 0) -> list[Prompt]:
    """Returns `count` prompts of `context` uniformly drawn tokens, which need no tokenizer."""
    rows = (np.random.default_rng([seed, row]) for row in range(count))
    return [Prompt(rng.integers(vocab_size, size=context, dtype=np.int32)) for rng in rows]


def _check_distinct(kind: str, rows: list[np.ndarray]) -> None:
    """Raises ValueError if two rows are equal: copies would count as independent requests."""
    first: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        other = first.setdefault(row.tobytes(), number)
        if other != number:
            raise ValueError(
                f"prompts {other} and {number} of {kind} are the same {len(row)} tokens, because "
                "the text repeats: use another text, a longer context, or fewer prompts"
            )
