"""One machine, simulated until it is steady with each of several seeds, in this process or in several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from tenuto.sim.setup import Setup
from tenuto.sim.sweep.at_once import open_processes
from tenuto.sim.sweep.point import is_clear
from tenuto.sim.sweep.steady import Steady, Tell, simulate_until_steady
from tenuto.sim.sweep.target import Target
from tenuto.workload.load_options import LoadOptions

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
