"""Automata against `regex` and `json`, the bytes of tokens, and the table of all grammars."""

import itertools
import json
import pathlib
import random
import sys

import numpy as np
import pytest
import tokenizers
import transformers

import magicjax
from magicjax.grammars import json_mode
from magicjax.grammars.arena import Arena, automaton_of
from magicjax.grammars.compiler import TokenAutomaton, compiled
from magicjax.grammars.grammar import Grammar, byte_automaton
from magicjax.grammars.vocabulary import vocabulary_of
from tests.magicjax import tiny
from tests.magicjax.grammars import spelled

ZOO = pathlib.Path(magicjax.__file__).parent.parent / "experiments/zoo/target"
TEXTS = (spelled.END, "a", "b", "ab", "bb", "c", "ca")
PATTERNS = ("a*", "(ab|a?c)+b*", "a{2,3}|b", "", "(a|b)*c(a|bb)", "[^a]b|c\\wa?")


def accepts(automaton, text: bytes) -> bool:
    state = 0
    for byte in text:
        state = automaton.next[state, byte]
        if state < 0:
            return False
    return bool(automaton.final[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_allowed_tokens_are_those_from_which_a_match_can_be_spelled(pattern):
    tokenizer = spelled.tokenizer(TEXTS)
    automaton = compiled(Grammar.regex(pattern), tokenizer, (0,), len(TEXTS) + 2)
    for tokens in itertools.product(range(1, len(TEXTS)), repeat=3):
        state = 0
        for n, token in enumerate(tokens):
            found = automaton.next[state][automaton.classes] >= 0
            np.testing.assert_array_equal(found[:-2], spelled.allowed(pattern, TEXTS, tokens[:n]))
            assert not found[-2:].any()  # the tokenizer has no such tokens
            state = automaton.next[state, automaton.classes[token]]
            if state < 0:
                break


def test_tokens_after_which_nothing_can_be_spelled_are_not_allowed():
    """Without a token for d, "c" begins no match."""
    tokenizer = spelled.tokenizer(TEXTS)
    automaton = compiled(Grammar.regex("ab|cd"), tokenizer, (0,), len(TEXTS))
    allowed = automaton.next[0][automaton.classes] >= 0
    assert [TEXTS[i] for i in np.flatnonzero(allowed)] == ["a", "ab"]
    with pytest.raises(ValueError, match="no text of the tokenizer's tokens matches"):
        compiled(Grammar.regex("d+"), tokenizer, (0,), len(TEXTS))


def nested(depth: int, brackets: str) -> str:
    return brackets[0] * depth + brackets[1] * depth


def test_json_mode_accepts_what_json_does():
    automaton = byte_automaton(Grammar.json_object())
    rng = random.Random(0)

    def value(depth):
        kind = rng.randrange(9 if depth < json_mode.MAX_DEPTH else 7)
        if kind == 7:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 8:
            return {str(i): value(depth + 1) for i in range(rng.randrange(3))}
        text = "".join(rng.choice('ab"\\/\né\u0000日\U0001f600}') for _ in range(rng.randrange(4)))
        return [0, -1.5e300, 10**20, True, None, text, 1.25e-7][kind]

    for _ in range(300):
        objects = {"a": value(1), "": value(1)}
        ascii_only, compact = rng.random() < 0.5, rng.random() < 0.5
        separators = (",", ":") if compact else (", ", ": ")
        text = json.dumps(objects, ensure_ascii=ascii_only, separators=separators)
        assert accepts(automaton, text.encode()), text
        wrong = bytearray(text.encode())
        for _ in range(rng.randrange(1, 4)):
            wrong[rng.randrange(len(wrong))] = rng.choice(b'{}[]",:\\0e.-+ \x80\xff\x1fat')
        if accepts(automaton, bytes(wrong)):
            assert isinstance(json.loads(bytes(wrong).decode()), dict)
    for text in ("", "1", "[]", '"a"', "{", "{}}", "{} ", '{"a":01}', '{"a":1.}', '{"a":tru}'):
        assert not accepts(automaton, text.encode()), text


def test_json_mode_has_a_bounded_depth():
    automaton = byte_automaton(Grammar.json_object())
    inside = json_mode.MAX_DEPTH - 1
    assert accepts(automaton, f'{{"a":{nested(inside, "[]")}}}'.encode())
    assert not accepts(automaton, f'{{"a":{nested(inside + 1, "[]")}}}'.encode())


def test_the_bytes_of_byte_level_tokens_are_those_of_the_text():
    tokenizer = transformers.AutoTokenizer.from_pretrained(ZOO)
    vocabulary = vocabulary_of(tokenizer)
    texts = {
        token: bytes(row[:n])
        for token, row, n in zip(vocabulary.ids, vocabulary.texts, vocabulary.lengths, strict=True)
    }
    text = 'def f(x):\n\treturn "né 日本 \U0001f600"\r\n'
    ids = tokenizer(text)["input_ids"]
    assert b"".join(texts[token] for token in ids) == text.encode()
    assert tokenizer.eos_token_id not in texts
    assert {bytes([b]) for b in range(256)} <= {*texts.values()}


def test_the_bytes_of_tokens_with_byte_fallback():
    model = tokenizers.models.BPE(
        {"<s>": 0, "<0x0A>": 1, "<0xC3>": 2, "▁the": 3, "é": 4, "kept": 5}, [], byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    )
    backend.add_tokens([tokenizers.AddedToken("kept", special=False)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")
    found = vocabulary_of(wrapped)
    assert found.ids.tolist() == [1, 2, 3, 4, 5]
    texts = [bytes(t[:n]) for t, n in zip(found.texts, found.lengths, strict=True)]
    assert texts == [b"\n", b"\xc3", b" the", "é".encode(), b"kept"]


def test_a_tokenizer_without_bytes_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}))
    backend.decoder = tokenizers.decoders.WordPiece()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ValueError, match="one of the decoders ByteLevel"):
        vocabulary_of(wrapped)
    with pytest.raises(ValueError, match="fast tokenizer"):
        vocabulary_of(object())


def automaton(states: int, classes: int) -> TokenAutomaton:
    rng = np.random.default_rng(states)
    table = rng.integers(-1, states, (states, classes)).astype(np.int32)
    return TokenAutomaton(table, np.zeros(4, np.int32))


def test_the_arena_keeps_grammars_in_use_and_evicts_the_least_recently_used():
    arena, (a, b, c) = Arena(41), (automaton(n, 4) for n in (4, 5, 6))
    first, second = arena.acquire(a), arena.acquire(b)
    assert (first, second) == (1, 17)
    assert arena.acquire(c) is None  # 24 entries, and 4 are free
    arena.release(b)
    assert arena.acquire(c) == 17
    assert arena.acquire(a) == first
    arena.release(a)
    assert arena.acquire(b) is None  # a is in use by another request
    arena.release(a)
    assert arena.acquire(b) == 1 if b.next.size <= 16 else arena.acquire(b) is None


def test_the_arenas_table_leads_from_state_to_state():
    rng, arena = random.Random(1), Arena(600)
    automata = [automaton(n, c) for n, c in ((3, 5), (9, 9), (20, 10), (16, 16), (7, 30))]
    users: list[tuple[TokenAutomaton, int]] = []
    for _ in range(300):
        if users and rng.random() < 0.5:
            arena.release(users.pop(rng.randrange(len(users)))[0])
        else:
            one, before = rng.choice(automata), arena.table.copy()
            table = arena.table
            start = arena.acquire(one)
            np.testing.assert_array_equal(table, before)  # a device may share its memory
            if start is not None:
                users.append((one, start))
        assert arena.table[0] == 0
        for one, start in users:
            states, classes = one.next.shape
            own = arena.table[start : start + one.next.size].reshape(states, classes)
            wanted = np.where(one.next < 0, -1, start + classes * one.next)
            np.testing.assert_array_equal(own, wanted)
    for one, _ in users:
        arena.release(one)
    assert all(arena.acquire(one) is not None for one in automata[:1])


WRONG = {
    "a syntax error": (lambda: Grammar.regex("(a"), ValueError, "regular expression is not supp"),
    "an anchor": (lambda: Grammar.regex("^a$"), ValueError, "omit \\^ and \\$"),
    "no match": (lambda: Grammar.regex("[a&&b]"), ValueError, "not supported|matches no text"),
    "no JSON": (lambda: Grammar.json_schema("{"), ValueError, "not valid JSON"),
    "a type": (lambda: Grammar.json_schema({"type": "x"}), ValueError, "type 'x': use one of"),
    "a keyword": (
        lambda: Grammar.json_schema(
            {"type": "array", "items": {"type": "integer", "multipleOf": 3}}
        ),
        ValueError,
        "'multipleOf', which is not supported",
    ),
    "two patterns": (
        lambda: Grammar.json_schema({"type": "string", "pattern": "a+", "maxLength": 3}),
        ValueError,
        "'pattern' with 'maxLength', which is not supported",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_grammar_is_an_error_of_one_line(what):
    make, error, message = WRONG[what]
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_properties_may_have_the_names_of_keywords():
    Grammar.json_schema({"type": "object", "properties": {"minimum": {"type": "integer"}}})


def test_a_grammar_requires_a_tokenizer_and_eos():
    grammar = Grammar.regex("a+")
    with pytest.raises(ValueError, match="has none"):
        automaton_of(tiny.model(), grammar, (0,))
    with pytest.raises(ValueError, match="no EOS token"):
        automaton_of(spelled.target(), grammar, ())
    with pytest.raises(ValueError, match="no EOS token"):
        automaton_of(spelled.target(), grammar, (tiny.VOCAB,))


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ImportError, match=r"pip install 'magicjax\[grammar\]'"):
        Grammar.regex("never compiled before")
    Grammar.json_object()
