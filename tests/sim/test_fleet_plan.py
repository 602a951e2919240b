"""Planning with a router: all machines are simulated behind it, under the whole load."""

from __future__ import annotations

import dataclasses

from tenuto.sim.plan import format_plans, make_plans
from tenuto.sim.setup import Fleet, Setup
from tenuto.sim.steady import Effort, Steady, Target, simulate_until_steady
from tenuto.workload import LoadOptions

ROUTED = Setup(gpu="H100", fleet=Fleet(servers=("",), router="random"))
TARGET = Target(p95_s=10.0)


class Measured:
    """Two jobs per second and machine keep the target. Notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float | None]] = []

    def __call__(self, setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        assert setup.fleet is not None and load.jps is not None
        num = len(setup.fleet.servers)
        self.asked.append((num, load.jps))
        time_s = 4.0 * load.jps / (2.0 * num)
        return [Steady("steady", load.jps, load.jps, (time_s,), (time_s,), 100.0, 10.0, 900, 0, "roofline")]


def test_more_and_more_engines_are_tried_under_the_whole_load() -> None:
    measure = Measured()
    [plan] = make_plans([ROUTED], LoadOptions(jps=30.0), TARGET, measure)
    assert plan.num_machines == 6
    assert {jps for _, jps in measure.asked} == {30.0}
    assert plan.to_json()["router"] == "random"
    text = format_plans([plan], TARGET)
    assert "behind the router random" in text
    assert "perfect" not in text


def test_given_servers_are_judged_and_no_others_tried() -> None:
    unlike = dataclasses.replace(ROUTED, fleet=Fleet(servers=("H100", "H100", "L40S"), router="tenuto"))
    prices = {"H100": 2.0, "L40S": 1.0}
    for jps, num in ((10.0, 3), (20.0, None)):
        measure = Measured()
        load = LoadOptions(jps=jps)
        [plan] = make_plans([unlike], load, TARGET, measure, max_machines=None, prices=prices)
        assert plan.num_machines == num
        assert measure.asked == [(3, jps)]
        assert plan.usd_per_hour == (5.0 if num else None)
    assert "2xH100+1xL40S" in format_plans([plan], TARGET)


def test_a_fleet_is_simulated_until_it_is_steady() -> None:
    setup = Setup(
        policy="stock",
        step_cost="roofline",
        kv_tokens=100_000,
        host_gb=0.0,
        offload="none",
        fleet=Fleet(servers=("", ""), router="sticky-least-loaded"),
    )
    load = LoadOptions(workload="random", jps=4.0, random_input_len=200, random_output_len=8)
    steady = simulate_until_steady(setup, load, Effort(num_jobs=60), max_jobs=300)
    assert steady.verdict == "steady"
    assert 3.0 < steady.finished_jps < 5.0
