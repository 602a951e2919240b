"""With leases our scheduler decides what Tenuto's plugin makes vLLM's decide: one driver, two engines."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
import tenuto.vllm.scheduler
from tenuto.core.driver import Driver
from tenuto.core.limits import Limits
from tenuto.core.loader import load_policy
from tenuto.core.types import LeaseEnd
from tenuto.sim.engine.scheduler import Scheduler
from tests.differential.setups import Conversations, Setup
from tests.differential.sides import Names, SimSide, Turn, VllmSide
from tests.support.sim_checks import check_integrity
from tests.vllm.conftest import Clock

NUM_ARRIVAL_STEPS = 250
STEP_S = 0.25

KEEP_ALL = "tests.vllm.policies:KeepAll"
TTL = {"ttl_s": 20.0}
LIMITS = {"max_leased_share": 0.8, "max_lease_s": 4.0}

CASES: dict[str, tuple[Setup, str, dict[str, Any]]] = {
    "hold": (Setup(), KEEP_ALL, TTL),
    "hold, priority": (Setup(order="priority", num_blocks=60), KEEP_ALL, TTL),
    "hold, watermark": (Setup(watermark=0.15, num_blocks=60), KEEP_ALL, TTL),
    "hold, no gate": (Setup(reserve_full_sequence=False, num_blocks=80), KEEP_ALL, TTL),
    "hybrid hold": (Setup(windows=(None, 64), num_blocks=60), KEEP_ALL, TTL),
    "hybrid hold, dense": (Setup(windows=(None, 64), num_blocks=60, retention_interval=None), KEEP_ALL, TTL),
    "hybrid hold, interval": (Setup(windows=(None, 40), num_blocks=60, retention_interval=96), KEEP_ALL, TTL),
    "hybrid hold, one to five": (Setup(windows=(None, *(33,) * 5), num_blocks=36), KEEP_ALL, TTL),
    "hybrid hold, two full": (Setup(windows=(None, None, 20), num_blocks=60), KEEP_ALL, TTL),
    "hybrid hold, two windows": (Setup(windows=(None, 100, 17), num_blocks=50), KEEP_ALL, TTL),
    # Short enough that a block behind each window fits beside the longest request.
    "hybrid hold, spare blocks": (Setup(windows=(None, 40), num_blocks=60, max_model_len=640), KEEP_ALL, TTL),
    "window hold": (Setup(windows=(48,), num_blocks=32), KEEP_ALL, TTL),
    "states hold": (Setup(layout="states", num_blocks=20), KEEP_ALL, TTL),
    "states hold, answers": (Setup(layout="states", num_blocks=20, max_model_len=640), KEEP_ALL, TTL),
    "states hold, dense": (Setup(layout="states", num_blocks=20, retention_interval=None), KEEP_ALL, TTL),
    "unlike blocks hold": (Setup(layout="window blocks twice as large", num_blocks=60), KEEP_ALL, TTL),
    "continuum-fixed": (Setup(max_num_seqs=4), "continuum-fixed", {}),
    "continuum-fixed A": (Setup(), "continuum-fixed", {"variant": "A"}),
    "admission and budget": (Setup(num_blocks=60), "tests.vllm.policies:OneJobAtATime", {"step_tokens": 40}),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tenuto.vllm.scheduler, "time", clock)
    return clock


def make_sides(setup: Setup, policy: str, options: dict[str, Any]) -> tuple[VllmSide, SimSide]:
    settings = {"policy": policy, "options": options, "limits": LIMITS}
    theirs = setup.make_vllm_scheduler(tenuto.vllm.Scheduler, settings)
    ours = Scheduler(setup.make_engine_config(), load_policy(policy, options), Limits(**LIMITS))
    return VllmSide(theirs, depth=setup.depth), SimSide(ours, depth=setup.depth)


def get_turn(turns: Conversations, rng: random.Random, ours: SimSide) -> Turn:
    """A turn that its client says something about; mostly of a job whose turns have all finished."""
    live = {int(request.hints.job_id[3:]) for request in ours.scheduler.state.requests.values()}
    turn = turns.get_turn(ours.now_s, busy=live if rng.random() < 0.95 else ())
    said = rng.choice([{"tool": "ls"}, {"tool": "ls"}, {"tool": "pytest"}, {}, {"is_last_step": 1}])
    return replace(turn, xargs={**turn.xargs, **said})


def get_totals(driver: Driver) -> dict[str, Any]:
    """What a driver counted and which leases it has."""
    totals = {name: value for name, value in vars(driver.stats).items() if isinstance(value, int | dict)}
    del totals["groups"]
    leases = sorted((lease.job_id, len(lease.blocks), lease.terms.until_s) for lease in driver.leases)
    return {**totals, "leases": leases}


def run(theirs: VllmSide, ours: SimSide, clock: Clock, seed: int) -> Driver:
    """Run one random workload through both; fails where they differ; returns our driver."""
    rng = random.Random(seed)
    names = Names(theirs.scheduler.hash_block_size)
    turns = Conversations(rng, max_output=30)
    step = 0
    while step < NUM_ARRIVAL_STEPS or ours.scheduler.state.requests:
        ours.now_s = clock.now_s = step * STEP_S
        while step < NUM_ARRIVAL_STEPS and rng.random() < 0.2:
            turn = get_turn(turns, rng, ours)
            names.pair(theirs.add(turn), ours.add(turn))
        if rng.random() < 0.03 and ours.scheduler.state.requests:
            turn_id = rng.choice(sorted(ours.scheduler.state.requests))
            theirs.abort(turn_id)
            ours.abort(turn_id)
        if rng.random() < 0.01:
            preempt = rng.random() < 0.5
            assert theirs.reset(preempt_running=preempt) == ours.reset(preempt_running=preempt)
        expected, decided = theirs.step(), ours.step()
        assert decided == names.translate(expected), f"step {step}"
        assert get_totals(ours.scheduler.driver) == get_totals(theirs.scheduler.driver), f"step {step}"
        check_integrity(ours.scheduler)
        step += 1
        assert step < 5000, "the engines stalled"
    return ours.scheduler.driver


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_same_decisions_as_the_plugin(name: str, depth: int, clock: Clock) -> None:
    setup, policy, options = CASES[name]
    setup = replace(setup, depth=depth)
    drivers = [run(*make_sides(setup, policy, options), clock, seed) for seed in (1, 2, 3)]
    if any(setup.windows) or setup.layout:
        assert sum(driver.stats.num_prefixes_pinned for driver in drivers) > 0
    num_ended = {why: sum(driver.stats.num_leases_ended[why] for driver in drivers) for why in LeaseEnd}
    if policy == KEEP_ALL:
        num_late = num_ended[LeaseEnd.EXPIRED] + num_ended[LeaseEnd.TIME_LIMIT]
        assert num_ended[LeaseEnd.HIT] and num_ended[LeaseEnd.REVOKED] and num_late, num_ended
    elif policy == "continuum-fixed":
        assert num_ended[LeaseEnd.HIT] and num_ended[LeaseEnd.EXPIRED]
    else:
        assert sum(driver.stats.num_admission_waits for driver in drivers) > 0


def test_the_comparison_can_fail(clock: Clock) -> None:
    """Another time to live is another run."""
    setup, policy, options = CASES["hold"]
    theirs, _ = make_sides(setup, policy, options)
    _, ours = make_sides(setup, policy, {**options, "ttl_s": 1.0})
    with pytest.raises(AssertionError):
        run(theirs, ours, clock, seed=1)
