"""How many turns jobs of a kind still send, by hand."""

from __future__ import annotations

import pytest

from tenuto.core.kind_counts import MAX_KINDS
from tenuto.core.turns_to_come import MAX_TURNS, PRIOR_TURNS, TurnsToCome


def add_jobs(turns: TurnsToCome, kind: str, num_turns: int, count: int, tenant: str | None = None) -> None:
    for _ in range(count):
        for number in range(num_turns):
            if number:
                turns.follow(tenant, kind)
            turns.finish(tenant, kind)


def test_agents_send_as_many_turns_as_their_kind_did() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "agent", 8, 200)
    assert turns.get(None, "agent") == pytest.approx(8, rel=0.15)
    add_jobs(turns, "probe", 1, 200)
    assert turns.get(None, "probe") == 1.0


def test_strangers_count_as_single_requests() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "agent", 8, 200, tenant="one")
    assert turns.get(None, "new") == turns.get(None, None) == 1.0
    # The same prompt of another tenant is another kind.
    assert turns.get("two", "agent") == 1.0
    # One job is little evidence.
    first = TurnsToCome()
    add_jobs(first, "agent", 8, 1)
    assert 1.0 < first.get(None, "agent") <= (8 + PRIOR_TURNS) / (1 + PRIOR_TURNS)


def test_a_kind_may_change() -> None:
    turns = TurnsToCome()
    add_jobs(turns, "k", 8, 200)
    add_jobs(turns, "k", 1, 2000)
    assert turns.get(None, "k") == pytest.approx(1.0, abs=0.05)


def test_all_is_bounded() -> None:
    turns = TurnsToCome()
    for _ in range(5000):
        turns.finish(None, "endless")
        turns.follow(None, "endless")
    assert turns.get(None, "endless") == MAX_TURNS
    for number in range(2 * MAX_KINDS):
        turns.finish(None, f"kind{number}")
    assert turns.get(None, "endless") == 1.0
