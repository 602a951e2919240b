"""The same jobs through `tenuto bench` and through AIPerf, in turns: do they measure the same?

    python -m venv /tmp/peer && /tmp/peer/bin/pip install aiperf
    .venv/bin/python -m experiments.benchmarks.peer_agreement --aiperf /tmp/peer/bin/aiperf

AIPerf (NVIDIA's load client, https://github.com/ai-dynamo/aiperf) gets the very requests that `tenuto bench`
sends, as a Mooncake-style trace of sessions: a first turn has a time, a later one a delay after the answer.
Per pair of runs this prints the ratios, tenuto / AIPerf, of the mean time to first token, of turns and of
sessions; then their geometric means with 95 % intervals. Exit status 0 if all three are within 5 %.

Without --url it runs against a server that sleeps and sends made-up tokens, whose times are known: 0.25 s to
the first token, 0.02 s for each one after it. Then both are also compared with the truth.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from experiments.benchmarks.light_server import TPOT_S, TTFT_S, open_server
from experiments.command_line import make_parser
from experiments.json_lines import read_lines, write_lines
from tenuto.client.ab import measure_run
from tenuto.client.ab_verdict import estimate_ratio
from tenuto.client.http import Conversation, RequestWriter, TokenIds
from tenuto.client.options import BenchOptions
from tenuto.records.files import RunFiles
from tenuto.workload.load import LoadOptions, make_workload
from tenuto.workload.schema import Workload

LIMIT = 0.05
Times = dict[str, float]
"""Means in seconds: `ttft`, `turn`, `session`."""


class Server(NamedTuple):
    """What both clients talk to."""

    url: str
    model: str
    is_known: bool
    """It is the light one, whose times are given."""


def write_trace(workload: Workload, model: str, path: Path) -> None:
    """AIPerf's input: every request verbatim, prompts of this run alone."""
    writer = RequestWriter(model, TokenIds(), secrets.token_hex(4), quotes_answers=False)
    rows = []
    for job in workload.jobs:
        conversation = Conversation(job, writer.form, writer.run_id, {})
        for index, turn in enumerate(job.turns):
            body = writer.write_body(job, index, conversation.write_prompt(turn))
            row: dict[str, Any] = {"session_id": job.job_id, "payload": json.loads(body)}
            if index:
                row["delay"] = 1000 * job.turns[index - 1].tool_s
            else:
                row["timestamp"] = 1000 * job.arrival_s
            rows.append(row)
    write_lines(path, rows)


def run_peer(args: argparse.Namespace, server: Server, workload: Workload, folder: Path) -> Times:
    """AIPerf's means, from its own records."""
    trace = folder / "trace.jsonl"
    write_trace(workload, server.model, trace)
    command = [
        args.aiperf, "profile", "--model", server.model, "--url", server.url, "--streaming",
        "--endpoint-type", "completions", "--input-file", str(trace),
        "--custom-dataset-type", "mooncake-trace",
        "--fixed-schedule", "--fixed-schedule-auto-offset", "--tokenizer", args.tokenizer,
        "--use-server-token-count", "--ui", "none", "--artifact-dir", str(folder / "aiperf"),
        "--no-gpu-telemetry", "--no-server-metrics",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    records = folder / "aiperf" / "profile_export.jsonl"
    if done.returncode or not records.exists():
        raise SystemExit(
            f"AIPerf ended with status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        )
    rows = read_lines(records)
    planned = sum(len(job.turns) for job in workload.jobs)
    if len(rows) != planned or any(row.get("error") for row in rows):
        raise SystemExit(f"AIPerf ended {len(rows)} of {planned} turns, or some with errors: see {records}")
    sessions: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        said = row["metadata"]
        sessions[said["conversation_id"]] += [said["request_start_ns"] / 1e9, said["request_end_ns"] / 1e9]
    return {
        "ttft": fmean(row["metrics"]["time_to_first_token"]["value"] / 1000 for row in rows),
        "turn": fmean(row["metrics"]["request_latency"]["value"] / 1000 for row in rows),
        "session": fmean(max(times) - min(times) for times in sessions.values()),
    }


def run_tenuto(server: Server, load: LoadOptions, folder: Path) -> Times:
    """The means that `tenuto bench` reports."""
    # Neither client reads the server's metrics meanwhile.
    options = BenchOptions(
        urls=(server.url,), load=load, model=server.model, answers="workload", metrics_interval_s=0
    )
    with RunFiles(folder) as files:
        result = measure_run(options, files)
    if result["turns"]["ok"] != result["turns"]["planned"]:
        raise SystemExit(f"tenuto bench lost turns: {result['client']['failed_attempts']}")
    return {
        "ttft": result["ttft_s"]["mean"],
        "turn": result["latency_s"]["mean"],
        "session": result["job_s"]["mean"],
    }


def get_truth(workload: Workload) -> Times:
    """What the light server and the tools take."""
    turns = [turn for job in workload.jobs for turn in job.turns]
    turn_s = [TTFT_S + TPOT_S * (turn.num_output_tokens - 1) for turn in turns]
    total_s = sum(turn_s) + sum(turn.tool_s for turn in turns)
    return {"ttft": TTFT_S, "turn": fmean(turn_s), "session": total_s / len(workload.jobs)}


def measure_pairs(args: argparse.Namespace, server: Server) -> list[dict[str, Times]]:
    """One of each per pair, in turns; the order turns around from pair to pair."""
    pairs = []
    for number in range(args.pairs):
        load = LoadOptions(
            workload=args.workload, jps=args.jps, max_jobs=args.jobs, scale_lengths=args.scale, seed=number
        )
        workload = make_workload(load)
        pair: dict[str, Times] = {}
        with tempfile.TemporaryDirectory() as name:
            for client in ("tenuto", "aiperf") if number % 2 == 0 else ("aiperf", "tenuto"):
                if client == "tenuto":
                    pair[client] = run_tenuto(server, load, Path(name) / client)
                else:
                    pair[client] = run_peer(args, server, workload, Path(name))
        pairs.append(pair | ({"truth": get_truth(workload)} if server.is_known else {}))
        print(f"pair {number + 1} of {args.pairs}: " + format_pair(pairs[-1]), flush=True)
    return pairs


def format_pair(pair: Mapping[str, Times]) -> str:
    return "; ".join(
        f"{client} " + ", ".join(f"{name} {value:.3f} s" for name, value in times.items())
        for client, times in pair.items()
    )


def report(pairs: Sequence[Mapping[str, Times]], one: str, other: str) -> bool:
    """Print the ratios one / other; whether all are within the limit."""
    agree = True
    for name in ("ttft", "turn", "session"):
        estimate = estimate_ratio([pair[one][name] / pair[other][name] for pair in pairs])
        span = "" if estimate.low is None else f" (95 % interval {estimate.low:.3f} to {estimate.high:.3f})"
        print(f"{one} / {other}, {name:>7}: {estimate.ratio:.3f}{span}, {len(pairs)} pairs")
        agree = agree and abs(estimate.ratio - 1) <= LIMIT
    return agree


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), help="the aiperf command")
    parser.add_argument("--tokenizer", default=".demo/smollm2", help="AIPerf wants one, though it needs none")
    parser.add_argument("--url", help="a server; default: the light one with known times")
    parser.add_argument("--workload", default="ab8")
    parser.add_argument("--jps", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--scale", type=float, default=0.1, help="of all lengths")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--port", type=int, default=8124, help="of the light server")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.aiperf is None or shutil.which(args.aiperf) is None:
        print(
            "skipped: there is no aiperf here; pip install aiperf into an environment and name it: --aiperf"
        )
        return 0
    with open_server(args) as (url, model):
        pairs = measure_pairs(args, Server(url, model, is_known=args.url is None))
    agree = report(pairs, "tenuto", "aiperf")
    if args.url is None:
        report(pairs, "tenuto", "truth")
        report(pairs, "aiperf", "truth")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
