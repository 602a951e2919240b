"""Prefixes that jobs share, on models whose layers differ: checkpoints of first prompts, and pins."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.conftest import Clock
from tests.vllm.layouts import LAYOUTS, make_text, send, start
from tests.vllm.test_hybrid_leases import check
from tests.vllm.workerless import Engine

SHARED = [n % 800 + 100 for n in range(700)]
NOTHING_PINNED = {"max_pinned_share": 0.0}


def start_with(name: str, limits: dict[str, Any], **more: Any) -> Engine:
    policy = {"policy": "tests.vllm.policies:KeepAll", "options": {"ttl_s": 1000.0}, "limits": limits}
    return start(name, policy=policy, **more)


_numbers = itertools.count()


def run_job(engine: Engine, prompt: list[int], seed: int) -> int:
    """A job of one turn, without a lease; returns how much of its prompt it hit."""
    stats = engine.scheduler.driver.stats
    before = stats.num_hit_tokens
    prompt = [*prompt, *make_text(random.Random(seed), 40, 60)]
    send(engine, f"r{next(_numbers)}", prompt, max_tokens=3, xargs={"is_last_step": 1})
    engine.run()
    return stats.num_hit_tokens - before


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "windows only"])
def test_the_second_job_on_a_prefix_hits_most_of_it(name: str, clock: Clock) -> None:
    """In stock it hits nothing, and the third one all of it."""
    engine = start(name, num_blocks=900)
    assert [run_job(engine, SHARED, n) for n in range(1)] == [0]
    second, third = run_job(engine, SHARED, 2), run_job(engine, SHARED, 3)
    alignment = engine.scheduler.block_size
    assert second >= 480 and third >= 704 - alignment, (second, third)
    stock = start(name, num_blocks=900, policy={"policy": "stock"})
    assert [run_job(stock, SHARED, n) for n in range(2)] == [0, 0]
    check(engine, idle=True)


@pytest.mark.parametrize("name", ["1:5", "window blocks twice as large", "states"])
def test_a_pinned_prefix_outlives_a_flood(name: str, clock: Clock) -> None:
    """Strangers fill the cache several times over; without the pin nothing is left."""
    hits = []
    for limits in ({}, NOTHING_PINNED):
        engine = start_with(name, limits, num_blocks=90 * len(LAYOUTS[name]))
        for seed in range(3):
            run_job(engine, SHARED, seed)
        for seed in range(12):
            run_job(engine, make_text(random.Random(100 + seed), 400, 500), seed)
        check(engine, idle=True)
        hits.append(run_job(engine, SHARED, 50))
    assert hits[0] >= 672 and hits[1] == 0


def test_pins_that_exceed_the_cache_stall_nothing(clock: Clock) -> None:
    """The oldest go before an admission gate refuses anything, and before a lease loses a block."""
    engine = start_with("1:5", {"max_pinned_share": 1.0}, num_blocks=300)
    driver = engine.scheduler.driver
    prefixes = [make_text(random.Random(n), 350, 351) for n in range(12)]
    for prefix, seed in itertools.product(prefixes, range(3)):
        run_job(engine, prefix, seed)
        check(engine, idle=True)
    assert driver.stats.num_prefixes_demoted > 0 and len(driver.pins) > 2
    send(engine, "job", list(range(100, 400)), xargs={"job_id": "job", "tool": "x"})
    engine.run()
    (lease,) = [each for each in driver.leases if each.job_id == "job"]
    num_blocks = len(lease.blocks)
    # As much as fits beside that lease.
    send(engine, "long", make_text(random.Random(99), 2700, 2701), xargs={"is_last_step": 1})
    engine.run()
    assert not len(driver.pins) and len(lease.blocks) == num_blocks
    check(engine, idle=True)


def test_a_request_as_large_as_the_cache_runs(clock: Clock) -> None:
    engine = start_with("1:1", {"max_pinned_share": 1.0}, num_blocks=130)
    for seed in range(3):
        run_job(engine, SHARED, seed)
    assert len(engine.scheduler.driver.pins) == 1
    run_job(engine, make_text(random.Random(1), 1700, 1701), 9)
    check(engine, idle=True)


def test_a_reset_drops_pins_and_so_does_a_live_change(clock: Clock) -> None:
    engine = start("1:5")
    for seed in range(3):
        run_job(engine, SHARED, seed)
    assert len(engine.scheduler.driver.pins) == 1
    assert engine.scheduler.reset_prefix_cache()
    assert not len(engine.scheduler.driver.pins)
    for seed in range(3):
        run_job(engine, SHARED, seed)
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    assert "cache_blocks" in vars(manager)
    scheduler.switch(scheduler.prepare(type(scheduler.settings)(mode="off"), scheduler.configured_policy))
    assert not len(scheduler.driver.pins) and "cache_blocks" not in vars(manager)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("interval", [None, 128])
def test_an_interval_of_the_operators_own_is_left_alone(interval: int | None, clock: Clock) -> None:
    engine = start("1:5", interval=interval)
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    assert "cache_blocks" not in vars(manager)
    assert run_job(engine, SHARED, 1) == 0
    assert run_job(engine, SHARED, 2) >= 640
    assert len(engine.scheduler.driver.pins) == 1


def test_the_start_says_how_many_fit(clock: Clock) -> None:
    text = start("1:5", num_blocks=4000).scheduler._hooks.describe_pins()
    assert text is not None
    assert "in up to 1,999 blocks of the KV cache: 9 of 3,000 tokens or 1 of 30,000 tokens" in text
    assert text.endswith("caches checkpoints, 320 tokens apart or more")
    assert start_with("1:5", NOTHING_PINNED).scheduler._hooks.describe_pins() is None
    assert start("1:5", policy={"policy": "stock"}).scheduler._hooks.describe_pins() is None
