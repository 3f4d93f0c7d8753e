"""A row ends with the token that completes a stop string; its text is cut before the string."""

import functools

import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.controller import Controller, Mode
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.output import output_of, texts_of
from magicjax.decoding.rounds import ROUNDS_PER_CALL, run_adaptive
from tests.magicjax import keywords, tiny
from tests.quick import quick

NEW = 40
PROMPTS = ["def add(first, second):", "    return first", "é"]
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # part of a character
DRAFTED = dict(drafter=magicjax.PromptLookup(), tree=magicjax.chain(4))
SAMPLED = dict(seed=4, temperature=0.9)


@pytest.fixture(scope="module")
def target(directory):
    return magicjax.load(directory, dtype="float32")


@functools.cache
def whole(target, sampled: bool = False) -> magicjax.Output:
    """Returns the output without stop strings."""
    return generate(target, **SAMPLED if sampled else {})


def generate(target, **options) -> magicjax.Output:
    options = dict(max_tokens=NEW, eos_token_id=[]) | DRAFTED | options
    return keywords.generate(target, PROMPTS, **options)


def stream(target, **options) -> magicjax.Output:
    """Returns the output of a stream; asserts that the tokens of its rounds are the output's."""
    options = dict(max_tokens=NEW, eos_token_id=[]) | DRAFTED | options
    rounds, parts = keywords.stream(target, PROMPTS, **options), []
    while True:
        try:
            parts.append(next(rounds))
        except StopIteration as end:
            streamed = [np.concatenate(row) for row in zip(*parts, strict=True)]
            for row, expected in zip(streamed, tiny.rows_of(end.value), strict=True):
                np.testing.assert_array_equal(row, expected)
            return end.value


def check_cut(target, output: magicjax.Output, before: magicjax.Output, stops) -> list[str]:
    """Asserts that each row ends at its first stop string; returns the finish reasons."""
    for row, text in enumerate(before.texts):
        tokens = before.tokens[row, : before.lengths[row]]
        decoded = [target.tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
        complete = [n for n, part in enumerate(decoded) if any(stop in part for stop in stops)]
        count = complete[0] + 1 if complete else len(tokens)
        np.testing.assert_array_equal(tiny.rows_of(output)[row], tokens[:count])
        found = [text.index(stop) for stop in stops if stop in decoded[count - 1]]
        assert output.texts[row] == text[: min(found, default=len(text))]
        assert output.finish_reasons[row] == ("stop" if complete else "length")
        assert len(output.sequences[row]) == len(before.sequences[row]) - len(tokens) + count
    return output.finish_reasons


def stops_in(texts, count: int):
    """Yields pairs of strings of 1 to 8 characters that the texts contain."""
    rng = np.random.default_rng(0)
    while count:
        text = texts[rng.integers(len(texts))]
        begin, length = int(rng.integers(len(text) - 8)), int(rng.integers(1, 9))
        if UNKNOWN not in (stop := text[begin : begin + length]):
            count -= 1
            yield [stop, "never said"]


@pytest.mark.parametrize(
    ("call", "sampled"),
    quick(
        [(generate, False), (generate, True), (stream, False)], (generate, False), (stream, False)
    ),
)
def test_rows_end_at_their_first_stop_string(target, call, sampled):
    before, reasons = whole(target, sampled), []
    for stops in stops_in(before.texts, 6):
        output = call(target, stop=stops, **SAMPLED if sampled else {})
        reasons += check_cut(target, output, before, stops)
    assert {"stop", "length"} == set(reasons)


def test_the_loop_ends_when_all_rows_have_and_nothing_else_is_compiled(target):
    before = whole(target)
    compiled = program_cache.totals()
    firsts = [target.tokenizer.decode(row[:1]) for row in before.tokens]
    stops = [first for first in firsts if UNKNOWN not in first]
    output = generate(target, stop=stops)
    assert program_cache.totals() == compiled
    assert check_cut(target, output, before, stops).count("stop") >= len(stops) > 0
    short = [text[4:6] for text in before.texts]
    rounds = generate(target, stop=short).stats.rounds
    assert rounds <= ROUNDS_PER_CALL < before.stats.rounds


def test_without_a_stop_string_rows_end_with_eos_or_at_their_limit(target):
    eos = int(whole(target).tokens[0, 5])
    output = generate(target, eos_token_id=eos, stop=["never said"])
    assert output.texts == generate(target, eos_token_id=eos).texts
    ends = [row[-1] == eos for row in tiny.rows_of(output)]
    assert output.finish_reasons == ["eos" if end else "length" for end in ends] and any(ends)


@pytest.mark.parametrize("call", [generate, stream])
def test_rows_end_at_their_stop_tokens(target, call):
    """EOS does not end them; the text is without the token."""
    tokens = [int(row[n]) for row, n in zip(tiny.rows_of(whole(target)), (5, 9, 13), strict=True)]
    found = call(target, stop_token_ids=tokens, ignore_eos=True, eos_token_id=0)
    for before, row, text in zip(tiny.rows_of(whole(target)), tiny.rows_of(found), found.texts):
        count = next(n for n, token in enumerate(before) if token in tokens) + 1
        np.testing.assert_array_equal(row, before[:count])
        assert text == target.tokenizer.decode(before[: count - 1])
    assert found.finish_reasons == ["stop"] * 3


def test_stop_tokens_are_of_one_row_and_wait_for_min_tokens(target):
    rows = tiny.rows_of(whole(target))
    params = [
        magicjax.SamplingParams(max_tokens=NEW, stop_token_ids=[int(rows[0][5])]),
        magicjax.SamplingParams(max_tokens=NEW),
        magicjax.SamplingParams(max_tokens=NEW, stop_token_ids=[int(rows[2][5])], min_tokens=NEW),
    ]
    found = magicjax.generate(target, PROMPTS, params, eos_token_id=[], **DRAFTED)
    assert found.finish_reasons == ["stop", "length", "length"]
    np.testing.assert_array_equal(tiny.rows_of(found)[1], rows[1])
    assert rows[2][5] not in tiny.rows_of(found)[2][:-1]


def test_a_cancelled_stream_says_so(target):
    rounds = keywords.stream(target, PROMPTS, max_tokens=[1, NEW, NEW], eos_token_id=[])
    next(rounds)
    with pytest.raises(StopIteration) as end:
        rounds.send(True)
    assert end.value.value.finish_reasons == ["length", "cancelled", "cancelled"]


def test_a_stop_string_ends_a_row_between_calls_of_different_depths(target):
    stops = next(stops_in(whole(target).texts[:1], 1))
    options = dict(max_tokens=NEW, eos_token_id=[], stop=stops) | DRAFTED
    request = keywords.prepare(target, PROMPTS, **options)
    decoder, texts = Decoder(request), texts_of(request)
    decoders = {Mode("self", 2): decoder}
    controller = Controller.create(decoders, len(PROMPTS))
    state, calls = run_adaptive(decoders, controller, decoder.start(), texts, rounds=2)
    output = output_of(decoder, state, texts, program_cache.totals(), calls)
    assert "stop" in check_cut(target, output, whole(target), stops)


def test_stop_strings_without_a_tokenizer_are_errors_before_compilation():
    before = program_cache.totals()
    params = magicjax.SamplingParams(stop="a")
    for call in (magicjax.generate, magicjax.stream):
        with pytest.raises(ValueError, match="stop='a': .* has no tokenizer, .* use stop_token"):
            call(tiny.model(), [[1, 2, 3]], params)
    assert program_cache.totals() == before
