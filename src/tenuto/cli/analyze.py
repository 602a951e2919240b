"""`tenuto analyze`: what happened in a run, what was lost and why."""

from __future__ import annotations

from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given
from tenuto.report.diagnosis.options import AnalyzeOptions

_DESCRIPTION = """\
Say what happened in a run, what was lost and why.

Reads (plain or gzip):
  a scheduler's trace               tenuto serve MODEL --trace FILE
  turns.jsonl, or its folder        tenuto bench --out DIR, tenuto simulate --out DIR
  result.json, a sweep's results.jsonl: a diagnosis per record
  scheduler_timestamps              of the public Continuum prototype

Prints job completion times and queueing, hit ratio and what was saved, how leases ended and how long they
held, per turn the hit against the theoretical best (the previous prompt and output over this prompt) with
the cause of the gap, T8/T1, and a diagnosis in words: linear growth, turn-2 explosion, link collapse,
preemption storm, leases too short or taken back, prompts that change.
"""

_EXAMPLES = """\
examples:
  tenuto analyze trace.jsonl
  tenuto analyze trace.jsonl --job task-17        one job turn by turn; '--job "*"' shows all
  tenuto analyze runs/stock runs/tenuto --json    two runs of the bench, for another program
  tenuto analyze results.jsonl                    which cells of a sweep are sick, and of what
"""


def run(given: Given) -> int:
    """Print the analysis of each file."""
    from tenuto.report.diagnosis.run import run_analyze

    options = given.read(AnalyzeOptions)
    return run_analyze(list(options.files), jobs=list(options.jobs), as_json=options.as_json)


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(AnalyzeOptions),), run)
