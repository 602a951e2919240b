"""job-order: first come, first served by jobs instead of turns."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.policy import Key, Policy
from tenuto.core.types import Turn


@dataclass
class JobOrder(Policy):
    """All turns of the job that came first go first; the rest is stock.

    Source: this project; the simplest order by jobs. The preset `unbounded` is this order with a KV cache
    that never fills.
    """

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """By the job's first arrival."""
        return (turn.job.arrival_s, turn.job.number)
