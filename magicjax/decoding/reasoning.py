"""Reasoning apart from the answer: channels of gpt-oss, and text between <think> and </think>."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from magicjax.checks import OptionError
from magicjax.decoding.token_bytes import special_tokens
from magicjax.grammars.grammar import Grammar
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.verification.logits_processor import NO_LIMIT, NO_TOKEN, ThinkingBudget

# Special tokens of gpt-oss, before the role, the channel and the text of a message.
ROLE, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL = ("", "assistant", "final")  # what the header of a message begins with that is the answer
REST = re.compile(r"[\s\ud800-\udfff].*", re.DOTALL)  # of a header; surrogates mark tokens
THINK, END_THINK = "<think>", "</think>"
TAIL = 16  # tokens of a prompt that may end with <think> and space

Parts = tuple[str, str]  # text that belongs to the reasoning, and to the answer


class Channels:
    """Divides messages in channels: the answer is the final one.

    Attributes:
      markers: special tokens that are no text.
    """

    markers = frozenset({ROLE, CHANNEL, MESSAGE})

    def __init__(self, prompt: Sequence[int], special: Mapping[int, str], backend: Any):
        """Reads the last message of a prompt, which the text continues."""
        self._header: str | None = None  # of a message, while it arrives: the role or channel
        self._is_final = True
        roles = (i for i in range(len(prompt))[::-1] if special.get(prompt[i]) == ROLE)
        for token in prompt[next(roles, len(prompt)) :]:
            name = special.get(token)
            if name in self.markers:
                self.mark(name)
            else:
                self.push(backend.decode([token]))
        if self._header in FINAL:
            self._header = None  # an answer need not have a channel

    def mark(self, name: str) -> Parts:
        """Reads a marker."""
        if name == MESSAGE:
            channel = REST.sub("", (self._header or "").strip())
            self._is_final, self._header = channel in FINAL, None
        else:
            self._header = ""
        return "", ""

    def push(self, text: str) -> Parts:
        """Divides new text."""
        if self._header is not None:
            self._header += text
            return "", ""
        return ("", text) if self._is_final else (text, "")

    def finish(self) -> Parts:
        """Divides what was held back."""
        return "", ""


class Thinking:
    """Divides text that may begin with reasoning between <think> and </think>.

    A marker may be one token or several. What may become one is held back. Newlines around the
    reasoning and before the answer are omitted.

    Attributes:
      markers: special tokens that are text here.
    """

    markers = frozenset({THINK, END_THINK})

    def __init__(self, inside: bool, call: str):
        """Starts a text.

        Args:
          inside: whether the prompt ends with <think>.
          call: text at which the answer begins even without </think>; "": none.
        """
        self._inside = inside
        self._ends = (END_THINK, call) if call else (END_THINK,)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._started = False  # whether it is known how the text begins
        self._trims_newlines = inside  # whether newlines are omitted that come next
        self._held = ""

    def mark(self, name: str) -> Parts:
        """Reads a marker that is a special token."""
        return self.push(name)

    def push(self, text: str) -> Parts:
        """Divides new text."""
        text, self._held, reasoning = self._held + text, "", ""
        if not self._started:
            start = text.lstrip()
            if len(start) < len(THINK) and THINK.startswith(start):
                self._held = text
                return "", ""
            self._started = True
            if start.startswith(THINK):
                self._inside = self._trims_newlines = True
                text = start.removeprefix(THINK)
        if self._inside:
            reasoning, text = self._split(text)
        return reasoning, text if self._inside else self._trim(text)

    def finish(self) -> Parts:
        """Divides what was held back, which has not become a marker."""
        text, self._held = self._held, ""
        return (self._trim(text).rstrip("\n"), "") if self._inside else ("", text)

    def _split(self, text: str) -> Parts:
        """Returns (new text of the reasoning, what follows it)."""
        if marker := self._end.search(text):
            reasoning = self._trim(text[: marker.start()].rstrip("\n"))
            self._inside, self._trims_newlines = False, True
            return reasoning, text[marker.end() if marker[0] == END_THINK else marker.start() :]
        end = len(text) - max(overlap(text, end) for end in self._ends)
        reasoning = text[:end].rstrip("\n")
        self._held = text[len(reasoning) :]
        return self._trim(reasoning), ""

    def _trim(self, text: str) -> str:
        if self._trims_newlines:
            text = text.lstrip("\n")
            self._trims_newlines = not text
        return text


def split_after(
    tokenizer: Any, special: Mapping[int, str], prompt: Sequence[int], grammar: Grammar | None
) -> Channels | Thinking | None:
    """Returns what divides the text after a prompt; None: all of it is the answer.

    Args:
      tokenizer: a fast tokenizer of transformers.
      special: its special tokens.
      prompt: the tokens before the text.
      grammar: constrains the text or, after reasoning, the answer.
    """
    backend = tokenizer.backend_tokenizer
    if {CHANNEL, MESSAGE} <= {*special.values()}:
        return Channels(prompt, special, backend)
    if END_THINK not in chat_template(tokenizer):
        return None
    call = "" if grammar is None else grammar.free_until
    return Thinking(_tail(backend, prompt).endswith(THINK), call)


def after_reasoning(
    tokenizer: Any, prompt: Sequence[int], grammar: Grammar | None
) -> Grammar | None:
    """Returns the grammar of a text whose answer matches a grammar, and whose reasoning is free.

    Reasoning has no special tokens. It is optional, unless the prompt ends with its beginning. A
    grammar with free text before a marker, and one after a prompt that ends with </think>, is
    returned as it is.

    Args:
      tokenizer: a fast tokenizer of transformers; others have no reasoning.
      prompt: the tokens before the text.
      grammar: constrains the answer; None for any text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if grammar is None or grammar.free_until or backend is None:
        return grammar
    tokens = {name: f"<[{token}]>" for token, name in special_tokens(backend).items()}
    tail = _tail(backend, prompt)
    if {CHANNEL, MESSAGE} <= tokens.keys():
        rules = _channel_rules(tokens) if tail.endswith(f"{ROLE}assistant") else ""
    elif END_THINK in chat_template(tokenizer) and not tail.endswith(END_THINK):
        rules = _thinking_rules(tokens, tail.endswith(THINK))
    else:
        rules = ""
    return grammar.after(rules) if rules else grammar


def _channel_rules(tokens: Mapping[str, str]) -> str:
    """Returns the rules of messages of other channels before the final one."""
    channel, message = tokens[CHANNEL], tokens[MESSAGE]
    name = '("analysis" | "commentary")'
    other = f'{channel} {name} {message} TEXT {tokens[END]} {tokens[ROLE]} "assistant"'
    return f'start: ({other})* {channel} "final" {message} answer\nTEXT: /(?s:.*)/'


def _thinking_rules(tokens: Mapping[str, str], inside: bool) -> str:
    """Returns the rules of reasoning and the newlines after it; a marker may be spelled."""
    opened = "" if inside else tokens.get(THINK, "")
    begin = "" if inside or opened else THINK
    unspelled = f" | TEXT {tokens[END_THINK]}" if END_THINK in tokens else ""
    start = "" if inside else "answer | "
    return f'''start: {start}{opened} (spelled{unspelled}) NEWLINES? answer
spelled[lazy]: /{begin}(?s:.*)/ "{END_THINK}"
TEXT: /{begin}(?s:.*)/
NEWLINES: /\\n{{1,2}}/'''


def thinking_budget(target: Model, prompt: Sequence[int], params: SamplingParams) -> ThinkingBudget:
    """Returns how many tokens the reasoning after a prompt may have.

    Raises:
      ValueError: there is a budget, and the target does not reason between two tokens.
    """
    if (budget := params.thinking_token_budget) is None:
        return ThinkingBudget()
    backend = getattr(target.tokenizer, "backend_tokenizer", None)
    call = "" if params.grammar is None else params.grammar.free_until
    begin = end = end_of_call = None
    if backend is not None and END_THINK in chat_template(target.tokenizer):
        begin, end, end_of_call = map(backend.token_to_id, (THINK, END_THINK, call))
    if backend is None or begin is None or end is None:
        raise OptionError(
            f"{{}} requires a tokenizer with the tokens {THINK} and {END_THINK}, and a chat "
            f"template that has {END_THINK}: omit it for the target {target.name!r}",
            "thinking_token_budget",
            budget,
        )
    inside = _tail(backend, prompt).endswith(THINK)
    markers = begin, end, NO_TOKEN if end_of_call is None else end_of_call
    return ThinkingBudget(inside, min(budget + (not inside), NO_LIMIT), markers)


def _tail(backend: Any, prompt: Sequence[int]) -> str:
    """Returns the end of a prompt, without the space after it."""
    return backend.decode([*prompt[-TAIL:]], skip_special_tokens=False).rstrip()


def chat_template(tokenizer: Any) -> str:
    """Returns the chat template of a tokenizer, or several of them in one text; "" without."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def overlap(text: str, string: str) -> int:
    """Returns the length of the longest end of a text that begins, but is not, a string."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0 and not string.startswith(text[start:]):
        start = text.find(string[0], start + 1)
    return len(text) - start if start >= 0 else 0
