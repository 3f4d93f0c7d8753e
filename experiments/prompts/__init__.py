"""Prompts for experiments: always the same ones for the same settings, of exactly the asked length.

| kind | a prompt is | path |
|---|---|---|
| `stdlib` | text of Python's library that no embedded model was trained on | none |
| `files` | text of yours | a text file, a .jsonl file (field `text`), or a folder of them |
| `pg19` | a stretch of one book | a folder of `<book id>.txt`, or a .jsonl file (field `text`) |
| `longbench` | a question about a long text | a folder of `<task>.jsonl`, or one of them |
| `needle`, ... | a task in the manner of RULER (`ruler.py`) | its haystack, as for `files` |
| `qa` | RULER's questions about paragraphs | a .json file in SQuAD's format |
| `random` | tokens drawn evenly, for models without weights | none |

Nothing is downloaded here. PG-19 is at huggingface.co/datasets/deepmind/pg19, LongBench at
huggingface.co/datasets/THUDM/LongBench, SQuAD at rajpurkar.github.io/SQuAD-explorer:

    mkdir pg19 && gsutil -m cp "gs://deepmind-gutenberg/test/*" pg19
    wget https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip && unzip data.zip
    wget https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json

LongBench's own wording of its tasks is used where its `dataset2prompt.json` (in `config` of
github.com/THUDM/LongBench) lies beside the tasks, and else a plain one.

Prompts begin with what the target's tokenizer puts before every text. A special token that is
written out in a text is text, and no token.
"""

import difflib
from typing import Any

import numpy as np

from experiments.prompts import longbench, ruler, sources, stretches
from experiments.prompts.prompt import Prompt, opening, score
from experiments.prompts.sources import FILES, LONGBENCH, PG19, QA, RANDOM, STDLIB, fingerprint
from experiments.prompts.stretches import cut, least_repetitive, stdlib_stream

__all__ = [
    "KINDS",
    "RANDOM",
    "STDLIB",
    "TEXTS",
    "Prompt",
    "check",
    "cut",
    "fingerprint",
    "least_repetitive",
    "make",
    "random",
    "score",
    "stdlib_stream",
]

TEXTS = (STDLIB, FILES, PG19)  # these ask nothing, so of several prompts some can be chosen
KINDS = (*TEXTS, LONGBENCH, *ruler.TASKS, RANDOM)
NEEDED = {
    FILES: "a text file, a .jsonl file whose lines have a field 'text', or a folder of them",
    PG19: "a folder of PG-19's books, <book id>.txt, or a .jsonl file whose lines have a field "
    "'text'",
    LONGBENCH: "the folder of LongBench's <task>.jsonl files, or one of them",
    QA: "a .json file in SQuAD's format",
}


def check(kind: str, path: str) -> None:
    """Raises ValueError if no prompts of this kind can come from this path ("": none is given).

    An unknown kind; a path that is missing, not needed, empty or unreadable. No more than the
    beginning of a file is read.
    """
    if kind not in KINDS:
        nearest = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0)[0]
        raise ValueError(
            f"{kind!r} is no kind of prompts; did you mean {nearest!r}? (kinds: {', '.join(KINDS)})"
        )
    if path and kind in (STDLIB, RANDOM, *ruler.WITHOUT_HAYSTACK):
        raise ValueError(
            f"{kind} takes no path, and {path!r} would be ignored: remove it, or choose another "
            f"kind, such as {FILES}"
        )
    if kind in NEEDED and not path:
        raise ValueError(f"{kind} needs a path: give {NEEDED[kind]}")
    if path:
        sources.check(kind, path)


def make(
    kind: str, tokenizer: Any, path: str, count: int, context: int, seed: int = 0
) -> list[Prompt]:
    """Returns `count` prompts of `context` tokens each, no two the same.

    Args:
      kind: one of `KINDS`, but for `random`.
      tokenizer: the target's.
      path: as the table above says; "" where none is needed.
      count, context: how many, and how long.
      seed: at least 0. Of texts it chooses the places, of questions which are asked, of tasks all
        that is random.

    Raises:
      ValueError: as `check`; or the text is too short, the context too short for the task, a file
        is not as its format says, or there is no tokenizer.
    """
    check(kind, path)
    if kind == RANDOM:
        raise ValueError("random prompts need no tokenizer: call prompts.random")
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: prompts are made from text")
    if min(count, context) < 1 or seed < 0:
        raise ValueError(
            f"count={count}, context={context}, seed={seed}: the first two must be at least 1, the "
            "seed at least 0"
        )
    if context <= len(opening(tokenizer)):
        raise ValueError(
            f"context={context} has no room for text: the tokenizer puts {len(opening(tokenizer))} "
            "special tokens before it"
        )
    if kind in (STDLIB, FILES):
        made = stretches.of_stream(kind, tokenizer, path, count, context, seed)
    elif kind == PG19:
        made = stretches.of_books(tokenizer, path, count, context, seed)
    elif kind == LONGBENCH:
        made = longbench.make(tokenizer, path, count, context, seed)
    else:
        made = ruler.make(kind, tokenizer, path, count, context, seed)
    _check_they_differ(kind, [prompt.tokens for prompt in made])
    return made


def random(vocab_size: int, count: int, context: int, seed: int = 0) -> list[Prompt]:
    """Returns `count` prompts of `context` tokens each, drawn evenly from a vocabulary.

    They say nothing, and are there to time models without weights, which need no tokenizer.
    """
    rows = (np.random.default_rng([seed, row]) for row in range(count))
    return [Prompt(rng.integers(vocab_size, size=context, dtype=np.int32)) for rng in rows]


def _check_they_differ(kind: str, rows: list[np.ndarray]) -> None:
    """Raises ValueError if two rows are the same: copies would be measured as independent."""
    first: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        same = first.setdefault(row.tobytes(), number)
        if same != number:
            raise ValueError(
                f"prompts {same} and {number} of {kind} are the same {len(row)} tokens: the text "
                "repeats itself; give another text, or choose a longer context or fewer prompts"
            )
