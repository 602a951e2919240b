"""`tenuto bench`: run agent jobs against a server and measure them."""

from __future__ import annotations

from tenuto.cli.command import Command, Part, needing
from tenuto.cli.options import Given
from tenuto.client.load.options import BenchOptions

_SUMMARY = """\
Run agent jobs against any OpenAI-compatible server and measure them.
A job is a conversation of several turns; between two turns its tool runs (a sleep, or a real command).
"""

_EXAMPLES = """\
examples:
  tenuto bench --url http://localhost:8000 --jps 6
      the 8-turn workload of the published sweeps, 255 jobs arriving within 45 s
  tenuto bench --url http://localhost:8000 --workload swe-bench --jps 0.5 --hints tool --out runs/swe
      each turn names its tool to Tenuto; result.json, turns.jsonl and metrics.jsonl go to runs/swe
  tenuto bench --url http://localhost:8000 --users 32 --max-jobs 200
      32 users; each begins a job when the user's last job has ended
  tenuto bench --url http://localhost:8000 --workload trace.jsonl --loop open --scale-rate 2
      a recorded trace at its own times, twice as fast
"""

_NOTES = """\
Every turn is sent when the workload says, whatever the client is doing, and its latency counts from that
moment. Prompts are token ids: they have exactly the planned length and share exactly what the workload says,
on any server whose /v1/completions takes ids (vLLM, SGLang, the simulated server). For other servers there is
--prompts words.

stderr shows the run while it goes on. Ctrl-C ends it early and keeps what there is.
Exit status: 0 if every turn was answered, 1 if not, 2 if nothing could be run, 130 if interrupted.
"""


def run(given: Given) -> int:
    """Measure a server. Status 0: every turn was answered; 1: not every; 130: interrupted."""
    options = given.read(BenchOptions)
    with needing("bench"):
        from tenuto.client.load.run import run_bench
    return run_bench(options)


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(BenchOptions),), run, notes=_NOTES)
