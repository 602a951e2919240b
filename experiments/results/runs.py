"""Runs the rows of a table in a race, on all cores; what the present code has run is not run again."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.decision_code import (
    GONE,
    Code,
    digest_code,
    draw_older,
    is_equal,
    say_code,
    say_confirmed,
)
from experiments.json_lines import append_lines, read_lines
from experiments.published_memory import with_published_kv
from experiments.results.race import find_missing
from experiments.results.row import Row
from experiments.results.rows import TABLES
from experiments.results.settings import Record, Runs, Setting, Step, add, get_settings, group
from tenuto.core.errors import ConfigError, PolicyError
from tenuto.records.schema import get_config
from tenuto.sim.compare import run_each
from tenuto.sim.cost.tables import installed_version
from tenuto.sim.run import run

KEPT = (
    *("gpu", "model", "workload", "jps", "jobs", "job_s", "slowdown", "ttft_s", "plain_ttft_s", "itl_s"),
    *("queue_s", "finished_jps", "makespan_s", "prompt_tokens", "output_tokens", "hit_tokens"),
    *("reusable_tokens", "recomputed_tokens", "loaded_tokens", "preemptions", "policy_faults", "versions"),
)
"""Of each record, what is kept."""
STATS = ("mean", "p50", "p90", "p95", "p99", "max")
GUESS = 60
"""Runs of a row, before one is done."""


class Place(NamedTuple):
    """One run."""

    table: str
    row: str
    setting: Setting
    seed: int


def run_place(place: Place) -> dict[str, Any]:
    """Run one setting. Returns the kept part of its record, and the CPU seconds that it took."""
    started_s = time.process_time()
    row = _get_rows(place.table)[place.row]
    setup, load = row.place(place.setting.policy, place.seed, place.setting.step)
    if setup.step_cost is None and installed_version() is None:
        # Without the tables a run would fall back to a roofline, and one table would hold both.
        raise ConfigError("result tables need measured step times: pip install 'tenuto[tables]'")
    record = run(with_published_kv(setup), load).record
    kept = {key: shorten(record[key]) for key in KEPT}
    # A trace's name on another machine is its file's alone.
    kept["workload"] = Path(str(kept["workload"])).name
    who = {"row": place.row, "policy": place.setting.policy, "step": place.setting.step, "seed": place.seed}
    config = get_key(row, place.setting, place.seed)
    code = str(digest_code(setup, load))
    return {**who, **kept, "config": config, "code": code, "cpu_s": round(time.process_time() - started_s, 2)}


def confirm(table: str, records: Sequence[Record], per_policy: int, workers: int | None = None) -> int:
    """Run kept runs of older code anew (`draw_older`); if all are equal, write that down."""
    rows = _get_rows(table)
    drawn, pairs = draw_older(records, lambda record: get_code(record, rows), per_policy)
    was = {
        Place(table, each["row"], Setting(each["policy"], each["step"]), each["seed"]): each for each in drawn
    }
    found = run_each(run_place, list(was), workers)
    differ = [str(place) for place, record in found if not is_equal(was[place], record)]
    return say_confirmed(differ, pairs, per_policy, f"{table}.jsonl")


@cache
def _get_rows(table: str) -> dict[str, Row]:
    return {row.title: row for row in TABLES[table].make_rows()}


def get_code(record: Record, rows: Mapping[str, Row]) -> Code:
    """The present code of a record's run; `GONE` in each part if its policy does not exist any more."""
    try:
        return digest_code(*rows[record["row"]].place(record["policy"], record["seed"], record["step"]))
    except (ConfigError, PolicyError):
        return Code(GONE, GONE, GONE)


def say_code_of(table: str, runs: Runs) -> str:
    """Which code made the runs of a table."""
    rows = _get_rows(table)
    records = (record for record in list_records(runs) if record["row"] in rows)
    return say_code(records, lambda record: get_code(record, rows))


def get_key(row: Row, setting: Setting, seed: int) -> str:
    """What defines a run, as a digest: a record with another key is out of date."""
    setup, load = row.place(setting.policy, seed, setting.step)
    # Records name host memory only where their row does.
    config = get_config(replace(setup, host_gb=row.setup.host_gb), load)
    config["workload"] = Path(str(config["workload"])).name
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def shorten(value: Any) -> Any:
    """Five digits are more than a simulation is good for; of statistics, those that the tables may show."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if not isinstance(value, Mapping):
        return value
    if "p99" in value:
        value = {name: value[name] for name in STATS if name in value}
    return {key: shorten(each) for key, each in value.items()}


def read_runs(path: Path, rows: Sequence[Row]) -> Runs:
    """The runs of a file that are those of these rows; one that is out of date is not."""
    by_title = {row.title: row for row in rows}
    return group(
        record
        for record in read_lines(path)
        if (row := by_title.get(record["row"]))
        and record["config"] == get_key(row, Setting(record["policy"], record["step"]), record["seed"])
    )


def drop_older(runs: Runs, rows: Sequence[Row]) -> Runs:
    """The runs that the present code made."""
    by_title = {row.title: row for row in rows}
    return group(each for each in list_records(runs) if Code.of(each) == get_code(each, by_title))


def list_records(runs: Runs) -> list[Record]:
    """All records of some runs."""
    return [record for by_seed in runs.values() for record in by_seed.values()]


def begin_with_kept(path: Path, kept: Path) -> None:
    """Where nothing has run here yet, go on from the records in the repository."""
    if not path.exists() and kept.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, path)


@dataclass(frozen=True)
class Race:
    """What runs: the rows of one table, by the rules of `race`."""

    table: str
    rows: Sequence[Row]
    policies: Sequence[str]
    steps: Sequence[Step]
    seeds: Sequence[int]
    path: Path
    workers: int = 1

    def find_missing(self, row: Row, runs: Runs) -> list[Place]:
        """The next runs of a row."""
        found = get_settings(runs, row.title)
        if len(self.steps) > 1:
            missing = find_missing(self.policies, self.steps, self.seeds, found)
        else:
            settings = [Setting(policy, step) for policy in self.policies for step in self.steps]
            places = itertools.product(settings, self.seeds)
            missing = [(setting, seed) for setting, seed in places if seed not in found.get(setting, {})]
        return [Place(self.table, row.title, setting, seed) for setting, seed in missing]

    def run(self) -> Runs:
        """Run all that the present code has not run, and say on stderr how far it is.

        An interruption loses the runs under way.
        """
        runs = drop_older(read_runs(self.path, self.rows), self.rows)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            for record in self._run_missing(runs, pool):
                add(runs, record)
                append_lines(self.path, record)
        return runs

    def _run_missing(self, runs: Runs, pool: ProcessPoolExecutor) -> Iterator[dict[str, Any]]:
        """The records of what is missing, as they come. A row goes on when its last run is done."""
        waiting = list(self.rows)
        queue: list[Place] = []
        flying: dict[Future[dict[str, Any]], Place] = {}
        progress = _Progress(len(self.rows))
        while waiting or queue or flying:
            while waiting and len(queue) < self.workers:
                places = self.find_missing(waiting[0], runs)
                progress.open(waiting.pop(0).title, places)
                queue += places
            while queue and len(flying) < 2 * self.workers:
                place = queue.pop(0)
                flying[pool.submit(run_place, place)] = place
            if not flying:
                continue
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                place = flying.pop(future)
                record = future.result()
                yield record
                busy = {each.row for each in (*queue, *flying.values())}
                if place.row not in busy:
                    row = next(each for each in self.rows if each.title == place.row)
                    places = self.find_missing(row, runs)
                    progress.open(place.row, places)
                    queue = places + queue
                progress.say(place, record)


class _Progress:
    """How far a race is, and how long the rest will take if the rest is like what was done."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._started_s = time.monotonic()
        self._open: dict[str, int] = {}
        self._per_row: dict[str, int] = {}
        self._num_done = 0
        self._cpu_s = 0.0

    def open(self, row: str, places: Sequence[Place]) -> None:
        """A row has these runs to do next; none if it is done."""
        if places:
            self._open[row] = self._per_row[row] = self._per_row.get(row, 0) + len(places)
        else:
            self._open.pop(row, None)
            self._per_row.setdefault(row, 0)

    def say(self, place: Place, record: Mapping[str, Any]) -> None:
        """A run is done."""
        self._num_done += 1
        self._cpu_s += record["cpu_s"]
        closed = [count for row, count in self._per_row.items() if row not in self._open and count]
        typical = sum(closed) / len(closed) if closed else GUESS
        num_rows_left = self._num_rows - len(self._per_row) + len(self._open)
        num_open = sum(self._open.values())
        begun = self._num_done - sum(closed)
        left = max(0.0, typical * num_rows_left - begun) if num_open else 0.0
        spent_s = time.monotonic() - self._started_s
        print(
            f"{self._num_done} runs, {self._num_rows - num_rows_left} of {self._num_rows} rows, "
            f"{spent_s / 60:.1f} min, about {left * spent_s / self._num_done / 60:.0f} min left; "
            f"{self._cpu_s / self._num_done:.1f} s of CPU a run: "
            f"{place.row}, {place.setting.label}, seed {place.seed}",
            file=sys.stderr,
            flush=True,
        )
