"""Which request starts when, and in which slot: the order of an engine, on the host.

A request waits in a queue, is prefilled in pieces, runs in a slot, and leaves. The scheduler knows
no model and runs no program: `magicjax.engine.engine` asks it for the next piece of work.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from jaxtyping import Int

AGING_S = 10.0  # waiting for this long raises a request's priority by 1
SNAPSHOTS = 4  # the most states of a text that are kept beside those at its end

Tokens = Int[np.ndarray, "T"]


class QueueFullError(ValueError):
    """As many requests as `queue_limit` wait for a slot."""


class QueuedRequest(Protocol):
    """What the scheduler reads of a request; see `Handle`."""

    @property
    def prompt(self) -> Tokens: ...
    @property
    def priority(self) -> float: ...
    @property
    def submitted_at(self) -> float: ...
    @property
    def deadline_at(self) -> float | None: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a prompt that one call of a program prefills.

    Attributes:
      first, end: positions; the tokens before `first` are cached.
      chunk: tokens of a step of the program.
      is_kept: whether the target's states at `end` are kept for later prompts.
    """

    first: int
    end: int
    chunk: int
    is_kept: bool = False

    @property
    def tokens(self) -> int:
        """The tokens that run, padding included."""
        return -(-(self.end - self.first) // self.chunk) * self.chunk


@dataclasses.dataclass(frozen=True)
class PrefillRule:
    """How prompts are divided into pieces.

    Attributes:
      chunk: tokens of a step of the last piece, few of which are padding.
      largest: the most tokens that are prefilled between two calls of the loop.
      window: the newest tokens of a prompt whose queries the drafter's policy reads. They are all
        in the last piece, which may compute some cached ones again.
      whole: whether the policy reads the attention of all tokens, so that a prompt is one piece.
      overlap: how many of the cached tokens are computed again, because the drafter combines what
        it reads of a token with the token after it.
      keeps_states: whether the target has states, of which some are kept for later prompts.
    """

    chunk: int
    largest: int
    window: int = 0
    whole: bool = False
    overlap: int = 0
    keeps_states: bool = False

    def first(self, cached: int) -> int:
        """Returns where prefill begins, if the first `cached` tokens are in the cache."""
        return 0 if self.whole else max(0, cached - self.overlap)

    def last_state(self, length: int, shared: int) -> int:
        """Returns the most tokens after which a prompt can continue from stored states.

        Args:
          length: of the prompt, whose last tokens run again.
          shared: the first tokens that it shares with the text of the states.
        """
        return min(min(shared, length - 1) - self.overlap, length - self.window)

    def cached_by_states(self, length: int, shared: int, states: Iterable[int]) -> int:
        """Returns how many tokens of a prompt are in the longest states that it can continue from.

        Args:
          length, shared: as for `last_state`.
          states: after how many tokens of a text there are states.
        """
        most = self.last_state(length, shared)
        state = max((tokens for tokens in states if tokens <= most), default=0)
        return state + self.overlap if state else 0

    def kept_states(self, length: int, first: int, shared: int) -> tuple[int, ...]:
        """Returns after how many tokens of a prompt states are kept, fewer than `SNAPSHOTS`.

        They are kept after the last step that leaves a token, for the same prompt; after the pieces
        before, for prompts with another end; and where the prompt leaves another text, as the next
        one may do. Each is a multiple of a step away from `first`, so that no step is added.

        Args:
          length: length of the prompt.
          first: where its prefill begins.
          shared: the first tokens that it shares with a text that is stored, or will be.
        """
        if not self.keeps_states:
            return ()

        def last_boundary(tokens: int) -> int:
            return first + max(0, tokens - first) // self.chunk * self.chunk

        last, fork = (last_boundary(self.last_state(length, n)) for n in (length, shared))
        newest = sorted({*range(first, last, self.largest), last} - {first, fork})
        num_newest = SNAPSHOTS - 1 - (fork > first)
        return tuple(sorted({*newest[-num_newest:], fork} - {first}))

    def piece(
        self, length: int, first: int, limit: int | None = None, kept: tuple[int, ...] = ()
    ) -> Piece:
        """Returns the piece that begins at `first` < `length`.

        With at most 512 tokens between calls of the loop, a prompt of 1,200 tokens has the pieces
        0 to 512, 512 to 1,024, and 1,024 to 1,200.

        Args:
          length: length of the prompt.
          first: the tokens before are prefilled.
          limit: the most tokens, a multiple of the smallest chunk; None: the largest piece.
          kept: the result of `kept_states`, at which pieces end.
        """
        if self.whole:
            return Piece(0, length, self.chunk)
        end = next((end for end in kept if end > first), length)
        if end < length:  # the window comes after it
            most = self.largest if limit is None else min(limit, self.largest)
            chunk = self.largest if end - first >= self.largest == most else self.chunk
            end = min(end, first + most)
            return Piece(first, end, chunk, end in kept)
        # The last piece has the window, and computes no token again that an earlier piece did: the
        # rings of layers with sliding windows no longer have what these tokens see.
        last = max(0, length - self.window)
        most = self.largest if limit is None else min(limit, self.largest)
        if length - first > most and first < last:
            chunk = self.largest if most == self.largest else self.chunk
            return Piece(first, min(first + most, last), chunk)
        return Piece(min(first, last), length, self.chunk)

    def chunks(self, length: int) -> set[int]:
        """Returns the chunks of the pieces of a prompt, each of which is a program."""
        first, chunks, kept = 0, set[int](), self.kept_states(length, 0, 0)
        while first < length:
            piece = self.piece(length, first, kept=kept)
            first = piece.end
            chunks.add(piece.chunk)
        return chunks


class Scheduler[Handle: QueuedRequest]:
    """The requests of an engine and their order.

    Attributes:
      waiting: requests in the queue.
      prefilling: requests, where the next pieces of their prompts begin, and the result of
        `PrefillRule.kept_states`; the first one is next.
      running: requests by slot.
    """

    def __init__(
        self,
        slots: int,
        *,
        rule: PrefillRule,
        groups: int = 1,
        queue_limit: int = 1024,
        prefill_rows: int = 2,
        fill_first: bool = True,
        min_shared: int | None = None,
    ):
        """Starts without requests.

        Args:
          slots: the most requests that run.
          rule: how prompts are divided into pieces.
          groups: number of groups of devices, which divide the slots.
          queue_limit: the most requests that wait.
          prefill_rows: the most requests that are prefilled at once.
          fill_first: whether the free slots are filled before the loop runs, if nothing runs yet.
          min_shared: prompts that share as many first tokens with a stored prefix start from it;
            None: no prefixes are stored.
        """
        self.waiting: list[Handle] = []
        self.prefilling: collections.deque[tuple[Handle, int, tuple[int, ...]]]
        self.prefilling = collections.deque()
        self.running: dict[int, Handle] = {}
        self._slots, self._groups, self._queue_limit = slots, groups, queue_limit
        self._rule, self._prefill_rows, self._min_shared = rule, prefill_rows, min_shared
        self._fill_first = fill_first
        self._filling = 0  # requests that may still start before the loop runs
        self._prefilled = 0  # tokens in this step
        self._limit: int | None = None  # of a piece in this step

    @property
    def unfinished(self) -> list[Handle]:
        """All requests."""
        return [*self.running.values(), *(handle for handle, *_ in self.prefilling), *self.waiting]

    def check_room(self, new: int) -> None:
        """Raises QueueFullError if the queue has no room for `new` requests."""
        if len(self.waiting) + new > self._queue_limit:
            raise QueueFullError(
                f"the queue has {len(self.waiting)} requests, and with {new} more it exceeds "
                f"queue_limit={self._queue_limit}: run engine.step() until some have started, or "
                "create the engine with a larger limit"
            )

    def add(self, handle: Handle) -> None:
        """Queues a request; `check_room` comes first."""
        self.waiting.append(handle)

    def expired(self, now: float) -> list[Handle]:
        """Returns the requests whose deadlines have passed."""
        return [handle for handle in self.unfinished if _deadline_at(handle) <= now]

    def begin_step(self) -> bool:
        """Begins a step; returns whether the loop runs before prefill.

        With `fill_first` it runs when the free slots are filled, in one or more steps.
        """
        self._prefilled, self._limit = 0, None
        if not self.running:
            self._filling = self._slots
        return not self._filling or (bool(self.running) and not self._fill_first)

    def limit_prefill(self, tokens: int | None) -> None:
        """Sets the most prompt tokens of this step; None: the largest piece."""
        self._limit = tokens

    def next_to_start(self, stored: Callable[[Tokens], int]) -> Handle | None:
        """Returns the request that starts next; None if none can start now.

        A request waits while a prompt is prefilled that will give it more tokens than the stored
        prefixes do, because that prompt will be stored.

        Args:
          stored: the number of first tokens that a prompt has from a stored prefix.
        """
        no_slot = len(self.running) + len(self.prefilling) == self._slots
        if not self.waiting or no_slot or len(self.prefilling) == self._prefill_rows:
            return None
        handle = min(self.waiting, key=due_s)
        prompt = handle.prompt
        if self._min_shared is not None and self.prefilling:
            most = max(
                self._reusable_tokens(prompt, other.prompt, kept)
                for other, _, kept in self.prefilling
            )
            if most >= self._min_shared and most > stored(prompt):
                return None
        return handle

    def _reusable_tokens(self, prompt: Tokens, other: Tokens, kept: tuple[int, ...]) -> int:
        """Returns how many first tokens a prompt has from another one that is prefilled."""
        shared = common_prefix(other, prompt)
        if not self._rule.keeps_states:
            return shared
        return self._rule.cached_by_states(len(prompt), shared, (*kept, len(other)))

    def start(self, handle: Handle, cached: int, shared: int = 0) -> None:
        """Moves a request from the queue to prefill; its first `cached` tokens need none.

        It shares the first `shared` tokens with a stored text; with one in prefill, it may share
        more.
        """
        self.waiting.remove(handle)
        first = self._rule.first(cached)
        if self._rule.keeps_states:
            others = (common_prefix(other.prompt, handle.prompt) for other, *_ in self.prefilling)
            shared = max(shared, *others, 0)
        kept = self._rule.kept_states(len(handle.prompt), first, shared)
        self.prefilling.append((handle, first, kept))

    def next_piece(self) -> tuple[Handle, Piece] | None:
        """Returns what to prefill next; None if this step has prefilled enough, or nothing is left.

        A step prefills at most `largest` tokens, or one piece. Prompts of several pieces alternate.
        """
        if not self.prefilling:  # no slot is free, or no request waits
            self._filling = 0
            return None
        handle, first, kept = self.prefilling[0]
        piece = self._rule.piece(len(handle.prompt), first, self._limit, kept)
        most = self._rule.largest if self._limit is None else self._limit
        if self._prefilled and self._prefilled + piece.tokens > most:
            return None
        self._prefilled += piece.tokens
        self.prefilling[0] = handle, piece.end, kept
        self.prefilling.rotate(-1)
        return handle, piece

    def insert(self, handle: Handle) -> int:
        """Moves a request from prefill to a free slot, and returns the slot.

        The slot is in the group of devices that has the fewest requests.
        """
        self._remove_prefilling(handle)
        per_group = self._slots // self._groups
        requests = collections.Counter(slot // per_group for slot in self.running)
        free = (slot for slot in range(self._slots) if slot not in self.running)
        slot = min(free, key=lambda slot: requests[slot // per_group])
        self.running[slot] = handle
        self._filling = max(0, self._filling - 1)
        return slot

    def remove(self, handle: Handle) -> int | None:
        """Removes a request, wherever it is; returns its slot, None without one."""
        for slot, other in self.running.items():
            if other is handle:
                del self.running[slot]
                return slot
        if not self._remove_prefilling(handle):
            self.waiting.remove(handle)
        return None

    def _remove_prefilling(self, handle: Handle) -> bool:
        remaining = [entry for entry in self.prefilling if entry[0] is not handle]
        removed = len(remaining) < len(self.prefilling)
        self.prefilling = collections.deque(remaining)
        return removed


def _deadline_at(request: QueuedRequest) -> float:
    return math.inf if request.deadline_at is None else request.deadline_at


def due_s(request: QueuedRequest) -> float:
    """Returns when a request is due, on the engine's clock: the earliest one starts first."""
    return request.submitted_at - AGING_S * request.priority


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Returns the number of equal tokens before the first difference."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if differing.size else length
