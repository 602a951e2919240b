"""The files of one simulated run, as `tenuto bench` writes them and `report` and `analyze` read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.run import Outcome

SAMPLES_EVERY = 1 / 500
"""Occupancy samples are at least this share of the time so far apart, so that their number stays small."""


class Occupancy:
    """Samples of the KV cache over time, in blocks; a `watch` of `tenuto.sim.run.run`."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self._next_s = 0.0

    def __call__(self, now_s: float, scheduler: Scheduler) -> None:
        """Take a sample if it is time for one."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + max(0.05, now_s * SAMPLES_EVERY)
        pool, leases = scheduler.kv.pool, scheduler.driver.leases
        num_blanks, cached = pool.get_queue()
        tiers = (
            {}
            if scheduler.offloader is None
            else {tier.name: tier.num_used_blocks for tier in scheduler.offloader.get_views(now_s)}
        )
        self.samples.append(
            {
                "now_s": now_s,
                "num_blocks": pool.num_blocks,
                "running": pool.num_blocks - pool.num_free_blocks - pool.num_leased_blocks,
                "retained": pool.num_leased_blocks,
                "cached": sum(extent.end - extent.first for extent in cached),
                "free": num_blanks,
                "host": tiers.get("host"),
                "disk": tiers.get("disk"),
                "num_running": len(scheduler.state.running),
                "num_waiting": len(scheduler.state.waiting) + scheduler.state.num_loading,
                "num_leases": len(leases),
            }
        )


def write_run(folder: Path, outcome: Outcome, occupancy: Occupancy) -> None:
    """Write result.json, turns.jsonl and occupancy.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(outcome.record, indent=1) + "\n", encoding="utf-8")
    _write_lines(folder / "turns.jsonl", _make_turns(outcome))
    _write_lines(folder / "occupancy.jsonl", occupancy.samples)


def _make_turns(outcome: Outcome) -> list[dict[str, Any]]:
    jobs = {job.job_id: job for job in outcome.workload.jobs}
    lines = []
    for turn in outcome.turns:
        spec = jobs[turn.job_id].turns[turn.turn]
        lines.append(
            {
                "job": turn.job_id,
                "turn": turn.turn + 1,
                "status": "ok",
                "intended_s": turn.arrival_s,
                "sent_s": turn.arrival_s,
                "start_s": turn.start_s,
                "first_token_s": turn.first_token_s,
                "last_token_s": turn.finish_s,
                "prompt_tokens": turn.num_prompt_tokens,
                "output_tokens": turn.num_output_tokens,
                "cached_tokens": turn.num_hit_tokens,
                "recomputed_tokens": turn.num_recomputed_tokens,
                "preemptions": turn.num_preemptions,
                "tool": spec.tool,
                "tool_s": spec.tool_s,
                "ttft_s": turn.first_token_s - turn.arrival_s,
                "latency_s": turn.finish_s - turn.arrival_s,
            }
        )
    return lines


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
