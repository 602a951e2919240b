"""priority: vLLM's own priority scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from tenuto.core.policy import Policy


@dataclass
class Priority(Policy):
    """Smaller `priority` first, then earlier arrival, then id; the last in that order is preempted.

    Source: vllm/v1/core/sched/request_queue.py@0.32. Same decisions as `--scheduling-policy priority`.
    """

    engine_order: ClassVar[Literal["fcfs", "priority"]] = "priority"
