"""The lease table: which blocks are held for which job, until when, and which lease yields first.

The table never calls the policy or the driver. It returns an event, and the driver applies the event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tenuto.core.engine import Engine
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.core.quota import Quota
from tenuto.core.types import Keep, Lease, LeaseEnd, LeaseRefusal, Turn, Yields


@dataclass(slots=True)
class LeaseState:
    """One lease; the lease table and `Retention` change it."""

    job_id: str
    turn: Turn
    """The finished turn that computed the blocks."""
    blocks: list[Any]
    granted_s: float
    terms: Keep
    next_turn_id: str | None = None

    def get_view(self, terms: Keep | None = None) -> Lease:
        """The frozen view that a policy sees, with these terms or, by default, the lease's own."""
        terms = terms or self.terms
        return Lease(
            turn=self.turn,
            granted_s=self.granted_s,
            until_s=terms.until_s,
            value=terms.value,
            num_blocks=len(self.blocks),
            next_turn_waiting=self.next_turn_id is not None,
        )


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A lease began."""

    lease: LeaseState
    now_s: float


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """A finished turn got no lease."""

    turn: Turn
    reason: LeaseRefusal
    now_s: float


@dataclass(frozen=True, slots=True)
class LeaseTruncated:
    """An allocation reclaimed the last blocks of a lease; the lease keeps the others."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease ended: it released all its blocks and left the table."""

    lease: LeaseState
    reason: LeaseEnd
    num_blocks: int
    """How many blocks it still had when it ended."""
    now_s: float


LeaseEvent = LeaseGranted | LeaseRefused | LeaseTruncated | LeaseEnded


class LeaseTable:
    """All leases, at most one per job. A change takes O(log n) time; nothing is scanned."""

    def __init__(self, engine: Engine, quota: Quota) -> None:
        self._engine = engine
        self._quota = quota
        self._leases: dict[str, LeaseState] = {}
        self._deadlines = IndexedHeap()
        self._evict_order = {yields: IndexedHeap() for yields in Yields}
        self.num_blocks = 0
        """Blocks of all leases together; a block that several leases share counts once for each."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LeaseState]:
        return iter(list(self._leases.values()))

    def get(self, job_id: str) -> LeaseState | None:
        """The job's lease, or None."""
        return self._leases.get(job_id)

    def grant(self, lease: LeaseState, evict_key: Key) -> None:
        """Add a lease and hold its blocks. The job must not have a lease yet."""
        assert lease.job_id not in self._leases
        self._leases[lease.job_id] = lease
        self._engine.hold(lease.blocks)
        self.num_blocks += len(lease.blocks)
        if self._quota.is_limited:
            self._quota.add(lease.turn.job.tenant, self._engine.get_block_ids(lease.blocks))
        self._enter(lease, evict_key)

    def renew(self, lease: LeaseState, terms: Keep, evict_key: Key) -> None:
        """Change a lease's deadline, its value, or when it yields."""
        self._get_order(lease).discard(lease.job_id)
        lease.terms = terms
        self._enter(lease, evict_key)

    def end(self, lease: LeaseState, reason: LeaseEnd, now_s: float) -> LeaseEnded:
        """Release all blocks of a lease and remove it from the table."""
        del self._leases[lease.job_id]
        self._deadlines.discard(lease.job_id)
        self._get_order(lease).discard(lease.job_id)
        ended = LeaseEnded(lease, reason, len(lease.blocks), now_s)
        self.truncate(lease, 0)
        return ended

    def truncate(self, lease: LeaseState, num_blocks: int) -> None:
        """Release the last blocks of a lease, so that it keeps its first `num_blocks`."""
        tail = lease.blocks[num_blocks:]
        if not tail:
            return
        del lease.blocks[num_blocks:]
        self.num_blocks -= len(tail)
        if self._quota.is_limited:
            self._quota.remove(lease.turn.job.tenant, self._engine.get_block_ids(tail))
        self._engine.release(tail)

    def get_due(self, now_s: float) -> LeaseState | None:
        """The lease with the earliest deadline, if that deadline has passed; otherwise None."""
        key = self._deadlines.get_first_key()
        if key is None or key[0] > now_s:  # type: ignore[operator]
            return None
        first = self._deadlines.get_first()
        assert first is not None
        return self._leases[first]

    def get_next_deadline_s(self) -> float | None:
        """The earliest deadline, or None if there are no leases."""
        key = self._deadlines.get_first_key()
        return None if key is None else float(key[0])

    def get_first_to_yield(self, yields: Yields, spare_job_id: str | None = None) -> LeaseState | None:
        """The lease that yields first, except the lease of the spared job."""
        first = self._evict_order[yields].get_first_except(spare_job_id)
        return None if first is None else self._leases[first]

    def _enter(self, lease: LeaseState, evict_key: Key) -> None:
        self._deadlines.push(lease.job_id, (lease.terms.until_s,))
        self._get_order(lease).push(lease.job_id, evict_key)

    def _get_order(self, lease: LeaseState) -> IndexedHeap:
        return self._evict_order[lease.terms.yields]
