"""Conversations as tokens, by the chat template of a tokenizer.

Messages and template are encoded separately: a message can be cut to an exact number of tokens, and
the text of a special token in it is encoded as text.
"""

import functools
from collections.abc import Sequence
from typing import Any

from experiments.prompts.prompt import encode, leading_tokens

# Separators for tokenizers without a chat template.
QUESTION, ANSWER = "Question:\n", "\n\nAnswer:\n"
ROLES = ("user", "assistant")
DATE = "1 January 2025"  # some templates, such as Llama 3's, otherwise insert the current date


def uses_template(tokenizer: Any, asked: bool | None) -> bool:
    """Returns whether prompts are conversations; None: if the tokenizer has a chat template.

    Raises:
      ValueError: `asked` is True, and the tokenizer has no chat template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if asked and not has_template:
        raise ValueError(
            "chat_template=yes, but the target's tokenizer has no chat template: use an "
            "instruction-tuned target, or remove chat_template"
        )
    return has_template if asked is None else asked


def around_task(tokenizer: Any, template: bool | None, context: int) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after a task, a text that a model answers or continues.

    Without template they are the special tokens that the tokenizer puts before a text, and none.

    Raises:
      ValueError: they leave no room in the context.
    """
    if uses_template(tokenizer, template):
        before, after = around_messages(tokenizer, template, 1)
    else:
        before, after = leading_tokens(tokenizer), []
    if context <= (taken := len(before) + len(after)):
        raise ValueError(f"context={context} is too small: {taken} tokens surround the text")
    return before, after


@functools.lru_cache(maxsize=64)
def around_messages(tokenizer: Any, template: bool | None, count: int) -> Sequence[list[int]]:
    """Returns the tokens around the `count` messages of a conversation, count + 1 parts.

    The user speaks first and last; the model answers after the last part.

    Raises:
      ValueError: the template changes the messages or their order.
    """
    if not uses_template(tokenizer, template):
        texts = [QUESTION, *[ANSWER, f"\n\n{QUESTION}"] * (count // 2), ANSWER]
        first, *others = [encode(tokenizer, text) for text in texts]
        return [leading_tokens(tokenizer) + first, *others]
    marks = [f"\ue000{i}\ue001" for i in range(count)]  # private characters, in no template
    messages = [{"role": ROLES[i % 2], "content": mark} for i, mark in enumerate(marks)]
    rest = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string=DATE
    )
    texts = []
    for mark in marks:
        text, separator, rest = rest.partition(mark)
        if not separator:
            raise ValueError(
                "the tokenizer's chat template does not contain every message once, in order: set "
                "chat_template=no"
            )
        texts.append(text)
    return [tokenizer.encode(text, add_special_tokens=False) for text in (*texts, rest)]
