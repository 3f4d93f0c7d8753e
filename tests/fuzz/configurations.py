"""Random configurations: the model shapes, the drafter, the tree and the settings of one program.

Weights are no part of a program, so each unit of a configuration has weights of its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import magicjax
import models
from magicjax import policies
from magicjax.drafters.spec import text_of
from tests.magicjax import tiny

# Few and small, because compilation is most of the time.
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    dict(num_layers=1, num_kv_heads=1, head_dim=16, vocab_size=32),
    dict(num_layers=1, num_kv_heads=4, hidden_size=24, vocab_size=20),
    dict(num_heads=6, hidden_size=16, vocab_size=60),
    dict(hidden_size=64, intermediate_size=96, head_dim=16),
    dict(num_layers=3, sliding_window=7, full_layers=(1,)),
    dict(num_experts=4, experts_per_token=2, num_kv_heads=1),
    dict(
        num_layers=3,
        linear_layers=(0, 2),
        delta_net=models.DeltaNetShape(
            key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=3
        ),
    ),
    dict(num_layers=4, sliding_window=7, full_layers=(1, 3), full_head_dim=16, shared_kv_layers=2),
)
MAX_DEPTH = 5
ENGINES = 3  # one configuration of so many is an engine
DRAFTER, FLAGS, BATCHES, SCHEDULES, CACHE = range(1, 6)  # purposes of random numbers
MESHES = 10  # one of so many runs on two devices


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One set of programs, determined by a seed and a number.

    Attributes:
      seed, number: of the configuration.
      is_engine: whether it serves schedules of requests; else it generates batches.
      shape: of the target, an index into `SHAPES`.
      sampled: whether rows sample.
      verifier: as for `magicjax.generate`.
      eos: how many tokens end a row.
      rows: of a batch, or slots of an engine.
      width: the longest prompt, in tokens.
      new_tokens: the largest limit of a row.
      kv_bits: of the target's cache.
      mesh_size: (data, model) of two devices, of which `data` divides slots; None: one device.
    """

    seed: int
    number: int
    is_engine: bool
    shape: int
    sampled: bool
    verifier: str | None
    eos: int
    rows: int
    width: int
    new_tokens: int
    kv_bits: int | None
    mesh_size: tuple[int, int] | None

    def rng(self, *purpose: int) -> np.random.Generator:
        """Returns the generator for a purpose, none of whose numbers is 0."""
        return np.random.default_rng([self.seed, self.number, *purpose])

    @property
    def exact(self) -> bool:
        """Whether the text is that of plain decoding, so that the oracle determines it."""
        return not self.sampled or self.verifier == "naive" or self.drafting(0)[0] is None

    @property
    def mesh(self) -> Any:
        return None if self.mesh_size is None else magicjax.make_mesh(*self.mesh_size)

    def target(self, weights: int) -> magicjax.Model:
        return dataclasses.replace(model(self.shape, weights), kv_bits=self.kv_bits)

    def drafting(self, weights: int) -> tuple[Any, Any]:
        """Returns the drafter and the tree, for the target of these weights."""
        return drafting_of(self.rng(DRAFTER), self.shape, weights, self.sampled)

    def __str__(self) -> str:
        drafter, tree = self.drafting(0)
        trees = tree if isinstance(drafter, magicjax.Ensemble) is False else drafter.trees or tree
        if isinstance(drafter, magicjax.Cascade) and drafter.first_tree:
            trees = drafter.first_tree, tree
        parts = [f"engine of {self.rows} slots" if self.is_engine else f"batch of {self.rows}"]
        parts += ["cache in int8"] if self.kv_bits else []
        parts += [f"shape {self.shape}", "plain" if drafter is None else text_of(drafter)]
        parts += [] if drafter is None else [_short(trees)]
        if self.sampled:
            parts += [self.verifier or ("sampled" if drafter is None else "mss")]
        if self.mesh_size is not None:
            parts += ["data=2" if self.mesh_size == (2, 1) else "model=2"]
        return ", ".join(parts)


def configuration(seed: int, number: int) -> Configuration:
    """Returns the configuration of a number."""
    rng = np.random.default_rng([seed, number])
    is_engine = number % ENGINES == ENGINES - 1
    sampled = bool(rng.random() < 0.45)
    made = Configuration(
        seed=seed,
        number=number,
        is_engine=is_engine,
        shape=int(rng.integers(len(SHAPES))),
        sampled=sampled,
        verifier=None,
        eos=int(rng.integers(1, 3)),
        rows=int(rng.integers(1, 6)) if is_engine else int(rng.choice([3, 7, 16, 32])),
        width=int(rng.choice([16, 32])),
        new_tokens=int(rng.choice([16, 24])),
        kv_bits=8 if np.random.default_rng([seed, number, CACHE]).random() < 0.2 else None,
        mesh_size=(1, 2) if number % MESHES == MESHES - 1 else None,
    )
    if made.mesh_size:  # the heads of other shapes cannot be divided
        made = dataclasses.replace(made, shape=int(rng.choice([0, 2, 3, 7])))
        if is_engine and rng.random() < 0.5:
            made = dataclasses.replace(made, mesh_size=(2, 1), rows=2 * int(rng.integers(1, 4)))
    drafter, _ = made.drafting(0)
    if not sampled or drafter is None:
        return made
    naive = rng.random() < 0.6 or (is_engine and drafter.remembers)
    return dataclasses.replace(made, verifier="naive" if naive else None)


@functools.cache
def _module(shape: int, changes: tuple[tuple[str, int], ...]):
    return models.build(tiny.config(**SHAPES[shape] | dict(changes)), "float32")


def model(shape: int, weights: int, noise: float = 0.0, **changes) -> magicjax.Model:
    """Returns a random model; `noise` relative to the weights makes another one near it."""
    module = _module(shape, tuple(changes.items()))
    rng = np.random.default_rng([weights, 1])
    params = tiny.loud(tiny.drawn(module.config, weights), rng, noise, never=None)
    params = jax.tree.map(lambda x: jax.numpy.asarray(x, "float32"), params)
    return magicjax.Model(module, params, name="tiny")


def drafting_of(
    rng, shape: int, weights: int, sampled: bool, copies: bool = True
) -> tuple[Any, Any]:
    """Returns a random drafter and tree; `copies`: it may quantize the target."""
    kinds = [
        "self",
        "self",
        "self",
        "small",
        "small",
        "eagle",
        "prompt-lookup",
        "suffix",
        "ensemble",
        "plain",
    ]
    kind = kinds[rng.integers(len(kinds))]
    if kind == "plain":
        return None, None
    members = [kind]
    if kind == "ensemble":
        members = list(
            rng.choice(
                ["self", "small", "eagle", "prompt-lookup", "suffix"], int(rng.integers(2, 4))
            )
        )
    separate = kind == "ensemble" and rng.random() < 0.5
    of_members = members if separate else [" ".join(members)]
    trees = [_tree(rng, of_member) for of_member in of_members]
    depth = max(tree.shape.depth for tree in trees)
    dynamic = any(isinstance(tree, magicjax.DynamicTree) for tree in trees)
    draws = [None, "top"] if dynamic else [None, "top", "with_replacement"]
    draw = draws[rng.integers(len(draws))] if sampled else None
    made = [_member(rng, member, shape, weights, depth, draw, copies) for member in members]
    if kind not in ("ensemble", "self") and rng.random() < 0.3:
        return _cascade(rng, kind, trees[0], shape, weights, draw, copies)
    if kind != "ensemble":
        return made[0], trees[0]
    return (magicjax.Ensemble(made, trees), None) if separate else (magicjax.Ensemble(made), *trees)


def _cascade(
    rng, kind: str, tree: Any, shape: int, weights: int, draw: str | None, copies: bool
) -> tuple[magicjax.Cascade, Any]:
    """Returns a cascade whose first drafter drafts `tree`, and the tree for `generate`."""
    once = rng.random() < 0.4
    depth = tree.shape.depth + (1 if once else int(rng.integers(4)))
    first = _member(rng, kind, shape, weights, depth, draw, copies)
    middle = _member(rng, "self", shape, weights, depth, None, copies)
    if kind == "eagle":  # which reads inputs of all layers
        middle = dataclasses.replace(middle, layers=None)
    if once:
        return magicjax.Cascade(first, middle), tree
    return magicjax.Cascade(first, middle, tree), magicjax.chain(depth)


def _member(
    rng, kind: str, shape: int, weights: int, depth: int, draw: str | None, copies: bool
) -> Any:
    if kind == "prompt-lookup":
        longest = int(rng.integers(1, 5))
        return magicjax.PromptLookup(longest, int(rng.integers(1, longest + 1)))
    if kind == "suffix":
        return _suffix_lookup(rng, shape)
    if kind == "eagle":
        sinks, ring = int(rng.integers(5)), int(rng.integers(1, 20))
        budget = sinks + ring if rng.random() < 0.5 else None
        target = model(shape, weights)
        c = target.config
        own = dict(budget=budget, sinks=sinks, draw=draw, check_agreement=False)  # as it is random
        if c.rope and c.final_norm and c.norm.startswith("rms") and rng.random() < 0.5:
            return magicjax.MTP(tiny.mtp_head(target), **own)
        return magicjax.Eagle(tiny.head(target), **own)
    kv_dtype = [None, None, None, "int8", "int4"][rng.integers(5)]
    hybrid, shares = (name in SHAPES[shape] for name in ("linear_layers", "shared_kv_layers"))
    if kind == "self":
        copy = [None, None, None, None, "int8", "int4:4"][rng.integers(6)] if copies else None
        layers = [None, None, "0", "1"][rng.integers(4)]
        if SHAPES[shape].get("num_layers") == 1 or shares:
            layers = None
        if layers == "0" and (hybrid or "full_layers" in SHAPES[shape]):
            layers = "0,1"  # drafts of windowed layers or states alone pin nothing
        if rng.random() < 0.1:
            return magicjax.FullCacheSpeculation(draw=draw, weights=copy, layers=layers)
        if rng.random() < 0.1 and not shares:
            return dataclasses.replace(_page_retrieval(rng, draw), layers=layers)
        policy, budget = _policy(rng, depth + 1)
        refresh = int(rng.integers(1, 5)) if rng.random() < 0.5 else None
        if isinstance(policy, magicjax.StreamingLLM):
            refresh = None
        own = policy, budget, draw, refresh, kv_dtype
        return magicjax.SelfSpeculation(*own, weights=copy, layers=layers)
    draft = _draft_model(rng, shape, weights)
    if rng.random() < 0.5 or any(draft.recurrent):
        return magicjax.SmallModel(draft, draw)
    policy, budget = _policy(rng, 2 * depth + 1)
    in_cache = isinstance(policy, magicjax.StreamingLLM) and kv_dtype is None
    in_cache &= not any(draft.windows)
    sinks = "in_cache" if in_cache and rng.random() < 0.5 else "text"
    return magicjax.SmallModel(draft, draw, policy, budget, kv_dtype, sinks)


def _suffix_lookup(rng, shape: int) -> magicjax.SuffixLookup:
    """Returns the drafter with random texts in its store."""
    made = magicjax.SuffixLookup(
        int(rng.integers(1, 9)),
        store_tokens=int(rng.choice([0, 40, 300])),
        max_factor=round(rng.uniform(MAX_DEPTH, 9), 2),  # any depth suits any match
        min_score=round(rng.uniform(0, 0.3), 2),
    )
    vocab = _module(shape, ()).config.vocab_size
    for length in rng.integers(1, 60, 4):
        made = made.remember(rng.integers(0, vocab, length))
    return made


def _page_retrieval(rng, draw: str | None) -> magicjax.PageRetrieval:
    """Returns the drafter on few or many pages."""
    size, newest = int(rng.choice([1, 2, 4, 8, 16])), int(rng.integers(1, 4))
    budget = size * (1 + newest + int(rng.integers(1, 6))) + int(rng.integers(size))
    refresh = int(rng.integers(1, 5)) if rng.random() < 0.5 else 1
    return magicjax.PageRetrieval(budget, draw, refresh, recent=newest * size, page_size=size)


def _draft_model(rng, shape: int, weights: int) -> magicjax.Model:
    """Returns one near the target, another one, the target, or one of fewer tokens."""
    kind, noise = rng.integers(6), float(np.exp(rng.uniform(np.log(0.02), np.log(0.3))))
    if kind == 0:
        return model(shape, weights)
    if kind == 1:
        changes = dict(num_layers=1, hidden_size=32)
        kinds = {}
        if "full_layers" in SHAPES[shape]:
            kinds = dict(sliding_window=None, full_layers=())
        if "linear_layers" in SHAPES[shape]:
            kinds = dict(linear_layers=(), delta_net=None)
        if "shared_kv_layers" in SHAPES[shape]:
            kinds |= dict(shared_kv_layers=0, full_head_dim=None)
        return model(shape, weights + 1, **changes, **kinds)
    near = model(shape, weights, noise)
    if kind > 2:
        return near
    few = tiny.few(near, near.config.vocab_size * 3 // 4)
    return dataclasses.replace(few, name="tiny", shards=1)  # its few rows cannot be divided


def _policy(rng, ring: int) -> tuple[Any, int]:
    """Returns a policy with a ring of at least `ring` slots, and the budget."""
    ring, pinned = ring + int(rng.integers(8)), int(rng.integers(1, 9))
    window, kernel = int(rng.integers(1, 10)), int(rng.choice([1, 3, 5]))
    mass = dict(recent=ring, window=window)
    pooled = mass | dict(kernel=kernel, pooling=str(rng.choice(["max", "avg"])))
    made = [
        magicjax.StreamingLLM(sinks=pinned),
        magicjax.StreamingLLM(sinks=pinned),
        policies.SnapKV(**pooled, scaled=bool(rng.random() < 0.5)),
        policies.PyramidKV(**pooled, beta=float(rng.uniform(1, 20))),
        policies.H2O(**mass),
        policies.TOVA(recent=ring),
        policies.KeyDiff(recent=ring),
        policies.KNorm(recent=ring),
        policies.ExpectedAttention(
            **mass, future=int(rng.integers(1, 30)), covariance=bool(rng.random() < 0.5)
        ),
        policies.Random(recent=ring, seed=int(rng.integers(9))),
    ]
    return made[rng.integers(len(made))], ring + pinned


def _tree(rng, members: str) -> Any:
    """Returns a tree that all of the members can draft."""
    depth = int(rng.integers(1, MAX_DEPTH + 1))
    chains, suffix = "prompt-lookup" in members, "suffix" in members
    kind = rng.integers(2 if chains or suffix else 5)
    if kind == 0 or (chains and suffix):
        return magicjax.chain(depth)
    if suffix:
        return magicjax.DynamicTree(1 + depth + int(rng.integers(4)), depth, 4)
    if chains:
        return magicjax.expansion((int(rng.integers(2, 4)), *[1] * (depth // 2)))
    if kind == 1:
        return magicjax.expansion(tuple(int(n) for n in rng.integers(1, 4, min(depth, 3))))
    if kind == 2:
        width, depth = int(rng.integers(1, 5)), min(depth, 4)
        most = width + (depth - 1) * width**2
        return magicjax.DynamicTree(int(rng.integers(2, min(most, 12) + 2)), depth, width)
    parents = [-1]
    while len(parents) < int(rng.integers(3, 14)):  # each child is below one of the newest nodes
        parents.append(int(rng.integers(max(0, len(parents) - 4), len(parents))))
    made = magicjax.TokenTree.from_parents(parents)
    return made if made.depth <= MAX_DEPTH else magicjax.chain(MAX_DEPTH)


def _short(tree: Any) -> str:
    if isinstance(tree, tuple):
        return " + ".join(map(_short, tree))
    return f"tree {tree.parents}" if isinstance(tree, magicjax.TokenTree) else repr(tree)
