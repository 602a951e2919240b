"""One machine, simulated until it is steady with each of several seeds, in this process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from types import TracebackType
from typing import Self

from tenuto.sim.setup import Setup
from tenuto.sim.sweep.steady import Steady, Tell, simulate_until_steady
from tenuto.workload.load_options import LoadOptions

Say = Callable[[Callable[[], str]], None]
"""Told often how far the runs are. It calls its argument if it wants the words."""
WAIT_S = 0.5


class SeedRunner:
    """Measures machines as `tenuto.sim.sweep.plan.Measure`. A context manager: it ends its processes.

    `workers`: processes; 1 for this one. `max_jobs`: see `simulate_until_steady`.
    """

    def __init__(self, seeds: Sequence[int], *, workers: int, max_jobs: int, say: Say) -> None:
        self._seeds = seeds
        self._max_jobs = max_jobs
        self._say = say
        workers = min(workers, len(seeds))
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
        loads = [replace(load, seed=seed) for seed in self._seeds]
        runs = []
        for run in (self._run_here if self._pool is None else self._run_apart)(setup, loads, min_jobs):
            if run.verdict != "steady":
                return [run]
            runs.append(run)
        return runs

    def _run_here(self, setup: Setup, loads: list[LoadOptions], min_jobs: int) -> Iterator[Steady]:
        for load in loads:
            tell = self._make_tell(setup, load)
            yield simulate_until_steady(
                setup, load, min_jobs=min(min_jobs, self._max_jobs), max_jobs=self._max_jobs, tell=tell
            )

    def _run_apart(self, setup: Setup, loads: list[LoadOptions], min_jobs: int) -> Iterator[Steady]:
        assert self._pool is not None
        futures: list[Future[Steady]] = [
            self._pool.submit(
                simulate_until_steady,
                setup,
                load,
                min_jobs=min(min_jobs, self._max_jobs),
                max_jobs=self._max_jobs,
            )
            for load in loads
        ]
        try:
            # In the order of the seeds, so that the answer does not depend on which process is quicker.
            for load, future in zip(loads, futures, strict=True):
                while (run := _try_get(future)) is None:
                    self._say(lambda load=load: _name(setup, load))  # type: ignore[misc]
                yield run
        finally:
            for future in futures:
                future.cancel()

    def _make_tell(self, setup: Setup, load: LoadOptions) -> Tell:
        name = _name(setup, load)

        def tell(now_s: float, num_jobs: int, backlog: int) -> None:
            self._say(lambda: f"{name}: {now_s:.0f} s simulated, {num_jobs} jobs came, {backlog} are there")

        return tell


def _try_get(future: Future[Steady]) -> Steady | None:
    try:
        return future.result(timeout=WAIT_S)
    except NotYet:
        return None


def _name(setup: Setup, load: LoadOptions) -> str:
    return f"{setup.gpu} {setup.policy} at {load.jps:.3g} jobs/s, seed {load.seed}"
