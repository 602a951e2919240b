"""KV cache tiers behind the GPU: what they hold, and how long copies to and from them take.

A tier keeps chunks of equal size (LMCache: 256 tokens) under chained prefix hashes, so requests with a
common prefix share its chunks. Time is virtual: every call is given `now_s` and returns completion times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tenuto.core.errors import ConfigError


class Link:
    """A channel that loads and stores share, first come first served.

    First come first served because the engine submits copies to one stream, and a copy engine works
    through a stream in order. Both directions share the bandwidth although PCIe has a lane for each: on an
    A100 a load falls to 11 GB/s beside a store at 25 (NVIDIA/nvbandwidth issue 53). `now_s` must not go back.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        """A free link.

        Raises:
            ConfigError: the bandwidth is not positive, or the latency negative.
        """
        if bytes_per_s <= 0 or latency_s < 0:
            raise ConfigError(
                f"a link needs positive bytes_per_s and no negative latency_s: {bytes_per_s}, {latency_s}"
            )
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at_s = 0.0

    def get_done_s(self, num_bytes: int, now_s: float) -> float:
        """When a copy that is queued now would be complete. Changes nothing."""
        if num_bytes == 0:
            return now_s
        return max(now_s, self.free_at_s) + num_bytes / self.bytes_per_s + self.latency_s

    def transfer(self, num_bytes: int, now_s: float) -> float:
        """Queue a copy and return when it will be complete; copying nothing is complete at once.

        Latency delays a copy but does not occupy the link: copies behind it start meanwhile.
        """
        if num_bytes == 0:
            return now_s
        self.free_at_s = max(now_s, self.free_at_s) + num_bytes / self.bytes_per_s
        return self.free_at_s + self.latency_s


class Tier:
    """A store of chunks with a byte capacity that evicts the least recently used, and the link to it.

    A chunk is never evicted before the chunks that continue it: every use touches a sequence from its end
    to its start. So the chunks of a sequence that are present are always a prefix of it, and are found in
    O(log n).
    """

    def __init__(self, name: str, capacity_bytes: int, chunk_bytes: int, link: Link) -> None:
        """An empty tier.

        Raises:
            ConfigError: a size is not positive, or not one chunk fits.
        """
        if not 0 < chunk_bytes <= capacity_bytes:
            raise ConfigError(
                f"tier {name!r}: chunks of {chunk_bytes} bytes do not fit {capacity_bytes} bytes"
            )
        self.name = name
        self.chunk_bytes = chunk_bytes
        self.capacity_chunks = capacity_bytes // chunk_bytes
        self.link = link
        self._by_use: OrderedDict[Hashable, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._by_use)

    def hit_length(self, chunks: Sequence[Hashable]) -> int:
        """How many chunks of a sequence, from its start, are present. Changes nothing."""
        low, high = 0, len(chunks)
        while low < high:
            middle = (low + high + 1) // 2
            if chunks[middle - 1] in self._by_use:
                low = middle
            else:
                high = middle - 1
        return low

    def put(self, chunks: Sequence[Hashable]) -> int:
        """Hold a sequence's chunks, as many from its start as fit; returns how many were not present."""
        fitting = chunks[: self.capacity_chunks]
        num_new = len(fitting) - self.hit_length(fitting)
        for chunk in reversed(fitting):
            self._by_use[chunk] = None
            self._by_use.move_to_end(chunk)
        while len(self._by_use) > self.capacity_chunks:
            self._by_use.popitem(last=False)
        return num_new


@dataclass(frozen=True)
class Copy:
    """What one load or store moves, and when it is complete."""

    num_chunks: int
    num_bytes: int
    done_s: float


class OffloadTiers:
    """Tiers from near to far, as LMCache and vLLM's offloading connectors use them.

    Stores go to every tier. A load takes each chunk from the nearest tier that has it; chunks from a far
    tier pass all nearer links as they come, so the busiest link decides, and stay in the nearer tiers.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Tiers in front of each other, nearest first (host, then disk).

        Raises:
            ConfigError: there is no tier, or their chunks differ in size.
        """
        if len({tier.chunk_bytes for tier in tiers}) != 1:
            raise ConfigError(
                f"tiers need one chunk size, got {[(tier.name, tier.chunk_bytes) for tier in tiers]}"
            )
        self.tiers = tuple(tiers)

    def hit_length(self, chunks: Sequence[Hashable]) -> int:
        """How many chunks of a sequence, from its start, some tier has. Changes nothing."""
        return max(tier.hit_length(chunks) for tier in self.tiers)

    def get_loaded_s(self, chunks: Sequence[Hashable], now_s: float, skip: int = 0) -> float:
        """When `load` would be complete. Changes nothing."""
        num_hit, nearer_hit, done_s = self.hit_length(chunks), skip, now_s
        for tier in self.tiers:
            num_bytes = max(0, num_hit - nearer_hit) * tier.chunk_bytes
            done_s = max(done_s, tier.link.get_done_s(num_bytes, now_s))
            nearer_hit = max(nearer_hit, tier.hit_length(chunks))
        return done_s

    def load(self, chunks: Sequence[Hashable], now_s: float, skip: int = 0) -> Copy:
        """Bring what the tiers have of a sequence to the GPU, which has its first `skip` chunks already."""
        num_hit = self.hit_length(chunks)
        if num_hit <= skip:
            return Copy(0, 0, now_s)
        chunk_bytes = self.tiers[0].chunk_bytes
        nearer_hit, done_s = skip, now_s
        for tier in self.tiers:
            # A chunk that a nearer tier has does not cross this link.
            done_s = max(done_s, tier.link.transfer((num_hit - nearer_hit) * chunk_bytes, now_s))
            nearer_hit = max(nearer_hit, tier.hit_length(chunks))
        for tier in self.tiers:
            tier.put(chunks[:num_hit])
        return Copy(num_hit - skip, (num_hit - skip) * chunk_bytes, done_s)

    def store(self, chunks: Sequence[Hashable], now_s: float) -> Copy:
        """Copy what each tier lacks of a sequence to it; complete when the farthest copy is."""
        chunk_bytes = self.tiers[0].chunk_bytes
        num_stored, done_s = 0, now_s
        for tier in self.tiers:
            num_new = tier.put(chunks)
            num_stored = max(num_stored, num_new)
            done_s = max(done_s, tier.link.transfer(num_new * chunk_bytes, now_s))
        return Copy(num_stored, num_stored * chunk_bytes, done_s)
