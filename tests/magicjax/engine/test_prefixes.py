"""Prompts that share a beginning prefill it once, and get the texts of plain decoding."""

import jax
import numpy as np
import pytest

import magicjax
from magicjax import SamplingParams
from magicjax.decoding import program_cache
from magicjax.engine import prefix_store
from magicjax.kv_cache.full_cache import KVCache
from tests.magicjax import oracle, tiny
from tests.magicjax.engine import engines
from tests.magicjax.engine.test_schedules import Long
from tests.quick import quick

NEW = 8
GREEDY = SamplingParams(max_tokens=NEW)
DRAFTERS = ("plain", "streaming", "snapkv", "small", "sparse small", "ensemble", "eagle", "cascade")


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.1, seed=seed, max_tokens=NEW)


def questions(count: int, common: int = 250) -> list[np.ndarray]:
    """Returns prompts that begin with the same document."""
    document = Long.prompt(common)
    return [np.concatenate([document, Long.prompt(10 + n)]) for n in range(count)]


@pytest.mark.parametrize("name", quick(DRAFTERS, "ensemble"))
def test_questions_on_one_document_prefill_it_once(name, tally):
    engine, asked = Long.engine(name), questions(4)
    engine.warm_up()
    compiled = program_cache.totals()
    handles = [engine.submit(prompt, GREEDY) for prompt in asked]
    while engine.unfinished:
        engine.step()
        state, texts = engines.rows_of(engine)
        np.testing.assert_array_equal(state.cache.lengths, [len(text) - 1 for text in texts])
    assert program_cache.totals() == compiled
    rows = [handle.result().tokens for handle in handles]
    plain = [oracle.greedy(tiny.model(), prompt, NEW) for prompt in asked]
    tally.compare(tiny.model(), asked, plain, rows)
    for number, handle in enumerate(handles):
        stats = handle.result().stats
        assert stats.reused_tokens == (250 if number else 0)
        window = max(1, engine._setup.prefill_rule.window)
        whole = number == 0
        assert stats.prefilled_tokens <= (len(asked[0]) + window if whole else 13 + window)
    assert (engine.stats.prefix_lookups, engine.stats.prefix_hits) == (4, 3)
    assert engine.stats.reused_tokens == 750


@pytest.mark.parametrize("name", quick(["plain", "snapkv", "h2o", "small"], "plain"))
def test_samples_of_one_prompt_are_those_of_separate_requests(name):
    engine, prompt = Long.engine(name, sampling=True), Long.prompt(150)
    samples = engine.submit_samples(prompt, 4, sampled(3))
    separate = Long.engine(name, sampling=True, prefix_bytes=0)
    alone = [separate.submit(prompt, sampled(seed)) for seed in range(3, 7)]
    again = separate.submit_samples(prompt, 2, sampled(3))
    for each in (engine, separate):
        each.run()
    texts = [handle.result().tokens.tolist() for handle in samples]
    assert texts == [handle.result().tokens.tolist() for handle in alone]
    assert texts[:2] == [handle.result().tokens.tolist() for handle in again]
    assert len(set(map(tuple, texts))) > 1
    whole = name == "h2o"
    reused = [handle.result().stats.reused_tokens for handle in samples]
    assert reused == ([0] * 4 if whole else [0, 149, 149, 149])
    assert all(not handle.result().stats.reused_tokens for handle in (*alone, *again))


@pytest.mark.slow
def test_a_prefix_is_not_changed_by_those_who_start_from_it(tally):
    engine = Long.engine("ensemble", prefix_bytes=None)
    asked = [*questions(3), questions(1, common=120)[0], questions(1)[0]]
    for prompt in asked:
        found = engine.submit(prompt, GREEDY).result().tokens
        plain = oracle.greedy(tiny.model(), prompt, NEW)
        tally.compare(tiny.model(), [prompt], [plain], [found])


@pytest.mark.parametrize("name", quick(DRAFTERS, "ensemble"))
def test_the_turns_of_a_chat_prefill_only_what_is_new(name, tally):
    engine, text = Long.engine(name), Long.prompt(100)
    engine.warm_up()
    compiled, known = program_cache.totals(), 0
    for turn in range(3):
        found = engine.submit(text, GREEDY).result()
        plain = oracle.greedy(tiny.model(), text, NEW)
        tally.compare(tiny.model(), [text], [plain], [found.tokens])
        assert found.stats.reused_tokens == known
        known = len(text) + NEW - 1  # the last token was pending
        text = np.concatenate([text, found.tokens, Long.prompt(20 + turn)])
    assert program_cache.totals() == compiled
    assert engine.stats.prefix_bytes == sum(engine._setup.row.kv_bytes)


def with_token(text: np.ndarray, position: int) -> np.ndarray:
    """Returns the text with another token there."""
    text = text.copy()
    text[position] = (text[position] + 1) % (tiny.VOCAB - 1)
    return text


CHANGES = {  # a later text as a function of a text of 100 tokens with its answer; what they share
    "the last answer": (lambda text: np.concatenate([text[:-5], Long.prompt(9)]), 100 + NEW - 5),
    "a token in the middle": (lambda text: with_token(text, 80), 80),
    "a token in the first step of prefill": (lambda text: with_token(text, 10), 0),
    "shorter": (lambda text: text[:70], 69),  # the last token's hidden state is needed
    "the same": (lambda text: text[:100], 99),
}


def test_a_text_that_changed_earlier_is_prefilled_from_there(tally):
    """Chat templates may render earlier messages differently, and a chat may start again."""
    engine = Long.engine("ensemble")
    for change, shared in CHANGES.values():
        engine._prefixes.clear()
        first = engine.submit(Long.prompt(100), GREEDY).result().tokens
        text = change(np.concatenate([Long.prompt(100), first]))
        found = engine.submit(text, GREEDY).result()
        assert found.stats.reused_tokens == shared
        assert found.stats.prefilled_tokens == len(text) - shared
        plain = oracle.greedy(tiny.model(), text, NEW)
        tally.compare(tiny.model(), [text], [plain], [found.tokens])


def test_a_cancelled_answer_can_be_continued(tally):
    engine = Long.engine("ensemble", rounds_per_step=1)
    handle = engine.submit(Long.prompt(100))
    while handle.text.emitted < 3:
        engine.step()
    handle.cancel()
    text = np.concatenate([Long.prompt(100), handle.result().tokens, Long.prompt(4)])
    found = engine.submit(text, GREEDY).result()
    assert found.stats.prefilled_tokens == 5  # the last token of the answer was pending
    plain = oracle.greedy(tiny.model(), text, NEW)
    tally.compare(tiny.model(), [text], [plain], [found.tokens])


@pytest.mark.slow
def test_an_offloaded_target_gives_the_texts_of_a_resident_one(tally):
    config = magicjax.EngineConfig(slots=1, capacity=400, eos_token_id=tiny.NEVER)
    engine = magicjax.Engine(magicjax.offload(tiny.model()), config=config)
    text = Long.prompt(100)
    for turn in range(2):
        found = engine.submit(text, GREEDY).result()
        assert (found.stats.reused_tokens > 0) == (turn > 0)
        plain = oracle.greedy(tiny.model(), text, NEW)
        tally.compare(tiny.model(), [text], [plain], [found.tokens])
        text = np.concatenate([text, found.tokens, Long.prompt(20)])


def entry(tokens) -> prefix_store.Prefix:
    cache = KVCache((), (), jax.numpy.array([len(tokens)]), ())
    return prefix_store.Prefix(np.array(tokens, np.int32), cache, None)


def held(store) -> list[list[int]]:
    return [prefix.tokens.tolist() for prefix in store._entries]


def test_the_store_evicts_the_least_recently_used_prefix():
    store = prefix_store.PrefixStore(max_bytes=250, entry_bytes=100, min_shared=2)
    assert store.add(entry([1, 2, 3])) is None
    assert store.add(entry([4, 5])) is None and store.num_bytes == 200
    row, common = store.copy_longest(np.array([1, 2, 9]))
    assert common == 2 and int(row[0].lengths[0]) == 3
    unused = store.add(entry([6, 7]))
    assert int(unused[0].lengths[0]) == len([4, 5])
    assert held(store) == [[1, 2, 3], [6, 7]]
    assert (store.lookups, store.hits, store.reused_tokens) == (1, 1, 2)


def test_the_store_keeps_the_longest_of_prefixes_of_each_other():
    store = prefix_store.PrefixStore(max_bytes=300, entry_bytes=100, min_shared=1)
    store.add(entry([1, 2]))
    store.add(entry([7]))
    longer, shorter = entry([1, 2, 3]), entry([1, 2])
    assert int(store.add(longer)[0].lengths[0]) == len([1, 2])
    assert store.add(shorter)[0] is shorter.cache and held(store) == [[7], [1, 2, 3]]


def test_too_few_common_tokens_are_no_hit():
    store = prefix_store.PrefixStore(max_bytes=100, entry_bytes=100, min_shared=3)
    store.add(entry([1, 2, 3]))
    assert store.copy_longest(np.array([1, 2, 9])) == (None, 0)
    assert (store.lookups, store.hits) == (1, 0)
    short = entry([4, 5])  # no prompt shares enough with it
    assert store.add(short)[0] is short.cache and held(store) == [[1, 2, 3]]


def test_the_most_recently_used_of_equally_long_prefixes_is_copied():
    store = prefix_store.PrefixStore(max_bytes=300, entry_bytes=100, min_shared=2)
    for tokens in ([1, 2, 3, 4], [1, 2, 5]):
        store.add(entry(tokens))
    row, common = store.copy_longest(np.array([1, 2, 9]))
    assert common == 2 and int(row[0].lengths[0]) == len([1, 2, 5])


def test_a_store_of_no_bytes_keeps_nothing():
    store = prefix_store.PrefixStore(max_bytes=0, entry_bytes=100, min_shared=1)
    first = entry([1, 2])
    assert store.add(first)[0] is first.cache
    assert store.copy_longest(np.array([1, 2])) == (None, 0) and store.lookups == 0
