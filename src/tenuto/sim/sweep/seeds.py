"""One machine, simulated until it is steady with each of several seeds, in this process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from tenuto.sim.setup import Setup
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
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context) if workers > 1 else None

    def __enter__(self) -> Self:
        """Nothing to open: processes start with the first run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        """A run for each seed; only the first that is not steady, if one is not."""
        return self._measure(setup, load, min_jobs, None)

    def probe(self, setup: Setup, load: LoadOptions, min_jobs: int) -> list[Steady]:
        """The same, but a run ends once the target is surely missed: it is "late"."""
        return self._measure(setup, load, min_jobs, self._target)

    def _measure(self, setup: Setup, load: LoadOptions, min_jobs: int, target: Target | None) -> list[Steady]:
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
        runs = []
        for load, old in zip(loads, known, strict=True):
            run = next(simulated) if old is None else old
            if run.verdict != "steady":
                return [run]
            self._known[repr(setup), repr(load)] = run
            runs.append(run)
        return runs

    def _run_here(
        self, simulate: Callable[..., Steady], loads: list[LoadOptions], names: list[str]
    ) -> Iterator[Steady]:
        for load, name in zip(loads, names, strict=True):
            yield simulate(load, tell=self._make_tell(name))

    def _make_tell(self, name: str) -> Tell:
        def tell(now_s: float, num_jobs: int, backlog: int) -> None:
            self._say(lambda: f"{name}: {now_s:.0f} s simulated, {num_jobs} jobs came, {backlog} are there")

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
        return f"{self._num_done} runs done; now {'; '.join(running)}"


def _try_get(future: Future[Steady]) -> Steady | None:
    try:
        return future.result(timeout=WAIT_S)
    except NotYet:
        return None
