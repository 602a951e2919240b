"""Expected remaining work, by hand."""

from __future__ import annotations

import json
import math
import random

import pytest

from tenuto.estimators.remaining_work import MAX_TURNS, RemainingWork, get_mean_left_s


def add_job(work: RemainingWork, name: str, turns: list[float]) -> None:
    for turn in turns:
        work.observe_turn(name, turn)
    work.end_job(name)


def make_work(num_jobs: int = 400) -> RemainingWork:
    """Jobs of 4 turns, each of 100."""
    work = RemainingWork()
    for n in range(num_jobs):
        add_job(work, f"job{n}", [100.0] * 4)
    return work


def test_work_left_is_that_of_the_turns_to_come() -> None:
    work = make_work()
    assert work.get_work_left("new") == pytest.approx(400, rel=0.01)
    # The next turn is known to take 250; three more are expected.
    assert work.get_work_left("new", 250.0) == pytest.approx(250 + 300, rel=0.01)
    work.observe_turn("new", 100.0)
    assert work.get_work_left("new") == pytest.approx(300, rel=0.01)


def test_turns_have_the_mean_of_their_number() -> None:
    work = RemainingWork()
    for n in range(400):
        add_job(work, f"job{n}", [10.0, 200.0, 3000.0])
    work.observe_turn("new", 10.0)
    assert work.get_work_left("new") == pytest.approx(3200, rel=0.02)
    work.observe_turn("new", 200.0)
    assert work.get_work_left("new") == pytest.approx(3000, rel=0.02)


def test_a_turn_may_be_the_last_as_often_as_it_was() -> None:
    work = RemainingWork()
    for n in range(400):
        add_job(work, f"job{n}", [100.0] * (2 if n % 2 else 4))
    # Half of those with two turns have two more, the others none; who is back has two.
    assert work.get_work_left("new") == pytest.approx(300, rel=0.02)
    work.observe_turn("new", 100.0)
    work.observe_turn("new", 100.0)
    assert work.get_work_left("new") == pytest.approx(200, rel=0.02)


def test_jobs_at_work_count_too() -> None:
    """Else those that end first, which are short, would stand for all."""
    work = RemainingWork()
    for n in range(100):
        for _ in range(3):
            work.observe_turn(f"long{n}", 100.0)
    add_job(work, "short", [100.0])
    # One of a hundred ended with its first turn.
    assert work.get_work_left("new") > 300


def test_a_job_of_large_turns_is_expected_to_have_more_of_them() -> None:
    rng = random.Random(1)
    work = RemainingWork()
    for n in range(1000):
        factor = math.exp(rng.gauss(0, 1))
        add_job(work, f"job{n}", [100 * factor * math.exp(rng.gauss(0, 0.5)) for _ in range(4)])
    for name, size in (("large", 1000.0), ("small", 20.0)):
        work.observe_turn(name, size)
        work.observe_turn(name, size)
    assert work.get_work_left("large") > 10 * work.get_work_left("small")
    # Jobs whose turns differ by chance alone say nothing of the next ones.
    chance = RemainingWork()
    for n in range(1000):
        add_job(chance, f"job{n}", [100 * math.exp(rng.gauss(0, 1)) for _ in range(4)])
    for name, size in (("large", 1000.0), ("small", 20.0)):
        chance.observe_turn(name, size)
        chance.observe_turn(name, size)
    assert chance.get_work_left("large") < 1.5 * chance.get_work_left("small")


def test_before_any_job_there_is_an_answer() -> None:
    work = RemainingWork()
    assert work.get_work_left("new") > 0
    assert work.get_work_left("new", 70.0) >= 70.0
    work.observe_turn("new", 100.0)
    assert math.isfinite(work.get_work_left("new")) and work.get_work_left("new") > 0


def test_asking_changes_no_later_answer() -> None:
    asked, silent = RemainingWork(), RemainingWork()
    for n in range(100):
        for work in (asked, silent):
            work.observe_turn("long", 10.0 + n)
        asked.get_work_left("new")
    assert asked.get_work_left("long") == silent.get_work_left("long")


def test_endless_jobs_need_no_more_than_bounded_memory() -> None:
    work = RemainingWork()
    for _ in range(3 * MAX_TURNS):
        work.observe_turn("endless", 10.0)
    assert len(work.get_state()["turns"]) == MAX_TURNS
    assert math.isfinite(work.get_work_left("endless"))
    work.end_job("endless")
    work.end_job("never seen")


def test_trust_is_earned() -> None:
    assert RemainingWork().get_trust() == 0.0
    # Jobs that are all alike can be foreseen, once a few have ended.
    assert make_work(100).get_trust() > 0.9
    erratic, rng = RemainingWork(), random.Random(2)
    for n in range(400):
        add_job(erratic, f"job{n}", [10.0 ** rng.randrange(4) for _ in range(rng.randrange(1, 14))])
    assert erratic.get_trust() < 0.6


def test_time_left_of_those_that_took_longer() -> None:
    assert get_mean_left_s([1.0, 2.0, 6.0], 0.0) == 3.0
    assert get_mean_left_s([1.0, 2.0, 6.0], 1.5) == 2.5  # (2 + 6) / 2 - 1.5
    assert get_mean_left_s([1.0, 2.0, 6.0], 6.0) is None
    assert get_mean_left_s([], 0.0) is None


def test_state() -> None:
    work, again = make_work(), RemainingWork()
    again.observe_turn("before", 5.0)
    again.set_state(json.loads(json.dumps(work.get_state())))
    assert again.get_state() == work.get_state()
    assert again.get_work_left("new") == work.get_work_left("new")
    assert again.get_trust() == work.get_trust()


@pytest.mark.parametrize(
    "damage",
    [
        {"turns": [[1.0, 2.0]]},
        {"turns": [[0.0, 0.0, 0.0, 0.0]]},
        {"turns": [[1.0, 5.0, -2.0, 0.0]]},
        {"turns": [[1.0, 1.0, 0.0, 0.0]] * (MAX_TURNS + 1)},
        {"spread": [1.0]},
        {"agreement": [math.nan] * 6},
        {"turns": "abcd"},
    ],
)
def test_a_damaged_state_changes_nothing(damage: dict[str, object]) -> None:
    work = make_work(10)
    before = repr(work)
    with pytest.raises((ValueError, TypeError)):
        work.set_state({**work.get_state(), **damage})
    assert repr(work) == before
