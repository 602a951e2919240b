"""Whether the verdicts hold on seeds that nothing was chosen on: `tenuto` against each row's best rival.

    python -m experiments.results.held_out [--seeds 7,11] [--tables ab8,bfcl] [--every 4 | --rows TEXT]

Who competes is what the kept records say: the best rival, and at most two more within 2 % of it, each at its
best step size. Every fourth row of each table runs. Nothing is kept; the table is Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from experiments.command_line import make_parser
from experiments.results.row import Row
from experiments.results.rows import TABLES
from experiments.results.runs import Place, run_place
from experiments.results.screen import read_records
from experiments.results.settings import OURS, Record, Runs, Setting, get_settings
from experiments.results.verdicts import TIE, Verdict, get_relative, judge
from tenuto.records.metrics import get_geometric_mean

MOST = 3


def find_rivals(row: str, runs: Runs) -> list[Setting]:
    """The best other policies of a row, each at its best step size."""
    settings = get_settings(runs, row)
    verdict = judge(row, settings)
    if verdict is None:
        return []
    best = sorted(verdict.best.values(), key=lambda setting: get_relative(settings[OURS], settings[setting]))
    least = get_relative(settings[OURS], settings[verdict.rival])
    close = [each for each in best if get_relative(settings[OURS], settings[each]) <= TIE * least]
    return list(dict.fromkeys([verdict.rival, *close]))[:MOST]


def judge_again(table: str, rows: Iterable[Row], seeds: list[int]) -> Iterator[Verdict]:
    """The verdicts of some rows of a table on other seeds."""
    runs = read_records(table)
    for row in rows:
        rivals = find_rivals(row.title, runs)
        found: dict[Setting, dict[int, Record]] = {
            setting: {seed: run_place(Place(table, row.title, setting, seed)) for seed in seeds}
            for setting in ([OURS, *rivals] if rivals else [])
        }
        verdict = judge(row.title, found)
        if verdict is not None:
            yield verdict


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", default="7,11", help="with commas (%(default)s)")
    parser.add_argument("--tables", default="mixed,ab8,swe-bench,bfcl,bfcl-contexts")
    parser.add_argument("--every", type=int, default=4, help="of each table's rows (%(default)s)")
    parser.add_argument("--rows", help="only rows whose title contains this, or one of these with | between")
    parsed = parser.parse_args()
    seeds = [int(seed) for seed in parsed.seeds.split(",")]
    verdicts = []
    print("| row | best other | mean job time, `tenuto` over it | |\n|---|---|---|---|")
    for table in parsed.tables.split(","):
        rows = list(TABLES[table].make_rows())
        wanted = parsed.rows.split("|") if parsed.rows else []
        chosen = [row for row in rows if any(part in row.title for part in wanted)]
        for verdict in judge_again(table, chosen if wanted else rows[1 :: parsed.every], seeds):
            verdicts.append(verdict)
            cells = (f"{table}, {verdict.row}", verdict.rival.label, str(verdict.ratio), verdict.outcome)
            print("| " + " | ".join(cells) + " |", flush=True)
    mean = get_geometric_mean(verdict.ratio.mean for verdict in verdicts)
    print(f"\n{len(verdicts)} rows, geometric mean {mean:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
