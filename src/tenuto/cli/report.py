"""`tenuto report`: one HTML page from the records of runs."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.core.settings import Options, option

_SUMMARY = """\
Make one HTML page from the records of runs: which policy wins where, and by how much. It needs no network.
RECORDS are files, or folders that are searched.
"""

_EXAMPLES = """\
examples:
  tenuto compare --gpu H200 --policies stock,tenuto --jps 1,3,6 --seeds 41,42 --out sweep
  tenuto report sweep
      the sweep's page, as report.html
  tenuto report ab1
      a comparison of `tenuto ab`: the page says what its verdict says
  tenuto report runs/ --out page.html --figures figures
      and every picture as PNG and SVG, for papers
  tenuto report runs/h200-tenuto --trace-events trace.json
      and every turn as a trace that ui.perfetto.dev opens
"""

_NOTES = """\
The first line says which policy wins, by how much, at which load, against which, and whether by simulation.
Charts show job completion times and cache hits against load, latency turn by turn, the KV cache over time,
and a timeline of jobs. At the end are the commands that make the runs again.

Two policies with the same seed are a pair. A policy wins if the 95 % interval of its pairs' ratios leaves out
1, as in `tenuto ab`. If 1 is inside it, nobody wins. Measured runs need 6 pairs. INVALID runs prove nothing.

The page is made from:
  result.json, results.jsonl   as `tenuto simulate`, `tenuto compare` and `tenuto bench` write them
  turns.jsonl                  beside a result: the timeline
  occupancy.jsonl              beside a result: the KV cache over time
  a scheduler's JSONL trace    of `tenuto serve --trace FILE`: both, of a live server
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """All options."""

    GROUP = "the page"

    records: tuple[Path, ...] = option(
        MISSING, "files, and folders that are searched", metavar="RECORDS", is_positional=True
    )
    out: Path = option(Path("report.html"), "the page")
    figures: Path | None = option(None, "write every picture there, as PNG and SVG", metavar="DIR")
    trace_events: Path | None = option(None, "write the turns as Chrome trace events, for Perfetto")
    as_json: bool = option(False, "print the result as JSON instead of text", flag="--json")


def run(given: Given) -> int:
    """Write the page."""
    options = given.read(ReportOptions)
    with needing("report"):
        from tenuto.report.html.page import run_report
    return run_report(**asdict(options))


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(ReportOptions),), run, notes=_NOTES)
