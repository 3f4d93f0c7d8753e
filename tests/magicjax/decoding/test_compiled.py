"""The compiled loop writes caches in place and copies none."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax.decoding import loop, program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.drafters import self_speculation
from magicjax.kv_cache import full_cache, pages, sparse_cache
from tests.magicjax import keywords, tiny
from tests.quick import quick

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU"
)

# A cache that outweighs everything else: 2 rows, 2 heads of 64, 16,384 slots, in 2 layers.
WIDE = tiny.config(head_dim=64, max_positions=20_000)
# Caches differ in size to be distinguishable: the drafter's has one more head.
SMALL = tiny.config(head_dim=64, max_positions=20_000, num_heads=3, num_kv_heads=3, num_layers=1)
PROMPT, BUDGET = 16000, 1000
SPARSE = magicjax.SelfSpeculation("snapkv", BUDGET, refresh_every=4)

DRAFTS = {
    "plain": (None, None),
    "self_chain": ("self", magicjax.chain(4)),
    "self_tree": ("self", magicjax.expansion((2, 2, 1))),
    "small_chain": ("small", magicjax.chain(4)),
    "small_tree": ("small", tiny.TREES["irregular"]),
    "self_dynamic": ("self", magicjax.DynamicTree(8, 3, 3)),
    "small_dynamic": ("small", magicjax.DynamicTree(8, 3, 3)),
    "ensemble": ("ensemble", magicjax.chain(2)),
    "plain_sampled": (None, None),
    "self_sampled": ("self", magicjax.chain(4)),
    "ensemble_sampled": ("ensemble", magicjax.chain(2)),
    "snapkv_refreshed": ("snapkv", magicjax.chain(4)),
    "h2o_refreshed": ("h2o", magicjax.expansion((2, 2, 1))),
    "pyramidkv": ("pyramidkv", magicjax.chain(4)),
    "int8": ("int8", magicjax.chain(4)),
    "int4_refreshed": ("int4", magicjax.chain(4)),
    "small_sparse": ("sparse", magicjax.chain(4)),
    "self_copy": ("copy", magicjax.chain(4)),
    "self_layers": ("layers", magicjax.chain(4)),
    "quest": ("quest", magicjax.chain(4)),
    "quest_tree": ("quest refreshed", magicjax.expansion((2, 2, 1))),
    "self_of_int8_cache": ("self", magicjax.chain(4)),
    "quest_of_int8_cache": ("quest", magicjax.chain(4)),
    "cascade": ("cascade", magicjax.chain(4)),
    "cascade_sampled": ("cascade", magicjax.chain(4)),
    "cascade_pages": ("cascade of pages", magicjax.chain(4)),
    "cascade_full": ("cascade of one tree", magicjax.expansion((2, 2, 1))),
}
# Of these others have every part: a tree, a small model, a growing tree, sampling.
PARTS = (
    *("self_tree", "small_chain", "small_dynamic", "self_dynamic", "self_sampled"),
    *("ensemble", "ensemble_sampled", "self_chain", "plain_sampled", "snapkv_refreshed"),
    *("small_sparse", "pyramidkv", "self_copy", "quest", "plain", "int4_refreshed"),
    *("cascade", "cascade_sampled", "cascade_pages", "cascade_full"),
    *("self_layers", "int8", "quest_tree", "quest_of_int8_cache"),
)
MOVES = ("copy", "transpose", "convert", "concatenate", "select", "pad", "broadcast", "reverse")


def shaped(config) -> magicjax.Model:
    """Returns a model of shapes only: compiling needs no weights."""
    import flax.linen as nn

    module = models.build(config)
    return magicjax.Model(module, nn.meta.unbox(models.abstract_params(module)))


def request_of(name: str):
    kind, tree = DRAFTS[name]
    own, small = magicjax.SelfSpeculation(budget=BUDGET), magicjax.SmallModel(shaped(SMALL))
    prompt_lookup = magicjax.PromptLookup()
    drafters = {
        "self": own,
        "small": small,
        "ensemble": magicjax.Ensemble([own, small, prompt_lookup]),
        "snapkv": SPARSE,
        "h2o": magicjax.SelfSpeculation("h2o", BUDGET, refresh_every=4),
        "pyramidkv": magicjax.SelfSpeculation("pyramidkv", BUDGET),
        "int8": magicjax.SelfSpeculation("streaming", BUDGET, kv_dtype="int8"),
        "int4": magicjax.SelfSpeculation("keydiff", BUDGET, refresh_every=2, kv_dtype="int4"),
        "copy": magicjax.SelfSpeculation(budget=BUDGET, weights="int8"),
        "layers": magicjax.SelfSpeculation("snapkv", BUDGET, refresh_every=4, layers="1"),
        "sparse": magicjax.SmallModel(small.model, policy="snapkv", budget=BUDGET),
        "quest": magicjax.PageRetrieval(BUDGET),
        "quest refreshed": magicjax.PageRetrieval(BUDGET, refresh_every=4),
        "cascade": magicjax.Cascade(small, own, magicjax.chain(2)),
        "cascade of pages": magicjax.Cascade(
            magicjax.Ensemble([small, prompt_lookup]),
            magicjax.PageRetrieval(BUDGET),
            magicjax.chain(2),
        ),
        "cascade of one tree": magicjax.Cascade(small, magicjax.FullCacheSpeculation()),
    }
    drafter = drafters.get(kind)
    target = dataclasses.replace(shaped(WIDE), kv_bits=8 if name.endswith("int8_cache") else None)
    return keywords.prepare(
        target,
        [np.zeros(PROMPT, np.int32), np.zeros(10, np.int32)],
        drafter=drafter,
        tree=tree,
        max_tokens=32,
        **(dict(temperature=1.0, top_k=5, top_p=0.9) if name.endswith("sampled") else {}),
        eos_token_id=tiny.NEVER,
    )


def is_cache(x) -> bool:
    return isinstance(x, full_cache.KVCache | sparse_cache.DraftCache)


def is_bounds(x) -> bool:
    return isinstance(x, pages.PageBounds)


def num_bytes(cache) -> int:
    """Returns the bytes of keys, values and pins, or of bounds of keys, arrays or their shapes."""
    pins = getattr(cache, "pinned", ())
    arrays = (cache.low, cache.high) if is_bounds(cache) else (cache.k, cache.v, pins)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def sizes_of(request, state) -> dict[str, int]:
    """Returns the number of elements of one layer's keys, per cache in the state."""
    sizes = {"target": jax.tree.leaves(state.cache.k)[0].size}
    if request.drafter is not None:
        own = jax.tree.leaves(state.drafter, is_leaf=is_cache)
        own = [jax.tree.leaves(cache.k)[0] for cache in own if is_cache(cache)]
        sizes |= {"draft" + "'" * i: keys.size for i, keys in enumerate(own)}
        bounds = filter(is_bounds, jax.tree.leaves(state.drafter, is_leaf=is_bounds))
        sizes |= {f"bounds {i}": each.low[0].size for i, each in enumerate(bounds)}
    return sizes


def moves(program: str, size: int) -> collections.Counter:
    """Returns the operations, other than updates, whose result has `size` elements."""
    found = collections.Counter()
    for line in program.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if match and int(np.prod([int(n) for n in match[1].split(",")])) == size:
            if match[2].removesuffix("-start") in MOVES:
                found[match[2]] += 1
    return found


def decode_program(request, state):
    """Compiles the loop without the program cache, which may hold the unpatched one."""

    def run(*arguments):
        return loop.decode(request.settings, *arguments)

    arguments = request.target, request.drafter, state, state.rounds
    return jax.jit(run, donate_argnums=2).lower(*arguments).compile()


def moved_caches(program, sizes: dict[str, int]) -> dict[str, collections.Counter]:
    """Returns the caches that a program moves, and by which operations."""
    text = program.as_text()
    found = {whose: moves(text, size) for whose, size in sizes.items()}
    return {whose: counted for whose, counted in found.items() if counted}


@pytest.mark.parametrize("name", quick(DRAFTS, *(name for name in DRAFTS if name not in PARTS)))
def test_the_loop_copies_no_cache_and_needs_little_memory_beside_them(name):
    request = request_of(name)
    state = Decoder(request).state_shapes()
    program = Decoder(request).loop(state)
    sizes = sizes_of(request, state)
    assert len(set(sizes.values())) == len(sizes)
    moved = moved_caches(program, sizes)
    if name.startswith("int"):  # XLA dequantizes entries where they are read
        assert "copy" not in moved.pop("draft", ())
    assert moved == {}
    held = num_bytes(state.cache)
    memory = program.memory_analysis()
    # Scores of every slot, twice, and two blocks of slots: less than one layer's keys.
    nodes, (rows, slots) = request.settings.shape.num_nodes, (2, request.settings.capacity)
    scores = rows * WIDE.num_heads * nodes * slots * 4
    keys = sizes["target"] * 4
    assert memory.temp_size_in_bytes < 2 * scores + 3e6 < keys
    # The state's memory is taken over, so no second set of caches exists.
    assert memory.alias_size_in_bytes >= held


@pytest.mark.parametrize("drafter", quick([None, magicjax.PromptLookup(), SPARSE], SPARSE))
def test_the_loop_copies_no_ring(drafter):
    config = dataclasses.replace(WIDE, sliding_window=600, full_layers=(1,))
    tree = None if drafter is None else magicjax.chain(4)
    options = dict(drafter=drafter, tree=tree, max_tokens=32, eos_token_id=tiny.NEVER)
    request = keywords.prepare(shaped(config), [np.zeros(PROMPT, np.int32)] * 2, **options)
    state = Decoder(request).state_shapes()
    program = Decoder(request).loop(state)
    sizes = {f"layer {i}": keys.size for i, keys in enumerate(state.cache.k)}
    assert sizes["layer 0"] < sizes["layer 1"] / 9
    assert moved_caches(program, sizes) == {}


def test_a_commit_without_data_dependence_on_its_reads_copies_the_cache(monkeypatch):
    """Without the dependence on verification, XLA writes first and copies the cache."""
    monkeypatch.setattr(full_cache, "zero_after", lambda dependency: 0)
    monkeypatch.setattr(loop, "_truncate", truncate_without_the_result)
    request = request_of("plain")
    state = Decoder(request).state_shapes()
    assert "target" in moved_caches(decode_program(request, state), sizes_of(request, state))


def test_a_ring_that_shifts_its_entries_is_detected_as_a_move(monkeypatch):
    def shift(cache, new, path, kept):
        del path
        last = [n[:, :1].swapaxes(1, 2) for n, _ in new]
        k = [jnp.concatenate([old[:, :, 1:], n], axis=2) for old, n in zip(cache.k, last)]
        return cache.replace(k=tuple(k), count=cache.count + kept)

    monkeypatch.setattr(self_speculation, "append_ring", shift)
    request = request_of("self_chain")
    state = Decoder(request).state_shapes()
    assert "draft" in moved_caches(decode_program(request, state), sizes_of(request, state))


@pytest.mark.slow
def test_a_first_drafter_that_rewinds_to_its_old_arrays_copies_its_cache(monkeypatch):
    monkeypatch.setattr(magicjax.SmallModel, "rewind", lambda self, before, after: before)
    request = request_of("cascade")
    state = Decoder(request).state_shapes()
    assert "draft" in moved_caches(decode_program(request, state), sizes_of(request, state))


def truncate_without_the_result(tokens, result, state):
    """Keeps one token of each row, independently of verification."""
    kept = (~state.ended).astype(state.emitted.dtype)
    return kept, state.ended | (state.emitted + kept >= state.rows.limits)


def test_prefill_holds_no_scores_of_the_whole_prompt():
    request = request_of("self_chain")
    program = program_cache.program(
        "prefill", request.prefill_settings, request.target, request.rows
    )
    rows, width = request.rows.tokens.shape
    scores = rows * request.target.config.num_heads * width * request.settings.capacity * 4
    temporaries = program.memory_analysis().temp_size_in_bytes
    # Chunks of 512 against blocks of 1,024: a thousandth and less is alive at once.
    assert temporaries < scores / 100


COUNTED = (
    *("plain", "small_tree", "ensemble", "h2o_refreshed", "pyramidkv", "int4_refreshed"),
    *("quest", "cascade", "quest_of_int8_cache"),
)


@pytest.mark.parametrize("name", COUNTED)
def test_predicted_bytes_are_those_of_the_caches(name):
    request = request_of(name)
    state = Decoder(request).state_shapes()

    def is_counted(x) -> bool:
        return is_cache(x) or is_bounds(x)

    own = filter(is_counted, jax.tree.leaves(state.drafter, is_leaf=is_counted))
    assert request.kv_bytes == (num_bytes(state.cache), sum(num_bytes(cache) for cache in own))


@pytest.mark.parametrize("name", quick(DRAFTS, "small_tree", "h2o_refreshed"))
def test_a_programs_arguments_are_the_weights_and_the_caches(name):
    request = request_of(name)
    state = Decoder(request).state_shapes()
    arguments, program = (request.target, request.drafter, state), Decoder(request).loop(state)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[:2]))
    counted = weights + sum(request.kv_bytes)
    found = program.memory_analysis().argument_size_in_bytes
    print(f"{name}: {found:,} bytes of arguments, {counted:,} counted")
    assert abs(found - counted) < 0.05 * counted
