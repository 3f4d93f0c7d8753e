"""Times of steps and rounds: a part takes the maximum of its memory and compute times; parts add.

speedup = tokens per round x T_target / (depth x T_draft + T_verify(N) + overhead of a round)
"""

import dataclasses
import math
from collections.abc import Mapping

from magicjax.prediction.cost_model.device import Device, Machine
from magicjax.prediction.cost_model.measured import DRAFT, PASS
from magicjax.prediction.cost_model.work import (
    BLOCKS,
    HOST,
    Sizes,
    Work,
    divides,
    kv_shards,
    pass_parts,
)

REST = "selection, commit, host"  # overhead of a round
CHOICE = "choice of pages"  # of a draft that reads pages of the target's cache
GATHERED = 3  # times that the bytes of a gathered page are moved: read, written, and read


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft model on a cache, or prompt lookup.

    Attributes:
      sizes: the model's sizes; None for prompt lookup, which takes no time.
      budget: slots of its cache per layer and KV head; None for the whole context.
      bits: per element of the cache, 8 or 4; None for the model's dtype.
      page_size: slots of a page, if it reads `budget` slots of the target's cache, gathered by
        page; None for a cache of its own.
      every: rounds between two choices of the pages.
    """

    sizes: Sizes | None
    budget: int | None = None
    bits: int | None = None
    page_size: int | None = None
    every: int = 1

    def slots(self, context: int) -> int:
        """Returns the number of slots that a draft step reads, of pages whole ones."""
        if self.budget is None:
            return context
        if self.page_size is None:
            return min(self.budget, context)
        pages = min(self.budget // self.page_size, -(-context // self.page_size))
        return pages * self.page_size

    @property
    def slot_bytes(self) -> float:
        """The bytes that a draft step moves for each slot of a row."""
        assert self.sizes is not None, "prompt lookup runs no model"
        copies = GATHERED if self.page_size is not None else 1
        uses_full_cache = self.budget is None or self.page_size is not None
        size = self.sizes.kv_bytes if uses_full_cache else self.sizes.slot_bytes(self.bits)
        return copies * size

    def machine(self, machine: Machine) -> Machine:
        """Returns the target's devices, or as many of them as the draft's KV heads allow."""
        assert self.sizes is not None, "prompt lookup runs no model"
        if divides(self.sizes, machine.model):
            return machine
        return dataclasses.replace(machine, model=math.gcd(self.sizes.num_kv_heads, machine.model))


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds of a round of speculation, and of a step of plain decoding.

    Attributes:
      target: T_target, a step of plain decoding.
      draft: T_draft, one level of a draft.
      verify: T_verify(N).
      depth: drafted levels per round.
      rest: overhead of a round, and the choice of pages.
      parts: seconds by ("draft" or "verify" or "round", part), such as ("draft", "MLP").
    """

    target: float
    draft: float
    verify: float
    depth: int
    rest: float
    parts: Mapping[tuple[str, str], float]

    @property
    def total(self) -> float:
        """Seconds of a round."""
        return self.depth * self.draft + self.verify + self.rest

    def speedup(self, tokens: float) -> float:
        """Returns the speedup if a round emits this many tokens."""
        return tokens * self.target / self.total


def seconds(parts: Mapping[str, Work], device: Device) -> dict[str, float]:
    """Returns the seconds of each part.

    Copies of a layer from the host overlap with the computation of the previous layer, if the
    device can do both. The link then adds the copy of the first layer, and for every other layer
    the time by which its copy takes longer than the computation.
    """
    times = {
        name: max(work.bytes / device.reached_bandwidth, work.flops / device.reached_matrix_rate)
        + work.messages * device.collective_seconds
        + work.sent / device.reached_link
        + work.layers * device.layer_seconds
        for name, work in parts.items()
    }
    if HOST in parts:
        layers = sum(work.layers for work in parts.values())
        fetch_s = parts[HOST].fetched / device.reached_host_link / layers
        compute_s = sum(times[name] for name in BLOCKS) / layers if device.overlaps_fetch else 0.0
        times[HOST] = fetch_s + (layers - 1) * max(0.0, fetch_s - compute_s)
    return times


def plain_step(sizes: Sizes, machine: Machine, batch: int, context: int) -> dict[str, float]:
    """Returns the seconds of each part of a step of plain decoding, in total T_target."""
    return _step(PASS, sizes, machine, batch, context, 1)


def draft_step(
    draft: Draft, machine: Machine, batch: int, context: int, width: int = 1
) -> dict[str, float]:
    """Returns the seconds of each part of drafting one level, in total T_draft.

    Args:
      draft: prompt lookup takes no time.
      machine: what runs the target. A draft model whose KV heads do not divide over it runs on
        fewer devices of a group, replicated over the others.
      width: nodes of the level that have children.
    """
    if draft.sizes is None:
        return {}
    shape = batch, draft.slots(context), width
    timed_bytes = dataclasses.replace(draft, bits=None).slot_bytes
    return _step(DRAFT, draft.sizes, draft.machine(machine), *shape, draft.slot_bytes, timed_bytes)


def choice_seconds(draft: Draft, machine: Machine, batch: int, context: int) -> float:
    """Returns the seconds of choosing pages, for each round; 0 for other drafts.

    The root's queries are multiplied with the two bounds of every page.
    """
    if draft.page_size is None or draft.sizes is None or context <= draft.slots(context):
        return 0.0
    sizes, rows = draft.sizes, machine.rows(batch)
    pages = rows * context / draft.page_size
    work = Work(
        bytes=pages * sizes.slot_bytes(None) / kv_shards(sizes, machine),
        flops=4 * pages * sizes.num_layers * sizes.num_heads * sizes.head_dim / machine.model,
    )
    return seconds({CHOICE: work}, machine.device)[CHOICE] / draft.every


def _step(
    kind: str,
    sizes: Sizes,
    machine: Machine,
    batch: int,
    slots: float,
    nodes: int,
    slot_bytes: float | None = None,
    timed_bytes: float | None = None,
) -> dict[str, float]:
    """Returns the seconds of each part, for several nodes of the target with a round's overhead.

    If a profile has timed steps of this model, all parts are scaled to the measured total.
    """

    def predicted(
        batch: int, slots: float, nodes: int, slot_bytes: float | None = None
    ) -> dict[str, float]:
        work = pass_parts(sizes, machine, batch, nodes, slots, slot_bytes)
        rest = {REST: machine.device.round_seconds} if kind == PASS and nodes > 1 else {}
        return seconds(work, machine.device) | rest

    def total(rows: int, slots: float, nodes: int) -> float:
        # Steps are timed on one device; those of drafts on caches that are not quantized.
        return sum(predicted(rows * machine.data, slots, nodes, timed_bytes).values())

    parts, steps = predicted(batch, slots, nodes, slot_bytes), machine.device.steps(sizes.key, kind)
    if steps is None:
        return parts

    ratio = steps.ratio(total, machine.rows(batch), max(slots, 1), nodes)
    return {name: ratio * time for name, time in parts.items()}


def sources(
    target: Sizes, draft: Draft, machine: Machine, batch: int, context: int, nodes: int, width: int
) -> dict[str, str]:
    """Returns the sources of T_target, T_verify and T_draft, given `round_cost`'s arguments.

    A source is "measured", "interpolated" or "extrapolated" if the profile of the device has timed
    the model, else "roofline". T_draft of a draft on pages, which no profile times, is extrapolated
    from those of other drafts. Prompt lookup has no T_draft.
    """

    def source(sizes: Sizes, kind: str, machine: Machine, slots: int, nodes: int) -> str:
        steps = machine.device.steps(sizes.key, kind)
        return "roofline" if steps is None else steps.coverage(machine.rows(batch), slots, nodes)

    times = {
        "T_target": source(target, PASS, machine, context, 1),
        "T_verify": source(target, PASS, machine, context, nodes),
    }
    if draft.sizes is not None:
        local, slots = draft.machine(machine), draft.slots(context)
        draft_source = source(draft.sizes, DRAFT, local, slots, width)
        is_timed = draft_source == "roofline" or draft.page_size is None
        times["T_draft"] = draft_source if is_timed else "extrapolated"
    return times


def round_cost(
    target: Sizes,
    draft: Draft,
    machine: Machine,
    batch: int,
    context: int,
    nodes: int,
    depth: int,
    width: int = 1,
) -> RoundCost:
    """Returns the cost of a round.

    Args:
      target: the model whose output is kept.
      draft: proposes the tokens.
      machine: runs both.
      batch, context: B, and the tokens of a row's cache.
      nodes: N, including the root.
      depth: drafted levels, gamma for a chain.
      width: the largest number of nodes with children in a level, 1 for a chain.

    Raises:
      ValueError: fewer than one row, node or level, or heads that do not divide over the devices.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1")
    plain = plain_step(target, machine, batch, context)
    drafted = draft_step(draft, machine, batch, context, width)
    verified = _step(PASS, target, machine, batch, context, nodes)
    rest = verified.pop(REST, 0.0)
    choice = choice_seconds(draft, machine, batch, context)
    chosen = {("round", CHOICE): choice} if choice else {}
    parts = {("draft", name): depth * time for name, time in drafted.items()}
    parts |= {("verify", name): time for name, time in verified.items()}
    return RoundCost(
        target=sum(plain.values()),
        draft=sum(drafted.values()),
        verify=sum(verified.values()),
        depth=depth,
        rest=rest + choice,
        parts=parts | {("round", REST): rest} | chosen,
    )
