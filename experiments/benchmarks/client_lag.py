"""How late `tenuto bench` itself is: 1,000 jobs at a time against a light server, both on two cores.

    .venv/bin/python -m experiments.benchmarks.client_lag

The server sleeps and sends made-up tokens (tests/client/fake_server.py), so that what is late is the client.
Each user's turn takes 2 s and its tool 0.5 s: 400 turns and 8,000 tokens a second. Lag is the time from a
turn's intended start to its sending; the event loop's is how late anything that comes can be noticed. Other
work on the machine counts against the client, so the load average is printed too.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from experiments.benchmarks.light_server import serve
from experiments.command_line import make_parser
from tenuto.client.ab import measure_run
from tenuto.client.options import BenchOptions
from tenuto.records.files import RunFiles
from tenuto.workload.load import LoadOptions


def run(url: str, args: argparse.Namespace) -> dict[str, Any]:
    load = LoadOptions(workload=args.workload, users=args.users, max_jobs=args.jobs)
    options = BenchOptions(urls=(url,), load=load)
    with RunFiles(None) as files:
        return measure_run(options, files)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--workload", default="ab8")
    parser.add_argument("--users", type=int, default=1000, help="jobs at a time")
    parser.add_argument("--jobs", type=int, default=1500, help="jobs in all")
    parser.add_argument("--ttft", type=float, default=1.0, help="the server's seconds to the first token")
    parser.add_argument("--tpot", type=float, default=0.05, help="and per token after it")
    parser.add_argument("--cores", type=int, default=2, help="for client and server together")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--limit", type=float, default=0.05, help="seconds that the P99 of both may be")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
    with serve(args.port, args.ttft, args.tpot) as url:
        before_s = time.process_time()
        result = run(url, args)
        cpu_s = time.process_time() - before_s
    client, planned = result["client"], result["turns"]["planned"]
    seconds, turns = result["makespan_s"], result["turns"]["ok"]
    print(
        f"{turns} of {planned} turns in {seconds:.1f} s: {turns / seconds:.0f} turns/s, "
        f"{result['output_tokens'] / seconds:.0f} tokens/s, client {cpu_s:.1f} s of processor time"
    )
    lags = {"sending": client["send_lag_s"], "event loop": client["event_loop_lag_s"]}
    for name, lag in lags.items():
        print(f"{name:>10}: " + ", ".join(f"{key} {value * 1000:.1f} ms" for key, value in lag.items()))
    print(f"load average after: {os.getloadavg()[0]:.2f}")
    is_complete = turns == planned
    return 0 if is_complete and all(lag["p99"] <= args.limit for lag in lags.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
