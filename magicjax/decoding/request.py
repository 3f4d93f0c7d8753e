"""A request: what `magicjax.generate` was asked for, as arrays and program settings.

`validate` checks the arguments on the host; `place` moves the arrays to the devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from magicjax import loading, placement
from magicjax.decoding import validation
from magicjax.decoding.loop import DecodeState, Prefilled
from magicjax.decoding.validation import RequestOptions
from magicjax.drafters import Drafter
from magicjax.drafters.spec import resolve
from magicjax.grammars.arena import rows_of
from magicjax.grammars.masking import GrammarRows
from magicjax.kv_cache.full_cache import CAPACITY_MULTIPLE, KVCache
from magicjax.model import Model
from magicjax.parallel import pipeline_stages
from magicjax.settings import AttentionStatsSpec, PrefillSettings, Settings
from magicjax.verification.sampling import Sampling
from sharding import DATA, STAGE, AnyMesh, array_bytes, factored, processes

PREFILL_CHUNK = 512  # tokens of a row in a prefill step
PREFILL_TOKENS = 8192  # of all rows of a device in a prefill step: bounds the activations


@dataclasses.dataclass(frozen=True)
class Request:
    """A validated request.

    Until `place` moves them to the devices, its arrays are numpy arrays, and under sampling the row
    keys are JAX arrays.

    Attributes:
      settings: static settings of the programs.
      target, drafter: the models.
      prompts: token ids of each row.
      tokens: int32 [B, T], the prompts, right-padded.
      lengths: int32 [B], of the prompts.
      limits: int32 [B], the maximum number of new tokens.
      eos: int32 [E], tokens that end a row.
      sampling: parameters and key of each row; None for greedy decoding.
      pad_token_id: pads rows that ended.
      stop: strings that end a row; the host searches for them (`runner.end_stopped`).
      grammar: of the rows, before their first new tokens; None without grammars.
      transitions: int32 [M], of all grammars (`magicjax.grammars.masking`).
    """

    settings: Settings
    target: Model
    drafter: Drafter | None
    prompts: list[np.ndarray]
    tokens: Int[Any, "B T"]
    lengths: Int[Any, "B"]
    limits: Int[Any, "B"]
    eos: Int[Any, "E"]
    sampling: Sampling | None
    pad_token_id: int
    stop: tuple[str, ...] = ()
    grammar: GrammarRows | None = None
    transitions: Int[Any, "M"] | None = None

    @property
    def prefill_settings(self) -> PrefillSettings:
        """Static settings of the program `prefill`."""
        stats_spec = (
            AttentionStatsSpec() if self.drafter is None else self.drafter.attention_stats_spec()
        )
        return PrefillSettings(
            capacity=self.settings.capacity,
            chunk=self.settings.chunk,
            backend=self.settings.backend,
            stats_spec=dataclasses.replace(stats_spec, rounds=False),  # concerns decoding only
            mesh=self.settings.mesh,
            replicated_rows=self.settings.replicated_rows,
            logprobs=self.settings.logprobs,
        )

    @property
    def prefill_arguments(self) -> tuple:
        """Arguments of the program `prefill`."""
        per_row = self.tokens, self.lengths, self.sampling, self.grammar
        return self.target, *per_row, self.transitions

    def init_arguments(self, cache: KVCache, prefilled: Prefilled) -> tuple:
        """Returns the arguments of the program `init`, which runs on the results of `prefill`."""
        per_row = self.tokens, self.limits, self.eos, self.sampling
        return self.target, self.drafter, cache, prefilled, *per_row

    def loop_arguments(self, state: DecodeState) -> tuple:
        """Returns the arguments of the programs `decode`, `decode_until_row_ends` and `step`."""
        return self.target, self.drafter, state, self.transitions

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the KV caches of (target, drafter); nothing is allocated."""
        batch, capacity = len(self.prompts), self.settings.capacity
        draft = 0
        if self.drafter is not None:
            draft = self.drafter.cache_bytes(self.target, batch, capacity)
        return self.target.kv_bytes(batch, capacity), draft


def prepare(
    target: Model,
    prompts: str | Sequence[Any],
    *,
    put: Callable = processes.put,
    **options: Any,
) -> Request:
    """Returns the validated request, placed on the devices.

    Args:
      target: a model; a skeleton, which has no parameters, is validated but not placed.
      prompts: texts, or token ids.
      put: (array, sharding) -> the array with that sharding; for requests on a mesh.
      options: the fields of `RequestOptions`.

    Raises:
      ValueError, TypeError: invalid arguments; see `magicjax.generate`.
    """
    request_options = make_options(target, **options)
    request = validate(target, prompts, request_options)
    if target.params is None:
        return request
    return place(request, request_options.mesh, request_options.micro_batches, put)


def make_options(
    target: Model, drafter: Any = None, tree: Any = None, mesh: Any = None, **options: Any
) -> RequestOptions:
    """Returns the options of a request; a drafter and a tree may be texts.

    Raises:
      ValueError, FileNotFoundError: a text that is not a drafter or a tree.
    """

    def load(source: str, weights: str | None = None) -> Model:
        if target.params is None:
            return loading.skeleton(source, target.dtype, weights=weights)
        stages = None if mesh is None else 1
        return loading.load(source, str(target.dtype), weights=weights, mesh=mesh, stages=stages)

    if drafter == "auto":
        raise ValueError(
            "drafter='auto' is not supported here: choose one, magicjax.choose_drafter"
        )
    drafter, tree = resolve(drafter, tree, load)
    return RequestOptions(drafter=drafter, tree=tree, mesh=mesh, **options)


def validate(target: Model, prompts: str | Sequence[Any], options: RequestOptions) -> Request:
    """Returns the request with numpy arrays (and JAX keys under sampling); no program is compiled.

    Raises:
      ValueError, TypeError: invalid arguments; see `magicjax.generate`.
    """
    validation.check_target(target)
    drafter, mesh = options.drafter, options.mesh
    tree = validation.checked_tree(options)
    shape = validation.checked_shape(drafter, tree)
    verifier = validation.checked_verifier(options, tree)
    rows = validation.token_ids(target, prompts)
    sampling = validation.checked_sampling(options, len(rows))
    limits = validation.checked_limits(options, len(rows))
    validation.check_context(target, drafter, tree, shape.depth, rows, limits)
    if mesh is None:
        pipeline_stages.validate_micro_batches(options.micro_batches, len(rows), 1)
        placement.validate_single_device(target, drafter)
    else:
        placement.validate(mesh, target, drafter, len(rows), options.micro_batches)
    backend = validation.checked_backend(target, options)
    target, drafter = placement.with_backend((target, drafter), backend)
    drafter = _sized(drafter, target, mesh)
    groups = 1 if mesh is None else factored(mesh).shape[DATA]
    tokens, lengths, chunk = _padded(rows, -(-len(rows) // groups))
    capacity = capacity_of(int((lengths + limits).max()), shape.depth)
    eos = validation.checked_eos(target, options)
    grammar, transitions = rows_of(target, options.grammar, eos, len(rows))
    return Request(
        settings=Settings(
            tree=tree,
            shape=shape,
            verifier=verifier,
            capacity=max(capacity, round_up(tokens.shape[1], CAPACITY_MULTIPLE)),
            chunk=chunk,
            max_new_tokens=int(limits.max()),
            backend=backend,
            mesh=None if mesh is None else factored(mesh),
            logprobs=validation.checked_logprobs(target, options.logprobs),
        ),
        target=target,
        drafter=drafter,
        prompts=rows,
        tokens=tokens,
        lengths=lengths,
        limits=limits.astype(np.int32),
        eos=np.array(eos, np.int32),
        sampling=sampling,
        pad_token_id=validation.checked_pad(target, options, eos),
        stop=validation.checked_stop(target, options.stop),
        grammar=grammar,
        transitions=transitions,
    )


def _sized(drafter: Drafter | None, target: Model, mesh: AnyMesh | None) -> Drafter | None:
    """Returns the drafter with the models that it derives from the target, without parameters.

    Raises:
      ValueError: such a model does not divide over the mesh.
    """
    if drafter is None:
        return None
    drafter = drafter.for_target(dataclasses.replace(target, params=None))
    if mesh is not None:
        for model in placement.models_of(drafter):
            placement.parameter_shardings(model.module, model.shards, mesh)
    return drafter


def capacity_of(tokens: int, depth: int, chunk: int = 0) -> int:
    """Returns the slots of a row, a multiple of `CAPACITY_MULTIPLE`, for a text of `tokens`.

    After the text, a round writes a whole path, and a draft model its backlog before it, or prefill
    writes a whole chunk: a text of 500 tokens, depth 4 and chunks of 64 tokens take 576 slots.

    Args:
      tokens: of the longest text, new tokens included.
      depth: of the longest path, in edges.
      chunk: tokens of a prefill step that can begin at any token; 0: prefill begins at the first.
    """
    return round_up(tokens + max(chunk, 2 * depth + 1), CAPACITY_MULTIPLE)


def _padded(rows: Sequence[np.ndarray], rows_per_group: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns (int32 [B, T] right-padded to a multiple of the chunk, lengths, chunk)."""
    lengths = np.array([len(row) for row in rows], np.int32)
    chunk = min(prefill_chunk(rows_per_group), round_up(int(lengths.max()), 16))
    tokens = np.zeros((len(rows), round_up(int(lengths.max()), chunk)), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths, chunk


def place(
    request: Request,
    mesh: AnyMesh | None = None,
    micro_batches: int | None = None,
    put: Callable = processes.put,
) -> Request:
    """Returns a validated request with models and arrays on the devices.

    A drafter then derives its arrays from the target's, which may take much memory.

    Args:
      request: from `validate`.
      mesh: None for the default device, where the models already are.
      micro_batches: of a mesh with stages; None chooses the fastest.
      put: (array, sharding) -> the array with that sharding.
    """
    if request.drafter is not None:
        drafter = request.drafter.for_target(request.target)
        request = dataclasses.replace(request, drafter=drafter)
    if mesh is None:
        on_device = {
            name: jax.tree.map(jnp.asarray, getattr(request, name))
            for name in ("tokens", "lengths", "limits", "eos", "sampling", "grammar", "transitions")
        }
        return dataclasses.replace(request, **on_device)
    return _placed(request, factored(mesh), micro_batches, put)


def _placed(request: Request, mesh: AnyMesh, micro_batches: int | None, put: Callable) -> Request:
    """Returns the request with all its arrays on the mesh."""
    if micro_batches is None:
        micro_batches = _micro_batches(request, mesh)
    replicated = NamedSharding(mesh, placement.EVERYWHERE)
    divided = NamedSharding(mesh, placement.ROWS)
    rows = replicated if request.settings.replicated_rows else divided

    def per_row(x):
        return jax.tree.map(lambda leaf: put(leaf, rows), x)

    return dataclasses.replace(
        request,
        target=placement.shard_target(request.target, mesh, micro_batches, put),
        drafter=placement.shard_drafter(request.drafter, mesh, put),
        tokens=per_row(request.tokens),
        lengths=per_row(request.lengths),
        limits=per_row(request.limits),
        sampling=per_row(request.sampling),
        grammar=per_row(request.grammar),
        eos=put(request.eos, replicated),
        transitions=jax.tree.map(lambda x: put(x, replicated), request.transitions),
    )


def _micro_batches(request: Request, mesh: AnyMesh) -> int:
    """Returns the number of micro-batches that makes a step of plain decoding fastest."""
    groups, target = mesh.shape[DATA], request.target
    weights = sum(array_bytes(x.shape, x.dtype) for x in jax.tree.leaves(target.params))
    caches = target.kv_bytes(len(request.prompts), request.settings.capacity) // groups
    rows = len(request.prompts) // groups
    return pipeline_stages.best_micro_batches(rows, mesh.shape[STAGE], weights, caches)


def prefill_chunk(rows: int) -> int:
    """Returns the tokens of a row in a prefill step, a power of two, for `rows` per device."""
    chunk = PREFILL_CHUNK
    while chunk > 16 and chunk * rows > PREFILL_TOKENS:
        chunk //= 2
    return chunk


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least n."""
    return -(-n // multiple) * multiple
