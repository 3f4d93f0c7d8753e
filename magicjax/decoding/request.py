"""From what a user asks to what a program takes: prompts become arrays, and bad input an error.

Every check is here, or in the drafter's `check`, and runs before anything is compiled.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from magicjax import placement
from magicjax.decoding.loop import Prefilled, PrefillSettings, Settings
from magicjax.drafters import DRAWINGS, Drafter, Ensemble
from magicjax.kv_cache.attention_stats import Watch
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.parallel import offloading, pipeline_stages
from magicjax.trees.token_tree import (
    MAX_NODES,
    ROOT_ONLY,
    DynamicTree,
    Shape,
    TokenTree,
    Tree,
    chain,
)
from magicjax.verification.sampling import Sampling, row_keys
from magicjax.verification.verify import VERIFIERS
from pallas_kernels import choose_backend
from sharding import DATA, STAGE, AnyMesh, factored, processes

PREFILL_CHUNK = 512  # tokens of a row in a prefill step
PREFILL_TOKENS = 8192  # of a device's rows together: enough to keep it busy, few to hold
CAPACITY_MULTIPLE = 64  # so that contexts of nearly the same length share a program
DEFAULT_TREE = chain(4)


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
      settings: what the programs are specialised on.
      target, drafter: as given.
      prompts: token ids of each row.
      tokens: int32 [B, T], the prompts, right-padded.
      lengths, limits: int32 [B], of the prompts and of the outputs.
      eos: int32 [E].
      sampling: how each row samples; None: greedily.
      pad_token_id: what fills rows that ended.
    """

    settings: Settings
    target: Model
    drafter: Drafter | None
    prompts: list[np.ndarray]
    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    eos: jax.Array
    sampling: Sampling | None
    pad_token_id: int

    @property
    def prefill_settings(self) -> PrefillSettings:
        """What the program `prefill` is specialised on."""
        watch = Watch() if self.drafter is None else self.drafter.watch()
        return PrefillSettings(
            capacity=self.settings.capacity,
            chunk=self.settings.chunk,
            backend=self.settings.backend,
            watch=dataclasses.replace(watch, rounds=False),  # a matter of later rounds
            mesh=self.settings.mesh,
        )

    @property
    def prefill_arguments(self) -> tuple:
        """What the program `prefill` takes."""
        return self.target, self.tokens, self.lengths, self.sampling

    def start_arguments(self, cache: KVCache, prefilled: Prefilled) -> tuple:
        """Returns what the program `start` takes, behind what `prefill` returned."""
        of_rows = self.tokens, self.limits, self.eos, self.sampling
        return self.target, self.drafter, cache, prefilled, *of_rows

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """The bytes of keys and values that (target, drafter) will hold; nothing is allocated."""
        batch, capacity = len(self.prompts), self.settings.capacity
        draft = 0
        if self.drafter is not None:
            draft = self.drafter.cache_bytes(self.target, batch, capacity)
        return self.target.kv_bytes(batch, capacity), draft


def prepare(
    target: Model,
    prompts: str | Sequence[Any],
    *,
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    do_sample: bool = False,
    temperature: float | Sequence[float] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    seed: int | None = None,
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    backend: str | None = None,
    mesh: AnyMesh | None = None,
    micro_batches: int | None = None,
    put: Callable = processes.put,
) -> Request:
    """Returns the checked request; see `magicjax.generate` for the arguments and errors.

    `put(array, sharding)` gives an array in its place on the mesh; a target without parameters, a
    skeleton, is only checked.
    """
    if not isinstance(target, Model):
        raise TypeError(f"target is a {type(target).__name__}: pass what magicjax.load returns")
    tree = _tree(target, drafter, tree)
    shape = tree.shape if drafter is None else _shape(drafter, tree)
    verifier = _verifier(drafter, tree, do_sample, verifier)
    rows = _token_ids(target, prompts)
    sampling = _sampling(do_sample, temperature, top_k, top_p, seed, len(rows))
    limits = _limits(max_new_tokens, len(rows))
    _check_context(target, drafter, tree, shape.depth, rows, limits)
    lengths = np.array([len(row) for row in rows], np.int32)
    groups = 1 if mesh is None else factored(mesh).shape[DATA]
    chunk = min(prefill_chunk(-(-len(rows) // groups)), _round_up(int(lengths.max()), 16))
    width = _round_up(int(lengths.max()), chunk)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    # A round writes a whole path at once, and a small model's cache a lead before it.
    longest = int((lengths + limits).max()) + 2 * shape.depth + 1
    settings = Settings(
        tree=tree,
        shape=shape,
        verifier=verifier,
        capacity=_round_up(max(longest, width), CAPACITY_MULTIPLE),
        chunk=chunk,
        max_new_tokens=int(limits.max()),
        backend=_backend(backend, target, drafter),
    )
    eos = _eos(target, eos_token_id)
    request = Request(
        settings=settings,
        target=target,
        drafter=drafter,
        prompts=rows,
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        limits=jnp.asarray(limits, jnp.int32),
        eos=jnp.asarray(eos, jnp.int32),
        sampling=sampling,
        pad_token_id=_pad(target, pad_token_id, eos),
    )
    if mesh is None:
        pipeline_stages.check_micro_batches(micro_batches, len(rows), 1)
        placement.check_on_one(target, drafter)
    else:
        placement.check(mesh, target, drafter, len(rows), micro_batches)
        if target.params is not None:
            request = _placed(request, mesh, micro_batches, put)
    if target.blocks is not None:
        drafts = placement.models_of(request.drafter)
        offloading.check_caches(request.target, drafts, sum(request.kv_bytes))
    return request


def _placed(request: Request, mesh: AnyMesh, micro_batches: int | None, put: Callable) -> Request:
    """Returns the request with all its arrays where the mesh wants them."""
    mesh = factored(mesh)
    if micro_batches is None:
        micro_batches = _micro_batches(request, mesh)
    rows = NamedSharding(mesh, placement.ROWS)

    def of_rows(x):
        return jax.tree.map(lambda leaf: put(leaf, rows), x)

    return dataclasses.replace(
        request,
        settings=dataclasses.replace(request.settings, mesh=mesh),
        target=placement.place_target(request.target, mesh, micro_batches, put),
        drafter=placement.place_drafter(request.drafter, mesh, put),
        tokens=of_rows(request.tokens),
        lengths=of_rows(request.lengths),
        limits=of_rows(request.limits),
        sampling=of_rows(request.sampling),
        eos=put(request.eos, NamedSharding(mesh, placement.EVERYWHERE)),
    )


def _micro_batches(request: Request, mesh: AnyMesh) -> int:
    """Returns in how many parts rows go through the stages: the fastest of a plain step."""
    groups, target = mesh.shape[DATA], request.target
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target.params))
    caches = target.kv_bytes(len(request.prompts), request.settings.capacity) // groups
    rows = len(request.prompts) // groups
    return pipeline_stages.best_micro_batches(rows, mesh.shape[STAGE], weights, caches)


def prefill_chunk(rows: int) -> int:
    """Returns the tokens of a row in a prefill step, a power of two; `rows` are a device's."""
    chunk = PREFILL_CHUNK
    while chunk > 16 and chunk * rows > PREFILL_TOKENS:
        chunk //= 2
    return chunk


def _backend(backend: str | None, target: Model, drafter: Drafter | None) -> str:
    """Returns the backend of the attention, checked to serve all models."""
    for model in (target, *placement.models_of(drafter)):
        dtype = None if model.params is None else model.dtype  # of a skeleton it is not known
        choose_backend(backend, dtype, model.config.head_dim, jax.devices()[0])
    return choose_backend(backend)


def _tree(target: Model, drafter: Drafter | None, tree: Tree | None) -> Tree:
    """Returns the tree that every round proposes, checked to be one that can be drafted."""
    if drafter is None:
        if tree is not None:
            raise ValueError("a tree needs a drafter: pass drafter=..., or leave the tree out")
        return ROOT_ONLY
    for one in drafter.drafters if isinstance(drafter, Ensemble) else (drafter,):
        _check_kind(one)
    if isinstance(drafter, Ensemble) and drafter.trees is not None:
        if tree is not None:
            raise ValueError("the ensemble has a tree for each drafter: leave tree out")
        return ROOT_ONLY  # which nobody is asked for
    if tree is None:
        return DEFAULT_TREE
    if not isinstance(tree, TokenTree | DynamicTree):
        raise TypeError(
            f"tree is a {type(tree).__name__}: make one with magicjax.chain, magicjax.expansion, "
            "magicjax.TokenTree.from_parents, magicjax.optimal or magicjax.DynamicTree, or from "
            "its written form with magicjax.parse_tree"
        )
    if tree.num_nodes < 2:
        raise ValueError("the tree speculates nothing: give it a child, or leave the drafter out")
    return tree


def _check_kind(drafter: Any) -> None:
    if isinstance(drafter, type):
        raise TypeError(f"drafter is the class {drafter.__name__}: make one, {drafter.__name__}()")
    if not hasattr(drafter, "propose"):
        raise TypeError(
            f"drafter is a {type(drafter).__name__}: pass magicjax.SelfSpeculation(...), or wrap "
            "a model, magicjax.SmallModel(model)"
        )


def _shape(drafter: Drafter, tree: Tree) -> Shape:
    """Returns the bounds of what the drafter proposes, checked against the cap."""
    shape = drafter.shape(tree)
    if shape.num_nodes > MAX_NODES:
        raise ValueError(
            f"the drafters propose {shape.num_nodes} nodes together: at most {MAX_NODES} are "
            "supported; use smaller trees or fewer drafters"
        )
    return shape


def _verifier(drafter: Drafter | None, tree: Tree, do_sample: bool, verifier: str | None) -> str:
    """Returns the verifier, checked to be exact for the way children are drawn."""
    if verifier is not None and verifier not in VERIFIERS:
        raise ValueError(f"verifier={verifier!r} is unknown: use one of {', '.join(VERIFIERS)}")
    if not do_sample:
        if verifier not in (None, "greedy"):
            raise ValueError(
                f"verifier={verifier!r} is for sampling: pass do_sample=True, or leave it out"
            )
        return "greedy"
    if verifier == "greedy":
        raise ValueError(
            "verifier='greedy' with do_sample=True would accept nothing but the most likely token, "
            "which is not the target's distribution: leave it out, or use mss or naive"
        )
    if drafter is None:
        if verifier not in (None, "naive"):
            raise ValueError(f"verifier={verifier!r} needs a drafter: pass one, or leave it out")
        return "naive"
    _check_drawings(drafter.drawings(tree), verifier)
    return "mss" if verifier is None else verifier


def _check_drawings(drawings: set[str], verifier: str | None) -> None:
    """Raises ValueError unless the verifier keeps the target's distribution for these draws."""
    if verifier == "naive":
        return  # exact whatever was drafted
    if {"with_replacement", "without_replacement"} <= drawings:
        raise ValueError(
            "an ensemble mixes draws with and without replacement, and the rule that is exact for "
            "one is not for the other: give all drafters the same draw"
        )
    if verifier in (None, "mss"):
        return  # follows the draws
    wrong = [d for d in sorted(drawings) if DRAWINGS[d] != verifier]
    if wrong:
        raise ValueError(
            f"verifier={verifier!r} is not exact for children drawn {wrong[0]!r}: the accepted "
            f"tokens would not follow the target's distribution; use {DRAWINGS[wrong[0]]!r}, or "
            "leave the verifier out"
        )


def _sampling(do_sample, temperature, top_k, top_p, seed, rows: int) -> Sampling | None:
    """Returns each row's parameters and key, checked; None for greedy decoding."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if not do_sample:
        stray = [name for name, value in given.items() if value is not None]
        if stray:
            raise ValueError(
                f"{stray[0]}={given[stray[0]]!r} has no meaning in greedy decoding: "
                "pass do_sample=True, or leave it out"
            )
        return None
    least = float(np.finfo(np.float32).tiny)
    temperatures = _for_each_row("temperature", 1.0 if temperature is None else temperature, rows)
    kept = _for_each_row("top_k", 0 if top_k is None else top_k, rows)
    mass = _for_each_row("top_p", 1.0 if top_p is None else top_p, rows)
    _check_each(
        "temperature",
        temperatures,
        (np.float32(temperatures) >= least) & np.isfinite(np.float32(temperatures)),
        "above 0 and finite in float32; for the most likely tokens alone, leave do_sample out",
    )
    _check_each(
        "top_k",
        kept,
        (kept >= 0) & (kept == np.round(kept)),
        "a whole number, 0 (all tokens) or more",
    )
    _check_each("top_p", mass, (np.float32(mass) >= least) & (mass <= 1), "above 0 and at most 1")
    return Sampling(
        temperature=jnp.asarray(temperatures, jnp.float32),
        top_k=jnp.asarray(np.minimum(kept, 2**31 - 1), jnp.int32),
        top_p=jnp.asarray(mass, jnp.float32),
        keys=row_keys(_seed(seed), jnp.arange(rows)),
        top_k_used=bool((kept > 0).any()),
        top_p_used=bool((mass < 1).any()),
    )


def _seed(seed: Any) -> int:
    if seed is None:
        return 0
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be a whole number between 0 and {2**32 - 1}")
    return int(seed)


def _for_each_row(name: str, value: Any, rows: int) -> np.ndarray:
    each = np.asarray(value, np.float64)
    if each.ndim > 1 or (each.ndim == 1 and len(each) != rows):
        raise ValueError(
            f"{name} has shape {each.shape} for {rows} prompts: give one number, or one a row"
        )
    return np.broadcast_to(each, rows)


def _check_each(name: str, values: np.ndarray, good: np.ndarray, allowed: str) -> None:
    if not good.all():
        raise ValueError(f"{name}={values[~good][0]:g}: it must be {allowed}")


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _token_ids(target: Model, prompts: str | Sequence[Any]) -> list[np.ndarray]:
    """Returns the rows' token ids, checked against the vocabulary."""
    if isinstance(prompts, str):
        raise TypeError("prompts is a single text: pass a list, [text], for a batch of one row")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one")
    rows = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if target.tokenizer is None:
                raise ValueError(
                    f"prompt {i} is text and the target {target.name!r} has no tokenizer: "
                    "pass token ids"
                )
            prompt = target.tokenizer(prompt)["input_ids"]
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise ValueError(f"prompt {i} is empty: it needs at least 1 token")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            wrap = "; for a batch of one row wrap it: [[5, 6, 7]]" if ids.ndim == 0 else ""
            raise ValueError(
                f"prompt {i} has shape {ids.shape} and dtype {ids.dtype}: "
                f"it must be text or a list of token ids{wrap}"
            )
        outside = ids[(ids < 0) | (ids >= target.config.vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {i} has token {outside[0]}, outside the target's vocabulary: "
                f"ids must lie between 0 and {target.config.vocab_size - 1}"
            )
        rows.append(ids.astype(np.int32))
    return rows


def _limits(max_new_tokens: int | Sequence[int], rows: int) -> np.ndarray:
    each = np.asarray(max_new_tokens)
    if not np.issubdtype(each.dtype, np.integer):
        raise TypeError(f"max_new_tokens={max_new_tokens!r} must be an int, or one for each row")
    if each.ndim > 1 or (each.ndim == 1 and len(each) != rows):
        raise ValueError(
            f"max_new_tokens has shape {each.shape} for {rows} prompts: give one int, or one a row"
        )
    if each.min() < 1:
        raise ValueError(f"max_new_tokens={each.min()}: it must be at least 1")
    return np.broadcast_to(each, rows).astype(np.int64)  # `_check_context` bounds it


def _check_context(target, drafter, tree, depth, rows, limits) -> None:
    # A tree may reach beyond the last position, with nodes that the row's end cuts off.
    needed = [len(row) + int(limit) for row, limit in zip(rows, limits, strict=True)]
    worst = int(np.argmax(needed))
    if needed[worst] > target.config.max_positions:
        room = target.config.max_positions - int(limits[worst])
        fits = f" (to at most {room} tokens)" if room > 0 else ""
        raise ValueError(
            f"prompt {worst} has {len(rows[worst])} tokens; with {limits[worst]} new ones it needs "
            f"{needed[worst]} positions, and the target has {target.config.max_positions}: "
            f"shorten the prompt{fits} or max_new_tokens"
        )
    if drafter is not None:
        drafter.check(target, tree, depth, needed[worst])


def _eos(target: Model, eos_token_id: Any) -> tuple[int, ...]:
    if eos_token_id is None:
        return target.eos_token_ids
    given = (eos_token_id,) if np.ndim(eos_token_id) == 0 else eos_token_id
    ids = tuple(operator.index(i) for i in given)
    for i in ids:
        if not 0 <= i < target.config.vocab_size:
            raise ValueError(
                f"eos_token_id={i} lies outside the target's vocabulary: it must lie between 0 "
                f"and {target.config.vocab_size - 1}; pass [] to never stop early"
            )
    return ids


def _pad(target: Model, pad_token_id: int | None, eos: tuple[int, ...]) -> int:
    if pad_token_id is not None:
        pad_token_id = operator.index(pad_token_id)
        if not 0 <= pad_token_id < target.config.vocab_size:
            raise ValueError(
                f"pad_token_id={pad_token_id} must lie between 0 and {target.config.vocab_size - 1}"
            )
        return pad_token_id
    if target.pad_token_id is not None and 0 <= target.pad_token_id < target.config.vocab_size:
        return target.pad_token_id  # LLaMA-1's config says -1, for none
    return eos[0] if eos else 0
