"""stock: vLLM V1 as it ships, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.policy import Policy


@dataclass
class Stock(Policy):
    """First come, first served; a finished turn's blocks are freed at once and evicted in LRU order.

    Source: vllm/v1/core/sched/scheduler.py@0.32. Overrides nothing, so the engine's own code runs.
    """
