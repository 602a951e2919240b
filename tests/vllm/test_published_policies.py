"""The published policies on vLLM's real scheduler: the files that run in the simulator, unchanged."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
from tenuto.core.types import LeaseEnd
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

NUM_JOBS, NUM_TURNS, OUTPUT = 6, 4, 8
PUBLISHED = {
    "continuum": {"prefill_token_s": 0.1, "min_samples": 2},  # a reload of 100 tokens takes 10 s: worth a pin
    "infercept": {},
    "break-even": {},
}


def start(policy: str, depth: int, num_blocks: int) -> Engine:
    tenuto_config = {"policy": policy, "options": PUBLISHED[policy]}
    config = make_config(is_async=depth > 1, tenuto=tenuto_config)
    return Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=num_blocks), depth=depth)


def serve(engine: Engine, clock: Clock) -> None:
    """Jobs of several turns, half a second in their tools; all turns of a round wait at a time."""
    prompts = [[50 + job] * 120 for job in range(NUM_JOBS)]
    for turn in range(NUM_TURNS):
        for job, prompt in enumerate(prompts):
            is_last = turn == NUM_TURNS - 1
            xargs = {"job_id": f"job-{job}", **({"is_last_step": 1} if is_last else {"tool": "ls"})}
            turn_id = f"{job}/{turn}"
            engine.scheduler.add_request(make_request(turn_id, prompt, max_tokens=OUTPUT, xargs=xargs))
        for _ in range(1000):
            clock.now_s += 0.01
            engine.step()
            if not engine.scheduler.requests:
                break
        assert not engine.scheduler.requests
        prompts = [
            prompt + engine.outputs[f"{job}/{turn}"] + [200 + turn] * 30 for job, prompt in enumerate(prompts)
        ]
        clock.now_s += 0.5


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.parametrize("depth", [1, 2])
def test_all_turns_are_served_and_nothing_is_left_held(clock: Clock, policy: str, depth: int) -> None:
    engine = start(policy, depth, num_blocks=40)  # the jobs would fill 48, and 96 in the end
    serve(engine, clock)
    driver = engine.scheduler.driver
    assert driver.num_policy_faults == 0
    assert driver.stats.num_leases_granted > 0
    assert not len(driver.leases)
    check_integrity(engine.scheduler.kv_cache_manager.block_pool, driver.leases, idle=True)


def test_continuum_s_pins_are_hit(clock: Clock) -> None:
    engine = start("continuum", 1, 400)
    serve(engine, clock)
    stats = engine.scheduler.driver.stats
    assert stats.num_leases_granted == NUM_JOBS * (NUM_TURNS - 1)
    assert stats.num_leases_ended[LeaseEnd.HIT] == stats.num_leases_granted
    assert stats.num_recomputed_tokens < NUM_JOBS * NUM_TURNS * 16  # less than a block each


def test_prefill_is_learned_from_vllm_s_steps(clock: Clock) -> None:
    engine = start("break-even", 2, 400)
    for number in range(30):
        engine.scheduler.add_request(make_request(f"r{number}", [number + 5] * 256, max_tokens=1))
        engine.step()
        clock.now_s += 0.5  # each prompt is a step of half a second
    assert engine.scheduler.driver.policy._prefill.profile.get_s(256) == pytest.approx(0.5, rel=0.1)
