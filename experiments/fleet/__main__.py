"""The fleet table of docs/fleet.md: mean job time of each router, as a ratio to the best other router.

    python -m experiments.fleet                        runs what is missing, prints the table
    python -m experiments.fleet --only 1,2 --seeds 42,43     more seeds of some rows
    python -m experiments.fleet --print                the table of experiments/records/fleet.jsonl

What is kept is run again if the code that decides in it has changed since (see `experiments.decision_code`).
"bound / best other" is what is left to win: the yardstick over the best of the other routers. Runs are the
same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from experiments.decision_code import Code, check_one_code, say_code
from experiments.fleet.rows import IDEAL, OURS, ROWS, Key, get_code, measure
from experiments.json_lines import read_lines, write_lines
from experiments.results.row import ROOT
from experiments.results.tables import format_markdown
from tenuto.records.metrics import get_geometric_mean
from tenuto.sim.compare import run_each

KEPT = ROOT / "experiments" / "records" / "fleet.jsonl"


def run_missing(kept: dict[Key, dict[str, Any]], wanted: Iterable[Key], workers: int | None) -> None:
    """Run what was wanted or is kept, and the present code has not run; keep each run as it comes."""
    keys = dict.fromkeys((*kept, *wanted))
    missing = [key for key in keys if key not in kept or Code.of(kept[key]) != get_code(*key)]
    for number, (key, record) in enumerate(run_each(measure, missing, workers), start=1):
        was = f", was {kept[key]['mean_s']:.2f}" if key in kept else ""
        said = f"{number} of {len(missing)}: {record['title']}, {record['router']}, seed {record['seed']}"
        print(f"{said}: {record['mean_s']:.2f} s{was}", file=sys.stderr, flush=True)
        kept[key] = record
        write_lines(KEPT, kept.values())


def read_kept() -> dict[Key, dict[str, Any]]:
    return {
        Key(each["row"], each["router"], each["seed"]): each
        for each in read_lines(KEPT)
        if each["row"] < len(ROWS) and ROWS[each["row"]].title == each["title"]
    }


def get_by_seed(
    kept: dict[Key, dict[str, Any]], number: int, router: str, name: str = "mean_s"
) -> dict[int, float]:
    """A figure of a row's router, by seed."""
    return {seed: each[name] for (row, who, seed), each in kept.items() if (row, who) == (number, router)}


def format_table(kept: dict[Key, dict[str, Any]]) -> str:
    lines = []
    over_best = []
    for number, row in enumerate(ROWS):
        ours = get_by_seed(kept, number, OURS)
        # Only runs of the same seeds are compared.
        all_of = {who: get_by_seed(kept, number, who) for who in (IDEAL, *row.rivals)}
        known = {
            who: _pick(times_s, ours) for who, times_s in all_of.items() if ours.keys() <= times_s.keys()
        }
        bound = known.pop(IDEAL, None)
        if not ours or not known:
            continue
        best = min(known, key=lambda who: fmean(known[who].values()))
        over_best.append(_divide(ours, known[best]))
        cells = [row.servers, row.title, str(len(ours)), "" if bound is None else _format_s(bound)]
        cells += [_format_s(ours), f"{_format_s(known[best])} ({best})"]
        cells += ["" if bound is None else _format_ratio(ours, bound), _format_ratio(ours, known[best])]
        lines.append([*cells, "" if bound is None else _format_ratio(bound, known[best])])
    if not over_best:
        return "Nothing was measured yet."
    # A run's rules are those of its router and of its engines' policy.
    records = [
        {**each, "policy": f"{each['router']} over {ROWS[each['row']].policy}"} for each in kept.values()
    ]
    check_one_code(records)
    heads = ["engines", "load", "seeds", "bound", "tenuto", "best other"]
    heads += ["tenuto / bound", "tenuto / best other", "bound / best other"]
    mean, worst = get_geometric_mean(over_best), max(over_best)
    about = f"Against the best other router of each row: geometric mean {mean:.2f}, worst {worst:.2f}."
    code = say_code(records, lambda each: get_code(each["row"], each["router"], each["seed"]))
    return "\n\n".join([format_markdown(heads, lines), about, code])


def format_all(kept: dict[Key, dict[str, Any]]) -> str:
    lines = []
    for number, row in enumerate(ROWS):
        cells = []
        for router in row.routers:
            if times_s := get_by_seed(kept, number, router):
                p95_s, recomputed = (
                    fmean(get_by_seed(kept, number, router, name).values())
                    for name in ("p95_s", "recomputed")
                )
                seeds = f"{len(times_s)} seeds, " if len(times_s) > 1 else ""
                mean_s = fmean(times_s.values())
                cells.append(f"{router} {mean_s:.2f} ({seeds}P95 {p95_s:.1f}, recomputed {recomputed:.1%})")
        if cells:
            lines.append(f"{row.servers} {row.title}: {'; '.join(cells)}")
    return "\n".join(lines)


def _pick(times_s: dict[int, float], seeds: Iterable[int]) -> dict[int, float]:
    return {seed: times_s[seed] for seed in seeds}


def _divide(times_s: dict[int, float], others_s: dict[int, float]) -> float:
    return fmean(times_s.values()) / fmean(others_s.values())


def _format_s(times_s: dict[int, float]) -> str:
    return f"{fmean(times_s.values()):.2f} s"


def _format_ratio(times_s: dict[int, float], others_s: dict[int, float]) -> str:
    """The ratio of the means, and the least and the greatest of one seed."""
    ratios = [times_s[seed] / others_s[seed] for seed in times_s]
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{_divide(times_s, others_s):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="numbers of rows, from 0")
    parser.add_argument("--seeds", default="42")
    parser.add_argument("--workers", type=int, help="processes; all cores unless told")
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    kept = read_kept()
    numbers = range(len(ROWS)) if given.only is None else list(map(int, given.only.split(",")))
    if not given.print:
        seeds = list(map(int, given.seeds.split(",")))
        wanted = [(number, who, seed) for seed in seeds for number in numbers for who in ROWS[number].routers]
        run_missing(kept, map(Key._make, wanted), given.workers)
    print(format_table(kept))
    print()
    print(format_all(kept))


if __name__ == "__main__":
    main()
