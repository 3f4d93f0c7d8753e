"""Texts equal those of `generate` up to a stop string, in any shape and batch."""

import dataclasses

import numpy as np
import pytest

import magicjax
from experiments.lm_eval import continuation
from experiments.lm_eval.continuation import continue_until
from magicjax.decoding import program_cache
from magicjax.decoding.request import prepare

NEW = 40
OPTIONS = {
    "plain": {},
    "self": dict(drafter=magicjax.SelfSpeculation(budget=64), tree=magicjax.chain(3)),
    "prompt-lookup": dict(drafter=magicjax.PromptLookup(), tree=magicjax.chain(2)),
}
SOURCE = "def f1(x1):\n    return x1 + 1\n\n\ndef f2(x2):\n    return x2 + 2\n"


@pytest.fixture
def target(zoo):
    return magicjax.load(zoo / "target", dtype="float32")


def prompts_of(target):
    ids = target.tokenizer(SOURCE * 3)["input_ids"]
    return [ids[:70], ids[3:40], ids[10:12]]


@pytest.mark.parametrize("kind", OPTIONS)
def test_without_a_stop_string_texts_equal_plain_generate(target, kind):
    prompts = prompts_of(target)
    expected = magicjax.generate(target, prompts, max_new_tokens=NEW)
    result = continue_until(target, prompts, [], max_new_tokens=NEW, **OPTIONS[kind])
    assert result.texts == expected.texts
    assert result.emitted == expected.stats.emitted
    if kind == "plain":
        assert result.target_passes == result.emitted


def test_a_text_ends_before_the_first_of_its_stop_strings(target):
    prompts = prompts_of(target)
    whole = continue_until(target, prompts, [], max_new_tokens=NEW).texts
    stops = [whole[0][9:12], whole[1][5:7], "", "never written"]
    result = continue_until(target, prompts, stops, max_new_tokens=NEW, **OPTIONS["self"])
    for text, cut in zip(whole, result.texts, strict=True):
        ends = [i for stop in stops if stop and (i := text.find(stop)) >= 0]
        assert cut == text[: min(ends, default=len(text))]
    assert len(result.texts[0]) <= 9


def test_the_loop_ends_when_every_row_contains_a_stop_string(target, monkeypatch):
    monkeypatch.setattr(continuation, "ROUNDS", 4)
    prompts = prompts_of(target)
    whole = continue_until(target, prompts, [], max_new_tokens=NEW)
    early = continue_until(target, prompts, [text[2:4] for text in whole.texts], max_new_tokens=NEW)
    assert early.target_passes < whole.target_passes == 3 * (NEW - 1)
    assert early.target_passes % (3 * 4) == 0  # calls of four rounds


def test_the_text_of_a_row_excludes_its_eos_token(target):
    prompts = prompts_of(target)
    tokens = magicjax.generate(target, prompts, max_new_tokens=NEW).tokens
    ends = dataclasses.replace(target, eos_token_ids=(int(tokens[0, 5]),))
    expected = magicjax.generate(ends, prompts, max_new_tokens=NEW)
    result = continue_until(ends, prompts, [], max_new_tokens=NEW)
    row = expected.tokens[0, : expected.lengths[0]]
    assert expected.lengths[0] <= 6 and row[-1] == ends.eos_token_ids[0]
    assert result.texts[0] == target.tokenizer.decode(row[:-1])


@pytest.mark.slow
def test_samples_depend_on_the_index_of_the_prompt_and_not_on_the_batch(target):
    prompts = prompts_of(target)
    sampled = dict(max_new_tokens=NEW, do_sample=True, temperature=1.5, seed=3)
    batch = continue_until(target, prompts, [], indices=[4, 5, 6], **sampled).texts
    alone = continue_until(target, prompts[2:], [], indices=[6], rows=3, **sampled).texts
    other = continue_until(target, prompts[2:], [], indices=[7], rows=3, **sampled).texts
    assert alone == batch[2:] and other != alone
    expected = magicjax.generate(target, prompts, **sampled).texts
    assert continue_until(target, prompts, [], **sampled).texts == expected


def test_prompts_of_similar_lengths_share_their_programs(target):
    ids = prompts_of(target)[0]
    continue_until(target, [ids[:64], ids[:30]], ["\n"], max_new_tokens=8, rows=2)
    before = program_cache.totals()
    continue_until(target, [ids[:33]], [], max_new_tokens=8, rows=2)
    continue_until(target, [ids[:50], ids[:3]], ["x"], max_new_tokens=8, rows=2)
    assert program_cache.totals() == before


def test_a_prompt_may_fill_the_models_positions(target):
    ids = (prompts_of(target)[0] * 4)[: 256 - 8]
    result = continue_until(target, [ids], [], max_new_tokens=8)
    assert result.texts == magicjax.generate(target, [ids], max_new_tokens=8).texts
    with pytest.raises(ValueError, match="257 positions, and the target has 256"):
        continue_until(target, [[*ids, 5]], [], max_new_tokens=8)


def test_bad_input_is_refused(target, tiny):
    with pytest.raises(ValueError, match="rows=1 is too small: give at least 2"):
        continue_until(target, [[1], [2]], [], max_new_tokens=1, rows=1)
    model = magicjax.Model(tiny.module, tiny.params, name="mute")
    with pytest.raises(ValueError, match="target 'mute' has no tokenizer"):
        continue_until(model, [[1]], [], max_new_tokens=1)
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        continue_until(target, [[1]], [], max_new_tokens=1, do_sample=True, temperature=0)


def test_a_bucket_has_room_for_the_request(target):
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths, new = rng.integers(1, 200, 3), int(rng.integers(1, 56))
        tree = magicjax.chain(int(rng.integers(1, 9)))
        options = dict(drafter=magicjax.PromptLookup(), tree=tree, max_new_tokens=new)
        request = prepare(target, [[1] * int(n) for n in lengths], **options)
        settings = continuation.in_bucket(request).settings
        width = continuation.in_bucket(request).tokens.shape[1]
        assert width % settings.chunk == 0 and lengths.max() <= width <= settings.capacity
        assert settings.capacity >= lengths.max() + new + 2 * tree.depth + 1
