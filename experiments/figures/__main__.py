"""Simulate one of the Continuum paper's comparisons, and draw it.

    python -m experiments.figures 8 --quick
    python -m experiments.figures all --quick --out docs/figures

Writes continuum_N.svg and continuum_N.json to --out. Runs that are there already (experiments/out/figures)
are not run again. The quick form has few points, one seed, 40 s of arrivals and one workload: it shows
that the command works, and roughly who wins. docs/paper_figures.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from experiments.figures.draw import draw
from experiments.figures.figures import FIGURES, Figure, describe
from experiments.figures.points import make_points
from tenuto.core import __version__
from tenuto.sim.compare import RESULTS, run_cells

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "experiments" / "out" / "figures"
JOB_TIMEOUT_S = 300.0


def make_figure(name: str, out: Path, *, quick: bool, timeout_s: float, workers: int | None) -> Path:
    """Run a figure's cells and write its picture and its data. Returns the picture's path."""
    figure: Figure = FIGURES[name]
    places = list(figure.make_cells(quick=quick))
    folder = KEPT / f"{name}{'-quick' if quick else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    records, title = {}, f"figure {name}"
    for cell, record in run_cells([cell for *_, cell in places], folder, workers=workers):
        records[cell.key] = record
        print(f"{title}: {len(records)} of {len(places)}: {cell.title}", file=sys.stderr, flush=True)
    points = make_points(
        (((workload, policy, value), records[cell.key]) for workload, policy, value, cell in places),
        timeout_s,
    )
    data = {
        "figure": name,
        "source": "arXiv 2511.02230: what is compared; rates, windows and sizes are ours",
        "title": figure.title,
        "about": figure.about,
        "axis": figure.axis,
        "is_quick": quick,
        "simulated": True,
        "job_timeout_s": timeout_s,
        "tenuto": __version__,
        "points": [point.to_json() for point in points],
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"continuum_{name}.svg"
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw(figure, points, path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=(*FIGURES, "all"), help=describe(list(FIGURES)))
    parser.add_argument("--quick", action="store_true", help="few points, one seed, a short window")
    parser.add_argument("--out", type=Path, default=KEPT, help="where picture and data go")
    parser.add_argument(
        "--job-timeout", type=float, default=JOB_TIMEOUT_S, metavar="S",
        help="jobs that take longer count as timed out (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, help=f"processes; records are kept in {RESULTS}")
    parsed = parser.parse_args()
    for name in FIGURES if parsed.figure == "all" else [parsed.figure]:
        path = make_figure(
            name, parsed.out, quick=parsed.quick, timeout_s=parsed.job_timeout, workers=parsed.workers
        )
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
