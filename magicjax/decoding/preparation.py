"""The preparation of a request: from the arguments of `magicjax.generate` to arrays on the devices.

`validated_request` checks the arguments on the host; `place` moves the arrays to the devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import UInt32

from magicjax import loading, placement
from magicjax.decoding import memory, validation
from magicjax.decoding.prompts import prompts_of, token_ids
from magicjax.decoding.reasoning import TAIL
from magicjax.decoding.request import Request, RequestOptions
from magicjax.decoding.rows import rows_of
from magicjax.decoding.text import matcher_of
from magicjax.drafters import Drafter
from magicjax.drafters.spec import resolve
from magicjax.grammars.matcher import Matcher, first_masks
from magicjax.model import CAPACITY_MULTIPLE, Model
from magicjax.parallel import pipeline_stages
from magicjax.sampling_params import SamplingParams
from magicjax.settings import Settings
from magicjax.trees.token_tree import Tree
from sharding import DATA, STAGE, AnyMesh, array_bytes, factored, global_arrays

PREFILL_CHUNK = 512  # tokens of a row in a prefill step
PREFILL_TOKENS = 8192  # of all rows of a device in a prefill step: bounds the activations


def prepare(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    options: RequestOptions = RequestOptions(),
) -> Request:
    """Returns the validated request, placed on the devices.

    Args:
      target: a model; the weights of an abstract one (`loading.abstract_model`) are loaded after
        validation.
      prompts, params: arguments of `magicjax.generate`.
      options: its keyword arguments.

    Raises:
      ValueError, TypeError: invalid arguments; see `magicjax.generate`.
    """
    request = validated_request(target, prompts, params, options)
    if request.target.params is None:
        memory.check(request)
    with memory.explained(request):  # the drafter may make a copy of the target
        return place(request, options.micro_batches)


def validated_request(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    options: RequestOptions = RequestOptions(),
) -> Request:
    """Returns the request with numpy arrays (and JAX keys under sampling); no program is compiled.

    The target may be abstract (`loading.abstract_model`). Draft models named in a text always are.

    Raises:
      ValueError, TypeError: invalid arguments; see `magicjax.generate`.
    """
    validation.check_target(target)
    mesh = options.mesh
    drafter, tree = drafter_and_tree(target, options.drafter, options.tree)
    tree = validation.validated_tree(drafter, tree)
    shape = validation.validated_shape(drafter, tree)
    prompts = prompts_of(prompts)
    memory.check_rows(target, len(prompts), mesh)
    rows = token_ids(target, prompts)
    row_params = validation.params_of_rows(params, len(rows))
    for sampling_params in row_params:
        validation.check_for_target(target, sampling_params)
    verifier = validation.validated_verifier(options.verifier, drafter, tree, row_params)
    limits = validation.validated_limits(target, rows, row_params)
    validation.check_context(target, drafter, tree, shape.depth, rows, limits)
    _check_devices(target, drafter, len(rows), options)
    backend = validation.validated_backend(target, drafter, options.backend, mesh)
    target, drafter = placement.with_backend((target, drafter), backend)
    drafter = _with_derived_models(drafter, target, mesh)
    groups = 1 if mesh is None else factored(mesh).shape[DATA]
    longest = max(map(len, rows))
    chunk = min(prefill_chunk(-(-len(rows) // groups)), round_up(longest, 16))
    width = round_up(longest, chunk)
    tokens = max(len(row) + int(limit) for row, limit in zip(rows, limits, strict=True))
    capacity = capacity_of(tokens, shape.depth)
    eos = validation.validated_eos(target, options.eos_token_id)
    allowed = _first_masks(target, rows, row_params, eos)
    return Request(
        settings=Settings(
            tree=tree,
            shape=shape,
            verifier=verifier,
            capacity=max(capacity, round_up(width, CAPACITY_MULTIPLE)),
            chunk=chunk,
            max_tokens=int(limits.max()),
            backend=backend,
            mesh=None if mesh is None else factored(mesh),
            logprobs=validation.validated_logprobs(target, row_params),
        ),
        target=target,
        drafter=drafter,
        prompts=rows,
        params=row_params,
        rows=rows_of(target, rows, row_params, limits, eos, width, allowed),
        eos=tuple(eos),
        pad_token_id=validation.validated_pad(target, options.pad_token_id, eos),
    )


def _first_masks(
    target: Model,
    prompts: Sequence[np.ndarray],
    params: Sequence[SamplingParams],
    eos: Sequence[int],
) -> UInt32[np.ndarray, "B W"] | None:
    """Returns the first tokens that the rows' grammars allow; None if no row has a grammar.

    Raises:
      ValueError: a target without tokenizer or EOS, or a grammar that is not supported.
    """
    if all(row.grammar is None for row in params):
        return None
    matcher_by_key: dict[Any, Matcher | None] = {}  # rows often share a grammar
    matchers = []
    for prompt, row in zip(prompts, params, strict=True):
        key = row.grammar, row.stop_token_ids, tuple(prompt[-TAIL:].tolist())
        if key not in matcher_by_key:
            matcher_by_key[key] = matcher_of(target, prompt, row, eos)
        matchers.append(matcher_by_key[key])
    allowed = first_masks(matchers, target.config.vocab_size)
    for matcher in matchers:
        if matcher is not None and matcher.error:
            raise ValueError(f"the grammar is not supported: {matcher.error}")
    return allowed


def drafter_and_tree(
    target: Model, drafter: Any, tree: Tree | str | None
) -> tuple[Drafter | None, Tree | None]:
    """Returns (drafter, tree), made from their texts if they are texts.

    Raises:
      ValueError, FileNotFoundError: a text that is not a drafter or a tree.
    """
    for name, value in (("drafter", drafter), ("tree", tree)):
        if isinstance(value, str) and value == "auto":
            raise ValueError(
                f"{name}='auto' is not supported here: choose one with magicjax.generate, and pass "
                "its output's choice.drafter and choice.tree"
            )
    load = functools.partial(loading.abstract_model, dtype=target.dtype)
    return resolve(drafter, tree, load)


def _check_devices(
    target: Model, drafter: Drafter | None, rows: int, options: RequestOptions
) -> None:
    """Raises ValueError if models or rows do not divide over the devices."""
    if options.mesh is None:
        pipeline_stages.check_micro_batches(options.micro_batches, rows, 1)
        placement.check_single_device(target, drafter)
    else:
        placement.check(options.mesh, target, drafter, rows, options.micro_batches)


def _with_derived_models(
    drafter: Drafter | None, target: Model, mesh: AnyMesh | None
) -> Drafter | None:
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
      tokens: length of the longest text, new tokens included.
      depth: the longest path of the tree, in edges.
      chunk: tokens of a prefill step that can begin at any token; 0: prefill begins at the first.
    """
    return round_up(tokens + max(chunk, 2 * depth + 1), CAPACITY_MULTIPLE)


def place(
    request: Request,
    micro_batches: int | None = None,
    put: Callable = global_arrays.put,
) -> Request:
    """Returns a validated request with models and arrays on the devices.

    Weights that were not loaded are loaded. A drafter then derives its arrays from the target's,
    which may take much memory.

    Args:
      request: from `validated_request`; without a mesh, its models already are on their device.
      micro_batches: number of micro-batches on a mesh with stages; None chooses the fastest.
      put: (array, sharding) -> the array with that sharding.
    """
    mesh = request.settings.mesh
    target, drafter = loading.with_weights(request.target, mesh), request.drafter
    if drafter is not None:
        drafter = loading.with_weights(drafter, mesh, stages=None if mesh is None else 1)
        drafter = drafter.for_target(target)
    request = dataclasses.replace(request, target=target, drafter=drafter)
    if mesh is None:
        return dataclasses.replace(request, rows=jax.tree.map(jnp.asarray, request.rows))
    if micro_batches is None:
        micro_batches = _micro_batches(request, mesh)
    spec = placement.EVERYWHERE if request.settings.replicated_rows else placement.ROWS
    row_sharding = NamedSharding(mesh, spec)
    return dataclasses.replace(
        request,
        target=placement.shard_target(target, mesh, micro_batches, put),
        drafter=placement.shard_drafter(drafter, mesh, put),
        rows=jax.tree.map(lambda x: put(x, row_sharding), request.rows),
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
