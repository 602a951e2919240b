"""Chunks of a tier that are evicted last because a client wished it, until a deadline and within a quota."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.core.indexed_heap import IndexedHeap

MIN_HEAP = 64
"""A heap is rebuilt only if it is larger than this and most of its entries are stale."""


@dataclass(frozen=True, slots=True)
class _Kept:
    until_s: float
    tenant: str
    owner: Hashable | None


class KeptChunks:
    """The chunks of a tier that are kept, each until its deadline. They are never all of the tier's chunks.

    If there are too many, the tenant that has the most for its weight loses the chunk with the earliest
    deadline, the last one in its sequence first. A change takes O(log n) amortised time.
    """

    def __init__(self) -> None:
        self.max_chunks = 0
        """Most chunks that may be kept."""
        self.weights: Mapping[str, Any] = {}
        """Weights of tenants; 1 for others."""
        self._kept: dict[Hashable, _Kept] = {}
        self._by_end: list[tuple[float, int, Hashable]] = []
        self._by_tenant: dict[str, list[tuple[float, int, int, Hashable]]] = {}
        self._counts: dict[str, int] = {}
        self._most = IndexedHeap()
        """Tenants; the one with the most chunks for its weight is first."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._kept

    def get_owner(self, chunk: Hashable) -> Hashable | None:
        """The job for which a chunk is kept; None if it is not kept."""
        known = self._kept.get(chunk)
        return None if known is None else known.owner

    def keep(
        self, chunk: Hashable, until_s: float, tenant: str, end: int, owner: Hashable | None = None
    ) -> list[Hashable]:
        """Keep a chunk. Returns the chunks that lose their place for it, maybe this one.

        A chunk keeps a later deadline that it has. `end`: where it ends in its sequence. `owner`: the job.
        """
        known = self._kept.get(chunk)
        if known is not None and known.until_s >= until_s:
            return []
        if known is not None:
            self.discard(chunk)
        self._number += 1
        self._kept[chunk] = _Kept(until_s, tenant, owner)
        self._count(tenant, 1)
        own = self._by_tenant.setdefault(tenant, [])
        heapq.heappush(own, (until_s, -end, self._number, chunk))
        heapq.heappush(self._by_end, (until_s, self._number, chunk))
        if len(own) > max(MIN_HEAP, 2 * self._counts[tenant]):
            own[:] = sorted({each[3]: each for each in own if self._is_current(each[3], each[0])}.values())
        if len(self._by_end) > max(MIN_HEAP, 2 * len(self._kept)):
            current = {each[2]: each for each in self._by_end if self._is_current(each[2], each[0])}
            self._by_end = sorted(current.values())
        lost = []
        while len(self._kept) > self.max_chunks:
            lost.append(self._pop_of(str(self._most.get_first())))
        return lost

    def discard(self, chunk: Hashable) -> None:
        """Stop keeping a chunk."""
        known = self._kept.pop(chunk, None)
        if known is not None:
            self._count(known.tenant, -1)

    def expire(self, now_s: float) -> Iterator[Hashable]:
        """Stop keeping the chunks whose deadline has passed, and return them."""
        while self._by_end and self._by_end[0][0] <= now_s:
            until_s, _, chunk = heapq.heappop(self._by_end)
            if self._is_current(chunk, until_s):
                self.discard(chunk)
                yield chunk

    def clear(self) -> None:
        """Stop keeping all chunks."""
        for each in (self._kept, self._by_end, self._by_tenant, self._counts):
            each.clear()
        self._most = IndexedHeap()

    def _pop_of(self, tenant: str) -> Hashable:
        own = self._by_tenant[tenant]
        while True:
            until_s, _, _, chunk = heapq.heappop(own)
            known = self._kept.get(chunk)
            if known is not None and (known.until_s, known.tenant) == (until_s, tenant):
                self.discard(chunk)
                return chunk

    def _is_current(self, chunk: Hashable, until_s: float) -> bool:
        known = self._kept.get(chunk)
        return known is not None and known.until_s == until_s

    def _count(self, tenant: str, change: int) -> None:
        number = self._counts[tenant] = self._counts.get(tenant, 0) + change
        if number:
            self._most.push(tenant, (-number / float(self.weights.get(tenant, 1.0)),))
        else:
            self._most.discard(tenant)
            del self._counts[tenant]
            self._by_tenant.pop(tenant, None)
