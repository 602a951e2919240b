"""The usage that vLLM reports: blocks that only leases hold are free memory.

The chaos tests compare it with a count of all blocks after each step (`check_integrity`).
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
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
    assert engine.scheduler.driver.get_num_idle_leased_blocks() == 0


@pytest.mark.parametrize("num_blocks", range(41, 121, 8))
def test_no_usage_is_exactly_none(clock: Clock, num_blocks: int) -> None:
    config = make_config(tenuto={"policy": "tests.vllm.policies:KeepAll"})
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=num_blocks + 1))
    for name in ("a", "bb", "ccc"):
        send(engine, name)
        engine.run()
        assert engine.scheduler.driver.get_num_leased_blocks() > 0
        assert engine.scheduler.get_kv_cache_usage() == 0.0
