"""One machine under a load that never ends: simulated until it is steady, or surely overloaded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from tenuto.records.metrics import get_percentile
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.machine import build
from tenuto.sim.run import Extras, Prepared, get_isolated_time_s, prepare
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Simulation
from tenuto.sim.sweep.settling import COHORT, STRETCH, Look, Settling, Verdict, are_done, look
from tenuto.sim.sweep.target import Target
from tenuto.workload import LoadOptions, Workload, make_workload
from tenuto.workload.load import GENERATORS
from tenuto.workload.transform import arrival_times, reassign_arrivals, repeat_jobs, within

FIRST_LOOK = 12
"""A machine is looked at first after so many times the time of a job alone."""
LONGEST = 40
"""And it is watched for so many times that time at least, before it is given up."""
FEW = 3
"""A first run has so many times the least jobs."""
MOST_JOBS = 20_000
"""Jobs that are made for one run at most."""
NUM_SAMPLED = 60
"""Jobs whose mean time alone is taken for that of all."""

HOPELESS = 1.3
"""A target is surely missed if the P95 of the jobs that came is so many times as long; those that are not
done count with their age."""
MIN_COHORT = 60
"""Jobs or turns that this takes at least."""
GLANCE = 1.15
"""Each check of that is this much later than the one before."""

Tell = Callable[[float, int, int], None]
"""Told the simulated seconds, the jobs that arrived and the jobs in the system."""


@dataclass(frozen=True)
class Steady:
    """What one machine does under one load, with one seed. Rates are per second and machine."""

    verdict: Verdict
    offered_jps: float
    finished_jps: float
    job_times_s: tuple[float, ...]
    """Of the jobs that arrived after the warm-up and long enough before the end. One that is not done counts
    with its age."""
    ttfts_s: tuple[float, ...]
    """Of the turns that were due in that time."""
    simulated_s: float
    warm_up_s: float
    num_jobs: int
    """Jobs that arrived in all."""
    num_cut: int
    """Turns that are too long for the machine, of all turns that were made."""
    step_cost: str

    @property
    def p95_s(self) -> float:
        """P95 of the job times; infinite without jobs."""
        return get_p95(self.job_times_s)

    @property
    def p95_ttft_s(self) -> float:
        """P95 of the times to first token; infinite without turns."""
        return get_p95(self.ttfts_s)


def get_p95(times_s: tuple[float, ...]) -> float:
    """The P95; infinite without values."""
    return get_percentile(times_s, 95) if times_s else math.inf


def simulate_until_steady(
    setup: Setup,
    load: LoadOptions,
    *,
    min_jobs: int,
    max_jobs: int,
    target: Target | None = None,
    tell: Tell | None = None,
) -> Steady:
    """Simulate `load.jps` jobs a second on one machine. `load.window_s` is the shortest time to watch it.

    Gives up after `max_jobs`; with a target also once that is surely missed. Raises as `tenuto.sim.run.run`.
    """
    alone_s = _get_time_alone_s(setup, load)
    # Most machines settle early, and making jobs takes time: the run with all jobs is for those that do not.
    few = FEW * min_jobs if FEW * min_jobs * STRETCH < max_jobs else max_jobs
    for most in dict.fromkeys((few, max_jobs)):
        steady = _simulate(setup, load, alone_s, min_jobs, most, target, tell)
        if steady.verdict != "unsettled":
            break
    return steady


def _simulate(  # noqa: PLR0913 - a run's own
    setup: Setup,
    load: LoadOptions,
    alone_s: float,
    min_jobs: int,
    max_jobs: int,
    target: Target | None,
    tell: Tell | None,
) -> Steady:
    assert load.jps is not None
    settling = Settling(
        first_look_s=FIRST_LOOK * alone_s,
        min_jobs=min_jobs,
        max_jobs=max_jobs,
        shortest_s=load.window_s or 0.0,
        longest_s=LONGEST * alone_s,
    )
    needed_s = max(max_jobs / load.jps, settling.shortest_s, settling.longest_s)
    horizon_s = max(min(needed_s * STRETCH, MOST_JOBS / load.jps), settling.first_look_s * STRETCH)
    observer = _Observer(settling, horizon_s, target, tell)
    prepared = prepare(
        setup, load, extras=Extras(workload=make_long_workload(load, horizon_s)), watch=observer
    )
    observer.follow(prepared)
    prepared.simulation.run()
    return observer.make_result()


@lru_cache(maxsize=8)
def make_long_workload(load: LoadOptions, window_s: float) -> Workload:
    """Jobs at the load's rate for so many seconds. The jobs of a trace come again and again."""
    assert load.jps is not None
    if load.workload in GENERATORS:
        return make_workload(replace(load, window_s=window_s))
    trace = make_workload(replace(load, jps=None, window_s=None, arrival=LoadOptions.arrival))
    times_s = list(within(arrival_times(load.arrival, load.jps, load.seed), window_s))
    return reassign_arrivals(repeat_jobs(trace, len(times_s), load.seed), iter(times_s))


def _get_time_alone_s(setup: Setup, load: LoadOptions) -> float:
    """Mean seconds of the load's first jobs, each alone on the machine."""
    assert load.jps is not None
    machine = build(setup)
    jobs = [job for job in make_long_workload(load, NUM_SAMPLED / load.jps).jobs if job.parent is None]
    budget = machine.config.max_num_batched_tokens
    return fmean(get_isolated_time_s(job, machine.step_cost, budget) for job in jobs[:NUM_SAMPLED])


class _Observer:
    """Watches a simulation and stops it when there is a verdict."""

    def __init__(
        self, settling: Settling, horizon_s: float, target: Target | None, tell: Tell | None
    ) -> None:
        self._settling = settling
        self._horizon_s = horizon_s
        self._target = target
        self._tell = tell
        # No job is older than the simulation.
        self._next_glance_s = math.inf if target is None else HOPELESS * (target.p95_s or 0.0)
        self._verdict: Verdict = "unsettled"
        self._seen: Look | None = None
        self._now_s = 0.0
        self._num_read = 0

    def follow(self, prepared: Prepared) -> None:
        """Say which simulation this is. Call it before the simulation runs."""
        self._prepared = prepared
        self._simulation: Simulation = prepared.simulation
        jobs = sorted(
            (job for job in prepared.workload.jobs if job.parent is None), key=lambda job: job.arrival_s
        )
        self._arrivals_s = [job.arrival_s for job in jobs]
        self._job_ids = [job.job_id for job in jobs]
        self._num_left = {job.job_id: len(job.turns) for job in jobs}
        self._end_s: dict[str, float] = {}
        self._ends_s: list[float] = []

    def __call__(self, now_s: float, scheduler: Scheduler) -> None:
        """Look at the machine, if it is time to."""
        if self._tell is not None:
            self._read()
            num_jobs = bisect_right(self._arrivals_s, now_s)
            self._tell(now_s, num_jobs, num_jobs - len(self._ends_s))
        if self._next_glance_s <= now_s < self._settling.next_look_s:
            self._glance(now_s)
        if now_s < self._settling.next_look_s:
            return
        self._read()
        self._now_s = now_s
        verdict = self._settling.decide(self._arrivals_s, self._ends_s, now_s)
        self._seen = self._settling.last
        is_over = self._settling.next_look_s > self._horizon_s
        if verdict == "steady" and not is_over and not are_done(self._arrivals_s, self._get_times_s(), now_s):
            return
        if verdict is not None or is_over:
            self._verdict = verdict or "unsettled"
            self._simulation.stop()

    def _glance(self, now_s: float) -> None:
        """Stop the simulation if its target is surely missed."""
        assert self._target is not None
        self._next_glance_s = max(self._next_glance_s * GLANCE, now_s)
        if bisect_right(self._arrivals_s, COHORT * now_s) < MIN_COHORT:
            return
        self._read()
        self._now_s = now_s
        self._seen = look(self._arrivals_s, self._ends_s, now_s)
        so_far = self.make_result()
        if (
            min(len(so_far.job_times_s), len(so_far.ttfts_s)) >= MIN_COHORT
            and self._target.get_use(so_far) >= HOPELESS
        ):
            self._verdict = "late"
            self._simulation.stop()

    def _read(self) -> None:
        """Note the jobs that ended since the last call. Turns are recorded in the order of their ends."""
        records = self._simulation.records
        for turn in records[self._num_read :]:
            if turn.job in self._num_left and turn.last_token_s is not None:
                self._num_left[turn.job] -= 1
                if self._num_left[turn.job] == 0:
                    self._end_s[turn.job] = turn.last_token_s
                    self._ends_s.append(turn.last_token_s)
        self._num_read = len(records)

    def _get_times_s(self) -> list[float]:
        """The time or the age of each job that arrived until now, in order of arrival."""
        num = bisect_right(self._arrivals_s, self._now_s)
        return [
            self._end_s.get(job_id, self._now_s) - arrival_s
            for job_id, arrival_s in zip(self._job_ids[:num], self._arrivals_s[:num], strict=True)
        ]

    def make_result(self) -> Steady:
        """What was seen until the last look."""
        seen = self._seen
        assert seen is not None, "a simulation is looked at before it ends"
        start_s, end_s = seen.warm_up_s, COHORT * self._now_s
        first, last = (bisect_right(self._arrivals_s, at_s) for at_s in (start_s, end_s))
        ttfts_s = [
            turn.ttft_s
            for turn in self._simulation.records
            if start_s < turn.due_s <= end_s and turn.ttft_s is not None
        ]
        return Steady(
            verdict=self._verdict,
            offered_jps=seen.offered_jps,
            finished_jps=seen.finished_jps,
            job_times_s=tuple(self._get_times_s()[first:last]),
            ttfts_s=tuple(ttfts_s),
            simulated_s=self._now_s,
            warm_up_s=start_s,
            num_jobs=bisect_right(self._arrivals_s, self._now_s),
            num_cut=self._prepared.num_cut,
            step_cost=self._prepared.machine.step_cost_name,
        )
