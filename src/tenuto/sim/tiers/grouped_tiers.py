"""Tiers below the GPU for models whose layers differ: each chunk is one block of one layer group.

    full attention   │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │      every chunk needs the one before it
    window           │   │   │   │ 3 │ 4 │ 5 │      the last ones before a place where hits may end
    state            │   │   │   │   │   │ 5 │      the last one

All blocks have one size in bytes, so all chunks have. What is taken and what goes first is as inside vLLM
(`tenuto.vllm.compat_offload`, `tenuto.vllm.tiers.chunks`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tenuto.core.tier_order import Use
from tenuto.sim.tiers.tier import Tier


class Place(NamedTuple):
    """A chunk, and where it stands in its request."""

    chunk: Hashable
    before: Hashable | None
    """The chunk before it in its layer group; None for the first."""
    end: int
    """Where it ends, in tokens."""
    group: int
    needs_before: bool
    """Whether it is worth nothing without the chunk before it: with full attention."""


class GroupedTiers:
    """Tiers in front of each other, nearest first (see `tenuto.sim.tiers.tier.OffloadTiers`)."""

    def __init__(self, tiers: Sequence[Tier], num_groups: int) -> None:
        self.tiers = tuple(tiers)
        self._num_groups = num_groups

    def __contains__(self, chunk: Hashable) -> bool:
        return any(chunk in tier.order for tier in self.tiers)

    def hit_length(self, chunks: Sequence[Hashable]) -> int:
        """How many chunks of a group with full attention, from its start, some tier has. Changes nothing."""
        return max(tier.hit_length(chunks) for tier in self.tiers)

    def get_loaded_s(self, chunks: Sequence[Hashable], now_s: float) -> float:
        """When `load` would end. Changes nothing."""
        done_s = now_s
        for tier, num_chunks in zip(self.tiers, self._count_crossing(chunks), strict=True):
            done_s = max(done_s, tier.link.get_done_s(num_chunks * tier.chunk_bytes, now_s))
        return done_s

    def load(self, places: Sequence[Place], now_s: float, use: Use) -> float:
        """Copy chunks that are there to the GPU, and to all nearer tiers; returns when that ends."""
        chunks = [place.chunk for place in places]
        chunk_bytes, done_s = self.tiers[0].chunk_bytes, now_s
        for tier, num_chunks in zip(self.tiers, self._count_crossing(chunks), strict=True):
            done_s = max(done_s, tier.link.transfer(num_chunks * chunk_bytes, now_s))
        for tier in self.tiers:
            tier.end_copies(now_s)
            _put(tier, places, use)
            tier.hold([chunk for chunk in chunks if chunk in tier.order], done_s)
        return done_s

    def store(self, places: Sequence[Place], now_s: float, use: Use) -> tuple[set[Hashable], float]:
        """Copy to each tier what it lacks of these chunks; returns that, and when the last copy ends."""
        stored, done_s = set[Hashable](), now_s
        for tier in self.tiers:
            tier.end_copies(now_s)
            new = _put(tier, places, use)
            stored.update(new)
            stored_s = tier.link.transfer(len(new) * tier.chunk_bytes, now_s)
            tier.hold(new, stored_s)
            done_s = max(done_s, stored_s)
        return stored, done_s

    def use(self, places: Sequence[Place], use: Use) -> None:
        """What tiers have of these chunks was used."""
        for tier in self.tiers:
            _put(tier, [place for place in places if place.chunk in tier.order], use)

    def drop(self, job_id: str, now_s: float) -> None:
        """Give up what only this job used, but for what is being copied."""
        for tier in self.tiers:
            tier.end_copies(now_s)
            for group in range(self._num_groups):
                tier.order.drop((job_id, group))

    def _count_crossing(self, chunks: Sequence[Hashable]) -> list[int]:
        """How many of these chunks cross each tier's link: those that no nearer tier has."""
        counts, left = [], list(chunks)
        for tier in self.tiers:
            counts.append(len(left))
            left = [chunk for chunk in left if chunk not in tier.order]
        return counts


def _put(tier: Tier, places: Sequence[Place], use: Use) -> list[Hashable]:
    """Use what a tier has of these chunks, and let it take what it may; returns that."""
    order = tier.order
    number = order.begin_use()

    def put(place: Place) -> None:
        owner = None if use.owner is None else (use.owner, place.group)
        rank = (use.key, number, -place.end, place.group)
        order.put(place.chunk, place.before, rank, owner=owner, needs_before=place.needs_before)

    for place in places:
        if place.chunk in order:
            put(place)
    befores = [place.before if place.needs_before else None for place in places]
    chunks = [place.chunk for place in places]
    new = order.make_way(chunks, befores, use.key, tier.capacity_chunks - len(order)).new
    taken = set(new)
    for place in places:
        if place.chunk in taken:
            put(place)
    return new
