"""Self-speculation on pages of the target's cache: what is accepted, when pages change, errors."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import magicjax
from magicjax.decoding import loop as decoding_loop
from magicjax.decoding.decoder import Decoder
from magicjax.drafters.spec import make_drafter, text_of
from magicjax.kv_cache import full_cache
from magicjax.trees.token_tree import ROOT_ONLY
from tests.magicjax import keywords, tiny
from tests.magicjax.kv_cache import test_loop_caches as loop
from tests.quick import quick


def drafter(budget: int = 16, every: int = 1, **options) -> magicjax.PageRetrieval:
    return magicjax.PageRetrieval(budget, None, every, **dict(page_size=4) | options)


def generate(own: magicjax.PageRetrieval) -> magicjax.Output:
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    tree = tiny.TREES["chain4"]
    return keywords.generate(tiny.model(), tiny.prompts(8), drafter=own, tree=tree, **options)


@pytest.mark.parametrize("every", quick([1, 3]))
def test_a_budget_of_the_whole_context_accepts_everything(every):
    longest = 30 + tiny.NEW
    output = generate(drafter(-(-longest // 4) * 4, every))
    assert output.stats.acceptance_by_depth == (1.0,) * 4


def test_a_small_budget_does_not():
    assert generate(drafter()).stats.acceptance_by_depth[0] < 0.9


@pytest.mark.slow
def test_pages_change_only_in_every_third_round_of_a_row(monkeypatch):
    monkeypatch.setattr(tiny, "drafter", lambda *_: drafter(every=3))
    prompts, seen = loop.prompts_around_the_budget(), []
    for _, state in loop.rounds("quest", "chain4", prompts, "float32"):
        seen.append(state.drafter.chosen_pages[1][5])  # the row of 30 tokens
    moved = [not np.array_equal(a, b) for a, b in zip(seen, seen[1:], strict=False)]
    assert moved[0] and sum(moved) > 1
    assert not any(m for number, m in enumerate(moved) if number % 3)


def test_a_round_without_a_draft_leaves_the_choice_to_the_next_one():
    """An engine may draft nothing for some rounds (`Settings.with_tree`)."""
    own = drafter(every=2)
    request = keywords.prepare(
        tiny.model(),
        loop.prompts_around_the_budget(),
        drafter=own,
        tree=tiny.TREES["chain4"],
        max_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
    )
    state = Decoder(request).start()
    before = jax.tree.map(np.array, (state.drafter.chosen_pages, state.drafter.wait))
    settings = request.settings.with_tree(ROOT_ONLY)
    settings = dataclasses.replace(settings, shape=request.settings.shape)
    after = jax.jit(lambda *a: decoding_loop.step(settings, *a))(request.target, own, state)
    np.testing.assert_array_equal(after.cache.lengths, np.asarray(state.cache.lengths) + 1)
    for old, new in zip(before[0], after.drafter.chosen_pages, strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(before[1], after.drafter.wait)


def test_no_more_pages_are_chosen_than_the_cache_has():
    for slots, chosen in ((64, 1), (448, 19), (512, 23), (1024, 23)):
        cache = full_cache.empty(tiny.model(), 2, slots)
        state = magicjax.PageRetrieval(512).prefill(tiny.model(), None, cache, None, None)
        assert {pages.shape[2] for pages in state.chosen_pages} == {chosen}


def test_defaults_and_bytes():
    found = magicjax.PageRetrieval(512)
    assert (found.num_newest_pages, found.num_chosen_pages, found.refresh_every) == (8, 23, 1)
    assert drafter(51, page_size=16, recent=20).num_newest_pages == 2
    model = tiny.model()
    # Two of 16 vectors of the keys, which are half of the cache.
    assert magicjax.PageRetrieval().cache_bytes(model, 3, 640) == (model.kv_bytes(3, 640) // 16)


REFUSED = {
    "page_size": (lambda: drafter(page_size=24), "page_size=24: it must divide 64"),
    "no page_size": (lambda: drafter(page_size=0), "page_size=0: it must divide 64"),
    "recent below 1": (lambda: drafter(recent=0), "recent=0: use at least 1"),
    "weights": (lambda: drafter(weights="int3"), "int3"),
    "every": (lambda: drafter(every=0), "refresh_every=0: it must be at least 1"),
    "budget": (
        lambda: check(drafter(11)),
        "budget=11 is too small: use at least 12, for 3 pages of 4 slots (the first, 1 of the "
        "newest tokens, 1 chosen",
    ),
    "recent": (
        lambda: check(drafter(16, recent=9)),
        "use at least 20, for 5 pages of 4 slots (the first, 3 of the newest",
    ),
    "larger page": (
        lambda: check(drafter(48, page_size=64)),
        "budget=48 is too small: use at least 192",
    ),
    "context": (lambda: check(drafter(600)), "budget=600 is larger than the context .* 512"),
}


def check(own: magicjax.PageRetrieval) -> None:
    own.check(tiny.model(), tiny.TREES["chain4"], 4, 100)


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_settings_are_refused_before_anything_is_compiled(what):
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as error:
        make()
    assert re.search("use|omit", str(error.value))
    check(drafter(12))  # the minimum that the error names


def test_the_text_of_a_drafter_has_the_page_size():
    made = make_drafter("quest:512:page_size=32:refresh_every=4", None)
    assert made == magicjax.PageRetrieval(512, refresh_every=4, page_size=32)
    assert text_of(made) == "quest:512:refresh_every=4:page_size=32"
