"""How fast and how big the simulator is: the published sweep, sessions beside AISimulate, and growth.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install --pre aisimulate
    .venv/bin/python experiments/benchmarks/peers.py --weka traces/weka --aisimulate /tmp/peer/bin/aisimulate

Three parts; each run is a process of its own, of which the operating system counts time and peak memory.

- sweep: the H200 sweep of docs/fidelity.md, all its policies and rates. Bound: 60 s on two cores, 1 GB.
- weka: the first sessions of the Weka traces, the same file for both simulators (agentic Mooncake, without
  the turns that do not fit), in turns. Bound: at least as fast as AISimulate, whose engine is Rust
  (https://github.com/ai-dynamo/aisimulate). Compared is the time that each reports for its simulation,
  without start-up and reading, and the processor time of the whole command.
- growth: ab8 for 1, 2 and 4 times as long. Bound: the same processor time per turn.

Seconds depend on the machine and on what else runs there; the ratios much less, processor time less than
wall time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tenuto.sim.machine import build
from tenuto.sim.run import truncate_to_fit
from tenuto.sim.setup import Setup
from tenuto.workload import load_workload
from tenuto.workload.convert import FORMATS, write_trace

ROOT = Path(__file__).resolve().parents[2]
AISIMULATE_CONFIG = """\
traffic:
  source: {{type: trace, paths: [{trace}], format: agentic_mooncake, block_size: 64}}
  load: {{type: trace_timestamps, agentic_lanes: {lanes}}}
engine:
  mode: aggregated
  model: meta-llama/Meta-Llama-3.1-8B
  hardware: h200_sxm
  backend: vllm
  context_length: 131072
  workers:
    aggregated: {{}}
"""


class Spent(NamedTuple):
    """What a process and those it started took."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    output: str


def spend(command: Sequence[str]) -> Spent:
    """Run a command to its end. Raises SystemExit with what it said if it fails."""
    started_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}{output.read()[-2000:]}")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Spent(wall_s, cpu_s, usage.ru_maxrss * 1024, output.read())


def simulate(*options: str) -> tuple[Spent, dict[str, Any]]:
    """`tenuto simulate` on an H200, and its record. Of one policy: a second run beside it would count too."""
    command = [sys.executable, "-m", "tenuto.cli", "simulate", "--gpu", "H200", "--host-gb", "400"]
    spent = spend([*command, "--json", "--no-beside-stock", *options])
    return spent, json.loads(spent.output)


def measure_sweep() -> dict[str, Any]:
    """The whole published sweep, a run on each core at a time."""
    spent = spend([sys.executable, "-m", "experiments.tables.fidelity", "--machines", "H200", "--json"])
    rows = json.loads(spent.output)["rows"]
    policies = sorted({row["policy"] for row in rows})
    print(
        f"sweep: {len(rows)} runs of {len(policies)} policies in {spent.cpu_s:.1f} s of processor time "
        f"({spent.wall_s:.1f} s by the clock), peak {spent.peak_bytes / 1e6:.0f} MB"
    )
    return {"cpu_s": spent.cpu_s, "wall_s": spent.wall_s, "peak_bytes": spent.peak_bytes, "runs": len(rows)}


def write_sessions(weka: Path, num_sessions: int, out: Path) -> int:
    """The first sessions, with their sub-agents, that an H200 can run; returns how many turns they have."""
    machine = build(Setup(gpu="H200", policy="stock"))
    most_tokens = machine.make_scheduler().kv.count_most_tokens()
    workload, _ = truncate_to_fit(load_workload(str(weka)), most_tokens)
    kept: set[str] = set()
    num_roots = 0
    for job in workload.jobs:
        num_roots += job.parent is None
        if (job.parent is None and num_roots <= num_sessions) or job.parent in kept:
            kept.add(job.job_id)
    jobs = [job for job in workload.jobs if job.job_id in kept]
    write_trace(out, jobs, FORMATS["agentic-mooncake"], 64)
    return sum(len(job.turns) for job in jobs)


def run_aisimulate(command: str, trace: Path, folder: Path, lanes: int) -> dict[str, float]:
    config, out = folder / "prediction.yaml", folder / "out"
    config.write_text(AISIMULATE_CONFIG.format(trace=trace, lanes=lanes), encoding="utf-8")
    spent = spend([command, "predict", "-c", str(config), "--output-dir", str(out), "--overwrite"])
    report = json.loads((out / "prediction.json").read_text(encoding="utf-8"))
    return {
        "turns": report["completed_requests"],
        "simulation_s": report["wall_time_ms"] / 1000,
        "cpu_s": spent.cpu_s,
        "peak_bytes": spent.peak_bytes,
    }


def run_tenuto(policy: str, trace: Path) -> dict[str, float]:
    spent, record = simulate("--policy", policy, "--workload", str(trace))
    return {
        "simulation_s": record["wall_s"],
        "cpu_s": spent.cpu_s,
        "peak_bytes": spent.peak_bytes,
    }


def measure_weka(args: argparse.Namespace) -> dict[str, Any]:
    """Both simulators on the same sessions, in turns; the order turns around from round to round."""
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "sessions.jsonl"
        # In a process of its own: a child's peak memory counts from what its parent had when it started it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            num_turns = pool.apply(write_sessions, (args.weka, args.sessions, trace))
        print(f"weka: {args.sessions} sessions, {num_turns:,} turns, {trace.stat().st_size / 1e6:.0f} MB")
        arms = [*args.policies, *(["aisimulate"] if args.aisimulate else [])]
        for number in range(args.rounds):
            results: dict[str, dict[str, float]] = {}
            for arm in arms if number % 2 == 0 else reversed(arms):
                if arm == "aisimulate":
                    results[arm] = run_aisimulate(args.aisimulate, trace, Path(name), args.sessions)
                else:
                    results[arm] = run_tenuto(arm, trace) | {"turns": num_turns}
                print(f"  round {number + 1}, {arm}: {format_result(results[arm])}", flush=True)
            rounds.append(results)
    if args.aisimulate:
        for policy in args.policies:
            for what in ("simulation_s", "cpu_s"):
                report_ratio(f"tenuto {policy} / aisimulate, {what} per turn", rounds, policy, what)
    return {"turns": num_turns, "rounds": rounds}


def format_result(result: dict[str, float]) -> str:
    return (
        f"{result['turns']:.0f} turns, simulation {result['simulation_s']:.1f} s, in all "
        f"{result['cpu_s']:.1f} s of processor time, peak {result['peak_bytes'] / 1e6:.0f} MB"
    )


def report_ratio(what: str, rounds: Sequence[dict[str, dict[str, float]]], arm: str, key: str) -> None:
    ratios = sorted(
        (each[arm][key] / each[arm]["turns"]) / (each["aisimulate"][key] / each["aisimulate"]["turns"])
        for each in rounds
    )
    print(
        f"{what}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} rounds)"
    )


def measure_growth(policies: Sequence[str]) -> list[dict[str, Any]]:
    """Processor time per turn as a run gets longer."""
    rows = []
    for policy in policies:
        for window_s in (90, 180, 360):
            options = ("--policy", policy, "--workload", "ab8", "--jps", "3", "--window", str(window_s))
            spent, record = simulate(*options)
            num_turns = 8 * record["jobs"]
            rows.append({"policy": policy, "turns": num_turns, "cpu_s": spent.cpu_s})
            print(
                f"growth, {policy}: {num_turns:,} turns, {1e3 * spent.cpu_s / num_turns:.2f} ms of processor "
                f"time each, peak {spent.peak_bytes / 1e6:.0f} MB",
                flush=True,
            )
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weka", type=Path, help="folder of Weka traces")
    parser.add_argument("--aisimulate", help="the aisimulate command of its own environment")
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--policies", nargs="+", default=["stock", "tenuto"], metavar="POLICY")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--parts", nargs="+", choices=("sweep", "weka", "growth"), default=["sweep", "weka", "growth"]
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.aisimulate is None or shutil.which(args.aisimulate) is None:
        print("no AISimulate here: install it in an environment of its own and name it with --aisimulate")
        args.aisimulate = None
    figures: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()}
    if "sweep" in args.parts:
        figures["sweep"] = measure_sweep()
    if "weka" in args.parts and args.weka is None:
        print("weka: left out; name the folder of traces with --weka")
    elif "weka" in args.parts:
        figures["weka"] = measure_weka(args)
    if "growth" in args.parts:
        figures["growth"] = measure_growth(args.policies)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
