"""How few points the search for the fewest machines takes, and runs that end early."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tenuto.sim.plan import (
    PRECISE,
    QUICK,
    Plan,
    SeedRunner,
    find_fewest,
    get_most_jps,
    make_plans,
    try_changes,
)
from tenuto.sim.setup import Setup
from tenuto.sim.steady import Effort, Steady, Target, simulate_until_steady
from tenuto.workload import LoadOptions

L40S = Setup(gpu="L40S", step_cost="roofline")
SMALL = Setup(gpu="L40S", step_cost="roofline", kv_tokens=60_000, host_gb=0.0, offload="none")
HEAVY = LoadOptions(workload="bfcl", scale_lengths=0.1, jps=4.0)


def make_run(time_s: float, verdict: str = "steady") -> Steady:
    times = (time_s,) * 20
    return Steady(verdict, 1.0, 1.0, times, times, 100.0, 10.0, 900, 0, "roofline")  # type: ignore[arg-type]


class Curve:
    """Job times that fall with the number of machines as a power of it. Notes what was asked for."""

    def __init__(self, get_time_s: Callable[[float], float], total_jps: float) -> None:
        self.asked: list[int] = []
        self._get_time_s, self._total_jps = get_time_s, total_jps

    def __call__(self, setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        assert load.jps is not None
        num = round(self._total_jps / load.jps)
        self.asked.append(num)
        return [make_run(self._get_time_s(num) * factor) for factor in (0.98, 1.0, 1.02)[: effort.num_seeds]]


@pytest.mark.parametrize("power", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("fewest", [1, 2, 7, 34, 60])
def test_a_search_takes_few_points(fewest: int, power: float) -> None:
    measure = Curve(lambda num: 100.0 * (fewest / num) ** power, 4.0)
    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=102.5), measure, 64)
    assert found.num_machines == fewest
    assert (found.fewer is None) == (fewest == 1)
    assert len(set(measure.asked)) <= 7


def test_no_number_is_enough_where_more_machines_do_not_help() -> None:
    measure = Curve(lambda num: 100.0, 4.0)
    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=50.0), measure, 16)
    assert found.num_machines is None
    assert found.point.num_machines == 16


def test_the_first_guess_is_near_what_a_machine_can_do() -> None:
    """Twice as slow steps, half the jobs; a simulated machine is steady well below it, and not above it."""
    load = LoadOptions(workload="random", random_output_len=16, jps=5.0)
    most_jps = get_most_jps(L40S, load)
    slower = Setup(gpu="L40S", step_cost="roofline", step_cost_factor=2.0)
    assert get_most_jps(slower, load) == pytest.approx(most_jps / 2, rel=0.01)
    for share, verdict in ((0.5, "steady"), (1.6, "overloaded")):
        given = LoadOptions(workload="random", random_output_len=16, jps=share * most_jps)
        assert simulate_until_steady(L40S, given, Effort(num_jobs=300), max_jobs=3000).verdict == verdict


@pytest.mark.slow
def test_a_run_ends_once_its_target_is_surely_missed() -> None:
    def run(target: Target | None) -> Steady:
        return simulate_until_steady(SMALL, HEAVY, Effort(num_jobs=60, target=target), max_jobs=400)

    late, whole = run(Target(p95_s=5.0)), run(Target(p95_s=1e6))
    assert late.verdict == "late"
    assert late.p95_s >= 1.3 * 5.0
    assert late.num_jobs < whole.num_jobs
    assert whole == run(None)
    # The margin counts.
    assert run(Target(p95_s=10.0, margin=0.5)) == late


@pytest.mark.slow
def test_a_run_is_as_long_as_the_answer_is_in_doubt() -> None:
    """The same machine, whose P95 is known, with targets far from it and near it."""
    load = replace(HEAVY, jps=0.2)

    def run(**changes: Any) -> Steady:
        return simulate_until_steady(SMALL, load, Effort(num_jobs=240, **changes), max_jobs=600)

    p95_s = run().p95_s

    def count_jobs(use: float, clear: float) -> float:
        target = Target(p95_s=p95_s / use)
        seen = run(target=target, num_clear_jobs=120, clear=clear)
        assert seen.verdict == "steady"
        return 0.2 * seen.simulated_s

    assert count_jobs(0.3, clear=0.6) == pytest.approx(120, rel=0.02)
    assert count_jobs(0.3, clear=0.0) == pytest.approx(240, rel=0.02)
    assert count_jobs(0.9, clear=0.6) == pytest.approx(240, rel=0.02)


@pytest.mark.parametrize(
    ("num_jobs", "use", "is_enough"),
    [
        (99, 0.1, False),
        (100, 0.6, True),
        (100, 0.7, False),
        (199, 1.1, False),
        (100, 1.2, True),
        (200, 1.0, True),
    ],
)
def test_a_clear_answer_takes_fewer_jobs(num_jobs: int, use: float, is_enough: bool) -> None:
    target = Target(p95_s=10.0, margin=0.5)
    effort = Effort(num_jobs=200, target=target, num_clear_jobs=100, clear=0.6)
    assert effort.is_enough(make_run(5.0 * use), num_jobs) == is_enough


def make_runner(seeds: tuple[int, ...], **options: Any) -> SeedRunner:
    return SeedRunner(seeds, **{"workers": 1, "max_jobs": 5000, "say": lambda words: None, **options})


def test_runs_that_went_on_long_enough_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    verdict = "steady"

    def simulate(setup: Setup, load: LoadOptions, effort: Effort, **others: object) -> Steady:
        asked.append(load.seed)
        return make_run(1.0, verdict)  # watched for 100 s

    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", simulate)
    with make_runner((1, 2)) as measure:

        def count_runs(jps: float, effort: Effort) -> int:
            asked.clear()
            measure(L40S, LoadOptions(jps=jps), effort)
            return len(asked)

        assert [count_runs(9.0, Effort(num_jobs=num)) for num in (300, 600, 900, 1000)] == [2, 0, 0, 2]
        # A run that was stopped for one target says nothing of another; an overloaded one does.
        for verdict, counts in (
            ("late", [1, 0, 1]),
            ("overloaded", [1, 0, 0]),
        ):
            efforts = [Effort(num_jobs=300, target=Target(p95_s=each_s)) for each_s in (9.0, 9.0, 5.0)]
            assert [count_runs(float(len(verdict)), each) for each in efforts] == counts


@pytest.mark.slow
def test_several_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of these runs may end within the usual wait.
    monkeypatch.setattr("tenuto.sim.plan.WAIT_S", 0.01)
    load = LoadOptions(workload="random", random_output_len=16, jps=20.0)
    target = Target(p95_s=2.0)
    setups = [L40S, Setup(gpu="L40S", step_cost="roofline", policy="stock", max_num_seqs=32)]

    said: list[str] = []

    def say(make_text: Callable[[], str]) -> None:
        said.append(make_text())

    def plan(workers: int) -> list[Plan]:
        with SeedRunner((1, 2), workers=workers, max_jobs=500, say=say) as measure:
            plans = list(make_plans(setups, load, target, measure, num_at_once=workers))
            list(try_changes(plans[0], load, target, measure, num_at_once=workers))
            return plans

    alone = plan(1)
    assert plan(2) == alone
    assert any("runs done; now " in text for text in said)
    assert all(math.isfinite(each.point.p95_s) for each in alone)


@pytest.mark.parametrize(
    ("times_s", "num_seeds"),
    [
        ((11.5, 1.0, 1.0), 1),  # 15 % too slow
        ((11.4, 11.4, 1.0), 2),  # not by so much, but twice
        ((10.5, 10.5, 10.5), 3),
        ((10.5, 9.0, 9.0), 3),
        ((9.0, 9.0, 9.0), 3),
    ],
)
def test_seeds_that_cannot_change_the_answer_are_not_run(
    times_s: tuple[float, ...], num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tenuto.sim.plan.simulate_until_steady", lambda setup, load, **others: make_run(times_s[load.seed])
    )
    with make_runner((0, 1, 2)) as measure:
        runs = measure(L40S, LoadOptions(jps=1.0), Effort(num_jobs=300, target=Target(p95_s=10.0)))
    assert len(runs) == num_seeds


def test_changes_are_tried_with_the_slowest_seed_first() -> None:
    asked: list[int] = []

    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        asked.append(load.seed)
        return [replace(make_run(seed), seed=seed) for seed in (5, 7, 6)]

    [plan] = make_plans([L40S], LoadOptions(jps=1.0), Target(p95_s=10.0), measure)
    asked.clear()
    list(try_changes(plan, LoadOptions(jps=1.0), Target(p95_s=10.0), measure))
    assert set(asked) == {7}


def test_the_seed_of_the_load_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tenuto.sim.plan.simulate_until_steady",
        lambda setup, load, **others: replace(make_run(1.0), seed=load.seed),
    )
    with make_runner((1, 2, 3)) as measure:
        runs = measure(L40S, LoadOptions(jps=1.0, seed=2), Effort(num_jobs=300))
    assert [run.seed for run in runs] == [2, 1, 3]


@pytest.mark.parametrize(
    ("times_s", "num_heavier", "num_lighter"),
    [
        ((9.0,) * 20, 3, 1),  # kept: more work may make the other seeds too slow, less cannot
        ((10.5,) * 20, 1, 3),  # missed, even if the other seeds are as fast as in the plan
        ((5.0,) * 18 + (10.5,) * 2, 3, 1),  # missed by this seed alone, and not by all together
    ],
)
def test_a_change_takes_one_seed_where_the_plan_bounds_the_others(
    times_s: tuple[float, ...], num_heavier: int, num_lighter: int
) -> None:
    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        return [replace(make_run(1.0), job_times_s=times_s)] * (effort.num_seeds or 3)

    load, target = LoadOptions(jps=1.0), Target(p95_s=10.0)
    [plan] = make_plans([L40S], load, target, lambda *_: [make_run(each_s) for each_s in (9.0, 6.0, 6.0)])
    *heavier, lighter = try_changes(plan, load, target, measure)
    assert {len(effect.point.runs) for effect in heavier} == {num_heavier}
    assert len(lighter.point.runs) == num_lighter


def test_an_answer_of_one_seed_is_judged_with_all() -> None:
    """One short run finds four machines enough; with every seed it takes five."""

    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        assert load.jps is not None
        num = round(12.0 / load.jps)
        if effort.num_seeds == 1:
            return [make_run(5.0 if num >= 4 else 99.0)]
        return [make_run(12.0 if num <= 4 else 2.0)] * 3

    found = find_fewest(L40S, LoadOptions(jps=12.0), Target(p95_s=10.0), measure, 64)
    assert (found.num_machines, found.point.p95_s) == (5, 2.0)
    assert found.fewer is not None and found.fewer.p95_s == 12.0


def test_a_number_that_one_seed_finds_too_small_is_judged_with_all() -> None:
    """One short run finds five machines too few; with every seed even four are enough."""

    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        assert load.jps is not None
        num = round(12.0 / load.jps)
        if effort.num_seeds == 1:
            return [make_run(5.0 if num >= 6 else 99.0)]
        return [make_run(12.0 if num <= 3 else 9.0)] * 3

    found = find_fewest(L40S, LoadOptions(jps=12.0), Target(p95_s=10.0), measure, 64)
    assert (found.num_machines, found.point.p95_s) == (4, 9.0)
    assert found.fewer is not None and found.fewer.p95_s == 12.0


@pytest.mark.parametrize(
    ("finished_jps", "clear"),
    [
        (2.6, 0.6),  # 2 of 2.6 jobs a second
        (2.4, 0.0),  # more than 0.8 of what one finishes
    ],
)
def test_machines_near_their_capacity_get_more_jobs(finished_jps: float, clear: float) -> None:
    asked: list[Effort] = []

    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        assert load.jps is not None
        if load.jps > 2:
            times = (60.0,) * 20
            return [Steady("overloaded", load.jps, finished_jps, times, times, 9.0, 1.0, 400, 0, "roofline")]
        asked.append(effort)
        return [make_run(9.0)] * 3

    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=10.0), measure, 64)
    assert found.num_machines == 2
    assert (asked[-1].num_jobs, asked[-1].num_clear_jobs, asked[-1].clear) == (PRECISE, QUICK, clear)


def test_machines_that_one_less_could_nearly_replace_are_far_from_their_capacity() -> None:
    """With two machines one seed was steady; three get two thirds of that."""
    asked: list[Effort] = []

    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        assert load.jps is not None
        if load.jps > 1.5:
            return [make_run(9.0), make_run(99.0, "late")] if load.jps <= 2 else [make_run(99.0, "late")]
        asked.append(effort)
        return [make_run(9.0)] * 3

    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=10.0), measure, 64)
    assert found.num_machines == 3
    assert asked[-1].clear == 0.6


def test_seeds_before_the_one_that_fails_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {1: "steady", 2: "late", 3: "steady"}

    def simulate(setup: Setup, load: LoadOptions, **others: object) -> Steady:
        return make_run(1.0, verdicts[load.seed])

    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", simulate)
    with make_runner((1, 2, 3)) as measure:
        runs = measure(L40S, LoadOptions(jps=1.0), Effort(num_jobs=300))
    assert [run.verdict for run in runs] == ["steady", "late"]


def test_the_time_left_is_that_of_the_points_that_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("tenuto.sim.plan.time.monotonic", lambda: now_s)
    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", lambda *args, **words: make_run(1.0))
    with make_runner((1,)) as measure:
        measure.expect(0, 3)
        measure.expect(1, 4)
        assert measure.get_left_s() is None
        measure(L40S, LoadOptions(jps=1.0), Effort(num_jobs=300))
        measure(L40S, LoadOptions(jps=2.0), Effort(num_jobs=300))
        now_s = 110.0  # 5 s for each of two points
        measure.expect(0, 0)
        assert measure.get_left_s() == pytest.approx(20.0)


def test_the_example_of_the_planners_page_takes_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four plans and five changes, on machines that do what a queue does."""
    asked: list[str] = []

    def simulate(setup: Setup, load: LoadOptions, effort: Effort, **others: object) -> Steady:
        assert load.jps is not None
        capacity = {"H100": 1.9, "L40S": 0.58}[setup.gpu] * (1.35 if setup.policy == "tenuto" else 1.0)
        work = load.scale_turns * load.scale_lengths * setup.step_cost_factor
        busy = load.jps * work / capacity * {42: 0.97, 43: 1.03, 44: 1.0}[load.seed]
        asked.append(f"{setup.gpu} {setup.policy} {load.jps:.2f} {work:.2f} {load.seed}")
        run = make_run(7.0 / (1 - busy) if busy < 1 else 99.0, "steady" if busy < 1 else "overloaded")
        num_jobs = next(num for num in (QUICK, PRECISE) if num == PRECISE or effort.is_enough(run, num))
        return replace(run, finished_jps=1 / max(busy, 1.0), simulated_s=num_jobs / load.jps, seed=load.seed)

    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", simulate)
    setups = [
        Setup(gpu=gpu, step_cost="roofline", policy=policy)
        for gpu in ("H100", "L40S")
        for policy in ("stock", "tenuto")
    ]
    load, target = LoadOptions(workload="ab8", jps=4.0), Target(p95_s=40.0, margin=0.05)
    with make_runner((42, 43, 44)) as measure:
        plans = list(make_plans(setups, load, target, measure))
        list(try_changes(min(plans, key=lambda plan: plan.num_gpus or 99), load, target, measure))
    assert [plan.num_machines for plan in plans] == [3, 2, 9, 7]
    assert len(asked) <= 26
