"""How many turns jobs of a kind still send, by hand."""

from __future__ import annotations

import pytest

from tenuto.core.jobs import JobState
from tenuto.core.stock_queue import LEAST_TURNS, MAX_TURNS, TurnsToCome
from tenuto.core.turn_work import MAX_NAMES


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
    assert get(turns, "probe") == pytest.approx(1, abs=0.01)


def test_other_tenants_and_a_single_job_say_little() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "agent", 8, 200, tenant="one")
    assert get(turns, "new") == get(turns, None) == get(turns, "agent", tenant="two") == 1.0
    first = TurnsToCome()
    add_jobs(first, "agent", 8, 1)
    assert LEAST_TURNS < get(first, "agent") < 8


def test_a_new_kind_counts_as_earlier_new_kinds_of_its_tenant() -> None:
    turns = TurnsToCome()
    for number in range(200):
        add_jobs(turns, f"agent {number}", 8, 1)
    assert get(turns, "new") == pytest.approx(8, rel=0.15)
    assert get(turns, "new", tenant="two") == 1.0
    # Single requests with a prompt of their own are new kinds, too.
    for number in range(200):
        add_jobs(turns, f"request {number}", 1, 1)
    assert 1 < get(turns, "new") < LEAST_TURNS
    # A kind that was seen often is judged by itself.
    add_jobs(turns, "agent", 8, 200)
    assert get(turns, "agent") == pytest.approx(8, rel=0.15)


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
    for number in range(2 * MAX_NAMES):
        turns.finish(make_job(f"kind{number}"))
    assert len(turns._kinds) <= MAX_NAMES
    assert get(turns, "endless") == MAX_TURNS
