"""Times of steps and rounds: each part takes the longer of its bytes and its FLOPs, and parts add.

speed-up = tokens of a round x T_target / (depth x T_draft + T_verify(N) + what a round adds)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from magicjax.cost_model.device import Device, Machine
from magicjax.cost_model.measured import DRAFT, PASS, Steps
from magicjax.cost_model.work import BLOCKS, HOST, Part, Sizes, divides, memory_bytes, pass_parts

REST = "selection, commit, host"  # what a round adds


@dataclasses.dataclass(frozen=True)
class Draft:
    """What drafts: a model on a cache, or nothing that costs time.

    Attributes:
      sizes: of the model; None: a look-up.
      budget: slots of its cache for each layer and KV head; None: all of the context.
      bits: of an entry's elements, 8 or 4; None: the model's own dtype.
    """

    sizes: Sizes | None
    budget: int | None = None
    bits: int | None = None

    def slots(self, context: int) -> int:
        """Returns the slots that a draft step reads."""
        return context if self.budget is None else min(self.budget, context)

    def machine(self, machine: Machine) -> Machine:
        """Returns what it runs on: the target's devices, or as many as its KV heads allow."""
        assert self.sizes is not None, "a look-up runs nowhere"
        if divides(self.sizes, machine):
            return machine
        return dataclasses.replace(machine, model=math.gcd(self.sizes.num_kv_heads, machine.model))

    def memory(self, machine: Machine, batch: int, context: int, shared: bool) -> float:
        """Returns the bytes it takes on one device beside its target.

        Args:
          machine: the target's.
          batch, context: B, and the tokens of a row.
          shared: its weights are the target's, and without a budget its cache too.
        """
        if self.sizes is None or (shared and self.budget is None):
            return 0.0
        own = dataclasses.replace(self.sizes, attention=0, mlp=0, unembedding=0, small=0, tables=0)
        sizes = own if shared else self.sizes
        slots = context if self.budget is None else self.budget
        per_slot = self.sizes.draft_kv_bytes(self.bits)
        return memory_bytes(sizes, self.machine(machine), batch, slots, per_slot)


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds of a round of speculation, and of the plain step beside it.

    Attributes:
      target: T_target, a step of plain decoding.
      draft: T_draft, one level of a draft.
      verify: T_verify(N).
      depth: levels drafted in a round.
      rest: what a round adds.
      parts: seconds by "draft", "verify" and "round", and their parts: ("draft", "MLP").
    """

    target: float
    draft: float
    verify: float
    depth: int
    rest: float
    parts: Mapping[tuple[str, str], float]

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return self.depth * self.draft + self.verify + self.rest

    def speed_up(self, tokens: float) -> float:
        """Returns the speed-up if a round emits so many tokens."""
        return tokens * self.target / self.total

    def scaled(self, target: float, round_: float) -> "RoundCost":
        """Returns the cost with the time of a plain step, and that of a round, so much longer."""
        return RoundCost(
            target=target * self.target,
            draft=round_ * self.draft,
            verify=round_ * self.verify,
            depth=self.depth,
            rest=round_ * self.rest,
            parts={name: round_ * seconds for name, seconds in self.parts.items()},
        )


def seconds(parts: Mapping[str, Part], device: Device) -> dict[str, float]:
    """Returns the seconds of each part.

    A layer is fetched from the host while the one before it computes, where the device can do both.
    So the link counts with the first layer, and with what every other one takes longer than a layer
    to compute.
    """
    found = {
        name: max(part.bytes / device.reached_bandwidth, part.flops / device.reached_matrix_rate)
        + part.messages * device.collective_seconds
        + part.sent / device.reached_link
        + part.layers * device.layer_seconds
        for name, part in parts.items()
    }
    if HOST in parts:
        layers = sum(part.layers for part in parts.values())
        fetching = parts[HOST].fetched / device.reached_host_link / layers
        computing = sum(found[name] for name in BLOCKS) / layers if device.fetches_beside else 0.0
        found[HOST] = fetching + (layers - 1) * max(0.0, fetching - computing)
    return found


def plain_step(sizes: Sizes, machine: Machine, batch: int, context: int) -> dict[str, float]:
    """Returns the seconds of each part of a step of plain decoding; T_target is their sum."""
    return _target_pass(sizes, machine, batch, context, 1)


def draft_step(
    draft: Draft, machine: Machine, batch: int, context: int, width: int = 1
) -> dict[str, float]:
    """Returns the seconds of each part of drafting one level; T_draft is their sum.

    Args:
      draft: who drafts; a look-up takes no time.
      machine: the target's; a small model whose KV heads it does not divide runs on fewer of a
        group's devices, each time on the same rows.
      width: nodes of the level that have children.
    """
    if draft.sizes is None:
        return {}
    sizes, per_slot = draft.sizes, draft.sizes.draft_kv_bytes(draft.bits)
    own, slots = draft.machine(machine), draft.slots(context)

    def foretold(batch: int, slots: float, width: int) -> dict[str, float]:
        return seconds(pass_parts(sizes, own, batch, width, slots), machine.device)

    # Times are of caches in the model's own dtype.
    steps = machine.device.steps(sizes.key, DRAFT)
    ratio = _ratio(steps, foretold, own.rows(batch), slots, width, own)
    parts = seconds(pass_parts(sizes, own, batch, width, slots, per_slot), machine.device)
    return {name: ratio * time for name, time in parts.items()}


def _target_pass(
    sizes: Sizes, machine: Machine, batch: int, context: int, nodes: int
) -> dict[str, float]:
    """Returns the seconds of each part, and of more than one node of what a round adds.

    Where a profile has timed passes of this model, all are scaled to what was measured.
    """
    rest = {REST: machine.device.round_seconds}

    def foretold(batch: int, slots: float, nodes: int) -> dict[str, float]:
        parts = seconds(pass_parts(sizes, machine, batch, nodes, slots), machine.device)
        return parts | (rest if nodes > 1 else {})

    steps = machine.device.steps(sizes.key, PASS)
    ratio = _ratio(steps, foretold, machine.rows(batch), context, nodes, machine)
    return {name: ratio * time for name, time in foretold(batch, context, nodes).items()}


def _ratio(
    steps: Steps | None,
    foretold: Callable[[int, float, int], dict[str, float]],
    rows: int,
    slots: float,
    nodes: int,
    machine: Machine,
) -> float:
    """Returns by how much parts are scaled: by what was timed of the rows of one device."""
    if steps is None:
        return 1.0
    return steps.ratio(
        lambda *place: sum(foretold(place[0] * machine.data, *place[1:]).values()),
        rows,
        max(slots, 1),
        nodes,
    )


def sources(
    target: Sizes, draft: Draft, machine: Machine, batch: int, context: int, nodes: int, width: int
) -> dict[str, str]:
    """Returns where T_target, T_verify and T_draft come from; the arguments are `round_cost`'s.

    "timed", "between those timed" or "beyond those timed" of a profile that has timed the model,
    "constants" of the device otherwise; a look-up has no T_draft.
    """

    def source(sizes: Sizes, kind: str, on: Machine, slots: int, nodes: int) -> str:
        steps = machine.device.steps(sizes.key, kind)
        if steps is None:
            return "constants"
        known = steps.knows(on.rows(batch), slots, nodes)
        return known if known == "timed" else f"{known} those timed"

    found = {
        "T_target": source(target, PASS, machine, context, 1),
        "T_verify": source(target, PASS, machine, context, nodes),
    }
    if draft.sizes is not None:
        own = draft.machine(machine)
        found["T_draft"] = source(draft.sizes, DRAFT, own, draft.slots(context), width)
    return found


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
    """Returns what a round costs.

    Args:
      target: the model whose output is kept.
      draft: who proposes.
      machine: what both run on.
      batch, context: B, and the tokens of a row's cache.
      nodes: N, the root included.
      depth: levels drafted; a chain of gamma tokens has gamma.
      width: nodes that a level of the draft runs, the most of any level; 1 of a chain.

    Raises:
      ValueError: fewer than one row, node or level, or heads that the devices do not divide.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} leaves nothing to draft: give at least 1")
    plain = plain_step(target, machine, batch, context)
    drafted = draft_step(draft, machine, batch, context, width)
    verified = _target_pass(target, machine, batch, context, nodes)
    rest = verified.pop(REST, 0.0)
    parts = {("draft", name): depth * time for name, time in drafted.items()}
    parts |= {("verify", name): time for name, time in verified.items()}
    return RoundCost(
        target=sum(plain.values()),
        draft=sum(drafted.values()),
        verify=sum(verified.values()),
        depth=depth,
        rest=rest,
        parts=parts | {("round", REST): rest},
    )
