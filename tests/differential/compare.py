"""Runs one case through both schedulers, and finds the first step in which they differ."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

import tenuto.vllm
import tenuto.vllm.scheduler
from tenuto.core.limits import Limits
from tenuto.core.loader import load_policy
from tenuto.sim.engine.scheduler import PUBLISHED, Scheduler
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier
from tests.differential.cases import STOCK, Case, Traffic
from tests.differential.setups import Conversations
from tests.differential.sides import STEP_S, Decision, Names, SimSide, Turn, VllmSide
from tests.support.sim_checks import check_integrity
from tests.vllm.conftest import Clock

LIMITS = {"max_leased_share": 0.8, "max_lease_s": 4.0}
MAX_STEPS = 5000


class StillClock(Clock):
    """Nothing that the plugin does takes time; else it would ask for fewer keys on a busy machine."""

    @staticmethod
    def perf_counter() -> float:
        return 0.0


class Differs(AssertionError):
    """The two decided differently, or left different contents."""


@contextmanager
def make_sides(case: Case, simulated: Case | None = None) -> Iterator[tuple[VllmSide, SimSide]]:
    """Both sides at the start; `simulated` is what the simulator gets instead of `case`."""
    clock = StillClock()
    with patch.object(tenuto.vllm.scheduler, "time", clock):
        yield _make_vllm_side(case, clock), _make_sim_side(simulated or case)


def compare(case: Case, seed: int, simulated: Case | None = None) -> Iterator[Decision]:
    """Run one random workload through both, and yield what both decided. Raises Differs where they differ."""
    traffic, rng = case.traffic, random.Random(seed)
    turns = Conversations(rng, max_output=traffic.max_output)
    with make_sides(case, simulated) as (theirs, ours):
        names = Names(theirs.scheduler.hash_block_size)
        requests = ours.scheduler.state.requests
        num_steps = 0
        while num_steps < traffic.num_arrival_steps or requests:
            now_s = num_steps * STEP_S
            theirs.set_time(now_s)
            ours.now_s = now_s
            while num_steps < traffic.num_arrival_steps and rng.random() < traffic.arrivals:
                turn = _draw_turn(turns, traffic, rng, ours, now_s)
                names.pair(theirs.add(turn), ours.add(turn))
            if traffic.aborts and rng.random() < traffic.aborts and requests:
                turn_id = rng.choice(_list_leaving(traffic, ours))
                theirs.abort(turn_id)
                ours.abort(turn_id)
            if rng.random() < traffic.resets and (traffic.resets_while_busy or not requests):
                preempts = traffic.resets_while_busy and rng.random() < 0.5
                _check("reset", *(side.reset(preempt_running=preempts) for side in (theirs, ours)))
            yield step(theirs, ours, names)
            num_steps += 1
            _check("steps", num_steps < MAX_STEPS, True)
        check_integrity(ours.scheduler, idle=True)


def _list_leaving(traffic: Traffic, ours: SimSide) -> list[str]:
    """The turns of which one leaves: among several tenants, one that waits, if any does."""
    requests = ours.scheduler.state.requests
    waiting = [each.turn_id for each in ours.scheduler.state.waiting] if traffic.num_tenants > 1 else []
    return sorted(waiting or requests)


def step(theirs: VllmSide, ours: SimSide, names: Names) -> Decision:
    """Run one step of both; returns what both decided. Raises Differs where they do."""
    expected, decided = theirs.step(), ours.step()
    expected = names.translate(expected)
    for name in (each.name for each in fields(Decision)):
        value = getattr(expected, name)
        if value is not None:  # None is what this engine does not have: see `Decision`
            _check(name, value, getattr(decided, name))
    check_integrity(ours.scheduler)
    return decided


def _check(name: str, expected: Any, decided: Any) -> None:
    if expected != decided:
        raise Differs(f"{name}: {_describe(expected, decided)}")


def _describe(expected: Any, decided: Any) -> str:
    """Where two values differ first."""
    if isinstance(expected, dict):
        keys = [key for key in {**expected, **decided} if expected.get(key) != decided.get(key)]
        expected, decided = ({key: side.get(key) for key in keys} for side in (expected, decided))
    elif isinstance(expected, set):
        return f"only vLLM has {expected - decided}, only the simulator has {decided - expected}"
    elif isinstance(expected, list):
        place = next(n for n, (a, b) in enumerate(zip_longest(expected, decided, fillvalue=...)) if a != b)
        return f"from item {place} on, vLLM has {expected[place:]}, the simulator {decided[place:]}"
    return f"vLLM has {expected}, the simulator {decided}"


def _make_vllm_side(case: Case, clock: Clock) -> VllmSide:
    setup = case.setup
    if case.policy is None:
        scheduler = setup.make_vllm_scheduler(AsyncScheduler if setup.depth > 1 else SyncScheduler)
    else:
        settings = {"policy": case.policy, "options": case.options, "limits": LIMITS, "tenants": "client"}
        scheduler = setup.make_vllm_scheduler(tenuto.vllm.Scheduler, settings)
    return VllmSide(scheduler, clock, depth=setup.depth, num_host_chunks=setup.num_host_chunks)


def _make_sim_side(case: Case) -> SimSide:
    setup, tiers = case.setup, None
    if setup.num_host_chunks:
        # Copies end behind the step in which they begin, and before the next.
        tiers = OffloadTiers([Tier("host", setup.num_host_chunks, 1, Link(1e9, latency_s=STEP_S / 4))])
    policy = load_policy(case.policy or STOCK, case.options)
    limits = PUBLISHED if case.policy is None else Limits(**LIMITS)
    config = setup.make_engine_config()
    if not (setup.num_draft_tokens or config.kv.has_states):
        # With drafts or states the plugin leaves vLLM's own budget (`get_reason_for_full_steps`).
        config = replace(config, step_tokens=policy.needs.engine.step_tokens)
    scheduler = Scheduler(config, policy, limits, tiers=tiers)
    return SimSide(scheduler, depth=setup.depth)


def _draw_turn(
    turns: Conversations, traffic: Traffic, rng: random.Random, ours: SimSide, arrival_s: float
) -> Turn:
    """The next turn; with tools it is mostly of a job whose turns have all finished."""
    if not traffic.names_tools:
        return turns.get_turn(arrival_s)
    live = {
        int(request.hints.job_id.rpartition("job")[2]) for request in ours.scheduler.state.requests.values()
    }
    turn = turns.get_turn(arrival_s, busy=live if rng.random() < 0.95 else ())
    said = rng.choice([{"tool": "ls"}, {"tool": "ls"}, {"tool": "pytest"}, {}, {"is_last_step": 1}])
    if traffic.num_tenants > 1 and rng.random() < 0.9:
        # The first tenant sends half of the turns.
        said = {**said, "tenant": f"t{max(0, rng.randrange(2 * traffic.num_tenants) - traffic.num_tenants)}"}
    return replace(turn, xargs={**turn.xargs, **said})
