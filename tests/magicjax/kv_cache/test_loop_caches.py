"""After every round each cache equals that of a fresh prefill, for every accepted path."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding.decoder import Decoder
from magicjax.kv_cache import full_cache, prefill
from magicjax.settings import StatsSpec
from tests.magicjax import keywords, oracle, tiny
from tests.magicjax.kv_cache import test_pages
from tests.quick import quick

WIDTH = 64  # of a fresh prefill: every text so far fits
# Prompts shorter than, of, and just over the budget of 12; the program is that of other tests.
LENGTHS = (1, 11, 12, 13, 10, 30, 14, 2)


def prompts_around_the_budget():
    rng = np.random.default_rng(3)
    return [rng.integers(0, tiny.VOCAB, n).astype(np.int32) for n in LENGTHS]


def rounds(kind, tree, prompts, dtype, target="target", **options):
    """Yields the request and the state as numpy, after prefill and after each round."""
    request = keywords.prepare(
        tiny.model(target, dtype),
        prompts,
        drafter=tiny.drafter(kind, dtype) if kind else None,
        tree=(tiny.TREES | tiny.SPECIAL)[tree] if kind else None,
        max_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
        **options,
    )
    state = Decoder(request).start()
    while True:
        # Copies, because the next round donates the state. PRNG keys have no numpy form.
        seen = jax.tree.map(np.array, state.replace(rows=state.rows.replace(sampling=None)))
        yield request, seen
        if seen.ended.all():
            return
        state = Decoder(request).decode(state, 1)


@functools.cache
def fresh_prefill(capacity: int):
    settings = types.SimpleNamespace(chunk=WIDTH // 2, capacity=capacity, backend=None)

    @jax.jit
    def run(model, tokens, lengths):
        return prefill.prefill_cache(model, tokens, lengths, settings, StatsSpec())[0]

    return run


def check_cache(cache, model, texts, lengths, tolerance) -> None:
    """Asserts that the live entries are those of a prefill of each text's first tokens."""
    count = len(texts)
    rows = -(-count // 8) * 8  # few shapes, few programs
    tokens, padded = np.zeros((rows, WIDTH), np.int32), np.ones(rows, np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    padded[:count] = lengths
    fresh = fresh_prefill(cache.slots.shape[2])(model, tokens, padded)
    fresh = jax.tree.map(lambda x: np.asarray(x)[:count], fresh)
    # An element of a cache in 8 bits that is rounded to another step changes what follows.
    of_states = tolerance * (oracle.STEP if model.kv_bits else 1)
    for found, expected in zip(*map(jax.tree.leaves, (cache.states, fresh.states)), strict=True):
        error = np.abs(found - expected).max()
        assert error <= of_states * np.abs(expected).max(), error / np.abs(expected).max()
    live = (np.arange(cache.slots.shape[2]) < lengths[:, None])[:, None, :, None]
    for found, expected in zip((*cache.k, *cache.v), (*fresh.k, *fresh.v), strict=True):
        if found is None:
            continue
        found, expected = (full_cache.elements(x, np.float32) for x in (found, expected))
        expected = np.where(live, expected, 0)
        error = np.abs(np.where(live, found, 0) - expected)
        if model.kv_bits:  # float32 rounds a few elements to another step
            steps = error > tolerance * np.abs(expected).max()
            assert steps.mean() < 1e-3
            assert (error <= np.abs(expected).max(-1, keepdims=True) / 63)[steps].all()
            error = np.where(steps, 0, error)
        assert error.max() <= tolerance * np.abs(expected).max()


def positions_held(count: int, pinned, capacity: int) -> dict[int, int]:
    """Returns the expected position in each live slot of a draft cache."""
    if count <= capacity:
        return {position: position for position in range(count)}
    ring = capacity - len(pinned)
    newest = range(count - ring, count)
    slots = {len(pinned) + (p - len(pinned)) % ring: p for p in newest}
    assert set(pinned).isdisjoint(newest) and len(set(pinned)) == len(pinned)
    return dict(enumerate(pinned)) | slots


def check_draft_cache(draft, cache) -> None:
    """Asserts that each live slot has exactly the keys and values that the target verified."""
    np.testing.assert_array_equal(draft.count, cache.lengths)
    for layer, pins in enumerate(draft.pinned):
        if pins is None:
            continue
        for row, head in np.ndindex(*pins.shape[:2]):
            chosen = pins[row, head].tolist()
            expected = positions_held(int(draft.count[row]), chosen, draft.capacity(layer))
            slots, positions = list(expected), list(expected.values())
            for mine, whole in ((draft.k, cache.k), (draft.v, cache.v)):
                full = np.asarray(full_cache.elements(whole[layer], np.float32))
                np.testing.assert_array_equal(
                    mine[layer][row, head, slots], full[row, head, positions]
                )


def of_layers(cache, layers: str | None):
    """Returns the cache of the layers "0,2" alone; None: of all."""
    if layers is None:
        return cache
    chosen = [int(layer) for layer in layers.split(",")]
    parts = {name: getattr(cache, name) for name in ("k", "v", "windows")}
    return cache.replace(**{name: tuple(x[i] for i in chosen) for name, x in parts.items()})


def check_text(state, texts) -> None:
    """Asserts that prompt lookup's text is the committed one."""
    for text, found, count in zip(texts, state.text, state.count, strict=True):
        np.testing.assert_array_equal(found[:count], text[:-1])


def check_small(state, model, texts, tolerance) -> int:
    """Checks a small model's cache and backlog against the texts; returns the longest backlog."""
    cache, backlog = state.cache, state.backlog
    lengths = [len(text) - 1 for text in texts]
    np.testing.assert_array_equal(cache.lengths, lengths - backlog.count)
    check_cache(cache, model, texts, cache.lengths, tolerance)
    for text, tokens, count in zip(texts, backlog.tokens, backlog.count, strict=True):
        np.testing.assert_array_equal(tokens[:count], text[len(text) - 1 - count : -1])
    return int(backlog.count.max())


def check_head(state, drafter, target, texts, tolerance) -> None:
    """Asserts that a learned head's state is that of a prefill of the texts."""
    capacity, lengths = state.cache.k[0].shape[2], [len(text) - 1 for text in texts]
    np.testing.assert_array_equal(state.cache.lengths, np.array(lengths) - 1)
    rows = -(-len(texts) // 8) * 8
    tokens, padded = np.zeros((rows, WIDTH), np.int32), np.ones(rows, np.int32)
    padded[: len(texts)] = lengths
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    fresh = fresh_head(capacity)(target, drafter.for_target(target), tokens, padded)
    found = *state.cache.k, *state.cache.v, state.feature
    live = (np.arange(capacity) < np.array(lengths)[:, None] - 1)[:, None, :, None]
    for mine, whole in zip(found, (*fresh.cache.k, *fresh.cache.v, fresh.feature), strict=True):
        whole = np.asarray(whole)[: len(texts)]
        where = live if whole.ndim == 4 else True
        error = np.abs(np.where(where, mine - whole, 0)).max()
        assert error <= tolerance * np.abs(whole).max()


@functools.cache
def fresh_head(capacity: int):
    settings = types.SimpleNamespace(chunk=WIDTH // 2, capacity=capacity, backend=None)

    @jax.jit
    def run(target, drafter, tokens, lengths):
        spec = drafter.stats_spec()
        cache, _, stats = prefill.prefill_cache(target, tokens, lengths, settings, spec)
        return drafter.prefill(target, tokens, cache, stats, settings)

    return run


def states_of(drafter, state) -> list[tuple]:
    """Returns the members of an ensemble or a cascade, or the drafter, each with its state."""
    if isinstance(drafter, magicjax.Cascade):
        return [*states_of(drafter.first, state.first), (drafter.middle, state.middle)]
    states = state if isinstance(drafter, magicjax.Ensemble) else (state,)
    return list(zip(drafter.members(), states, strict=True))


def check_every_round(kind, tree, prompts, dtype, tolerance, **options) -> None:
    accepted, longest = set(), 0
    for request, state in rounds(kind, tree, prompts, dtype, **options):
        texts = [
            np.concatenate([prompt, output[:emitted]])
            for prompt, output, emitted in zip(prompts, state.output, state.emitted, strict=True)
        ]
        # Exactly the emitted tokens, less the pending one.
        np.testing.assert_array_equal(state.cache.lengths, [len(text) - 1 for text in texts])
        np.testing.assert_array_equal(state.pending, [text[-1] for text in texts])
        check_cache(state.cache, request.target, texts, state.cache.lengths, tolerance)
        accepted |= set(np.flatnonzero(state.histogram.sum(0)).tolist())
        for member, member_state in states_of(request.drafter, state.drafter) if kind else ():
            if isinstance(member, magicjax.SmallModel):
                longest = max(longest, check_small(member_state, member.model, texts, tolerance))
            elif isinstance(member, magicjax.SelfSpeculation):
                check_draft_cache(member_state.cache, of_layers(state.cache, member.layers))
            elif isinstance(member, magicjax.PageRetrieval):
                test_pages.check_bounds(member_state.bounds, of_layers(state.cache, member.layers))
            elif isinstance(member, magicjax.Eagle):
                check_head(member_state, member, request.target, texts, tolerance)
            elif isinstance(member, magicjax.PromptLookup):
                check_text(member_state, texts)
    # An accepted leaf was never run; in an ensemble, nothing of the others' branches was, and in a
    # cascade nothing after the first tree.
    assert longest == {"near": 1, "hybrid near": 1}.get(kind, longest)
    assert longest > 1 or kind not in ("ensemble", "cascade")
    if kind in ("same", "same and heads"):
        assert accepted == {tiny.TREES[tree].depth}  # whole paths, every time
    elif kind is not None:
        assert len(accepted) > 2  # paths of several lengths were committed


@pytest.mark.parametrize(
    ("kind", "tree"),
    quick(
        [
            *[(None, None), ("self", "irregular"), ("self", "chain4"), ("quest", "irregular")],
            ("layers", "2,2,1"),
        ],
        *[("self", "irregular"), ("quest", "irregular")],
    ),
)
@pytest.mark.slow
def test_caches_follow_the_text_round_by_round_around_the_budget(kind, tree):
    check_every_round(kind, tree, prompts_around_the_budget(), "float32", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), [("self", "irregular"), ("quest", "2,2,1")])
def test_caches_in_8_bits_follow_the_text_round_by_round(kind, tree):
    options = dict(target="int8 cache")
    check_every_round(kind, tree, prompts_around_the_budget(), "float32", 1e-5, **options)


@pytest.mark.parametrize(
    ("kind", "tree"),
    quick(
        [
            *[("near", "irregular"), ("near", "dynamic"), ("same", "2,2,1")],
            *[("ensemble", "2,2,1"), ("same and heads", "2,2,1"), ("cascade", "chain8")],
            *[("cascade of one tree", "irregular"), ("cascade of several", "chain4")],
        ],
        ("same and heads", "2,2,1"),
    ),
)
@pytest.mark.slow
def test_a_small_models_own_cache_follows_the_text_round_by_round(kind, tree):
    check_every_round(kind, tree, tiny.prompts(8), "float32", 1e-5)


@pytest.mark.parametrize(
    ("kind", "tree"),
    quick(
        [
            *[("hybrid near", "irregular"), ("hybrid near", "dynamic")],
            *[("prompt-lookup", "branches"), ("self", "2,2,1"), ("cascade", "chain4")],
            ("quest", "irregular"),
        ],
        ("hybrid near", "irregular"),
    ),
)
def test_states_follow_the_text_round_by_round(kind, tree):
    """The states of the target, and of a draft model that has some too."""
    check_every_round(kind, tree, tiny.prompts(8), "float32", 2e-5, target="hybrid")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), [("near", "2,2,1"), ("ensemble", "own trees")])
@pytest.mark.parametrize("draw", ["with_replacement", "without_replacement"])
def test_caches_follow_sampled_texts_of_drawn_and_folded_trees(kind, tree, draw, monkeypatch):
    """Few tokens can be drawn, so siblings repeat, draws run out and drafters agree."""
    small = magicjax.SmallModel(tiny.model("near"), draw)
    drafter = small
    if kind == "ensemble":
        self_speculation = magicjax.SelfSpeculation(
            magicjax.StreamingLLM(tiny.SINKS), tiny.BUDGET, draw
        )
        members = [small, magicjax.PromptLookup(), self_speculation]
        trees = [tiny.TREES["2,2,1"], tiny.TREES["chain5"], tiny.TREES["chain2"]]
        drafter = magicjax.Ensemble(members, trees)
        monkeypatch.setitem(tiny.SPECIAL, tree, None)
    monkeypatch.setattr(tiny, "drafter", lambda *_: drafter)
    options = dict(temperature=1.0, seed=3, top_k=2)
    check_every_round(kind, tree, tiny.prompts(8), "float32", 1e-5, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("kind", "tree"), [("self", "2,2,1"), ("near", "irregular")])
def test_caches_follow_the_text_to_the_last_bits_of_float64(kind, tree):
    check_every_round(kind, tree, tiny.prompts(8), "float64", 1e-12)


def test_a_misplaced_entry_is_detected():
    prompts = prompts_around_the_budget()
    request, state = next(rounds("self", "chain4", prompts, "float32"))
    lengths = state.cache.lengths
    k = [x.copy() for x in state.cache.k]
    k[1][5, 0, 20] = k[1][5, 0, 19]
    wrong = state.cache.replace(k=tuple(k))
    with pytest.raises(AssertionError):
        check_cache(wrong, request.target, prompts, lengths, 1e-5)
    cache = state.drafter.cache
    draft = [x.copy() for x in cache.k]
    draft[0][5, 0, tiny.BUDGET - 1] += 1e-6
    with pytest.raises(AssertionError):
        check_draft_cache(cache.replace(k=tuple(draft)), state.cache)
    check_cache(state.cache, request.target, prompts, lengths, 1e-5)
    check_draft_cache(cache, state.cache)


def test_a_prompt_of_several_chunks_fills_the_cache_like_one_chunk():
    model, prompts = tiny.model(), tiny.prompts(8)
    tokens = np.zeros((8, WIDTH), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    lengths[0], tokens[0] = WIDTH, np.arange(WIDTH) % tiny.VOCAB  # one row to the very end
    caches, last = [], []
    for chunk in (16, WIDTH):
        settings = types.SimpleNamespace(chunk=chunk, capacity=WIDTH, backend=None)
        run = jax.jit(
            functools.partial(prefill.prefill_cache, settings=settings, stats_spec=StatsSpec())
        )
        cache, hidden, _ = run(model, jnp.asarray(tokens), jnp.asarray(lengths))
        np.testing.assert_array_equal(cache.lengths, lengths)
        caches.append(cache)
        last.append(np.asarray(hidden))
    live = (np.arange(WIDTH) < lengths[:, None])[:, None, :, None]
    for one, other in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v)):
        one, other = np.where(live, one, 0), np.where(live, other, 0)
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()
    assert np.abs(last[0] - last[1]).max() <= 1e-5 * np.abs(last[1]).max()


def test_the_public_names_of_policies_are_the_same_drafter():
    assert magicjax.SelfSpeculation("streaming") == magicjax.SelfSpeculation(
        magicjax.StreamingLLM()
    )
