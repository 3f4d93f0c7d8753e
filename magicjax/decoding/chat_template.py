"""Messages of a chat as token ids, in the template of a tokenizer."""

from collections.abc import Sequence
from typing import Any


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Returns the token ids of messages in the tokenizer's chat template, up to the answer.

    Raises:
      ValueError: the tokenizer has no chat template, or the template rejects the messages.
    """
    import jinja2  # the language of templates

    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: use `magicjax generate --prompt`, or a "
            "--tokenizer with chat_template"
        )
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template rejects messages of {roles}: {error}") from error
    return rendered["input_ids"]
