"""The options of `tenuto report`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """\
Make one HTML page from the records of runs: who wins where, job completion times against load, latency turn
by turn, the KV cache over time, a timeline of jobs, and how to reproduce it. The page needs no network.

RECORDS are files, or folders that are searched:
  result.json, results.jsonl   as `tenuto simulate`, `tenuto compare` and `tenuto bench` write them
  turns.jsonl                  beside a result: the timeline
  occupancy.jsonl              beside a result: the KV cache over time
  a scheduler's JSONL trace    of `tenuto serve --trace FILE`: both, of a live server
"""

EPILOG = """\
examples:
  tenuto compare --gpu H200 --policies stock,tenuto --jps 1,3,6 --seed 41,42 --out sweep
  tenuto report sweep
      the sweep's page, as report.html
  tenuto report runs/ --out page.html --figures figures
      and every picture as PNG and SVG, for papers
  tenuto report runs/h200-tenuto --trace-events trace.json
      and every turn as a trace that ui.perfetto.dev opens
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """All options."""

    records: tuple[Path, ...]
    out: Path = Path("report.html")
    figures: Path | None = None
    trace_events: Path | None = None
    as_json: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above."""
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS", help="files and folders")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default report.html)"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="write every picture there, as PNG and SVG"
    )
    parser.add_argument(
        "--trace-events",
        type=Path,
        metavar="FILE",
        help="write the turns as Chrome trace events, for Perfetto",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print what came out as JSON instead of text"
    )


def read_options(parsed: argparse.Namespace) -> ReportOptions:
    """The options as parsed."""
    return ReportOptions(
        records=tuple(parsed.records),
        out=parsed.out,
        figures=parsed.figures,
        trace_events=parsed.trace_events,
        as_json=parsed.as_json,
    )
