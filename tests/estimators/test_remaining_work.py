"""Expected remaining work, by hand."""

from __future__ import annotations

import json
import math
import random

import pytest

from tenuto.core.types import Job
from tenuto.estimators.remaining_work import MAX_TURNS, RemainingWork


def make_job(name: str, kind: str | None = None) -> Job:
    return Job(name, 0.0, 1, None, kind)


def observe(work: RemainingWork, name: str, size: float, *, stops: bool = False, kind: str = "k") -> None:
    """A turn of which a tenth is generated."""
    work.observe_turn(make_job(name, kind), 0.9 * size, size, stops=stops)


def add_job(work: RemainingWork, name: str, turns: list[float], kind: str = "k") -> None:
    for number, turn in enumerate(turns, 1):
        observe(work, name, turn, stops=number == len(turns), kind=kind)
    work.end_job(name)


def make_work(num_jobs: int = 400) -> RemainingWork:
    """Jobs of 4 turns, each of 100."""
    work = RemainingWork()
    for n in range(num_jobs):
        add_job(work, f"job{n}", [100.0] * 4)
    return work


def test_work_left_is_that_of_the_turns_to_come() -> None:
    work = make_work()
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(400, rel=0.01)
    # The prompt of the next turn is known: 90 new tokens and 10 to generate are the mean.
    assert work.get_rank(make_job("new", "k"), 90.0, is_last=False) == pytest.approx(400, rel=0.01)
    # Of a last turn, nothing comes after it.
    assert work.get_rank(make_job("new", "k"), 90.0, is_last=True) == pytest.approx(100, rel=0.01)
    observe(work, "new", 100.0)
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(300, rel=0.01)


def test_turns_have_the_mean_of_their_number() -> None:
    work = RemainingWork()
    for n in range(400):
        add_job(work, f"job{n}", [10.0, 200.0, 3000.0])
    observe(work, "new", 10.0)
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(3200, rel=0.02)
    observe(work, "new", 200.0)
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(3000, rel=0.05)


def test_a_turn_may_be_the_last_as_often_as_it_was() -> None:
    work = RemainingWork()
    for n in range(400):
        add_job(work, f"job{n}", [100.0] * (2 if n % 2 else 4))
    # Half of those with two turns have two more, the others none; who is back has two. Guesses are drawn
    # towards the mean, because half of them are wrong.
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(300, rel=0.02)
    observe(work, "new", 100.0)
    observe(work, "new", 100.0)
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(200, rel=0.25)


def test_jobs_at_work_count_too() -> None:
    """Else those that end first, which are short, would stand for all."""
    work = RemainingWork()
    for n in range(100):
        for _ in range(3):
            observe(work, f"long{n}", 100.0)
    add_job(work, "short", [100.0])
    # One of a hundred ended with its first turn.
    assert work.get_work_left(make_job("new", "k")) > 300


def test_a_job_of_large_turns_is_expected_to_have_more_of_them() -> None:
    rng = random.Random(1)
    work = RemainingWork()
    for n in range(1000):
        factor = math.exp(rng.gauss(0, 1))
        add_job(work, f"job{n}", [100 * factor * math.exp(rng.gauss(0, 0.5)) for _ in range(4)])
    for name, size in (("large", 1000.0), ("small", 20.0)):
        observe(work, name, size)
        observe(work, name, size)
    assert work.get_work_left(make_job("large", "k")) > 10 * work.get_work_left(make_job("small", "k"))
    # Jobs whose turns differ by chance alone say nothing of the next ones.
    chance = RemainingWork()
    for n in range(1000):
        add_job(chance, f"job{n}", [100 * math.exp(rng.gauss(0, 1)) for _ in range(4)])
    for name, size in (("large", 1000.0), ("small", 20.0)):
        observe(chance, name, size)
        observe(chance, name, size)
    assert chance.get_work_left(make_job("large", "k")) < 1.5 * chance.get_work_left(make_job("small", "k"))


def test_the_turn_that_waits_tells_of_those_to_come() -> None:
    rng = random.Random(1)
    work = RemainingWork()
    for n in range(500):
        factor = math.exp(rng.gauss(0, 1))
        add_job(work, f"job{n}", [100 * factor * math.exp(rng.gauss(0, 0.2)) for _ in range(4)])
    small, large = (work.get_rank(make_job("new", "k"), size, is_last=False) for size in (45.0, 450.0))
    # Several times as much, not 405 tokens more.
    assert large > 4 * small


def test_a_short_turn_after_which_the_job_pauses_goes_early() -> None:
    """People think for minutes; what they send then does not compete with what waits now."""
    ranks = []
    for stops in (True, False):
        work = RemainingWork()
        for n in range(100):
            for _ in range(8):
                observe(work, f"job{n}", 300.0, stops=stops)
                work.come_back(f"job{n}", 60.0)
            work.end_job(f"job{n}")
        ranks.append(work.get_rank(make_job("new"), 270.0, is_last=False))
    chat, agent = ranks
    assert chat <= 305 and agent > 1500


def test_an_agent_whose_tools_cannot_be_seen_is_no_chat() -> None:
    work = RemainingWork()
    for n in range(100):
        for _ in range(8):
            observe(work, f"agent{n}", 300.0, stops=True)
            work.come_back(f"agent{n}", 1.0)
        work.end_job(f"agent{n}")
    assert work.get_rank(make_job("new", "k"), 270.0, is_last=False) > 1500


def test_before_any_job_there_is_an_answer() -> None:
    work = RemainingWork()
    assert work.get_work_left(make_job("new", "k")) > 0
    assert work.get_rank(make_job("new", "k"), 70.0, is_last=False) > 0
    observe(work, "new", 100.0)
    assert (
        math.isfinite(work.get_work_left(make_job("new", "k")))
        and work.get_work_left(make_job("new", "k")) > 0
    )


def test_asking_changes_no_later_answer() -> None:
    asked, silent = RemainingWork(), RemainingWork()
    for n in range(100):
        for work in (asked, silent):
            observe(work, "long", 10.0 + n)
        asked.get_work_left(make_job("new", "k"))
    assert asked.get_work_left(make_job("long", "k")) == silent.get_work_left(make_job("long", "k"))


def test_endless_jobs_need_no_more_than_bounded_memory() -> None:
    work = RemainingWork()
    for _ in range(3 * MAX_TURNS):
        observe(work, "endless", 10.0)
    assert len(work.get_state()["turns"]) == MAX_TURNS
    assert math.isfinite(work.get_work_left(make_job("endless", "k")))
    work.end_job("endless")
    work.end_job("never seen")


def get_trust(work: RemainingWork) -> float:
    return work._agreement.get_correlation()


def test_trust_is_earned() -> None:
    assert get_trust(RemainingWork()) == 0.0
    # Jobs that are all alike can be foreseen, once a few have ended.
    assert get_trust(make_work(100)) > 0.9
    erratic, rng = RemainingWork(), random.Random(2)
    for n in range(400):
        add_job(erratic, f"job{n}", [10.0 ** rng.randrange(4) for _ in range(rng.randrange(1, 14))])
    assert get_trust(erratic) < 0.6


def test_state() -> None:
    work, again = make_work(), RemainingWork()
    observe(again, "before", 5.0)
    again.set_state(json.loads(json.dumps(work.get_state())))
    assert again.get_state() == work.get_state()
    assert again.get_work_left(make_job("new", "k")) == work.get_work_left(make_job("new", "k"))
    assert get_trust(again) == get_trust(work)


@pytest.mark.parametrize(
    "damage",
    [
        {"turns": [[1.0, 2.0]]},
        {"turns": [[0.0] * 6], "sizes": [[]]},
        {"turns": [[1.0, 5.0, 4.0, -2.0, 0.0, 0.0]], "sizes": [[]]},
        {"turns": [[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]] * (MAX_TURNS + 1), "sizes": [[]] * (MAX_TURNS + 1)},
        {"sizes": [[[5, 1.0]]]},
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
