"""Which workload is run, and when each turn is due."""

from __future__ import annotations

import heapq
import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tenuto.client.load.plan import USER_GAP_S, Agenda, Due
from tenuto.core.errors import ConfigError, DataError
from tenuto.workload import After, Job, Span, TurnSpec, Workload, load_workload
from tenuto.workload.load_options import LoadOptions, make_workload


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


def play(agenda: Agenda, duration_s: float) -> dict[tuple[str, int], float]:
    """When each turn is due, if each takes the server as long and the client is never late."""
    dues: dict[tuple[str, int], float] = {}
    events: list[tuple[float, int, str, Due]] = []
    numbers = count()

    def push(new: list[Due]) -> None:
        for due in new:
            dues[due.job.job_id, due.turn] = due.at_s
            heapq.heappush(events, (due.at_s, next(numbers), "sent", due))
            heapq.heappush(events, (due.at_s + duration_s, next(numbers), "finished", due))

    push(agenda.start())
    while events:
        now_s, _, event, due = heapq.heappop(events)
        tell = agenda.on_sent if event == "sent" else agenda.on_finished
        push(tell(due.job.job_id, due.turn, now_s))
    return dues


def test_a_closed_loop_waits_for_the_answer_and_the_tool() -> None:
    agenda = Agenda(Workload("w", (make_job("a", 1.0, 3), make_job("b", 2.0))))
    assert show(agenda.start()) == [("a", 0, 1.0), ("b", 0, 2.0)]
    assert agenda.on_sent("a", 0, 1.1) == []
    assert show(agenda.on_finished("a", 0, 4.0)) == [("a", 1, 4.5)]
    assert agenda.on_finished("b", 0, 4.1) == []
    assert show(agenda.on_finished("a", 1, 5.25)) == [("a", 2, 5.75)]
    assert not agenda.is_over()
    assert agenda.on_finished("a", 2, 6.0) == []
    assert agenda.is_over()


def test_an_open_loop_knows_all_times_from_the_start() -> None:
    waits = {1: (After("b", 0, "finished", 9.0),)}
    jobs = (make_job("a", 1.0, 3, at_s=(None, 2.5, 2.6), after=waits), make_job("b", 2.0))
    agenda = Agenda(Workload("w", jobs, "open"))
    assert show(agenda.start()) == [("a", 0, 1.0), ("a", 1, 2.5), ("a", 2, 2.6), ("b", 0, 2.0)]
    assert agenda.on_finished("a", 0, 9.0) == []
    # One that fails takes none of the others with it.
    assert agenda.on_failed("a", 1, 9.0) == []
    assert agenda.on_finished("a", 2, 9.0) == []
    assert agenda.on_finished("b", 0, 9.0) == []
    assert agenda.is_over()


def make_family() -> tuple[Job, ...]:
    """A job whose sub-agent starts 0.25 s after its first turn was sent; its second turn waits for it."""
    main = make_job("main", 1.0, 2, tool_s=0.5, after={1: (After("sub", 1, "finished", 0.125),)})
    sub = make_job("sub", 3.0, 2, parent="main", after={0: (After("main", 0, "sent", 0.25),)})
    return main, sub


def test_turns_wait_for_other_jobs() -> None:
    agenda = Agenda(Workload("w", make_family()))
    assert show(agenda.start()) == [("main", 0, 1.0)]
    assert show(agenda.on_sent("main", 0, 2.0)) == [("sub", 0, 2.25)]
    assert agenda.on_finished("main", 0, 3.0) == []  # not before 3.5, but the sub-agent is out
    assert show(agenda.on_finished("sub", 0, 4.0)) == [("sub", 1, 4.5)]
    assert show(agenda.on_finished("sub", 1, 5.0)) == [("main", 1, 5.125)]
    assert agenda.get_root("sub") == "main"
    assert not agenda.has_ended("main")
    assert agenda.on_finished("main", 1, 6.0) == []
    assert agenda.has_ended("main")
    assert agenda.is_over()


def test_the_later_of_two_conditions_decides() -> None:
    agenda = Agenda(Workload("w", make_family()))
    agenda.start()
    agenda.on_sent("main", 0, 1.0)
    agenda.on_finished("sub", 0, 2.0)
    assert agenda.on_finished("sub", 1, 3.0) == []
    assert show(agenda.on_finished("main", 0, 9.0)) == [("main", 1, 9.5)]


def test_a_failed_turn_drops_what_waits_for_it_and_nothing_else() -> None:
    agenda = Agenda(Workload("w", (*make_family(), make_job("other", 1.0, 2))))
    agenda.start()
    agenda.on_sent("main", 0, 1.0)
    # The sub-agent's second turn goes, and with it the main job's second.
    assert agenda.on_failed("sub", 0, 2.0) == []
    assert agenda.on_finished("main", 0, 3.0) == []
    assert agenda.has_ended("main")
    assert not agenda.is_over()
    assert show(agenda.on_finished("other", 0, 3.0)) == [("other", 1, 3.5)]
    agenda.on_finished("other", 1, 4.0)
    assert agenda.is_over()


def test_users_take_the_next_job_when_theirs_has_ended() -> None:
    main, sub = make_family()
    agenda = Agenda(Workload("w", (main, sub, *(make_job(f"j{n}", 100.0 * n) for n in range(3)))), users=2)
    assert show(agenda.start()) == [("main", 0, 0.0), ("j0", 0, USER_GAP_S)]
    assert show(agenda.on_finished("j0", 0, 1.0)) == [("j1", 0, 1.0)]
    agenda.on_sent("main", 0, 0.0)
    # A user whose job fails goes on to the next one, too, but not while its sub-agent still runs.
    assert agenda.on_failed("main", 0, 2.0) == []
    assert show(agenda.on_failed("sub", 0, 3.0)) == [("j2", 0, 3.0)]
    agenda.on_finished("j1", 0, 4.0)
    assert agenda.on_finished("j2", 0, 5.0) == []
    assert agenda.is_over()


def test_users_keep_a_sub_agents_distance_from_its_parent() -> None:
    jobs = (make_job("a", 10.0), make_job("b", 50.0, 2), make_job("sub", 51.5, parent="b"))
    agenda = Agenda(Workload("w", jobs), users=1)
    assert show(agenda.start()) == [("a", 0, 0.0)]
    assert show(agenda.on_finished("a", 0, 2.0)) == [("b", 0, 2.0), ("sub", 0, 3.5)]


def test_users_and_jobs_that_wait_for_strangers_do_not_go_together() -> None:
    jobs = (make_job("a"), make_job("b", after={0: (After("a", 0, "sent"),)}))
    with pytest.raises(ConfigError, match="'b' waits for 'a'"):
        Agenda(Workload("w", jobs), users=1)


def test_ab8_is_due_as_planned() -> None:
    workload = load_workload("ab8", jps=3.0)
    dues = play(Agenda(workload), duration_s=2.0)
    assert len(dues) == 133 * 8
    for job in workload.jobs:
        for index in range(8):
            assert dues[job.job_id, index] == pytest.approx(job.arrival_s + index * 2.5)


def test_swe_bench_is_due_as_planned() -> None:
    workload = load_workload("swe-bench", jps=3.0)
    dues = play(Agenda(workload), duration_s=2.0)
    for job in workload.jobs:
        at_s = job.arrival_s
        for index, turn in enumerate(job.turns):
            assert dues[job.job_id, index] == pytest.approx(at_s)
            at_s += 2.0 + turn.tool_s


def test_the_weka_reader_families_end(weka_file: Path) -> None:
    workload = load_workload(weka_file)
    dues = play(Agenda(workload), duration_s=1.0)
    assert set(dues) == {(job.job_id, n) for job in workload.jobs for n in range(len(job.turns))}


@pytest.fixture
def weka_file(tmp_path: Path) -> Path:
    """A session with a sub-agent that it waits for."""

    def make_request(**fields: Any) -> dict[str, Any]:
        return {"type": "n", "in": 128, "out": 4, "hash_ids": [1, 2], "api_time": 1.0, **fields}

    agent = {
        "type": "subagent", "t": 9.0, "agent_id": "x", "status": "completed", "duration_ms": 5000,
        "requests": [make_request(t=0.0), make_request(t=3.0, think_time=2.0)],
    }  # fmt: skip
    requests = [make_request(t=0.0, stop="tool_use"), agent, make_request(t=10.0, think_time=9.0)]
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}))
    return path


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
    agenda = Agenda(Workload("w", tuple(jobs)), users=rng.choice([None, 1, 2, 5]))
    flying, sent = agenda.start(), set()
    while flying:
        due = flying.pop(rng.randrange(len(flying)))
        key = (due.job.job_id, due.turn)
        assert key not in sent
        sent.add(key)
        flying += agenda.on_sent(*key, due.at_s)
        tell = agenda.on_failed if rng.random() < 0.15 else agenda.on_finished
        flying += tell(*key, due.at_s + rng.random())
    assert agenda.is_over()


def test_options_make_the_workload_of_the_same_name() -> None:
    assert make_workload(LoadOptions(jps=3.0)) == load_workload("ab8", jps=3.0)
    options = LoadOptions(workload="bfcl", jps=2.0, window_s=9.0, seed=7, arrival="gamma:2")
    assert make_workload(options) == load_workload("bfcl", jps=2.0, window_s=9.0, seed=7, arrival="gamma:2")


def test_scale_speed_and_max_jobs() -> None:
    plain = make_workload(LoadOptions(jps=3.0))
    workload = make_workload(LoadOptions(jps=3.0, scale_lengths=0.5, scale_rate=2.0, max_jobs=4))
    assert [job.job_id for job in workload.jobs] == [job.job_id for job in plain.jobs[:4]]
    for short, long in zip(workload.jobs, plain.jobs, strict=False):
        assert short.arrival_s == long.arrival_s / 2
        assert short.turns[0].num_prompt_tokens == long.turns[0].num_prompt_tokens / 2


def test_max_jobs_counts_jobs_with_all_they_start(weka_file: Path) -> None:
    jobs = make_workload(LoadOptions(workload=str(weka_file), max_jobs=1)).jobs
    assert [job.job_id for job in jobs] == ["s", "s/x"]


def test_users_take_any_number_of_generated_jobs() -> None:
    workload = make_workload(LoadOptions(users=3, max_jobs=7))
    assert len(workload.jobs) == 7
    assert workload.jobs[0].turns == load_workload("ab8", jps=1.0).jobs[0].turns


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LoadOptions(), "Say --jps 1 .* or --users 8"),
        (LoadOptions(users=3, max_jobs=7, arrival="fixed"), "--arrival fixed .* give --jps"),
        (LoadOptions(workload="nowhere.jsonl", arrival="fixed"), "--arrival fixed .* give --jps"),
        (LoadOptions(jps=1.0, max_jobs=0), "--max-jobs must be 1 or more"),
        (LoadOptions(jps=1.0, window_s=0.01), "no job arrives"),
        (LoadOptions(jps=1.0, arrival="sometimes"), "arrival must be"),
        (LoadOptions(jps=1.0, loop="open"), "no recorded time"),
        (LoadOptions(jps=1.0, scale_lengths=0.0), "scale factor"),
        (LoadOptions(users=3), "say --max-jobs"),
        (LoadOptions(users=0, max_jobs=3), "--users must be 1 or more"),
        (LoadOptions(users=3, jps=1.0), "with --users"),
        (LoadOptions(users=3, loop="open"), "with --users"),
        (LoadOptions(users=3, scale_rate=2.0, max_jobs=9), "leave --jps, --window, --scale-rate"),
        (LoadOptions(jps=1.0, loop="half"), "--loop must be one of closed, open; got 'half'"),  # type: ignore[arg-type]
        (
            LoadOptions(jps=1.0, hints="some"),
            "--hints must be one of none, job, last, tool, tool-time, wrong",
        ),
        (LoadOptions(workload="nowhere.jsonl"), "no such file"),
    ],
)
def test_options_that_make_no_sense(options: LoadOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_workload(options)


def test_a_broken_trace_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"session": "a"}\n')
    with pytest.raises(DataError, match=r"trace.jsonl:1"):
        make_workload(LoadOptions(workload=str(path)))
