"""Tiers below the GPU: what they hold, and how long copies to and from them take.

A tier holds chunks of equal size (LMCache: 256 tokens) by their chained prefix hashes, so requests with a
common prefix share chunks. Time is virtual: callers pass `now_s`, and get the time at which a copy ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tenuto.core.errors import ConfigError
from tenuto.core.tier_order import TierOrder, Use
from tenuto.sim.kv.pool import Path, Segment

Chunk = tuple[int, Segment, int]
"""A chunk's chained hash: its layer group, and the segment and the number of its last block."""
NOBODY = Use()
"""A use that ranks by recency alone."""


class Link:
    """A channel that loads and stores share, first come first served. `now_s` must never decrease.

    The engine submits copies to one stream, and a copy engine works through a stream in order. Both
    directions share the bandwidth, although PCIe has lanes for each: on an A100 a load falls to 11 GB/s
    beside a store at 25 GB/s (NVIDIA/nvbandwidth issue 53).
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at_s = 0.0

    def get_done_s(self, num_bytes: int, now_s: float) -> float:
        """The time at which a copy that is queued now would end. Changes nothing."""
        if num_bytes == 0:
            return now_s
        return max(now_s, self.free_at_s) + num_bytes / self.bytes_per_s + self.latency_s

    def transfer(self, num_bytes: int, now_s: float) -> float:
        """Queue a copy and return when it will end; copying nothing ends at once.

        Latency delays a copy but does not occupy the link: the next copy starts meanwhile.
        """
        if num_bytes == 0:
            return now_s
        self.free_at_s = max(now_s, self.free_at_s) + num_bytes / self.bytes_per_s
        return self.free_at_s + self.latency_s


class Place(NamedTuple):
    """A chunk, and its place in its request."""

    chunk: Hashable
    before: Hashable | None
    """The chunk before it in its layer group; None for the first."""
    end: int
    """Its end in tokens."""
    group: int
    needs_before: bool
    """Whether it is of no use without the chunk before it, as with full attention."""


class Tier:
    """A store of chunks with a capacity in bytes, and the link to it. It evicts in the order of `TierOrder`.

    A chunk is evicted only after the chunks that continue it. So the chunks of a sequence that are present
    are its first ones, and their number is found in O(log n).
    """

    def __init__(self, name: str, capacity_bytes: int, chunk_bytes: int, link: Link) -> None:
        """Raises ConfigError if a size is not positive, or not one chunk fits."""
        if not 0 < chunk_bytes <= capacity_bytes:
            raise ConfigError(
                f"tier {name!r}: chunks of {chunk_bytes} bytes do not fit {capacity_bytes} bytes"
            )
        self.name = name
        self.chunk_bytes = chunk_bytes
        self.capacity_chunks = capacity_bytes // chunk_bytes
        self.link = link
        self.order = TierOrder()
        self._numbers = itertools.count()
        self._copies: list[tuple[float, int, Sequence[Hashable]]] = []

    def __len__(self) -> int:
        return len(self.order)

    def hit_length(self, chunks: Sequence[Hashable]) -> int:
        """With full attention: how many of a sequence's first chunks are here. Changes nothing."""
        low = 0
        probe = high = len(chunks)  # often all are present
        while low < high:
            if chunks[probe - 1] in self.order:
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low

    def put(self, places: Sequence[Place], use: Use) -> list[Hashable]:
        """Use the chunks that are here, and store missing ones if allowed. Returns the stored ones."""
        order = self.order
        number = order.begin_use()

        def put(place: Place) -> None:
            owner = None if use.owner is None else (use.owner, place.group)
            rank = (use.key, number, -place.end, place.group)
            order.put(place.chunk, place.before, rank, owner=owner, needs_before=place.needs_before)
            if use.wished and (until_s := use.get_kept_until_s(place.end)):
                order.keep(place.chunk, until_s, use.tenant, place.end)

        for place in places:
            if place.chunk in order:
                put(place)
        befores = [place.before if place.needs_before else None for place in places]
        chunks = [place.chunk for place in places]
        new = order.make_room(chunks, befores, use.key, self.capacity_chunks - len(order)).new
        taken = set(new)
        for place in places:
            if place.chunk in taken:
                put(place)
        return new

    def hold(self, chunks: Sequence[Hashable], until_s: float) -> None:
        """Do not evict these chunks before a copy of them ends."""
        for chunk in chunks:
            self.order.pin(chunk)
        heapq.heappush(self._copies, (until_s, next(self._numbers), chunks))

    def end_copies(self, now_s: float) -> None:
        """Allow the eviction of chunks that were copied or kept until now."""
        self.order.expire(now_s)
        while self._copies and self._copies[0][0] <= now_s:
            for chunk in heapq.heappop(self._copies)[2]:
                self.order.unpin(chunk)


class OffloadTiers:
    """Tiers from near to far, as LMCache and vLLM's offloading connectors use them.

    A store goes to every tier. A load takes each chunk from the nearest tier that has it. Chunks from a far
    tier pass through all nearer links at the same time, so the busiest link decides. They are then also kept
    in the nearer tiers.

        GPU  ◄── link ──►  host  ◄── link ──►  disk
    """

    def __init__(self, tiers: Sequence[Tier], num_groups: int = 1) -> None:
        """`tiers`: nearest first, with chunks of one size. `num_groups`: layer groups of the model."""
        self.tiers = tuple(tiers)
        self._num_groups = num_groups

    def __contains__(self, chunk: Hashable) -> bool:
        return any(chunk in tier.order for tier in self.tiers)

    def hit_length(self, chunks: Sequence[Hashable], first: int = 0) -> int:
        """With full attention: how many chunks in a row from `first` on some tier has. Changes nothing."""
        return max(0, max(tier.hit_length(chunks) for tier in self.tiers) - first)

    def get_loaded_s(self, chunks: Sequence[Hashable], now_s: float) -> float:
        """The time at which `load` would end. Changes nothing."""
        done_s = now_s
        for tier, num_chunks in zip(self.tiers, self._count_crossing(chunks), strict=True):
            done_s = max(done_s, tier.link.get_done_s(num_chunks * tier.chunk_bytes, now_s))
        return done_s

    def load(self, places: Sequence[Place], now_s: float, use: Use) -> float:
        """Copy present chunks to the GPU and to all nearer tiers. Returns the time at which that ends."""
        chunks = [place.chunk for place in places]
        chunk_bytes, done_s = self.tiers[0].chunk_bytes, now_s
        for tier, num_chunks in zip(self.tiers, self._count_crossing(chunks), strict=True):
            done_s = max(done_s, tier.link.transfer(num_chunks * chunk_bytes, now_s))
        for tier in self.tiers:
            tier.end_copies(now_s)
            self._take(tier, places, use)
            tier.hold([chunk for chunk in chunks if chunk in tier.order], done_s)
        return done_s

    def store(self, places: Sequence[Place], now_s: float, use: Use) -> tuple[set[Hashable], float]:
        """Copy to each tier the chunks that it lacks. Returns them, and when the last copy ends."""
        stored, done_s = set[Hashable](), now_s
        for tier in self.tiers:
            tier.end_copies(now_s)
            new = self._take(tier, places, use)
            stored.update(new)
            stored_s = tier.link.transfer(len(new) * tier.chunk_bytes, now_s)
            tier.hold(new, stored_s)
            done_s = max(done_s, stored_s)
        return stored, done_s

    def use(self, places: Sequence[Place], use: Use) -> None:
        """Count a use of these chunks in each tier that has them."""
        for tier in self.tiers:
            self._take(tier, [place for place in places if place.chunk in tier.order], use)

    def drop(self, job_id: str, now_s: float) -> None:
        """Drop chunks that only this job used, except those that are being copied."""
        for tier in self.tiers:
            tier.end_copies(now_s)
            for group in range(self._num_groups):
                tier.order.drop((job_id, group))

    def _count_crossing(self, chunks: Sequence[Hashable]) -> list[int]:
        """The number of these chunks that cross each tier's link: those that no nearer tier has."""
        counts, left = [], list(chunks)
        for tier in self.tiers:
            counts.append(len(left))
            left = [chunk for chunk in left if chunk not in tier.order]
        return counts

    def _take(self, tier: Tier, places: Sequence[Place], use: Use) -> list[Hashable]:
        return tier.put(places, use)


class Chunks:
    """The chunks of one request in one layer group."""

    def __init__(
        self, path: Path, group: int, size: int, *, needs_before: bool = True, num_blocks: int = 1
    ) -> None:
        """`path`: the request's, in blocks of the group. A chunk has `size` tokens in `num_blocks` blocks."""
        self._path = path
        self._group = group
        self._size = size
        self._num_blocks = num_blocks
        self._needs_before = needs_before
        self._chunks: list[Chunk] = []
        self.num_stored = 0
        """Number of first chunks that were stored, loaded, or will never be stored."""
        self.num_unseen: int | None = None
        """Blocks before its window when it started; None before it starts."""
        self.lost: set[int] = set()
        """Blocks that are not stored, because vLLM assumes that other requests have them."""

    def get(self, num_chunks: int) -> Sequence[Chunk]:
        """At least the first `num_chunks` chunks."""
        chunks = self._chunks
        for number in range(len(chunks), num_chunks):
            last = (number + 1) * self._num_blocks - 1
            chunks.append((self._group, self._path.get_segment(last), last))
        return chunks

    def get_places(self, first: int, end: int) -> list[Place]:
        """The places of the chunks from number `first` to before `end`."""
        chunks, size = self.get(end), self._size
        return [
            Place(
                chunks[n],
                chunks[n - 1] if n else None,
                (n + 1) * size,
                self._group,
                needs_before=self._needs_before,
            )
            for n in range(first, end)
        ]
