"""The fleet table of docs/fleet.md: mean job time of each router, as a ratio to the best other router.

    python -m experiments.fleet                        runs what is missing, prints the table
    python -m experiments.fleet --only 1,2 --seeds 42,43     some rows
    python -m experiments.fleet --print                the table of experiments/records/fleet.jsonl

"bound / best other" is what is left to win: the yardstick over the best of the other routers. Runs are the
same on every machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from statistics import fmean
from typing import Any

from experiments.fleet.rows import IDEAL, OURS, ROWS
from experiments.results.row import ROOT
from tenuto.records.metrics import get_percentile
from tenuto.sim.run import Extras, run

KEPT = ROOT / "experiments" / "records" / "fleet.jsonl"
Key = tuple[int, str, int]


def measure(number: int, router: str, seed: int) -> dict[str, Any]:
    row = ROWS[number]
    setup, load = row.place(router, seed)
    workload = row.make(seed) if row.make is not None else None
    outcome = run(setup, load, extras=Extras(workload=workload))
    record, arrivals_s = outcome.record, {job.job_id: job.arrival_s for job in outcome.workload.jobs}
    times_s = [
        time_s
        for job, time_s in record["job_times_s"].items()
        if job.startswith(row.counts) and arrivals_s[job] >= row.from_s
    ]
    fleet = record["fleet"]
    return {
        "row": number,
        "title": row.title,
        "router": router,
        "seed": seed,
        "jobs": len(times_s),
        "mean_s": round(fmean(times_s), 4),
        "p95_s": round(get_percentile(times_s, 95), 4),
        "recomputed": round(record["recomputed_tokens"] / record["prompt_tokens"], 4),
        "moves": fleet["moves"],
        "held": fleet["held"],
        "imbalance": round(fleet["imbalance"], 3),
        "resent": fleet["resent"],
    }


def read_kept() -> dict[Key, dict[str, Any]]:
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    records = [json.loads(line) for line in lines]
    return {
        (each["row"], each["router"], each["seed"]): each
        for each in records
        if each["row"] < len(ROWS) and ROWS[each["row"]].title == each["title"]
    }


def get_mean(kept: dict[Key, dict[str, Any]], number: int, router: str, name: str = "mean_s") -> float | None:
    values = [each[name] for (row, who, _), each in kept.items() if (row, who) == (number, router)]
    return fmean(values) if values else None


def format_table(kept: dict[Key, dict[str, Any]]) -> str:
    lines = [
        "| engines | load | bound | tenuto | best other | tenuto / bound | tenuto / best other "
        "| bound / best other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    over_best = []
    for number, row in enumerate(ROWS):
        ours = get_mean(kept, number, OURS)
        if ours is None:
            continue
        bound = get_mean(kept, number, IDEAL)
        others = {who: get_mean(kept, number, who) for who in row.rivals}
        known = {who: mean_s for who, mean_s in others.items() if mean_s is not None}
        if not known:
            continue
        best = min(known, key=lambda who: known[who])
        over_best.append(ours / known[best])
        lines.append(
            f"| {row.servers} | {row.title} | {_format(bound)} | {ours:.2f} s | {known[best]:.2f} s ({best}) "
            f"| {'' if bound is None else f'{ours / bound:.2f}'} | {over_best[-1]:.2f} "
            f"| {'' if bound is None else f'{bound / known[best]:.2f}'} |"
        )
    if not over_best:
        return "Nothing was measured yet."
    mean = math.exp(fmean(math.log(each) for each in over_best))
    lines.append(
        f"\nAgainst the best other router of each row: geometric mean {mean:.2f}, worst {max(over_best):.2f}."
    )
    return "\n".join(lines)


def format_all(kept: dict[Key, dict[str, Any]]) -> str:
    lines = []
    for number, row in enumerate(ROWS):
        cells = []
        for router in row.routers:
            if (mean_s := get_mean(kept, number, router)) is not None:
                p95_s, recomputed = (get_mean(kept, number, router, name) for name in ("p95_s", "recomputed"))
                cells.append(f"{router} {mean_s:.2f} (P95 {p95_s:.1f}, recomputed {recomputed:.1%})")
        if cells:
            lines.append(f"{row.servers} {row.title}: {'; '.join(cells)}")
    return "\n".join(lines)


def _format(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="numbers of rows, from 0")
    parser.add_argument("--seeds", default="42")
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    kept = read_kept()
    numbers = range(len(ROWS)) if given.only is None else map(int, given.only.split(","))
    wanted = [
        (number, router, seed)
        for seed in map(int, given.seeds.split(","))
        for number in numbers
        for router in ROWS[number].routers
    ]
    for key in [] if given.print else wanted:
        if key in kept:
            continue
        kept[key] = measure(*key)
        print(
            f"{ROWS[key[0]].servers} {ROWS[key[0]].title}: {key[1]} {kept[key]['mean_s']:.2f}",
            file=sys.stderr,
            flush=True,
        )
        with KEPT.open("a", encoding="utf-8") as file:
            file.write(json.dumps(kept[key]) + "\n")
    print(format_table(kept))
    print()
    print(format_all(kept))


if __name__ == "__main__":
    main()
