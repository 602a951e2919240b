"""The same trace through `tenuto bench` and through `vllm bench serve`, in turns: are the figures the same?

    python -m experiments.benchmarks.vllm_bench_agreement [--url http://localhost:8000] [--json FILE]

Both clients read one trace in Mooncake's format: requests of one turn, with their times, lengths and shared
prefixes. Both send token ids of these lengths at these times. Per pair of runs this compares mean, P50, P95
and P99 of TTFT, TPOT, ITL and E2E latency, throughput and goodput; then it prints the ratios' geometric
means, tenuto / vLLM, with 95 % intervals. Exit status 0 if all means are within 5 %.

Without --url it runs against a server that sleeps and sends made-up tokens: 0.25 s to the first token, 0.02 s
for each one after it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.light_server import open_server
from experiments.command_line import make_parser
from experiments.json_lines import write_lines
from tenuto.client.ab import measure_run
from tenuto.client.ab_verdict import estimate_ratio
from tenuto.client.options import BenchOptions
from tenuto.records.files import RunFiles
from tenuto.vllm.launch import find_vllm
from tenuto.workload.load import LoadOptions

LIMIT = 0.05
BLOCK = 512
"""Tokens that one hash id stands for, in Mooncake's traces and in this one."""
METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "latency_s"}
"""vLLM's names, and the fields of our records."""
STATISTICS = ("mean", "p50", "p95", "p99")
RATES = ("requests/s", "output tokens/s", "goodput, requests/s")
Figures = dict[str, float]
"""Times in seconds, rates per second."""
Pair = dict[str, Figures]
"""By client."""


def write_trace(path: Path, seed: int, args: argparse.Namespace) -> None:
    """Requests that arrive as a Poisson process; the first block of every second one is shared."""
    rng = random.Random(seed)
    now_s, rows = 0.0, []
    for number in range(args.requests):
        num_tokens = rng.randint(args.input // 2, 3 * args.input // 2)
        ids = [number * 1000 + block + 1 for block in range(-(-num_tokens // BLOCK))]
        if number % 2:
            ids[0] = 0
        rows.append(
            {
                "timestamp": round(1000 * now_s),
                "input_length": num_tokens,
                "output_length": rng.randint(args.output // 2, 3 * args.output // 2),
                "hash_ids": ids,
            }
        )
        now_s += rng.expovariate(args.rate)
    write_lines(path, rows)


def run_vllm(args: argparse.Namespace, url: str, model: str, trace: Path, folder: Path) -> Figures:
    """The figures that `vllm bench serve` writes."""
    command = [
        args.vllm, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", model,
        "--tokenizer", args.tokenizer, "--dataset-name", "timed_trace", "--dataset-path", str(trace),
        "--timed-trace-sec-multiplier", "0.001", "--timed-trace-chunk-hash-size", str(BLOCK),
        "--num-prompts", str(args.requests), "--ignore-eos", "--disable-tqdm",
        "--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,95,99",
        "--goodput", *args.goodput, "--save-result", "--result-dir", str(folder),
        "--result-filename", "vllm.json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result = folder / "vllm.json"
    if done.returncode or not result.exists():
        raise SystemExit(
            f"vllm bench ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    said: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if said["completed"] != args.requests:
        raise SystemExit(f"vllm bench ended {said['completed']} of {args.requests} requests")
    figures = {f"{name} {stat}": said[f"{stat}_{name}_ms"] / 1000 for name in METRICS for stat in STATISTICS}
    rates = (said["request_throughput"], said["output_throughput"], said["request_goodput"])
    return figures | dict(zip(RATES, rates, strict=True))


def run_tenuto(args: argparse.Namespace, url: str, model: str, trace: Path, folder: Path) -> Figures:
    """The figures of `tenuto bench --workload TRACE --loop open`."""
    load = LoadOptions(workload=str(trace), loop="open", goodput=tuple(args.goodput))
    options = BenchOptions(urls=(url,), load=load, model=model, metrics_interval_s=0)
    with RunFiles(folder / "tenuto") as files:
        result = measure_run(options, files)
    if result["turns"]["ok"] != args.requests:
        raise SystemExit(f"tenuto bench lost turns: {result['client']['failed_attempts']}")
    for reason in result["client"]["invalid"]:
        print(f"INVALID: {reason}", file=sys.stderr)
    figures = {
        f"{name} {stat}": result[field][stat] for name, field in METRICS.items() for stat in STATISTICS
    }
    rates = (
        result["turns"]["ok"] / result["makespan_s"],
        result["output_tokens"] / result["makespan_s"],
        result["goodput"]["turns_per_s"],
    )
    return figures | dict(zip(RATES, rates, strict=True))


def measure_pairs(args: argparse.Namespace, url: str, model: str) -> list[Pair]:
    """One run of each per pair; the order turns around from pair to pair. Pairs that FILE has stay."""
    pairs: list[Pair] = []
    if args.json and args.json.exists():
        pairs = json.loads(args.json.read_text(encoding="utf-8"))["pairs"]
    for number in range(len(pairs), args.pairs):
        pair: Pair = {}
        with tempfile.TemporaryDirectory() as name:
            trace = Path(name) / "trace.jsonl"
            write_trace(trace, args.seed + number, args)
            for client in ("tenuto", "vllm") if number % 2 == 0 else ("vllm", "tenuto"):
                run = run_tenuto if client == "tenuto" else run_vllm
                pair[client] = run(args, url, model, trace, Path(name))
        pairs.append(pair)
        if args.json:
            written = {"rows": compare(pairs), "pairs": pairs}
            args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"pair {number + 1} of {args.pairs} done", file=sys.stderr, flush=True)
    return pairs


def compare(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Per figure the means of both clients, and the ratio with its interval."""
    rows = []
    for name in pairs[0]["tenuto"]:
        values = {client: [pair[client][name] for pair in pairs] for client in ("tenuto", "vllm")}
        both = [(a, b) for a, b in zip(values["tenuto"], values["vllm"], strict=True) if a > 0 and b > 0]
        if not both:
            continue
        estimate = estimate_ratio([a / b for a, b in both])
        rows.append(
            {
                "figure": name,
                **{client: sum(each) / len(each) for client, each in values.items()},
                "ratio": estimate.ratio,
                "low": estimate.low,
                "high": estimate.high,
            }
        )
    return rows


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':22}{'tenuto bench':>14}{'vllm bench':>14}{'ratio':>8}   95 % interval"]
    for row in rows:
        is_rate = row["figure"] in RATES
        values = [
            f"{row[client]:.3f}" if is_rate else f"{1000 * row[client]:.2f} ms"
            for client in ("tenuto", "vllm")
        ]
        span = "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"{row['figure']:22}{values[0]:>14}{values[1]:>14}{row['ratio']:>8.3f}   {span}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", default=shutil.which(find_vllm()))
    parser.add_argument("--tokenizer", default=".demo/smollm2", help="of the server's model")
    parser.add_argument("--url", help="a server; default: the light one with known times")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--input", type=int, default=600, help="mean tokens of a prompt")
    parser.add_argument("--output", type=int, default=24, help="mean tokens of an answer")
    parser.add_argument("--goodput", nargs="+", default=["ttft:300", "tpot:50"])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=8125, help="of the light server")
    parser.add_argument(
        "--json", type=Path, help="write all figures here; the same command goes on with more --pairs"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.vllm is None:
        print("skipped: there is no vllm command here; pip install 'tenuto[vllm]'")
        return 0
    with open_server(args) as (url, model):
        rows = compare(measure_pairs(args, url, model))
    print(format_rows(rows))
    means = [row for row in rows if row["figure"].endswith("mean")]
    return 0 if all(abs(row["ratio"] - 1) <= LIMIT for row in means) else 1


if __name__ == "__main__":
    raise SystemExit(main())
