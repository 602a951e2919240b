"""So many machines under a load: what came of simulating them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from tenuto.sim.setup import Setup
from tenuto.sim.sweep.settling import VERDICTS, Verdict
from tenuto.sim.sweep.steady import Steady, get_p95
from tenuto.sim.sweep.target import Target
from tenuto.workload.load_options import LoadOptions

QUICK, PRECISE = 300, 600
"""Fewest jobs for each seed: while searching; and for answers, and where the seeds leave a doubt."""
NEAR, TOLERANCE, NUM_ERRORS = 0.15, 0.05, 3
"""A P95 leaves a doubt if it is nearer to the target than this share of it, or than so many standard errors
of the seeds' mean (Student's t for three seeds: one chance in twenty), and that error is above the
tolerance."""

CLEAR = 0.6
"""A target is clearly kept if the P95 takes up so much of it at most."""

Measure = Callable[[Setup, LoadOptions, int], Sequence[Steady]]
"""Simulates one machine with each seed, with so many jobs at least. One that is not steady ends the rest."""


@dataclass(frozen=True)
class Point:
    """So many machines under the load: a run of one of them for each seed. Times are over all seeds."""

    num_machines: int
    jps: float
    """Of the whole load."""
    runs: tuple[Steady, ...]

    @cached_property
    def verdict(self) -> Verdict:
        """The worst of the seeds'."""
        return min((run.verdict for run in self.runs), key=VERDICTS.index)

    @cached_property
    def p95_s(self) -> float:
        """P95 of the job times."""
        return get_p95(tuple(time_s for run in self.runs for time_s in run.job_times_s))

    @cached_property
    def p95_ttft_s(self) -> float:
        """P95 of the times to first token."""
        return get_p95(tuple(time_s for run in self.runs for time_s in run.ttfts_s))

    @property
    def finished_jps(self) -> float:
        """Jobs that all machines finish per second, by the seeds that are not steady if there are any."""
        rough = [run for run in self.runs if run.verdict == self.verdict]
        share = fmean(run.finished_jps / run.offered_jps if run.offered_jps else 1.0 for run in rough)
        return share * self.jps

    def __str__(self) -> str:
        """What came of it, in words: times only if it is steady."""
        rates = f"{self.jps:.3g} jobs/s offered, {self.finished_jps:.3g} finished"
        if self.verdict == "overloaded":
            return f"overloaded: {rates}"
        if self.verdict == "late":
            return f"too slow: {rates}"
        if self.verdict == "unsettled":
            return f"not steady after {max(run.num_jobs for run in self.runs)} jobs: {rates}"
        one_seed = " (one seed)" if len(self.runs) == 1 else ""
        return f"P95 {format_s(self.p95_s)}, TTFT P95 {format_s(self.p95_ttft_s)}{one_seed}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values. Times are null unless the machines are steady."""
        is_steady = self.verdict == "steady"
        return {
            "machines": self.num_machines,
            "verdict": self.verdict,
            "offered_jps": self.jps,
            "finished_jps": self.finished_jps,
            "p95_s": self.p95_s if is_steady else None,
            "p95_ttft_s": self.p95_ttft_s if is_steady and math.isfinite(self.p95_ttft_s) else None,
            "seeds": [
                {
                    "verdict": run.verdict,
                    "p95_s": run.p95_s if run.verdict == "steady" else None,
                    "jobs": run.num_jobs,
                    "counted_jobs": len(run.job_times_s),
                    "warm_up_s": run.warm_up_s,
                    "simulated_s": run.simulated_s,
                }
                for run in self.runs
            ],
        }


def measure_point(
    setup: Setup, load: LoadOptions, num_machines: int, target: Target, measure: Measure
) -> Point:
    """So many machines under the load: quickly, then precisely if that leaves a doubt about the target."""
    point = measure_jobs(setup, load, num_machines, measure, QUICK)
    if point.verdict == "steady" and _is_doubtful(point, target):
        point = measure_jobs(setup, load, num_machines, measure, PRECISE)
    return point


def measure_jobs(
    setup: Setup, load: LoadOptions, num_machines: int, measure: Measure, min_jobs: int = PRECISE
) -> Point:
    """So many machines under so many jobs: each simulated at its share, or all of them behind a router."""
    assert load.jps is not None
    if setup.fleet is not None:
        servers = setup.fleet.servers if len(setup.fleet.servers) == num_machines else ("",) * num_machines
        fleet = replace(setup.fleet, servers=servers)
        return Point(num_machines, load.jps, tuple(measure(replace(setup, fleet=fleet), load, min_jobs)))
    share = replace(load, jps=load.jps / num_machines)
    return Point(num_machines, load.jps, tuple(measure(setup, share, min_jobs)))


def is_clear(run: Steady | Point, target: Target) -> bool:
    """Whether steady machines keep a target so well that more jobs or seeds would hardly change it."""
    return run.verdict == "steady" and target.get_use(run) <= CLEAR * (1 - target.margin)


def _is_doubtful(point: Point, target: Target) -> bool:
    uses = [target.get_use(run) / (1 - target.margin) for run in point.runs]
    distance = abs(target.get_use(point) / (1 - target.margin) - 1)
    if len(uses) == 1:
        return distance < NEAR
    error = stdev(uses) / math.sqrt(len(uses))
    return error > TOLERANCE and distance < max(NEAR, NUM_ERRORS * error)


def format_s(seconds: float) -> str:
    """Seconds with three digits or so."""
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
