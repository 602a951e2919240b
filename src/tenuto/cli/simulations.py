"""What `tenuto simulate` and `tenuto compare` do, from options to output."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tenuto.cli.simulation_options import read_list, read_load, read_setup
from tenuto.core.errors import ConfigError
from tenuto.core.policy_loader import load_policy
from tenuto.records.trace import TraceWriter
from tenuto.sim.occupancy import Occupancy, write_run
from tenuto.sim.plan import drop_too_small, format_plans, get_best, make_plans
from tenuto.sim.run import run
from tenuto.sim.sweep import Cell, check_cells, make_cells, read_results, run_cell, run_cells
from tenuto.sim.sweep_table import format_rows, make_rows


def say_notes(notes: Iterable[str]) -> None:
    """Say what the user should know of the machines, each thing once."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr, flush=True)


def run_simulate(parsed: argparse.Namespace) -> int:
    """One run."""
    setup = read_setup(parsed, parsed.gpu, parsed.policy)
    load = read_load(parsed, parsed.jps, parsed.seed)
    if parsed.out:
        make_folder(parsed.out)
    occupancy = Occupancy() if parsed.out else None
    policy = load_policy(setup.policy, setup.options)
    trace = TraceWriter(str(parsed.trace), policy, setup.policy) if parsed.trace else None
    try:
        outcome = run(setup, load, watch=occupancy, log=trace.write if trace else None)
    finally:
        if trace:
            trace.close()
    say_notes(outcome.record["notes"])
    if parsed.out and occupancy:
        write_run(parsed.out, outcome, occupancy)
    print(json.dumps(outcome.record) if parsed.json else format_record(outcome.record))
    return 0


def run_compare(parsed: argparse.Namespace) -> int:
    """A sweep."""
    gpus = read_list(parsed.gpu, str, "--gpu")
    policies = read_list(parsed.policies, str, "--policies")
    rates = read_list(parsed.jps, float, "--jps") or [None]
    seeds = read_list(parsed.seeds, int, "--seeds")
    if not (gpus and policies and seeds):
        raise ConfigError("--gpu, --policies and --seeds need at least one name each")
    if parsed.workers is not None and parsed.workers < 1:
        raise ConfigError(f"--workers must be 1 or more, got {parsed.workers}")
    setups = [read_setup(parsed, gpu, policy) for gpu in gpus for policy in policies]
    cells = make_cells(setups, [read_load(parsed, jps, seed) for jps in rates for seed in seeds])
    say_notes(check_cells(cells))
    make_folder(parsed.out)
    progress = Progress(cells, len({cell.key for cell in cells} & set(read_results(parsed.out))))
    records = []
    for cell, record in run_cells(cells, parsed.out, workers=parsed.workers, ray=parsed.ray):
        records.append(record)
        progress.say(cell, record["avg_duration_s"], len(records))
    rows = make_rows(records)
    print(json.dumps(rows) if parsed.json else format_rows(rows))
    return 0


def run_plan(parsed: argparse.Namespace) -> int:
    """The fewest GPUs; 0 if some suffice, 1 if none do."""
    gpus = read_list(parsed.gpu, str, "--gpu")
    policies = read_list(parsed.policies, str, "--policies")
    setups = [read_setup(parsed, gpu, policy) for gpu in gpus for policy in policies]
    setups, left_out = drop_too_small(setups)
    load = read_load(parsed, parsed.jps, parsed.seed)
    say_notes([*left_out, *check_cells(make_cells(setups, [load]))])

    def run_and_say(cell: Cell) -> dict[str, Any]:
        record = run_cell(cell)
        print(f"{cell.title}: P95 {record['p95_duration_s']:.1f} s", file=sys.stderr, flush=True)
        return record

    plans = list(make_plans(setups, load, parsed.p95, max_machines=parsed.max_machines, run=run_and_say))
    if parsed.json:
        print(json.dumps([plan.to_json() for plan in plans]))
    else:
        print(format_plans(plans, parsed.p95))
    return 0 if get_best(plans) else 1


def make_folder(path: Path) -> None:
    """The folder of --out, before anything runs. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {path}: {error.strerror or error}") from error


class Progress:
    """A line per finished run on stderr, with the time that is left."""

    def __init__(self, cells: list[Cell], num_done_before: int) -> None:
        self._num_cells = len(cells)
        self._num_done_before = num_done_before
        self._started_s = time.monotonic()
        if num_done_before:
            print(f"{num_done_before} of {len(cells)} runs are there already", file=sys.stderr)

    def say(self, cell: Cell, mean_s: float, num_done: int) -> None:
        """One more is there."""
        num_new = num_done - self._num_done_before
        if num_new <= 0:
            return
        spent_s = time.monotonic() - self._started_s
        left_s = spent_s / num_new * (self._num_cells - num_done)
        print(
            f"{num_done} of {self._num_cells}, {format_time(left_s)} left: {cell.title}: mean {mean_s:.2f} s",
            file=sys.stderr,
            flush=True,
        )


def format_time(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def format_record(record: dict[str, object]) -> str:
    """A record as a few lines of text."""
    ttft, slowdown = record["ttft_s"], record["slowdown"]
    assert isinstance(ttft, dict) and isinstance(slowdown, dict)
    load = "" if record["jps"] is None else f" at {record['jps']:g} jobs/s"
    return "\n".join(
        (
            f"{record['workload']}{load}, {record['policy']}: {record['gpu']}, {record['model']} (simulated)",
            f"jobs         {record['jobs']} finished in {record['makespan_s']:.1f} s",
            f"job time     mean {record['avg_duration_s']:.2f} s, p50 {record['median_duration_s']:.2f} s, "
            f"p90 {record['p90_duration_s']:.2f} s, p95 {record['p95_duration_s']:.2f} s, "
            f"p99 {record['p99_duration_s']:.2f} s",
            f"slowdown     p50 {slowdown['p50']:.2f}, p95 {slowdown['p95']:.2f}, max {slowdown['max']:.2f} "
            "times a job alone",
            f"ttft         mean {ttft['mean']:.3f} s, p50 {ttft['p50']:.3f} s, p95 {ttft['p95']:.3f} s",
            f"tokens       prompt {record['prompt_tokens']:,}, hit {record['hit_tokens']:,}, "
            f"recomputed {record['recomputed_tokens']:,}, loaded {record['tokens_loaded']:,}, "
            f"stored {record['tokens_stored']:,}",
            f"preemptions  {record['preemptions']}",
            f"turns        {record['turns_refused']} too long for this machine, left out",
            f"simulated in {record['wall_s']:.2f} s, step times from the {record['step_cost']}",
        )
    )
