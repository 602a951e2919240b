"""Tiers below the GPU: what they hold, and how long copies to and from them take.

A tier holds chunks of equal size (LMCache: 256 tokens) by their chained prefix hashes, so requests with a
common prefix share chunks. Time is virtual: callers pass `now_s`, and get the time at which a copy ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Sequence
from operator import itemgetter

from tenuto.core.errors import ConfigError
from tenuto.core.tier_order import TierOrder, Use

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
        self.chunk_tokens = 1
        """Tokens of a chunk of one sequence."""
        self._copies: list[tuple[float, Sequence[Hashable]]] = []
        """Chunks that are being copied, the earliest end first."""

    def __len__(self) -> int:
        return len(self.order)

    def hit_length(self, chunks: Sequence[Hashable], first: int = 0, end: int | None = None) -> int:
        """How many of a sequence's chunks before `end` are here; the first `first` are. Changes nothing."""
        low = first
        probe = high = len(chunks) if end is None else end  # often all are present
        while low < high:
            if chunks[probe - 1] in self.order:
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low

    def put(
        self, chunks: Sequence[Hashable], use: Use = NOBODY, first: int = 0, end: int | None = None
    ) -> Sequence[Hashable]:
        """Use a sequence's chunks from `first` to before `end`, and store missing ones if allowed.

        Returns the stored ones.
        """
        order = self.order
        if first and chunks[first - 1] not in order:
            return ()
        end = len(chunks) if end is None else end
        num_hit = self.hit_length(chunks, first, end)
        num_new = end - num_hit
        num_short = num_new - (self.capacity_chunks - len(order))
        if num_short > 0:
            # All new chunks follow the last one that is here.
            num_new -= num_short - len(order.pop_firsts(num_short, use.key, chunks[num_hit - 1 : num_hit]))
        order.use(chunks, use.key, use.owner, first, num_hit + num_new)
        if use.wished:
            for place in range(num_hit + num_new):
                self.keep(chunks[place], (place + 1) * self.chunk_tokens, use)
        return chunks[num_hit : num_hit + num_new]

    def keep(self, chunk: Hashable, end: int, use: Use) -> None:
        """Evict a chunk last for as long as its user wishes. `end`: its end in tokens."""
        until_s = use.get_kept_until_s(end)
        if until_s:
            self.order.keep(chunk, until_s, use.tenant, end)

    def hold(self, chunks: Sequence[Hashable], until_s: float) -> None:
        """Do not evict these chunks before a copy of them ends."""
        for chunk in chunks:
            self.order.pin(chunk)
        insort(self._copies, (until_s, chunks), key=itemgetter(0))

    def end_copies(self, now_s: float) -> None:
        """Allow the eviction of chunks that were copied or kept until now."""
        self.order.expire(now_s)
        while self._copies and self._copies[0][0] <= now_s:
            for chunk in self._copies.pop(0)[1]:
                self.order.unpin(chunk)


class OffloadTiers:
    """Tiers from near to far, as LMCache and vLLM's offloading connectors use them.

    A store goes to every tier. A load takes each chunk from the nearest tier that has it. Chunks from a far
    tier pass through all nearer links at the same time, so the busiest link decides. They are then also kept
    in the nearer tiers.

        GPU  ◄── link ──►  host  ◄── link ──►  disk
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """`tiers`: nearest first, with chunks of one size."""
        self.tiers = tuple(tiers)

    def hit_length(self, chunks: Sequence[Hashable]) -> int:
        """The number of chunks from a sequence's start that some tier has. Changes nothing."""
        return max(tier.hit_length(chunks) for tier in self.tiers)

    def get_loaded_s(self, chunks: Sequence[Hashable], now_s: float, skip: int = 0) -> float:
        """The time at which `load` would end. Changes nothing."""
        num_hit, nearer_hit, done_s = self.hit_length(chunks), skip, now_s
        for tier in self.tiers:
            num_bytes = max(0, num_hit - nearer_hit) * tier.chunk_bytes
            done_s = max(done_s, tier.link.get_done_s(num_bytes, now_s))
            nearer_hit = max(nearer_hit, tier.hit_length(chunks))
        return done_s

    def load(
        self, chunks: Sequence[Hashable], now_s: float, skip: int = 0, use: Use = NOBODY, first: int = 0
    ) -> float:
        """Copy present chunks to the GPU, but not the first `skip`. Those from `first` on count as used.

        Returns the time at which that ends.
        """
        self._end_copies(now_s)
        num_hit = self.hit_length(chunks)
        if num_hit <= skip:
            return now_s
        chunk_bytes = self.tiers[0].chunk_bytes
        nearer_hit, done_s = skip, now_s
        for tier in self.tiers:
            # A chunk that a nearer tier has does not cross this link.
            done_s = max(done_s, tier.link.transfer((num_hit - nearer_hit) * chunk_bytes, now_s))
            nearer_hit = max(nearer_hit, tier.hit_length(chunks))
        for tier in self.tiers:
            tier.put(chunks, use, first, num_hit)
            # A chunk is not evicted before those that continue it.
            num_held = tier.hit_length(chunks, end=num_hit)
            tier.hold(chunks[max(skip, num_held - 1) : num_held], done_s)
        return done_s

    def store(
        self,
        chunks: Sequence[Hashable],
        now_s: float,
        use: Use = NOBODY,
        first: int = 0,
        end: int | None = None,
    ) -> tuple[int, float]:
        """Copy chunks from `first` to before `end` to the tiers that lack them.

        Returns the number of chunks that some tier lacked, and when the last copy ends.
        """
        self._end_copies(now_s)
        num_stored, done_s = 0, now_s
        for tier in self.tiers:
            new = tier.put(chunks, use, first, end)
            num_stored = max(num_stored, len(new))
            stored_s = tier.link.transfer(len(new) * tier.chunk_bytes, now_s)
            tier.hold(new[-1:], stored_s)
            done_s = max(done_s, stored_s)
        return num_stored, done_s

    def use(self, chunks: Sequence[Hashable], use: Use) -> None:
        """Count a use of these chunks in each tier that has them."""
        for tier in self.tiers:
            tier.put(chunks, use, end=tier.hit_length(chunks))

    def drop(self, job_id: str, now_s: float) -> None:
        """Drop chunks that only this job used, except those that are being copied."""
        self._end_copies(now_s)
        for tier in self.tiers:
            tier.order.drop(job_id)

    def _end_copies(self, now_s: float) -> None:
        for tier in self.tiers:
            tier.end_copies(now_s)
