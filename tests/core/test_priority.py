"""In an engine that serves by priority, a policy decides among equals only."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Lease, Turn
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

OUTPUT = make_tokens(500, 3)


@dataclass
class ByArrival(KeepFor):
    """The first job first, everywhere; its KV gives way to none that came later."""

    ttl_s: float = 500.0

    def queue_key(self, turn: Turn, now_s: float):
        return (turn.job.arrival_s,)

    def evict_key(self, lease: Lease, view):
        return (-lease.turn.job.arrival_s,)

    def preempt_key(self, turn: Turn, view):
        return (-turn.job.arrival_s,)

    def may_reclaim(self, lease: Lease, turn: Turn, view) -> bool:
        return turn.job.arrival_s < lease.turn.job.arrival_s

    def may_preempt(self, turn: Turn, running: Turn, view) -> bool:
        return True


def make_engine(num_blocks: int, policy: Policy | None = None) -> ToyEngine:
    return ToyEngine(policy or ByArrival(), num_blocks, by_priority=True)


def arrive(engine: ToyEngine, number: int, priority: int) -> str:
    engine.arrive(
        f"t{number}", number, make_tokens(1000 * number, 18), OUTPUT, Hints(job_id=f"j{number}"), priority
    )
    return f"t{number}"


def lease(engine: ToyEngine, number: int, priority: int) -> None:
    turn_id = arrive(engine, number, priority)
    assert engine.start_first(number) == turn_id
    engine.finish(turn_id, number)


@pytest.mark.parametrize(("by_priority", "order"), [(True, ["t0", "t1"]), (False, ["t1", "t0"])])
def test_stock_puts_a_preempted_turn_first_only_without_priorities(
    by_priority: bool, order: list[str]
) -> None:
    engine = ToyEngine(Policy(), 100, by_priority=by_priority)
    arrive(engine, 1, 0)
    engine.start_first(1)
    engine.preempt("t1", 2)
    arrive(engine, 0, 0)
    assert sorted(["t0", "t1"], key=engine.driver.get_stock_key) == order


def test_the_queue_is_by_priority_first() -> None:
    engine = make_engine(100)
    for number, priority in enumerate((2, 1, 1, 0)):
        arrive(engine, number, priority)
    assert list(engine.waiting) == ["t3", "t1", "t2", "t0"]


def test_the_lowest_priority_is_preempted_first() -> None:
    engine = make_engine(100)
    for number, priority in enumerate((2, 0, 2, 1)):
        arrive(engine, number, priority)
        engine.start_first(number)
    running = list(engine.running)
    assert engine.driver.get_victim(running, 9) == "t2"
    assert engine.driver.get_victim(["t1", "t3"], 9) == "t3"


def test_the_lowest_priority_s_lease_yields_first() -> None:
    engine = make_engine(100, ByArrival())
    for number, priority in enumerate((2, 0, 1)):
        lease(engine, number, priority)
    engine.driver.reclaim(1, 9)
    assert [(each.job_id, len(each.blocks)) for each in engine.driver.leases] == [
        ("j0", 4),
        ("j1", 5),
        ("j2", 5),
    ]


def test_a_renewed_lease_stays_in_the_order_of_priorities() -> None:
    engine = make_engine(100, ByArrival(ttl_s=10, renew_s=100))
    for number, priority in enumerate((2, 0)):
        lease(engine, number, priority)
    assert engine.driver.expire(20) == 0
    engine.driver.reclaim(1, 21)
    assert [len(each.blocks) for each in engine.driver.leases] == [4, 5]


@pytest.mark.parametrize(
    ("leased", "waiting", "may_reclaim"),
    [
        (1, 0, True),  # although its job came first, and the policy would not
        (0, 1, False),
        (1, 1, False),  # among equals the policy decides: it came first
    ],
)
def test_a_lease_gives_way_to_a_better_priority(leased: int, waiting: int, may_reclaim: bool) -> None:
    engine = make_engine(12)
    lease(engine, 0, leased)
    running = arrive(engine, 1, 0)
    engine.start_first(1)
    arrive(engine, 2, waiting)
    assert list(engine.running) == [running]
    # Five blocks are leased and five in use; the turn needs five of twelve.
    assert engine.start_first(3) == ("t2" if may_reclaim else None)


def test_a_better_priority_s_lease_stays_although_the_policy_would_give_it_up() -> None:
    engine = make_engine(12)
    arrive(engine, 0, 1)  # came first, and waits
    engine.waiting.discard("t0")
    lease(engine, 1, 0)
    arrive(engine, 2, 0)
    engine.start_first(2)
    engine.waiting.push("t0", (1,))
    assert engine.start_first(3) is None


def test_nobody_is_displaced_by_a_worse_priority() -> None:
    engine = make_engine(100)
    arrive(engine, 0, 0)
    engine.start_first(0)
    worse, equal = arrive(engine, 1, 1), arrive(engine, 2, 0)
    assert engine.driver.get_preempted_for(worse, ["t0"], 3) is None
    assert engine.driver.get_preempted_for(equal, ["t0"], 3) == "t0"
