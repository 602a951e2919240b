"""`tenuto analyze`: what happened in a run, what was lost and why."""

from __future__ import annotations

from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given
from tenuto.report.diagnosis.options import AnalyzeOptions

_SUMMARY = """\
Say what happened in a run, what was lost and why.
Give it a trace of a scheduler, the folder of a run, a sweep or an `ab`, or a recording.
"""

_EXAMPLES = """\
examples:
  tenuto analyze trace.jsonl
  tenuto analyze trace.jsonl --job task-17        one job turn by turn; '--job "*"' shows all
  tenuto analyze runs/stock runs/tenuto --json    two runs of the bench, for another program
  tenuto analyze results.jsonl                    which cells of a sweep are sick, and of what
"""

_NOTES = """\
It reads (plain or gzip):
  a scheduler's trace               tenuto serve MODEL --trace FILE, tenuto simulate --trace FILE
  turns.jsonl, or its folder        tenuto bench --out DIR, tenuto simulate --out DIR
  a recording                       tenuto record --out FILE
  result.json, results.jsonl        of a run, a sweep or an `ab`: a diagnosis per record
  scheduler_timestamps              of the public Continuum prototype

It prints job completion times and queueing; the hit ratio and what was saved; how leases ended and how long
they held; for each turn the hit against the best possible one (the previous prompt and output over this
prompt) with the cause of the gap; T8/T1; and a diagnosis in words: linear growth, turn-2 explosion, link
collapse, preemption storm, leases too short or reclaimed, prompts that change.
"""


def run(given: Given) -> int:
    """Print the analysis of each file."""
    from tenuto.report.diagnosis.run import run_analyze, write_timestamps

    options = given.read(AnalyzeOptions)
    if options.timestamps:
        write_timestamps(options.files, options.timestamps)
    return run_analyze(list(options.files), jobs=list(options.jobs), as_json=options.as_json)


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(AnalyzeOptions),), run, notes=_NOTES)
