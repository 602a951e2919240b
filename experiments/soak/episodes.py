"""Runs episodes in several processes, writes down what each did, and sums it up."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from experiments.json_lines import append_lines, read_lines
from tenuto.sim.compare import run_each

SUMMED = (
    "turns", "finished", "aborted", "preempted", "resets", "changes", "steps", "leases", "leases_hit",
    "revoked_blocks", "overdue", "policy_faults", "seconds",
)  # fmt: skip


def run_all(parsed: argparse.Namespace) -> int:
    """Run the episodes that are not on file yet; 1 if any failed, now or before."""
    num_episodes = math.ceil(parsed.turns / parsed.turns_per_episode)
    wanted = range(num_episodes) if parsed.episode is None else [parsed.episode]
    key = {"seed": parsed.seed, "turns_per_episode": parsed.turns_per_episode}
    records = list(_read(parsed.out, key))
    done = {record["episode"] for record in records}
    todo = [episode for episode in wanted if episode not in done]
    started_s = time.monotonic()
    run = partial(run_one, parsed.seed, num_turns=parsed.turns_per_episode)
    for _, record in run_each(run, todo, parsed.workers):
        records.append(record)
        if parsed.out is not None:
            append_lines(parsed.out, record)
        _say(records, len(done), len(todo), started_s)
        if "failure" in record:
            _report(record)
    records = [record for record in records if record["episode"] in wanted]
    summary = summarise(records)
    print(json.dumps(summary) if parsed.json else format_summary(summary))
    return 1 if summary["failures"] else 0


def run_one(seed: int, episode: int, num_turns: int) -> dict[str, Any]:
    """One episode's record; a failure is in it, with where it happened."""
    from experiments.soak.scheduler import make_plan, run_episode

    plan = make_plan(seed, episode)
    record = {"turns_per_episode": num_turns, **asdict(plan)}
    try:
        return {**record, "result": asdict(run_episode(plan, num_turns))}
    except Exception as error:
        return {**record, "failure": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all episodes, per policy too, and those that failed."""
    good = [record for record in records if "result" in record]
    by_policy: Counter[str] = Counter()
    for record in good:
        by_policy[record["policy"]] += record["result"]["turns"]
    return {
        "episodes": len(records),
        **{name: round(sum(record["result"][name] for record in good)) for name in SUMMED},
        "largest_rss_mb": max((record["result"]["rss_mb"] for record in good), default=None),
        "turns_by_policy": by_policy,
        "turns_by_layers": {
            layers: sum(record["result"]["turns"] for record in good if record["layers"] == layers)
            for layers in sorted({record["layers"] for record in good})
        },
        "failures": [
            {name: record[name] for name in ("seed", "episode", "policy", "failure")}
            for record in records
            if "failure" in record
        ],
    }


def format_summary(summary: dict[str, Any]) -> str:
    """A summary as text."""
    lines = [f"{name:16} {summary[name]:,}" for name in ("episodes", *SUMMED)]
    lines += [f"  of {policy}: {turns:,} turns" for policy, turns in summary["turns_by_policy"].items()]
    lines.append(f"{'failures':16} {len(summary['failures'])}")
    return "\n".join(lines)


def _read(path: Path | None, key: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for record in [] if path is None else read_lines(path):
        if any(record[name] != value for name, value in key.items()):
            raise SystemExit(
                f"{path}: holds episodes of other settings; --seed and --turns-per-episode must match"
            )
        yield record


def _say(records: list[dict[str, Any]], num_before: int, num_todo: int, started_s: float) -> None:
    num_run = len(records) - num_before
    turns = sum(record.get("result", {}).get("turns", 0) for record in records[num_before:])
    elapsed_s = time.monotonic() - started_s
    left_s = elapsed_s / num_run * (num_todo - num_run)
    failures = sum("failure" in record for record in records)
    text = f"{num_run}/{num_todo} episodes, {turns:,} turns, {turns / elapsed_s:.0f} turns/s"
    print(f"{text}, {left_s / 60:.0f} min left, {failures} failures", file=sys.stderr, flush=True)


def _report(record: dict[str, Any]) -> None:
    again = f"--seed {record['seed']} --episode {record['episode']}"
    length = f"--turns-per-episode {record['turns_per_episode']}"
    print(f"FAILED: python -m experiments.soak scheduler {again} {length}", file=sys.stderr)
    print(record["traceback"], file=sys.stderr, flush=True)
