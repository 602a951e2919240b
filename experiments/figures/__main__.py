"""The Continuum paper's figures, simulated, with what the paper says of each; and comparisons of ours beside.

    python -m experiments.figures 8 --quick
    python -m experiments.figures all --quick --write

Numbers are the paper's figures, names are ours, `all` is every number. Prints each figure's table, and
whether order and factor agree with the paper's; --write puts them into docs/paper_figures.md, the picture
beside it, and the records into experiments/records. The quick form has the same policies, and fewer values,
jobs and seeds. Runs that the present code has made already are not made again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.command_line import make_parser
from experiments.decision_code import digest_code
from experiments.figures.draw import draw
from experiments.figures.figures import FIGURES, PAPER
from experiments.figures.page import PAGE, PICTURES, format_figure, format_overview, get_picture
from experiments.figures.points import keep, make_points, run_cell
from experiments.json_lines import append_lines, read_lines, write_lines
from experiments.results.row import OUT, ROOT
from experiments.results.tables import write_section
from tenuto.sim.compare import run_each

DONE = OUT / "figures.jsonl"
RECORDS = ROOT / "experiments" / "records" / "figures.jsonl"


def run_figure(name: str, *, quick: bool, workers: int | None) -> list[dict[str, Any]]:
    """The figure's records, of runs that the present code made."""
    cells = [
        (place, cell, (cell.key, str(digest_code(cell.setup, cell.load))))
        for place, cell in FIGURES[name].make_cells(quick=quick)
    ]
    done = {(key, code): kept for key, code, kept in read_lines(DONE)}
    missing = [cell for _, cell, key in cells if key not in done]
    codes = {cell.key: code for _, cell, (_, code) in cells}
    for number, (cell, record) in enumerate(run_each(run_cell, missing, workers), start=1):
        key = cell.key, codes[cell.key]
        done[key] = keep(record)
        append_lines(DONE, [*key, done[key]])
        print(f"figure {name}: {number} of {len(missing)}: {cell.title}", file=sys.stderr, flush=True)
    return [
        {
            "figure": name,
            "form": "quick" if quick else "full",
            **place._asdict(),
            **done[key],
            "config": hashlib.sha256(cell.key.encode()).hexdigest()[:16],
            "code": codes[cell.key],
        }
        for place, cell, key in cells
    ]


def select(records: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """A figure's records: of the full form if there are some, else of the quick one."""
    own = [record for record in records if record["figure"] == name]
    return [record for record in own if record["form"] == "full"] or own


def write(name: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Put a figure's records in place of its older ones of the same form; its section and its picture."""
    form = records[0]["form"]
    kept = [each for each in read_lines(RECORDS) if (each["figure"], each["form"]) != (name, form)]
    kept += records
    order = list(FIGURES)
    kept.sort(key=lambda each: order.index(each["figure"]))
    write_lines(RECORDS, kept)
    own = select(kept, name)
    write_section(PAGE, f"figure {name}", format_figure(name, own))
    write_section(PAGE, "overview", make_overview(kept))
    draw(FIGURES[name], make_points(FIGURES[name], own), PICTURES / get_picture(name))


def make_overview(kept: Sequence[Mapping[str, Any]]) -> str:
    """The table of all figures of the paper."""
    return format_overview({name: select(kept, name) for name in PAPER})


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "figure",
        choices=(*FIGURES, "all"),
        help="; ".join(f"{name}: {figure.title}" for name, figure in FIGURES.items()),
    )
    parser.add_argument("--quick", action="store_true", help="fewer values and jobs, one seed")
    parser.add_argument("--write", action="store_true", help="into the page and the kept records")
    parser.add_argument("--workers", type=int, help="processes; all cores unless told")
    parsed = parser.parse_args()
    for name in PAPER if parsed.figure == "all" else [parsed.figure]:
        records = run_figure(name, quick=parsed.quick, workers=parsed.workers)
        print(format_figure(name, records))
        if parsed.write:
            write(name, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
