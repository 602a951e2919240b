"""unbounded: a yardstick with a KV cache that never fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tenuto.core.policy import Key, Policy
from tenuto.core.types import Turn


@dataclass
class Unbounded(Policy):
    """Nothing is ever evicted, and jobs go in the order in which they arrived.

    What is left is the useful work alone: a policy that is slower wastes something, one that is faster has
    the better order. Never deployable.
    """

    wants: ClassVar[Mapping[str, Any]] = {"unbounded_kv": True}

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """By the job's first arrival."""
        return (turn.job.arrival_s, turn.job.job_id, turn.arrival_s)
