"""`tenuto compare`: GPUs × policies × loads × seeds, simulated."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from tenuto.cli.command import Command, Given, Part
from tenuto.cli.simulations import GridOptions, say_notes
from tenuto.core.console import Progress, count, format_time
from tenuto.core.errors import ConfigError
from tenuto.core.settings import option
from tenuto.records.files import writing
from tenuto.records.text import is_overloaded, print_text, write_csv
from tenuto.sim.compare import (
    Cell,
    check_cells,
    format_rows,
    make_arms,
    make_grid,
    make_rows,
    read_results,
    run_grid,
)
from tenuto.sim.run import Extras
from tenuto.sim.setup import FleetOptions, Setup
from tenuto.workload.load import JPS_HELP, LoadOptions, seed_option


@dataclass(frozen=True, kw_only=True)
class CompareOptions(GridOptions):
    """The options of a sweep."""

    GROUP = "the sweep"

    jps: tuple[float, ...] = option((), JPS_HELP, above=0, alias="--request-rate")
    seeds: tuple[int, ...] = seed_option((42,), "seeds of the arrivals and of generated jobs")
    out: Path = option(MISSING, "results.jsonl goes here", metavar="DIR")
    workers: int | None = option(None, "processes", minimum=1, shown_default="one per core")
    ray: str | None = option(None, "run on a Ray cluster instead (auto: find it)", metavar="ADDRESS")
    as_json: bool = option(False, "print the table as JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write the table as CSV too", is_written=True)
    split: bool = option(
        True,
        "also run stock with smaller steps, and each policy without leases. The table then has stock at its "
        "best step size, and says where a gain comes from. This adds at most 6 runs for each run of stock "
        "with one policy, and 2 for each further policy",
    )
    strict: bool = option(False, "stop with an error when a policy raises or gives a wrong answer")


def run(given: Given) -> int:
    """Simulate a sweep."""
    options = given.read(CompareOptions)
    extras, load = Extras(strict=options.strict), given.read(LoadOptions, jps=None, seed=LoadOptions.seed)
    setups = [(setup, extras) for setup in options.read_setups(given)]
    cells = make_grid(setups, load, options.jps or (None,), options.seeds)
    say_notes(check_cells(cells))
    arms = make_arms(cells) if options.split else []
    with _locked(options.out):
        return _run(options, cells, arms)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep others out of it: two at once would cut off each other's lines."""
    with writing(folder, is_folder=True):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"--out {folder}: another tenuto compare is using this folder") from error
        yield
    finally:
        os.close(handle)


def _run(options: CompareOptions, cells: list[Cell], arms: list[Cell]) -> int:
    done = read_results(options.out)
    if any(record.get("client") for record in done.values()):
        raise ConfigError(f"--out {options.out} holds results of tenuto bench or ab; name another folder")
    if arms:
        more = f"{count(len(arms), 'more run')} beside the {len(cells)}, to show where a gain comes from"
        say_notes([f"{more}; --no-split leaves them out"])
    every = [*cells, *arms]
    runs = _Runs(every, len({cell.key for cell in every} & set(done)))
    try:
        with runs.show_waiting():
            records, beside = run_grid(
                cells, arms, options.out, workers=options.workers, ray=options.ray, tell=runs.say
            )
    except KeyboardInterrupt:
        runs.say_kept(options.out)
        raise
    rows = make_rows(records, beside)
    print_text(json.dumps(rows) if options.as_json else format_rows(rows), options.csv)
    if options.csv:
        write_csv(options.csv, rows)
    return 0


class _Runs:
    """Prints a line on stderr per finished run, with the remaining time, and progress lines in between."""

    def __init__(self, cells: list[Cell], num_done_before: int) -> None:
        self._num_cells = len(cells)
        self._num_done_before, self._num_done = num_done_before, 0
        self._started_s = time.monotonic()
        self._progress = Progress()
        if num_done_before:
            self._progress.say(f"{num_done_before} of {count(len(cells), 'run')} done already")

    def show_waiting(self) -> AbstractContextManager[None]:
        return self._progress.keep_updating(
            lambda: f"{self._num_done} of {count(self._num_cells, 'run')} done"
        )

    def say_kept(self, folder: Path) -> None:
        self._progress.say(
            f"{self._num_done} of {count(self._num_cells, 'run')} kept in {folder}; "
            "the same command goes on from there"
        )

    def say(self, cell: Cell, record: dict[str, Any]) -> None:
        self._num_done += 1
        num_new = self._num_done - self._num_done_before
        if num_new <= 0:
            return
        spent_s = time.monotonic() - self._started_s
        left_s = spent_s / num_new * (self._num_cells - self._num_done)
        self._progress.say(
            f"{self._num_done} of {self._num_cells}, {format_time(left_s)} left: {cell.title}: "
            f"mean {record['job_s']['mean']:.2f} s{', overloaded' if is_overloaded(record) else ''}"
        )


COMPARE = Command(
    summary="""\
Simulate every GPU with every policy, load and seed, on all cores, and mark the lowest mean of each cell.
Runs that are already in DIR/results.jsonl are not repeated, so the same command continues a stopped sweep.
""",
    examples="""\
  tenuto compare --gpu H200 --jps 1,3,6,10,15 --policies stock,continuum-fixed,tenuto --out runs/h200
  tenuto compare --gpu A100-80,H100 --workload swe-bench --window 300 --jps 0.5,1,2 --policies stock,tenuto \\
      --seeds 1,2,3 --out runs/swe
""",
    options=(
        Part(GridOptions),
        Part(CompareOptions),
        Part(LoadOptions, without=("jps", "seed")),
        Part(FleetOptions),
        Part(Setup, without=("gpu",)),
    ),
    run=run,
    main=("gpus", "policies", "out", "model", "workload", "jps", "seeds", "split", "workers", "as_json"),
)
