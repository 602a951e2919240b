"""The tables of docs/lab.md, one command each, resumable.

    python -m experiments.results TABLE [--seeds 42,1,2] [--rows TEXT] [--write]
    python -m experiments.results screen --write        the page's first screen, from the kept records

    python -m experiments.results stale                 which tables are older than the code

Runs go to experiments/out/TABLE.jsonl, which begins with the kept records where it is missing. A run is
repeated if the code that decides in it has changed since (see `experiments.decision_code`), and only then.
The table goes to stdout as Markdown. It says which code made it, and is refused if that were several.
--no-runs shows what there is, older or not. --write puts the table into docs/lab.md, and the runs into
experiments/records/TABLE.jsonl, one line per row, policy, step size and seed. In most tables every policy
races at several step sizes: see `race`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.command_line import make_parser
from experiments.decision_code import check_one_code
from experiments.json_lines import read_lines, write_lines
from experiments.results.figure import draw_options
from experiments.results.race_tables import format_race
from experiments.results.row import OUT, ROOT, Row
from experiments.results.rows import RACES, TABLES
from experiments.results.runs import (
    Race,
    begin_with_kept,
    confirm,
    list_records,
    read_runs,
    say_code_of,
)
from experiments.results.screen import read_records, write_screen
from experiments.results.settings import Runs, Step
from experiments.results.step_cost_table import format_step_costs
from experiments.results.tables import format_section, write_section

PAGE = ROOT / "docs" / "lab.md"
RECORDS = ROOT / "experiments" / "records"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("table", choices=[*TABLES, "screen", "stale"])
    parser.add_argument(
        "--seeds", default="42,1,2", help="with commas; the first is run for all (%(default)s)"
    )
    parser.add_argument("--policies", help="only these beside tenuto, by name or as POLICY/OFFLOAD")
    parser.add_argument("--steps", help="only these step sizes, of default, adaptive and numbers")
    parser.add_argument("--rows", help="only rows whose title contains this, or one of these with | between")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes; all cores unless told")
    parser.add_argument("--no-runs", action="store_true", help="only what has run already")
    parser.add_argument("--write", action="store_true", help="into docs/lab.md and experiments/records")
    parser.add_argument(
        "--drop", action="store_true", help="write although kept records would go (say why in the commit)"
    )
    parser.add_argument(
        "--confirm",
        type=int,
        metavar="N",
        help="run N kept runs of each of --policies anew that older code made; if all are equal, none is "
        "older",
    )
    parsed = parser.parse_args()
    if parsed.table == "screen":
        write_screen(PAGE)
        return 0
    if parsed.table == "stale":
        print("\n".join(f"{name}: {say_code_of(name, read_records(name))}" for name in TABLES))
        return 0
    table = TABLES[parsed.table]
    policies = parsed.policies.split(",") if parsed.policies else list(table.policies)
    steps = [_read_step(step) for step in parsed.steps.split(",")] if parsed.steps else table.steps
    wanted = parsed.rows.split("|") if parsed.rows else [""]
    rows: Sequence[Row] = [row for row in table.make_rows() if any(part in row.title for part in wanted)]
    seeds = [int(seed) for seed in parsed.seeds.split(",")]
    path = OUT / f"{parsed.table}.jsonl"
    begin_with_kept(path, RECORDS / path.name)
    race = Race(parsed.table, rows, policies, steps, seeds, path, parsed.workers)
    if parsed.confirm is not None:
        older = [each for each in list_records(read_runs(path, rows)) if each["policy"] in policies]
        return confirm(parsed.table, older, parsed.confirm, parsed.workers)
    runs = read_runs(path, rows) if parsed.no_runs else race.run()
    if parsed.write and parsed.rows:
        # The page and the records hold all rows that have run.
        race = replace(race, rows=list(table.make_rows()))
        rows, runs = race.rows, read_runs(path, race.rows)
    runs, section = make_section(race, runs)
    print(section)
    if parsed.write:
        command = f"python -m experiments.results {parsed.table} --seeds {parsed.seeds}"
        if parsed.table == "options":
            draw_options(rows, to_plain(runs), ROOT / "docs" / "figures" / "options.svg")
            section += "\n\n![Ratios to the defaults](figures/options.svg)"
        section += f"\n\nMade by `{command}`; the records are in `experiments/records/{parsed.table}.jsonl`."
        records = get_records(rows, runs)
        lost = find_lost(RECORDS / path.name, records)
        if lost and not parsed.drop:
            parser.error(f"{len(lost)} kept records would go, such as {lost[0]}. Run them too, or say --drop")
        write(parsed.table, records, section)
    return 0


def make_section(race: Race, runs: Runs) -> tuple[Runs, str]:
    """The runs that a table shows, and its text. Raises ConfigError if several codes made them."""
    table = TABLES[race.table]
    if table.is_race:
        runs = drop_unfinished(race, runs)
    check_one_code(list_records(runs))
    if not table.is_race:
        text = format_section(table, race.rows, to_plain(runs))
    elif race.table == "step-costs":
        text = format_step_costs(table, RACES, runs)
    else:
        text = format_race(table, race.rows, runs)
    return runs, f"{text}\n\n{say_code_of(race.table, runs)}"


def drop_unfinished(race: Race, runs: Runs) -> Runs:
    """The runs of the rows whose first seed is complete: a verdict needs all rivals."""
    first = replace(race, seeds=race.seeds[:1])
    done = {row.title for row in race.rows if not first.find_missing(row, runs)}
    return {key: seeds for key, seeds in runs.items() if key[0] in done}


def _read_step(text: str) -> Step:
    if text == "default":
        return None
    return int(text) if text.isdecimal() else text


def to_plain(runs: Runs) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Records by row and policy, for the tables in which everybody has the default step size."""
    return {
        (row, setting.policy): [dict(by_seed[seed]) for seed in sorted(by_seed)]
        for (row, setting), by_seed in runs.items()
        if setting.step is None
    }


def get_records(rows: Sequence[Row], runs: Runs) -> list[dict[str, Any]]:
    """The records of these rows in the order in which they are kept."""
    titles = [row.title for row in rows]
    return [
        {key: value for key, value in by_seed[seed].items() if key != "cpu_s"}
        for (title, _), by_seed in sorted(
            ((key, by_seed) for key, by_seed in runs.items() if key[0] in titles),
            key=lambda each: (titles.index(each[0][0]), each[0][1].policy, str(each[0][1].step)),
        )
        for seed in sorted(by_seed)
    ]


def find_lost(kept: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The kept runs that these records would not replace."""
    there = {_name_run(record) for record in records}
    return [name for name in map(_name_run, read_lines(kept)) if name not in there]


def _name_run(record: Mapping[str, Any]) -> str:
    return f"'{record['row']}', {record['policy']} @{record['step']}, seed {record['seed']}"


def write(name: str, records: Sequence[Mapping[str, Any]], section: str) -> None:
    """Put a table into the page, and its records beside it."""
    write_section(PAGE, name, section)
    write_lines(RECORDS / f"{name}.jsonl", records)
    write_screen(PAGE)


if __name__ == "__main__":
    raise SystemExit(main())
