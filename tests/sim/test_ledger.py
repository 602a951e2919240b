"""The ledger's sums are the engine's own counters, with and without tiers."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.core.ledger import FIGURES, add_figures
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import ChunkSteps, Step
from tenuto.sim.run import prepare
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

SETUPS: list[dict[str, Any]] = [
    {"policy": "tenuto", "limits": "plugin"},
    {"policy": "stock", "offload": "async", "host_gb": 20, "disk_gb": 40},
    {"policy": "stock", "offload": "async", "host_gb": 20, "offload_chunk_tokens": 16},
    {"policy": "stock", "offload": "native", "host_gb": 20},
    {"policy": "stock", "offload": "sync", "host_gb": 20},
]


@pytest.mark.parametrize("fields", SETUPS, ids=lambda each: f"{each['policy']}-{each.get('offload')}")
def test_the_sums_are_the_engine_s_counters(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(gpu="H100", step_cost="roofline", kv_tokens=40_000, **fields)
    prepared = prepare(setup, LoadOptions(workload="swe-bench", jps=1, window_s=10))
    (scheduler,) = prepared.simulation.schedulers
    num_scheduled, num_loaded = count_tokens(scheduler, monkeypatch)
    turns = prepared.simulation.run()
    ledger, stats, now_s = scheduler.driver.ledger, scheduler.driver.stats, scheduler.state.now_s
    total = ledger.total.get_figures(now_s)
    assert total["turns"] == len(turns) > 50
    assert total["prompt_tokens"] == sum(turn.prompt_tokens or 0 for turn in turns)
    assert total["output_tokens"] == sum(turn.output_tokens or 0 for turn in turns)
    assert total["cached_tokens"] == stats.num_hit_tokens - sum(num_loaded)
    assert total["recomputed_tokens"] == stats.num_recomputed_tokens
    assert total["computed_tokens"] == sum(num_scheduled)
    if scheduler.offloader is not None:
        assert total["loaded_tokens"] == scheduler.offloader.num_loaded_tokens > 0
        assert total["stored_tokens"] == scheduler.offloader.num_stored_tokens > 0
    tenants = add_figures(each.get_figures(now_s) for each in ledger.tenants.values())
    assert tenants == pytest.approx(total)
    assert set(total) == set(FIGURES)
    # What the tiers hold at the end is what the accounts hold.
    if scheduler.offloader is not None and not scheduler.offloader.is_sync:
        for tier in scheduler.offloader.get_views(now_s):
            assert ledger.total.count_held(tier.name) == tier.num_used_blocks
            # `tenuto` gives up what the jobs stored once they end.
            assert tier.num_used_blocks > 0 or setup.policy == "tenuto"


def count_tokens(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The tokens of each step of the engine from now on, and those that each new turn had loaded."""
    found: list[int] = []
    loaded: list[int] = []
    schedule, run_quiet = scheduler.schedule, scheduler.run_quiet_steps
    schedule_chunk = scheduler.schedule_chunk

    def count(now_s: float) -> Any:
        step = schedule(now_s)
        found.append(sum(step.num_tokens.values()))
        loaded.extend(scheduler.state.requests[turn_id].num_loaded_tokens for turn_id in step.new)
        return step

    def count_quiet(num_steps: int, *args: Any, **kwargs: Any) -> Any:
        found.append(num_steps * len(scheduler.state.running))
        return run_quiet(num_steps, *args, **kwargs)

    def count_chunk(steps: ChunkSteps, now_s: float) -> Step | None:
        step = schedule_chunk(steps, now_s)
        if step is not None:
            found.append(sum(step.num_tokens.values()))
        return step

    monkeypatch.setattr(scheduler, "schedule", count)
    monkeypatch.setattr(scheduler, "schedule_chunk", count_chunk)
    monkeypatch.setattr(scheduler, "run_quiet_steps", count_quiet)
    return found, loaded


def test_block_seconds_of_leases_are_what_the_pool_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up by brute force after each step: the blocks of all leases, for as long as they stayed."""
    setup = Setup(gpu="H100", step_cost="roofline", kv_tokens=40_000, policy="tenuto", limits="plugin")
    area, last = [0.0], (0.0, 0)

    def look(now_s: float, scheduler: Scheduler) -> None:
        nonlocal last
        held = sum(len(lease.blocks) for lease in scheduler.driver.leases)
        area[0] += last[1] * (now_s - last[0])
        last = now_s, held
        ledger = scheduler.driver.ledger
        assert ledger.total.count_held("gpu") == held

    prepared = prepare(setup, LoadOptions(workload="swe-bench", jps=1, window_s=10), watch=look)
    prepared.simulation.run()
    (scheduler,) = prepared.simulation.schedulers
    total = scheduler.driver.ledger.total.get_figures(scheduler.state.now_s)
    assert total["gpu_block_seconds"] > 0
    # The watch looks after events at which leases change, so it misses little.
    assert total["gpu_block_seconds"] == pytest.approx(area[0], rel=0.05)
