"""Expected remaining work, by hand."""

from __future__ import annotations

import json
import math

import pytest

from tenuto.core.turn_work import DECODE_TOKENS
from tenuto.core.types import Job, ToolCall, Turn
from tenuto.estimators.remaining_work import MAX_ROWS, RemainingWork


def make_job(name: str, kind: str | None = None) -> Job:
    return Job(name, 0.0, 1, None, kind)


def observe(work: RemainingWork, name: str, size: float, *, is_last: bool = False, kind: str = "k") -> None:
    """A turn of which a tenth is generated."""
    work.observe_turn(make_job(name, kind), 0.9 * size, size, is_last=is_last)


def add_job(work: RemainingWork, name: str, turns: list[float], kind: str = "k") -> None:
    for number, turn in enumerate(turns, 1):
        observe(work, name, turn, is_last=number == len(turns), kind=kind)
    work.end_job(name)


def get_rank(work: RemainingWork, size: int, *, kind: str | None = "k", is_last: bool = False) -> float:
    """The rank of a new job whose first prompt has this size."""
    turn = Turn("new/1", make_job("new", kind), 0.0, size, is_last=is_last)
    return work.get_rank(turn, work.count_new_tokens(turn))


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
    assert get_rank(work, 90) == pytest.approx(400, rel=0.01)
    # Of a last turn, nothing comes after it.
    assert get_rank(work, 90, is_last=True) == pytest.approx(100, rel=0.01)
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
    # Half of those with two turns have two more, the others none; who is back has two.
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(300, rel=0.02)
    observe(work, "new", 100.0)
    observe(work, "new", 100.0)
    assert work.get_work_left(make_job("new", "k")) == pytest.approx(200, rel=0.02)


def test_jobs_at_work_count_too() -> None:
    """Else those that end first, which are short, would stand for all."""
    work = RemainingWork()
    for n in range(100):
        for _ in range(3):
            observe(work, f"long{n}", 100.0)
    add_job(work, "short", [100.0])
    # One of a hundred ended with its first turn.
    assert work.get_work_left(make_job("new", "k")) > 300


def make_mixture(num_jobs: int = 200) -> RemainingWork:
    """Short jobs of 2 turns and long ones of 20, which only their kind tells apart."""
    work = RemainingWork()
    for n in range(num_jobs):
        add_job(work, f"short{n}", [100.0] * 2, kind="short")
        add_job(work, f"long{n}", [100.0] * 20, kind="long")
    return work


def test_jobs_are_expected_to_be_as_long_as_those_of_their_kind() -> None:
    work = make_mixture()
    short, long = (work.get_work_left(make_job("new", kind)) for kind in ("short", "long"))
    assert short == pytest.approx(200, rel=0.15) and long == pytest.approx(2000, rel=0.05)
    # The same words of another tenant are another kind, of which nothing is known but what all jobs show.
    assert short < work.get_work_left(Job("new", 0.0, 1, "other", "short")) < long


def test_jobs_that_share_their_kind_with_nobody_count_as_one_kind() -> None:
    work = make_mixture()
    for n in range(200):
        add_job(work, f"alone{n}", [100.0] * 5, kind=f"kind {n}")
    assert work.get_work_left(make_job("new", "never seen")) == pytest.approx(500, rel=0.1)
    assert work.get_work_left(make_job("new")) == work.get_work_left(make_job("new", "never seen"))


def test_a_kind_counts_the_more_the_more_jobs_of_it_were_seen() -> None:
    work, lefts = make_work(), []
    for n in range(20):
        add_job(work, f"rare{n}", [100.0], kind="rare")
        lefts.append(work.get_work_left(make_job("new", "rare")))
    assert lefts[1] > lefts[3] > lefts[19] > 100 and lefts[19] < 200


def test_a_job_stays_of_its_kind_when_the_kind_is_forgotten() -> None:
    work = make_mixture()
    observe(work, "old", 100.0, kind="long")
    work._kinds.clear()
    assert work.get_work_left(make_job("old", "long")) == pytest.approx(1900, rel=0.05)
    observe(work, "old", 100.0, kind="long")
    work.end_job("old")
    assert work.get_work_left(make_job("new", "long")) == work.get_work_left(make_job("new"))


def test_invented_kinds_push_out_none_that_many_jobs_had() -> None:
    work = make_mixture()
    for n in range(2 * MAX_ROWS):
        add_job(work, f"flood{n}", [100.0], kind=f"kind {n}")
    assert len(work._kinds) <= MAX_ROWS
    assert work.get_work_left(make_job("new", "long")) == pytest.approx(2000, rel=0.05)


def test_jobs_whose_end_nobody_reports_are_as_short_as_those_that_say_so() -> None:
    """Most clients never say that a job has ended. A turn without a tool call looks like the last."""
    silent = RemainingWork()
    for n in range(400):
        for number in range(1, 5):
            observe(silent, f"job{n}", 100.0, is_last=number == 4)
    told = make_work()
    assert get_rank(silent, 90) == pytest.approx(get_rank(told, 90), rel=0.01)
    assert silent.get_work_left(make_job("new", "k")) == pytest.approx(400, rel=0.01)


def test_a_turn_that_was_followed_was_not_the_last() -> None:
    """Agents whose tool calls cannot be seen, and conversations."""
    work = RemainingWork()
    for n in range(100):
        for _ in range(8):
            observe(work, f"agent{n}", 300.0, is_last=True)
        work.end_job(f"agent{n}")
    assert get_rank(work, 270) == pytest.approx(8 * 300, rel=0.05)


@pytest.mark.parametrize(
    ("tool", "is_last", "counts"),
    [
        (None, None, True),
        (ToolCall("ls"), None, False),
        (None, False, False),  # the client says that there is more, whatever the output shows
        (ToolCall("ls"), True, True),
    ],
)
def test_what_a_client_says_about_an_end_goes_before_what_the_output_shows(
    tool: ToolCall | None, is_last: bool | None, counts: bool
) -> None:
    work = RemainingWork()
    for n in range(50):
        job = make_job(f"job{n}", "k")
        work.observe(Turn(f"job{n}/1", job, 0.0, 100, 10, tool=tool, is_last=is_last))
    left, turn = work.get_work_left(make_job("new", "k")), 100 + 10 * DECODE_TOKENS
    assert left == pytest.approx(turn, rel=0.1) if counts else left > 1.5 * turn


def test_an_end_counts_once() -> None:
    """Whether it was seen, reported, or both."""
    both, seen = RemainingWork(), RemainingWork()
    for n in range(100):
        for work in (both, seen):
            observe(work, f"job{n}", 100.0, is_last=n % 2 == 0)
        both.end_job(f"job{n}") if n % 2 == 0 else None
    assert both.get_state() == seen.get_state()


def test_a_small_turn_that_is_often_the_last_goes_early() -> None:
    """Requests of 50 tokens beside agents whose first prompt has 800: what is seen first tells them apart."""
    work = RemainingWork()
    for n in range(200):
        add_job(work, f"request{n}", [50.0])
        add_job(work, f"agent{n}", [800.0] * 10)
    assert get_rank(work, 45) < 0.2 * get_rank(work, 720)


def test_before_any_job_there_is_an_answer() -> None:
    work = RemainingWork()
    assert work.get_work_left(make_job("new", "k")) > 0
    assert get_rank(work, 70) > 0
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
    for _ in range(3 * MAX_ROWS):
        observe(work, "endless", 10.0)
    assert len(work.get_state()["turns"]) == MAX_ROWS
    assert math.isfinite(work.get_work_left(make_job("endless", "k")))
    work.end_job("endless")
    work.end_job("never seen")


def test_state() -> None:
    work, again = make_work(), RemainingWork()
    observe(again, "before", 5.0)
    again.set_state(json.loads(json.dumps(work.get_state())))
    assert again.get_state() == work.get_state()
    assert again.get_work_left(make_job("new")) == pytest.approx(
        work.get_work_left(make_job("new")), rel=0.01
    )


@pytest.mark.parametrize(
    "damage",
    [
        {"turns": [[1.0, 2.0]]},
        {"turns": [[0.0] * 5], "sizes": [[]]},
        {"turns": [[1.0, 5.0, 4.0, -2.0, 0.0]], "sizes": [[]]},
        {"turns": [[1.0, 1.0, 1.0, 0.0, 0.0]] * (MAX_ROWS + 1), "sizes": [[]] * (MAX_ROWS + 1)},
        {"sizes": [[[5, 1.0]]]},
        {"turns": [[math.nan] * 5], "sizes": [[]]},
        {"turns": [[5e-324, 100.0, 90.0, 0.5, 0.5]], "sizes": [[]]},
        {"turns": [[2.0, 100.0, 90.0, 1.7e308, 1.7e308]], "sizes": [[]]},
        {"turns": [[2.0, 100.0, 90.0, 1.0, 1.0]], "sizes": [[[5, 1.7e308, 1.7e308]]]},
        {"turns": "abcd"},
    ],
)
def test_a_damaged_state_changes_nothing(damage: dict[str, object]) -> None:
    work = make_work(10)
    before = repr(work)
    with pytest.raises((ValueError, TypeError)):
        work.set_state({**work.get_state(), **damage})
    assert repr(work) == before
