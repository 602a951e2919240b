"""The usage that vLLM reports: blocks that only leases hold are free memory.

The chaos tests compare it with a count of all blocks after each step (`check_integrity`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
from tenuto.core.exported_metrics import count_free_in_effect
from tenuto.core.types import LeaseRefusal
from tenuto.vllm.compat import scheduler as compat
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

NUM_BLOCKS = 100
SHARED = list(range(100, 164))
"""Four blocks that all prompts begin with."""


def start(depth: int = 1, **limits: Any) -> Engine:
    settings = {"policy": "tests.vllm.policies:KeepAll", "options": {"ttl_s": 100.0}, "limits": limits}
    config = make_config(is_async=depth > 1, tenuto=settings)
    return Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=NUM_BLOCKS + 1), depth=depth)


def send(
    engine: Engine, name: str, *, job: str | None = None, num_tokens: int = 40, max_tokens: int = 4
) -> None:
    prompt = [*SHARED, *([200 + len(name)] * num_tokens)]
    hints = {"job_id": job or name, "tool": "ls"}
    engine.scheduler.add_request(make_request(name, prompt, max_tokens=max_tokens, xargs=hints))


def get_reported(engine: Engine) -> tuple[float, float]:
    """Blocks in use by the gauge on /metrics, and by the load balancer of data-parallel ranks."""
    scheduler = engine.scheduler
    return (
        round(scheduler.make_stats().kv_cache_usage * NUM_BLOCKS, 6),
        round(scheduler.get_kv_cache_usage() * NUM_BLOCKS, 6),
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_with_leases_reports_no_usage(clock: Clock, depth: int) -> None:
    engine = start(depth)
    for name in ("a", "bb", "ccc"):
        send(engine, name)
        engine.run()
    driver = engine.scheduler.driver
    # 64 shared tokens, and 43 of each job's own that were computed: 4 + 3 × 2 full blocks.
    assert driver.get_num_leased_blocks() == driver.get_num_idle_leased_blocks() == 10
    assert get_reported(engine) == (0, 0)
    assert engine.scheduler.reset_prefix_cache()
    assert get_reported(engine) == (0, 0)


def test_blocks_that_a_request_shares_with_leases_are_in_use(clock: Clock) -> None:
    engine = start()
    send(engine, "a")
    send(engine, "bb")
    engine.run()
    send(engine, "ccc", max_tokens=30)
    engine.step()
    # 104 prompt tokens, four of the blocks under lease as well.
    assert get_reported(engine) == (7, 7)
    assert engine.scheduler.driver.get_num_idle_leased_blocks() == 4
    # The leases end: what the request uses stays in use.
    engine.scheduler.driver.drop_all(clock.now_s)
    assert get_reported(engine) == (7, 7)
    engine.abort("ccc")
    assert get_reported(engine) == (0, 0)


def test_pins_that_need_not_yield_are_in_use(clock: Clock) -> None:
    engine = start(always_yield=False)
    send(engine, "a")
    engine.run()
    assert get_reported(engine) == (6, 6)
    assert count_free_in_effect(engine.scheduler.driver) == 0


def test_what_is_noted_while_nobody_counts_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without yielding leases nobody asks how many blocks only leases hold. The count is right later."""
    monkeypatch.setattr(compat, "MAX_CHANGED", 20)
    engine = start(always_yield=False)
    leased = engine.scheduler.leased_blocks
    for number in range(20):
        send(engine, f"turn{number}", job="a")
        engine.run()
        assert len(leased._changed) <= 20
    send(engine, "last", job="b")
    engine.step()
    assert leased.count_idle() == len(leased) - 4
    engine.run()
    assert leased.count_idle() == len(leased)


@pytest.mark.parametrize("num_blocks", range(41, 121, 8))
def test_no_usage_is_exactly_none(clock: Clock, num_blocks: int) -> None:
    config = make_config(tenuto={"policy": "tests.vllm.policies:KeepAll"})
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=num_blocks + 1))
    for name in ("a", "bb", "ccc"):
        send(engine, name)
        engine.run()
        assert engine.scheduler.driver.get_num_leased_blocks() > 0
        assert engine.scheduler.get_kv_cache_usage() == 0.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lease_takes_over_the_references_of_its_turn(
    clock: Clock, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither we nor vLLM touch a block that the lease goes on holding, shared or not."""
    engine = start(depth)
    send(engine, "a")
    engine.run()
    leased, pool = engine.scheduler.leased_blocks, engine.scheduler.kv_cache_manager.block_pool
    freed: set[int] = set()
    free = leased._free

    def note(ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        freed.update(block.block_id for block in blocks)
        free(blocks)

    monkeypatch.setattr(leased, "_free", note)
    monkeypatch.setattr(leased, "hold", lambda blocks: pytest.fail("a reference was taken"))
    send(engine, "bb", num_tokens=44, max_tokens=5)
    engine.run()
    # 108 tokens and 4 that were computed: 7 full blocks, 4 of them the first job's too.
    of_bb = next(each for each in engine.scheduler.driver.leases if each.job_id == "bb").blocks
    assert [block.ref_cnt for block in of_bb] == [2] * 4 + [1] * 3
    assert not {block.block_id for block in of_bb} & freed
    assert engine.scheduler.driver.get_num_idle_leased_blocks() == 6 + 3
    engine.scheduler.driver.drop_all(clock.now_s)
    check_integrity(pool, engine.scheduler.driver.leases, idle=True)


def test_a_lease_on_another_request_s_copy_takes_its_own_references(clock: Clock) -> None:
    """Two jobs compute one prompt side by side: both leases hold the copy that is hit, the other is free."""
    engine = start()
    for name in ("a", "b"):
        send(engine, name)
    engine.run()
    scheduler = engine.scheduler
    first, second = scheduler.driver.leases
    assert first.blocks == second.blocks
    assert {block.ref_cnt for block in first.blocks} == {2}
    check_integrity(scheduler.kv_cache_manager.block_pool, scheduler.driver.leases, idle=True)


def test_a_refused_lease_gives_the_references_back(clock: Clock) -> None:
    engine = start(max_leased_share=0.05)
    send(engine, "a")
    engine.run()
    scheduler = engine.scheduler
    assert len(scheduler.driver.leases) == 0
    assert scheduler.driver.stats.num_lease_refusals[LeaseRefusal.OVER_SHARE] == 1
    check_integrity(scheduler.kv_cache_manager.block_pool, scheduler.driver.leases, idle=True)
    assert get_reported(engine) == (0, 0)
