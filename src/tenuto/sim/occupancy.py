"""Samples of a simulation's KV cache over time, and the files of one simulated run."""

from __future__ import annotations

from pathlib import Path

from tenuto.core.errors import ConfigError
from tenuto.records.schema import Sample
from tenuto.records.writer import RunFiles
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.run import Outcome

SAMPLES_EVERY = 1 / 500
"""Smallest gap between samples, as a share of the time since the start. It keeps their number small."""


class Occupancy:
    """Samples of the KV cache over time, in blocks. Can be the `watch` of `tenuto.sim.run.run`."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._next_s = 0.0

    def __call__(self, now_s: float, scheduler: Scheduler) -> None:
        """Take a sample if the next one is due."""
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
            Sample(
                now_s=now_s,
                num_blocks=pool.num_blocks,
                running_blocks=pool.num_blocks - pool.num_free_blocks - pool.num_leased_blocks,
                leased_blocks=pool.num_leased_blocks,
                cached_blocks=sum(extent.end - extent.first for extent in cached),
                free_blocks=num_blanks,
                host_blocks=tiers.get("host"),
                disk_blocks=tiers.get("disk"),
                running_turns=len(scheduler.state.running),
                waiting_turns=len(scheduler.state.waiting) + scheduler.state.num_loading,
                leases=len(leases),
            )
        )


def write_run(folder: Path, outcome: Outcome, occupancy: Occupancy) -> None:
    """Write result.json, turns.jsonl and occupancy.jsonl. Raises ConfigError if they cannot be written."""
    with RunFiles(folder, replaces=True) as files:
        for turn in outcome.turns:
            files.add_turn(turn)
        for sample in occupancy.samples:
            files.add_sample(sample)
        files.write_result(outcome.record)
    if files.problem is not None:
        raise ConfigError(f"--out: cannot write {folder / files.problem}")
