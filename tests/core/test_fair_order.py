"""Fair shares of the order: between tenants by service, within a tenant by the policy's key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError
from tenuto.core.fairness import MAX_PRIORITIES, FairOrder, Shares
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import Arrival, JobState, TurnState
from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.turn_work import MAX_NAMES
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens


class Queue:
    """A fair order, with turns that arrive, start at once when they are popped, and end."""

    def __init__(self, weights: dict[str, float] | None = None, *, by_priority: bool = False) -> None:
        self.turns: dict[str, TurnState] = {}
        self.shares = Shares(weights, by_priority=by_priority)
        self.order = FairOrder(self.turns, self.shares)
        self.began: dict[str | None, float] = {}

    def arrive(
        self, turn_id: str, tenant: str | None, num_tokens: int = 100, key: float = 0.0, priority: int = 0
    ) -> None:
        arrival = Arrival(Hints(), num_tokens, priority=priority)
        turn = self.turns[turn_id] = TurnState(turn_id, JobState(turn_id, 0.0, tenant), 0.0, arrival)
        self.shares.arrive(turn)
        self.order.push(turn_id, (key,))

    def start(self) -> str:
        turn = self.turns[self.order.pop()]
        if not turn.started:  # otherwise it was preempted
            self.shares.start(turn, 0)
        turn.started = True
        tenant = turn.job.tenant
        self.began[tenant] = self.began.get(tenant, 0.0) + turn.arrival.num_prompt_tokens
        return turn.turn_id

    def end(self, turn_id: str, num_output_tokens: int = 0) -> None:
        self.shares.leave(self.turns.pop(turn_id), num_output_tokens)

    def serve(self) -> str:
        turn_id = self.start()
        self.end(turn_id)
        return turn_id


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "pop", "discard"]), st.integers(0, 9), st.integers(0, 5)),
    max_size=60,
)


@given(OPERATIONS)
def test_with_one_tenant_it_is_the_policy_s_order(operations: list[tuple[str, int, int]]) -> None:
    queue, plain = Queue(), IndexedHeap()
    for name, number, key in operations:
        turn_id = f"t{number}"
        if name == "push":
            if turn_id not in queue.turns:
                queue.arrive(turn_id, "one", 10 * number + 1, key)
            queue.order.push(turn_id, (key,))
            plain.push(turn_id, (key,))
        elif name == "discard":
            queue.order.discard(turn_id)
            plain.discard(turn_id)
        elif plain:
            assert queue.start() == plain.pop()
        assert list(queue.order) == list(plain)
        assert queue.order.get_first() == plain.get_first()
        assert queue.order.get_first_key() == plain.get_first_key()
        assert len(queue.order) == len(plain)


@given(
    sizes=st.lists(st.lists(st.integers(1, 500), min_size=30, max_size=30), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
)
def test_tenants_that_wait_receive_service_by_their_weights(
    sizes: list[list[int]], weights: list[float]
) -> None:
    """Source of the bound: start-time fair queueing, theorem 1."""
    names = [f"tenant{number}" for number in range(len(sizes))]
    weight_of = dict(zip(names, weights, strict=False))
    queue = Queue(weight_of)
    for name, own in zip(names, sizes, strict=True):
        for index, size in enumerate(own):
            queue.arrive(f"{name}/{index}", name, size)
    for _ in range(30):
        queue.serve()
        if {turn.job.tenant for turn in queue.turns.values()} != set(names):
            return
        for one, other in itertools.combinations(names, 2):
            apart = abs(
                queue.began.get(one, 0) / weight_of[one] - queue.began.get(other, 0) / weight_of[other]
            )
            assert apart <= 500 / weight_of[one] + 500 / weight_of[other] + 1e-6


def test_a_flood_does_not_push_another_tenant_back() -> None:
    queue = Queue()
    for number in range(1000):
        queue.arrive(f"flood{number:04}", "flood", 2000)
    for _ in range(100):
        queue.serve()
    # The policy would serve the flood first.
    queue.arrive("late", "other", 2000, key=10**6)
    assert "late" in (queue.serve(), queue.serve())


def test_many_turns_of_one_step_are_charged_at_once() -> None:
    """The engine takes several turns off the queue before the driver hears that they started."""
    queue = Queue()
    for number in range(6):
        queue.arrive(f"a{number}", "a", key=number)
        queue.arrive(f"b{number}", "b", key=number)
    assert sorted(turn_id[0] for turn_id in [queue.order.pop() for _ in range(6)]) == list("aaabbb")


def test_a_turn_that_is_put_back_is_not_charged() -> None:
    queue = Queue()
    queue.arrive("a", "a", 1000)
    queue.arrive("b", "b", 10, key=1)
    for _ in range(5):
        assert queue.order.pop() == "a"
        queue.order.push("a", (0,))
        # Its tenant is charged until it is back, so the other one may be first meanwhile.
        while queue.order.get_first() != "a":
            queue.serve()
    assert queue.serve() == "a"


def test_a_turn_that_is_aborted_sends_no_other_tenant_back() -> None:
    """Its tenant has a small weight, so its turns wait far behind. Whoever comes later does not."""
    queue = Queue({"small": 0.001})
    queue.arrive("small0", "small")
    queue.arrive("small1", "small")
    assert queue.serve() == "small0"
    for number in range(20):
        queue.arrive(f"busy{number:02}", "busy", key=1)
    queue.order.discard("small1")
    queue.end("small1")
    queue.arrive("new", "new", key=2)
    assert "new" in (queue.serve(), queue.serve())


def test_waiting_for_nothing_earns_no_credit() -> None:
    queue = Queue()
    for number in range(50):
        queue.arrive(f"busy{number:02}", "busy")
    for _ in range(40):
        queue.serve()
    for number in range(5):
        queue.arrive(f"new{number}", "new")
    served = [queue.serve() for _ in range(6)]
    assert sum(turn_id.startswith("new") for turn_id in served) == 3


def test_answers_that_are_longer_than_expected_are_charged() -> None:
    queue = Queue()
    for number in range(10):
        queue.arrive(f"long{number}", "long", 100)
        queue.arrive(f"short{number}", "short", 100)
    order = []
    for _ in range(8):
        turn_id = queue.start()
        queue.end(turn_id, 500 if turn_id.startswith("long") else 5)
        order.append(turn_id.rstrip("0123456789"))
    assert order.count("short") > order.count("long")


def test_priorities_come_before_tenants_where_the_engine_uses_them() -> None:
    for by_priority, expected in ((True, "urgent"), (False, "other")):
        queue = Queue(by_priority=by_priority)
        queue.arrive("first", "busy", 1000, priority=0)
        queue.serve()
        queue.arrive("urgent", "busy", priority=0)
        queue.arrive("other", "other", priority=5)
        queue.shares._tenants["busy"].time += 1
        assert queue.order.get_first() == expected


def test_urgent_turns_of_one_tenant_send_no_other_tenant_back() -> None:
    """They go first whatever their tenant has received. Among the others, the least served goes first."""
    queue = Queue(by_priority=True)
    for number in range(50):
        queue.arrive(f"urgent{number:02}", "urgent", 1000)
        queue.arrive(f"old{number:02}", "old", 1000, priority=5)
    for _ in range(50):
        assert queue.serve().startswith("urgent")
    queue.arrive("new", "new", 1000, key=1, priority=5)
    assert "new" in (queue.serve(), queue.serve())


def test_a_turn_that_waits_behind_urgent_ones_does_not_let_newcomers_go_before_these() -> None:
    queue = Queue(by_priority=True)
    queue.arrive("batch", "batch", 1000, priority=5)
    for number in range(40):
        queue.arrive(f"ann{number:02}", "ann", 1000)
        queue.arrive(f"bob{number:02}", "bob", 1000)
    for _ in range(50):
        queue.serve()
    for number in range(9):
        queue.arrive(f"new{number}", "new", 1000)
    served = [queue.serve()[:3] for _ in range(9)]
    assert sorted(served) == ["ann"] * 3 + ["bob"] * 3 + ["new"] * 3


def test_a_turn_that_waits_behind_urgent_ones_keeps_no_place_among_these() -> None:
    queue = Queue(by_priority=True)
    queue.arrive("batch", "sly", 1000, priority=5)
    for number in range(60):
        queue.arrive(f"ann{number:02}", "ann", 1000)
        queue.arrive(f"bob{number:02}", "bob", 1000)
    for _ in range(80):
        queue.serve()
    for number in range(30):
        queue.arrive(f"sly{number:02}", "sly", 1000, key=-1)
    served = [queue.serve()[:3] for _ in range(9)]
    assert sorted(served) == ["ann"] * 3 + ["bob"] * 3 + ["sly"] * 3


@pytest.mark.parametrize("looks", [False, True])
def test_looks_at_the_queue_change_nothing_among_equals(looks: bool) -> None:
    """An engine looks more often than another. Both must serve tenants in the same order."""
    queue, served = Queue(), []
    for number in range(8):
        for tenant in ("ann", "bob", "eve"):
            queue.arrive(f"{tenant}{number}", tenant)
    for number in range(24):
        for _ in range(number % 3 if looks else 0):
            queue.order.get_first()
        served.append(queue.start())
        if looks:
            queue.order.get_first()
        queue.end(served[-1])
        if number == 7:
            queue.arrive("ann8", "ann")
    assert [name[:3] for name in served[:3]] == ["ann", "bob", "eve"]
    assert [name[:3] for name in served[9:12]] == ["bob", "eve", "ann"]


def test_a_turn_that_cannot_start_yet_earns_no_credit() -> None:
    """VLLM takes it off the queue in each step, and puts it back: it waits for a grammar or an adapter."""
    queue = Queue()

    def serve() -> str:
        is_first = queue.order.get_first() == "blocked"
        if is_first:
            assert queue.order.pop() == "blocked"
        turn_id = queue.serve()
        if is_first:
            queue.order.push("blocked", (-2,))
        return turn_id[:3]

    queue.arrive("blocked", "sly", 1000, key=-2)
    for number in range(60):
        queue.arrive(f"ann{number:02}", "ann", 1000)
        queue.arrive(f"bob{number:02}", "bob", 1000)
    for _ in range(80):
        serve()
    for number in range(30):
        queue.arrive(f"sly{number:02}", "sly", 1000)
    served = [serve() for _ in range(9)]
    assert sorted(served) == ["ann"] * 3 + ["bob"] * 3 + ["sly"] * 3


def test_a_turn_that_kept_all_others_waiting_counts_even_if_it_is_aborted() -> None:
    """Otherwise a client whose prompt needs all of the memory aborts it shortly before it fits, for ever."""
    queue = Queue()
    for number in range(30):
        queue.arrive(f"ann{number:02}", "ann", 1000)
        queue.arrive(f"bob{number:02}", "bob", 1000)
    for _ in range(8):
        queue.serve()
    for number in range(2):
        queue.arrive(f"sly{number}", "sly", 9000, key=-1)
        while queue.order.get_first() != f"sly{number}":
            queue.serve()
        queue.shares.block(f"sly{number}")
        queue.order.discard(f"sly{number}")
        queue.end(f"sly{number}")
    queue.arrive("sly2", "sly", 9000, key=-1)
    assert "sly2" not in [queue.serve() for _ in range(17)]
    assert queue.shares.get_key("sly", 0) >= (18_000, 0)


def test_urgent_work_counts_among_the_others_too() -> None:
    queue = Queue(by_priority=True)
    for number in range(20):
        queue.arrive(f"urgent{number:02}", "sly", 1000)
        queue.arrive(f"sly{number:02}", "sly", 1000, key=-1, priority=5)
        queue.arrive(f"ann{number:02}", "ann", 1000, priority=5)
    served = [queue.serve()[:3] for _ in range(40)]
    assert served == ["urg"] * 20 + ["ann"] * 20


def test_priorities_that_clients_invent_are_bounded_while_the_engine_is_busy() -> None:
    queue = Queue(by_priority=True)
    queue.arrive("long", "long")
    queue.start()
    for number in range(2 * MAX_PRIORITIES):
        queue.arrive(f"t{number}", "other", priority=number)
        queue.serve()
    assert len(queue.shares._now) == MAX_PRIORITIES
    assert len(queue.shares._tenants["other"].leads) <= MAX_PRIORITIES


def test_inventing_priorities_makes_no_newcomer_of_the_same_client_go_first() -> None:
    """Those in use before are then forgotten. Whoever comes must not begin at 0 there."""
    queue = Queue(by_priority=True)
    for tenant in ("ann", "bob", "sly"):
        queue.arrive(f"{tenant} is busy", tenant, priority=0)
        queue.start()
    for number in range(100):
        for tenant in ("ann", "bob"):
            queue.arrive(f"{tenant}{number}", tenant, 1000, priority=1)
            queue.serve()
    # It has had less, so these are served in order, and each gets a time of its own.
    for number in range(200 * (MAX_PRIORITIES + 1)):
        queue.arrive(f"sly{number}", "sly", 1000, priority=2 + number % (MAX_PRIORITIES + 1))
        queue.serve()
    assert 1 not in queue.shares._now
    for number in range(9):
        for tenant in ("ann", "bob", "sly's friend"):
            queue.arrive(f"{tenant} {number}", tenant, 1000, priority=1)
    served = [queue.serve()[:3] for _ in range(9)]
    assert sorted(served) == ["ann"] * 3 + ["bob"] * 3 + ["sly"] * 3


@pytest.mark.parametrize("event", ["start", "leave"])
def test_a_turn_costs_the_same_however_many_priorities_its_tenant_invents(event: str) -> None:
    class Counting(dict[int, float]):
        num_read = 0

        def __iter__(self) -> Iterator[int]:
            for each in super().__iter__():
                self.num_read += 1
                yield each

        def keys(self) -> Any:
            self.num_read += len(self)
            return super().keys()

    queue = Queue(by_priority=True)
    queue.arrive("first", "sly", priority=-1)
    own = queue.shares._tenants["sly"]
    own.leads = read = Counting.fromkeys(range(3000), 1.0)
    for number in range(3000):
        queue.arrive(f"t{number:04}", "sly", priority=number)
    for number in range(200):
        if event == "start":
            queue.serve()
        else:
            queue.order.discard(f"t{number:04}")
            queue.end(f"t{number:04}")
    assert read.num_read <= 200 * 2 * MAX_PRIORITIES


def test_tenants_that_left_are_forgotten() -> None:
    queue = Queue()
    for number in range(1000):
        queue.arrive(f"t{number}", f"tenant{number}")
        queue.serve()
    assert len(queue.shares._tenants) < 5
    assert not queue.shares._tenants


def test_tenants_that_clients_invent_are_bounded_while_the_engine_is_busy() -> None:
    queue = Queue()
    queue.arrive("long", "long")
    queue.start()
    for number in range(MAX_NAMES + 100):
        queue.arrive(f"t{number}", f"tenant{number}")
        queue.serve()
    assert len(queue.shares._tenants) == MAX_NAMES + 1


@pytest.mark.parametrize("fair", [True, False])
def test_the_driver_s_order_is_fair_by_default(fair: bool) -> None:
    engine = ToyEngine(KeepFor(), 100, limits=None if fair else Limits(fair_tenants=False))
    for number in range(8):
        tenant = "flood" if number < 6 else "other"
        hints = Hints(job_id=f"{tenant}/{number}", tenant=tenant)
        engine.arrive(f"{tenant}{number}", number, make_tokens(100 * number, 12), [1], hints)
    started = [engine.start_first(9.0) for _ in range(3)]
    assert any(turn_id is not None and turn_id.startswith("other") for turn_id in started) is fair


@pytest.mark.parametrize(
    "weight", [0, -1, 5e-324, "2", True, float("nan"), float("inf"), pytest.param(10**400, id="huge")]
)
def test_a_weight_must_be_a_positive_number_within_bounds(weight: object) -> None:
    with pytest.raises(ConfigError, match="'a' must have from 1e-6 to 1e6, got "):
        Limits(tenant_weights={"a": weight})
