"""Questions of benchmarks, as conversations of exact length.

A question about a long text is one message; the text loses its middle. Other questions come after
earlier turns: as many answered questions as fit (those of the same file, or of `chat`), and in
front of them a quotation of Python's documentation, which is cut to fit.
"""

import bisect
import functools
import itertools
import math
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.prompts import sources
from experiments.prompts.conversation import around_messages, uses_template
from experiments.prompts.prompt import Prompt, encode, encode_cached, join, without_middle
from experiments.prompts.tasks import docs, record_formats
from experiments.prompts.tasks.record_formats import Record

QUOTE = "Quote some sections of Python's documentation."
QUOTED = 16  # tokens of the quotation, at least

_encode = functools.lru_cache(maxsize=8192)(encode)


def make(
    kind: str,
    tokenizer: Any,
    path: str,
    count: int,
    context: int,
    seed: int,
    template: bool | None = None,
) -> list[Prompt]:
    """Returns prompts of all categories, interleaved; the seed chooses questions and examples.

    A later turn of a record is a question of its own, if the turns before it are answered.

    Raises:
      ValueError: too few questions suit the context, or a file has another layout.
    """
    uses_template(tokenizer, template)
    records = record_formats.read(kind, path)
    examples = [r for r in records if len(r.replies) == len(r.turns)]
    examples = examples or record_formats.read(sources.CHAT, "")
    made: list[Prompt] = []
    bounds: list[tuple[int, float]] = []  # the contexts that suit each question
    for number, (record, turn) in enumerate(_interleaved(records, seed)):
        if record.context:
            min_context, max_context, tokens = _about_text(tokenizer, template, record, context)
        else:
            rng = np.random.default_rng([seed, number])
            others = [examples[i] for i in rng.permutation(len(examples))]
            others = [other for other in others if other is not record]
            min_context, max_context, tokens = _after_turns(
                tokenizer, template, record, turn, others, context, rng
            )
        bounds.append((min_context, max_context))
        if tokens is not None:
            prompt = Prompt(
                tokens,
                record.answer,
                alternatives=True,
                source=record.source,
                category=record.category,
                final=record.final,
            )
            made.append(prompt)
        if len(made) == count:
            return made
    remedy = "use fewer prompts, or give more questions"
    shortest = sorted(min_context for min_context, _ in bounds)[:count]
    longest = sorted((max_context for _, max_context in bounds), reverse=True)[:count]
    if len(bounds) >= count and shortest[-1] > context:
        remedy = f"choose a context of at least {shortest[-1]}, or {remedy}"
    elif len(bounds) >= count and longest[-1] < context:
        remedy = f"choose a context of at most {longest[-1]}, or {remedy}"
    raise ValueError(
        f"{len(made)} of the {len(bounds)} questions of {path or kind} suit {count} prompts of "
        f"context={context}: {remedy}"
    )


def _interleaved(records: list[Record], seed: int) -> list[tuple[Record, int]]:
    """Returns (record, turn) of every question, one of each category, then the next of each."""
    queues: dict[str, list[tuple[Record, int]]] = {}
    for record in records:
        asked = range(min(len(record.turns), len(record.replies) + 1))
        queues.setdefault(record.category, []).extend((record, turn) for turn in asked)
    shuffled = [
        [queue[i] for i in np.random.default_rng([seed, index]).permutation(len(queue))]
        for index, queue in enumerate(queues.values())
    ]
    return list(filter(None, itertools.chain(*itertools.zip_longest(*shuffled))))


def _about_text(
    tokenizer: Any, template: bool | None, record: Record, context: int
) -> tuple[int, float, Int[np.ndarray, "T"] | None]:
    """Returns the least and the greatest context, and the prompt if `context` is among them."""
    before, after = around_messages(tokenizer, template, 1)
    text = encode_cached(tokenizer, record.context)
    question = encode(tokenizer, f"\n\n{record.turns[0]}")
    taken = len(before) + len(question) + len(after)
    tokens = None
    if taken < context <= taken + len(text):
        tokens = join(before, without_middle(text, context - taken), question, after)
    return taken + 1, taken + len(text), tokens


def _after_turns(
    tokenizer: Any,
    template: bool | None,
    record: Record,
    turn: int,
    examples: list[Record],
    context: int,
    rng: np.random.Generator,
) -> tuple[int, float, Int[np.ndarray, "T"] | None]:
    """Returns the least and the greatest context, and the prompt if `context` is among them.

    The conversation is a quotation, the first of the examples, as many as fit, and the record's
    turns up to the question.
    """
    record_turns = [*_answered(record, turn), record.turns[turn]]

    def encode_messages(count: int) -> tuple[list[list[int]], list[list[int]]]:
        """Returns (messages except the quotation, what surrounds all), with `count` examples."""
        earlier = [text for example in examples[:count] for text in _answered(example)]
        messages = [_encode(tokenizer, text) for text in (QUOTE, *earlier, *record_turns)]
        return messages, [*around_messages(tokenizer, template, len(messages) + 1)]

    def needed(count: int) -> int:
        messages, around = encode_messages(count)
        return QUOTED + sum(map(len, messages)) + sum(map(len, around))

    fitting = bisect.bisect_right(range(len(examples) + 1), context, key=needed) - 1
    if fitting < 0:
        return needed(0), math.inf, None
    (quote, *messages), around = encode_messages(fitting)
    length = context - needed(fitting) + QUOTED
    messages = [quote, docs.excerpt(tokenizer, length, rng), *messages]
    tokens = join(*itertools.chain(*zip(around, messages)), around[-1])
    return needed(0), math.inf, tokens


def _answered(record: Record, turns: int | None = None) -> list[str]:
    """Returns the first turns of a record, each followed by its reply."""
    return list(itertools.chain(*zip(record.turns[:turns], record.replies)))
