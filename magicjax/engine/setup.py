"""What an engine fixes before requests arrive: its configuration, settings and shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from magicjax import placement
from magicjax.decoding import memory
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.preparation import (
    capacity_of,
    drafter_and_tree,
    place,
    validated_request,
)
from magicjax.decoding.request import Request, RequestOptions
from magicjax.decoding.rows import Features, Rows, rows_of
from magicjax.decoding.text import Text
from magicjax.decoding.validation import check_detokenization, check_target
from magicjax.drafters import Drafter
from magicjax.engine import memory_check
from magicjax.engine.config import MAX_STOP_TOKENS, EngineConfig
from magicjax.engine.scheduler import PrefillRule
from magicjax.grammars.matcher import Matcher, first_masks
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.trees.token_tree import Tree
from magicjax.verification import logits_processor
from sharding import DATA, STAGE, factored, global_arrays

CHUNK = 64  # tokens of the prefill steps that end a prompt: few are padding
BOUNDED_CHUNK = 16  # the same if pauses are bounded, which a step of 64 may exceed


@dataclasses.dataclass(frozen=True)
class EngineSetup:
    """The models, settings and array shapes that all programs of an engine share.

    Attributes:
      config: the result of `EngineConfig.for_target`, with the ids of EOS.
      row: the request of one row, for the programs that prefill.
      slots: the request of all slots, for the programs that decode.
      row_shapes: shapes of the target's cache and of the drafter's state, for one row.
    """

    config: EngineConfig
    row: Request
    slots: Request
    row_shapes: tuple[KVCache, Any]

    @property
    def capacity(self) -> int:
        """The most tokens of a row, prompt and new ones."""
        assert self.config.capacity is not None
        return self.config.capacity

    @property
    def width(self) -> int:
        """T, to which prompts are padded: the slots of a row."""
        return self.row.settings.capacity

    @property
    def prefill_rule(self) -> PrefillRule:
        """How prompts are divided into pieces."""
        chunk, stats_spec = self.row.settings.chunk, self.row.prefill_settings.stats_spec
        largest = self.config.prefill_chunk
        overlap = int(bool(stats_spec.layer_inputs))
        stores_prefixes = memory_check.num_prefixes(self.row, self.config) > 0
        keeps_states = stores_prefixes and any(self.row.target.recurrent)
        recomputed = stats_spec.window, stats_spec.total, overlap
        return PrefillRule(chunk, largest, *recomputed, keeps_states)

    @functools.cached_property
    def kv_bytes(self) -> int:
        """The bytes of the keys and values of all slots, target and drafter."""
        return sum(self.slots.kv_bytes)


def validated_row(
    target: Model,
    drafter: Drafter | str | None,
    tree: Tree | str | None,
    config: EngineConfig,
    mesh: Mesh | None = None,
) -> tuple[EngineConfig, Request]:
    """Returns the configuration that is used, and the request of one row on the host.

    Nothing is compiled or moved to the devices.

    Raises:
      ValueError, TypeError: as `magicjax.Engine`, except for what needs the models' weights.
    """
    check_target(target)
    drafter, tree = drafter_and_tree(target, drafter, tree)
    config = config.for_target(target, drafter)
    assert config.capacity is not None
    if config.max_stall_ms is not None and isinstance(mesh, Mesh) and mesh.is_multi_process:
        raise ValueError(
            f"max_stall_ms={config.max_stall_ms} on a mesh of {jax.process_count()} processes, "
            "whose times differ: omit max_stall_ms"
        )
    groups = _groups(mesh, config.slots)
    check_detokenization(target)
    longest_prompt = np.zeros(config.capacity - config.max_tokens, np.int32)
    params = SamplingParams(
        temperature=float(config.sampling), max_tokens=config.max_tokens, logprobs=config.logprobs
    )
    options = RequestOptions(
        drafter=drafter,
        tree=tree,
        verifier=config.verifier,
        eos_token_id=config.eos_token_id,
        backend=config.backend,
        mesh=mesh,
    )
    row = validated_request(target, [longest_prompt] * groups, params, options)
    is_bounded = config.max_stall_ms is not None
    chunk = min(BOUNDED_CHUNK if is_bounded else CHUNK, config.prefill_chunk)
    capacity = capacity_of(config.capacity, row.settings.shape.depth, chunk)
    row = dataclasses.replace(
        row,
        settings=dataclasses.replace(
            row.settings, capacity=capacity, chunk=chunk, replicated_rows=True
        ),
        prompts=[longest_prompt],
        params=row.params[:1],
        rows=_rows(target, config, row.eos, longest_prompt[:0], SamplingParams(), capacity),
    )
    config.check_drafter(row.drafter, row.settings.verifier)
    memory_check.check_prefixes(row, config)
    verifier = row.settings.verifier
    return dataclasses.replace(config, eos_token_id=row.eos, verifier=verifier), row


def make_setup(
    target: Model,
    drafter: Drafter | str | None,
    tree: Tree | str | None,
    config: EngineConfig,
    mesh: Mesh | None = None,
) -> EngineSetup:
    """Returns the setup, with models and arrays on the devices.

    Raises:
      ValueError, TypeError: as `magicjax.Engine`.
    """
    config, row = validated_row(target, drafter, tree, config, mesh)
    if target.params is None:
        memory_check.check(row, config)  # before weights are loaded
    with memory.explained(row):  # the drafter may make a copy of the target
        row = place(row, 1)
    memory_check.check(row, config)  # before arrays of all slots are made
    slot_sharding = row.rows.limits.sharding
    if mesh is not None:
        slot_sharding = NamedSharding(factored(mesh), placement.ROWS)

    def repeated(x: jax.Array) -> jax.Array:
        return global_arrays.put(jnp.broadcast_to(x, (config.slots, *x.shape[1:])), slot_sharding)

    all_rows = dataclasses.replace(
        row,
        settings=dataclasses.replace(row.settings, replicated_rows=False),
        prompts=row.prompts * config.slots,
        params=row.params * config.slots,
        rows=jax.tree.map(repeated, row.rows),
    )
    shapes = Decoder(row).state_shapes()
    setup = EngineSetup(config, row, all_rows, (shapes.cache, shapes.drafter))
    _check_insertable(setup)
    return setup


def _groups(mesh: Any, slots: int) -> int:
    """Returns the number of groups of devices over which the slots are divided.

    Raises:
      ValueError: the slots do not divide over the groups, or the mesh divides layers.
    """
    if mesh is None:
        return 1
    groups, stages = (factored(mesh).shape[axis] for axis in (DATA, STAGE))
    if stages > 1:
        raise ValueError(
            f"the mesh has stage={stages}, and an engine cannot divide layers: use a mesh of the "
            "axes data and model"
        )
    if slots % groups:
        raise ValueError(
            f"slots={slots} do not divide over data={groups} groups of devices: use a multiple of "
            f"{groups}, such as {-(-slots // groups) * groups}"
        )
    return groups


def _check_insertable(setup: EngineSetup) -> None:
    """Raises ValueError if the drafter's state cannot be inserted row by row."""
    drafter = setup.row.drafter
    if drafter is None:
        return
    state, row = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        for x in (Decoder(setup.slots).state_shapes().drafter, setup.row_shapes[1])
    )
    inserted = jax.eval_shape(drafter.insert, state, row, jax.ShapeDtypeStruct((), jnp.int32))
    if jax.tree.map(lambda x: x.shape, inserted) != jax.tree.map(lambda x: x.shape, state):
        raise ValueError(
            f"{type(drafter).__name__}.insert returns a state of other shapes than it was given: "
            "it must replace one row"
        )


def _rows(
    target: Model,
    config: EngineConfig,
    eos: tuple[int, ...],
    prompt: Int[np.ndarray, "T"],
    params: SamplingParams,
    width: int,
    max_tokens: int = 1,
    matcher: Matcher | None = None,
) -> Rows:
    """Returns one row with arrays for all that a request of the engine may use."""
    sequences = logits_processor.MAX_SEQUENCES, logits_processor.MAX_SEQUENCE
    features = Features(
        sampling=config.sampling,
        warping=True,
        sequences=sequences if config.logits_processors else None,
        ends=len(eos) + MAX_STOP_TOKENS,
    )
    allowed = first_masks([matcher], target.config.vocab_size) if config.grammars else None
    return rows_of(target, [prompt], [params], [max_tokens], eos, width, allowed, features)


def with_drafter(setup: EngineSetup, drafter: Drafter | None) -> EngineSetup:
    """Returns the setup with another drafter of equal static fields and shapes."""
    requests = setup.row, setup.slots
    row, slots = (dataclasses.replace(request, drafter=drafter) for request in requests)
    return dataclasses.replace(setup, row=row, slots=slots)


def row_request(setup: EngineSetup, text: Text) -> Request:
    """Returns the request of one row for an empty text, in the shapes of all prompts."""
    row, config = setup.row, setup.config
    rows = _rows(
        row.target,
        config,
        row.eos,
        text.prompt,
        text.params,
        setup.width,
        text.limit,
        text.matcher,
    )
    return dataclasses.replace(
        row,
        prompts=[text.prompt],
        params=(text.params,),
        rows=global_arrays.put(rows, row.rows.limits.sharding),
    )


def put_row(request: Request, *values: int) -> list[jax.Array]:
    """Returns int32 [1] arrays with the sharding of a request's row, in one transfer."""
    return global_arrays.put([_one_row(value) for value in values], request.rows.limits.sharding)


def _one_row(value: int) -> Int[np.ndarray, "1"]:
    return np.array([value], np.int32)


def empty_state(setup: EngineSetup) -> DecodeState:
    """Returns the state of slots that are all free; allocates the caches."""
    slots = setup.slots
    omitted: Any = dict(rows=None, ended=None)
    shapes = dataclasses.replace(Decoder(slots).state_shapes(), **omitted)
    ended = global_arrays.put(np.ones(setup.config.slots, bool), slots.rows.limits.sharding)
    rows = jax.tree.map(jnp.copy, slots.rows.without_prompts())  # programs donate the state
    return dataclasses.replace(_zeros(shapes), rows=rows, ended=ended)


def empty_row(setup: EngineSetup) -> tuple[KVCache, Any]:
    """Returns the target's cache and the drafter's state of one row, zeros."""
    return _zeros(setup.row_shapes)


def empty_drafter(setup: EngineSetup) -> Any:
    """Returns the drafter's state of one row without speculation."""
    return _zeros(setup.row_shapes[1])


def empty_layer_inputs(setup: EngineSetup) -> dict[int, jax.Array]:
    """Returns the inputs of the layers that the drafter reads, zeros, of one row."""
    row = setup.row
    shape = 1, setup.width, row.target.config.hidden_size
    return {
        layer: jnp.zeros(shape, row.target.dtype, device=row.rows.limits.sharding)
        for layer in row.prefill_settings.stats_spec.layer_inputs
    }


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
