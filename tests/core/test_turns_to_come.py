"""How many turns jobs of a kind still send, by hand."""

from __future__ import annotations

import pytest

from tenuto.core.jobs import JobState
from tenuto.core.stock_queue import MAX_TURNS, PRIOR_TURNS, TurnsToCome
from tenuto.core.turn_work import MAX_KINDS


def add_jobs(
    turns: TurnsToCome, kind: str | None, num_turns: int, count: int, tenant: str | None = None
) -> None:
    for _ in range(count):
        for number in range(1, num_turns + 1):
            job = make_job(kind, tenant, number)
            if number > 1:
                turns.follow(job)
            turns.finish(job)


def make_job(kind: str | None, tenant: str | None = None, num_turns: int = 1) -> JobState:
    return JobState("job", 0.0, tenant, kind, num_turns)


def get(turns: TurnsToCome, kind: str | None, tenant: str | None = None, num_turns: int = 1) -> float:
    return turns.get(make_job(kind, tenant, num_turns))


def test_agents_send_as_many_turns_as_their_kind_did() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "agent", 8, 200)
    assert get(turns, "agent") == pytest.approx(8, rel=0.15)
    add_jobs(turns, "probe", 1, 200)
    assert get(turns, "probe") == 1.0


def test_strangers_count_as_single_requests() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "agent", 8, 200, tenant="one")
    assert get(turns, "new") == get(turns, None) == 1.0
    # The same prompt of another tenant is another kind.
    assert get(turns, "agent", tenant="two") == 1.0
    # One job is little evidence.
    first = TurnsToCome()
    add_jobs(first, "agent", 8, 1)
    assert 1.0 < get(first, "agent") <= (8 + PRIOR_TURNS) / (1 + PRIOR_TURNS)


def test_jobs_whose_prompt_names_no_kind_are_taken_together_once_they_came_back() -> None:
    turns = TurnsToCome()
    add_jobs(turns, None, 8, 200)
    # The first turn is not counted: such a prompt may be a stranger's. Of the seven others, six come back.
    assert get(turns, None) == 1.0
    assert get(turns, None, num_turns=2) == pytest.approx(7, rel=0.15)
    assert get(turns, None, tenant="two", num_turns=2) == 1.0
    # Single requests say nothing of jobs that came back.
    add_jobs(turns, None, 1, 2000)
    assert get(turns, None, num_turns=2) == pytest.approx(7, rel=0.15)


def test_a_kind_may_change() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "k", 8, 200)
    add_jobs(turns, "k", 1, 2000)
    assert get(turns, "k") == pytest.approx(1.0, abs=0.05)


def test_all_is_bounded() -> None:
    turns = TurnsToCome()
    for _ in range(5000):
        turns.finish(make_job("endless"))
        turns.follow(make_job("endless", num_turns=2))
    assert get(turns, "endless") == MAX_TURNS
    for number in range(2 * MAX_KINDS):
        turns.finish(make_job(f"kind{number}"))
    assert get(turns, "endless") == 1.0
