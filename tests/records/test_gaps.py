"""Inter-token latencies: percentiles over counted gaps are those of the gaps written out one by one."""

from __future__ import annotations

import random

import pytest

from tenuto.records import metrics
from tenuto.records.gaps import Gaps
from tenuto.records.schema import Stats
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload import LoadOptions, make_workload


def test_counted_gaps_are_the_gaps_one_by_one() -> None:
    rng = random.Random(3)
    gaps, each = Gaps(), []
    for _ in range(200):
        seconds, count = rng.choice((0.01, 0.02, 0.5, rng.random())), rng.randint(1, 9)
        gaps.add(seconds, count)
        each += [seconds] * count
    expected, found = metrics.summarise(each), gaps.summarise()
    assert expected is not None
    assert found is not None
    for name in Stats.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_no_gap_has_no_statistics() -> None:
    assert Gaps().summarise() is None


@pytest.mark.parametrize("is_async", [False, True])
def test_the_gaps_of_a_simulation_fill_the_time_between_first_and_last_tokens(is_async: bool) -> None:
    """Also where quiet steps are done at once, and where turns are preempted."""
    setup = Setup(step_cost="roofline", kv_tokens=24_000, host_gb=0.0, async_scheduling=is_async)
    found = []
    for fast_forwards in (True, False):
        machine = build(setup)
        workload = make_workload(LoadOptions(workload="bfcl", jps=8.0, window_s=2.0, scale_lengths=0.2))
        simulation = Simulation.of_one(machine.make_scheduler(), machine.step_cost, Clients(workload))
        simulation.engines[0].fast_forwards = fast_forwards
        turns = simulation.run()
        stats = simulation.gaps.summarise()
        assert stats is not None
        times = [(turn.last_token_s, turn.first_token_s, turn.output_tokens) for turn in turns]
        total_s = sum(last - first for last, first, _ in times if last is not None and first is not None)
        num_gaps = sum((count or 0) - 1 for *_, count in times)
        assert stats.mean * num_gaps == pytest.approx(total_s)
        found.append(stats)
    for name in Stats.__dataclass_fields__:
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name)), name
