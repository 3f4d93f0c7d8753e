"""Masks of tokens against `regex`, masks of trees against those of each path, and errors."""

import itertools
import sys

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

import magicjax
from magicjax.grammars.grammar import Grammar
from magicjax.grammars.matcher import ALL, Matcher, first_masks, tree_masks
from tests.magicjax import small_tokenizers, tiny
from tests.magicjax.grammars import spelled, walks

TEXTS = (spelled.END, "a", "b", "ab", "bb", "c", "ca")
PATTERNS = ("abcab(a|b)*", "a*", "(ab|a?c)+b*", "a{2,3}|b", "", "(a|b)*c(a|bb)", "[^a]b|c\\wa?")


def target_of(texts, ends=(0,), vocab: int = 0) -> magicjax.Model:
    config = tiny.config(vocab_size=vocab or len(texts))
    module = tiny.model().module.clone(config=config)
    return magicjax.Model(module, None, spelled.tokenizer(texts), "spelled", ends)


def bits(words: np.ndarray, vocab: int) -> np.ndarray:
    found = np.unpackbits(words.view(np.uint8), bitorder="little", axis=-1)
    return found[..., :vocab].astype(bool)


def after(pattern: str, tokens, target, eos=(0,), stop=()) -> np.ndarray:
    matcher = Matcher(target, Grammar.regex(pattern), eos, stop)
    matcher.push([*tokens])
    return bits(first_masks([matcher], target.config.vocab_size)[0], target.config.vocab_size)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_allowed_tokens_are_those_from_which_a_match_can_be_spelled(pattern):
    target = target_of(TEXTS, vocab=len(TEXTS) + 30)  # an embedding with rows for no token
    for tokens in itertools.product(range(1, len(TEXTS)), repeat=3):
        for n in range(4):
            found = after(pattern, tokens[:n], target)
            wanted = spelled.allowed(pattern, TEXTS, tokens[:n])
            np.testing.assert_array_equal(found[: len(TEXTS)], wanted)
            assert not found[len(TEXTS) :].any()
            if n < 3 and not found[tokens[n]]:
                break


@given(st.data())
def test_the_masks_of_a_tree_are_those_of_its_paths(data):
    """Whatever the nodes are: allowed or not, ends, and padding."""
    pattern, count = data.draw(st.sampled_from(PATTERNS)), data.draw(st.integers(1, 7))
    target, vocab = target_of(TEXTS), len(TEXTS)
    tokens = np.array([data.draw(st.integers(-1, vocab - 1)) for _ in range(count)])[None]
    below = [data.draw(st.integers(-1, n - 1)) for n in range(1, count)]
    parents = np.array([-1, *below])[None]
    matcher = Matcher(target, Grammar.regex(pattern), (0,))
    if data.draw(st.booleans()):
        matcher.forced()  # changes no mask
    found = tree_masks([matcher], tokens, parents, vocab)[0]
    for node in range(count):
        path = []
        at = node
        while at > 0:
            path, at = [at, *path], parents[0, at]
        text = tokens[0, path].tolist()
        known = at == 0 and all(token > 0 for token in text)  # 0 ends the text
        known &= all(
            spelled.allowed(pattern, TEXTS, tuple(text[:n]))[text[n]] for n in range(len(text))
        )
        if known:
            wanted = spelled.allowed(pattern, TEXTS, tuple(text))
            np.testing.assert_array_equal(bits(found[node], vocab), wanted)
        else:
            assert (found[node] == ALL).all()
    again = tree_masks([matcher], tokens, parents, vocab)[0]  # the matcher is as before
    np.testing.assert_array_equal(found, again)


JSON = Grammar.json_object()
PIECES = (spelled.END, '{"a":', 'Ġ{"', 'Ġ["', 'Ġ"', "a", "1", '"]', '":', '"', "}", "]", ",", "Ġ")


@pytest.mark.parametrize("order", [*itertools.permutations((2, 3, 4))])
def test_a_branch_does_not_change_the_masks_of_another(order):
    """With tokens that end one lexeme of JSON and begin another."""
    target, vocab = target_of(PIECES), len(PIECES)
    tokens, parents = [1], [-1]
    for child in order:
        tokens += [child, 5]
        parents += [0, len(parents)]
    matcher = Matcher(target, JSON, (0,))
    matcher.push([1])
    found = tree_masks([matcher], np.array([tokens]), np.array([parents]), vocab)
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        alone = Matcher(target, JSON, (0,))
        alone.push(path)
        if not alone.error:
            np.testing.assert_array_equal(found[0, node], first_masks([alone], vocab)[0])


def test_rows_without_a_grammar_allow_all_tokens():
    assert (first_masks([None, None], 40) == ALL).all()
    assert (tree_masks([None], np.zeros((1, 3), int), np.array([[-1, 0, 1]]), 40) == ALL).all()


def test_a_tokenizer_may_have_tokens_beyond_the_embedding():
    texts = (*TEXTS, *(f"c{i}" for i in range(40)))
    target = target_of(texts, vocab=5)
    assert after("ab", (), target).tolist() == [False, True, False, True, False]
    assert after("ab", (3,), target).tolist() == [True, False, False, False, False]


def test_a_text_may_end_with_any_of_its_ends():
    target = target_of((*TEXTS, "<stop>"))
    for tokens in ((), (1,), (1, 1)):
        for eos, stop in (((0, 7), ()), ((0,), (7,))):
            found = after("aa", tokens, target, eos, stop)
            assert found[0] == found[7] == (len(tokens) == 2)


def test_tokens_with_text_that_end_a_text():
    """EOS is not text; a stop token is, and ends the text there, too."""
    names = [TEXTS[i] for i in np.flatnonzero(after("ab|ba", (), target_of(TEXTS), (0, 1)))]
    assert names == ["b", "ab"]
    assert after("ab|ba", (3,), target_of(TEXTS), (0, 1))[[0, 1]].all()
    names = [TEXTS[i] for i in np.flatnonzero(after("ab|ba", (), target_of(TEXTS), (0,), (1,)))]
    assert names == ["a", "b", "ab"]
    assert after("ab|ba", (3,), target_of(TEXTS), (0,), (1,))[[0, 1]].all()


def test_every_tokenization_of_a_forced_text_is_allowed():
    assert after("ab", (), target_of(TEXTS))[[1, 3]].all()
    schema = Grammar.json_schema({"const": "ab"})
    texts = (spelled.END, '"', '"a', "a", "ab", "b", 'b"')
    matcher = Matcher(target_of(texts), schema, (0,))
    assert bits(first_masks([matcher], len(texts))[0], len(texts)).tolist() == [
        *(False, True, True, False, False, False, False)
    ]


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_the_text_of_a_tokenizers_own_tokens_is_allowed(kind):
    """With the tokens that the tokenizer makes of a JSON text."""
    tokenizer = small_tokenizers.make(kind)
    module = tiny.model().module.clone(config=tiny.config(vocab_size=len(tokenizer)))
    target = magicjax.Model(module, None, tokenizer, kind, (0,))
    text = "hello world"
    try:
        matcher = Matcher(target, Grammar.regex("( ?hello| world)*"), (0,))
    except ValueError as error:
        assert "byte-level or byte-fallback decoder" in str(error)
        return
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        found = bits(first_masks([matcher], len(tokenizer))[0], len(tokenizer))
        assert found[token], tokenizer.convert_ids_to_tokens(token)
        matcher.push([token])


def test_added_tokens_that_are_not_special_are_text():
    """Such as Qwen's <tool_call>, alone and spelled, but not tokens of turns such as <|end|>."""
    for markers, is_text in (("added", True), ("special", False)):
        tokenizer = small_tokenizers.with_thinking(markers)
        vocab, size = tokenizer.get_vocab(), len(tokenizer) + 3
        module = tiny.model().module.clone(config=tiny.config(vocab_size=size))
        target = magicjax.Model(module, None, tokenizer, markers, (vocab["</s>"],))
        for pattern in ("(?s:.*)", "<think>a</think><tool_call>"):
            matcher = Matcher(target, Grammar.regex(pattern), (vocab["</s>"],))
            found = bits(first_masks([matcher], size)[0], size)
            assert found[vocab["<think>"]] == is_text and found[vocab["<"]]
            assert not found[vocab[small_tokenizers.TURN]] and not found[len(tokenizer) :].any()
            if is_text:
                forced = tokenizer("a</think><tool_call>")["input_ids"] if "a<" in pattern else []
                matcher.push([vocab["<think>"]])
                assert matcher.forced() == forced


WRONG = {
    "a syntax error": (lambda: Grammar.regex("(a"), ValueError, "regular expression is not supp"),
    "look-around": (lambda: Grammar.regex("(?=a)b"), ValueError, "regular expression is not supp"),
    "no text": (lambda: Grammar.regex(3), TypeError, "it must be a string"),
    "no JSON": (lambda: Grammar.json_schema("{"), ValueError, "not valid JSON"),
    "a list": (lambda: Grammar.json_schema([]), TypeError, "pass a dict"),
    "a type": (lambda: Grammar.json_schema({"type": "x"}), ValueError, "JSON schema is not supp"),
    "no rule": (lambda: Grammar.lark("a: b"), ValueError, "the grammar is not supported"),
    "an option": (
        lambda: Grammar.json_schema({"x-guidance": {"lenient": True}}),
        ValueError,
        "x-guidance=",
    ),
    "no options": (lambda: Grammar.json_schema({"x-guidance": "a"}), ValueError, "x-guidance="),
    "an attribute": (lambda: Grammar.lark("start[max_tokens=3]: /a*/"), ValueError, "max_tokens"),
    "a later attribute": (
        lambda: Grammar.lark('start[capture="]", temperature=1]: /a*/'),
        ValueError,
        "temperature",
    ),
    "no choice": (lambda: Grammar.choice([]), ValueError, "at least one text"),
    "a choice of numbers": (lambda: Grammar.choice([1]), TypeError, "a list of strings"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_grammar_is_an_error_of_one_line(what):
    make, error, message = WRONG[what]
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_grammar_requires_a_tokenizer_with_bytes_and_eos():
    grammar = Grammar.regex("a+")
    for target, ends, message in (
        (tiny.model(), (0,), "has none"),
        (spelled.target(), (), "no EOS token"),
        (spelled.target(), (tiny.VOCAB,), "no EOS token"),
    ):
        with pytest.raises(ValueError, match=message):
            Matcher(target, grammar, ends)
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}))
    backend.decoder = tokenizers.decoders.WordPiece()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    for tokenizer, message in (
        (wrapped, "byte-level or byte-fallback decoder"),
        (object(), "fast tokenizer"),
    ):
        model = magicjax.Model(tiny.model().module, None, tokenizer, "other", (0,))
        with pytest.raises(ValueError, match=message):
            Matcher(model, grammar, (0,))


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'magicjax\[grammar\]'"):
        Grammar.regex("never compiled before")


def test_other_grammars():
    assert walks.language(Grammar.choice(["a", 'b"\n', "ab"])) == {"a", 'b"\n', "ab"}
    assert walks.accepts(Grammar.json_object(), '{"a": [1, {"b": null}], "é": "\\n"}')
    assert not walks.accepts(Grammar.json_object(), "[]")
    calls = Grammar.lark('start: sum\nsum: term ("+" term)*\nterm: /[0-9]/ | "(" sum ")"')
    assert walks.accepts(calls, "1+(2+(3+4))") and not walks.accepts(calls, "1+(2")
