"""Leases on models whose layers differ: windows of several sizes, states, blocks of several sizes.

On vLLM's own scheduler, with cache configurations as vLLM builds them, at the default retention interval and
at others.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from packaging.version import Version
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_coordinator

from tenuto.core.types import LeaseEnd
from tenuto.vllm.compat.groups import find_hit
from tests.support.checks import check_books, check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.layouts import LAYOUTS, Chaos, attention, make_text, send, start
from tests.vllm.workerless import Engine


def check(engine: Engine, *, idle: bool = False) -> None:
    """The books agree, and each lease holds one hit: all its blocks, and no other."""
    scheduler = engine.scheduler
    driver = scheduler.driver
    check_integrity(scheduler.kv_cache_manager.block_pool, driver.leases, pins=driver.pins, idle=idle)
    check_books(scheduler)
    for lease in scheduler.driver.leases:
        groups, num_tokens = find_hit(scheduler, lease.blocks.hashes, lease.blocks.num_tokens)
        assert num_tokens == lease.blocks.num_tokens > 0
        found = [block.block_id for group in groups for block in group]
        assert found == [block.block_id for block in lease.blocks]


def run_jobs(engine: Engine, clock: Clock, rng: random.Random, *, num_rounds: int = 4) -> Any:
    """Eight jobs come back turn after turn, among strangers that fill the cache; returns the statistics."""
    talks = [make_text(rng, 100, 300) for _ in range(8)]
    for number in range(num_rounds):
        for job in rng.sample(range(8), 8):
            name = f"j{job}-{number}"
            send(
                engine,
                name,
                talks[job],
                max_tokens=rng.randrange(5, 60),
                xargs={"job_id": f"{job}", "tool": "x"},
            )
            send(engine, f"stranger-{name}", make_text(rng, 50, 400), xargs={"is_last_step": 1})
            engine.run()
            clock.now_s += 1
            talks[job] += engine.outputs[name] + make_text(rng, 20, 80)
        check(engine, idle=True)
    return engine.scheduler.driver.stats


@pytest.mark.parametrize(
    ("name", "interval"),
    [
        *((name, 0) for name in LAYOUTS),
        ("1:5", None),
        ("states", None),
        ("two windows", 128),
        ("states", 128),
    ],
)
def test_jobs_hit_what_is_reusable(name: str, interval: int | None, clock: Clock) -> None:
    """Answers too, though by default vLLM caches a window's end only where the prompt ends."""
    engine = start(name, interval=interval, depth=1 + (interval == 0))
    stats = run_jobs(engine, clock, random.Random(1))
    assert stats.num_leases_ended[LeaseEnd.HIT] == 24
    # Hits that end inside a block need a state there, and answers have none but at the blocks' ends.
    least = 0.92 if name == "states in large blocks" else 0.95
    assert stats.num_hit_tokens >= least * stats.num_reusable_tokens > 0


@pytest.mark.parametrize("name", ["1:5", "window blocks twice as large"])
def test_with_drafts_too(name: str, clock: Clock) -> None:
    stats = run_jobs(start(name, num_drafts=2), clock, random.Random(2))
    assert stats.num_hit_tokens >= 0.95 * stats.num_reusable_tokens > 0


@pytest.mark.skipif(
    Version(vllm.__version__).release < (0, 32),
    reason="a look-up for as many tokens as a lease has cannot match the block that it drops",
)
@pytest.mark.parametrize("interval", [0, None])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "states" not in name or name == "states"])
def test_with_a_draft_model_too(name: str, interval: int | None, clock: Clock) -> None:
    """Its look-ups match one block and drop it: that block is held, and hits end that much earlier."""
    engine = start(name, interval=interval, depth=1 + (interval == 0), num_drafts=2, has_draft_model=True)
    stats = run_jobs(engine, clock, random.Random(2))
    num_dropped = stats.num_leases_ended[LeaseEnd.HIT] * engine.scheduler.block_size
    assert stats.num_hit_tokens >= 0.95 * (stats.num_reusable_tokens - num_dropped) > 0


@pytest.mark.skipif(
    not hasattr(kv_cache_coordinator, "partial_hash_hits_enabled"),
    reason="in vLLM 0.30, hits inside blocks end elsewhere if there is a draft model",
)
@pytest.mark.parametrize("num_prompt_tokens", [300, 320, 336, 352, 380, 400])
def test_with_a_draft_model_hits_that_end_inside_blocks_outlive_a_flood(
    num_prompt_tokens: int, clock: Clock
) -> None:
    """A look-up drops a part of a block, which is in the hit's last block or in the block after it."""
    options: dict[str, Any] = {"num_drafts": 2, "has_draft_model": True, "match_unit": 16}
    engine = start("states, all blocks large", num_blocks=60, **options)
    rng = random.Random(0)
    prompt = make_text(rng, num_prompt_tokens, num_prompt_tokens + 1)
    send(engine, "a1", prompt, xargs={"job_id": "a", "tool": "x"})
    engine.run()
    check(engine, idle=True)
    for number in range(6):
        send(engine, f"stranger{number}", make_text(rng, 900, 901), xargs={"is_last_step": 1})
        engine.run()
    (lease,) = engine.scheduler.driver.leases
    send(engine, "a2", prompt + engine.outputs["a1"], xargs={"job_id": "a", "is_last_step": 1})
    engine.run()
    assert engine.scheduler.driver.stats.num_hit_tokens == lease.blocks.num_tokens > 256


def test_a_lease_yields_in_steps_and_what_is_left_is_hit(clock: Clock) -> None:
    """With a dense cache each block is a possible end: all groups give up their tails together."""
    engine = start("1:5", interval=None, num_blocks=150)
    prompt = list(range(100, 740))
    send(engine, "a1", prompt, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    engine.run()
    (lease,) = engine.scheduler.driver.leases
    # 640 tokens are 40 blocks, and each window needs the last 63 tokens: 4 blocks.
    assert len(lease.blocks) == 40 + 5 * 4
    send(engine, "big", make_text(random.Random(0), 400, 401), max_tokens=60, xargs={"is_last_step": 1})
    engine.run()
    check(engine, idle=True)
    num_left = lease.blocks.num_tokens
    assert 300 < num_left < 640 and len(lease.blocks) == num_left // 16 + 5 * 4
    send(engine, "a2", prompt + engine.outputs["a1"], max_tokens=2, xargs={"job_id": "a", "is_last_step": 1})
    engine.run()
    assert engine.scheduler.driver.stats.num_hit_tokens == num_left


def test_leases_yield_to_a_prompt_that_needs_many_small_blocks(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the first layer group are 16 times as large as the others, and no request waits."""
    monkeypatch.setitem(LAYOUTS, "large full blocks", [attention(), attention(2048, heads=16)])
    tokens: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 1024}
    engine = start("large full blocks", num_blocks=400, scheduler_reserve_full_isl=False, **tokens)
    rng = random.Random(0)
    for job in range(4):
        send(engine, f"{job}", make_text(rng, 1000, 1001), max_tokens=2, xargs={"job_id": f"{job}"})
        engine.run()
    for name in ("first", "second"):
        send(engine, name, make_text(rng, 1900, 1901), xargs={"is_last_step": 1})
    engine.step()
    engine.step()
    assert len(engine.scheduler.running) == 2
    # The second prompt's next 1,024 tokens are 4 blocks of 256 and 64 of 16.
    assert 35 < engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < 68
    engine.step()
    assert not any(each.num_preemptions for each in engine.scheduler.requests.values())
    check(engine)


def test_a_request_that_freed_blocks_in_its_middle_leaves_what_can_be_hit(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With reference sliding windows, an answer frees its blocks between the prompt and the window."""
    spec = getattr(kv_cache_interface, "RSWASpec", None)
    if spec is None:
        pytest.skip("this vLLM has no reference sliding windows")
    common = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    monkeypatch.setitem(LAYOUTS, "reference window", [spec(block_size=16, rswa_window=128, **common)])
    engine = start("reference window", num_blocks=100)
    prompt = list(range(100, 300))
    send(engine, "a1", prompt, max_tokens=600, ignore_eos=True, xargs={"job_id": "a", "tool": "x"})
    engine.run()
    (lease,) = engine.scheduler.driver.leases
    assert not any(block.is_null for block in lease.blocks)
    check(engine, idle=True)
    send(engine, "stranger", make_text(random.Random(0), 1500, 1501), xargs={"is_last_step": 1})
    engine.run()
    num_held = len(lease.blocks)
    send(engine, "a2", prompt + engine.outputs["a1"], xargs={"job_id": "a", "is_last_step": 1})
    engine.run()
    assert engine.scheduler.driver.stats.num_hit_tokens == 16 * num_held > 0


def test_an_edited_prompt_keeps_what_it_can_hit(clock: Clock) -> None:
    """A template that drops the answer's reasoning leaves the prompt; its end is cached by vLLM itself."""
    engine = start("1:1")
    prompt = list(range(100, 300))
    send(engine, "a1", prompt, max_tokens=60, xargs={"job_id": "a", "tool": "x"})
    engine.run()
    (lease,) = engine.scheduler.driver.leases
    assert lease.blocks.num_tokens == 256
    send(engine, "wait", [3] * 100, max_tokens=8, xargs={"is_last_step": 1})
    send(engine, "a2", prompt + [7] * 60, max_tokens=8, xargs={"job_id": "a", "tool": "x"})
    assert lease.blocks.num_tokens == 192
    check(engine)
    engine.run()
    assert engine.scheduler.driver.stats.num_hit_tokens == 192


def test_a_small_cache_keeps_no_more_behind_its_windows_than_stock(clock: Clock) -> None:
    """Else a request that just fits in stock would never start."""
    for num_blocks, spare in ((600, 16), (520, 0)):
        windows = start(
            "1:1", num_blocks=num_blocks
        ).scheduler.kv_cache_manager.coordinator.single_type_managers
        assert windows[1].extra_retained_tokens == spare
    stock = start("1:1", policy={"policy": "stock"}).scheduler
    assert stock.kv_cache_manager.coordinator.single_type_managers[1].extra_retained_tokens == 0


@pytest.mark.parametrize(
    ("name", "depth", "interval"),
    # `experiments/soak/leases.py` runs all combinations for longer.
    [(name, 1 + n % 2, (0, 0, None, 128)[n % 4]) for n, name in enumerate(LAYOUTS)],
)
def test_chaos_leaves_nothing_behind(name: str, depth: int, interval: int | None, clock: Clock) -> None:
    engine = start(name, interval=interval, depth=depth, num_blocks=60 * len(LAYOUTS[name]))
    chaos = Chaos(engine, random.Random(depth))
    for number in range(400):
        clock.now_s += 0.1
        chaos.act()
        if number % 10 == 0:
            check(engine)
    engine.run()
    check(engine, idle=True)
    assert engine.scheduler.driver.stats.num_leases_granted > 10
    clock.now_s += 10_000
    engine.step()
    check(engine, idle=True)
    engine.scheduler.driver.pins.drop_all()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize(
    ("name", "group"), [("1:5", "window 64"), ("two windows", "window 40"), ("states", "state")]
)
def test_the_group_that_shortened_a_hit_is_named(name: str, group: str, clock: Clock) -> None:
    """By default the second prompt with a prefix hits nothing: full attention has it, the others have not."""
    engine = start(name, policy={"policy": "stock"})
    shared = list(range(100, 300))
    for number in range(3):
        send(engine, f"r{number}", [*shared, *[number + 5] * 40], max_tokens=3)
        engine.run()
    stats = engine.scheduler.driver.stats
    assert stats.num_short_tokens == {group: 192}
    assert stats.num_hit_tokens == 192


def test_a_look_up_for_a_turns_key_does_not_count_as_its_hit(clock: Clock) -> None:
    """It is short for both turns that wait. Then the first one computes what the second one hits at once."""
    engine = start("1:5", policy={"policy": "tests.vllm.policies:CachedFirst"}, max_num_batched_tokens=512)
    shared = list(range(100, 300))
    for number in range(3):
        send(engine, f"r{number}", [*shared, *[number + 5] * 40], max_tokens=3)
        if number == 0:
            engine.run()
    engine.run()
    stats = engine.scheduler.driver.stats
    assert stats.num_short_tokens == {"window 64": 192}
    assert stats.num_hit_tokens == 192
