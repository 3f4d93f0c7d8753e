"""Grammars: what a text must match."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from magicjax.grammars import trial

# Every tokenization of a text is allowed. Otherwise llguidance allows only one where the grammar
# forces the text, and the distribution of texts would change.
OPTIONS = '\n%llguidance {"no_forcing": true}'
# Between the tokens of JSON, so that a model cannot write spaces without end.
SPACE = " ?"
SPACING = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
MAX_LEXER_STATES = 50_000  # of 1 to 2 KiB
MAX_CHARACTERS = 2**16  # 2,000 properties take about half a second
EXCERPT = re.compile(r"^ *\d+ \| ", re.MULTILINE)  # the beginning of its first line, in errors
# Attributes of a rule that end a text on the host, or cannot be rolled back.
UNSUPPORTED = re.compile(r"[\[,]\s*(max_tokens|temperature|stop)\s*=")


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What a generated text must match; hashable.

    A text ends with EOS where the grammar allows its end. A text that reaches its limit of new
    tokens before is the beginning of a match.

    With `untrusted`, a grammar is first compiled in a process of its own: one that takes more than
    2 s of CPU or 1 GiB there is an error. It takes 0.1 s for a new grammar.

    Attributes:
      text: the grammar in llguidance's variant of Lark.
      free_until: what ends free text at the beginning, such as the marker of a call; "": none.
    """

    text: str
    free_until: str = ""

    @classmethod
    def lark(cls, text: str, *, untrusted: bool = False) -> "Grammar":
        """Returns a context-free grammar in Lark's syntax, of the rule `start`.

        The variant of the syntax is llguidance's, with inline schemas as `%json {...}` and special
        tokens as `<|name|>`. The attributes max_tokens, temperature and stop are not supported.

        Raises:
          TypeError, ValueError: not a string, a syntax error, or a grammar beyond the limits.
        """
        _check_text("grammar", text)
        if attribute := UNSUPPORTED.search(text):
            raise ValueError(
                f"the grammar has the attribute {attribute[1]}, which is not supported: omit it"
            )
        return of_rules(text, untrusted)

    @classmethod
    def regex(cls, pattern: str, *, untrusted: bool = False) -> "Grammar":
        """Returns the grammar of the texts that match a regular expression as a whole.

        The syntax is that of Rust's crate `regex`, without look-around.

        Raises:
          TypeError, ValueError: not a string, a syntax error, or an expression beyond the limits.
        """
        _check_text("pattern", pattern)
        grammar = cls(f"start: {terminal(pattern)}{OPTIONS}")
        return _validated(grammar, "the regular expression", untrusted)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, untrusted: bool = False
    ) -> "Grammar":
        """Returns the grammar of the JSON texts that a JSON schema (draft 2020-12) describes.

        All of them are valid. Properties have the order of the schema, and at most one space
        separates tokens of JSON. What cannot be enforced is an error.

        Args:
          schema: as a mapping, or as JSON text.

        Raises:
          TypeError, ValueError: not a schema, or one with parts that are not supported.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise ValueError(f"the JSON schema is not valid JSON: {error}") from error
        if not isinstance(schema, Mapping | bool):
            raise TypeError(f"schema has type {type(schema).__name__}: pass a dict, or JSON text")
        return _validated(cls(f"start: {inline(schema)}{OPTIONS}"), "the JSON schema", untrusted)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Returns the grammar of JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Returns the grammar of a few texts.

        Raises:
          TypeError, ValueError: not a list of strings, or an empty one.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"choice={texts!r}: it must be a list of strings")
        if not texts:
            raise ValueError("choice=[]: it must have at least one text")
        rule = " | ".join(map(json.dumps, texts))
        return _validated(cls(f"start: {rule}{OPTIONS}"), "the choice")

    def after(self, rules: str) -> "Grammar":
        """Returns the grammar of Lark rules in which the rule `answer` is this one."""
        return Grammar(f"{rules}\nanswer: %lark {{\n{self.text}\n}}{OPTIONS}")


def of_rules(text: str, untrusted: bool = False, answer: Grammar | None = None) -> Grammar:
    """Returns the grammar of Lark rules without attributes that are not supported.

    With `answer`, the rules have it as the rule `answer`.
    """
    grammar = Grammar(text + OPTIONS) if answer is None else answer.after(text)
    return _validated(grammar, "the grammar", untrusted)


def terminal(pattern: str) -> str:
    """Returns a regular expression as a terminal of a Lark grammar."""
    return f"/{library().regex_to_lark(pattern, use_ascii='')}/"


def inline(schema: Mapping[str, Any] | bool) -> str:
    """Returns a JSON schema as a part of a Lark grammar."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, Mapping) or guidance.keys() - SPACING:
        raise ValueError(
            f"x-guidance={json.dumps(guidance)}: it must be an object of {', '.join(SPACING)}"
        )
    options = dict(guidance)
    if "whitespace_flexible" not in options:
        options.setdefault("whitespace_pattern", SPACE)
    return f"%json {json.dumps(dict(schema) | {'x-guidance': options})}"


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} has type {type(value).__name__}: it must be a string")


def _validated(grammar: Grammar, name: str, untrusted: bool = False) -> Grammar:
    """Returns the grammar if it is supported; raises ValueError otherwise."""
    if len(grammar.text) > MAX_CHARACTERS:
        raise ValueError(
            f"{name} has {len(grammar.text):,} characters, and at most {MAX_CHARACTERS:,} are "
            "supported: simplify it"
        )
    if untrusted:
        trial.check(grammar.text, MAX_LEXER_STATES)
    if reason := _error(grammar.text):
        raise ValueError(f"{name} is not supported: {reason}")
    return grammar


@functools.lru_cache(maxsize=256)
def _error(text: str) -> str:
    """Returns what is wrong with a grammar; "" if nothing is."""
    validate = library().LLMatcher.validate_grammar_with_warnings
    is_error, messages = validate(text, limits=limits())
    return one_line(messages[0]) if is_error else ""


def one_line(reason: str) -> str:
    """Returns an error of llguidance without its excerpt of the grammar."""
    return " ".join(EXCERPT.split(reason)[0].split()).removeprefix("at 1(8): ")


def limits() -> Any:
    """Returns the most work of one grammar and of one mask, about 20 ms and 15 ms for most."""
    return library().LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def library() -> Any:
    """Returns the package llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("grammars require llguidance: pip install 'magicjax[grammar]'") from error
    return llguidance
