"""Policy `stock` and `priority` decide what vLLM's own scheduler decides, step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

import tenuto.vllm
from tests.support.checks import check_integrity
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler


def run(cls: type, seed: int, *, depth: int, tenuto: dict[str, Any] | None, policy: str) -> list[Any]:
    """Run one random workload of conversations through a scheduler; what it decided, per step."""
    rng = random.Random(seed)
    config = make_config(
        is_async=depth > 1,
        tenuto=tenuto,
        policy=policy,
        max_num_seqs=rng.choice((4, 16)),
        max_num_batched_tokens=rng.choice((64, 256)),
        long_prefill_token_threshold=rng.choice((0, 48)),
    )
    windows = rng.choice(((None,), (None,), (None, 64)))
    # Two layer groups need twice the blocks; the smallest pool just holds the longest request.
    num_blocks = rng.choice((44, 60, 300)) * len(windows)
    scheduler = make_scheduler(cls, config, num_blocks=num_blocks, windows=windows)
    engine = Engine(scheduler, depth=depth)
    shared = [rng.randrange(10, 900) for _ in range(40)]
    talks = [shared + [rng.randrange(10, 900) for _ in range(rng.randrange(5, 120))] for _ in range(8)]
    decided: list[Any] = []
    num_requests = 0
    for step in range(220):
        while step < 150 and rng.random() < 0.4:
            talk = rng.choice(talks)
            if len(talk) > 400:
                del talk[60:]
            talk += [rng.randrange(10, 900) for _ in range(rng.randrange(1, 60))]
            request = make_request(
                f"r{num_requests}",
                talk,
                max_tokens=rng.randrange(1, 120),
                arrival_time=float(step),
                priority=rng.randrange(3),
                xargs={"job_id": f"job{talks.index(talk)}"} if rng.random() < 0.5 else None,
            )
            scheduler.add_request(request)
            num_requests += 1
        if rng.random() < 0.03 and scheduler.requests:
            engine.abort(rng.choice(sorted(scheduler.requests)))
        output = engine.step()
        decided.append(
            (
                list(output.num_scheduled_tokens.items()),
                sorted(output.preempted_req_ids or ()),
                [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs],
                sorted(output.scheduled_cached_reqs.resumed_req_ids),
                output.scheduled_cached_reqs.num_computed_tokens,
            )
        )
    engine.run()
    check_integrity(scheduler.kv_cache_manager.block_pool)
    assert (
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        == scheduler.kv_cache_config.num_blocks - 1
    )
    return decided


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_same_decisions_as_stock(seed: int, policy: str, depth: int) -> None:
    """`stock` leaves vLLM's own mode alone; `priority` turns its priority mode on."""
    stock_class = AsyncScheduler if depth > 1 else SyncScheduler
    expected = run(stock_class, seed, depth=depth, tenuto=None, policy=policy)
    decided = run(tenuto.vllm.Scheduler, seed, depth=depth, tenuto={"policy": "stock"}, policy=policy)
    assert decided == expected
    if policy == "priority":
        decided = run(tenuto.vllm.Scheduler, seed, depth=depth, tenuto={"policy": "priority"}, policy="fcfs")
        assert decided == expected
    assert sum(len(step[0]) for step in decided) > 100


def test_the_comparison_can_fail() -> None:
    """Another order is another run: the workloads have queues and preemptions to differ in."""
    runs = {
        policy: [run(SyncScheduler, seed, depth=1, tenuto=None, policy=policy) for seed in range(3)]
        for policy in ("fcfs", "priority")
    }
    assert runs["fcfs"] != runs["priority"]
    assert any(step[1] for one in runs["fcfs"] for step in one), "no workload preempted anything"
