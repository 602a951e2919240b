"""A sweep: each cell is run once, on all cores or a Ray cluster. Cells with a result are not run again."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError, DataError
from tenuto.records.codec import Fields
from tenuto.records.files import read_objects
from tenuto.records.load import read_run
from tenuto.records.schema import get_config
from tenuto.sim.fleet import check_fleet
from tenuto.sim.machine import build
from tenuto.sim.run import NO_EXTRAS, Extras, run
from tenuto.sim.setup import Setup, name_gpus
from tenuto.sim.sweep.at_once import open_processes
from tenuto.workload.load import LoadOptions, make_workload

RESULTS = "results.jsonl"

Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    setup: Setup
    load: LoadOptions
    extras: Extras = NO_EXTRAS

    @property
    def key(self) -> str:
        """Its configuration as text: equal runs have equal keys."""
        return json.dumps(get_config(self.setup, self.load), sort_keys=True)

    @property
    def title(self) -> str:
        """Its name in the progress output."""
        load = "" if self.load.jps is None else f" {self.load.jps:g}/s"
        setup = self.setup
        router = "" if setup.fleet is None else f"@{setup.fleet.router}"
        steps = "" if setup.step_tokens is None else f" @{setup.step_tokens}"
        kept = "" if setup.keep_kv else " keeping no KV"
        return (
            f"{name_gpus(setup, setup.gpu)} {setup.policy}{steps}{kept}{router}{load} seed {self.load.seed}"
        )


def check_cells(cells: Sequence[Cell]) -> list[str]:
    """Build every machine and read every workload once, so that mistakes are found before the runs.

    Returns the machines' notes.
    """
    machines = {json.dumps(get_config(cell.setup, LoadOptions())): cell for cell in cells}.values()
    notes = [note for cell in machines for note in _get_notes(cell)]
    for load in dict.fromkeys(cell.load for cell in cells if cell.extras.workload is None):
        make_workload(load)
    return notes


def _get_notes(cell: Cell) -> Sequence[str]:
    if cell.setup.fleet is not None:
        return check_fleet(cell.setup, cell.extras.policy)
    return build(cell.setup, cell.extras.policy).notes


def read_results(folder: Path) -> dict[str, Record]:
    """Records of the runs that are done, by key. An incomplete last line is removed from the file.

    Raises DataError, and does not change the file, for any other line that is not a record of this version.
    """
    path, done = folder / RESULTS, {}
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    whole = data[: data.rfind(b"\n") + 1]
    cut: list[str] = []
    try:
        objects = read_objects(path, cut.append) if data else []
    except DataError:
        if whole:
            raise
        objects = []  # the first record was cut off
    for fields in objects:
        _check_record(fields)
        done[json.dumps(fields.values["config"], sort_keys=True)] = fields.values
    if data != whole:
        path.write_bytes(whole if cut or not objects else data + b"\n")
    return done


def _check_record(fields: Fields) -> None:
    """Raise DataError if a record lacks what a sweep's table needs."""
    read_run(fields)
    for name in ("gpu", "model", "workload", "policy"):
        fields.text(name)
    for name in ("mean", "p95"):
        fields.part("job_s").number(name)
    for name in ("recomputed_tokens", "prompt_tokens"):
        fields.count(name)
    fields.part("config")


def run_cells(
    cells: Iterable[Cell], folder: Path, *, workers: int | None = None, ray: str | None = None
) -> Iterator[tuple[Cell, Record]]:
    """Run the cells that are not done yet. Yields each record as it comes and appends it to the results."""
    done = read_results(folder)
    missing = []
    for cell in cells:
        if cell.key in done:
            yield cell, done[cell.key]
        else:
            missing.append(cell)
    if not missing:
        return
    with open(folder / RESULTS, "a", encoding="utf-8") as file:
        for cell, record in _run_on_ray(missing, ray) if ray else run_here(missing, workers):
            file.write(json.dumps(record) + "\n")
            file.flush()
            yield cell, record


def run_cell(cell: Cell) -> Record:
    """One run's record."""
    return run(cell.setup, cell.load, extras=cell.extras).record


def run_here(cells: list[Cell], workers: int | None) -> Iterator[tuple[Cell, Record]]:
    """Run cells on this machine, in `workers` processes (None: one per core); in this one if that is 1."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(cells))
    if workers == 1:
        yield from ((cell, run_cell(cell)) for cell in cells)
        return
    # The longest runs first, so that no core waits for one at the end.
    cells = sorted(cells, key=lambda cell: -(cell.load.jps or 0))
    with open_processes(workers) as pool:
        futures = {pool.submit(run_cell, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _run_on_ray(cells: list[Cell], address: str) -> Iterator[tuple[Cell, Record]]:
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install ray") from None
    if not ray.is_initialized():
        ray.init(address=address)
    remote = ray.remote(run_cell)
    futures = {remote.remote(cell): cell for cell in cells}
    waiting = list(futures)
    while waiting:
        [ready], waiting = ray.wait(waiting, num_returns=1)
        yield futures[ready], ray.get(ready)


def make_grid(
    setups: Iterable[tuple[Setup, Extras]],
    load: LoadOptions,
    rates: Sequence[float | None],
    seeds: Sequence[int],
) -> list[Cell]:
    """Every setup under the load at every rate with every seed, each once. `rates`: jobs per second."""
    loads = [replace(load, jps=rate, seed=seed) for rate in rates for seed in seeds]
    cells = (Cell(setup, each, extras) for (setup, extras), each in itertools.product(setups, loads))
    return list({cell.key: cell for cell in cells}.values())
