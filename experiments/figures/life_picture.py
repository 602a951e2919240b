"""The picture in docs/report.md and on the site's first page: what a few jobs did, turn by turn.

    python -m experiments.figures.life_picture

One simulated GPU whose cache holds about a third of the jobs, with host memory below it: an example, not a
measure of the gain. `tenuto report` draws the scheduler's trace of it. Writes docs/figures/life.svg.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from experiments.command_line import make_parser
from tenuto.cli import main as tenuto

PICTURES = Path(__file__).parents[2] / "docs" / "figures"
SIMULATE = (
    *("simulate", "--policy", "tenuto", "--gpu", "A100-40", "--jps", "1", "--window", "16", "--seed", "42"),
    *("--kv-tokens", "60000", "--offload", "async", "--host-gb", "8", "--no-beside-stock"),
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES / "life.svg")
    parser.add_argument("--jobs", help="end the arrivals after so many jobs, for a quick look")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "simulated"
        limit = ("--max-jobs", parsed.jobs) if parsed.jobs else ()
        for command in (
            [*SIMULATE, *limit, "--trace", str(trace)],
            ["report", str(trace), "--out", str(folder / "page.html"), "--figures", str(folder / "figures")],
        ):
            if tenuto(command) != 0:
                raise SystemExit(1)
        shutil.copy(folder / "figures" / "timeline-1.svg", parsed.out)
    print(f"{parsed.out}: {parsed.out.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
