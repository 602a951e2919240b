"""Hold the simulator against published sweeps: the tables of docs/fidelity.md.

    python -m experiments.tables.fidelity [--machines H200,H100,A100-40] [--scale 0.95] [--json]

Nothing is fitted: every constant has a source where it stands (src/tenuto/sim). `--scale` multiplies the
GPU's time of every step: how much a result hangs on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.results.published import PUBLISHED
from experiments.results.tables import format_markdown
from tenuto.sim.compare import run_each
from tenuto.sim.cost import batch as step_batch
from tenuto.sim.run import get_versions, run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "stock": {"stock": {"policy": "stock"}},
    "continuum-fixed": {
        "continuum-prototype": {"policy": "continuum-prototype"},
        "continuum-fixed": {"policy": "continuum-fixed"},
    },
    "offload-sync": {
        "offload-sync": {"policy": "offload-sync"},
        "offload-sync, serial": {"policy": "offload-sync", "offload": "serial"},
    },
}
"""What simulates each published system; the first is meant to be it, others show what a mechanism does."""


PREFILL_SCALE, DECODE_SCALE = step_batch.PREFILL_SCALE, step_batch.DECODE_SCALE


class Cell(NamedTuple):
    """One published figure, and what simulates it."""

    gpu: str
    system: str
    simulated: str
    jps: float
    published_s: float
    scale: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--machines", default=",".join(PUBLISHED), help="GPUs, of those published")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the GPU's time of every step")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    parser.add_argument("--json", action="store_true", help="print the rows instead of the tables")
    parsed = parser.parse_args()
    cells = [cell for gpu in parsed.machines.split(",") for cell in list_cells(gpu, parsed.scale)]
    rows = make_rows(cells, parsed.workers)
    if parsed.json:
        print(json.dumps({"versions": get_versions(), "rows": rows}, indent=1))
    else:
        print(format_job_times(rows))
        print(format_errors(rows))
        print(format_turns(rows))
    return 0


def list_cells(machine: str, scale: float) -> list[Cell]:
    """All figures of a machine, each for everything that simulates its system."""
    published = PUBLISHED[machine]
    return [
        Cell(machine, system, simulated, jps, expected_s, scale)
        for system, figures in published["avg_duration_s"].items()
        for simulated in SYSTEMS[system]
        for jps, expected_s in zip(published["jps"], figures, strict=True)
        if expected_s is not None
    ]


def make_rows(cells: Sequence[Cell], workers: int | None = None) -> list[dict[str, Any]]:
    rows = {}
    for cell, row in run_each(make_row, cells, workers, get_length=lambda cell: cell.jps):
        rows[cell] = row
        print(
            f"{row['gpu']} {cell.simulated} {cell.jps}/s: {row['simulated_s']:.2f} s",
            file=sys.stderr,
            flush=True,
        )
    return [rows[cell] for cell in cells]


def make_row(cell: Cell) -> dict[str, Any]:
    published = PUBLISHED[cell.gpu]
    step_batch.PREFILL_SCALE = PREFILL_SCALE * cell.scale
    step_batch.DECODE_SCALE = DECODE_SCALE * cell.scale
    # The sweeps were made with vLLM 0.10.2, which scheduled a step after the one before.
    setup = Setup(gpu=published["gpu"], async_scheduling=False, **SYSTEMS[cell.system][cell.simulated])
    record = run(setup, LoadOptions(jps=cell.jps)).record
    mean_s = record["job_s"]["mean"]
    return {
        "gpu": published["gpu"],
        "policy": cell.simulated,
        "jps": cell.jps,
        "published_s": cell.published_s,
        "simulated_s": mean_s,
        "error": mean_s / cell.published_s - 1,
        "p95_s": record["job_s"]["p95"],
        "ttft_s": record["ttft_s"]["mean"],
        "ttft_p95_s": record["ttft_s"]["p95"],
        "published_turn_ms": published.get("turn_latency_ms", {}).get(str(cell.jps), {}).get(cell.system, {}),
        "turn_latency_ms": {turn: 1000 * means["latency_s"] for turn, means in record["by_turn"].items()},
    }


def format_job_times(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| machine | simulated as | jobs/s | published mean, s | simulated mean, s | error | P95, s "
        "| TTFT, s | TTFT P95, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['gpu']} | {row['policy']} | {row['jps']} | {row['published_s']:.2f} "
        f"| {row['simulated_s']:.2f} | {row['error']:+.1%} | {row['p95_s']:.1f} | {row['ttft_s']:.2f} "
        f"| {row['ttft_p95_s']:.2f} |"
        for row in rows
    ]
    for gpu, policy in dict.fromkeys((row["gpu"], row["policy"]) for row in rows):
        errors = [row["error"] for row in rows if (row["gpu"], row["policy"]) == (gpu, policy)]
        lines.append(
            f"| **{gpu}** | **{policy}** | | | | median {statistics.median(map(abs, errors)):.1%}, "
            f"{min(errors):+.1%} to {max(errors):+.1%} | | | |"
        )
    return "\n".join(lines) + "\n"


def format_errors(rows: list[dict[str, Any]]) -> str:
    """What `tenuto.sim.fidelity` has: the errors of stock and of the other systems on each machine."""
    meant = {next(iter(simulated)) for simulated in SYSTEMS.values()}
    lines = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        for name, policies in (("stock", {"stock"}), ("other policies", meant - {"stock"})):
            errors = [row["error"] for row in rows if row["gpu"] == gpu and row["policy"] in policies]
            if errors:
                median = statistics.median(map(abs, errors))
                span = f"{min(errors):+.1%} to {max(errors):+.1%}"
                lines.append([f"{gpu}, {name}", str(len(errors)), f"{median:.1%}", span])
    return format_markdown(["prediction for", "cells", "median", "range"], lines) + "\n"


def format_turns(rows: list[dict[str, Any]]) -> str:
    turns = [str(turn) for turn in range(1, 9)]
    lines = []
    for row in rows:
        cells = [row["gpu"], row["policy"], str(row["jps"])]
        for turn in turns:
            cell = f"{row['turn_latency_ms'][turn] / 1000:.2f}"
            if (expected_ms := row["published_turn_ms"].get(turn)) is not None:
                error = row["turn_latency_ms"][turn] / expected_ms - 1
                cell += f" ({expected_ms / 1000:.2f}, {error:+.0%})"
            cells.append(cell)
        lines.append(cells)
    return format_markdown(["machine", "simulated as", "jobs/s", *(f"turn {turn}" for turn in turns)], lines)


if __name__ == "__main__":
    raise SystemExit(main())
