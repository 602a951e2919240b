"""The lease table: who holds what until when, and who yields first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.core.quota import Quota
from tenuto.core.types import EngineView, Keep, Lease, LeaseEnd, Turn, Yields


class Engine(Protocol):
    """What the driver needs of an engine: the simulator and the vLLM plugin each have one.

    Blocks are opaque here. Lists of blocks run from the prompt's start to the end of the output.
    """

    @property
    def can_truncate(self) -> bool:
        """Whether a lease is still worth something without its tail; if not it is reclaimed whole."""

    @property
    def can_store(self) -> bool:
        """Whether there is a tier that `store` copies to."""

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state in numbers, with so many leases."""

    def get_num_free_blocks(self) -> int:
        """Blocks an allocation could take now."""

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Any]:
        """Cached blocks a prompt that extends this turn would hit; asked just before the turn's are freed.

        `num_hit_tokens` is what the turn itself hit when it last started.
        """

    def count_common_blocks(self, blocks: list[Any], hashes: Sequence[Hashable]) -> int:
        """How many leading blocks of the list a prompt with these chained hashes runs through."""

    def get_num_leased_blocks(self) -> int:
        """Distinct blocks that `hold` has references to now; several leases may hold one block."""

    def get_block_ids(self, blocks: list[Any]) -> Collection[Hashable]:
        """What tells these blocks apart from all others, in the same order."""

    def hold(self, blocks: list[Any]) -> None:
        """Take one reference to each block."""

    def release(self, blocks: list[Any]) -> None:
        """Give one reference to each block up; the last is evicted first."""

    def store(self, blocks: list[Any]) -> None:
        """Copy blocks to the tiers below the GPU, before they are freed; nothing where there are none."""

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting turn that are in the GPU's cache now."""

    def reorder(self, turn_id: str) -> None:
        """A waiting turn's queue key may have changed."""


@dataclass(slots=True)
class LeaseState:
    """One lease, as the driver changes it."""

    job_id: str
    turn: Turn
    """The finished turn whose blocks these are."""
    blocks: list[Any]
    granted_s: float
    terms: Keep
    next_turn_id: str | None = None

    def get_view(self, terms: Keep | None = None) -> Lease:
        """The frozen view a policy sees, under its own terms or others."""
        terms = terms or self.terms
        return Lease(
            turn=self.turn,
            granted_s=self.granted_s,
            until_s=terms.until_s,
            value=terms.value,
            num_blocks=len(self.blocks),
            next_turn_waiting=self.next_turn_id is not None,
        )


class LeaseTable:
    """All leases, one per job. O(log n) a change; nothing is ever scanned."""

    def __init__(self, engine: Engine, quota: Quota, on_end: Callable[[LeaseState, LeaseEnd], None]) -> None:
        self._engine = engine
        self._quota = quota
        self._on_end = on_end
        self._leases: dict[str, LeaseState] = {}
        self._deadlines = IndexedHeap()
        self._evict_order = {yields: IndexedHeap() for yields in Yields}
        self.num_blocks = 0
        """Of all leases together: a block that several share counts for each."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LeaseState]:
        return iter(list(self._leases.values()))

    def get(self, job_id: str) -> LeaseState | None:
        """The job's lease, or None."""
        return self._leases.get(job_id)

    def grant(self, lease: LeaseState, evict_key: Key) -> None:
        """Enter a lease and take its blocks; the job must have none."""
        assert lease.job_id not in self._leases
        self._leases[lease.job_id] = lease
        self._engine.hold(lease.blocks)
        self.num_blocks += len(lease.blocks)
        if self._quota.are_limited:
            self._quota.add(lease.turn.job.tenant, self._engine.get_block_ids(lease.blocks))
        self._enter(lease, evict_key)

    def renew(self, lease: LeaseState, terms: Keep, evict_key: Key) -> None:
        """Change a lease's deadline, value or yielding."""
        self._get_order(lease).discard(lease.job_id)
        lease.terms = terms
        self._enter(lease, evict_key)

    def end(self, lease: LeaseState, why: LeaseEnd) -> None:
        """Give all blocks up and forget the lease."""
        del self._leases[lease.job_id]
        self._deadlines.discard(lease.job_id)
        self._get_order(lease).discard(lease.job_id)
        self._on_end(lease, why)
        self.truncate(lease, 0)

    def truncate(self, lease: LeaseState, num_blocks: int) -> None:
        """Give blocks up from the tail until `num_blocks` are left."""
        tail = lease.blocks[num_blocks:]
        if not tail:
            return
        del lease.blocks[num_blocks:]
        self.num_blocks -= len(tail)
        if self._quota.are_limited:
            self._quota.remove(lease.turn.job.tenant, self._engine.get_block_ids(tail))
        self._engine.release(tail)

    def get_due(self, now_s: float) -> LeaseState | None:
        """A lease whose deadline has passed, earliest first."""
        key = self._deadlines.get_first_key()
        if key is None or key[0] > now_s:  # type: ignore[operator]
            return None
        first = self._deadlines.get_first()
        assert first is not None
        return self._leases[first]

    def get_next_deadline_s(self) -> float | None:
        """The earliest deadline, or None without leases."""
        key = self._deadlines.get_first_key()
        return None if key is None else float(key[0])

    def get_first_to_yield(self, yields: Yields, spare_job_id: str | None = None) -> LeaseState | None:
        """The lease that yields first, other than the spared job's."""
        order = self._evict_order[yields]
        first = order.get_first()
        if first is None or first != spare_job_id:
            return None if first is None else self._leases[first]
        key = order.get_first_key()
        assert key is not None
        order.discard(first)
        second = order.get_first()
        order.push(first, key)
        return None if second is None else self._leases[second]

    def _enter(self, lease: LeaseState, evict_key: Key) -> None:
        self._deadlines.push(lease.job_id, (lease.terms.until_s,))
        self._get_order(lease).push(lease.job_id, evict_key)

    def _get_order(self, lease: LeaseState) -> IndexedHeap:
        return self._evict_order[lease.terms.yields]
