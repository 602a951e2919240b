"""How few points the search for the fewest machines takes, and runs that end early."""

from __future__ import annotations

import math
from collections.abc import Callable

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
from tenuto.sim.steady import Steady, Target, simulate_until_steady
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

    def __call__(self, setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        assert load.jps is not None
        num = round(self._total_jps / load.jps)
        self.asked.append(num)
        return [make_run(self._get_time_s(num) * factor) for factor in (0.98, 1.0, 1.02)]


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
        assert simulate_until_steady(L40S, given, min_jobs=300, max_jobs=3000).verdict == verdict


@pytest.mark.slow
def test_a_run_ends_once_its_target_is_surely_missed() -> None:
    def run(p95_s: float) -> Steady:
        target = Target(p95_s=p95_s)
        return simulate_until_steady(SMALL, HEAVY, min_jobs=60, max_jobs=400, target=target)

    late, whole = run(5.0), run(1e6)
    assert late.verdict == "late"
    assert late.p95_s >= 1.3 * 5.0
    assert late.num_jobs < whole.num_jobs
    assert whole == simulate_until_steady(SMALL, HEAVY, min_jobs=60, max_jobs=400)


def test_runs_that_went_on_long_enough_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def simulate(setup: Setup, load: LoadOptions, *, min_jobs: int, **others: object) -> Steady:
        asked.append((load.seed, min_jobs))
        return make_run(1.0)

    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", simulate)
    load = LoadOptions(jps=1.0)
    with SeedRunner((1, 2), workers=1, max_jobs=5000, say=lambda words: None) as measure:
        for min_jobs in (300, 600, 900, 1000):
            assert len(measure(L40S, load, min_jobs)) == 2
    assert asked == [(1, 300), (2, 300), (1, 1000), (2, 1000)]


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
        with SeedRunner((1, 2), workers=workers, max_jobs=500, say=say, target=target) as measure:
            plans = list(make_plans(setups, load, target, measure, probe=measure.probe, num_at_once=workers))
            list(try_changes(plans[0], load, target, measure.probe, num_at_once=workers))
            return plans

    assert plan(1) == plan(2)
    assert any("runs done; now " in text for text in said)
    assert all(math.isfinite(each.point.p95_s) for each in plan(1))


def test_one_seed_is_enough_where_the_target_is_clearly_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    time_s = 6.0

    def simulate(setup: Setup, load: LoadOptions, **others: object) -> Steady:
        asked.append(load.seed)
        return make_run(time_s)

    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", simulate)
    target = Target(p95_s=10.0)  # 60 % of it are 6 s
    with SeedRunner((1, 2, 3), workers=1, max_jobs=900, say=lambda words: None, target=target) as measure:
        assert len(measure.probe(L40S, LoadOptions(jps=1.0), 300)) == 1
        assert len(measure.judge(L40S, LoadOptions(jps=1.0), 300)) == 3
        assert asked == [1, 2, 3]
        time_s = 6.1
        assert len(measure.probe(L40S, LoadOptions(jps=2.0), 300)) == 3


def test_an_answer_of_one_seed_is_judged_with_all() -> None:
    """The probe finds two machines enough; with every seed it takes three."""

    def probe(setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        return [make_run(1.0 if load.jps == 2.0 else 4.0 / 3)] if load.jps != 4.0 else [make_run(99, "late")]

    def measure(setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        assert load.jps is not None
        return [make_run(12.0 if load.jps > 1.5 else 2.0)] * 3

    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=10.0), measure, 64, probe=probe)
    assert (found.num_machines, found.point.p95_s) == (3, 2.0)
    assert found.fewer is not None and found.fewer.p95_s == 12.0


@pytest.mark.parametrize(
    ("finished_jps", "time_s", "num_jobs"),
    [
        (2.6, 5.0, {QUICK}),  # 2 of 2.6 jobs a second, and half of the target
        (2.4, 5.0, {QUICK, PRECISE}),  # more than 0.8 of what one finishes
        (2.6, 7.0, {QUICK, PRECISE}),  # not clearly kept
    ],
)
def test_machines_near_their_capacity_get_more_jobs(
    finished_jps: float, time_s: float, num_jobs: set[int]
) -> None:
    asked = set()

    def measure(setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        assert load.jps is not None
        if load.jps > 2:
            times = (60.0,) * 20
            return [Steady("overloaded", load.jps, finished_jps, times, times, 9.0, 1.0, 400, 0, "roofline")]
        asked.add(min_jobs)
        return [make_run(time_s)] * 3

    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=10.0), measure, 64)
    assert found.num_machines == 2
    assert asked == num_jobs


def test_machines_that_one_less_could_nearly_replace_are_far_from_their_capacity() -> None:
    """With two machines one seed was steady; three get two thirds of that, and keep the target clearly."""
    asked = set()

    def measure(setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        assert load.jps is not None
        if load.jps > 1.5:
            return [make_run(9.0), make_run(99.0, "late")] if load.jps <= 2 else [make_run(99.0, "late")]
        asked.add(min_jobs)
        return [make_run(5.0)] * 3

    found = find_fewest(L40S, LoadOptions(jps=4.0), Target(p95_s=10.0), measure, 64)
    assert found.num_machines == 3
    assert asked == {QUICK}


def test_seeds_before_the_one_that_fails_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {1: "steady", 2: "late", 3: "steady"}

    def simulate(setup: Setup, load: LoadOptions, **others: object) -> Steady:
        return make_run(1.0, verdicts[load.seed])

    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", simulate)
    with SeedRunner((1, 2, 3), workers=1, max_jobs=900, say=lambda words: None) as measure:
        runs = measure(L40S, LoadOptions(jps=1.0), 300)
    assert [run.verdict for run in runs] == ["steady", "late"]


def test_the_time_left_is_that_of_the_points_that_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("tenuto.sim.plan.time.monotonic", lambda: now_s)
    monkeypatch.setattr("tenuto.sim.plan.simulate_until_steady", lambda *args, **words: make_run(1.0))
    with SeedRunner((1,), workers=1, max_jobs=900, say=lambda words: None) as measure:
        measure.expect(0, 3)
        measure.expect(1, 4)
        assert measure.get_left_s() is None
        measure(L40S, LoadOptions(jps=1.0), 300)
        measure(L40S, LoadOptions(jps=2.0), 300)
        now_s = 110.0  # 5 s for each of two points
        measure.expect(0, 0)
        assert measure.get_left_s() == pytest.approx(20.0)
