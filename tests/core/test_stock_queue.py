"""Nobody waits much longer than in stock, whatever the policy's order, admission and leases say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from tenuto.core import stock_queue
from tenuto.core.jobs import Arrival, JobState, TurnState
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.stock_queue import AGENTS_LIMIT, FORCED_SHARE, StockQueue
from tenuto.core.types import Keep, ToolCall, Turn
from tests.core.test_cost import ALLOWED_GROWTH, FEW, MANY, count_calls
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

OUTPUT = make_tokens(500, 2)


class LastFirst(Policy):
    """The latest arrival first: under a flood the first one never starts."""

    def queue_key(self, turn: Turn, now_s: float):
        return (-turn.arrival_s,)


class Flood:
    """A turn starts and ends in each round, and a new one comes; all prompts are alike in length."""

    def __init__(self, policy: Policy, num_blocks: int = 40, by_priority: bool = False, **limits) -> None:
        self.engine = ToyEngine(policy, num_blocks, limits=Limits(**limits), by_priority=by_priority)
        self.now_s = 0.0
        self.num_turns = 0
        self.started: list[str] = []

    def warm_up(self) -> None:
        """Let the driver learn how long outputs are, one turn at a time."""
        for _ in range(100):
            self.arrive()
            self.serve()
        self.started.clear()

    def arrive(self, turn_id: str | None = None, **arrival) -> None:
        self.num_turns += 1
        self.now_s += 0.01
        turn_id = turn_id or f"t{self.num_turns}"
        self.engine.arrive(turn_id, self.now_s, make_tokens(100 * self.num_turns, 18), OUTPUT, **arrival)

    def serve(self) -> None:
        self.now_s += 1
        self.engine.driver.tick(self.now_s)
        turn_id = self.engine.start_first(self.now_s)
        assert turn_id is not None
        self.started.append(turn_id)
        self.engine.finish(turn_id, self.now_s)

    def count_before(self, turn_id: str, num_rounds: int = 60, **arrival) -> int | None:
        """How many turns start before this one, while one more comes in each round; None: all do."""
        for _ in range(num_rounds):
            self.arrive(**arrival)
            self.serve()
        return self.started.index(turn_id) if turn_id in self.started else None


@pytest.mark.parametrize(
    ("num_before", "limits", "expected"),
    [
        (0, {}, (0, 3)),
        (10, {}, (10, 14)),
        (10, {"max_wait_over_stock": 1.0}, (19, 24)),
        (10, {"max_wait_over_stock": None}, None),
        (10, {"max_wait_over_stock": None, "max_held_back_s": 30.0}, (28, 42)),
    ],
)
def test_a_turn_is_overtaken_for_no_longer_than_the_limit_says(num_before, limits, expected) -> None:
    flood = Flood(LastFirst(), **limits)
    flood.warm_up()
    for _ in range(num_before):
        flood.arrive()
    flood.arrive("plain")
    num_started = flood.count_before("plain")
    if expected is None:
        assert num_started is None
    else:
        assert num_started is not None
        assert expected[0] <= num_started <= expected[1]


def test_the_longest_time_counts_from_when_stock_would_start_the_turn() -> None:
    """In an overloaded engine, stock makes a turn wait too. That is not the policy's doing."""
    flood = Flood(LastFirst(), max_wait_over_stock=10.0, max_held_back_s=30.0)
    flood.warm_up()
    for _ in range(50):
        flood.arrive()
    flood.arrive("plain")
    # One turn starts in each second: fifty before it in stock, then those of thirty seconds.
    num_before = flood.count_before("plain", num_rounds=120)
    assert num_before is not None
    assert 78 <= num_before <= 82


def test_those_that_wait_too_long_go_in_the_order_of_their_arrival() -> None:
    flood = Flood(LastFirst())
    for number in range(5):
        flood.arrive(f"old{number}")
        flood.now_s += 0.1
    flood.count_before("old4")
    old = [turn_id for turn_id in flood.started if turn_id.startswith("old")]
    assert old == [f"old{number}" for number in range(5)]
    assert flood.engine.driver.stats.num_overdue_turns >= 5


@pytest.mark.parametrize(("limits", "expected"), [({}, 3), ({"max_wait_over_stock": None}, None)])
def test_a_preempted_turn_runs_again_after_one_turn_of_service(limits, expected) -> None:
    """In stock it is first in the queue. Ten turns wait when it is preempted, and one comes in each round."""
    flood = Flood(LastFirst(), **limits)
    flood.warm_up()
    flood.arrive("plain")
    assert flood.engine.start_first(flood.now_s) == "plain"
    for _ in range(10):
        flood.arrive()
    flood.engine.preempt("plain", flood.now_s)
    num_started = flood.count_before("plain")
    assert num_started == expected if expected is None else num_started <= expected


def test_a_preempted_turn_that_leaves_is_forgotten() -> None:
    flood = Flood(LastFirst())
    flood.warm_up()
    queue = flood.engine.driver._fairness.waits
    for end in ("abort", "finish"):
        flood.arrive("plain")
        flood.engine.start_first(flood.now_s)
        flood.engine.preempt("plain", flood.now_s)
        if end == "finish":
            assert flood.engine.start_first(flood.now_s) == "plain"
        getattr(flood.engine, end)("plain", flood.now_s)
        assert (queue._live, queue._waiting, queue._overdue) == ({}, {}, {})


class LatestFirst(LastFirst):
    """Preempts the turn that arrived first."""

    def preempt_key(self, turn: Turn, view):
        return (turn.arrival_s,)


def test_a_turn_that_started_because_it_was_overdue_is_preempted_last() -> None:
    flood = Flood(LatestFirst(), num_blocks=60)
    engine = flood.engine
    flood.warm_up()
    flood.arrive("plain")
    for _ in range(8):
        flood.arrive()
        engine.driver.tick(flood.now_s)
        turn_id = engine.start_first(flood.now_s)
        if turn_id == "plain":
            break
        engine.finish(turn_id, flood.now_s)
    assert turn_id == "plain"
    flood.arrive("late")
    assert engine.start_first(flood.now_s) == "late"
    assert engine.driver.get_victims(["plain", "late"], flood.now_s) == ["late", "plain"]


def test_priorities_stand_above_the_wait() -> None:
    flood = Flood(LastFirst(), by_priority=True)
    flood.arrive("plain", priority=1)
    # More urgent ones go first for as long as they come, as in stock.
    assert flood.count_before("plain", priority=0) is None
    assert flood.engine.driver.stats.num_overdue_turns > 0


def test_aborted_turns_do_not_lengthen_the_wait_of_those_behind_them() -> None:
    flood = Flood(LastFirst())
    for number in range(200):
        flood.arrive(f"gone{number}")
    flood.now_s = 0.5
    flood.arrive("plain")
    for number in range(200):
        flood.engine.abort(f"gone{number}", 0.6)
    num_started = flood.count_before("plain")
    assert num_started is not None
    assert num_started <= 3


def test_aborted_turns_do_not_shorten_the_wait_of_those_before_them() -> None:
    """Else whoever sends long prompts and leaves, at no cost, would make the order that of arrival."""
    queue = StockQueue(Limits(), 100_000)
    teach_agents(queue)
    turns = [make_turn(f"old{number}", 1000, make_agent(f"old{number}")) for number in range(20)]
    for turn in turns:
        queue.arrive(turn)
    num_overdue = 0
    for number, turn in enumerate(turns):
        gone = make_turn(f"gone{number}", 100_000)
        queue.arrive(gone)
        queue.leave(gone, 0, 0.0)
        num_overdue += len(list(queue.pop_overdue(0.0)))
        queue.start(turn, 0, 0.0)
    assert num_overdue == 0


def test_turns_that_ended_are_not_remembered() -> None:
    queue = StockQueue(Limits(), 100_000)
    teach_agents(queue)
    for number in range(60):
        queue.arrive(make_turn(f"old{number}", 1000, make_agent(f"old{number}")))
    for number in range(2000):
        turn = make_turn(f"new{number}", 1000, make_agent(f"new{number}"))
        queue.arrive(turn)
        queue.start(turn, 0, 0.0)
        queue.leave(turn, 10, 0.0)
    assert len(queue._waiting) == 60
    for order in (queue._places, *queue._due.values()):
        assert set(order) <= queue._waiting.keys()
        assert len(order._heap) <= 2 * 61 + 16


@dataclass
class Miser(KeepFor):
    """No lease yields to a turn that waits."""

    def may_reclaim(self, lease, turn, view) -> bool:
        return False

    def retain(self, turn, view):
        return Keep(view.now_s + 1e9) if turn.turn_id == "keeps" else super().retain(turn, view)


@pytest.mark.parametrize("limits", [{}, {"max_wait_over_stock": None}])
def test_leases_yield_to_a_turn_that_waits_too_long(limits: dict[str, float | None]) -> None:
    engine = ToyEngine(Miser(ttl_s=0), 12, limits=Limits(**limits))
    driver = engine.driver
    engine.arrive("keeps", 0, make_tokens(0, 18), OUTPUT, Hints(job_id="keeps"))
    assert engine.start_first(0) == "keeps"
    engine.finish("keeps", 4, tool=ToolCall("ls"))
    assert driver.get_num_leased_blocks() == 4
    engine.arrive("runs", 5, make_tokens(100, 6), OUTPUT)
    assert engine.start_first(5) == "runs"
    engine.arrive("big", 6, make_tokens(200, 30), OUTPUT)
    # Nobody waited when it came: in stock it would have started at once. One turn of service takes 4 s.
    driver.tick(9.9)
    assert engine.start_first(9.9) is None
    assert driver.get_next_tick_s() == (10 if not limits else 606)
    driver.tick(10)
    assert engine.start_first(10) == ("big" if not limits else None)


def test_the_limit_does_nothing_to_a_policy_that_makes_nobody_wait() -> None:
    flood = Flood(Policy())
    flood.arrive("first")
    assert flood.engine.driver.get_next_tick_s() == math.inf
    flood.serve()
    assert flood.engine.driver.stats.num_overdue_turns == 0


def test_stock_hits_what_nothing_has_evicted_since() -> None:
    """Counted by the work that stock would have with a job's second turn."""
    near, far = (measure_second_turn(num_between) for num_between in (1, 12))
    assert near < 18
    assert far >= 30


def measure_second_turn(num_between: int) -> float:
    flood = Flood(LastFirst(), num_blocks=40)
    prompt = make_tokens(0, 18)
    flood.engine.arrive("a", 0, prompt, OUTPUT, Hints(job_id="job"))
    flood.engine.start_first(0)
    flood.engine.finish("a", 0, tool=ToolCall("ls"))
    for _ in range(num_between):
        flood.arrive()
        flood.serve()
    flood.engine.arrive("b", 99, [*prompt, *OUTPUT, *make_tokens(900, 12)], OUTPUT, Hints(job_id="job"))
    work = flood.engine.driver._fairness.waits._live["b"].work
    return work - 8.0 * flood.engine.driver._fairness.waits._output.value


@pytest.mark.parametrize(
    ("num_tokens", "wait", "service"), [(1000, 1.1, 1.0), (300, 1.1, 1.0), (125, 1.05, 0.5), (0, 1.0, 0.0)]
)
def test_a_short_prompt_may_be_made_to_wait_less(num_tokens: int, wait: float, service: float) -> None:
    """The usual turn: a tenth and one turn of service longer than in stock; the shortest: no longer."""
    queue = StockQueue(Limits(), 100_000)
    turns = [make_turn(f"t{number}", 1000) for number in range(401)]
    for turn in turns:
        queue.arrive(turn)
    queue.start(turns[0], 0, 0.0)
    backlog = 400 * 1000.0
    turn = make_turn("asks", num_tokens)
    queue.arrive(turn)
    wait_of = queue._live["asks"]
    alone = wait_of.work
    assert wait_of.place + wait_of.extra - queue._began == pytest.approx(
        wait * backlog + service * alone, rel=0.01
    )


def make_turn(name: str, num_tokens: int, job: JobState | None = None) -> TurnState:
    return TurnState(name, job or JobState(name, 0.0, None), 0.0, Arrival(Hints(), num_tokens))


@pytest.mark.parametrize("event", ["arrive", "serve"])
def test_an_event_costs_the_same_however_many_wait(event: str) -> None:
    few, many = (count_event(event, num_waiting) for num_waiting in (FEW, MANY))
    assert many <= ALLOWED_GROWTH * few + 5


def count_event(event: str, num_waiting: int) -> float:
    flood = Flood(LastFirst(), num_blocks=100)
    for _ in range(num_waiting):
        flood.arrive()
    for _ in range(20):
        flood.serve()
        flood.arrive()
    # Some events rebuild a heap: what they cost is paid by those between.
    return sum(count_calls(getattr(flood, event)) for _ in range(30)) / 30


def test_jobs_wait_for_each_other_but_not_for_strangers() -> None:
    """A job of three turns may wait for three, unless strangers get most of the engine."""
    waits = [get_wait_of_known_kind(share) for share in (0.0, 0.25, 0.5, 0.9)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[2]
    assert waits[2] == pytest.approx(1.1, abs=0.05) and waits[3] == pytest.approx(1.1, abs=0.05)


def test_overdue_turns_of_agents_take_a_share_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others always go first. A single request is not held back by the share of agents."""
    monkeypatch.setattr(stock_queue, "AGENTS_LIMIT", math.inf)
    over = wait_for_others(StockQueue(Limits(), 100_000), num_others=1000)
    assert 1 <= over.pop("single") < 1.05
    assert 0.5 * FORCED_SHARE < len(over) / 1000 < 1.1 * FORCED_SHARE


def test_no_turn_of_an_agent_waits_twice_as_long_as_it_may() -> None:
    over = wait_for_others(StockQueue(Limits(), 100_000), num_others=1000)
    assert len(over) == 101
    assert 0.95 * AGENTS_LIMIT < max(over.values()) < 1.1 * AGENTS_LIMIT


def wait_for_others(queue: StockQueue, num_others: int) -> dict[str, float]:
    """Agents and a single request that wait while others go first: how long, over what they may wait."""
    teach_agents(queue)
    for number in range(100):
        queue.arrive(make_turn(f"old{number}", 1000, make_agent(f"old{number}")))
    queue.arrive(make_turn("single", 1000))
    waits, began = dict(queue._live), queue._began
    over = {}
    for number in range(num_others):
        latest = make_turn(f"new{number}", 1000, make_agent(f"new{number}"))
        queue.arrive(latest)
        list(queue.pop_overdue(0.0))
        turn = next((wait.turn for wait in queue._overdue.values()), latest)
        if turn.turn_id in waits:
            over[turn.turn_id] = (queue._began - began) / (
                waits[turn.turn_id].place + waits[turn.turn_id].extra - began
            )
        queue.start(turn, 0, 0.0)
    return over


def make_agent(job_id: str) -> JobState:
    return JobState(job_id, 0.0, None, "agents", num_turns=1)


def teach_agents(queue: StockQueue) -> None:
    """Let 40 agents of three turns run."""
    for number in range(120):
        job = JobState(f"j{number // 3}", 0.0, None, "agents", num_turns=number % 3 + 1)
        serve_alone(queue, make_turn(f"t{number}", 1000, job))


def get_wait_of_known_kind(share_of_strangers: float) -> float:
    """How long a first turn may wait beside a backlog of 100 turns, over its wait in stock."""
    queue, num_strangers = StockQueue(Limits(), 100_000), 0.0
    jobs = [JobState(f"j{number}", 0.0, None, "agents") for number in range(40)]
    for number in range(120):
        job = jobs[number // 3]
        job.num_turns = number % 3 + 1
        serve_alone(queue, make_turn(f"t{number}", 1000, job))
        num_strangers += share_of_strangers / (1 - share_of_strangers)
        while num_strangers >= 1:
            num_strangers -= 1
            serve_alone(queue, make_turn(f"s{number}-{num_strangers}", 1000))
    for number in range(100):
        queue.arrive(make_turn(f"w{number}", 1000))
    turn = make_turn("asks", 1000, JobState("asks", 0.0, None, "agents", num_turns=1))
    began, backlog = queue._began, queue._backlog
    queue.arrive(turn)
    return (queue._live["asks"].place + queue._live["asks"].extra - began - queue._service.value) / backlog


def serve_alone(queue: StockQueue, turn: TurnState) -> None:
    queue.arrive(turn)
    queue.start(turn, 0, 0.0)
    turn.started = True
    queue.leave(turn, 0, 0.0)
