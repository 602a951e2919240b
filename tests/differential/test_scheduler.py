"""Our scheduler decides what vLLM's own decides, step by step, on random workloads of conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import SpeculativeConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from tenuto.core.policy import Policy, load_policy
from tenuto.sim.checks import check_integrity
from tenuto.sim.config import EngineConfig, KvConfig
from tenuto.sim.scheduler import Scheduler
from tests.differential.sides import Decision, Names, SimSide, Turn, VllmSide
from tests.vllm.workerless import MAX_MODEL_LEN, make_config

NUM_STEPS = 220
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Setup:
    """One configuration of both engines."""

    num_blocks: int
    max_num_seqs: int = 16
    max_step_tokens: int = 256
    long_prefill_token_threshold: int = 0
    reserve_full_sequence: bool = True
    watermark: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    order: str = "fcfs"
    depth: int = 1
    num_draft_tokens: int = 0
    has_draft_model: bool = False


def make_sides(setup: Setup, policy: Policy | None = None) -> tuple[VllmSide, SimSide]:
    vllm_config = make_config(
        is_async=setup.depth > 1,
        policy=setup.order,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_step_tokens,
        long_prefill_token_threshold=setup.long_prefill_token_threshold,
        scheduler_reserve_full_isl=setup.reserve_full_sequence,
        watermark=setup.watermark,
    )
    if setup.num_draft_tokens:
        vllm_config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=setup.num_draft_tokens,
            prompt_lookup_max=4,
            prompt_lookup_min=2,
            target_model_config=vllm_config.model_config,
            target_parallel_config=vllm_config.parallel_config,
        )
    theirs = make_hybrid_scheduler(AsyncScheduler if setup.depth > 1 else SyncScheduler, vllm_config, setup)
    if setup.has_draft_model:
        # What EAGLE changes in the scheduler, without a draft model to configure.
        theirs.num_lookahead_tokens = setup.num_draft_tokens
        theirs.kv_cache_manager.coordinator.eagle_group_ids = {0}
        theirs.kv_cache_manager.coordinator.single_type_managers[0].use_eagle = True
    kv = KvConfig(
        num_blocks=setup.num_blocks,
        block_size=BLOCK_SIZE,
        windows=setup.windows,
        max_model_len=MAX_MODEL_LEN,
        reserve_full_sequence=setup.reserve_full_sequence,
        watermark=setup.watermark,
        num_lookahead_tokens=setup.num_draft_tokens if setup.has_draft_model else 0,
        drops_last_hit_block=setup.has_draft_model,
    )
    config = EngineConfig(
        kv=kv,
        max_step_tokens=setup.max_step_tokens,
        max_num_seqs=setup.max_num_seqs,
        long_prefill_token_threshold=setup.long_prefill_token_threshold,
        order=setup.order,
        max_steps_in_flight=setup.depth,
        num_draft_tokens=setup.num_draft_tokens,
    )
    ours = Scheduler(config, policy or load_policy("stock"))
    return (
        VllmSide(theirs, depth=setup.depth, accept=accept_some),
        SimSide(ours, depth=setup.depth, accept=accept_some),
    )


def accept_some(turn_id: str, num_tokens: int, num_drafts: int) -> int:
    return random.Random(f"{turn_id}/{num_tokens}").randint(0, num_drafts)


def make_hybrid_scheduler(cls: type, vllm_config: Any, setup: Setup) -> Any:
    """vLLM's scheduler for a model with these layer groups."""
    init_none_hash(sha256)
    vllm_config.cache_config.num_gpu_blocks = setup.num_blocks
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(
            [f"layer{n}"],
            FullAttentionSpec(**common)
            if window is None
            else SlidingWindowSpec(**common, sliding_window=window),
        )
        for n, window in enumerate(setup.windows)
    ]
    kv_cache_config = KVCacheConfig(num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return cls(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


class Conversations:
    """Random turns: they share a system prompt, continue, fork, repeat and start over."""

    def __init__(self, rng: random.Random, *, max_prompt: int = 460, max_output: int = 120) -> None:
        self._rng = rng
        self._max_prompt = max_prompt
        self._max_output = max_output
        self._talks = [[("system", 40), (f"task{n}", rng.randrange(5, 120))] for n in range(8)]
        self._num_turns = 0

    def next(self, step: int) -> Turn:
        rng = self._rng
        number = self._num_turns
        self._num_turns += 1
        talk = rng.choice(self._talks)
        if sum(n for _, n in talk) > self._max_prompt - 60:
            del talk[rng.randrange(1, 3) :]
        if rng.random() < 0.9:
            talk.append((f"new{number}", rng.randrange(1, 60)))
        prompt = tuple(talk)
        output = (f"out{number}", rng.randrange(1, self._max_output))
        if rng.random() < 0.7:
            talk.append((output[0], rng.randrange(1, output[1] + 1)))
        job = {"job_id": f"job{self._talks.index(talk)}"} if rng.random() < 0.5 else None
        return Turn(f"r{number}", prompt, output, float(step), rng.randrange(3), job)


def run(setup: Setup, seed: int) -> Iterator[Decision]:
    """Run one random workload through both; yields what both decided, and fails where they differ."""
    rng = random.Random(seed)
    theirs, ours = make_sides(setup)
    names = Names(BLOCK_SIZE)
    turns = Conversations(rng)
    step = 0
    while step < NUM_STEPS or ours.scheduler.requests:
        ours.now_s = float(step)
        while step < 0.7 * NUM_STEPS and rng.random() < 0.4:
            turn = turns.next(step)
            names.pair(theirs.add(turn), ours.add(turn))
        if rng.random() < 0.03 and ours.scheduler.requests:
            turn_id = rng.choice(sorted(ours.scheduler.requests))
            theirs.abort(turn_id)
            ours.abort(turn_id)
        if rng.random() < 0.01:
            preempt = rng.random() < 0.5
            assert theirs.reset(preempt_running=preempt) == ours.reset(preempt_running=preempt)
        expected, decided = theirs.step(), ours.step()
        expected = replace(expected, free_queue=names.translate(expected.free_queue))
        assert decided == expected, f"step {step}"
        check_integrity(ours.scheduler)
        yield decided
        step += 1
        assert step < 5000
    check_integrity(ours.scheduler, idle=True)


@pytest.mark.parametrize("seed", range(3))
def test_x(seed: int) -> None:
    steps = list(run(Setup(num_blocks=44, max_step_tokens=64), seed))
    assert sum(len(step.num_tokens) for step in steps) > 100
