"""`tenuto convert`: change a trace's format, or import agents' logs."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part
from tenuto.workload.convert import ConvertOptions

_SUMMARY = """\
Change a trace's format, or import agents' logs as a workload.
It says on stderr what the new format cannot hold.
"""

_EXAMPLES = """\
examples:
  tenuto convert recorded.jsonl sessions --to weka
      a folder with a file per session, as AIPerf reads it
  tenuto convert recorded.jsonl mooncake.jsonl --to mooncake
  tenuto convert runs/trajectories swe.jsonl
      mini-swe-agent's own logs as a workload; then: tenuto bench --workload swe.jsonl --url …
"""

_NOTES = """\
IN is anything that --workload takes: Tenuto's JSONL (a recording, say), Mooncake, agentic Mooncake, Weka,
trajectories of mini-swe-agent (a file, or a folder of *.traj.json), OpenAI-style chat logs (JSONL of rows
with messages), ShareGPT, TraceLab's rounds, or OpenTelemetry's spans of agents (JSON). The written file is
read again and compared, to find what was lost.
"""


def run(given: Given) -> int:
    """Convert a file."""
    from tenuto.workload.convert import run_convert

    return run_convert(given.read(ConvertOptions))


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(ConvertOptions),), run, notes=_NOTES)
