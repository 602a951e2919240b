"""The options of `tenuto analyze`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

DESCRIPTION = """\
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

EPILOG = """\
examples:
  tenuto analyze trace.jsonl
  tenuto analyze trace.jsonl --job task-17        one job turn by turn; '--job "*"' shows all
  tenuto analyze runs/stock runs/tenuto --json    two runs of the bench, for another program
  tenuto analyze results.jsonl                    which cells of a sweep are sick, and of what
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file or a run's folder")
    parser.add_argument(
        "--job",
        dest="jobs",
        action="append",
        default=[],
        metavar="ID",
        help="show this job turn by turn; a pattern with * and ? shows several; may be given again",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print the report as JSON instead of text"
    )


def run(parsed: argparse.Namespace) -> int:
    """Analyse the files. Raises TenutoError."""
    from tenuto.report.diagnosis.run import run_analyze

    try:
        status = run_analyze(parsed.files, jobs=parsed.jobs, as_json=parsed.as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has read enough; Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
