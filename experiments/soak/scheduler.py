"""Episodes on vLLM's real scheduler without workers, each with a policy, a cache and clients of its own.

An episode is made again from the seed and its number alone. Invariants are checked throughout, and at its end
nothing may be left: no request, no block, no lease, no note of one.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import tenuto.vllm
import tenuto.vllm.scheduler
from experiments.soak.changes import OWN_POLICIES, apply
from experiments.soak.engine import Failure, SoakEngine, SpeakingTokenizer
from experiments.soak.traffic import Mix, Traffic, make_mix
from tenuto.core.errors import TenutoError
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.policy import Learns
from tenuto.vllm.tenants import SECRET_VARIABLE, make_introduction
from tests.support.checks import check_books, check_integrity, check_nothing_is_left
from tests.vllm.conftest import Clock
from tests.vllm.kv_configs import make_scheduler_of_layers
from tests.vllm.layouts import LAYOUTS, attention
from tests.vllm.workerless import EOS, make_config

BOOKS_EVERY = 16
"""Steps between two checks of the driver's books; the blocks are checked at every second step."""
BLOCKS_EVERY = 2
DRAIN_S = 1e7

OPTIONS: dict[str, dict[str, Any]] = {
    "continuum": {"prefill_token_s": 0.1, "min_samples": 2},
    "continuum-fixed": {"ttl_s": 50.0},
    "tests.vllm.policies:OneJobAtATime": {"step_tokens": 40},
}
FAULTY = "tests.vllm.policies:Faulty"
POLICIES = (
    "tenuto",
    "tenuto",
    *(name for name in get_policy_names() if name != "clairvoyant"),  # which knows the future
    *OWN_POLICIES,
    "priority",
    FAULTY,
)
"""The policies of one episode after the other; the default more often."""
LAYERS = {"full": [attention()], "window": [attention(64)], **LAYOUTS}
"""The layers of each layout: full attention, windows, states, blocks of several sizes."""


@dataclass(frozen=True)
class Plan:
    """What an episode runs on; made from the seed and the episode's number."""

    seed: int
    episode: int
    policy: str
    options: dict[str, Any]
    depth: int
    """Steps in flight: 2 as asynchronous scheduling has them, or 1."""
    order: str
    layers: str
    """A name in `LAYERS`."""
    retention_interval: int | None
    """What vLLM keeps of windows: 0, as servers have it, everything (None), or a boundary every so often."""
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    limits: dict[str, Any]
    speaks: bool
    """Whether outputs are texts with tool calls and pieces of them."""
    mix: Mix


def make_plan(seed: int, episode: int) -> Plan:
    """The plan of one episode."""
    rng = random.Random(f"{seed}/{episode}")
    policy = POLICIES[episode % len(POLICIES)]
    layers = rng.choice(("full", "full", "full", "full", *LAYERS))
    limits: dict[str, Any] = {"max_parallel_turns": rng.choice((1, 1, 2, 1000))}
    if rng.random() < 0.4:
        limits["max_leased_share"] = rng.choice((0.2, 0.7))
    if rng.random() < 0.4:
        limits["max_tenant_share"] = rng.choice((0.1, 0.5))
    if rng.random() < 0.3:
        limits["max_wait_over_stock"] = rng.choice((None, 0.0, 1.0))
    if rng.random() < 0.3:
        limits["max_remembered_jobs"] = rng.choice((1, 20))
    if rng.random() < 0.3:
        limits["max_held_back_s"] = rng.choice((0.0, 1.0))
    return Plan(
        seed=seed,
        episode=episode,
        policy=policy,
        options=OPTIONS.get(policy, {}),
        depth=rng.choice((1, 2)),
        order=rng.choice(("fcfs", "fcfs", "priority")),
        layers=layers,
        retention_interval=0 if layers == "full" else rng.choice((0, 0, None, 128)),
        num_blocks=rng.choice((44, 60, 100, 400)) * len(LAYERS[layers]),
        max_num_seqs=rng.choice((4, 16, 48)),
        max_num_batched_tokens=rng.choice((128, 512, 2048)),
        limits=limits,
        speaks=rng.random() < 0.5,
        mix=make_mix(rng),
    )


@dataclass
class Result:
    """What an episode did."""

    turns: int
    finished: int
    aborted: int
    preempted: int
    resets: int
    changes: int
    """Changes that the operator made or tried."""
    steps: int
    leases: int
    leases_hit: int
    revoked_blocks: int
    overdue: int
    policy_faults: int
    seconds: float
    rss_mb: float


def run_episode(plan: Plan, num_turns: int) -> Result:
    """Run one episode. Raises Failure that names what went wrong."""
    clock = Clock()
    started_s = time.perf_counter()
    # The faulty policy's errors and the unreadable outputs are wanted here.
    logging.disable(logging.CRITICAL)
    try:
        secret = patch.dict(os.environ, {SECRET_VARIABLE: "the secret of the soak"})
        with secret, patch.object(tenuto.vllm.scheduler, "time", clock):
            return _run(plan, num_turns, clock, started_s)
    except (TenutoError, AssertionError, Failure) as error:
        raise Failure(f"{type(error).__name__}: {error}") from error
    finally:
        logging.disable(logging.NOTSET)


def _run(plan: Plan, num_turns: int, clock: Clock, started_s: float) -> Result:
    engine = _start(plan)
    scheduler = engine.scheduler
    if plan.mix.num_tenants > 1:
        scheduler.tenants.answer(make_introduction())
    rng = random.Random(f"{plan.seed}/{plan.episode}/traffic")
    traffic = Traffic(rng, plan.mix, engine, clock)
    while traffic.num_sent < num_turns:
        traffic.act()
        traffic.collect(engine.step())
        if engine.num_steps % BLOCKS_EVERY == 0:
            _check(scheduler, with_books=engine.num_steps % BOOKS_EVERY == 0)
    while scheduler.has_unfinished_requests():
        traffic.collect(engine.step())
        clock.now_s += plan.mix.step_s
    engine.run()
    if traffic.num_finished + traffic.num_aborted != traffic.num_sent:
        raise Failure(
            f"{traffic.num_sent} sent, {traffic.num_finished} answered, {traffic.num_aborted} aborted"
        )
    if traffic.num_changes:
        apply(scheduler, {"mode": "on"})
    driver = scheduler.driver
    check_integrity(scheduler.kv_cache_manager.block_pool, driver.leases, pins=driver.pins, idle=True)
    _end_leases(scheduler, clock)
    check_nothing_is_left(scheduler)
    _check_metrics(scheduler)
    if driver.num_policy_faults and plan.policy != FAULTY:
        raise Failure(f"the policy failed {driver.num_policy_faults} times: {driver._caller.faults}")
    _check_state(scheduler)
    stats = driver.stats
    result = Result(
        turns=traffic.num_sent,
        finished=traffic.num_finished,
        aborted=traffic.num_aborted,
        preempted=traffic.num_preempted,
        resets=traffic.num_resets,
        changes=traffic.num_changes,
        steps=engine.num_steps,
        leases=stats.num_leases_granted,
        leases_hit=next(n for reason, n in stats.num_leases_ended.items() if reason.value == "hit"),
        revoked_blocks=stats.num_revoked_blocks,
        overdue=stats.num_overdue_turns,
        policy_faults=driver.num_policy_faults,
        seconds=round(time.perf_counter() - started_s, 2),
        rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    )
    scheduler.shutdown()
    return result


def _start(plan: Plan) -> SoakEngine:
    config = make_config(
        is_async=plan.depth > 1,
        tenuto={
            "policy": plan.policy,
            "options": plan.options,
            "limits": plan.limits,
            "own_policies": OWN_POLICIES,
        },
        policy=plan.order,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )
    if "states" in plan.layers:
        config.cache_config.mamba_cache_mode = "align"
    scheduler = make_scheduler_of_layers(
        tenuto.vllm.Scheduler,
        config,
        LAYERS[plan.layers],
        plan.num_blocks,
        retention_interval=plan.retention_interval,
    )
    if plan.speaks:
        scheduler._reader._tokenizer = SpeakingTokenizer()
    sampler = random.Random(f"{plan.seed}/{plan.episode}/answers")

    def sample(request_id: str, index: int) -> int:
        return EOS if sampler.random() < 0.05 else sampler.randrange(10, 900)

    return SoakEngine(scheduler, sample, depth=plan.depth)


def _check(scheduler: Any, *, with_books: bool) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    if scheduler.settings.mode == "shadow":
        check_integrity(pool)  # leases hold nothing
        return
    check_integrity(pool, scheduler.driver.leases, pins=scheduler.driver.pins)
    if with_books:
        check_books(scheduler)


def _end_leases(scheduler: Any, clock: Clock) -> None:
    """Let time pass until every lease has ended, as an idle engine would see it."""
    for _ in range(1000):
        clock.now_s += DRAIN_S
        if not scheduler.has_requests():
            # Pinned prefixes stay until somebody needs their blocks.
            scheduler.driver.pins.drop_all()
            return
        scheduler.schedule()
    raise Failure(f"{len(scheduler.driver.leases)} leases do not end on an idle engine")


def _check_metrics(scheduler: Any) -> None:
    """What `/metrics` shows is what the driver counted."""
    registry, stats = scheduler._metrics._registry, scheduler.driver.stats
    shown: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                shown[sample.name] = shown.get(sample.name, 0.0) + sample.value
    expected = {
        "tenuto:retained_jobs": 0,
        "tenuto:retained_blocks": 0,
        "tenuto:leases_granted_total": stats.num_leases_granted,
        "tenuto:leases_ended_total": sum(stats.num_leases_ended.values()),
        "tenuto:lease_refusals_total": sum(stats.num_lease_refusals.values()),
        "tenuto:revoked_blocks_total": stats.num_revoked_blocks,
        "tenuto:hit_tokens_total": stats.num_hit_tokens,
        "tenuto:policy_faults_total": scheduler.driver.num_policy_faults,
    }
    wrong = {name: (shown.get(name), value) for name, value in expected.items() if shown.get(name) != value}
    if wrong:
        raise Failure(f"/metrics shows another number than was counted: {wrong}")


def _check_state(scheduler: Any) -> None:
    """What the policy learned goes through its file's format and back."""
    policy, settings = scheduler.configured_policy, scheduler.settings
    if isinstance(policy, Learns):
        state = json.dumps(policy.get_state(), allow_nan=False)
        fresh = load_policy(settings.policy, settings.options)
        assert isinstance(fresh, Learns)
        fresh.set_state(json.loads(state))
        if json.dumps(fresh.get_state(), allow_nan=False) != state:
            raise Failure("the policy's state is another one after it was saved and restored")
