"""The simulated engine: vLLM V1's scheduler, decision by decision.

scheduler     a step from top to bottom: what it computes, and its results
state         the scheduler's data: the state of each request, the time, a step
driver_port   what the driver sees of the engine, and does to its blocks

The settings of the engine are here; vLLM's names where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tenuto.core.engine import StepTokens, check_step_tokens, get_max_step_tokens
from tenuto.core.errors import ConfigError
from tenuto.sim.kv import KvConfig
from tenuto.sim.tiers.offloader import Offload


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of the scheduler and of the cache.

    `tenuto.sim.setup.Setup` checks what users give. Raises ConfigError for values that do not fit together,
    and for those that a policy wants.
    """

    kv: KvConfig
    max_num_batched_tokens: int = 8192
    """Token budget of a step."""
    step_tokens: StepTokens | None = None
    """A smaller budget: "adaptive" is chosen for each step; None for `max_num_batched_tokens`."""
    max_num_seqs: int = 1024
    """Most requests that run at a time."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in a step while there are other requests; 0 for no bound."""
    prefill_schedule_interval: int = 1
    """While requests decode, prompts are computed in one of this many steps; 1: in each. vLLM 0.33 has it
    on one engine."""
    order: Literal["fcfs", "priority"] = "fcfs"
    """Which waiting request goes first, as vLLM's `--scheduling-policy` says."""
    scheduler: Literal["vllm", "continuum-fork"] = "vllm"
    """Whose rules of preemption: vLLM's, or those of the fork that is the Continuum prototype."""
    max_steps_in_flight: int = 1
    """2 for asynchronous scheduling: a step is scheduled while the one before runs. Pipelines have more."""
    read_tool_calls: bool = True
    """Whether answers show their tool calls. Else tools are known from hints alone."""
    num_draft_tokens: int = 0
    """Tokens a drafter proposes per request and step (`num_speculative_tokens`)."""
    offload: Offload | None = None
    """Whether and when KV is copied below the GPU, where there are tiers."""
    offload_chunk_tokens: int = 256
    """Tokens per chunk of the tiers, whole blocks; LMCache's default."""

    @cached_property
    def max_step_tokens(self) -> int:
        """The most tokens that any step may have."""
        return get_max_step_tokens(self.step_tokens, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        check_step_tokens(self.step_tokens, "step_tokens")
        if self.offload is not None and self.offload_chunk_tokens % self.kv.block_size:
            raise ConfigError(
                f"offload_chunk_tokens must be whole blocks of {self.kv.block_size}, got "
                f"{self.offload_chunk_tokens}"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("long_prefill_token_threshold must not be negative")
        if self.kv.has_states and self.num_draft_tokens:
            raise ConfigError("drafts are not simulated for models with recurrent states")
