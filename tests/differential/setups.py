"""Configurations of both engines, and the random workloads that both get."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import vllm
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec

from tenuto.core.windows import STATE, Layers
from tenuto.sim.engine import EngineConfig
from tenuto.sim.kv import KvConfig
from tests.differential.sides import Turn
from tests.vllm.kv_configs import get_attention, make_scheduler_of_layers
from tests.vllm.layouts import LAYOUTS
from tests.vllm.workerless import MAX_MODEL_LEN, make_config

BLOCK_SIZE = 16
HOST = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "tenuto.vllm.tiers.worker",
        # Room for any number of chunks: tests say how many there are.
        "cpu_bytes_to_use": 2**33,
        "blocks_per_chunk": 1,
        "offload_prompt_only": False,
    },
}
NATIVE = HOST | {
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 2**33,
        "blocks_per_chunk": 1,
        "offload_prompt_only": False,
    }
}
"""The same without Tenuto."""
RELEASE: Literal["0.32", "0.33"] = "0.33" if vllm.__version__.startswith("0.33") else "0.32"
"""Whose decisions the simulator is to make: those of the vLLM that is installed."""


@dataclass(frozen=True)
class Setup:
    """One configuration of both engines; the smallest caches just hold the longest request."""

    num_blocks: int = 44
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    long_prefill_token_threshold: int = 0
    prefill_schedule_interval: int = 1
    reserve_full_sequence: bool = True
    watermark: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    layout: str = ""
    """Instead of windows: one of `tests.vllm.layouts.LAYOUTS`."""
    retention_interval: int | None = 0
    max_model_len: int = MAX_MODEL_LEN
    order: Literal["fcfs", "priority"] = "fcfs"
    depth: int = 1
    num_draft_tokens: int = 0
    has_draft_model: bool = False
    num_host_chunks: int = 0
    """Host memory below the cache, in blocks."""
    is_native: bool = False
    """Whether host memory is vLLM's own, without Tenuto."""

    @property
    def total_blocks(self) -> int:
        """Every layer group needs as many blocks as one alone."""
        return self.num_blocks * len(LAYOUTS[self.layout] if self.layout else self.windows)

    def make_engine_config(self) -> EngineConfig:
        windows, block_sizes = self.windows, (BLOCK_SIZE,) * len(self.windows)
        if self.layout:
            windows, block_sizes = get_shape(self.make_vllm_scheduler(Scheduler).kv_cache_config)
        kv = KvConfig(
            vllm_release=RELEASE,
            num_blocks=self.total_blocks,
            block_size=min(block_sizes),
            windows=windows,
            block_sizes=block_sizes,
            retention_interval=self.retention_interval,
            max_model_len=self.max_model_len,
            reserve_full_sequence=self.reserve_full_sequence,
            watermark=self.watermark,
            num_lookahead_tokens=self.num_draft_tokens if self.has_draft_model else 0,
            drops_last_hit_block=self.has_draft_model,
        )
        return EngineConfig(
            kv=kv,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            prefill_schedule_interval=self.prefill_schedule_interval,
            order=self.order,
            max_steps_in_flight=self.depth,
            num_draft_tokens=self.num_draft_tokens,
            offload=("native" if self.is_native else "async") if self.num_host_chunks else None,
            offload_chunk_tokens=min(block_sizes) if self.num_host_chunks else 256,
        )

    def make_vllm_scheduler(self, cls: type, tenuto: dict[str, Any] | None = None) -> Any:
        config = make_config(
            is_async=self.depth > 1,
            tenuto=tenuto,
            max_model_len=self.max_model_len,
            policy=self.order,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            prefill_schedule_interval=self.prefill_schedule_interval,
            scheduler_reserve_full_isl=self.reserve_full_sequence,
            watermark=self.watermark,
        )
        if self.num_host_chunks:
            config.kv_transfer_config = KVTransferConfig(**(NATIVE if self.is_native else HOST))
        if self.num_draft_tokens:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=self.num_draft_tokens,
                prompt_lookup_max=4,
                prompt_lookup_min=2,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        if self.layout:
            config.cache_config.mamba_cache_mode = "align"
            layers = LAYOUTS[self.layout]
        else:
            layers = [get_attention(window, BLOCK_SIZE) for window in self.windows]
        # vLLM has three steps in flight with pipeline parallelism only, which the scheduler does not see.
        with patch.object(VllmConfig, "max_concurrent_batches", self.depth):
            scheduler = make_scheduler_of_layers(
                cls, config, layers, self.total_blocks, retention_interval=self.retention_interval
            )
        if self.has_draft_model:
            # What EAGLE changes in the scheduler, without a draft model to configure.
            scheduler.num_lookahead_tokens = self.num_draft_tokens
            coordinator = scheduler.kv_cache_manager.coordinator
            coordinator.eagle_group_ids = {0}
            # Since 0.33.
            coordinator.drop_eagle_group_ids = {0}
        return scheduler


def get_shape(kv_cache_config: Any) -> tuple[tuple[Layers, ...], tuple[int, ...]]:
    """What vLLM made of a model's layers: each group's window or state, and the tokens in its blocks."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    windows = tuple(
        STATE if isinstance(spec, MambaSpec) else getattr(spec, "sliding_window", None) for spec in specs
    )
    return windows, tuple(spec.block_size for spec in specs)


class Conversations:
    """Random turns of eight conversations: they share a system prompt, go on, fork, repeat and start over."""

    MAX_PROMPT = 400

    def __init__(self, rng: random.Random, *, max_output: int) -> None:
        self._rng = rng
        self._max_output = max_output
        self._talks = [[("system", 40), (f"task{n}", rng.randrange(5, 120))] for n in range(8)]
        self._num_turns = 0

    def get_turn(self, arrival_s: float, busy: Collection[int] = ()) -> Turn:
        """The next turn, of a conversation that is not busy if there is one."""
        rng = self._rng
        idle = [n for n in range(len(self._talks)) if n not in busy]
        number = rng.choice(idle or range(len(self._talks)))
        talk = self._talks[number]
        self._num_turns += 1
        if sum(num_tokens for _, num_tokens in talk) > self.MAX_PROMPT:
            del talk[rng.randrange(1, 3) :]
        if rng.random() < 0.9:
            talk.append((f"new{self._num_turns}", rng.randrange(1, 60)))
        prompt = tuple(talk)
        output = (f"out{self._num_turns}", rng.randrange(1, self._max_output))
        if rng.random() < 0.7:
            talk.append((output[0], rng.randrange(1, output[1] + 1)))
        return Turn(
            f"r{self._num_turns:03d}", prompt, output, arrival_s, rng.randrange(3), {"job_id": f"job{number}"}
        )
