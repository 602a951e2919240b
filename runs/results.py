"""The tables of docs/results.md, one command each, resumable.

    python runs/results.py ab8|swe-bench|bfcl|weka|70b|sensitivity|ablation [--seeds 1,2,3]

Records go to runs/out/TABLE/results.jsonl, the table to stdout as Markdown. In a cell: mean job time in
seconds (geometric mean over the seeds), and its range. Bold: the best, and what is within 2 % of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tenuto.sweep.compare import Cell, run_cells
from tenuto.sweep.run import Load
from tenuto.sweep.setup import Setup

ROOT = Path(__file__).parent.parent
WEKA = ROOT.parent / "shared" / "traces" / "weka"
POLICIES = (
    *("stock", "stock-tuned", "offload-async", "continuum-fixed", "continuum", "contextserve", "infercept"),
    *("autellix", "autellix+", "sglang-lpm", "thunderagent", "concur", "break-even", "unbounded", "tenuto"),
)
YARDSTICKS = ("unbounded", "clairvoyant")
ABLATIONS = ("FirstJobFirst", "FullSteps", "NoRetention", "NoPrice", "AnyoneTakes", "NoTier", "AlwaysLoads")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table: a machine under a load, for every policy."""

    title: str
    setup: Setup
    load: Load


def make_ab8() -> Iterable[Row]:
    for gpu in ("A100-40", "L40S", "H100", "H200"):
        for jps in (1, 3, 6, 10, 15):
            yield Row(f"{gpu}, {jps}/s", Setup(gpu=gpu), Load(jps=jps))


def make_agents(workload: str, loads: dict[str, tuple[float, ...]], window_s: float) -> Iterable[Row]:
    for gpu, rates in loads.items():
        for host_gb in (0, 200):
            for jps in rates:
                title = f"{gpu}, {jps:g}/s, " + (f"{host_gb} GiB host" if host_gb else "no host tier")
                yield Row(
                    title,
                    Setup(gpu=gpu, host_gb=host_gb),
                    Load(workload=workload, jps=jps, window_s=window_s),
                )


def make_weka() -> Iterable[Row]:
    for gpu in ("H200", "B200"):
        for jps in (0.05, 0.2):
            yield Row(f"{gpu}, {jps:g}/s", Setup(gpu=gpu), Load(workload=str(WEKA), jps=jps, window_s=600))


def make_70b() -> Iterable[Row]:
    for jps in (0.5, 1, 2):
        yield Row(
            f"4 x H100, {jps:g}/s", Setup(gpu="H100", model="llama-3.1-70b", tp=4, host_gb=200), Load(jps=jps)
        )


def make_sensitivity() -> Iterable[Row]:
    base = Setup(gpu="H100", host_gb=0)
    swe = Load(workload="swe-bench", jps=2, window_s=60)
    yield Row("swe-bench, H100, 2/s", base, swe)
    for share in (0.25, 0.5, 2):
        yield Row(f"KV x {share:g}", dataclasses.replace(base, kv_tokens=int(434_000 * share)), swe)
    for seats in (32, 128):
        yield Row(f"{seats} seats", dataclasses.replace(base, max_num_seqs=seats), swe)
    for factor in (0.5, 2):
        yield Row(f"texts x {factor:g}", base, dataclasses.replace(swe, scale_lengths=factor))
    yield Row("with a disk", dataclasses.replace(base, host_gb=50, disk_gb=1000), swe)
    for hints in ("job", "none", "tool-time", "wrong"):
        yield Row(f"hints: {hints}", base, dataclasses.replace(swe, hints=hints))


TABLES = {
    "ab8": make_ab8,
    "swe-bench": lambda: make_agents(
        "swe-bench", {"A100-80": (0.5, 1, 2), "H100": (1, 2, 4), "B200": (2, 4, 8)}, 90
    ),
    "bfcl": lambda: make_agents(
        "bfcl", {"A100-80": (0.2, 0.5, 1), "H100": (0.3, 0.6, 1.2), "B200": (0.6, 1.2, 2.4)}, 90
    ),
    "weka": make_weka,
    "70b": make_70b,
    "sensitivity": make_sensitivity,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=[*TABLES, "ablation"])
    parser.add_argument("--seeds", default="42")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--workers", type=int)
    parsed = parser.parse_args()
    policies, seeds = parsed.policies.split(","), [int(seed) for seed in parsed.seeds.split(",")]
    rows = list(TABLES["ab8" if parsed.table == "ablation" else parsed.table]())
    if parsed.table == "ablation":
        policies = ["tenuto", *(f"runs.ablation:{name}" for name in ABLATIONS)]
        rows = pick_ablation_rows()
    records = run_rows(rows, policies, seeds, ROOT / "runs" / "out" / parsed.table, parsed.workers)
    print(format_table(rows, policies, records))
    print()
    print(format_summary(rows, policies, records))
    return 0


def pick_ablation_rows() -> list[Row]:
    wanted = {
        *("H200, 3/s", "H200, 15/s", "A100-40, 3/s"),
        "H100, 2/s, no host tier",
        "H100, 2/s, 200 GiB host",
        "H100, 1.2/s, no host tier",
        "H100, 1.2/s, 200 GiB host",
    }
    rows = [*make_ab8(), *TABLES["swe-bench"](), *TABLES["bfcl"]()]
    return [row for row in rows if row.title in wanted]


def run_rows(
    rows: list[Row], policies: list[str], seeds: list[int], folder: Path, workers: int | None
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    folder.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    places: dict[str, tuple[str, str]] = {}
    for row in rows:
        for policy in policies:
            for seed in seeds:
                setup = dataclasses.replace(row.setup, policy=policy)
                cell = Cell(setup, dataclasses.replace(row.load, seed=seed))
                cells.append(cell)
                places[cell.key] = (row.title, policy)
    records: dict[tuple[str, str], list[dict[str, Any]]] = {}
    started_s = time.monotonic()
    for number, (cell, record) in enumerate(run_cells(cells, folder, workers=workers), start=1):
        records.setdefault(places[cell.key], []).append(record)
        spent_s = int(time.monotonic() - started_s)
        print(f"{number} of {len(cells)}, {spent_s} s: {cell.title}", file=sys.stderr, flush=True)
    return records


def get_mean_s(records: list[dict[str, Any]], key: str = "avg_duration_s") -> float:
    return math.exp(statistics.fmean(math.log(record[key]) for record in records))


def format_table(
    rows: list[Row], policies: list[str], records: dict[tuple[str, str], list[dict[str, Any]]]
) -> str:
    names = [policy.rpartition(":")[2] for policy in policies]
    lines = ["| | " + " | ".join(names) + " | P95 stock | P95 tenuto |", "|---" * (len(names) + 3) + "|"]
    for row in rows:
        means = {policy: get_mean_s(records[row.title, policy]) for policy in policies}
        best_s = min(mean for policy, mean in means.items() if policy not in YARDSTICKS)
        cells = []
        for policy, mean_s in means.items():
            each = [record["avg_duration_s"] for record in records[row.title, policy]]
            text = f"{mean_s:.1f}" + (f" ({min(each):.0f}-{max(each):.0f})" if len(each) > 1 else "")
            cells.append(f"**{text}**" if mean_s <= 1.02 * best_s and policy not in YARDSTICKS else text)
        p95 = [
            f"{get_mean_s(records[row.title, policy], 'p95_duration_s'):.0f}" if policy in policies else ""
            for policy in ("stock", "tenuto")
        ]
        lines.append(f"| {row.title} | " + " | ".join([*cells, *p95]) + " |")
    return "\n".join(lines)


def format_summary(
    rows: list[Row], policies: list[str], records: dict[tuple[str, str], list[dict[str, Any]]]
) -> str:
    """Tenuto against each of the others, and against the best of them in each row."""
    if "tenuto" not in policies:
        return ""
    ratios = {
        policy: [
            get_mean_s(records[row.title, "tenuto"]) / get_mean_s(records[row.title, policy]) for row in rows
        ]
        for policy in policies
        if policy != "tenuto"
    }
    rivals = [ratios[policy] for policy in ratios if policy not in YARDSTICKS]
    lines = ["| tenuto over | geometric mean | worst row |", "|---|---|---|"]
    best = [max(each) for each in zip(*rivals, strict=True)]
    for name, values in [("the best other of each row", best), *ratios.items()]:
        mean = math.exp(statistics.fmean(math.log(value) for value in values))
        worst = max(range(len(values)), key=values.__getitem__)
        lines.append(
            f"| {name.rpartition(':')[2]} | {mean:.2f} | {values[worst]:.2f} ({rows[worst].title}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
