"""The order of requests without a model: priorities, deadlines, slots, pieces, prefixes."""

import dataclasses

import numpy as np
import pytest

from magicjax.engine.scheduler import (
    AGING_S,
    SNAPSHOTS,
    Piece,
    PrefillRule,
    QueueFullError,
    Scheduler,
)
from magicjax.engine.stall import MARGIN, StallBudget

RULE = PrefillRule(chunk=64, largest=100)


@dataclasses.dataclass(eq=False)
class Asked:
    """A request, as the scheduler sees it."""

    prompt: np.ndarray
    priority: float = 0.0
    submitted_at: float = 0.0
    deadline_at: float | None = None

    @property
    def request(self) -> "Asked":
        return self


def ask(length: int = 5, **when) -> Asked:
    return Asked(np.arange(length), **when)


def make(slots: int = 2, waiting: list[Asked] | None = None, **options) -> Scheduler[Asked]:
    scheduler = Scheduler[Asked](slots, **{"rule": RULE} | options)
    for asked in waiting or []:
        scheduler.check_room(1)
        scheduler.add(asked)
    return scheduler


def start(scheduler: Scheduler[Asked], stored: int = 0) -> list[Asked]:
    """Starts all requests that may start now, and returns them."""
    started = []
    while (asked := scheduler.next_to_start(lambda prompt: stored)) is not None:
        scheduler.start(asked, 0)
        started.append(asked)
    return started


def step(scheduler: Scheduler[Asked]) -> tuple[bool, list[tuple[Asked, Piece]]]:
    """Returns whether the loop runs in a step, and what is prefilled."""
    decodes, work = scheduler.begin_step(), []
    while True:
        start(scheduler)
        if (next_piece := scheduler.next_piece()) is None:
            return decodes, work
        asked, piece = next_piece
        work.append(next_piece)
        if piece.end == len(asked.prompt):
            scheduler.insert(asked)


def order(scheduler: Scheduler[Asked]) -> list[Asked]:
    """Returns the requests in the order in which they finish, each a step after it has started."""
    found = []
    while scheduler.unfinished:
        for asked in list(scheduler.running.values()):
            scheduler.remove(asked)
            found.append(asked)
        step(scheduler)
    return found


def test_requests_start_by_priority_and_waiting_raises_it():
    assert AGING_S == 10.0
    arrivals = ((0.0, 0), (1.0, 0), (2.0, 5), (3.0, 1), (4.0, 0), (30.0, 2))
    asked = [ask(submitted_at=s, priority=priority) for s, priority in arrivals]
    # Each level is worth 10 s: those of priority 0 from the first seconds, then the late one of 2.
    assert order(make(1, asked)) == [asked[n] for n in (2, 3, 0, 1, 4, 5)]


def test_requests_of_equal_priority_start_in_their_order():
    asked = [ask() for _ in range(6)]
    assert order(make(2, asked)) == asked


def test_deadlines_expire_wherever_a_request_is():
    asked = [ask(deadline_at=s) for s in (5.0, 4.0, None, 6.0)]
    scheduler = make(1, asked)
    step(scheduler)
    assert scheduler.running == {0: asked[0]} and scheduler.expired(3.9) == []
    assert scheduler.expired(5.0) == asked[:2]
    assert [scheduler.remove(one) for one in asked[:2]] == [0, None]
    assert scheduler.unfinished == asked[2:]


def test_a_request_can_leave_at_any_time():
    asked = [ask(150), ask(), ask()]
    scheduler = make(2, asked)
    step(scheduler)  # a piece of the first one
    assert [one for one, *_ in scheduler.prefilling] == [asked[1], asked[0]]
    assert scheduler.remove(asked[0]) is None and scheduler.remove(asked[2]) is None
    assert scheduler.unfinished == [asked[1]]
    step(scheduler)
    assert scheduler.remove(asked[1]) == 0 and not scheduler.unfinished


def test_the_queue_is_bounded():
    scheduler = make(1, [ask(), ask()], queue_limit=2)
    with pytest.raises(QueueFullError, match="the queue has 2 requests, .* exceeds queue_limit=2"):
        scheduler.check_room(1)
    step(scheduler)  # one of them starts
    scheduler.check_room(1)


def pieces(
    rule: PrefillRule,
    length: int,
    cached: int,
    limit: int | None = None,
    kept: tuple[int, ...] = (),
) -> list[Piece]:
    found, first = [], rule.first(cached)
    while first < length:
        found.append(rule.piece(length, first, limit, kept))
        first = found[-1].end
    return found


def test_prompts_are_divided_and_end_with_the_window_of_the_policy():
    rule = PrefillRule(chunk=64, largest=100, window=5)
    assert pieces(rule, 40, 0) == [Piece(0, 40, 64)]
    assert pieces(rule, 100, 0) == [Piece(0, 100, 64)]
    # No token is computed twice, which the rings of sliding windows would not allow.
    expected = [Piece(0, 100, 100), Piece(100, 197, 100), Piece(197, 202, 64)]
    assert pieces(rule, 202, 0) == expected
    assert pieces(rule, 202, 120) == [Piece(120, 202, 64)]
    assert pieces(rule, 202, 201) == [Piece(197, 202, 64)]
    assert pieces(rule, 202, 120, 64) == [Piece(120, 184, 64), Piece(184, 202, 64)]
    assert pieces(rule, 202, 0, 640) == expected
    assert pieces(PrefillRule(64, 100, whole=True), 202, 0, 64) == [Piece(0, 202, 64)]
    again = PrefillRule(64, 100, overlap=1)  # once, so that later pieces are whole steps
    assert pieces(again, 302, 150) == [Piece(149, 249, 100), Piece(249, 302, 64)]
    assert Piece(197, 202, 64).tokens == 64 and Piece(0, 100, 64).tokens == 128


def test_a_step_prefills_a_piece_between_calls_of_the_loop_and_a_short_prompt_overtakes():
    first, long, short = asked = [ask(), ask(350), ask()]
    scheduler = make(4, asked[:1])
    assert step(scheduler) == (False, [(first, Piece(0, 5, 64))])
    for one in asked[1:]:
        scheduler.add(one)
    work = [step(scheduler) for _ in range(5)]
    assert all(decodes for decodes, _ in work)
    assert [[(one, piece.first) for one, piece in pieces] for _, pieces in work] == [
        *([(long, 0)], [(short, 0)], [(long, 100)], [(long, 200)], [(long, 300)])
    ]


def test_free_slots_are_filled_before_the_loop_runs():
    asked = [ask(90) for _ in range(5)]
    scheduler = make(3, asked)
    work = [step(scheduler) for _ in range(5)]  # each prompt takes a step
    assert [decodes for decodes, _ in work] == [False, False, False, True, True]
    assert [len(pieces) for _, pieces in work] == [1, 1, 1, 0, 0]


def test_requests_of_one_token_do_not_stop_the_loop():
    scheduler = make(3, [ask(90) for _ in range(20)])
    first, decoded = None, 0
    for _ in range(9):
        decoded += step(scheduler)[0]
        first = first or scheduler.running[0]
        for one in list(scheduler.running.values()):
            if one is not first:
                scheduler.remove(one)
    assert decoded == 6  # after the first 3 requests
    assert len(scheduler.waiting) == 20 - 9 - 1  # one is in prefill


@pytest.mark.parametrize(("groups", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2, 1, 3])])
def test_a_request_gets_a_slot_of_the_group_with_the_fewest(groups, expected):
    asked = [ask() for _ in range(5)]
    scheduler = make(4, asked, groups=groups)
    for _ in range(4):
        step(scheduler)
    assert list(scheduler.running) == expected
    assert scheduler.remove(asked[2]) == expected[2]
    step(scheduler)
    assert scheduler.running[expected[2]] is asked[4]


def test_a_prompt_waits_for_one_that_shares_more_than_what_is_stored():
    rng = np.random.default_rng(0)
    document = rng.integers(9, size=200)
    first, second = (Asked(np.concatenate([document, [n]])) for n in (1, 2))
    other = ask(200)
    for stored, started in ((0, 1), (199, 1), (200, 2)):
        assert len(start(make(2, [first, second], min_shared=64), stored)) == started
    assert len(start(make(2, [first, other], min_shared=64))) == 2
    assert len(start(make(2, [first, second], min_shared=201))) == 2  # too few to store
    assert len(start(make(2, [first, second]))) == 2  # nothing is stored
    scheduler = make(2, [first, second], min_shared=64)
    while second in scheduler.waiting:
        step(scheduler)
    assert scheduler.running[0] is first


def test_a_prompt_waits_for_no_states_from_which_it_gains_nothing():
    document = np.random.default_rng(0).integers(9, size=300)
    ends = ((10, 900), (11, 100), (12, 100))
    asked = [Asked(np.concatenate([document, np.full(size, n)])) for n, size in ends]
    options = dict(min_shared=64, prefill_rows=3)
    with_states = options | dict(rule=PrefillRule(64, 512, keeps_states=True))
    scheduler = make(3, asked, **with_states)
    # States of the first are kept after the document. The second leaves it there and keeps some
    # before, for which the third waits.
    assert start(scheduler) == asked[:2]
    assert [kept for *_, kept in scheduler.prefilling] == [(512, 1024, 1152), (256, 384)]
    assert start(make(3, asked, **with_states), stored=256) == asked
    assert start(make(3, asked, **options)) == asked[:1]  # keys and values of any length are reused


def test_no_schedule_loses_a_request_or_uses_a_slot_twice():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        slots = int(rng.integers(1, 6))
        scheduler, arrived, left = make(slots, prefill_rows=min(2, slots)), [], []
        while len(arrived) < 40 or scheduler.unfinished:
            if len(arrived) < 40 and rng.random() < 0.7:
                arrived.append(ask(int(rng.integers(1, 400)), priority=float(rng.integers(3))))
                scheduler.add(arrived[-1])
            if scheduler.unfinished and rng.random() < 0.4:
                one = scheduler.unfinished[rng.integers(len(scheduler.unfinished))]
                slot = scheduler.remove(one)
                assert slot is None or 0 <= slot < slots
                left.append(one)
            step(scheduler)
            unfinished = scheduler.unfinished
            assert len({id(one) for one in [*unfinished, *left]}) == len(arrived)
            assert len(scheduler.running) + len(scheduler.prefilling) <= slots
            assert len(scheduler.prefilling) <= 2
            assert not scheduler.waiting or scheduler.prefilling or scheduler.running


def test_a_limit_bounds_the_prefill_of_a_step_and_slots_are_not_filled_first():
    asked = [ask(), ask(350), ask(350)]
    scheduler = Scheduler[Asked](3, rule=RULE, prefill_rows=3, fill_first=False)
    scheduler.add(asked[0])
    assert step(scheduler) == (False, [(asked[0], Piece(0, 5, 64))])
    for one in asked[1:]:
        scheduler.add(one)
    firsts = []
    for _ in range(4):
        assert scheduler.begin_step()
        scheduler.limit_prefill(64)
        start(scheduler)
        while (work := scheduler.next_piece()) is not None:
            firsts.append((asked.index(work[0]), work[1].first, work[1].tokens))
    assert firsts == [(1, 0, 64), (2, 0, 64), (1, 64, 64), (2, 64, 64)]


def test_a_budget_is_divided_into_rounds_and_prompt_tokens():
    budget = StallBudget(0.1 / MARGIN)
    assert budget.rounds(8, prompts_wait=True) == 1 and budget.prompt_tokens(1, 64) == 64
    budget.count_rounds(4, 0.04)
    budget.count_tokens(64, 0.0128)
    assert [budget.rounds(most, wait) for most, wait in ((8, False), (99, False), (8, True))] == [
        *(8, 10, 5)
    ]
    assert budget.prompt_tokens(5, 64) == 192  # 50 ms at 0.2 ms a token
    assert budget.prompt_tokens(12, 64) == 64
    budget.count_rounds(1, 0.11)
    assert budget.round_s == pytest.approx(0.04)
    free = StallBudget(None)
    assert free.rounds(8, prompts_wait=True) == 8 and free.prompt_tokens(8, 64) is None


def test_states_are_kept_near_the_end_and_where_a_prompt_leaves_a_stored_text():
    rule = PrefillRule(chunk=64, largest=512, keeps_states=True)
    assert PrefillRule(64, 512).kept_states(1200, 0, 700) == ()
    assert rule.kept_states(64, 0, 0) == () and rule.kept_states(65, 0, 0) == (64,)
    assert rule.kept_states(1200, 0, 0) == (512, 1024, 1152)
    assert rule.kept_states(1200, 0, 700) == (640, 1024, 1152)
    assert rule.kept_states(1200, 640, 700) == (1152,)  # 640 is kept already
    assert rule.kept_states(4000, 30, 100) == (94, 3614, 3998)
    # The last tokens run again: all but the first are read with the one before, or by a policy.
    assert dataclasses.replace(rule, overlap=1).kept_states(129, 0, 0) == (64,)
    assert dataclasses.replace(rule, window=32).kept_states(150, 0, 0) == (64,)
    expected = [Piece(0, 512, 512), Piece(512, 640, 64, True), Piece(640, 1024, 64, True)]
    expected += [Piece(1024, 1152, 64, True), Piece(1152, 1200, 64)]
    assert pieces(rule, 1200, 0, None, (640, 1024, 1152)) == expected


def test_pieces_that_end_at_kept_states_run_no_more_tokens():
    rng = np.random.default_rng(0)
    for _ in range(300):
        overlap, window = int(rng.integers(2)), int(rng.choice([0, 32]))
        rule = PrefillRule(64, 512, window, False, overlap, True)
        length, limit = int(rng.integers(2, 3000)), [None, 64, 256][rng.integers(3)]
        cached = int(rng.integers(max(1, rule.last_state(length, length)))) + overlap
        kept = rule.kept_states(length, first := rule.first(cached), int(rng.integers(length)))
        assert len(kept) < SNAPSHOTS and all((n - first) % 64 == 0 for n in kept)
        found = pieces(rule, length, cached, limit, kept)
        assert [p.first for p in found] == [first, *(p.end for p in found[:-1])]
        assert found[-1].end == length and length - found[-1].first >= min(window, length)
        assert [p.end for p in found if p.is_kept] == list(kept)
        tokens = sum(p.tokens for p in found)
        assert tokens <= sum(p.tokens for p in pieces(rule, length, cached, limit))
