"""`tenuto ab`: compare servers or policies under the same load."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.options import AbOptions, ArmOptions, BenchOptions

_SUMMARY = """\
Compare servers or policies under the same load, and print a verdict in words.
Every repeat runs the same jobs once on each arm: that makes a pair. The verdict has a 95 % interval.
"""

_EXAMPLES = """\
examples:
  tenuto ab --arm stock=vllm --arm hold=policy:continuum-fixed --model Qwen/Qwen3-8B --jps 6 --out ab1
  tenuto ab --arm a=http://10.0.0.1:8000 --arm b=http://10.0.0.2:8000 --workload swe-bench --jps 0.5 --out ab2
  tenuto ab --arm short=policy:continuum-fixed,ttl_s=1 --arm long=policy:continuum-fixed,ttl_s=10 \\
      --model Qwen/Qwen3-8B --serve-args "--max-model-len 32768 --max-num-seqs 64" \\
      --hints tool --jps 2 --out ab3
  tenuto ab --arm stock=sim:stock --arm hold=sim:continuum-fixed --model llama-3.1-8b --jps 1 --out ab4
"""

_NOTES = """\
An arm is NAME=URL, a server that already runs, or a server that is started here before each of its runs and
stopped afterwards: NAME=vllm is plain vLLM, NAME=policy:POLICY is vLLM with Tenuto's scheduler, and
NAME=sim:POLICY is a simulated GPU. With more than two arms, each is compared with the first.

The order alternates from repeat to repeat (A B, B A, …), so that a machine that slows down affects all arms
alike; the seed changes too. Each pair gives one ratio per measure (job time, time to first token, turn time,
throughput). Their geometric mean has a 95 % interval. If the interval includes 1, no difference was seen.
Fewer than 6 pairs prove nothing, and the verdict says so.

The prefix cache is emptied before each run if the server allows it (vLLM with VLLM_SERVER_DEV_MODE=1,
which servers started here have). The verdict says if it could not be emptied.

Each run is saved when it ends (DIR/runs). The same command again continues there. Ctrl-C prints the verdict
of the pairs so far. `tenuto report DIR` draws the results.

If a run is INVALID (tenuto bench --help), nothing is proved: remove that run's folder, and run it again.
A comparison has one load. For several loads, run several commands, each with its own DIR.
Exit status: 0 if every turn was answered, 1 if not, 2 if an arm could not be run, 130 if interrupted.
"""


def run(given: Given) -> int:
    """Compare. Status 0: every turn was answered; 1: some were not; 130: interrupted."""
    options = read_ab_options(given)
    with needing("bench"):
        from tenuto.client.ab import run_ab
    return run_ab(options)


def read_ab_options(given: Given) -> AbOptions:
    """The comparison's options, with those of `tenuto bench` for its runs."""
    arms = given.read(ArmOptions)
    url = next((arm.target for arm in arms.arms if not arm.is_local), "http://127.0.0.1")
    bench = given.read(
        BenchOptions,
        urls=tuple(url.split(",")),
        model=None,
        out=None,
        csv=None,
        as_json=False,
        engine_urls=(),
    )
    return given.read(AbOptions, bench=bench)


_EACH_RUNS_OWN = ("urls", "engine_urls", "run_id", "policy")
"""Options of the bench that a comparison sets for each of its runs."""
COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(ArmOptions), Part(AbOptions, without=_EACH_RUNS_OWN)),
    run,
    notes=_NOTES,
    main=("arms", "model", "serve_args", "workload", "jps", "window_s", "repeats", "out", "gpu", "as_json"),
)
