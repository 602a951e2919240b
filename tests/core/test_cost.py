"""What an event costs must not grow with the number of leases and waiting turns.

Counted, never timed: Python and C calls, with keys whose every comparison is a Python call, so that work
hidden in `sorted`, `min` or a heap counts too; and dictionaries that tell when somebody walks through them.
"""

from __future__ import annotations

import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import Lineage
from tenuto.core.requests import Hints
from tenuto.core.types import Keep, ToolCall
from tests.support.prefix import count_common, hash_blocks
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

FEW, MANY = 100, 1000
ALLOWED_GROWTH = 1.6
"""10 times as many cost log2(1000) / log2(100) = 1.5 times the comparisons at most; linear would be 10."""
LS = ToolCall("ls")


class Counted(float):
    """A number whose comparisons are Python calls."""

    __slots__ = ()

    def __lt__(self, other: float) -> bool:
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    __hash__ = float.__hash__


class Walked(OrderedDict):
    """A dictionary that counts how often somebody walks through it."""

    num_walks = 0

    def _walk(self, view):
        Walked.num_walks += 1
        return view

    def __iter__(self):
        return self._walk(super().__iter__())

    def keys(self):
        return self._walk(super().keys())

    def values(self):
        return self._walk(super().values())

    def items(self):
        return self._walk(super().items())


@dataclass
class CountedKeys(KeepFor):
    """Keys that do not arrive in order, and count."""

    def queue_key(self, turn, now_s):
        return (Counted(0 if turn.has_lease else 1), Counted(-turn.arrival_s % 7), Counted(turn.arrival_s))

    def retain(self, turn, view):
        # Deadlines all differ, and not in the order of the grants.
        return Keep(Counted(100 + round(view.now_s * 1000) * 7919 % 10_007 / 10_007))

    def evict_key(self, lease, view):
        return (Counted(lease.granted_s % 5), Counted(lease.granted_s))


def count_calls(event: Callable[[], object]) -> int:
    """Python and C calls that an event takes."""
    num_calls = 0

    def count(frame, what, argument) -> None:
        nonlocal num_calls
        if what in ("call", "c_call"):
            num_calls += 1

    sys.setprofile(count)
    try:
        event()
    finally:
        sys.setprofile(None)
    return num_calls


class Crowd:
    """An engine with n leases and n waiting turns, all of jobs of their own; blocks hold 4 tokens."""

    def __init__(self, num_jobs: int, *, tenants: bool = False) -> None:
        """`tenants`: whether each job has a tenant of its own."""
        self.has_tenants = tenants
        self.engine = ToyEngine(CountedKeys(), 4 * num_jobs + 200)
        self.num_turns = 0
        self.now_s = 0.0
        self.jobs: list[tuple[str, list[int]]] = []
        for _ in range(num_jobs):
            self.arrive()
            self.start()
            self.finish()
        self.leased = list(self.jobs)
        for _ in range(num_jobs):
            self.arrive()

    def arrive(self) -> None:
        """A job's first turn: 8 tokens nobody else has."""
        self.num_turns += 1
        self.now_s += 1e-3
        prompt = make_tokens(100 * self.num_turns, 8)
        job_id = f"job-{self.num_turns}"
        self.jobs.append((job_id, prompt))
        self._arrive(job_id, prompt, [1, 2])

    def come_back(self) -> None:
        """A leased job's next turn."""
        self.num_turns += 1
        job_id, prompt = self.leased.pop()
        self._arrive(job_id, [*prompt, 1, 2, 3], [1])

    def _arrive(self, job_id: str, prompt: list[int], output: list[int]) -> None:
        hints = Hints(job_id=job_id, tenant=f"of-{job_id}" if self.has_tenants else None)
        self.engine.arrive(f"turn-{self.num_turns}", self.now_s, prompt, output, hints)

    def start(self) -> None:
        assert self.engine.start_first(self.now_s)

    def finish(self) -> None:
        self.now_s += 1e-3
        self.engine.finish(next(reversed(self.engine.running)), self.now_s, tool=LS)

    def preempt(self) -> None:
        self.engine.preempt(next(reversed(self.engine.running)), self.now_s)

    def abort(self) -> None:
        self.engine.abort(self.engine.waiting.get_first(), self.now_s)

    def expire_nothing(self) -> None:
        assert self.engine.driver.expire(self.now_s) == 0

    def expire_one(self) -> None:
        assert self.engine.driver.expire(self.engine.driver.get_next_deadline_s()) == 1

    def reclaim(self) -> None:
        assert self.engine.driver.reclaim(1, self.now_s) == 1

    def ask_key(self) -> None:
        self.engine.driver.get_queue_key(self.engine.waiting.get_first(), self.now_s)

    def view(self) -> None:
        self.engine.driver.get_view(self.now_s)

    def tell_walks(self) -> None:
        """Make dictionaries with an entry for each job, turn or lease tell when they are walked through."""
        driver, leases = self.engine.driver, self.engine.driver.leases
        driver._jobs.jobs, driver._turns = Walked(driver._jobs.jobs), Walked(driver._turns)
        leases._leases = Walked(leases._leases)
        waiting = self.engine.waiting
        waiting._turns, waiting._lane_of = driver._turns, Walked(waiting._lane_of)
        lanes = [lane.turns for lane in waiting._lanes.values()]
        for order in (waiting._order, *lanes, leases._deadlines, *leases.evict_order.values()):
            order._entries = Walked(order._entries)
        Walked.num_walks = 0


EVENTS: list[tuple[str, ...]] = [
    ("arrive",),
    ("come_back",),
    ("start", "finish"),
    ("come_back", "start", "finish"),
    ("start", "preempt"),
    ("abort",),
    ("expire_nothing",),
    ("expire_one",),
    ("ask_key",),
    ("view",),
]


@pytest.fixture(scope="module", params=[False, True], ids=["nobody", "tenants"])
def crowds(request: pytest.FixtureRequest) -> tuple[Crowd, Crowd]:
    return Crowd(FEW, tenants=request.param), Crowd(MANY, tenants=request.param)


def measure(crowd: Crowd, steps: tuple[str, ...]) -> float:
    """Calls of the median one of 15 such events: now and then one pays for a rebuilt heap."""

    def event() -> None:
        for step in steps:
            getattr(crowd, step)()

    return statistics.median(count_calls(event) for _ in range(15))


@pytest.mark.parametrize("steps", EVENTS, ids="+".join)
def test_an_event_costs_the_same_among_many(crowds: tuple[Crowd, Crowd], steps: tuple[str, ...]) -> None:
    few, many = (measure(crowd, steps) for crowd in crowds)
    assert many <= ALLOWED_GROWTH * few


def test_reclaiming_a_block_costs_the_same_among_many() -> None:
    few, many = (measure(Crowd(num_jobs), ("reclaim",)) for num_jobs in (FEW, MANY))
    assert many <= ALLOWED_GROWTH * few


def test_nobody_walks_through_all_leases_jobs_or_waiting_turns() -> None:
    crowd = Crowd(FEW)
    crowd.tell_walks()
    for steps in EVENTS:
        for step in steps:
            getattr(crowd, step)()
    crowd.reclaim()
    assert Walked.num_walks == 0


def test_the_walks_are_seen() -> None:
    crowd = Crowd(5)
    crowd.tell_walks()
    list(crowd.engine.driver.leases)
    list(crowd.engine.waiting)
    assert Walked.num_walks >= 2


def test_a_sort_is_seen() -> None:
    few, many = (
        count_calls(lambda n=n: sorted((Counted(i % 7), Counted(i)) for i in range(n))) for n in (FEW, MANY)
    )
    assert many > ALLOWED_GROWTH * few


def test_rebuilding_the_order_is_rare() -> None:
    # n changes of n keys: no more than a constant number of heap entries made for each.
    def count_per_change(size: int) -> float:
        order = IndexedHeap()
        for number in range(size):
            order.push(f"id-{number}", (Counted(number),))

        def change() -> None:
            for number in range(5 * size):
                order.push(f"id-{number % size}", (Counted(number % 97), Counted(number)))
                order.get_first()

        return count_calls(change) / (5 * size)

    assert count_per_change(MANY) <= ALLOWED_GROWTH * count_per_change(FEW)


@pytest.mark.parametrize("num_common", [0, 1, 50, 99, 100])
def test_chained_hashes_are_compared_by_halves(num_common: int) -> None:
    # log2(10_000) = 13.3: 14 comparisons, of a call or two each, and a handful of other calls.
    ours = [Counted(number) for number in range(10_000)]
    theirs = [Counted(number if number < num_common * 100 else -1 - number) for number in range(10_000)]
    assert count_calls(lambda: count_common(ours, theirs)) <= 2 * 14 + 10
    assert count_common(ours, theirs) == num_common * 100


@pytest.mark.parametrize("is_next_turn", [False, True])
def test_recognising_a_job_costs_the_same_among_many_with_one_system_prompt(is_next_turn: bool) -> None:
    system = make_tokens(0, 64)

    def count(num_jobs: int) -> int:
        lineage = Lineage(16, max_jobs=10_000)
        for number in range(num_jobs):
            prompt = [*system, *[1000 + number] * 6]
            lineage.remember(f"job-{number}", hash_blocks(prompt, 16), prompt)
        prompt = [*system, *[1000 + (0 if is_next_turn else num_jobs)] * 6, *[5] * 20]
        hashes = hash_blocks(prompt, 16)
        assert lineage.find(hashes, prompt) == ("job-0" if is_next_turn else None)
        return count_calls(lambda: lineage.find(hashes, prompt))

    assert count(MANY) <= ALLOWED_GROWTH * count(FEW)
