"""Agent jobs through vllm-router to two simulated servers: routing, both admissions, an engine that dies.

    python -m experiments.routers [--rows routing,admission,death] [--repeat 3] [--json]
    python -m experiments.routers --live .demo/smollm2

Each row starts two simulated servers and one `vllm-router` (`pip install 'tenuto[router]'`), runs the jobs
through the router with `tenuto bench`, and ends them. Rows of one repeat have the same jobs. The servers run
20 times faster than real time, while tool calls take their real time, so job times are mostly tool time: look
at the context kept. Where an engine dies, servers run twice as fast as real time, so that answers are cut.

routing: which router policy keeps a job on its engine, with and without an id in X-Session-ID.
admission: the router's program scheduling off, binding only, and on, before engines with and without Tenuto.
death: one of the two engines is killed while it answers. Clients repeat a request that failed.
--live FOLDER: two real vLLM servers with Tenuto instead; of this model, with small jobs, one run a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.command_line import make_parser
from experiments.results.tables import format_markdown
from experiments.routers.processes import (
    ENGINE,
    WATCH,
    count_turns,
    kill,
    run_engine,
    run_router,
    run_vllm,
    start_all,
)
from tenuto.client.ab import measure_run
from tenuto.client.options import BenchOptions
from tenuto.records.files import RunFiles
from tenuto.workload.load import LoadOptions

IDS_FROM_HEADERS = {"program_scheduling_enable_key": "auto"}
"""Makes vllm-router read programs from headers too; otherwise only from `vllm_xargs.agentic_context`."""


@dataclass(frozen=True)
class Row:
    """One arrangement of router and engines."""

    part: str
    name: str
    router: tuple[str, ...]
    engine: str = "tenuto"
    hints: str = "job"
    kill_after_s: float | None = None
    speed: float = 20.0
    """Simulated seconds per second. Slow where an engine shall die in the middle of answers."""


def schedule(**settings: Any) -> tuple[str, ...]:
    """The router's options for program scheduling."""
    config = json.dumps({**IDS_FROM_HEADERS, **settings})
    return ("--enable-program-scheduling", "--program-scheduling-config-json", config)


POLICIES = ("consistent_hash", "sticky_least_loaded", "cache_aware", "round_robin")
ADMISSIONS = {"off": (), "binding only": schedule(binding_only=True), "on": schedule()}
HASH = ("--policy", "consistent_hash")
ROWS = (
    *(
        Row(
            "routing", f"{policy}, {'ids' if hints == 'job' else 'no ids'}", ("--policy", policy), hints=hints
        )
        for policy in POLICIES
        for hints in ("job", "none")
    ),
    *(
        Row("admission", f"engines {engine}, router's scheduling {name}", (*HASH, *options), engine)
        for engine in ("tenuto", "stock")
        for name, options in ADMISSIONS.items()
    ),
    *(
        Row("death", policy, ("--policy", policy, *WATCH), kill_after_s=3.0, speed=2.0)
        for policy in POLICIES[:3]
    ),
)


LIVE_ROWS = (
    Row("live", "consistent_hash, ids", HASH),
    Row("live", "cache_aware, no ids", ("--policy", "cache_aware"), hints="none"),
    Row("live", "consistent_hash, an engine dies", (*HASH, *WATCH), kill_after_s=6.0),
)
LIVE_LOAD = LoadOptions(jps=0.8, max_jobs=8, scale_lengths=0.08, scale_turns=0.5)
"""Small enough for two servers on a CPU with two cores."""


def run_row(row: Row, args: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """Run the jobs of one seed; the figures of the row."""
    sizes = {"jps": args.jps, "max_jobs": args.jobs, "scale_lengths": args.lengths}
    load = replace(LIVE_LOAD if args.live else LoadOptions(**sizes), seed=seed, hints=row.hints)
    with ExitStack() as stack:
        if args.live:
            starts = [run_vllm(folder, args.live, "--policy", row.engine) for _ in range(2)]
        else:
            engine = (*ENGINE, "--policy", row.engine, "--speed", str(row.speed))
            starts = [run_engine(folder, *engine) for _ in range(2)]
        engines = start_all(stack, starts)
        urls = [each.url for each in engines]
        router = stack.enter_context(run_router(folder, urls, *row.router))
        if row.kill_after_s is not None:
            timer = threading.Timer(row.kill_after_s, kill, (engines[1],))
            stack.callback(timer.cancel)
            timer.start()
        options = BenchOptions(urls=(router.url,), load=load, retries=5)
        with RunFiles(None) as files:
            result = measure_run(options, files)
        turns = [] if row.kill_after_s is not None else [count_turns(url) for url in urls]
    return {
        "turns": result["turns"]["planned"],
        "answered": result["turns"]["ok"],
        "repeated": result["turns"]["ok_after_retries"],
        "job_s": result["job_s"]["mean"],
        "kept": result["reused_tokens"] / result["reusable_tokens"],
        "fuller_engine": max(turns) / sum(turns) if turns else None,
    }


def add_up(part: str, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the repeats, and the smallest and largest mean job time."""
    times = [each["job_s"] for each in runs]
    fuller = [each["fuller_engine"] for each in runs if each["fuller_engine"] is not None]
    return {
        "part": part,
        "row": name,
        **{key: sum(each[key] for each in runs) for key in ("turns", "answered", "repeated")},
        "job_s": statistics.mean(times),
        "job_s_range": [min(times), max(times)],
        "kept": statistics.mean(each["kept"] for each in runs),
        "fuller_engine": statistics.mean(fuller) if fuller else None,
    }


def show(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    heads = ("part", "row", "answered", "repeated", "mean job time", "context kept", "fuller engine")
    lines = []
    for each in rows:
        low, high = each["job_s_range"]
        fuller = "" if each["fuller_engine"] is None else f"{each['fuller_engine']:.0%}"
        cells = [
            *(each["part"], each["row"], f"{each['answered']} of {each['turns']}", str(each["repeated"])),
            *(f"{each['job_s']:.2f} s ({low:.2f} to {high:.2f})", f"{each['kept']:.1%}", fuller),
        ]
        lines.append(cells)
    return format_markdown(heads, lines)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", default="routing,admission,death", help="parts, separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each row, each with its own seed")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--jps", type=float, default=8.0, help="jobs per second of real time")
    parser.add_argument("--lengths", type=float, default=0.8, help="multiplies the length of every text")
    parser.add_argument("--live", metavar="FOLDER", help="a model for two real vLLM servers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    parts = args.rows.split(",")
    if unknown := set(parts) - {row.part for row in ROWS}:
        parser.error(f"--rows: there is no part {min(unknown)!r}")
    rows = LIVE_ROWS if args.live else [row for row in ROWS if row.part in parts]
    repeats = 1 if args.live else args.repeat
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            print(f"[routers] {row.part}: {row.name}", file=sys.stderr, flush=True)
            runs = [run_row(row, args, seed, Path(folder)) for seed in range(repeats)]
            found.append(add_up(row.part, row.name, runs))
    print(json.dumps(found) if args.json else show(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
