"""The books of a router: every turn is sent to one engine at a time and ends once, whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tenuto.core import dispatcher as dispatcher_module
from tenuto.core.dispatcher import Contents, Dispatcher, FleetLimits, JobBook
from tenuto.core.errors import PolicyError
from tenuto.core.jobs import MAX_TRIED
from tenuto.core.requests import get_bounded_id
from tenuto.core.router import (
    Arrival,
    EngineInfo,
    FleetView,
    Hold,
    Part,
    Route,
    RoutedTurn,
    Router,
    Send,
    Sending,
)


@dataclass
class Notes(Router):
    """Holds while `holds`, else sends home or to the least loaded. Notes what it is told."""

    holds: bool = False
    _turns: list[RoutedTurn] = field(init=False, default_factory=list)
    _ended: list[str] = field(init=False, default_factory=list)

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        if self.holds and not turn.must_go:
            return Hold()
        return Send(turn.engine) if turn.engine else super().route(turn, fleet)

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        self._turns.append(turn)

    def on_job_ended(self, job_id: str, now_s: float) -> None:
        self._ended.append(job_id)


def make(router: Router, names: str = "ab", limits: FleetLimits | None = None, **kwargs: bool) -> Dispatcher:
    dispatcher = Dispatcher(router, limits, **kwargs)  # type: ignore[arg-type]
    for name in names:
        dispatcher.join(EngineInfo(name), 0.0)
    return dispatcher


def test_a_job_that_nobody_names_has_an_id_that_nobody_can_name() -> None:
    """Else a client could take such ids first, and have the jobs of all others sent after its own."""
    router = Notes()
    dispatcher = make(router)
    for number in range(2):
        dispatcher.arrive(Arrival(str(number), None, 100), 0.0)
    for turn in router._turns:
        assert get_bounded_id(turn.job_id) != turn.job_id


def test_a_job_is_remembered_with_its_engine_and_context() -> None:
    router = Notes()
    dispatcher = make(router)
    assert dispatcher.arrive(Arrival("1", "job", 100), 1.0) == [Sending("1", "a")]
    assert dispatcher.engines.ready["a"].num_unstarted_tokens == 100
    dispatcher.first_token("1", 2.0)
    assert dispatcher.engines.ready["a"].num_unstarted_tokens == 0
    assert dispatcher.engines.ready["a"].num_open == 1
    dispatcher.finish("1", 3.0, 7, is_last=False)
    dispatcher.arrive(Arrival("x", "other", 5), 3.0)
    dispatcher.arrive(Arrival("2", "job", 120), 4.0)
    turn = router._turns[-1]
    assert (turn.engine, turn.num_turns, turn.num_context_tokens, turn.num_open) == ("a", 2, 107, 0)
    assert router._ended == []
    dispatcher.finish("2", 5.0, 3, is_last=True)
    assert router._ended == ["job"]


def test_turns_of_a_dead_engine_go_elsewhere_each_once() -> None:
    router = Notes()
    dispatcher = make(router)
    for number in range(4):
        dispatcher.arrive(Arrival(str(number), f"job{number}", 10), 0.0)
    lost = {turn.turn_id for turn in router._turns if turn.turn_id in "02"}
    assert {sending.turn_id for sending in dispatcher.die("a", 1.0)} == lost
    assert dispatcher.engines.ready["b"].num_open == 4
    assert dispatcher.stats.num_resent == 2
    assert dispatcher.die("a", 1.0) == []
    assert router._turns[-1].num_attempts == 1


def test_a_turn_that_an_engine_failed_goes_to_another_one_if_there_is_one() -> None:
    """An engine that fails at once looks idle, so routers would send all to it."""
    dispatcher = make(Notes())
    (sent,) = dispatcher.arrive(Arrival("1", "job", 10), 0.0)
    (again,) = dispatcher.fail("1", 1.0)
    assert {sent.engine, again.engine} == {"a", "b"}
    dispatcher.finish("1", 2.0, 5)
    (later,) = dispatcher.arrive(Arrival("2", "job", 20), 3.0)
    assert later.engine == again.engine, "its job stays where it was answered"
    alone = make(Notes(), "a")
    alone.arrive(Arrival("1", "job", 10), 0.0)
    assert [each.engine for each in alone.fail("1", 1.0)] == ["a"]


def test_an_engine_that_comes_back_has_its_jobs_if_it_drained_and_none_if_it_died() -> None:
    router = Notes()
    dispatcher = make(router, "a")
    for number, leave in enumerate((dispatcher.drain, dispatcher.die)):
        dispatcher.arrive(Arrival(str(number), "job", 100), 0.0)
        dispatcher.finish(str(number), 1.0, 10, is_last=False)
        leave("a", 2.0)
        dispatcher.join(EngineInfo("a"), 3.0)
    dispatcher.arrive(Arrival("2", "job", 100), 4.0)
    assert [turn.engine for turn in router._turns] == [None, "a", None]
    assert dispatcher.stats.num_moves == 0


def test_a_turn_that_waits_out_a_death_does_not_go_back_to_its_kv() -> None:
    router = Notes()
    dispatcher = make(router, "a")
    dispatcher.arrive(Arrival("0", "job", 100), 0.0)
    assert dispatcher.die("a", 1.0) == []
    assert dispatcher.join(EngineInfo("a"), 2.0) == [Sending("0", "a")]
    assert router._turns[-1].engine is None


def test_without_an_engine_turns_wait_for_one() -> None:
    dispatcher = make(Notes(), "a")
    dispatcher.arrive(Arrival("1", "job", 10), 0.0)
    assert dispatcher.die("a", 1.0) == []
    assert dispatcher.num_held == 1
    assert dispatcher.join(EngineInfo("b"), 2.0) == [Sending("1", "b")]


def test_a_started_job_waits_for_no_new_one_once_an_engine_is_there() -> None:
    """The router may hold new jobs for ten minutes, and a turn behind them would wait as long."""
    router = Notes()
    dispatcher = make(router, "a")
    dispatcher.arrive(Arrival("1", "job", 10), 0.0)
    dispatcher.finish("1", 1.0, 5)
    dispatcher.die("a", 2.0)
    assert dispatcher.arrive(Arrival("2", "new", 10), 3.0) == []
    assert dispatcher.arrive(Arrival("3", "job", 20), 4.0) == []
    router.holds = True
    assert dispatcher.join(EngineInfo("b"), 5.0) == [Sending("3", "b")]
    assert dispatcher.num_held == 1


def test_turns_that_waited_for_an_engine_count_among_those_that_may_be_held() -> None:
    router = Notes(holds=True)
    dispatcher = make(router, "", FleetLimits(max_held=1))
    for number in range(3):
        assert dispatcher.arrive(Arrival(f"{number}", f"job{number}", 10), number) == []
    assert dispatcher.join(EngineInfo("a"), 3.0) == [Sending("0", "a"), Sending("1", "a")]
    assert dispatcher.num_held == 1


def test_a_draining_engine_keeps_its_open_turns_and_gets_no_new_ones() -> None:
    dispatcher = make(Notes())
    dispatcher.arrive(Arrival("1", "job", 10), 0.0)
    dispatcher.drain("a", 1.0)
    dispatcher.finish("1", 2.0, 5)
    assert dispatcher.arrive(Arrival("2", "job", 20), 3.0) == [Sending("2", "b")]
    assert dispatcher.stats.num_moves == 0, "it could not stay"
    dispatcher.join(EngineInfo("a"), 4.0)
    assert dispatcher.arrive(Arrival("3", "new", 20), 4.0) == [Sending("3", "a")]


def test_held_turns_go_when_something_ends_and_at_the_latest_after_a_while() -> None:
    router = Notes()
    dispatcher = make(router, limits=FleetLimits(max_held_s=10.0))
    dispatcher.arrive(Arrival("0", "zero", 10), 0.0)
    router.holds = True
    assert dispatcher.arrive(Arrival("1", "one", 10), 1.0) == []
    assert dispatcher.arrive(Arrival("2", "two", 10), 2.0) == []
    assert dispatcher.get_next_tick_s() == 2.0, "a second after the oldest was held"
    assert dispatcher.finish("0", 3.0, 1) == []
    assert dispatcher.tick(10.5) == []
    assert dispatcher.get_next_tick_s() == 11.0, "the oldest has waited long enough"
    assert [each.turn_id for each in dispatcher.tick(11.0)] == ["1"]
    router.holds = False
    assert [each.turn_id for each in dispatcher.finish("1", 11.5, 1)] == ["2"]
    assert dispatcher.get_next_tick_s() is None


def test_only_first_turns_are_held() -> None:
    router = Notes()
    dispatcher = make(router)
    dispatcher.arrive(Arrival("1", "job", 10), 0.0)
    dispatcher.finish("1", 1.0, 5)
    router.holds = True
    assert dispatcher.arrive(Arrival("2", "job", 20), 2.0) == [Sending("2", "a")]


def test_a_hot_tenant_waits_behind_its_own_turns() -> None:
    router = Notes(holds=True)
    dispatcher = make(router)
    for number in range(5):
        dispatcher.arrive(Arrival(f"hot{number}", f"h{number}", 10, tenant="hot"), 0.0)
    dispatcher.arrive(Arrival("cold", "c", 10, tenant="zoe"), 1.0)
    router.holds = False
    order = [sending.turn_id for sending in dispatcher.tick(2.0)]
    assert order.index("cold") <= 1
    assert [each for each in order if each != "cold"] == [f"hot{number}" for number in range(5)]


def test_jobs_without_an_id_are_known_by_their_content() -> None:
    router = Notes()
    dispatcher = make(router)
    system, task, tool = Part("s", 50), Part("t", 10), Part("u", 20)
    dispatcher.arrive(Arrival("1", None, 60, (system, task)), 0.0)
    dispatcher.finish("1", 1.0, 5)
    dispatcher.arrive(Arrival("2", None, 65, (system, Part("other", 15))), 2.0)
    dispatcher.arrive(Arrival("3", None, 85, (system, task, Part("out", 5), tool)), 3.0)
    dispatcher.arrive(Arrival("4", None, 85, (system, task, Part("out", 5), tool), tenant="x"), 3.0)
    jobs = [turn.job_id for turn in router._turns]
    assert jobs[2] == jobs[0]
    assert len(set(jobs)) == 3


def test_idle_jobs_are_forgotten_in_the_end() -> None:
    router = Notes()
    dispatcher = make(router, limits=FleetLimits(max_idle_jobs=3))
    for number in range(5):
        dispatcher.arrive(Arrival(str(number), f"job{number}", 10), number)
        dispatcher.finish(str(number), number + 0.5, 1)
    assert router._ended == ["job0", "job1"]


def test_idle_jobs_of_ever_new_tenants_are_forgotten_too() -> None:
    """With one job each, the tenant whose name comes first has its job forgotten: here the newest one."""
    router = Notes()
    dispatcher = make(router, limits=FleetLimits(max_idle_jobs=3))
    for number in range(9):
        dispatcher.arrive(Arrival(str(number), f"job{number}", 10, tenant=f"tenant{9 - number}"), number)
        dispatcher.finish(str(number), number + 0.5, 1)
    assert len(router._ended) == 6


@pytest.mark.parametrize("answer", [None, Send("nowhere"), "a"])
def test_a_router_that_answers_wrongly_is_counted_and_replaced(answer: object) -> None:
    class Wrong(Router):
        def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
            return answer  # type: ignore[return-value]

    dispatcher = make(Wrong())
    assert dispatcher.arrive(Arrival("1", "job", 10), 0.0) == [Sending("1", "a")]
    assert dispatcher.faults == {"route": 1}
    with pytest.raises(PolicyError, match="route"):
        make(Wrong(), strict=True).arrive(Arrival("1", "job", 10), 0.0)


def test_a_turn_that_is_open_cannot_come_again() -> None:
    dispatcher = make(Notes())
    dispatcher.arrive(Arrival("1", "job", 10), 0.0)
    with pytest.raises(ValueError, match="open"):
        dispatcher.arrive(Arrival("1", "job", 10), 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_served_twice_in_a_storm(seed: int) -> None:
    """Engines die, drain and join, attempts fail, clients leave: each turn ends once, and books add up."""
    rng = random.Random(seed)
    dispatcher = make(Notes(holds=False), "abc", FleetLimits(max_held_s=20.0, max_idle_jobs=20))
    where: dict[str, str] = {}
    open_turns: set[str] = set()
    done: list[str] = []

    def note(sendings: list[Sending]) -> None:
        for sending in sendings:
            assert sending.turn_id in open_turns
            assert sending.engine in dispatcher.engines
            where[sending.turn_id] = sending.engine

    for number in range(1500):
        now_s = number * 0.1
        dispatcher.router.holds = rng.random() < 0.3  # type: ignore[attr-defined]
        turn = rng.choice(sorted(where)) if where else None
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                open_turns.add(str(number))
                job = None if rng.random() < 0.2 else f"job{rng.randrange(60)}"
                parts = (Part(str(rng.randrange(9)), 9),)
                arrival = Arrival(str(number), job, 9, parts, tenant=rng.choice([None, "t"]))
                note(dispatcher.arrive(arrival, now_s))
            case 4 | 5 | 6 if turn is not None:
                dispatcher.first_token(turn, now_s)
                del where[turn]
                open_turns.remove(turn)
                done.append(turn)
                note(dispatcher.finish(turn, now_s, 3, is_last=rng.random() < 0.3))
            case 7 if turn is not None:
                del where[turn]
                note(dispatcher.fail(turn, now_s))
            case 8 if turn is not None:
                del where[turn]
                open_turns.remove(turn)
                note(dispatcher.abort(turn, now_s))
            case 9:
                name = rng.choice("abc")
                action = rng.choice(["die", "drain", "join", "join"])
                if action == "join":
                    note(dispatcher.join(EngineInfo(name), now_s))
                elif action == "drain":
                    dispatcher.drain(name, now_s)
                else:
                    for one in [one for one, engine in where.items() if engine == name]:
                        del where[one]
                    note(dispatcher.die(name, now_s))
        note(dispatcher.tick(now_s))
        assert dispatcher.num_held == len(open_turns) - len(where)
        for seen in dispatcher.engines.ready.values():
            assert seen.num_open == sum(engine == seen.name for engine in where.values())
    assert len(done) == len(set(done)) > 100
    assert not dispatcher.faults


def test_a_client_whose_prompts_end_everywhere_does_not_make_look_ups_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents, ids = Contents(), list(range(2000))

    def make_arrival(length: int) -> Arrival:
        return Arrival(
            "turn", None, length, parts=tuple(dispatcher_module._cut(ids[:length])), text=ids[:length]
        )

    for length in range(130, 1500):
        contents.remember(str(length), JobBook(None), make_arrival(length))
    assert contents.find(make_arrival(1900)) == "1499"
    looked: list[object] = []
    arrival = make_arrival(1400)
    monkeypatch.setattr(dispatcher_module, "_write", lambda value: looked.append(value) or "other")
    assert contents.find(arrival) is None
    assert len(looked) == MAX_TRIED
