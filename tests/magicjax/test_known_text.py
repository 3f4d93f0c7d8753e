"""What a look-up would accept on known text is what it accepts when it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax.autotune.known_text import (
    KnownText,
    Rounds,
    accepted_ahead,
    look_up_counts,
    rounds_of,
)
from magicjax.autotune.trial import behind_prompts, counted_again, run_trial
from magicjax.decoding import runner
from magicjax.decoding.request import prepare
from tests.magicjax import tiny

NEW, DEPTH = 64, 4
LOOK_UP = magicjax.LookUp(max_ngram=3)


@functools.cache
def repeating() -> magicjax.Model:
    """A model that attends evenly, and so comes to repeat itself."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tiny.drawn(tiny.config(), 3))
    return magicjax.Model(models.build(tiny.config()), params)


def request_of(drafter, depth=DEPTH, eos=tiny.NEVER):
    options = dict(max_new_tokens=[NEW, 40, 1, *[NEW] * 5], eos_token_id=eos)
    tree = magicjax.chain(depth)
    return prepare(repeating(), tiny.prompts(8), drafter=drafter, tree=tree, **options)


@functools.cache
def run(depth: int, eos: int | tuple[int, ...] = tiny.NEVER):
    """Returns (the text of all rows, how many tokens, rounds of each row by what they accepted)."""
    request = request_of(LOOK_UP, depth, eos)
    state, *_ = runner.start(request)
    state, *_ = runner.run(request, request.settings, state)
    return np.array(state.output), np.array(state.emitted), np.array(state.histogram)


def known(counts) -> KnownText:
    """Returns text of which so many tokens of each row are known."""
    output, limits, _ = run(DEPTH)
    prompts = tiny.prompts(8)
    text = KnownText(prompts, limits, [output[row, :1] for row in range(8)], [*map(int, limits)])
    text.learn(output, np.minimum(counts, limits), limits == 1)
    return text


def test_rounds_that_are_counted_are_those_that_run():
    text = known(NEW)
    ahead, _ = accepted_ahead(LOOK_UP, text, DEPTH)
    histogram, tokens, _ = look_up_counts(LOOK_UP, text, DEPTH)
    for depth in range(1, DEPTH + 1):
        of_run = run(depth)[2]
        found = [rounds_of(a, depth, w) for a, w in zip(ahead, text.wanted, strict=True)]
        assert [len(row.accepted) for row in found] == of_run.sum(1).tolist()
        assert not any(row.left for row in found)
        assert tokens[depth - 1] == pytest.approx((NEW - 1) / of_run.sum(1).max())
        for row, counted in zip(found, of_run, strict=True):
            uncut = np.bincount(row.accepted[: row.whole], minlength=depth + 1)
            cut = counted[: depth + 1] - uncut  # they ran into the row's end
            assert (cut >= 0).all() and cut.sum() == len(row.accepted) - row.whole <= depth
    assert (
        histogram.tolist()
        == sum(
            np.bincount(row.accepted[: row.whole], minlength=DEPTH + 1) for row in found
        ).tolist()
    )
    assert (histogram > 0).all()  # nothing, all, and whatever is between


def test_a_row_that_ends_early_has_only_the_rounds_to_its_end():
    """Two tokens are made the end, so that one row ends with prefill's, and another later."""
    text = run(DEPTH)[0]
    output, emitted, histogram = run(DEPTH, (int(text[4, 0]), int(text[0, 20])))
    assert emitted[4] == 1 and 1 < emitted[0] <= 21
    text = known(1)
    text.learn(output, emitted, np.full(8, True))
    assert text.wanted == emitted.tolist()
    ahead, _ = accepted_ahead(LOOK_UP, text, DEPTH)
    found = [rounds_of(a, DEPTH, w) for a, w in zip(ahead, text.wanted, strict=True)]
    assert [len(row.accepted) for row in found] == histogram.sum(1).tolist()
    _, tokens, _ = look_up_counts(LOOK_UP, text, DEPTH)
    assert tokens[-1] == (emitted.max() - 1) / histogram.sum(1).max()


@pytest.mark.parametrize("count", [5, 6, 23, 40, 63])
def test_of_a_part_of_the_text_only_rounds_are_counted_whose_end_is_known(count):
    whole, part = known(NEW), known(count)
    of_whole, _ = accepted_ahead(LOOK_UP, whole, DEPTH)
    of_part, _ = accepted_ahead(LOOK_UP, part, DEPTH)
    for row, wanted in enumerate(whole.wanted):
        every = rounds_of(of_whole[row], DEPTH, wanted)
        found = rounds_of(of_part[row], DEPTH, wanted)
        assert found.accepted == every.accepted[: len(found.accepted)]
        emitted = 1 + sum(found.accepted) + len(found.accepted)
        assert found.left == max(0, wanted - emitted)  # the last round may end the row early
        assert len(part.new[row]) == wanted or emitted > count - DEPTH
    assert look_up_counts(LOOK_UP, part, DEPTH)[0].sum() > 0


def test_what_is_to_come_is_like_the_later_half_of_what_is_known(monkeypatch):
    """Chains of 1: a row accepts nothing, then everything; another knows nothing of itself."""
    rows = [np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]), np.array([0])]
    monkeypatch.setattr("magicjax.autotune.known_text.accepted_ahead", lambda *given: (rows, 0.0))
    text = KnownText([], np.array([101, 51]), [], [101, 51])
    # The first: 4 rounds of 1 and 4 of 2 tokens are known, 88 tokens are left, 2 a round.
    assert rounds_of(rows[0], 1, 101) == Rounds((0, 0, 0, 0, 1, 1, 1, 1), 8, 88)
    histogram, tokens, _ = look_up_counts(LOOK_UP, text, 1)
    assert histogram.tolist() == [4, 4]
    assert tokens == (100 / (8 + 44),)


def test_too_little_text_says_nothing():
    histogram, tokens, _ = look_up_counts(LOOK_UP, known(1), DEPTH)
    assert not histogram.any() and tokens == ()


def test_the_longest_text_of_each_row_is_kept_and_where_it_ends():
    text = KnownText([], np.array([9, 9]), [np.array([0]), np.array([10])], [9, 9])
    output = np.arange(20).reshape(2, 10)
    text.learn(output, np.array([3, 1]), np.array([False, False]))
    assert [new.tolist() for new in text.new] == [[0, 1, 2], [10]]
    text.learn(output + 1, np.array([2, 4]), np.array([True, True]))
    assert [new.tolist() for new in text.new] == [[0, 1, 2], [11, 12, 13, 14]]
    assert text.wanted == [9, 4]  # less of the first was said than is known
    text.learn(output, np.array([3, 9]), np.array([False, True]))
    assert text.wanted == [9, 9]


def test_a_look_up_is_judged_by_the_longest_text_of_any_trial():
    other = magicjax.SmallModel(repeating())  # all it drafts is right
    requests = {"look-up": request_of(LOOK_UP), "other": request_of(other)}
    behind, _, _ = behind_prompts(requests["other"], [LOOK_UP, other])
    alone, _ = run_trial(requests["look-up"], "look-up", behind, 4)
    long, _ = run_trial(requests["other"], "other", behind, 20)
    found, _ = counted_again(alone, requests["look-up"], behind)
    steps = [run(depth)[2].sum(1).max() for depth in range(1, DEPTH + 1)]
    assert found.tokens == pytest.approx([(NEW - 1) / n for n in steps])
    assert found.tokens != alone.tokens and found.seconds == alone.seconds
    assert counted_again(long, requests["other"], behind) == (long, 0.0)
