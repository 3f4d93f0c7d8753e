"""Replies are plain decoding of the whole text, and prefill only new tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache, runner
from magicjax.decoding.conversation import CHUNK, Conversation, Reply, validate_conversation
from magicjax.decoding.request import capacity_of
from magicjax.engine.templates import make_templates
from magicjax.policies import Quest, SnapKV
from tests.magicjax import oracle, tiny
from tests.magicjax.decoding.test_compiled import WIDE, moved_caches, shaped
from tests.magicjax.kv_cache import test_loop_caches as caches
from tests.quick import quick

NEW = 12
WINDOW = 20
LIMIT = 480  # most tokens of a conversation
# New tokens of each turn: one, around a chunk, several chunks.
ADDED = (5, 1, CHUNK - 1, CHUNK, CHUNK + 1, 130)
DRAFTERS = {
    "plain": None,
    "prompt lookup": magicjax.PromptLookup(),
    "streaming": tiny.drafter("self"),
    "full": magicjax.SelfSpeculation("full"),
    "snapkv": magicjax.SelfSpeculation(SnapKV(window=WINDOW), 64, refresh_every=2),
    "quest": magicjax.SelfSpeculation(Quest(page_size=8), 64),
    "small": tiny.drafter("near"),
    "ensemble": magicjax.Ensemble([tiny.drafter("near"), magicjax.PromptLookup()]),
}


def converse(drafter=None, **options) -> Conversation:
    options = dict(max_context=LIMIT, max_new_tokens=NEW, eos_token_id=tiny.NEVER) | options
    return Conversation.create(tiny.model(), drafter=drafter, **options)


@pytest.mark.parametrize(
    ("tokens", "depth", "chunk", "slots"),
    [(500, 4, 64, 576), (448, 4, 64, 512), (449, 4, 64, 576), (503, 4, 0, 512), (504, 4, 0, 576)]
    + [(440, 40, 64, 576)],
)
def test_slots_hold_the_text_and_a_chunk_or_a_path(tokens, depth, chunk, slots):
    assert capacity_of(tokens, depth, chunk) == slots


def test_conversations_and_engines_have_the_same_slots():
    for drafter, tree in ((None, None), (tiny.drafter("self"), tiny.TREES["chain4"])):
        options = dict(drafter=drafter, tree=tree)
        request, _ = validate_conversation(tiny.model(), LIMIT, NEW, options)
        templates = make_templates(tiny.model(), 1, LIMIT, NEW, None, 8, 0, options)
        depth = request.settings.shape.depth
        assert request.settings.capacity == capacity_of(LIMIT, depth, CHUNK)
        assert templates.row.settings.capacity == request.settings.capacity


def finish(rounds) -> tuple[np.ndarray, Reply]:
    """Returns the streamed tokens, and the reply."""
    tokens = []
    while True:
        try:
            tokens.append(next(rounds)[0])
        except StopIteration as end:
            return np.concatenate(tokens), end.value


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB - 1, count).astype(np.int32)


@functools.cache
def plain(text: tuple[int, ...]) -> np.ndarray:
    """Returns the oracle's answer."""
    return oracle.greedy(tiny.model(), text, NEW)


def check_reply(reply: Reply, found: np.ndarray, text: np.ndarray, tally) -> None:
    """Asserts that a reply is plain decoding's, and its cache that of a fresh prefill."""
    tally.compare(tiny.model(), [text], [plain(tuple(text.tolist()))], [found])
    conversation = reply.conversation
    np.testing.assert_array_equal(reply.output.tokens[0], found)
    np.testing.assert_array_equal(conversation.tokens, [*text, *found[:-1]])
    cache = jax.tree.map(np.asarray, conversation.cache)
    np.testing.assert_array_equal(cache.lengths, [len(conversation.tokens)])
    check_cache(cache, conversation.tokens)


def check_cache(cache, tokens) -> None:
    capacity = cache.k[0].shape[2]
    padded = np.zeros((1, capacity - capacity % caches.WIDTH), np.int32)
    padded[0, : len(tokens)] = tokens
    fresh = caches.fresh_prefill(capacity)(tiny.model(), padded, jnp.array([len(tokens)]))
    live = slice(0, len(tokens))
    for found, expected in zip((*cache.k, *cache.v), (*fresh.k, *fresh.v), strict=True):
        expected = np.asarray(expected)[:, :, live]
        assert np.abs(found[:, :, live] - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", quick(DRAFTERS, "snapkv"))
def test_replies_are_those_of_the_whole_text_and_prefill_only_new_tokens(name, tally):
    window = WINDOW if name == "snapkv" else 1
    conversation, text = converse(DRAFTERS[name]), np.zeros(0, np.int32)
    for turn, added in enumerate(ADDED):
        text = np.concatenate([text, random_tokens(added, turn)])
        cached, before = len(conversation.tokens), program_cache.totals()[0]
        found, reply = finish(conversation.reply(text))
        compiled = program_cache.totals()[0] - before
        assert reply.prefilled == min(len(text), max(len(text) - cached, window))
        assert reply.output.stats.compilations == compiled
        assert turn == 0 or compiled == 0
        check_reply(reply, found, text, tally)
        conversation, text = reply.conversation, reply.output.sequences[0]


CHANGES = {  # a later text as a function of the text after an answer; the tokens that it prefills
    "the last answer": lambda text: (np.concatenate([text[:-5], random_tokens(9, 3)]), 9),
    "a token in the middle": lambda text: (with_token(text, 40), len(text) - 40),
    "the first token": lambda text: (with_token(text, 0), len(text)),
    "shorter": lambda text: (text[:70], 1),
    "the same": lambda text: (text[: len(text) - NEW], 1),
}


def with_token(text: np.ndarray, position: int) -> np.ndarray:
    """Returns the text with another token there."""
    text = text.copy()
    text[position] = (text[position] + 1) % (tiny.VOCAB - 1)
    return text


@pytest.mark.parametrize("what", CHANGES)
def test_a_text_that_changed_earlier_is_prefilled_from_there(what, tally):
    """Chat templates may render earlier messages differently, and /reset starts again."""
    found, reply = finish(converse(DRAFTERS["ensemble"]).reply(random_tokens(100)))
    text, prefilled = CHANGES[what](reply.output.sequences[0])
    found, reply = finish(reply.conversation.reply(text))
    assert reply.prefilled == prefilled
    assert reply.output.stats.compilations == 0
    check_reply(reply, found, text, tally)


def test_a_stopped_answer_is_the_beginning_of_the_whole_one_and_can_be_continued(tally):
    whole, _ = finish(converse().reply(random_tokens(30)))
    rounds = converse().reply(random_tokens(30))
    found = np.concatenate([next(rounds)[0] for _ in range(3)])
    with pytest.raises(StopIteration) as end:
        rounds.send(True)
    reply = end.value.value
    np.testing.assert_array_equal(found, whole[:3])
    text = np.concatenate([reply.output.sequences[0], random_tokens(4, 1)])
    found, reply = finish(reply.conversation.reply(text))
    assert reply.prefilled == 5  # the last token of the answer was pending
    check_reply(reply, found, text, tally)


def test_sampled_replies_are_those_of_generate():
    options = dict(do_sample=True, temperature=0.8, seed=3)
    drafter = DRAFTERS["streaming"]
    _, reply = finish(converse(drafter, **options).reply(random_tokens(30)))
    text = np.concatenate([reply.output.sequences[0], random_tokens(40, 1)])
    found, _ = finish(reply.conversation.reply(text))
    options |= dict(drafter=drafter, max_new_tokens=NEW, eos_token_id=tiny.NEVER)
    expected = magicjax.generate(tiny.model(), [text], **options).tokens[0]
    np.testing.assert_array_equal(found, expected)


def test_an_answer_ends_at_the_end_of_the_context(tally):
    conversation = converse(DRAFTERS["prompt lookup"])
    found, reply = finish(conversation.reply(random_tokens(LIMIT - 3)))
    assert len(found) == 3 and len(reply.output.sequences[0]) == LIMIT
    with pytest.raises(
        ValueError,
        match=f"has {LIMIT} tokens with this message, and max_context={LIMIT} leaves no room",
    ):
        reply.conversation.reply(random_tokens(LIMIT))
    finish(reply.conversation.reply(random_tokens(10)))  # the conversation is still usable


REFUSED = {
    "sums": (dict(drafter=magicjax.SelfSpeculation("h2o", 64)), "sums the attention .* snapkv"),
    "sums of one member": (
        dict(drafter=magicjax.Ensemble([magicjax.SelfSpeculation("h2o", 64)])),
        "sums the attention",
    ),
    "a sparse small model": (
        dict(drafter=magicjax.SmallModel(tiny.model("near"), policy="streaming", budget=64)),
        "would prefill the whole conversation in every turn: use policy='full'",
    ),
    "beyond the model": (dict(max_context=600), "max_context=600: .* the 512 positions"),
    "no context": (dict(max_context=1), "max_context=1: it must be at least 2"),
    "no new tokens": (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_conversation_cannot_have_is_an_error_before_compilation(what):
    options, message = REFUSED[what]
    before = program_cache.totals()
    with pytest.raises(ValueError, match=message):
        converse(**options)
    assert program_cache.totals() == before


def test_tokens_outside_the_vocabulary_and_no_tokens_are_errors():
    conversation = converse()
    with pytest.raises(ValueError, match="outside the target's vocabulary"):
        conversation.reply([tiny.VOCAB])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        conversation.reply([])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
def test_extending_a_cache_copies_none():
    request, _ = validate_conversation(shaped(WIDE), 16000, 32, {"drafter": DRAFTERS["streaming"]})
    state = runner.state_shapes(request)
    target, *inputs = request.prefill_arguments
    arguments = target, state.cache, *inputs
    program = program_cache.program("extend", request.prefill_settings, *arguments)
    assert moved_caches(program, {"target": state.cache.k[0].size}) == {}
    held = 2 * WIDE.num_layers * state.cache.k[0].size * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 4


def replies_elsewhere(mesh: list[int]) -> list[int]:
    """Returns the tokens of two replies on a mesh; runs in a process with eight devices."""
    made = magicjax.make_mesh(*mesh)
    conversation = converse(DRAFTERS["streaming"], mesh=made)
    first, reply = finish(conversation.reply(random_tokens(30)))
    text = np.concatenate([reply.output.sequences[0], random_tokens(40, 1)])
    return np.concatenate([first, finish(reply.conversation.reply(text))[0]]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2), (1, 1, 2)])
def test_replies_on_a_mesh_are_those_of_one_device(mesh, eight):
    assert eight(replies_elsewhere, mesh=mesh) == replies_elsewhere((1, 1))


def test_replies_of_an_offloaded_target_are_those_of_a_resident_one(tally):
    target = magicjax.offload(tiny.model())
    options = dict(max_context=LIMIT, max_new_tokens=NEW, eos_token_id=tiny.NEVER)
    conversation, text = magicjax.Conversation.create(target, **options), random_tokens(30)
    for _ in range(2):
        found, reply = finish(conversation.reply(text))
        check_reply(reply, found, text, tally)
        conversation = reply.conversation
        text = np.concatenate([reply.output.sequences[0], random_tokens(40, 1)])
