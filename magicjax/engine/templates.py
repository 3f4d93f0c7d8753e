"""The fixed shapes of an engine: validated once, before any request arrives."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from magicjax import placement
from magicjax.decoding import memory, runner
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request, capacity_of, make_options, place, validate
from magicjax.decoding.validation import (
    RequestOptions,
    check_count,
    check_detokenization,
    check_target,
    checked_sampling,
)
from magicjax.engine import memory_check
from magicjax.engine.handle import Submitted
from magicjax.grammars.arena import CLASSES, Arena, row_of
from magicjax.grammars.compiler import TokenAutomaton
from magicjax.grammars.masking import GrammarRows
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.verification.sampling import Sampling
from sharding import DATA, STAGE, factored, processes

CHUNK = 64  # tokens of the prefill steps that end a prompt: few are padding
PREFILL_CHUNK = 512
MAX_SLOTS = 2**16
MAX_CAPACITY = 4096  # default limit: a model's own one can need more memory than the device has


@dataclasses.dataclass(frozen=True)
class Templates:
    """The requests whose shapes and settings all programs of an engine share.

    Attributes:
      row: of one row, which is prefilled.
      slots: of all rows, which are decoded.
      capacity: the most tokens of a row, prompt and new ones.
      prefill_chunk: the most prompt tokens that a step prefills.
      rounds_per_step: the most rounds of a call of the loop.

    In an engine with grammars, `row.transitions` and `slots.transitions` are the loaded ones.
    """

    row: Request
    slots: Request
    capacity: int
    prefill_chunk: int
    rounds_per_step: int

    @property
    def num_slots(self) -> int:
        return self.slots.tokens.shape[0]

    @property
    def sampled(self) -> bool:
        return self.row.sampling is not None

    @property
    def window(self) -> int:
        """The newest prompt tokens whose queries the drafter's policy reads."""
        return self.row.prefill_settings.stats_spec.window

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the drafter's policy reads the attention of all prompt tokens."""
        return self.row.prefill_settings.stats_spec.total

    @functools.cached_property
    def kv_bytes(self) -> int:
        """The bytes of the keys and values of all slots, target and drafter."""
        return sum(self.slots.kv_bytes)

    @functools.cached_property
    def row_shapes(self) -> tuple[KVCache, Any]:
        """The shapes of the target's cache and the drafter's state of one row."""
        shapes = runner.state_shapes(self.row)
        return shapes.cache, shapes.drafter


def make_templates(
    target: Model,
    slots: int,
    capacity: int | None,
    max_new_tokens: int,
    prefill_chunk: int | None,
    rounds_per_step: int,
    prefix_bytes: int | None,
    options: dict[str, Any],
    grammar_states: int | None = None,
) -> Templates:
    """Returns the templates; `options` are those of `magicjax.generate`.

    Raises:
      ValueError, TypeError: as `magicjax.Engine`.
    """
    check_target(target)
    prefill_chunk = PREFILL_CHUNK if prefill_chunk is None else prefill_chunk
    positions = target.config.max_positions
    capacity = min(positions, MAX_CAPACITY) if capacity is None else capacity
    counts = dict(slots=slots, prefill_chunk=prefill_chunk, capacity=capacity)
    counts |= dict(max_new_tokens=max_new_tokens, rounds_per_step=rounds_per_step)
    for name, value in counts.items():
        check_count(name, value)
    if slots > MAX_SLOTS:
        raise ValueError(f"slots={slots}: it must be at most {MAX_SLOTS}")
    if not 2 <= capacity <= positions:
        raise ValueError(
            f"capacity={capacity}: a slot must hold at least 2 tokens, and at most the {positions} "
            "positions of the target"
        )
    mesh = options.get("mesh")
    groups = _groups(mesh, slots)
    check_detokenization(target)
    max_new_tokens = min(max_new_tokens, capacity - 1)
    longest = np.zeros(capacity - max(1, max_new_tokens), np.int32)
    request_options = make_options(target, max_new_tokens=max_new_tokens, **options)
    row = validate(target, [longest] * groups, request_options)
    chunk = min(CHUNK, prefill_chunk)
    slot_capacity = capacity_of(capacity, row.settings.shape.depth, chunk)
    settings = dataclasses.replace(row.settings, capacity=slot_capacity, chunk=chunk)
    row = dataclasses.replace(
        row,
        settings=dataclasses.replace(settings, replicated_rows=True),
        prompts=[longest],
        tokens=np.zeros((1, slot_capacity), np.int32),
        lengths=row.lengths[:1],
        limits=row.limits[:1],
        sampling=any_sampling(request_options, 1),
        **_any_grammar(row, grammar_states),
    )
    with memory.explained(row):  # the drafter may make a copy of the target
        row = place(row, mesh, 1)
    memory_check.check(row, slots, capacity, prefix_bytes)  # before arrays of all slots are made
    divided = row.lengths.sharding
    if mesh is not None:
        divided = NamedSharding(factored(mesh), placement.ROWS)

    def repeated(x: jax.Array) -> jax.Array:
        return processes.put(jnp.broadcast_to(x, (slots, *x.shape[1:])), divided)

    all_rows = dataclasses.replace(
        row,
        settings=settings,
        prompts=row.prompts * slots,
        tokens=repeated(row.tokens),
        lengths=repeated(row.lengths),
        limits=repeated(row.limits),
        sampling=jax.tree.map(repeated, row.sampling),
        grammar=jax.tree.map(repeated, row.grammar),
    )
    templates = Templates(row, all_rows, capacity, prefill_chunk, rounds_per_step)
    _check_insertable(templates)
    return templates


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


def _check_insertable(templates: Templates) -> None:
    """Raises ValueError if the drafter's state cannot be inserted row by row."""
    drafter = templates.row.drafter
    if drafter is None:
        return
    state, row = (runner.state_shapes(x).drafter for x in (templates.slots, templates.row))
    state, row = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x) for x in (state, row)
    )
    inserted = jax.eval_shape(drafter.insert, state, row, jax.ShapeDtypeStruct((), jnp.int32))
    if jax.tree.map(lambda x: x.shape, inserted) != jax.tree.map(lambda x: x.shape, state):
        raise ValueError(
            f"{type(drafter).__name__}.insert returns a state of other shapes than it was given: "
            "it must replace one row"
        )


def any_sampling(options: RequestOptions, rows: int) -> Sampling | None:
    """Returns the parameters of rows that may use top_k and top_p, whatever the rows use."""
    sampling = checked_sampling(options, rows)
    if sampling is None:
        return None
    return dataclasses.replace(sampling, top_k_used=True, top_p_used=True)


def _any_grammar(row: Request, states: int | None) -> dict[str, Any]:
    """Returns the fields of a row without a grammar, in an engine with `grammar_states`."""
    if states is None:
        return {}
    check_count("grammar_states", states)
    arena = Arena(states * CLASSES)
    grammar = row_of(None, row.target.config.vocab_size, arena)
    return dict(grammar=grammar, transitions=arena.table)


def with_grammar(
    templates: Templates, arena: Arena, automaton: TokenAutomaton | None
) -> tuple[Templates, GrammarRows | None]:
    """Returns (the templates with a grammar among the loaded ones, one row that begins with it).

    The row is None in an engine without grammars, and if the arena has no room now.
    """
    transitions = templates.row.transitions
    if transitions is None:
        return templates, None
    before = arena.table
    grammar = row_of(automaton, templates.row.target.config.vocab_size, arena)
    if arena.table is before:
        return templates, grammar
    placed = processes.put(arena.table, transitions.sharding)
    row, slots = (
        dataclasses.replace(x, transitions=placed) for x in (templates.row, templates.slots)
    )
    return dataclasses.replace(templates, row=row, slots=slots), grammar


def request_of(templates: Templates, submitted: Submitted, grammar: GrammarRows | None) -> Request:
    """Returns the one-row request of a submitted one, in the shapes of all prompts."""
    row, prompt = templates.row, submitted.prompt
    tokens = np.zeros(row.tokens.shape, np.int32)
    tokens[0, : len(prompt)] = prompt
    limit, sampling = _one_row(submitted.limit), submitted.sampling
    of_row = tokens, _one_row(len(prompt)), limit, sampling, grammar
    tokens, lengths, limits, placed, grammar = processes.put(of_row, row.lengths.sharding)
    return dataclasses.replace(
        row,
        prompts=[prompt],
        tokens=tokens,
        lengths=lengths,
        limits=limits,
        sampling=placed,
        grammar=grammar,
    )


def put_row(request: Request, *values: int) -> list[jax.Array]:
    """Returns int32 [1] arrays with the sharding of a request's row, in one transfer."""
    return processes.put([_one_row(value) for value in values], request.lengths.sharding)


def _one_row(value: int) -> Int[np.ndarray, "1"]:
    return np.array([value], np.int32)


def empty_state(templates: Templates) -> DecodeState:
    """Returns the state of slots that are all free; allocates the caches."""
    slots = templates.slots
    separate: Any = dict(sampling=None, ended=None, eos=None)
    shapes = dataclasses.replace(runner.state_shapes(slots), **separate)
    # Copies, because programs donate the state.
    sampling, eos = jax.tree.map(jnp.copy, (slots.sampling, slots.eos))
    ended = processes.put(np.ones(templates.num_slots, bool), slots.lengths.sharding)
    state = dataclasses.replace(_zeros(shapes), sampling=sampling, ended=ended, eos=eos)
    return runner.with_rounds(state, templates.rounds_per_step)


def empty_row(templates: Templates) -> tuple[KVCache, Any]:
    """Returns the target's cache and the drafter's state of one row, zeros."""
    return _zeros(templates.row_shapes)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
