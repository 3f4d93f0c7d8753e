"""A grammar constrains the answer of a model that reasons: what follows </think>."""

import functools

import numpy as np
import pytest
import regex

import magicjax
from magicjax.decoding.reasoning import after_reasoning
from magicjax.grammars.matcher import Matcher, first_masks
from tests.magicjax import oracle, tiny
from tests.magicjax.grammars import spelled
from tests.magicjax.processing import processed
from tests.magicjax.small_tokenizers import ASKED, with_channels
from tests.quick import quick

THINK, END_THINK = "<think>", "</think>"
ANSWER = "([a-c]{1,3}[d-f])+"
LIMIT = 20
MARKERS = ("text", "added", "special")
# What the prompt of each row ends with; the fifth row is made to begin with <think>.
ENDS = (THINK, THINK, THINK, THINK, "", "", "<think>\n\n</think>\n\n", "<think></think>")
# With these biases of the tokens of </think>, most rows reason for some tokens, and answer.
BIASES = {
    "text": {"</think": (4.7, 4.0, 3.8, 2.7, 9, 9, 0, 0), ">": (5.6, 1.3, 1.9, 1.2, 9, 9, 0, 0)},
    "added": {END_THINK: (1.0, 1.5, 1.0, 0.7, 9, 1.1, 0, 0)},
}


def may_begin(text: str, inside: bool) -> bool:
    """Returns whether a text may be the beginning of one under the grammar, by definition."""
    if inside:
        _, end, answer = text.partition(END_THINK)
        trimmed = (answer.removeprefix("\n" * n) for n in range(3))
        return not end or any(regex.fullmatch(ANSWER, one, partial=True) for one in trimmed)
    if text.startswith(THINK):
        return may_begin(text.removeprefix(THINK), inside=True)
    return THINK.startswith(text) or bool(regex.fullmatch(ANSWER, text, partial=True))


@functools.cache
def allowed(markers: str, end: str, text: tuple[int, ...]) -> np.ndarray:
    """Returns which tokens may follow others after a prompt that ends with `end`."""
    texts = spelled.thinking_texts(markers)
    inside, closed = end == THINK, end.rstrip().endswith(END_THINK)
    so_far, found = "".join(texts[token] for token in text), []
    if not inside and not closed and so_far.startswith(THINK):
        inside, so_far = True, so_far.removeprefix(THINK)
    is_open = inside and END_THINK not in so_far
    for new in texts:
        if new == spelled.END:
            answer = so_far.partition(END_THINK)[2] if inside else so_far
            answers = (answer.removeprefix("\n" * n) for n in range(3 if inside else 1))
            found.append(not is_open and any(regex.fullmatch(ANSWER, one) for one in answers))
        elif markers == "special" and new == THINK:
            found.append(not inside and not closed and not so_far)
        elif closed or (markers == "special" and not inside):
            found.append(bool(regex.fullmatch(ANSWER, so_far + new, partial=True)))
        else:
            found.append(may_begin(so_far + new, inside))
    return np.array(found)


@functools.cache
def prompts(markers: str) -> tuple[np.ndarray, ...]:
    """Returns the prompts of the rows, whose markers are spelled in as few tokens as possible."""
    texts = spelled.thinking_texts(markers)
    made = []
    for prompt, end in zip(tiny.prompts(8), ENDS, strict=True):
        tokens = []
        while end:
            text = max((one for one in texts if end.startswith(one)), key=len)
            tokens.append(texts.index(text))
            end = end.removeprefix(text)
        made.append(np.array([*(prompt % 10 + 20), *tokens][-30:], np.int32))  # letters
    return tuple(made)


def params_of(markers: str, row: int, **options) -> magicjax.SamplingParams:
    texts = spelled.thinking_texts(markers)
    biases = BIASES["text" if markers == "text" else "added"].items()
    bias = {texts.index(text): of_rows[row] for text, of_rows in biases}
    if row == 4:
        bias |= {texts.index(text): 30.0 for text in (THINK, "<think", ">") if text in texts}
    options |= dict(presence_penalty=2.0 if row < 4 else 40.0, max_tokens=LIMIT)
    grammar = magicjax.Grammar.regex(ANSWER)
    return magicjax.SamplingParams(grammar=grammar, logit_bias=bias, **options)


@functools.cache
def expected(markers: str, row: int) -> np.ndarray:
    """Returns the text of plain greedy decoding from masked logits of the oracle."""
    target, text = spelled.thinking_target(markers), list[int]()
    while len(text) < LIMIT and tiny.NEVER not in text:
        prompt, params = prompts(markers)[row], params_of(markers, row)
        logits = oracle.logits(target, [*prompt, *text])[-1]
        given = dict(logit_bias=params.logit_bias, presence_penalty=params.presence_penalty)
        logits = processed(logits, prompt, text, **given)
        may_follow = allowed(markers, ENDS[row], tuple(text))
        text.append(int(np.where(may_follow, logits, -np.inf).argmax()))
    return np.array(text)


CASES = {
    "plain": (None, None),
    "chain": ("near", tiny.TREES["chain4"]),
    "tree": ("near", tiny.TREES["2,2,1"]),
}


@pytest.mark.parametrize("markers", MARKERS)
@pytest.mark.parametrize("case", quick(CASES, "tree"))
def test_the_answer_matches_and_reasoning_is_free(markers, case, tally):
    kind, tree = CASES[case]
    drafter = None if kind is None else tiny.drafter(kind)
    target, rows = spelled.thinking_target(markers), range(len(ENDS))
    params = [params_of(markers, row) for row in rows]
    output = magicjax.generate(target, prompts(markers), params, drafter=drafter, tree=tree)
    for row, found in enumerate(tiny.rows_of(output)):
        np.testing.assert_array_equal(found, expected(markers, row))
    assert sum(bool(x and y) for x, y in zip(output.texts, output.reasoning, strict=True)) > 2
    for row in rows:
        assert regex.fullmatch(ANSWER, output.texts[row], partial=True)
    assert (output.texts[4] or markers == "text") and not any(output.reasoning[6:])


@pytest.mark.slow
def test_streams_and_engines_do_the_same():
    target, rows = spelled.thinking_target("added"), range(len(ENDS))
    params = [params_of("added", row) for row in rows]
    shared = dict(drafter=tiny.drafter("near"), tree=tiny.TREES["2,2,1"])
    rounds = [*magicjax.stream(target, prompts("added"), params, **shared)]
    config = magicjax.EngineConfig(slots=3, capacity=64, grammars=True, logits_processors=True)
    engine = magicjax.Engine(target, *shared.values(), config)
    handles = [engine.submit(*each) for each in zip(prompts("added"), params, strict=True)]
    engine.run()
    for row in rows:
        streamed = np.concatenate([pieces[row].tokens for pieces in rounds])
        np.testing.assert_array_equal(streamed, expected("added", row))
        result = handles[row].result()
        np.testing.assert_array_equal(result.tokens, expected("added", row))
        assert regex.fullmatch(ANSWER, result.text, partial=True)
        assert bool(result.reasoning) == (row in (0, 1, 2, 3, 4, 5))


def accepts(text: str, prompt: str) -> tuple[bool, bool]:
    """Returns whether a text in channels may follow a prompt, and whether it may end."""
    tokenizer = with_channels()
    before, tokens = (tokenizer(one)["input_ids"] for one in (prompt, text))
    grammar = after_reasoning(tokenizer, before, magicjax.Grammar.regex(ANSWER))
    target = tiny.reciting([0, 1], tokenizer)
    matcher = Matcher(target, grammar, (2,))
    for token in tokens:
        (allowed,) = first_masks([matcher], len(tokenizer))
        if not allowed[token // 32] >> np.uint32(token % 32) & 1:
            return False, False
        matcher.push([token])
    (allowed,) = first_masks([matcher], len(tokenizer))
    return True, bool(allowed[0] >> np.uint32(2) & 1)


@pytest.mark.parametrize(
    ("text", "prompt", "found"),
    [
        ("<|channel|>final<|message|>abd", ASKED, (True, True)),
        ("<|channel|>final<|message|>ab", ASKED, (True, False)),
        ("<|channel|>analysis<|message|>Who?", ASKED, (True, False)),
        (
            "<|channel|>analysis<|message|>Who?<|end|><|start|>assistant"
            "<|channel|>final<|message|>ad",
            ASKED,
            (True, True),
        ),
        ("<|channel|>final<|message|>Who", ASKED, (False, False)),
        ("<|channel|>analysis<|message|><|channel|>", ASKED, (False, False)),
        ("ad", ASKED, (False, False)),
        ("ad", "hi", (True, True)),
    ],
)
def test_the_final_channel_has_the_answer(text, prompt, found):
    assert accepts(text, prompt) == found
