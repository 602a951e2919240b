"""Whether the cells of the result tables still come out as their kept records say.

    python -m experiments.results.same_results [--every 50] [--tables ab8,bfcl] [--policies tenuto]

Runs cells in full, with their own windows and seeds, and compares what no definition has changed since 0.1:
jobs, job times, hits, preemptions and the makespan, to the digits of the records. Recomputed tokens are
counted in full blocks since 0.2 and are not compared. Names what differs; exit status 1 if anything does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from experiments.results.rows import ROOT, TABLES
from tenuto.sim.run import run

RECORDS = ROOT / "experiments" / "records"
KEYS = {
    "jobs": ("jobs",),
    "avg_duration_s": ("job_s", "mean"),
    "p95_duration_s": ("job_s", "p95"),
    "prompt_tokens": ("prompt_tokens",),
    "hit_tokens": ("hit_tokens",),
    "preemptions": ("preemptions",),
    "makespan_s": ("makespan_s",),
}
"""What a kept record of 0.1 calls each number, and where a record has it now."""


def compare(place: tuple[str, Mapping[str, Any]]) -> list[str]:
    """Run one kept record's cell again; what came out differently, in words."""
    table, kept = place
    row = next((each for each in TABLES[table].make_rows() if each.title == kept["row"]), None)
    if row is None:
        return [f"{table}, {kept['row']}: is no row any more"]
    setup, load = row.place(kept["policy"], kept["seed"], kept.get("step"))
    if "step" not in kept:
        setup = dataclasses.replace(setup, async_scheduling=False)  # it was off by default
    record = run(setup, load).record
    different = []
    for key, path in KEYS.items():
        value: Any = record
        was: Any = kept
        for name in path:
            value = value[name]
            was = None if was is None else was.get(name)
        was = kept.get(key, was)
        # Records have five digits.
        if was is not None and not math.isclose(value, was, rel_tol=1e-4):
            different.append(f"{table}, {kept['row']}, {kept['policy']}, {key}: was {was}, is {value}")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default="ab8,swe-bench,bfcl,70b")
    parser.add_argument("--policies", help="only these, with commas between them")
    parser.add_argument("--every", type=int, default=1, help="only every Nth record")
    parsed = parser.parse_args()
    places = [
        (table, record)
        for table in parsed.tables.split(",")
        for record in map(json.loads, (RECORDS / f"{table}.jsonl").read_text(encoding="utf-8").splitlines())
        if parsed.policies is None or record["policy"] in parsed.policies.split(",")
    ][:: parsed.every]
    num_different = 0
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, different in enumerate(pool.map(compare, places), start=1):
            num_different += bool(different)
            print(*different, sep="\n", end="\n" if different else "", flush=True)
            if number % 10 == 0:
                print(f"{number} of {len(places)}", file=sys.stderr, flush=True)
    print(f"{len(places)} cells, {num_different} differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    raise SystemExit(main())
