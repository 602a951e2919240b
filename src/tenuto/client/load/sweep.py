"""`tenuto bench` at several loads, one run after the other: a folder of runs that other commands read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenuto.client.load.options import BenchOptions
from tenuto.client.load.run import get_status, measure, say
from tenuto.client.servers.engines import empty_cache
from tenuto.core.errors import ConfigError
from tenuto.records.files import RESULT, RunFiles, read_first
from tenuto.records.schema import get_config
from tenuto.records.text import format_time_s, is_overloaded, write_csv
from tenuto.workload.load import make_workload

RESULTS = "results.jsonl"
Result = dict[str, Any]
"""A run's record in JSON types."""


def run_sweep(runs: Sequence[BenchOptions]) -> int:
    """Run the loads that DIR does not have yet, print a table, write the files; return the exit status.

    `runs`: equal in everything but the load. Raises ConfigError for a folder with other runs in it, and what
    `run_bench` raises.
    """
    for options in runs:
        make_workload(options.load)  # what is wrong with a load is said before the first run
    results: list[Result] = []
    is_written = True
    for number, options in enumerate(runs, 1):
        name = f"{options.load.jps:g} jobs/s"
        folder = options.out / f"jps-{options.load.jps:g}" if options.out else None
        if found := _try_read(folder, options):
            say(f"{number} of {len(runs)}: {name} is there already")
            results.append(found)
            continue
        say(f"{number} of {len(runs)}: {name}")
        is_emptied = empty_cache(options.urls, options.api_key, options.engine_urls)
        run_id = f"{options.run_id}-{options.load.jps:g}" if options.run_id else None
        with RunFiles(folder, replaces=True) as files:
            result = asyncio.run(measure(replace(options, run_id=run_id), make_workload(options.load), files))
            result["client"]["cache_emptied"] = is_emptied
            files.write_result(result)
        if files.problem:
            say(f"not all was written: {files.problem}")
            is_written = False
        results.append(result)
        if options.out:
            _write_results(options.out / RESULTS, results)
        if result["client"]["interrupted"]:
            break
    _print(results, runs[0])
    if results[-1]["client"]["interrupted"]:
        return 130
    statuses = [get_status(result, is_written=is_written) for result in results]
    return 1 if 1 in statuses else max(statuses)


def _try_read(folder: Path | None, options: BenchOptions) -> Result | None:
    """A run that is there and whole. Raises ConfigError if it is of another load."""
    if folder is None or not (folder / RESULT).exists():
        return None
    values = read_first(folder / RESULT).values
    client = values.get("client")
    if not isinstance(client, dict) or client.get("interrupted"):
        return None
    now: Result = json.loads(json.dumps(get_config(options.load)))
    if values.get("config") != now or client.get("url") != ",".join(options.urls):
        raise ConfigError(
            f"--out: {folder} holds a run of another load or server; name another folder, or repeat the same "
            "command to go on"
        )
    return values


def _write_results(path: Path, results: Sequence[Result]) -> None:
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text("".join(json.dumps(each) + "\n" for each in results), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error.strerror or error}") from error


def _print(results: Sequence[Result], options: BenchOptions) -> None:
    if options.csv:
        write_csv(options.csv, results)
    if options.as_json:
        print(json.dumps(results))
        return
    print(format_sweep(results))
    if options.out:
        say(f"all of it: {options.out}; charts: tenuto report {options.out}")


COLUMNS = (
    ("mean", "job_s", "mean"), ("P95", "job_s", "p95"), ("TTFT P50", "ttft_s", "p50"),
    ("TTFT P95", "ttft_s", "p95"), ("TPOT P50", "tpot_s", "p50"), ("ITL P95", "itl_s", "p95"),
    ("E2E P95", "latency_s", "p95"),
)  # fmt: skip
"""Heading, field and statistic of the table's times."""


def format_sweep(results: Sequence[Result]) -> str:
    """A row for each load, and below it what a reader must know about it."""
    heads = ("jobs/s", "done/s", "jobs", *(head for head, *_ in COLUMNS), "tok/s", "hits")
    goodput = any(result["goodput"] for result in results)
    rows = [(*heads, *(("good/s",) if goodput else ()))]
    for result in results:
        makespan_s, reused = result["makespan_s"], result["reused_tokens"]
        rows.append(
            (
                f"{result['jps']:g}" + ("+" if is_overloaded(result) else ""),
                "–" if result["finished_jps"] is None else f"{result['finished_jps']:.3g}",
                f"{result['jobs']}/{result['jobs_planned']}",
                *(format_time_s((result[field] or {}).get(name)) for _, field, name in COLUMNS),
                "–" if not makespan_s else f"{(result['output_tokens'] or 0) / makespan_s:,.0f}",
                f"{reused / result['reusable_tokens']:.1%}" if reused and result["reusable_tokens"] else "–",
                *(() if not goodput else (_format_goodput(result["goodput"]),)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [
        "",
        "mean, P95: job time; tok/s: output tokens; hits: share of the reusable tokens; + overloaded",
    ]
    for result in results:
        lines += [f"INVALID at {result['jps']:g} jobs/s: {why}." for why in result["client"]["invalid"]]
        turns = result["turns"]
        if turns["ok"] != turns["planned"]:
            lines.append(f"{turns['planned'] - turns['ok']} turns got no answer at {result['jps']:g} jobs/s")
    return "\n".join(lines)


def _format_goodput(goodput: Result | None) -> str:
    return "–" if not goodput or goodput["turns_per_s"] is None else f"{goodput['turns_per_s']:.2f}"
