"""Chats that name their job nowhere, through vllm-router: how many turns find what the turn before computed.

    python -m experiments.routers.chats [--jobs 8] [--turns 5] [--repeat 3] [--json]

The clients of most agent frameworks send the whole conversation and no id. The jobs run side by side on two
simulated servers, with one system prompt for all. "Named": `tenuto record --name-jobs` before the router
sends the name by which Tenuto knows the job as X-Session-ID.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from experiments.command_line import make_parser
from experiments.routers.processes import ENGINE, count_turns, run_engine, run_naming, run_router, start_all

BLOCK = 16
SYSTEM = "You are an engineer. Answer with one command. " * 20
TASK = "Find out why the tests of the parser fail, and mend it. " * 10
RESULT = "one test failed, and the others passed. " * 10


@dataclass(frozen=True)
class Row:
    """One arrangement."""

    policy: str
    is_named: bool = False


ROWS = (
    Row("cache_aware"),
    Row("consistent_hash"),
    Row("round_robin"),
    Row("consistent_hash", is_named=True),
    Row("sticky_least_loaded", is_named=True),
)


def run_job(client: httpx.Client, number: int, num_turns: int) -> tuple[int, int]:
    """Turns that came back, and those of them that found all of the prompt before."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Task {number}. {TASK}"},
    ]
    before, num_found = 0, 0
    for turn in range(num_turns):
        body = {"model": "llama-3.1-8b", "messages": messages, "max_tokens": 16, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        usage = answer["usage"]
        if turn:
            num_found += usage["prompt_tokens_details"]["cached_tokens"] >= before // BLOCK * BLOCK
        before = usage["prompt_tokens"]
        messages += [
            answer["choices"][0]["message"],
            {"role": "user", "content": f"{number}.{turn}: {RESULT}"},
        ]
        time.sleep(0.1)
    return num_turns - 1, num_found


def run_row(row: Row, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of one row."""
    with ExitStack() as stack:
        starts = [run_engine(folder, *ENGINE, "--policy", "tenuto", "--speed", "20") for _ in range(2)]
        urls = [each.url for each in start_all(stack, starts)]
        url = stack.enter_context(run_router(folder, urls, "--policy", row.policy)).url
        if row.is_named:
            url = stack.enter_context(run_naming(folder, url)).url
        client = stack.enter_context(httpx.Client(base_url=url, timeout=120, verify=False))
        with ThreadPoolExecutor(args.jobs) as pool:
            ran = list(pool.map(lambda number: run_job(client, number, args.turns), range(args.jobs)))
        turns = [count_turns(url) for url in urls]
    returns, found = (sum(each) for each in zip(*ran, strict=True))
    return {
        "router": row.policy,
        "named": row.is_named,
        "returns": returns,
        "found": found,
        "fuller": max(turns) / sum(turns),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="that run side by side")
    parser.add_argument("--turns", type=int, default=5, help="of each job")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            runs = [run_row(row, args, Path(folder)) for _ in range(args.repeat)]
            found += runs
            shares = [f"{each['found'] / each['returns']:.0%}" for each in runs]
            fuller = [f"{each['fuller']:.0%}" for each in runs]
            if not args.json:
                name = f"{row.policy}, named" if row.is_named else row.policy
                print(f"| {name} | {', '.join(shares)} | {', '.join(fuller)} |", flush=True)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
