"""Our scheduler decides what vLLM's own decides, step by step, on random workloads of conversations.

Compared after every step: tokens per request in order, preemptions, hits, drafts, both queues, and what every
free block holds, in eviction order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

from tenuto.core.errors import ConfigError
from tenuto.core.loader import load_policy
from tenuto.sim.engine.scheduler import Scheduler
from tests.differential.setups import BLOCK_SIZE, RELEASE, Conversations, Setup
from tests.differential.sides import Decision, Names, SimSide, Turn, VllmSide
from tests.support.sim_checks import check_integrity

NUM_ARRIVAL_STEPS = 150

SETUPS = {
    "small cache": Setup(),
    "small cache, no gate": Setup(reserve_full_sequence=False, max_num_batched_tokens=32),
    "priority": Setup(order="priority"),
    "priority, no gate": Setup(order="priority", reserve_full_sequence=False, num_blocks=60),
    "watermark": Setup(watermark=0.15, num_blocks=60),
    "threshold": Setup(long_prefill_token_threshold=24, num_blocks=60),
    "few seats": Setup(max_num_seqs=3, num_blocks=100),
    "large cache": Setup(num_blocks=300, max_num_batched_tokens=256),
    "one window": Setup(windows=(64,)),
    "hybrid": Setup(windows=(None, 64)),
    "one window, dense": Setup(windows=(64,), retention_interval=None),
    "one window, interval": Setup(windows=(40,), retention_interval=96),
    "hybrid, dense": Setup(windows=(None, 64), retention_interval=None),
    "hybrid, interval": Setup(windows=(None, 64), retention_interval=128),
    "hybrid, interval of a window": Setup(windows=(None, 64), retention_interval=64),
    "hybrid, several groups": Setup(windows=(None, 40, 40), order="priority"),
    "hybrid, one to five": Setup(windows=(None, 33, 33, 33, 33, 33), retention_interval=80),
    "hybrid, two windows": Setup(windows=(None, 100, 17), reserve_full_sequence=False),
    "hybrid, two windows, interval": Setup(windows=(None, 100, 17), retention_interval=32),
    "two windows": Setup(windows=(100, 20), retention_interval=0),
    "drafts": Setup(num_draft_tokens=3),
    "drafts, hybrid": Setup(num_draft_tokens=2, windows=(None, 64)),
    "draft model": Setup(num_draft_tokens=2, has_draft_model=True),
    "states": Setup(layout="states"),
    "states, dense": Setup(layout="states", retention_interval=None, order="priority"),
    "states, interval": Setup(layout="states", retention_interval=128, reserve_full_sequence=False),
    # A block of 64 tokens is wider than a step.
    "states in large blocks": Setup(
        layout="states, all blocks large", num_blocks=20, max_num_batched_tokens=48
    ),
    "windows in blocks twice as large": Setup(layout="window blocks twice as large"),
    "windows in large blocks": Setup(layout="window blocks four times as large", retention_interval=256),
    "full attention in large blocks": Setup(layout="full blocks twice as large", retention_interval=None),
    "drafts, unlike blocks": Setup(layout="window blocks twice as large", num_draft_tokens=2),
}
if RELEASE == "0.33":
    SETUPS |= {
        "prefill every 2nd step": Setup(prefill_schedule_interval=2),
        "prefill every 4th step, large cache": Setup(
            prefill_schedule_interval=4, num_blocks=300, max_num_batched_tokens=256
        ),
        "prefill every 8th step, few seats": Setup(
            prefill_schedule_interval=8, max_num_seqs=3, num_blocks=100
        ),
        "prefill every 4th step, hybrid": Setup(prefill_schedule_interval=4, windows=(None, 64)),
        "prefill every 4th step, states": Setup(prefill_schedule_interval=4, layout="states"),
        "prefill every 4th step, drafts": Setup(prefill_schedule_interval=4, num_draft_tokens=3),
        "prefill every 4th step, priority": Setup(prefill_schedule_interval=4, order="priority"),
    }
CASES = [(name, depth) for name in SETUPS for depth in (1, 2)]
# With a third step in flight, as in a pipeline, a preempted request may have to wait for stale output.
CASES += [("small cache", 3), ("priority", 3), ("drafts", 3)]
if RELEASE == "0.33":
    CASES += [("prefill every 2nd step", 3), ("prefill every 4th step, drafts", 3)]


def make_vllm_side(setup: Setup) -> VllmSide:
    scheduler = setup.make_vllm_scheduler(AsyncScheduler if setup.depth > 1 else SyncScheduler)
    return VllmSide(scheduler, depth=setup.depth, accept=accept_some)


def make_sim_side(setup: Setup) -> SimSide:
    scheduler = Scheduler(setup.make_engine_config(), load_policy("stock"))
    return SimSide(scheduler, depth=setup.depth, accept=accept_some)


def accept_some(turn_id: str, num_tokens: int, num_drafts: int) -> int:
    return random.Random(f"{turn_id}/{num_tokens}").randint(0, num_drafts)


def run(theirs: VllmSide, ours: SimSide, seed: int) -> Iterator[Decision]:
    """Run one random workload through both; yields what both decided, and fails where they differ."""
    rng = random.Random(seed)
    names = Names(theirs.scheduler.hash_block_size)
    turns = Conversations(rng, max_output=100)
    step = 0
    while step < NUM_ARRIVAL_STEPS or ours.scheduler.state.requests:
        while step < NUM_ARRIVAL_STEPS and rng.random() < 0.3:
            turn = turns.get_turn(float(step))
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
        check_integrity(ours.scheduler)
        yield decided
        step += 1
        assert step < 5000, "the engines stalled"
    check_integrity(ours.scheduler, idle=True)


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_same_decisions_as_vllm(name: str, depth: int) -> None:
    setup = replace(SETUPS[name], depth=depth)
    steps = [step for seed in (1, 2) for step in run(make_vllm_side(setup), make_sim_side(setup), seed)]
    assert any(num_hit_tokens > 0 for step in steps for _, num_hit_tokens in step.started)
    assert any(step.preempted for step in steps) or "large cache" in name
    assert any(step.num_drafts for step in steps) == (setup.num_draft_tokens > 0)


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("small cache", {"num_blocks": 45}),
        ("small cache", {"max_num_batched_tokens": 63}),
        ("small cache", {"reserve_full_sequence": False}),
        ("priority", {"order": "fcfs"}),
        ("watermark", {"watermark": 0.0}),
        ("threshold", {"long_prefill_token_threshold": 25}),
        ("few seats", {"max_num_seqs": 4}),
        ("hybrid", {"windows": (None, 80)}),
        ("hybrid", {"retention_interval": None}),
        ("hybrid, interval", {"retention_interval": 112}),
        ("draft model", {"has_draft_model": False}),
    ],
)
def test_every_setting_makes_a_difference(name: str, difference: dict[str, object]) -> None:
    """Else the comparison would not notice if one were ignored."""
    theirs = make_vllm_side(SETUPS[name])
    ours = make_sim_side(replace(SETUPS[name], **difference))
    with pytest.raises(AssertionError):
        list(run(theirs, ours, seed=1))


def test_a_turn_that_never_fits_is_refused_not_stalled() -> None:
    """On purpose not vLLM's: a simulation with such a turn would never end, and nobody would know why."""
    setup = Setup(num_blocks=20)
    turn = Turn("r", (("too much", 20 * BLOCK_SIZE),), ("out", 5))
    theirs, ours = make_vllm_side(setup), make_sim_side(setup)
    theirs.add(turn)
    for _ in range(20):
        assert theirs.step().num_tokens == []
    with pytest.raises(ConfigError, match="needs 21 KV blocks, there are 19"):
        ours.add(turn)
    assert not ours.scheduler.state.requests
