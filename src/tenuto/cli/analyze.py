"""`tenuto analyze`: what happened in a run, what was lost and why."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part
from tenuto.core.settings import Options, option

_SUMMARY = """\
Say what happened in a run, what was lost and why.
Give it a trace of a scheduler, the folder of a run, a sweep or an `ab`, or a recording.
"""

_EXAMPLES = """\
examples:
  tenuto analyze trace.jsonl
  tenuto analyze trace.jsonl --job task-17        one job turn by turn; '--job "*"' shows all
  tenuto analyze runs/stock runs/tenuto --json    two runs of the bench, for another program
  tenuto analyze results.jsonl                    which cells of a sweep have problems, and why
"""

_NOTES = """\
It reads (plain or gzip):
  a scheduler's trace               tenuto serve MODEL --trace FILE, tenuto simulate --trace FILE
  turns.jsonl, or its folder        tenuto bench --out DIR, tenuto simulate --out DIR
  a recording                       tenuto record --out FILE
  result.json, results.jsonl        of a run, a sweep or an `ab`: a diagnosis per record
  scheduler_timestamps              of the public Continuum prototype

It prints job completion times and queueing; the hit ratio and the saved tokens; how leases ended and how long
they lasted; each turn's hit and the best possible one (the part of its prompt that the previous prompt and
output cover), with the cause of the difference; T8/T1; and a diagnosis in words: linear growth, turn-2
explosion, link collapse, preemption storm, leases too short or reclaimed, prompts that change.
"""


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    """All options."""

    files: tuple[Path, ...] = option(MISSING, "a file or a run's folder", metavar="FILE", is_positional=True)
    jobs: tuple[str, ...] = option(
        (),
        "show this job turn by turn; a pattern with * and ? shows several",
        flag="--job",
        metavar="ID",
        is_repeatable=True,
    )
    timestamps: Path | None = option(
        None, "write the run as the Continuum prototype's scheduler_timestamps; of one file", metavar="OUT"
    )
    as_json: bool = option(False, "print the report as JSON instead of text", flag="--json")


def run(given: Given) -> int:
    """Print the analysis of each file."""
    from tenuto.report.analyze import run_analyze, write_timestamps

    options = given.read(AnalyzeOptions)
    if options.timestamps:
        write_timestamps(options.files, options.timestamps)
    return run_analyze(list(options.files), jobs=list(options.jobs), as_json=options.as_json)


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(AnalyzeOptions),), run, notes=_NOTES)
