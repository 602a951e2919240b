"""What became of leases, written down: counted, logged, noted at their job; and which turns to reorder."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tenuto.core.history import History
from tenuto.core.job_table import JobTable
from tenuto.core.leases import LeaseEnded, LeaseEvent, LeaseGranted, LeaseRefused, LeaseTruncated
from tenuto.core.stats import DriverStats
from tenuto.core.types import LeaseEnd, LeaseRefusal, TakenBy


class LeaseLedger:
    """Applies the events that retention returns. It never calls the engine."""

    def __init__(self, stats: DriverStats, history: History, jobs: JobTable) -> None:
        self._stats = stats
        self._jobs = jobs
        self._history = history
        self._to_reorder: deque[str] = deque()
        """Waiting turns that lost their lease."""

    def apply(self, event: LeaseEvent | None) -> None:
        """Count and log what happened to a lease, and note the turn that may have to be reordered."""
        match event:
            case LeaseGranted():
                self._stats.num_leases_granted += 1
                self._note(event.lease.job_id, None)
                self._history.record_lease(event)
            case LeaseRefused():
                self._stats.num_lease_refusals[event.reason] += 1
                self._note(event.turn.job.job_id, event.reason)
                self._history.record_refusal(event)
            case LeaseTruncated():
                self._stats.num_revoked_blocks += event.num_blocks
                self._stats.num_takes[event.taken_by] += 1
                self._note(event.lease.job_id, event.taken_by)
                self._history.record_lease(event)
            case LeaseEnded():
                self._stats.num_leases_ended[event.reason] += 1
                self._note(event.lease.job_id, event.taken_by or event.reason)
                if event.reason is LeaseEnd.REVOKED:
                    self._stats.num_revoked_blocks += event.num_blocks
                if event.taken_by is not None:
                    self._stats.num_takes[event.taken_by] += 1
                self._history.record_lease(event)
                waiting_id = event.lease.next_turn_id
                if waiting_id is not None and event.reason is not LeaseEnd.HIT:
                    self._to_reorder.append(waiting_id)

    def _note(self, job_id: str, news: LeaseEnd | LeaseRefusal | TakenBy | None) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            job.lease_news = news

    def pop_to_reorder(self) -> Iterator[str]:
        """The waiting turns whose lease ended since the last call; their place in the queue may differ."""
        while self._to_reorder:
            yield self._to_reorder.popleft()

    def forget_to_reorder(self) -> None:
        """The engine asks for the keys of all waiting turns anyway."""
        self._to_reorder.clear()
