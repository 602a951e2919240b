"""When each turn is due: the same rules for the simulator and the bench."""

from __future__ import annotations

import heapq
import random
from itertools import count
from pathlib import Path

import pytest

from tenuto.core.errors import ConfigError
from tenuto.workload import After, Job, Span, TurnSpec, Workload, load_workload
from tenuto.workload.turn_driver import USER_GAP_S, Due, TurnDriver


def make_job(
    job_id: str,
    arrival_s: float = 0.0,
    num_turns: int = 1,
    *,
    tool_s: float = 0.5,
    parent: str | None = None,
    after: dict[int, tuple[After, ...]] | None = None,
    at_s: tuple[float | None, ...] | None = None,
) -> Job:
    turns = tuple(
        TurnSpec(
            (Span(f"{job_id}/{n}", 10),),
            Span(f"{job_id}/out{n}", 5),
            tool_s=tool_s if n < num_turns - 1 else 0.0,
            after=(after or {}).get(n, ()),
            at_s=at_s[n] if at_s else None,
        )
        for n in range(num_turns)
    )
    return Job(job_id, arrival_s, turns, parent=parent)


def show(dues: list[Due]) -> list[tuple[str, int, float]]:
    return [(due.job.job_id, due.turn, due.at_s) for due in dues]


def play(turns: TurnDriver, duration_s: float) -> dict[tuple[str, int], float]:
    """When each turn is due, if each takes the server as long and the client is never late."""
    dues: dict[tuple[str, int], float] = {}
    events: list[tuple[float, int, str, Due]] = []
    numbers = count()

    def push(new: list[Due]) -> None:
        for due in new:
            dues[due.job.job_id, due.turn] = due.at_s
            heapq.heappush(events, (due.at_s, next(numbers), "sent", due))
            heapq.heappush(events, (due.at_s + duration_s, next(numbers), "finished", due))

    push(turns.start())
    while events:
        now_s, _, event, due = heapq.heappop(events)
        tell = turns.on_sent if event == "sent" else turns.on_finished
        push(tell(due.job.job_id, due.turn, now_s))
    return dues


def test_a_closed_loop_waits_for_the_answer_and_the_tool() -> None:
    turns = TurnDriver(Workload("w", (make_job("a", 1.0, 3), make_job("b", 2.0))))
    assert show(turns.start()) == [("a", 0, 1.0), ("b", 0, 2.0)]
    assert turns.on_sent("a", 0, 1.1) == []
    assert show(turns.on_finished("a", 0, 4.0)) == [("a", 1, 4.5)]
    assert turns.on_finished("b", 0, 4.1) == []
    assert show(turns.on_finished("a", 1, 5.25)) == [("a", 2, 5.75)]
    assert not turns.is_over()
    assert turns.on_finished("a", 2, 6.0) == []
    assert turns.is_over()


def test_an_open_loop_knows_all_times_from_the_start() -> None:
    waits = {1: (After("b", 0, "finished", 9.0),)}
    jobs = (make_job("a", 1.0, 3, at_s=(None, 2.5, 2.6), after=waits), make_job("b", 2.0))
    turns = TurnDriver(Workload("w", jobs, "open"))
    assert show(turns.start()) == [("a", 0, 1.0), ("a", 1, 2.5), ("a", 2, 2.6), ("b", 0, 2.0)]
    assert turns.on_finished("a", 0, 9.0) == []
    # One that fails takes none of the others with it.
    assert turns.on_failed("a", 1, 9.0) == []
    assert turns.on_finished("a", 2, 9.0) == []
    assert turns.on_finished("b", 0, 9.0) == []
    assert turns.is_over()


def make_family() -> tuple[Job, ...]:
    """A job whose sub-agent starts 0.25 s after its first turn was sent; its second turn waits for it."""
    main = make_job("main", 1.0, 2, tool_s=0.5, after={1: (After("sub", 1, "finished", 0.125),)})
    sub = make_job("sub", 3.0, 2, parent="main", after={0: (After("main", 0, "sent", 0.25),)})
    return main, sub


def test_turns_wait_for_other_jobs() -> None:
    turns = TurnDriver(Workload("w", make_family()))
    assert show(turns.start()) == [("main", 0, 1.0)]
    assert show(turns.on_sent("main", 0, 2.0)) == [("sub", 0, 2.25)]
    assert turns.on_finished("main", 0, 3.0) == []  # not before 3.5, but the sub-agent is out
    assert show(turns.on_finished("sub", 0, 4.0)) == [("sub", 1, 4.5)]
    assert show(turns.on_finished("sub", 1, 5.0)) == [("main", 1, 5.125)]
    assert turns.get_root("sub") == "main"
    assert not turns.has_ended("main")
    assert turns.on_finished("main", 1, 6.0) == []
    assert turns.has_ended("main")
    assert turns.is_over()


def test_the_later_of_two_conditions_decides() -> None:
    turns = TurnDriver(Workload("w", make_family()))
    turns.start()
    turns.on_sent("main", 0, 1.0)
    turns.on_finished("sub", 0, 2.0)
    assert turns.on_finished("sub", 1, 3.0) == []
    assert show(turns.on_finished("main", 0, 9.0)) == [("main", 1, 9.5)]


def test_a_failed_turn_drops_what_waits_for_it_and_nothing_else() -> None:
    turns = TurnDriver(Workload("w", (*make_family(), make_job("other", 1.0, 2))))
    turns.start()
    turns.on_sent("main", 0, 1.0)
    # The sub-agent's second turn goes, and with it the main job's second.
    assert turns.on_failed("sub", 0, 2.0) == []
    assert turns.on_finished("main", 0, 3.0) == []
    assert turns.has_ended("main")
    assert not turns.is_over()
    assert show(turns.on_finished("other", 0, 3.0)) == [("other", 1, 3.5)]
    turns.on_finished("other", 1, 4.0)
    assert turns.is_over()


def test_users_take_the_next_job_when_theirs_has_ended() -> None:
    main, sub = make_family()
    turns = TurnDriver(Workload("w", (main, sub, *(make_job(f"j{n}", 100.0 * n) for n in range(3)))), users=2)
    assert show(turns.start()) == [("main", 0, 0.0), ("j0", 0, USER_GAP_S)]
    assert show(turns.on_finished("j0", 0, 1.0)) == [("j1", 0, 1.0)]
    turns.on_sent("main", 0, 0.0)
    # A user whose job fails goes on to the next one, too, but not while its sub-agent still runs.
    assert turns.on_failed("main", 0, 2.0) == []
    assert show(turns.on_failed("sub", 0, 3.0)) == [("j2", 0, 3.0)]
    turns.on_finished("j1", 0, 4.0)
    assert turns.on_finished("j2", 0, 5.0) == []
    assert turns.is_over()


def test_users_who_keep_arrivals_wait_for_the_next_job_to_arrive() -> None:
    jobs = [make_job(name, arrival_s) for name, arrival_s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 9.0))]
    turns = TurnDriver(Workload("w", tuple(jobs)), users=2, keeps_arrivals=True)
    assert show(turns.start()) == [("a", 0, 1.0), ("b", 0, 2.0)]
    assert show(turns.on_finished("b", 0, 5.0)) == [("c", 0, 5.0)]
    assert show(turns.on_finished("a", 0, 6.0)) == [("d", 0, 9.0)]


def test_users_keep_a_sub_agents_distance_from_its_parent() -> None:
    jobs = (make_job("a", 10.0), make_job("b", 50.0, 2), make_job("sub", 51.5, parent="b"))
    turns = TurnDriver(Workload("w", jobs), users=1)
    assert show(turns.start()) == [("a", 0, 0.0)]
    assert show(turns.on_finished("a", 0, 2.0)) == [("b", 0, 2.0), ("sub", 0, 3.5)]


@pytest.mark.parametrize("keeps_arrivals", [False, True])
def test_a_user_begins_with_a_sub_agent_that_comes_before_its_parent(keeps_arrivals: bool) -> None:
    jobs = (make_job("parent", 5.0), make_job("sub", 1.0, parent="parent"), make_job("next", 6.0))
    turns = TurnDriver(Workload("w", jobs), users=1, keeps_arrivals=keeps_arrivals)
    begin_s = 1.0 if keeps_arrivals else 0.0
    assert show(turns.start()) == [("parent", 0, begin_s + 4.0), ("sub", 0, begin_s)]


def test_users_and_jobs_that_wait_for_strangers_do_not_go_together() -> None:
    jobs = (make_job("a"), make_job("b", after={0: (After("a", 0, "sent"),)}))
    with pytest.raises(ConfigError, match="'b' waits for 'a'"):
        TurnDriver(Workload("w", jobs), users=1)


def test_ab8_is_due_as_planned() -> None:
    workload = load_workload("ab8", jps=3.0)
    dues = play(TurnDriver(workload), duration_s=2.0)
    assert len(dues) == 133 * 8
    for job in workload.jobs:
        for index in range(8):
            assert dues[job.job_id, index] == pytest.approx(job.arrival_s + index * 2.5)


def test_swe_bench_is_due_as_planned() -> None:
    workload = load_workload("swe-bench", jps=3.0)
    dues = play(TurnDriver(workload), duration_s=2.0)
    for job in workload.jobs:
        at_s = job.arrival_s
        for index, turn in enumerate(job.turns):
            assert dues[job.job_id, index] == pytest.approx(at_s)
            at_s += 2.0 + turn.tool_s


def test_the_weka_reader_families_end(weka_file: Path) -> None:
    workload = load_workload(weka_file)
    dues = play(TurnDriver(workload), duration_s=1.0)
    assert set(dues) == {(job.job_id, n) for job in workload.jobs for n in range(len(job.turns))}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_every_run_ends(seed: int) -> None:
    """Random families and failures: each turn is sent once or dropped, and all comes to an end."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for n in range(12):
        earlier = [job for job in jobs if job.job_id.startswith(f"f{n % 3}")]
        waits: dict[int, tuple[After, ...]] = {}
        if earlier:
            other = rng.choice(earlier)
            turn, event = rng.randrange(len(other.turns)), rng.choice(["sent", "finished"])
            waits = {rng.randrange(2): (After(other.job_id, turn, event, 0.5),)}
        parent = earlier[0].job_id if earlier else None
        jobs.append(make_job(f"f{n % 3}/{n}", float(n), rng.randint(2, 4), parent=parent, after=waits))
    turns = TurnDriver(Workload("w", tuple(jobs)), users=rng.choice([None, 1, 2, 5]))
    flying, sent = turns.start(), set()
    while flying:
        due = flying.pop(rng.randrange(len(flying)))
        key = (due.job.job_id, due.turn)
        assert key not in sent
        sent.add(key)
        flying += turns.on_sent(*key, due.at_s)
        tell = turns.on_failed if rng.random() < 0.15 else turns.on_finished
        flying += tell(*key, due.at_s + rng.random())
    assert turns.is_over()


def test_turns_that_are_due_at_one_time_come_in_the_workloads_order() -> None:
    """The simulator serves them in this order: what waits is sent as its jobs stand in the workload."""
    together = (After("a", 0, "finished", 0.5),)
    jobs = (
        make_job("a", 1.0, 2, tool_s=0.5),
        make_job("b", 1.0),
        make_job("c", 1.0, parent="a"),
        make_job("e", 9.0, parent="a", after={0: together}),
        make_job("d", 9.0, after={0: together}),
    )
    turns = TurnDriver(Workload("w", jobs))
    assert [due.job.job_id for due in turns.start()] == ["a", "b", "c"]
    assert show(turns.on_finished("a", 0, 2.0)) == [("a", 1, 2.5), ("e", 0, 2.5), ("d", 0, 2.5)]


def test_a_users_next_job_begins_exactly_when_the_last_one_ended() -> None:
    # 0.3 - 0.1 + 0.1 is not 0.3: the simulator would be asked to send a turn in its past.
    turns = TurnDriver(Workload("w", (make_job("a", 0.1), make_job("b", 0.1))), users=1)
    turns.start()
    assert show(turns.on_finished("a", 0, 0.3)) == [("b", 0, 0.3)]
