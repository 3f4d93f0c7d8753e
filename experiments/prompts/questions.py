"""RULER's questions about paragraphs, from a local file in SQuAD's format.

The paragraph with the answer lies among others: of its own article first, which are the hardest to
tell apart, then of other ones, and all over again in a context longer than the file.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

import numpy as np

from experiments.prompts import sources
from experiments.prompts.haystack import room_beside
from experiments.prompts.prompt import Prompt, encode

START = "Some documents, and a question about them.\n\n"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its right answers, the number of its paragraph, and where it is from."""

    text: str
    answers: tuple[str, ...]
    paragraph: int
    source: str


@dataclasses.dataclass(frozen=True)
class Questions:
    """What a file asks.

    Attributes:
      paragraphs: their texts.
      articles: of which article each paragraph is.
      asked: the questions that have an answer.
    """

    paragraphs: list[str]
    articles: list[int]
    asked: list[Question]


def read(path: str) -> Questions:
    """Returns the paragraphs and questions of a file in the format of SQuAD 1.1 or 2.0.

    Raises:
      ValueError: the file has another format, no question with an answer, or one paragraph only.
    """
    file = pathlib.Path(path)
    paragraphs: list[str] = []
    articles: list[int] = []
    asked: list[Question] = []
    try:
        for number, article in enumerate(json.loads(sources.read(file))["data"]):
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(a["text"] for a in question["answers"]))
                    if answers:  # SQuAD 2.0 has questions without
                        source = f"{file.name} {question['id']}"
                        asked.append(
                            Question(question["question"], answers, len(paragraphs), source)
                        )
                paragraphs.append(paragraph["context"])
                articles.append(number)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: no JSON ({error.msg})") from error
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not in SQuAD's format, data / paragraphs / context and qas / question, id "
            f"and answers / text: {error!r}"
        ) from error
    if not asked or len(paragraphs) < 2:
        raise ValueError(
            f"{path} has {len(asked)} questions with answers about {len(paragraphs)} paragraphs: "
            "there must be a question, and a paragraph beside its own"
        )
    return Questions(paragraphs, articles, asked)


def question(tokenizer: Any, given: Questions, length: int, seed: int, row: int) -> Prompt:
    """Returns a prompt that asks a question about one of its paragraphs (RULER, §3).

    Every row asks another question. The first paragraph is cut at its beginning, to reach the
    length; the one with the answer is whole.

    Raises:
      TooShortError: there is no room for the paragraph with the answer and the question.
      ValueError: there is no question for this row.
    """
    if row >= len(given.asked):
        raise ValueError(
            f"the file has {len(given.asked)} questions with answers, and prompt {row} needs one "
            "of its own: ask for fewer prompts, or give another file"
        )
    chosen = given.asked[np.random.default_rng(seed).permutation(len(given.asked))[row]]
    rng = np.random.default_rng([seed, row])
    start = encode(tokenizer, START)
    answering = _block(tokenizer, given.paragraphs[chosen.paragraph])
    end = encode(tokenizer, f"Question: {chosen.text}\nAnswer:")
    room = room_beside(length, start, answering, end)
    blocks = [answering]
    for number in itertools.cycle(_others(given, chosen.paragraph, rng)):
        block = _block(tokenizer, given.paragraphs[number])
        if len(block) >= room:
            break
        blocks.append(block)
        room -= len(block)
    first = block[len(block) - room :]
    parts = [blocks[i] for i in rng.permutation(len(blocks))]
    tokens = np.concatenate([start, first, *parts, end]).astype(np.int32)
    return Prompt(tokens, chosen.answers, alternatives=True, source=chosen.source)


def _others(given: Questions, paragraph: int, rng: np.random.Generator) -> list[int]:
    """Returns the other paragraphs in random order, those of the same article before the rest."""
    drawn = [i for i in rng.permutation(len(given.paragraphs)).tolist() if i != paragraph]
    return sorted(drawn, key=lambda i: given.articles[i] != given.articles[paragraph])


@functools.lru_cache(maxsize=100_000)
def _block(tokenizer: Any, paragraph: str) -> list[int]:
    return encode(tokenizer, f"Document: {paragraph}\n\n")
