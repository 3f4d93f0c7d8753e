"""Prompts as token ids: texts, ids, the result of a tokenizer, or messages of a chat."""

import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from magicjax.decoding.detokenizer import token_texts
from magicjax.decoding.reasoning import chat_template
from magicjax.model import Model

# Arguments of `apply_chat_template` and variables that it sets; no variables of a template.
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding"}
    | {"add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
    | {"truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)


def prompts_of(prompts: Any) -> Sequence[Any]:
    """Returns the prompts of `magicjax.generate` as a sequence of one for each row.

    Raises:
      ValueError, TypeError: no prompt, or what is not a list of prompts.
    """
    if isinstance(prompts, str | bytes):
        raise TypeError("prompts is a single text: pass a list, [text], for a batch of one row")
    if isinstance(prompts, Mapping):
        if _is_flat(prompts.get("input_ids", ())):
            raise TypeError(
                "prompts has the token ids of a single text: tokenize a list, tokenizer([text]), "
                "or pass a list, [encoding], for a batch of one row"
            )
        return _encoded(prompts)
    if not isinstance(prompts, Sequence) and not getattr(prompts, "ndim", 0):
        raise TypeError(
            f"prompts has type {type(prompts).__name__}: pass a list of texts or of token ids"
        )
    if len(prompts) == 0:
        raise ValueError("prompts is empty: pass at least one prompt")
    if _is_flat(prompts):
        raise TypeError(
            "prompts is a list of numbers: for a batch of one row, wrap its token ids: [[5, 6, 7]]"
        )
    return [prompts] if _is_conversation(prompts) else prompts


def token_ids(target: Model, prompts: Sequence[Any]) -> list[Int[np.ndarray, "T"]]:
    """Returns the token ids of each prompt; all lie in the target's vocabulary.

    Args:
      target: its tokenizer reads texts, and its chat template messages.
      prompts: each a text, token ids, what a tokenizer returned for one text, or a list of messages
        `{"role": ..., "content": ...}`, which is continued with the answer.

    Raises:
      ValueError, TypeError: an empty prompt, one that is none of these, or one that the target does
        not support.
    """
    rows = [_validated_ids(target, i, _ids(target, i, prompt)) for i, prompt in enumerate(prompts)]
    token_prompts = {i: row for i, row in enumerate(rows) if not _is_text(prompts[i])}
    _check_padding(target, token_prompts)
    return rows


def _ids(target: Model, i: int, prompt: Any) -> Any:
    """Returns the ids of a prompt, of which only the source has been checked."""
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ValueError(
                f"prompt {i} is text and the target {target.name!r} has no tokenizer: pass token "
                "ids"
            )
        return target.tokenizer(str(prompt))["input_ids"]  # NumPy's strings are str
    if _is_conversation(prompt):
        return chat_tokens(target.tokenizer, prompt)
    if isinstance(prompt, Mapping):
        rows = _encoded(prompt)
        if len(rows) != 1:
            raise ValueError(
                f"prompt {i} has the token ids of {len(rows)} texts: pass them as the prompts, not "
                "as one of them"
            )
        return rows[0]
    return prompt


def _validated_ids(target: Model, i: int, prompt: Any) -> Int[np.ndarray, "T"]:
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        raise TypeError(f"prompt {i} is a nested list: pass text or a list of token ids") from None
    if ids.ndim == 1 and ids.size == 0:
        raise ValueError(f"prompt {i} is empty: it needs at least 1 token")
    if isinstance(prompt, Sequence) and any(isinstance(token, bool) for token in prompt):
        raise TypeError(f"prompt {i} has booleans: it must be text or a list of token ids")
    if ids.ndim == 1 and isinstance(ids[0], str):
        raise TypeError(
            f"prompt {i} is a list of texts: pass each text as one prompt, not as a list"
        )
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            f"prompt {i} has shape {ids.shape} and dtype {ids.dtype}: it must be text or a list of "
            "token ids"
        )
    size = target.config.vocab_size
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.size:
        raise ValueError(
            f"prompt {i} has token {outside[0]}{_named(target, outside[0])}, outside the "
            f"target's vocabulary of {size} tokens: ids must lie between 0 and {size - 1}"
        )
    return ids.astype(np.int32)


def _named(target: Model, token: int) -> str:
    """Returns the text of a token in parentheses, "" if the target's tokenizer lacks it."""
    vocabulary = {} if target.tokenizer is None else target.tokenizer.get_vocab()
    return next((f" ({text!r})" for text, i in vocabulary.items() if i == token), "")


def _check_padding(target: Model, rows: Mapping[int, Int[np.ndarray, "T"]]) -> None:
    """Raises ValueError if some rows of one length are padded: prompts need no padding.

    Args:
      target: whose pad token may also be one of text, such as "!" with the id 0.
      rows: token ids that the caller has made, by the index of the prompt.
    """
    pad = target.pad_token_id
    if pad is None or pad in target.eos_token_ids or len({*map(len, rows.values())}) != 1:
        return
    padded = [i for i, row in rows.items() if pad in (row[0], row[-1])]
    if not 0 < len(padded) < len(rows):  # LLaMA-1's pad token is -1, in no row
        return
    has_backend = getattr(target.tokenizer, "backend_tokenizer", None) is not None
    if has_backend and token_texts(target.tokenizer)(pad).encoded:
        return
    raise ValueError(
        f"prompt {padded[0]} begins or ends with the pad token {pad}: pass what the tokenizer "
        "returned, with its attention_mask, or the ids without padding"
    )


def _encoded(encoding: Mapping[str, Any]) -> list[Any]:
    """Returns the token ids of each text in the result of a tokenizer, without padding.

    Raises:
      ValueError, TypeError: another dict, or a mask that does not say where the padding is.
    """
    if "role" in encoding:
        raise TypeError("a prompt is a single message: pass a list of messages, [message]")
    if "messages" in encoding:
        raise TypeError("a prompt is a dict of messages: pass the list of its messages alone")
    if "input_ids" not in encoding:
        raise TypeError(
            f"a prompt is a dict of {', '.join(map(str, encoding)) or 'nothing'}: pass texts, "
            "token ids, what tokenizer(texts) returns, or messages of a role and a content"
        )
    ids = encoding["input_ids"]
    if not isinstance(ids, Sequence) and not getattr(ids, "ndim", 0):
        raise TypeError(f"input_ids={ids!r}: it must be token ids, as the tokenizer returned them")
    rows = _rows(ids)
    if encoding.get("attention_mask") is None:
        return rows
    masks = _rows(encoding["attention_mask"])
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise ValueError("attention_mask has another shape than input_ids: pass it as tokenized")
    return [_without_padding(row, mask) for row, mask in zip(rows, masks, strict=True)]


def _rows(ids: Any) -> list[np.ndarray]:
    """Returns the rows of [B, T], or of lists of different lengths; one row of [T]."""
    return [np.asarray(ids)] if _is_flat(ids) else [np.asarray(row) for row in ids]


def _is_flat(ids: Any) -> bool:
    """Returns whether these are the token ids of one text, and not of several."""
    if len(ids) == 0:
        return False
    if isinstance(ids[0], str):  # NumPy's strings have no dimensions either
        return False
    return isinstance(ids[0], numbers.Number) or getattr(ids[0], "ndim", None) == 0


def _without_padding(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the ids whose mask is 1: [7, 7, 5, 6] with the mask [0, 0, 1, 1] is [5, 6]."""
    (used,) = np.nonzero(mask)
    if not np.isin(mask, (0, 1)).all() or (len(used) and used[-1] - used[0] >= len(used)):
        raise ValueError(
            f"attention_mask={mask.tolist()}: it must be 1 for the tokens of a text and 0 for the "
            "padding before or after them"
        )
    return ids[used]


def _is_text(prompt: Any) -> bool:
    """Returns whether the tokenizer makes the token ids of a prompt."""
    return isinstance(prompt, str) or _is_conversation(prompt)


def _is_conversation(prompt: Any) -> bool:
    """Returns whether a prompt is a list of messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
        and "role" in prompt[0]
    )


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Returns the token ids of messages in the tokenizer's chat template, up to the answer.

    Args:
      tokenizer: with a chat template.
      messages: each with a role and a content.
      template_kwargs: variables of the template, such as `enable_thinking` of Qwen3's.
      tools: that the answer may call, each `{"type": "function", "function": {...}}`; None: none.

    Raises:
      ValueError, TypeError: a message without a role and a content, a tokenizer without a chat
        template, a variable that the template does not read, or a template that rejects the
        messages.
    """
    import jinja2  # the language of templates

    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= {*message}:
            raise TypeError(
                f"message {message!r} of a conversation: it must be a dict of a role and a content"
            )
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: pass the prompt as text, or use a tokenizer with "
            "chat_template"
        )
    check_template_kwargs(tokenizer, template_kwargs or {})
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=True,
            return_dict=True,
            **(template_kwargs or {}),
        )
    except (jinja2.TemplateError, TypeError) as error:  # a content that is not a string
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template rejects messages of {roles}: {error}") from error
    return rendered["input_ids"]


def check_template_kwargs(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for variables that are reserved or that the chat template does not read."""
    for name in template_kwargs:
        if name in TEMPLATE_ARGUMENTS:
            raise ValueError(f"chat_template_kwargs has {name!r}, which is reserved: omit it")
        if not reads_variable(tokenizer, name):
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which the chat template does not read: omit it"
            )


def reads_variable(tokenizer: Any, name: str) -> bool:
    """Returns whether a tokenizer's chat template, or one of several, names a variable."""
    return re.search(rf"\b{re.escape(name)}\b", chat_template(tokenizer)) is not None
