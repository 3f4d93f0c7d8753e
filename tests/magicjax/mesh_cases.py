"""Cases that compare eight devices with one; each function runs in a process with eight devices."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import magicjax
import models
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.rows import sampling_of
from magicjax.prediction import hlo
from magicjax.verification.sampling import warp
from sharding import collectives, make_mesh, model_axes
from tests.forget import forget_programs
from tests.magicjax import family_cases, keywords, oracle, tiny

MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))
SIZES = dict(num_heads=8, head_dim=8, intermediate_size=48, vocab_size=64)
DELTA_NET = dataclasses.replace(family_cases.DELTA_NET, key_heads=8, value_heads=16)
SAMPLED = dict(seed=3, temperature=0.8)
PROCESSED = dict(
    repetition_penalty=1.4, frequency_penalty=0.3, logit_bias=((2, 1.0), (60, -2.0)), min_tokens=3
)


def self_speculation(policy="streaming", **options):
    return lambda kv_heads, shards: magicjax.SelfSpeculation(policy, budget=24, **options)


def page_retrieval(**options):
    return lambda kv_heads, shards: magicjax.PageRetrieval(24, **options)


def small(**options):
    return lambda kv_heads, shards: magicjax.SmallModel(draft(kv_heads, shards), **options)


def several(kv_heads, shards):
    drafters = magicjax.SelfSpeculation(budget=24), magicjax.SmallModel(draft(kv_heads, shards))
    return magicjax.Ensemble((*drafters, magicjax.PromptLookup()))


def prompt_lookup(kv_heads, shards):
    return magicjax.PromptLookup()


def suffix(kv_heads, shards):
    made = magicjax.SuffixLookup(store_tokens=64)
    return made.remember(oracle.greedy(target(kv_heads), prompts()[4], 24))


def eagle(**options):
    return lambda kv_heads, shards: magicjax.Eagle(tiny.head(target(kv_heads)), **options)


def mtp(kv_heads, shards):
    return magicjax.MTP(tiny.mtp_head(target(kv_heads)), 16)


def cascade(first_tree=None, **options):
    def make(kv_heads, shards):
        first = magicjax.SmallModel(draft(kv_heads, shards), **options)
        return magicjax.Cascade(first, magicjax.SelfSpeculation(budget=24), first_tree)

    return make


def nobody(kv_heads, shards):
    return None


TREE = magicjax.expansion((2, 2))
EARLY = magicjax.DynamicTree(8, 3, 2, min_prob=0.05)  # ends at other depths in other rows
CACHE = "int8 cache"  # in place of a number of KV heads: 4 of them, and a cache in 8 bits
INT4 = "int4"  # in place of a number of KV heads: 8 of them, and matrices in groups of 2
# Name: (drafter, tree, options of generate, KV heads of the target, its family, INT4 or CACHE).
CASES = {
    "plain": (nobody, None, {}, 8),
    "plain sampled": (nobody, None, SAMPLED | dict(top_k=20, top_p=0.9), 4),
    "self": (self_speculation(), magicjax.chain(3), {}, 8),
    "self sampled": (self_speculation(), magicjax.chain(3), SAMPLED, 4),
    "snapkv": (self_speculation("snapkv", refresh_every=4), TREE, {}, 2),
    "quest": (page_retrieval(page_size=4), TREE, {}, 2),
    "cache in int8": (self_speculation(), magicjax.chain(3), {}, CACHE),
    "quest sampled": (page_retrieval(page_size=2, refresh_every=2), magicjax.chain(3), SAMPLED, 4),
    "layers": (self_speculation("snapkv", refresh_every=4, layers="1"), TREE, {}, 2),
    "layers int4 sampled": (
        self_speculation("streaming", weights="int4:2", layers="0"),
        magicjax.chain(3),
        SAMPLED,
        4,
    ),
    "h2o int8": (self_speculation("h2o", refresh_every=4, kv_dtype="int8"), TREE, {}, 4),
    "tova sampled": (self_speculation("tova", refresh_every=4), TREE, SAMPLED, 2),
    "expected attention sampled": (
        self_speculation("expected_attention"),
        magicjax.chain(3),
        SAMPLED,
        1,
    ),
    "dynamic": (self_speculation(), magicjax.DynamicTree(8, 3, 2), {}, 2),
    "dynamic, ended early": (self_speculation(), EARLY, SAMPLED, 8),
    "dynamic sampled": (small(), magicjax.DynamicTree(8, 3, 2), SAMPLED, 8),
    "small": (small(), TREE, {}, 8),
    "small sparse": (small(policy="streaming", budget=32), magicjax.chain(4), {}, 1),
    "small sampled": (small(), TREE, SAMPLED | dict(top_k=20, top_p=0.9), 8),
    "small with replacement": (small(draw="with_replacement"), TREE, SAMPLED, 4),
    "small by the top": (small(draw="top"), TREE, SAMPLED, 2),
    "penalties": (small(), TREE, PROCESSED | dict(logprobs=2, prompt_logprobs=2), 4),
    "penalties sampled": (small(), TREE, SAMPLED | PROCESSED | dict(min_p=0.1, top_n_sigma=2.0), 2),
    "naive": (small(), TREE, SAMPLED | dict(verifier="naive"), 4),
    "several": (several, magicjax.chain(3), {}, 4),
    "several sampled": (several, magicjax.chain(3), SAMPLED, 2),
    "prompt-lookup": (prompt_lookup, magicjax.chain(4), {}, 4),
    "suffix": (suffix, magicjax.DynamicTree(8, 3, 2), {}, 8),
    "suffix sampled": (suffix, magicjax.chain(3), SAMPLED, 8),
    "eagle": (eagle(budget=16), TREE, {}, 4),
    "eagle sampled": (eagle(), TREE, SAMPLED, 8),
    "mtp": (mtp, TREE, {}, 4),
    "cascade": (cascade(magicjax.chain(2)), magicjax.chain(4), {}, 4),
    "cascade sampled": (cascade(TREE), magicjax.chain(4), SAMPLED, 8),
    "cascade of one tree sampled": (cascade(draw="top"), TREE, SAMPLED, 2),
    "random sampled": (self_speculation("random"), magicjax.chain(3), SAMPLED, 8),
    "sinks in the cache": (
        small(policy="streaming", budget=32, sink_positions="in_cache"),
        magicjax.chain(3),
        {},
        2,
    ),
    "OPT": (self_speculation("snapkv"), TREE, {}, "opt"),
    "OPT sampled": (small(), magicjax.chain(3), SAMPLED, "opt"),
    "Falcon": (self_speculation("snapkv"), TREE, {}, "falcon-7b"),
    "Falcon, ALiBi": (small(), TREE, {}, "falcon-rw"),
    "MPT": (self_speculation(), TREE, {}, "mpt"),
    "MPT sampled": (small(), magicjax.chain(3), SAMPLED, "mpt"),
    "StarCoder": (small(), TREE, {}, "starcoder"),
    **{
        f"family {kind}": (self_speculation(), TREE, {}, kind)
        for kind in family_cases.WITHOUT_STATES
    },
    "states": (several, magicjax.chain(3), {}, "qwen3.5"),
    "states sampled": (small(), TREE, SAMPLED, "qwen3-next"),
    "states, snapkv": (self_speculation("snapkv", refresh_every=4), TREE, {}, "qwen3-next"),
    "states, quest": (page_retrieval(page_size=4), TREE, {}, "qwen3.5"),
    "int4": (self_speculation(), magicjax.chain(3), {}, INT4),
    "int4 small sampled": (small(), TREE, SAMPLED, INT4),
}


@functools.cache
def target(kv_heads: int | str, layers: int = 2) -> magicjax.Model:
    if kv_heads == CACHE:
        return dataclasses.replace(_model(4, 0.0, layers), kv_bits=8)
    return _model(kv_heads, 0.0, layers)


@functools.cache
def draft(kv_heads: int | str, shards: int | None) -> magicjax.Model:
    """Returns a model near the target, so that about half of what it drafts is accepted."""
    return dataclasses.replace(_model(kv_heads, 0.2, 2), shards=shards)


def _model(kv_heads: int | str, noise: float, layers: int) -> magicjax.Model:
    if isinstance(kv_heads, str) and kv_heads != INT4:
        sizes: dict[str, Any] = dict(hidden_size=64, num_heads=8, max_positions=512)
        if kv_heads in family_cases.HYBRID:  # as many gated delta nets as other layers
            sizes |= dict(num_layers=2 * layers, linear_layers=tuple(range(0, 2 * layers, 2)))
            sizes |= dict(delta_net=DELTA_NET)
            if "num_experts" in family_cases.KINDS[kv_heads]:
                sizes["num_experts"] = 8
        elif "num_layers" not in family_cases.KINDS[kv_heads]:
            sizes["num_layers"] = layers
        return family_cases.model(kv_heads, 64, noise / 4, **sizes)
    shape = tiny.config(
        **SIZES, num_kv_heads=8 if kv_heads == INT4 else kv_heads, num_layers=layers
    )
    params = tiny.loud(tiny.drawn(shape, 0), np.random.default_rng(7), noise, never=None)
    params = jax.tree.map(lambda x: jax.numpy.asarray(np.asarray(x, np.float32)), params)
    model = magicjax.Model(models.build(shape), params)
    return tiny.quantized(model, "int4:2") if kv_heads == INT4 else model


def generate(
    case: str, mesh: Sequence[int] | None, shards: int | None = None, layers: int = 2, **more
):
    """Returns the output of a case on a mesh (data, model, stage); None: one device."""
    drafter, tree, options, kv_heads = CASES[case]
    return keywords.generate(
        target(kv_heads, layers),
        prompts(),
        drafter=drafter(kv_heads, None if mesh is None else shards),
        tree=tree,
        max_tokens=[20, 9, 24, 16, 24, 24, 3, 24],
        eos_token_id=63,
        mesh=None if mesh is None else make_mesh(*mesh),
        **options | more,
    )


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 63, n).astype(np.int32) for n in (5, 40, 1, 16, 47, 30, 23, 9)]


@functools.cache
def on_one(case: str, layers: int = 2) -> magicjax.Output:
    return generate(case, None, layers=layers)


def compare(case: str, mesh: list[int], shards: int | None, layers: int = 2, **more) -> dict:
    """Returns the number of compared rows, and of those that differ at a tie; others fail."""
    on_one_device, on_eight = on_one(case, layers), generate(case, mesh, shards, layers, **more)
    tally = oracle.Tally()
    expected, found = tiny.rows_of(on_one_device), tiny.rows_of(on_eight)
    sampled = CASES[case][2].get("temperature", 0) > 0
    model = target(CASES[case][3], layers)
    tally.compare(model, prompts(), expected, found, ties_allowed=not sampled)
    if not tally.ties:
        for field in (
            "tau",
            "acceptance_by_depth",
            "acceptance_by_rank",
            "target_passes",
            "drafted",
        ):
            one, eight = getattr(on_one_device.stats, field), getattr(on_eight.stats, field)
            assert np.allclose(one, eight), (field, one, eight)
    return dict(rows=tally.rows, ties=tally.ties)


def check(process, record_property, **arguments):
    """Compares in another process, and records the counts for the summary."""
    counted = process(compare, **arguments)
    assert counted["rows"] == len(prompts())
    for name, n in counted.items():
        record_property(name, n)


def compare_streamed(case: str, mesh: list[int]) -> bool:
    """Returns whether streaming generates the same text."""
    drafter, tree, options, kv_heads = CASES[case]
    options = options | dict(mesh=make_mesh(*mesh), max_tokens=12, eos_token_id=[])
    stream = keywords.stream(
        target(kv_heads), prompts(), drafter=drafter(kv_heads, None), tree=tree, **options
    )
    rounds = list(stream)
    rows = [np.concatenate(parts) for parts in zip(*rounds, strict=True)]
    del options["mesh"]
    whole = keywords.generate(
        target(kv_heads), prompts(), drafter=drafter(kv_heads, None), tree=tree, **options
    )
    return all(map(np.array_equal, rows, tiny.rows_of(whole)))


def differs_without_sums() -> bool:
    """Returns whether the text changes without all-reduces."""
    forget_programs()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_programs)
        stack.callback(setattr, collectives, "psum", collectives.psum)
        collectives.psum = lambda x, axis_names: x
        found = generate("self", (1, 8))
    return not np.array_equal(found.tokens, on_one("self").tokens)


def exchanged(case: str, mesh: list[int]) -> dict:
    """Returns what a step exchanges and copies, and the size of a device's caches."""
    drafter, tree, options, kv_heads = CASES[case]
    request = keywords.prepare(
        target(kv_heads),
        prompts(),
        drafter=drafter(kv_heads, None),
        tree=tree,
        max_tokens=24,
        eos_token_id=[],
        mesh=make_mesh(*mesh),
        **options,
    )
    state = Decoder(request).state_shapes()
    arguments = (request.target, request.drafter, state, state.rounds)
    program = program_cache.program("decode", request.settings, *arguments)
    text = program.as_text()
    keys = state.cache.k[0]
    return dict(
        collectives={c.kind: c.count for c in hlo.collectives(text)},
        largest=largest_collective(text),
        keys=int(np.prod(keys.sharding.shard_shape(keys.shape))),
        copied=list(hlo.copied_sizes(text)),
    )


def functions_of_a_divided_axis(devices: int) -> list[str]:
    """Returns the functions of `collectives` whose results differ from those on the whole axis."""
    from jax.sharding import NamedSharding, PartitionSpec

    from sharding import factored

    mesh = factored(make_mesh(1, devices))
    axis_names = tuple(model_axes(mesh))
    rng = np.random.default_rng(devices)
    x = rng.integers(0, 9, (3, 4, 48)).astype(np.float32)  # many equal ones
    index = rng.integers(0, 48, (3, 4)).astype(np.int32)
    wide = PartitionSpec(None, None, axis_names)
    filters = (dict(top_n_sigma=1.2), dict(min_p=0.05, top_k=20, top_p=0.9), {})
    params = [magicjax.SamplingParams(temperature=0.8, **each) for each in filters]
    of_rows = sampling_of(params)
    functions = {
        "argmax": (lambda x, i, axis_names: collectives.argmax(x, axis_names), PartitionSpec()),
        "top_k": (lambda x, i, axis_names: collectives.top_k(x, 11, axis_names), PartitionSpec()),
        "at": (lambda x, i, axis_names: collectives.take_global(x, i, axis_names), PartitionSpec()),
        "joined": (lambda x, i, axis_names: collectives.all_gather(x, axis_names), PartitionSpec()),
        "softmax": (lambda x, i, axis_names: collectives.softmax(x, axis_names), wide),
        "warp": (lambda x, i, axis_names: warp(of_rows, x, axis_names), wide),
        "log_softmax": (lambda x, i, axis_names: collectives.log_softmax(x, axis_names), wide),
        "places": (
            lambda x, i, axis_names: x * 0 + collectives.global_indices(x, axis_names),
            wide,
        ),
    }
    differing = []
    for name, (function, spec) in functions.items():
        mapped = jax.shard_map(
            functools.partial(function, axis_names=axis_names),
            mesh=mesh,
            in_specs=(wide, PartitionSpec()),
            out_specs=spec,
            check_vma=False,
        )
        given = jax.device_put(x, NamedSharding(mesh, wide)), index
        found, expected = (
            jax.jit(mapped)(*given),
            function(jax.numpy.asarray(x), index, axis_names=()),
        )
        same = jax.tree.map(lambda a, b: bool(np.allclose(a, b, atol=1e-6)), found, expected)
        if not all(jax.tree.leaves(same)):
            differing.append(name)
    return differing


def narrowed() -> bool:
    """Returns whether a part of a coarse division is sliced into the parts of a finer one."""
    from jax.sharding import PartitionSpec

    from sharding import factored

    mesh = factored(make_mesh(1, 8))
    x = np.arange(16.0)[None]
    cut = jax.shard_map(
        lambda x: collectives.local_slice(x, ("model_0",), ("model_0", "model_1", "model_2")),
        mesh=mesh,
        in_specs=PartitionSpec(None, "model_0"),
        out_specs=PartitionSpec(None, ("model_0", "model_1", "model_2")),
        check_vma=False,
    )
    return bool(np.array_equal(cut(x), x))


def loaded(path: str, mesh: list[int]) -> dict:
    """Returns how a mesh divides a checkpoint's parameters."""
    model = magicjax.load(path, mesh=make_mesh(*mesh))
    whole = magicjax.load(path)
    leaves = jax.tree.leaves(model.params)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), model.params, whole.params)
    on_device = collections.Counter()
    for part in (part for x in leaves for part in x.addressable_shards):
        on_device[part.device] += part.data.nbytes
    share = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
    return dict(
        same=all(jax.tree.leaves(same)),
        most=max(on_device.values()),
        share=share,
        whole=sum(x.nbytes for x in leaves),
    )


def loaded_here(path: str, mesh: list[int]) -> dict:
    """Returns the bytes of a checkpoint that this process's devices have, and all of them once."""
    leaves = jax.tree.leaves(magicjax.load(path, mesh=make_mesh(*mesh)).params)
    parts = {
        (i, str(part.index)): part.data.nbytes
        for i, leaf in enumerate(leaves)
        for part in leaf.addressable_shards
    }
    return dict(here=sum(parts.values()), all=sum(leaf.nbytes for leaf in leaves))


def refusals(path: str) -> list[str]:
    """Returns the errors for models on a mesh that is not passed, and for invalid meshes."""
    placed = magicjax.load(path, mesh=make_mesh(1, 8))
    alone, said = target(4), []
    for model, options in (
        (placed, {}),
        (alone, dict(drafter=magicjax.SmallModel(placed), tree=magicjax.chain(2))),
        (alone, dict(mesh=(1, 8))),
    ):
        try:
            keywords.generate(model, [[1, 2]], max_tokens=2, **options)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def with_explicit_axes() -> bool:
    """Returns whether a mesh as JAX makes it, with explicit axes, gives the text of one device."""
    mesh = jax.make_mesh((8,), ("data",))
    options = dict(max_tokens=6, eos_token_id=[])
    found = keywords.generate(target(4), prompts(), mesh=mesh, **options)
    return bool(
        np.array_equal(found.tokens, keywords.generate(target(4), prompts(), **options).tokens)
    )


def largest_collective(text: str) -> int:
    """Returns the most elements of any array that a collective returns; 0 without collectives."""
    lines = ((line, hlo.COLLECTIVE.search(line)) for line in text.splitlines())
    arrays = (hlo.ARRAY.findall(line[: match.start()]) for line, match in lines if match)
    sizes = (np.prod([int(n) for n in d.split(",") if n]) for found in arrays for _, d in found)
    return int(max(sizes, default=0))
