"""Expected remaining work, by hand."""

from __future__ import annotations

import pytest

from tenuto.learn.remaining_turns import RemainingTurns
from tenuto.learn.remaining_work import RemainingWork, get_mean_left_s


def test_turns_left_are_the_survivors_mean() -> None:
    turns = RemainingTurns([2, 4, 6])
    assert turns.get_mean_left(0) == 4.0  # (2 + 4 + 6) / 3
    assert turns.get_mean_left(2) == 3.0  # (4 + 6) / 2 - 2
    assert turns.get_mean_left(5) == 1.0
    # Who outlived all others is expected to have one turn more, and so is everyone before any job ended.
    assert turns.get_mean_left(6) == 1.0
    assert RemainingTurns().get_mean_left(3) == 1.0


def test_only_the_latest_thousand_jobs_count() -> None:
    turns = RemainingTurns([9] * 1000)
    for _ in range(1000):
        turns.observe(3)
    assert len(turns) == 1000
    assert turns.get_mean_left(0) == 3.0
    with pytest.raises(ValueError, match="a turn at least"):
        turns.observe(0)


def make_work(num_jobs: int = 10) -> RemainingWork:
    """Jobs of 4 turns, each of 100."""
    work = RemainingWork()
    for n in range(num_jobs):
        for _ in range(4):
            work.observe_turn(f"job{n}", 100.0)
        work.end_job(f"job{n}")
    return work


def test_work_left_is_turns_left_times_the_work_of_a_turn() -> None:
    work = make_work()
    assert work.get_work_left("new") == pytest.approx(4 * 100)
    # The next turn is known to take 250; three more are expected.
    assert work.get_work_left("new", 250.0) == pytest.approx(250 + 3 * 100)
    work.observe_turn("big", 500.0)
    # One turn of its own counts as much as the mean of all, 109 by now: (109 + 500) / 2 for 3 more turns.
    assert work.get_work_left("big") == pytest.approx(3 * (109.9 + 500) / 2, rel=0.01)


def test_trust_is_earned() -> None:
    assert RemainingWork().get_trust() == 0.0
    # Jobs that are all alike can be foreseen exactly.
    assert make_work(20).get_trust() > 0.9
    # The first of all jobs are no evidence, and neither are jobs whose length says nothing.
    erratic = RemainingWork()
    for n in range(200):
        for _ in range(1 + (n * 7919) % 13):
            erratic.observe_turn(f"job{n}", 10.0 ** ((n * 31) % 4))
        erratic.end_job(f"job{n}")
    assert erratic.get_trust() < 0.9


def test_time_left_of_those_that_took_longer() -> None:
    assert get_mean_left_s([1.0, 2.0, 6.0], 0.0) == 3.0
    assert get_mean_left_s([1.0, 2.0, 6.0], 1.5) == 2.5  # (2 + 6) / 2 - 1.5
    assert get_mean_left_s([1.0, 2.0, 6.0], 6.0) is None
    assert get_mean_left_s([], 0.0) is None


def test_state() -> None:
    work, again = make_work(), RemainingWork()
    again.set_state(work.get_state())
    assert again.get_state() == work.get_state()
    assert again.get_work_left("new") == work.get_work_left("new")
    with pytest.raises(ValueError, match="2 numbers"):
        again.set_state({**work.get_state(), "work": [1.0]})
    assert again.get_state() == work.get_state()
