"""What became of leases, written down: counted, logged, and which waiting turns must be reordered for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tenuto.core.history import History
from tenuto.core.leases import LeaseEnded, LeaseEvent, LeaseGranted, LeaseRefused, LeaseTruncated
from tenuto.core.stats import DriverStats
from tenuto.core.types import LeaseEnd


class LeaseLedger:
    """Applies the events that retention returns. It never calls the engine."""

    def __init__(self, stats: DriverStats, history: History) -> None:
        self._stats = stats
        self._history = history
        self._to_reorder: deque[str] = deque()
        """Waiting turns that lost their lease."""

    def apply(self, event: LeaseEvent | None) -> None:
        """Count and log what happened to a lease, and note the turn that may have to be reordered."""
        match event:
            case LeaseGranted():
                self._stats.num_leases_granted += 1
                self._history.record_lease(event)
            case LeaseRefused():
                self._stats.num_lease_refusals[event.reason] += 1
                self._history.record_refusal(event)
            case LeaseTruncated():
                self._stats.num_revoked_blocks += event.num_blocks
                self._stats.num_takes[event.taken_by] += 1
                self._history.record_lease(event)
            case LeaseEnded():
                self._stats.num_leases_ended[event.reason] += 1
                if event.reason is LeaseEnd.REVOKED:
                    self._stats.num_revoked_blocks += event.num_blocks
                if event.taken_by is not None:
                    self._stats.num_takes[event.taken_by] += 1
                self._history.record_lease(event)
                waiting_id = event.lease.next_turn_id
                if waiting_id is not None and event.reason is not LeaseEnd.HIT:
                    self._to_reorder.append(waiting_id)

    def pop_to_reorder(self) -> Iterator[str]:
        """The waiting turns whose lease ended since the last call; their place in the queue may differ."""
        while self._to_reorder:
            yield self._to_reorder.popleft()

    def forget_to_reorder(self) -> None:
        """The engine asks for the keys of all waiting turns anyway."""
        self._to_reorder.clear()
