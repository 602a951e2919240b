"""How many turns jobs of a kind still send, by hand."""

from __future__ import annotations

from dataclasses import replace

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
    assert LEAST_TURNS < get(first, "agent") < get(first, "agent", num_turns=2) < 8


def test_a_kind_that_was_never_seen_is_judged_by_its_own_job_only() -> None:
    """What other kinds do says nothing, because anybody can make kinds."""
    turns = TurnsToCome()
    for number in range(200):
        add_jobs(turns, f"agent {number}", 8, 1)
    assert get(turns, "new") == 1.0
    add_jobs(turns, "new", 1, 1)
    turns.follow(make_job("new", num_turns=2))
    assert get(turns, "new", num_turns=2) == 3


def test_an_id_says_that_a_job_comes_back_until_its_kind_was_seen() -> None:
    turns = TurnsToCome()
    new = make_job("new")
    named = replace(new, is_named=True)
    assert (turns.get(new), turns.get(named)) == (1.0, 3.0)
    add_jobs(turns, "other", 8, 200)
    assert (turns.get(new), turns.get(named)) == (1.0, 3.0)
    add_jobs(turns, "new", 1, 1)
    assert turns.get(new) == turns.get(named) == 1.0


def test_few_ids_with_very_many_turns_say_little_of_single_requests() -> None:
    """They share a kind, as with a known system prompt."""
    turns = TurnsToCome()
    add_jobs(turns, "chat", 1, 20)
    add_jobs(turns, "chat", 2000, 4)
    assert 1 < get(turns, "chat") < 1.3
    # Requests of one id that run in parallel do not come back.
    for number in range(2, 100):
        turns.follow(make_job("chat", num_turns=number))
        turns.finish(make_job("chat", num_turns=number))
    assert get(turns, "chat") < 1.35
    assert get(turns, "chat", num_turns=2) == MAX_TURNS


def test_a_kind_may_change() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "k", 8, 200)
    add_jobs(turns, "k", 1, 2000)
    assert get(turns, "k") == pytest.approx(1.0, abs=0.05)


def test_all_is_bounded() -> None:
    turns = TurnsToCome()
    for _ in range(500):
        turns.finish(make_job("endless"))
        for number in range(2, 50):
            turns.follow(make_job("endless", num_turns=number))
            turns.finish(make_job("endless", num_turns=number))
    assert get(turns, "endless") == MAX_TURNS
    for number in range(2 * MAX_NAMES):
        turns.finish(make_job(f"kind{number}"))
    assert len(turns._turns) <= MAX_NAMES and len(turns._jobs) <= MAX_NAMES
    assert get(turns, "endless") == MAX_TURNS
