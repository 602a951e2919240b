"""So many machines under a load: what came of simulating them, with one seed or with several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean, stdev
from types import TracebackType
from typing import Any, Self

from tenuto.sim.setup import Setup
from tenuto.sim.sweep.at_once import open_processes
from tenuto.sim.sweep.settling import VERDICTS, Verdict
from tenuto.sim.sweep.steady import Steady, Tell, get_p95, simulate_until_steady
from tenuto.sim.sweep.target import Target
from tenuto.workload.load import LoadOptions

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


Say = Callable[[Callable[[], str]], None]
"""Told often how far the runs are. It calls its argument if it wants the words."""
WAIT_S = 0.5


class SeedRunner:
    """Measures machines as `tenuto.sim.sweep.point.Measure`. A context manager: it ends its processes.

    With several processes, several threads may measure at the same time.
    """

    def __init__(
        self, seeds: Sequence[int], *, workers: int, max_jobs: int, say: Say, target: Target | None = None
    ) -> None:
        """`workers`: processes; 1 for this one. `max_jobs`: see `simulate_until_steady`.

        `target`: what `probe` may stop for.
        """
        self._seeds = seeds
        self._max_jobs = max_jobs
        self._say = say
        self._target = target
        self._names: dict[Future[Steady], str] = {}
        """Of the runs that have not ended, in other processes."""
        self._num_done = 0
        self._known: dict[tuple[str, str], Steady] = {}
        """Steady runs of each setup and load."""
        self._started_s = time.monotonic()
        self._num_begun, self._num_measured = 0, 0
        self._num_left: dict[int, int] = {}
        """Points that are still to be measured, by who said so."""
        self._workers = workers
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the processes."""
        self._pool = self._stack.enter_context(open_processes(self._workers)) if self._workers > 1 else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes; at once after an error."""
        self._stack.__exit__(kind, error, trace)

    def expect(self, who: int, num_points: int) -> None:
        """So many points are still to be measured for somebody."""
        self._num_left[who] = num_points

    def get_left_s(self) -> float | None:
        """About how many seconds the points take that are expected; None before the first is measured."""
        if not self._num_measured:
            return None
        # Those that are being measured are half done in the mean.
        spent_s = (time.monotonic() - self._started_s) / ((self._num_begun + self._num_measured) / 2)
        return spent_s * sum(self._num_left.values())

    def __call__(self, setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        """A run for each seed; only the first that is not steady, if one is not."""
        return self._measure(setup, load, min_jobs, None, lambda run: False)

    def judge(self, setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        """The same, but a run ends once the target is surely missed: it is "late"."""
        return self._measure(setup, load, min_jobs, self._target, lambda run: False)

    def probe(self, setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        """The same, but only the first seed's run if that keeps the target clearly."""
        target = self._target
        assert target is not None
        return self._measure(setup, load, min_jobs, target, lambda run: is_clear(run, target))

    def _measure(
        self,
        setup: Setup,
        load: LoadOptions,
        min_jobs: int,
        target: Target | None,
        is_enough: Callable[[Steady], bool],
    ) -> list[Steady]:
        min_jobs = min(min_jobs, self._max_jobs)
        simulate = partial(
            simulate_until_steady, setup, min_jobs=min_jobs, max_jobs=self._max_jobs, target=target
        )
        loads = [replace(load, seed=seed) for seed in self._seeds]
        known = [self._known.get((repr(setup), repr(load))) for load in loads]
        # A run that went on for long enough would come out the same again.
        known = [run if run is not None and run.num_jobs >= min_jobs else None for run in known]
        new = [load for load, run in zip(loads, known, strict=True) if run is None]
        names = [f"{setup.gpu} {setup.policy} at {load.jps:.3g} jobs/s, seed {load.seed}" for load in new]
        simulated = (self._run_here if self._pool is None else self._run_apart)(simulate, new, names)
        runs: list[Steady] = []
        self._num_begun += 1
        for load, old in zip(loads, known, strict=True):
            run = next(simulated) if old is None else old
            runs = [*runs, run] if run.verdict == "steady" else [run]
            if run.verdict != "steady":
                break
            self._known[repr(setup), repr(load)] = run
            if len(runs) == 1 and is_enough(run):
                break
        self._num_measured += 1
        return runs

    def _run_here(
        self, simulate: Callable[..., Steady], loads: list[LoadOptions], names: list[str]
    ) -> Iterator[Steady]:
        for load, name in zip(loads, names, strict=True):
            yield simulate(load, tell=self._make_tell(name))

    def _make_tell(self, name: str) -> Tell:
        def tell(now_s: float, num_jobs: int, backlog: int) -> None:
            jobs = f"{num_jobs} jobs came, {backlog} are there"
            self._say(lambda: f"{self._describe_left()}{name}: {now_s:.0f} s simulated, {jobs}")

        return tell

    def _run_apart(
        self, simulate: Callable[..., Steady], loads: list[LoadOptions], names: list[str]
    ) -> Iterator[Steady]:
        assert self._pool is not None
        # Most machines that are not steady show it with the first seed. The others run only after that.
        for batch in (slice(1), slice(1, None)):
            futures = [self._pool.submit(simulate, load) for load in loads[batch]]
            self._names.update(zip(futures, names[batch], strict=True))
            try:
                # In the order of the seeds, so that the answer does not depend on which is quicker.
                for future in futures:
                    while (run := _try_get(future)) is None:
                        self._say(self._describe)
                    yield run
            finally:
                for future in futures:
                    future.cancel()
                    del self._names[future]
                    self._num_done += 1

    def _describe(self) -> str:
        running = [name for future, name in list(self._names.items()) if future.running()]
        return f"{self._describe_left()}{self._num_done} runs done; now {'; '.join(running)}"

    def _describe_left(self) -> str:
        left_s = self.get_left_s()
        return "" if left_s is None else f"about {int(left_s) // 60}:{int(left_s) % 60:02} left; "


def _try_get(future: Future[Steady]) -> Steady | None:
    try:
        return future.result(timeout=WAIT_S)
    except NotYet:
        return None
