"""One machine under a load that never ends: simulated until it is steady, or surely overloaded.

    jobs in the system │            growing                 │   steady
                       │         ⟋                          │   ╭∿∿∿∿∿∿∿
                       │     ⟋                              │  ╱
                       │ ⟋                                  │ ╱ warm-up
                       └───────────────── time              └────────── time

The verdict depends only on when jobs arrived and left. The backlog is the number of jobs in the system. A
system is steady if its backlog took up hardly any of the jobs that arrived in the last three quarters of the
time. The warm-up, which the measured times leave out, is found by MSER (White 1997: cut where the standard
error of the mean of the rest is smallest).

A run ends when two looks in a row find the system steady, or three find that its backlog surely grows. The
times of the looks do not depend on how long the user asked to watch, so the answer does not either. If the
question is whether a target is kept, a run ends as soon as the answer is clear (`Effort`).

Near the capacity chance decides. Of 40 queues with one server that were watched for 600 to 2,000 jobs, this
many counted as steady: all at 90 % of the capacity, 17 at 105 %, 7 at 110 %, none at 120 %.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Literal, Protocol, get_args

from tenuto.core.errors import ConfigError
from tenuto.records.metrics import get_percentile
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.machine import build
from tenuto.sim.run import Extras, Prepared, get_isolated_time_s, prepare
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Simulation
from tenuto.workload.load import GENERATORS, LoadOptions, make_workload
from tenuto.workload.schema import Workload
from tenuto.workload.transform import arrival_times, reassign_arrivals, repeat_jobs, within

State = Literal["steady", "growing", "unclear"]

NUM_POINTS = 200
"""Points in time at which the backlog is looked at."""
NUM_BATCHES = 20
"""The trend is fitted to the means of this many batches of neighbouring points."""
MAX_LIKENESS = 0.8
"""Upper bound of the correlation of neighbouring batches."""
EARLY = 0.25
"""The trend of the backlog is that after this share of the time."""
MAX_LEFT = 0.035
"""A steady backlog takes up this share of the arrivals at most. A smaller overload is not seen."""
MIN_GROWTH = 0.6
"""A growing backlog grows by this share of its mean at least. It would be 1.2 for a backlog that grows evenly
from nothing."""
MIN_ENDS = 40
"""The rate at which jobs leave is known only if at least this many left in a quarter of the time."""


@dataclass(frozen=True)
class Look:
    """The result of one check of a system. Rates are jobs per second after the warm-up."""

    state: State
    warm_up_s: float
    offered_jps: float
    finished_jps: float


def look(arrivals_s: Sequence[float], ends_s: Sequence[float], now_s: float) -> Look:
    """The state of a system at a moment. Both lists are sorted; later events are ignored."""
    points_s = [now_s * (number + 1) / NUM_POINTS for number in range(NUM_POINTS)]
    backlog = [float(bisect_right(arrivals_s, at_s) - bisect_right(ends_s, at_s)) for at_s in points_s]
    warm_up_s = now_s * find_warm_up(backlog) / NUM_POINTS
    late = backlog[int(EARLY * NUM_POINTS) :]
    growth, error = fit_trend(late)
    num_late = _count(arrivals_s, EARLY * now_s, now_s)
    grows = growth >= max(MIN_GROWTH * fmean(late), 3 * error)
    # A backlog that wanders may hide its growth, so the error counts as growth.
    if growth + error <= MAX_LEFT * num_late:
        state: State = "steady"
    elif grows and _is_short(arrivals_s, ends_s, now_s):
        state = "growing"
    else:
        state = "unclear"
    return Look(
        state,
        warm_up_s,
        _get_rate(arrivals_s, warm_up_s, now_s),
        _get_rate(ends_s, warm_up_s, now_s),
    )


def find_warm_up(values: Sequence[float]) -> int:
    """How many values to cut at the beginning, by MSER: half of them at most."""
    best, cut = math.inf, 0
    total = sum(values)
    squares = sum(value * value for value in values)
    num = len(values)
    for start in range(len(values) // 2 + 1):
        variance = max(0.0, squares / num - (total / num) ** 2)
        if variance / num < best:
            best, cut = variance / num, start
        total -= values[start]
        squares -= values[start] ** 2
        num -= 1
    return cut


def fit_trend(values: Sequence[float]) -> tuple[float, float]:
    """The growth of equally spaced values over their whole length, and its standard error.

    It is that of the line through the means of `NUM_BATCHES` batches.
    """
    size = len(values) / NUM_BATCHES
    means = [fmean(values[int(n * size) : int((n + 1) * size)]) for n in range(NUM_BATCHES)]
    middle, mean = (NUM_BATCHES - 1) / 2, fmean(means)
    spread = sum((n - middle) ** 2 for n in range(NUM_BATCHES))
    slope = sum((n - middle) * (value - mean) for n, value in enumerate(means)) / spread
    residuals = [value - mean - slope * (n - middle) for n, value in enumerate(means)]
    squares = sum(each * each for each in residuals)
    error = math.sqrt(squares / (NUM_BATCHES - 2) / spread)
    # A busy queue changes slowly. Neighbouring batches are correlated, so fewer of them are independent.
    likeness = sum(a * b for a, b in pairwise(residuals)) / squares if squares else 0.0
    likeness = min(max(likeness, 0.0), MAX_LIKENESS)
    error *= math.sqrt((1 + likeness) / (1 - likeness))
    return slope * NUM_BATCHES, error * NUM_BATCHES


def _is_short(arrivals_s: Sequence[float], ends_s: Sequence[float], now_s: float) -> bool:
    """Whether surely fewer jobs leave than arrive, and not because the system still fills.

    While it fills, jobs leave faster and faster. When it is overloaded, they leave at one rate, which is less
    than that of the arrivals by more than chance.
    """
    num_arrivals = _count(arrivals_s, now_s / 2, now_s)
    third, fourth = _count(ends_s, now_s / 2, 0.75 * now_s), _count(ends_s, 0.75 * now_s, now_s)
    if third < MIN_ENDS or fourth > third + 3 * math.sqrt(2 * third):
        return False
    return num_arrivals - (third + fourth) > max(0.05 * num_arrivals, 3 * math.sqrt(num_arrivals))


def _count(times_s: Sequence[float], start_s: float, end_s: float) -> int:
    return bisect_right(times_s, end_s) - bisect_right(times_s, start_s)


def _get_rate(times_s: Sequence[float], start_s: float, end_s: float) -> float:
    return _count(times_s, start_s, end_s) / (end_s - start_s)


Verdict = Literal["overloaded", "late", "unsettled", "steady"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the worst to the best. Late: stopped because a target is surely missed."""

NUM_STEADY, NUM_GROWING = 2, 3
"""Looks that must agree. A system whose jobs slow each other down fills for many times the time of a job, and
looks meanwhile as if it grew."""
STRETCH = 2 ** (1 / 3)
"""Factor from the time of one look to the next. The time doubles in three looks."""
COHORT = 0.8
"""Jobs that arrived until this share of the time count. Most of the later ones are not done yet."""


@dataclass(kw_only=True)
class Settling:
    """Decides after each check whether to continue."""

    first_look_s: float
    """Several times as long as a job takes alone, so that the system has had time to fill."""
    max_jobs: int
    shortest_s: float = 0.0
    """A steady system is watched for at least this long."""
    longest_s: float = 0.0
    """The limit in jobs does not end the watch before this time, nor before `shortest_s`."""
    next_look_s: float = field(init=False)
    last: Look | None = field(init=False, default=None)
    _num_steady: int = field(init=False, default=0)
    """Steady looks in a row."""
    _num_growing: int = field(init=False, default=0)
    """Growing looks since the last steady one."""

    def __post_init__(self) -> None:
        self.next_look_s = self.first_look_s

    def decide(self, arrivals_s: Sequence[float], ends_s: Sequence[float], now_s: float) -> Verdict | None:
        """Look at the system. Both lists are sorted and may reach beyond now. None: look again later."""
        self.last = seen = look(arrivals_s, ends_s, now_s)
        num_jobs = bisect_right(arrivals_s, now_s)
        self.next_look_s = now_s * STRETCH
        is_last = num_jobs >= self.max_jobs and now_s >= max(self.longest_s, self.shortest_s)
        self._num_steady = self._num_steady + 1 if seen.state == "steady" else 0
        if seen.state == "steady":
            self._num_growing = 0
        elif seen.state == "growing":
            self._num_growing += 1
            if self._num_growing >= NUM_GROWING or is_last:
                return "overloaded"
        if now_s >= self.shortest_s and self._num_steady >= NUM_STEADY:
            return "steady"
        if is_last:
            return "unsettled"
        return None


def are_done(arrivals_s: Sequence[float], times_s: Sequence[float], now_s: float) -> bool:
    """Whether the cohort's job times are known well enough: each job was watched for at least their P95.

    `times_s` has for each arrival the job's time, or its age if it is not done.
    """
    cohort = times_s[: bisect_right(arrivals_s, COHORT * now_s)]
    return bool(cohort) and get_percentile(cohort, 95) <= (1 - COHORT) * now_s


# Targets.


class Judged(Protocol):
    """Measurements of machines. Both times are infinite if nothing was measured."""

    @property
    def verdict(self) -> Verdict:
        """The result of the simulation: if it is not steady, the times mean nothing."""

    @property
    def p95_s(self) -> float:
        """P95 of the job times."""

    @property
    def p95_ttft_s(self) -> float:
        """P95 of the times to first token."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The P95 of job times, of times to first token, or both. Raises ConfigError without any."""

    p95_s: float | None = None
    p95_ttft_s: float | None = None
    margin: float = 0.0
    """Share of the targets that must be left over."""

    def __post_init__(self) -> None:
        if self.p95_s is None and self.p95_ttft_s is None:
            raise ConfigError("say what the GPUs must keep: --p95 or --p95-ttft, in seconds")

    def get_use(self, judged: Judged) -> float:
        """The largest ratio of a P95 to its target less the margin; 1 is just enough."""
        pairs = ((judged.p95_s, self.p95_s), (judged.p95_ttft_s, self.p95_ttft_s))
        return max(time_s / most_s for time_s, most_s in pairs if most_s is not None) / (1 - self.margin)

    def is_met(self, judged: Judged) -> bool:
        """Whether the targets are kept, with the margin, in a steady state."""
        return judged.verdict == "steady" and self.get_use(judged) <= 1

    def __str__(self) -> str:
        names = (("P95 job time", self.p95_s), ("P95 TTFT", self.p95_ttft_s))
        words = " and ".join(f"{name} {value:g} s" for name, value in names if value is not None)
        return f"{words}, less a margin of {self.margin:.0%}" if self.margin else words


MISSED = 1.15
"""A steady machine clearly misses a target if its P95 is this many times as long."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to simulate. The clearer the answer, the shorter and fewer are the runs."""

    num_jobs: int
    """Fewest jobs of a steady run."""
    target: Target | None = None
    """The target in question. A run that surely misses it ends, and is "late"."""
    num_clear_jobs: int | None = None
    """Fewest jobs of a steady run that clearly misses or clearly keeps the target."""
    clear: float = 0.0
    """A run clearly keeps the target if its P95 is at most this share of it."""
    num_seeds: int | None = None
    """Number of seeds; None for all."""

    @property
    def num_fewest_jobs(self) -> int:
        """Fewest jobs of any steady run."""
        return self.num_jobs if self.num_clear_jobs is None else min(self.num_clear_jobs, self.num_jobs)

    def is_enough(self, run: Judged, num_jobs: float) -> bool:
        """Whether a steady run in which this many jobs were due is long enough."""
        if num_jobs >= self.num_jobs or self.target is None:
            return num_jobs >= self.num_jobs
        use = self.target.get_use(run)
        return num_jobs >= self.num_fewest_jobs and (use <= self.clear or use >= MISSED)


# The simulation.


FIRST_LOOK = 12
"""A machine is first examined after this many times the time of a job alone."""
LONGEST = 40
"""It is watched for at least this many times that time before it counts as not steady."""
FEW = 3
"""A first run has this many times the minimum number of jobs."""
MOST_JOBS = 20_000
"""Jobs that are made for one run at most, unless more arrive until the first look."""
MOST_UNSEEN_JOBS = 1_000_000
"""Most jobs that are made for one run. These take 2 GB and 40 s to make; more may fill the memory."""
NUM_SAMPLED = 60
"""Number of jobs of a sample, from which the mean time of a job alone is taken."""

HOPELESS = 1.3
"""A target is surely missed if the P95 of the jobs that came is this many times as long; those that are not
done count with their age."""
MIN_COHORT = 60
"""Fewest jobs or turns for that verdict."""
GLANCE = 1.15
"""Factor from the time of one such check to the next."""

Tell = Callable[[float, int, int], None]
"""Called with the simulated seconds, the number of jobs that arrived, and the number in the system."""


@dataclass(frozen=True)
class Steady:
    """What one machine does under one load, with one seed. Rates are per second and machine."""

    verdict: Verdict
    offered_jps: float
    finished_jps: float
    job_times_s: tuple[float, ...]
    """Job times of the jobs that arrived after the warm-up and long enough before the end. A job that is not
    done counts with its age."""
    ttfts_s: tuple[float, ...]
    """Times to first token of the turns that were due in that time."""
    simulated_s: float
    warm_up_s: float
    num_jobs: int
    """Total number of jobs that arrived."""
    num_cut: int
    """Number of generated turns that are too long for the machine."""
    step_cost: str
    seed: int = 0
    policy_faults: int = 0

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
    setup: Setup, load: LoadOptions, effort: Effort, *, max_jobs: int, tell: Tell | None = None
) -> Steady:
    """Simulate `load.jps` jobs a second on one machine. `load.window_s` is the shortest time to watch it.

    Gives up after `max_jobs`. Raises as `tenuto.sim.run.run`.
    """
    assert load.jps is not None
    machine = build(setup)
    jobs = [job for job in take_sample(load).jobs if job.parent is None]
    budget = machine.config.max_num_batched_tokens
    # The mean time of the first jobs, each alone on the machine.
    alone_s = fmean(get_isolated_time_s(job, machine.step_cost.seconds, budget) for job in jobs[:NUM_SAMPLED])
    # Most machines settle early, and generating jobs takes time. So try with few jobs first.
    few = FEW * effort.num_jobs
    for most in dict.fromkeys((few if few * STRETCH < max_jobs else max_jobs, max_jobs)):
        steady = _simulate(setup, load, alone_s, effort, most, tell)
        if steady.verdict != "unsettled":
            break
    return steady


def _simulate(
    setup: Setup, load: LoadOptions, alone_s: float, effort: Effort, max_jobs: int, tell: Tell | None
) -> Steady:
    assert load.jps is not None
    least_s = min(effort.num_fewest_jobs, max_jobs) / load.jps
    settling = Settling(
        first_look_s=_get_first_look_s(FIRST_LOOK * alone_s, least_s),
        max_jobs=max_jobs,
        # The last look comes when less than `STRETCH` times its time is left.
        shortest_s=max(min(load.window_s or 0.0, MOST_JOBS / load.jps / STRETCH), least_s),
        longest_s=LONGEST * alone_s,
    )
    needed_s = max(max_jobs / load.jps, settling.shortest_s, settling.longest_s)
    horizon_s = max(min(needed_s * STRETCH, MOST_JOBS / load.jps), settling.first_look_s * STRETCH)
    if horizon_s * load.jps > MOST_UNSEEN_JOBS:
        # Less, as only tool calls and pauses get shorter, and a plan is also tried with 20 % more load.
        scale = 0.8 * load.scale_tools * MOST_UNSEEN_JOBS / (horizon_s * load.jps)
        raise ConfigError(
            f"{load.workload}: a job takes {alone_s:,.0f} s on average when it is alone, so more than "
            f"{MOST_UNSEEN_JOBS:,} jobs would be simulated at {load.jps:g} jobs/s for one machine; lower "
            f"--jps, or shorten tool calls and people's pauses with --scale-tools {scale:.2g}"
        )
    observer = _Observer(settling, horizon_s, effort, load, tell)
    prepared = prepare(
        setup, load, extras=Extras(workload=make_long_workload(load, horizon_s)), watch=observer
    )
    observer.follow(prepared)
    prepared.simulation.run()
    return observer.make_result()


def _get_first_look_s(soonest_s: float, least_s: float) -> float:
    """The time of the first look, such that a later look comes exactly when a run may end."""
    if least_s <= soonest_s:
        return soonest_s
    return least_s / STRETCH ** math.floor(math.log(least_s / soonest_s, STRETCH))


def take_sample(load: LoadOptions) -> Workload:
    """About `NUM_SAMPLED` jobs of a load. Raises as `make_workload`."""
    assert load.jps is not None
    return make_long_workload(load, NUM_SAMPLED / load.jps)


@lru_cache(maxsize=8)
def make_long_workload(load: LoadOptions, window_s: float) -> Workload:
    """Jobs at the load's rate for this many seconds. The jobs of a trace are repeated."""
    assert load.jps is not None
    if load.workload in GENERATORS:
        return make_workload(replace(load, window_s=window_s))
    trace = make_workload(replace(load, jps=None, window_s=None, arrival=LoadOptions.arrival))
    times_s = list(within(arrival_times(load.arrival, load.jps, load.seed), window_s))
    return reassign_arrivals(repeat_jobs(trace, len(times_s), load.seed), iter(times_s))


class _Observer:
    """Watches a simulation and stops it when there is a verdict."""

    def __init__(
        self, settling: Settling, horizon_s: float, effort: Effort, load: LoadOptions, tell: Tell | None
    ) -> None:
        self._settling = settling
        self._horizon_s = horizon_s
        self._effort = effort
        self._load = load
        self._tell = tell
        target = effort.target
        # No job is older than the simulation.
        self._next_glance_s = (
            math.inf if target is None else HOPELESS * (1 - target.margin) * (target.p95_s or 0.0)
        )
        self._verdict: Verdict = "unsettled"
        self._seen: Look | None = None
        self._now_s = 0.0
        self._num_read = 0

    def follow(self, prepared: Prepared) -> None:
        """Set the simulation to watch. Call it before the simulation runs."""
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
        if verdict == "steady" and not is_over:
            assert self._load.jps is not None
            is_enough = self._effort.is_enough(self.make_result(), now_s * self._load.jps)
            if not is_enough or not are_done(self._arrivals_s, self._get_times_s(), now_s):
                return
        if verdict is not None or is_over:
            self._verdict = verdict or "unsettled"
            self._simulation.stop()

    def _glance(self, now_s: float) -> None:
        """Stop the simulation if its target is surely missed."""
        target = self._effort.target
        assert target is not None
        self._next_glance_s = max(self._next_glance_s * GLANCE, now_s)
        if bisect_right(self._arrivals_s, COHORT * now_s) < MIN_COHORT:
            return
        self._read()
        self._now_s = now_s
        self._seen = look(self._arrivals_s, self._ends_s, now_s)
        so_far = self.make_result()
        if (
            min(len(so_far.job_times_s), len(so_far.ttfts_s)) >= MIN_COHORT
            and target.get_use(so_far) >= HOPELESS
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
        """The result, as of the last look."""
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
            seed=self._load.seed,
            policy_faults=sum(each.driver.num_policy_faults for each in self._simulation.schedulers),
        )
