"""autellix and autellix+: the paper's own example, decisions by hand, and their known weaknesses."""

from __future__ import annotations

import dataclasses

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.policy import Policy
from tenuto.core.types import EngineView, Job, Turn
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tests.policies.simulated import PrefillSteps, count_recomputed, get_ends_s, make_job, simulate

EVEN = {"first_quantum_s": 1.0, "growth": 1.0, "num_levels": 20, "starvation_ratio": 1e9}
"""Queues of a second each: the paper's figure 2 looks at every unit of time."""


def make_view(now_s: float) -> EngineView:
    return EngineView(now_s, 16, 1000, 10, 2, 2, 2048)


def make_turn(name: str, job: str | None = None, **facts) -> Turn:
    return Turn(name, Job(job or name, 0.0, 1), 0.0, 100, **facts)


def run(policy: Policy, turn: Turn, start_s: float, service_s: float) -> None:
    policy.on_turn_arrived(turn, start_s)
    policy.on_turn_started(turn, start_s)
    policy.on_turn_finished(turn, start_s + service_s)


# Decisions.


def test_jobs_with_less_service_go_first_and_equals_in_order_of_arrival() -> None:
    policy = load_policy("autellix")
    run(policy, make_turn("a1", "a"), 0.0, 0.5)
    run(policy, make_turn("b1", "b"), 0.0, 5.0)
    run(policy, make_turn("c1", "c"), 0.0, 1.5)
    waiting = {name: make_turn(name, name[0]) for name in ("b2", "c2", "a2", "d1")}
    for number, turn in enumerate(waiting.values()):
        policy.on_turn_arrived(turn, 10.0 + number)
    # a has had 0.5 s and d none: the first queue, [0, 1). c: 1.5 s, the second; b: 5 s, the third.
    order = sorted(waiting, key=lambda name: policy.queue_key(waiting[name], 20.0))
    assert order == ["a2", "d1", "c2", "b2"]


def test_the_worst_queue_s_last_turn_is_preempted() -> None:
    policy = load_policy("autellix")
    running = {name: make_turn(name) for name in ("a", "b", "c")}
    for name, start_s in (("a", 0.0), ("b", 3.5), ("c", 3.6)):
        policy.on_turn_arrived(running[name], start_s)
        policy.on_turn_started(running[name], start_s)
    policy.on_tick(make_view(4.0))  # a has run 4 s and is in the third queue
    order = sorted(running, key=lambda name: policy.preempt_key(running[name], make_view(4.0)))
    assert order == ["a", "c", "b"]


def test_a_turn_displaces_one_in_a_worse_queue_and_no_equal() -> None:
    policy = load_policy("autellix")
    old, new = make_turn("old"), make_turn("new")
    policy.on_turn_arrived(old, 0.0)
    policy.on_turn_started(old, 0.0)
    policy.on_turn_arrived(new, 0.5)
    assert not policy.may_preempt(new, old, make_view(0.5))
    policy.on_tick(make_view(1.5))
    assert policy.may_preempt(new, old, make_view(1.5))
    assert not policy.may_preempt(old, new, make_view(1.5))


def test_a_preempted_turn_waits_in_its_queue_and_goes_on_from_there() -> None:
    policy = load_policy("autellix")
    turn = make_turn("t")
    policy.on_turn_arrived(turn, 0.0)
    policy.on_turn_started(turn, 0.0)
    policy.on_tick(make_view(1.0))
    policy.on_turn_preempted(turn, 2.0)
    policy.on_tick(make_view(9.0))
    assert policy.queue_key(turn, 9.0) == (1, 1.0)
    policy.on_turn_started(turn, 9.0)
    policy.on_tick(make_view(10.0))  # 2 s of the second queue's quantum, in two parts
    assert policy.queue_key(turn, 10.0) == (2, 10.0)


def test_an_aborted_turn_and_an_ended_job_leave_nothing_behind() -> None:
    policy = load_policy("autellix")
    before = repr(policy)
    turn = make_turn("t")
    policy.on_turn_arrived(turn, 0.0)
    policy.on_turn_finished(dataclasses.replace(turn, is_aborted=True), 1.0)
    policy.on_job_ended(turn.job, 2.0)
    assert repr(policy) == before


def test_the_plus_is_the_host_tier() -> None:
    assert build(Setup(policy="autellix")).config.offload is None
    assert build(Setup(policy="autellix+")).config.offload == "async"
    assert load_policy("autellix+", {"num_levels": 3}).num_levels == 3


# On an engine.

FIGURE_2 = {"A": (4, 3, 1, 1), "B": (3, 3, 4), "C": (1, 2), "D": (4,)}
"""Decode steps of each turn of four jobs that arrive together, on an engine with two seats."""


@pytest.mark.parametrize(
    ("policy", "options", "ends_s", "waited_s"),
    [
        ("stock", {}, {"A": 12, "B": 14, "C": 10, "D": 8}, 18),
        ("autellix", EVEN, {"A": 12, "B": 14, "C": 5, "D": 7}, 12),
    ],
)
def test_the_paper_s_figure_2(policy: str, options: dict, ends_s: dict, waited_s: int) -> None:
    """First come, first served waits 18 units in all; least attained service 12."""
    jobs = [make_job(name, outputs) for name, outputs in FIGURE_2.items()]
    found_s = get_ends_s(simulate(policy, jobs, options=options, max_num_seqs=2))
    assert found_s == ends_s
    assert sum(found_s.values()) - sum(map(sum, FIGURE_2.values())) == waited_s


def test_a_short_job_passes_long_ones_even_while_they_run() -> None:
    jobs = [make_job("long-1", [40]), make_job("long-2", [40]), make_job("short", [2, 2], arrival_s=10.0)]
    stock = get_ends_s(simulate("stock", jobs, max_num_seqs=2))
    served = get_ends_s(simulate("autellix", jobs, max_num_seqs=2))
    assert (stock["short"], served["short"]) == (44.0, 14.0)  # at once, for both of its turns
    assert max(served.values()) <= 44.0  # its 4 steps come out of the others' 80 on two seats


def test_a_long_job_does_not_starve_behind_short_ones() -> None:
    jobs = [make_job("long", [20])]
    jobs += [make_job(f"short-{number}", [3], arrival_s=3.0 * number) for number in range(1, 100)]

    def get_end_s(starvation_ratio: float) -> float:
        options = {"starvation_ratio": starvation_ratio}
        return get_ends_s(simulate("autellix", jobs, options=options, max_num_seqs=1))["long"]

    # A short job is there at any time: without promotions the long one ends with them, at 99 x 3 + 20 s.
    assert get_end_s(1e9) > 300
    assert get_end_s(3.0) < 120


def test_weakness_jobs_of_equal_length_take_turns_and_all_end_late() -> None:
    jobs = [make_job(f"job-{number}", [4] * 4) for number in range(6)]
    stock, served = (
        list(get_ends_s(simulate(policy, jobs, max_num_seqs=2, options=options)).values())
        for policy, options in (("stock", {}), ("autellix", EVEN))
    )
    assert max(served) == pytest.approx(max(stock), abs=4)
    assert min(served) > min(stock)
    assert sum(served) > sum(stock)


def test_weakness_taking_turns_defeats_the_cache_and_the_plus_does_not_mind() -> None:
    jobs = [make_job(f"job-{number}", [4] * 4, prompt=40) for number in range(6)]

    def run_on(policy: str, options: dict, host_blocks: int = 0) -> tuple[float, int]:
        records = simulate(
            policy,
            jobs,
            options=options,
            num_blocks=60,
            max_num_seqs=2,
            host_blocks=host_blocks,
            cost=PrefillSteps(),
        )
        return max(get_ends_s(records).values()), count_recomputed(records)

    stock, served = run_on("stock", {}), run_on("autellix", EVEN)
    with_tier, too_small = (run_on("autellix+", EVEN, num_blocks) for num_blocks in (400, 30))
    assert served[1] > 2.5 * stock[1]
    assert served[0] > 1.2 * stock[0]
    assert with_tier[1] < served[1] / 10
    assert with_tier[0] < 0.9 * served[0]
    # The tier has to hold what waits.
    assert too_small[1] > 0.5 * served[1]
