"""`tenuto report`: one HTML page from the records of runs."""

from __future__ import annotations

from tenuto.cli.command import Command, Part, needing
from tenuto.cli.options import Given
from tenuto.report.html.options import ReportOptions

_SUMMARY = """\
Make one HTML page from the records of runs: who wins where, and by how much. It needs no network.
RECORDS are files, or folders that are searched.
"""

_EXAMPLES = """\
examples:
  tenuto compare --gpu H200 --policies stock,tenuto --jps 1,3,6 --seeds 41,42 --out sweep
  tenuto report sweep
      the sweep's page, as report.html
  tenuto report runs/ --out page.html --figures figures
      and every picture as PNG and SVG, for papers
  tenuto report runs/h200-tenuto --trace-events trace.json
      and every turn as a trace that ui.perfetto.dev opens
"""

_NOTES = """\
The page shows job completion times against load, latency turn by turn, the KV cache over time, a timeline of
jobs, and the commands that make the runs again. It reads:
  result.json, results.jsonl   as `tenuto simulate`, `tenuto compare` and `tenuto bench` write them
  turns.jsonl                  beside a result: the timeline
  occupancy.jsonl              beside a result: the KV cache over time
  a scheduler's JSONL trace    of `tenuto serve --trace FILE`: both, of a live server
"""


def run(given: Given) -> int:
    """Write the page."""
    options = given.read(ReportOptions)
    with needing("report"):
        from tenuto.report.html.run import run_report
    return run_report(options)


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(ReportOptions),), run, notes=_NOTES)
