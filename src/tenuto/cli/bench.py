"""`tenuto bench`: run agent jobs against a server and measure them."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.options import BenchOptions, SweepOptions
from tenuto.workload.load import LoadOptions

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
  tenuto bench --url http://localhost:8000 --jps 1,2,4 --out runs/sweep
      three loads, one after the other; tenuto report runs/sweep draws them
  tenuto bench --url http://localhost:8000 --users 32 --max-jobs 200
      32 users; each begins a job when the user's last job has ended
  tenuto bench --url http://a:8000 --url http://b:8000 --router tenuto --jps 2 --retries 5
      two engines without a router in front: the bench says where each turn goes
  tenuto bench --url http://localhost:8000 --workload trace.jsonl --loop open --scale-rate 2
      a recorded trace at its own times, twice as fast
"""

_NOTES = """\
Every turn is due when the workload says, even if the client is late, and its latency counts from that
moment. Prompts are token ids: they have exactly the planned length and share exactly what the workload says,
on any server whose /v1/completions takes ids (vLLM, SGLang, the simulated server). For other servers there is
--prompts words.

stderr shows the progress. Ctrl-C ends the run early and keeps its results. A sweep (--jps 1,2,4) has a folder
for each load in DIR, and DIR/results.jsonl. The same command again continues there.

The result shows percentiles of the job time (tools included), and for turns: the whole time (e2e), the time
to the first token (ttft), the mean time per further token (tpot) and the gaps between tokens (itl). "cache"
is the share of a job's reusable tokens that were hit; "client lag" is the delay of this client.

The result begins with INVALID, and says why, if the figures do not describe the server: if the client's own
delay in sending or reading, or the lag of a simulated server, is more than 10 ms and more than 5 % of the
time to first token. Then give the client a machine of its own, or the simulated server a lower --speed.

Exit status: 0 if every turn was answered, 1 if not, 2 if nothing could be run, 3 if the figures are INVALID,
130 if interrupted.
"""


def run(given: Given) -> int:
    """Measure a server. Status 0: every turn was answered; 1: some were not; 130: interrupted."""
    with needing("bench"):
        from tenuto.client.bench import run_bench, run_sweep
    loads = given.read(SweepOptions).jps
    runs = [given.read(BenchOptions, load=given.read(LoadOptions, jps=jps)) for jps in loads or (None,)]
    return run_bench(runs[0]) if len(runs) == 1 else run_sweep(runs)


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(SweepOptions), Part(BenchOptions, without=("jps",))),
    run,
    notes=_NOTES,
    main=("urls", "workload", "jps", "users", "window_s", "max_jobs", "seed", "model", "out", "as_json"),
)
