"""Synthetic long-context tasks whose right answer is known, in the manner of RULER.

RULER (arXiv 2404.06654) asks for what lies hidden in a long text (`needles.py`), for the most
frequent words of a list (`word_lists.py`), and about one of many paragraphs (`questions.py`). Its
wording is made for models that follow instructions; ours is made to be gone on with, by any model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from experiments.prompts import needles, questions, sources, stretches, word_lists
from experiments.prompts.haystack import Haystack, TooShortError, of_texts
from experiments.prompts.prompt import Prompt, join, opening

# (tokenizer, what it is made from, length in tokens, seed, row) -> prompt
Task = Callable[[Any, Any, int, int, int], Prompt]

TASKS: dict[str, Task] = {
    **{kind: functools.partial(needles.needle, kind) for kind in needles.NEEDLES},
    "variable_tracking": needles.variable_tracking,
    "common_words": word_lists.common_words,
    "frequent_words": word_lists.frequent_words,
    sources.QA: questions.question,
}
WITHOUT_HAYSTACK = ("frequent_words",)


def make(task: str, tokenizer: Any, path: str, count: int, context: int, seed: int) -> list[Prompt]:
    """Returns prompts of a task; the first ones are the same whatever the count.

    Args:
      task: one of `TASKS`.
      tokenizer: the target's.
      path: texts to hide things in, "" for those of the standard library; of `qa` its file.
      count, context, seed: as in `prompts.make`.

    Raises:
      ValueError: the context is too short for one of the prompts, or the texts do not do.
    """
    begin = opening(tokenizer)
    material = _material(task, tokenizer, path)
    made, least = [], 0
    for row in range(count):
        try:
            prompt = TASKS[task](tokenizer, material, context - len(begin), seed, row)
        except TooShortError as error:
            least = max(least, error.least + len(begin))
            continue
        made.append(dataclasses.replace(prompt, tokens=join(begin, prompt.tokens)))
    if least:
        raise ValueError(
            f"context={context} is too short for {task}: what it asks for and the question take up "
            f"to {least - 1} tokens, and there must be text around them; choose a context of at "
            f"least {least}"
        )
    return made


def _material(task: str, tokenizer: Any, path: str) -> Any:
    """Returns what a task's prompts are made from."""
    if task in WITHOUT_HAYSTACK:
        return None
    fingerprint = sources.fingerprint(task, path)
    if task == sources.QA:
        return _questions(path, fingerprint)
    return _haystack(tokenizer, path, fingerprint)


@functools.lru_cache(maxsize=4)
def _questions(path: str, fingerprint: str) -> questions.Questions:
    del fingerprint  # the file is read again once it says something else
    return questions.read(path)


@functools.lru_cache(maxsize=4)
def _haystack(tokenizer: Any, path: str, fingerprint: str) -> Haystack:
    del fingerprint
    if not path:
        return of_texts(tokenizer, stretches.stdlib_texts())
    found = sources.files(sources.FILES, path)
    return of_texts(tokenizer, (text for file in found for _, text in sources.texts(file)))
