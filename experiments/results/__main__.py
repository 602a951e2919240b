"""The tables of docs/results.md, one command each, resumable.

    python -m experiments.results TABLE [--seeds 42,1,2] [--write]

Records go to experiments/out/TABLE/results.jsonl, the table to stdout as Markdown; --write puts it into
docs/results.md and the records' figures into experiments/records/TABLE.jsonl. In a cell: mean job time in
seconds (geometric mean over the seeds), and its range. Bold: the best, and what is within 2 % of it; red:
tenuto where it is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.results.figure import draw_options
from experiments.results.rows import OUT, ROOT, TABLES, Row
from experiments.results.tables import format_section, put_section
from tenuto.sim.sweep.cells import Cell, run_cells

KEPT = (
    *("kind", "schema", "policy", "gpu", "model", "workload", "jps", "seed", "simulated", "jobs", "job_s"),
    *("slowdown", "ttft_s", "prompt_tokens", "hit_tokens", "reusable_tokens", "recomputed_tokens"),
    *("loaded_tokens", "stored_tokens", "preemptions", "policy_faults", "makespan_s", "versions"),
)
"""Of each record, what goes into experiments/records. Files there without `schema` are of version 0.1."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=[*TABLES])
    parser.add_argument("--seeds", default="42", help="one or more, with commas between them")
    parser.add_argument("--policies", help="only these, by name or as POLICY/OFFLOAD")
    parser.add_argument("--workers", type=int, help="processes; all cores unless told")
    parser.add_argument("--write", action="store_true", help="into docs/results.md and experiments/records")
    parsed = parser.parse_args()
    table = TABLES[parsed.table]
    policies = parsed.policies.split(",") if parsed.policies else list(table.policies)
    seeds = [int(seed) for seed in parsed.seeds.split(",")]
    rows = list(table.make_rows())
    records = run_rows(rows, policies, seeds, OUT / parsed.table, parsed.workers)
    section = format_section(table, rows, records)
    print(section)
    if parsed.write:
        command = f"python -m experiments.results {parsed.table} --seeds {parsed.seeds}"
        if parsed.table == "options":
            draw_options(rows, records, ROOT / "docs" / "figures" / "options.svg")
            section += "\n\n![Ratios to the defaults](figures/options.svg)"
        section += f"\n\nMade by `{command}`; the records are in `experiments/records/{parsed.table}.jsonl`."
        write(parsed.table, rows, records, section)
    return 0


def run_rows(
    rows: Sequence[Row], policies: Sequence[str], seeds: Sequence[int], folder: Path, workers: int | None
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, tuple[str, str]] = {}
    cells = []
    for row in rows:
        for policy in policies:
            for seed in seeds:
                cell = Cell(*row.place(policy, seed))
                cells.append(cell)
                places[cell.key] = (row.title, policy)
    records: dict[tuple[str, str], list[dict[str, Any]]] = {}
    started_s = time.monotonic()
    for number, (cell, record) in enumerate(run_cells(cells, folder, workers=workers), start=1):
        records.setdefault(places[cell.key], []).append(record)
        spent_s = int(time.monotonic() - started_s)
        print(f"{number} of {len(cells)}, {spent_s} s: {cell.title}", file=sys.stderr, flush=True)
    return records


def write(
    name: str, rows: Sequence[Row], records: dict[tuple[str, str], list[dict[str, Any]]], section: str
) -> None:
    page = ROOT / "docs" / "results.md"
    page.write_text(put_section(page.read_text(encoding="utf-8"), name, section), encoding="utf-8")
    path = ROOT / "experiments" / "records" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = []
    for row in rows:
        for (title, policy), of_row in records.items():
            if title == row.title:
                for record in sorted(of_row, key=lambda each: each["seed"]):
                    kept = {key: shorten(record[key]) for key in KEPT}
                    # A trace's name on another machine is its file's alone.
                    kept["workload"] = Path(str(kept["workload"])).name
                    lines.append(json.dumps({"row": title, **kept, "policy": policy}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def shorten(value: Any) -> Any:
    """Six digits are more than a simulation is good for."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return {key: shorten(each) for key, each in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    raise SystemExit(main())
