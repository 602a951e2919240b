"""Records of runs, made up by hand: small numbers that can be checked in the head."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def make_record(policy: str, jps: float | None = 1.0, seed: int | None = 1, **changes: Any) -> dict[str, Any]:
    """A simulated run of four jobs; `mean_s` sets the times, all else is replaced by name."""
    mean_s = changes.pop("mean_s", 10.0)
    record = {
        "kind": "run",
        "schema": 2,
        "policy": policy,
        "gpu": "H200",
        "model": "llama",
        "workload": "ab8",
        "jps": jps,
        "seed": seed,
        "jobs": 4,
        "jobs_planned": 4,
        "turns": {"planned": 8, "ok": 8},
        "job_s": {
            "mean": mean_s,
            "p50": mean_s,
            "p90": mean_s * 1.38,
            "p95": mean_s * 1.44,
            "p99": mean_s * 1.49,
            "max": mean_s * 1.5,
        },
        "by_turn": {
            "1": {"turns": 4, "latency_s": mean_s * 0.1, "prompt_tokens": 100},
            "2": {"turns": 4, "latency_s": mean_s * 0.05, "prompt_tokens": 200},
        },
        "ttft_s": {"mean": 0.2, "p50": 0.1, "p90": 0.3, "p95": 0.4, "p99": 0.5, "max": 0.6},
        "prompt_tokens": 1200,
        "hit_tokens": 400,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "loaded_tokens": 0,
        "stored_tokens": 0,
        "makespan_s": 2 * mean_s,
        "job_times_s": {
            f"job-{number}": mean_s * share for number, share in enumerate((0.5, 0.9, 1.1, 1.5), start=1)
        },
        "simulated": True,
        "versions": {"tenuto": "0.1.0"},
        "wall_s": 0.1,
    }
    return {**record, **changes}


def make_turn(job: str, turn: int, at_s: float, **changes: Any) -> dict[str, Any]:
    """A turn with 1 s of queue, 1 s of prefill and 2 s of decode; the next is due 3 s later, after a tool."""
    return {
        "kind": "turn",
        "schema": 2,
        "job": job,
        "turn": turn,
        "status": "ok",
        "due_s": at_s,
        "sent_s": at_s,
        "start_s": at_s + 1,
        "first_token_s": at_s + 2,
        "last_token_s": at_s + 4,
        "prompt_tokens": 100 * turn,
        "output_tokens": 20,
        "hit_tokens": 0 if turn == 1 else 100 * (turn - 1),
        "tool": "shell",
        "tool_s": 3.0,
        **changes,
    }


def make_job(job: str, at_s: float, num_turns: int = 3) -> list[dict[str, Any]]:
    """Turns 7 s apart; the last calls no tool."""
    turns = [make_turn(job, number + 1, at_s + 7 * number) for number in range(num_turns)]
    turns[-1]["tool"] = None
    return turns


def make_sample(now_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "sample",
        "schema": 2,
        "now_s": now_s,
        "num_blocks": 100,
        "running_blocks": 40,
        "leased_blocks": 30,
        "cached_blocks": 20,
        "free_blocks": 10,
        "host_blocks": None,
        "disk_blocks": None,
        "running_turns": 1,
        "waiting_turns": 0,
        "leases": 1,
        **changes,
    }


def write_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")
    return path


def write_sweep(folder: Path) -> Path:
    """Three policies, two GPUs, three loads, two seeds; beside them one run with turns and occupancy.

    On the H200 two policies tie.
    """
    records = [
        make_record(policy, jps, seed, gpu=gpu, mean_s=10 * jps * factor + seed)
        for gpu, factors in (("H100", (1.0, 0.5, 0.3)), ("H200", (1.0, 0.5, 0.499)))
        for policy, factor in zip(("stock", "keep", "keep-more"), factors, strict=True)
        for jps in (1.0, 2.0, 4.0)
        for seed in (1, 2)
    ]
    write_lines(folder / "results.jsonl", records)
    write_run(folder / "one")
    return folder


def write_run(folder: Path, num_jobs: int = 30) -> Path:
    """One run's folder as `tenuto simulate --out` writes it, with tiers below the GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    record = make_record("keep", 4.0, 3, mean_s=21)
    (folder / "result.json").write_text(json.dumps(record), encoding="utf-8")
    write_lines(
        folder / "turns.jsonl", [turn for job in range(num_jobs) for turn in make_job(f"job-{job}", job * 2)]
    )
    write_lines(
        folder / "occupancy.jsonl",
        [make_sample(now_s, host_blocks=now_s, disk_blocks=2 * now_s) for now_s in range(50)],
    )
    return folder
