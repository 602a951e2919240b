"""concur: the window by hand, who holds a place in it, and what a quiet hour does to it."""

from __future__ import annotations

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.types import EngineView, Job, Turn
from tenuto.policies.published.concur import Concur
from tenuto.workload.schema import Job as SimJob
from tests.policies.simulated import (
    PrefillSteps,
    count_recomputed,
    get_ends_s,
    make_job,
    make_simulation,
    simulate,
)


def make_policy(first_window: float = 2.0, **options) -> Concur:
    policy = load_policy("concur", {"first_window": first_window, **options})
    assert isinstance(policy, Concur)
    return policy


def make_view(usage: float = 0.3, now_s: float = 10.0) -> EngineView:
    return EngineView(now_s, 16, 1000, round(1000 * (1 - usage)), 2, 2, 2048)


def make_turn(job: str, number: int = 1, arrival_s: float = 0.0, **facts) -> Turn:
    return Turn(f"{job}/{number}", Job(job, arrival_s, number), arrival_s + number, 100, **facts)


def arrive(policy: Concur, job: str, number: int = 1, arrival_s: float = 0.0) -> Turn:
    turn = make_turn(job, number, arrival_s)
    policy.on_turn_arrived(turn, turn.arrival_s)
    return turn


def start(policy: Concur, job: str, number: int = 1) -> Turn:
    turn = arrive(policy, job, number)
    policy.on_turn_admitted(turn, turn.arrival_s)
    return turn


def move(policy: Concur, usage: float, hit_rate: float | None = None) -> float:
    """One period; the window after it."""
    if hit_rate is not None:
        policy.on_turn_started(make_turn("any", num_hit_tokens=round(100 * hit_rate)), 0.0)
    policy.on_tick(make_view(usage))
    return policy._window


# The window.


@pytest.mark.parametrize(
    ("usage", "hit_rate", "expected"),
    [
        (0.19, None, 10),  # below 0.2: + 2
        (0.19, 0.0, 10),
        (0.2, 0.0, 8),  # between the two: unchanged, whatever is hit
        (0.5, 0.0, 8),
        (0.51, 0.0, 4),  # above 0.5 and below 0.2 hit: halved
        (0.51, 0.19, 4),
        (0.51, 0.2, 8),
        (0.9, 0.8, 8),
        (0.9, None, 8),  # nothing started, so nothing is known of hits
    ],
)
def test_the_window_moves_as_published(usage: float, hit_rate: float | None, expected: float) -> None:
    assert move(make_policy(8.0), usage, hit_rate) == expected


def test_each_period_has_its_own_hit_rate() -> None:
    policy = make_policy(8.0)
    assert move(policy, 0.9, 0.0) == 4
    assert move(policy, 0.9, 0.9) == 4
    assert move(policy, 0.9, 0.1) == 2


def test_it_never_closes() -> None:
    policy = make_policy(1.5)
    for _ in range(5):
        move(policy, 0.9, 0.0)
    assert policy._window == 1
    assert policy.admit(arrive(policy, "a"), make_view())


# Places.


def test_jobs_have_places_while_there_are_some() -> None:
    policy = make_policy(2.0)
    start(policy, "a")
    assert policy.admit(arrive(policy, "b"), make_view())
    start(policy, "b")
    assert not policy.admit(arrive(policy, "c"), make_view())


def test_a_job_keeps_its_place_through_its_tool_call() -> None:
    policy = make_policy(1.0)
    policy.on_turn_finished(start(policy, "a"), 3.0)
    assert not policy.admit(arrive(policy, "b"), make_view())
    assert policy.admit(arrive(policy, "a", 2), make_view())
    policy.on_turn_finished(make_turn("a", 2), 4.0)
    policy.on_job_ended(Job("a", 0.0, 2), 4.0)
    assert policy.admit(make_turn("b"), make_view())


def test_when_the_window_shrinks_jobs_are_paused_as_their_turns_end() -> None:
    policy = make_policy(4.0)
    turns = {job: start(policy, job) for job in ("a", "b", "c", "d")}
    assert move(policy, 0.9, 0.0) == 2
    for job in ("c", "a", "d"):
        policy.on_turn_finished(turns[job], 5.0)
    # Two too many: c and a give their places up; b and d are within the window.
    assert [policy.admit(make_turn(job, 2), make_view()) for job in ("a", "b", "c", "d")] == [0, 1, 0, 1]


def test_active_jobs_go_first_then_jobs_by_their_first_arrival() -> None:
    policy = make_policy(1.0)
    start(policy, "active")
    paused = arrive(policy, "paused", 5, arrival_s=1.0)  # its fifth turn came at 6 s
    new = arrive(policy, "new", 1, arrival_s=2.0)
    older = arrive(policy, "older", 1, arrival_s=0.5)
    turns = [new, paused, make_turn("active", 2), older]
    order = sorted(turns, key=lambda turn: policy.queue_key(turn, 9.0))
    assert [turn.job.job_id for turn in order] == ["active", "older", "paused", "new"]


def test_a_job_that_does_not_come_back_or_is_aborted_frees_its_place() -> None:
    policy = make_policy(1.0)
    policy.on_turn_finished(start(policy, "a"), 100.0)
    policy.on_tick(make_view(now_s=159.0))
    assert not policy.admit(arrive(policy, "b"), make_view())
    policy.on_tick(make_view(now_s=160.0))  # a minute
    assert policy.admit(make_turn("b"), make_view())


# On an engine.

CACHE = {"num_blocks": 400, "cost": PrefillSteps(tokens_per_s=20.0)}
"""1,600 tokens, for contexts that grow from 60 to 100."""


def make_burst(first_s: float = 0.0) -> list[SimJob]:
    return [
        make_job(f"job-{n:02}", [4] * 6, arrival_s=first_s + 0.7 * n, prompt=60, tool_s=0.5)
        for n in range(40)
    ]


def run(jobs: list[SimJob], policy: str = "concur") -> tuple[float, int]:
    """When the last job ended, and tokens computed again."""
    options = {"first_window": 8.0} if policy == "concur" else {}
    records = simulate(policy, jobs, options=options, **CACHE)
    assert len(records) == sum(len(job.turns) for job in jobs)
    return max(get_ends_s(records).values()), count_recomputed(records)


def test_it_ends_thrashing() -> None:
    stock, windowed = run(make_burst(), "stock"), run(make_burst())
    assert windowed[1] < stock[1] / 4
    assert windowed[0] < stock[0] / 2


def test_a_window_of_one_starves_nobody() -> None:
    jobs = [make_job(f"job-{n}", [4] * 3, arrival_s=0.1 * n, tool_s=0.5) for n in range(4)]
    options = {"first_window": 1.0, "increase": 0.0}
    ends_s = list(get_ends_s(simulate("concur", jobs, options=options)).values())
    # Each needs 12 s for its turns. While one is in its tool call nothing runs and the next gets in: an
    # engine never idles over a waiting job.
    assert ends_s == sorted(ends_s)
    assert max(ends_s) < 4 * 12 + 4


def test_weakness_a_quiet_time_opens_the_window_until_it_bounds_nothing() -> None:
    quiet = make_job("quiet", [290])  # 298 of 1,600 tokens: below 0.2 at any time
    simulation = make_simulation("concur", [quiet], options={"first_window": 8.0}, **CACHE)
    simulation.run()
    policy = simulation.scheduler.driver.policy
    assert isinstance(policy, Concur)
    assert policy._window > 500  # for one job
    fresh, opened = run(make_burst(295.0)), run([quiet, *make_burst(295.0)])
    assert opened[1] > 3 * fresh[1]
    assert opened[0] > fresh[0] + 200
