"""Host memory as vLLM ships it: its OffloadingConnector with its own order, without Tenuto.

The connector decides as in `grouped_offload`. The difference is below it. A store evicts the least recently
used chunks, even if others continue them. If there are too few, the store is not made, and the connector
tries again with the next step. No store waits for a load.

Order of eviction by release:

    0.32    while a request runs, its first stored chunks (head)    ─► after its end, its tail first
    0.33    while a request runs, its tail                          ─► after its end, its tail first

Source: vllm/v1/kv_offload/cpu/manager.py and policies/lru.py, both releases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tenuto.core.driver import Driver
from tenuto.core.errors import ConfigError
from tenuto.core.policy import Key
from tenuto.core.tier_order import Rank, Use
from tenuto.core.types import Turn
from tenuto.core.wishes import Wish
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request
from tenuto.sim.tiers.grouped_offload import GroupedOffloader, GroupedTiers, Place
from tenuto.sim.tiers.tier import NOBODY, OffloadTiers, Tier


@dataclass
class _Access:
    """The chunks that one request has used."""

    number: int | None = None
    """The rank of its chunks while it runs (0.33)."""
    places: dict[Hashable, Place] = field(default_factory=dict)


class NativeTiers(GroupedTiers):
    """Host memory in the order of vLLM's LRUCachePolicy. A use's key is the name of its request."""

    def __init__(self, tier: Tier, num_groups: int, *, tail_first: bool) -> None:
        """`tail_first`: whether chunks of a running request are evicted from its tail, too (0.33)."""
        super().__init__([tier], num_groups)
        self._order = tier.order
        self._tail_first = tail_first
        self._accesses: dict[Key, _Access] = {}
        self._storing: deque[tuple[float, list[Hashable]]] = deque()
        self._unready = set[Hashable]()
        """Chunks that are being stored. Other requests cannot use them yet."""
        self.num_failed = 0
        """Stores that were not made, because too few chunks could be evicted for them."""

    def hit_length(self, chunks: Sequence[Hashable], first: int) -> int:
        """The number of chunks present from number `first` on. Chunks before it may be missing."""
        end = first
        while end < len(chunks) and chunks[end] in self._order:
            end += 1
        return end - first

    def load(self, places: Sequence[Place], now_s: float, use: Use) -> float:
        """Copy present chunks to the GPU. Returns the time at which that ends."""
        self._end_stores(now_s)
        return super().load(places, now_s, use)

    def store(self, places: Sequence[Place], now_s: float, use: Use) -> tuple[set[Hashable], float]:
        """Copy the missing ones of these chunks, or none. Returns them, and when the copy ends."""
        self._end_stores(now_s)
        new, done_s = super().store(places, now_s, use)
        self._unready |= new
        self._storing.append((done_s, list(new)))
        return new, done_s

    def use(self, places: Sequence[Place], use: Use) -> None:
        """A request has ended: all its chunks count as used now, the tail first."""
        access = self._accesses.pop(use.key, None)
        if access is None:
            return
        for place in sorted(access.places.values(), key=lambda each: (-each.end, -each.group)):
            if place.chunk in self._order:
                self._rank(place, ((), self._order.begin_use(), 0), use)

    def _end_stores(self, now_s: float) -> None:
        while self._storing and self._storing[0][0] <= now_s:
            self._unready.difference_update(self._storing.popleft()[1])

    def _take(self, tier: Tier, places: Sequence[Place], use: Use) -> list[Hashable]:
        order = self._order
        access = self._accesses.setdefault(use.key, _Access())
        self._record([each for each in places if each.chunk not in self._unready], access, use)
        new = [each for each in places if each.chunk not in order]
        num_short = len(new) - (tier.capacity_chunks - len(order))
        if order.try_pop(num_short, {each.chunk for each in places}) is None:
            self.num_failed += 1
            return []
        for place in new:
            self._rank(place, self._get_rank(place, access) or ((), order.begin_use(), 0), use)
        return [each.chunk for each in new]

    def _record(self, places: Sequence[Place], access: _Access, use: Use) -> None:
        """Count a request's use of these chunks. Only its first use of each chunk counts."""
        places = [each for each in places if each.chunk not in access.places]
        access.places.update((each.chunk, each) for each in places)
        for place in places:
            rank = self._get_rank(place, access)
            if rank is not None and place.chunk in self._order and self._order.get_rank(place.chunk) < rank:
                self._rank(place, rank, use)

    def _get_rank(self, place: Place, access: _Access) -> Rank | None:
        """The rank of a chunk that a running request uses; None if that does not rank it."""
        if not self._tail_first:
            return None
        if access.number is None:
            access.number = self._order.begin_use()
        return ((), access.number, -place.end, place.group)

    def _rank(self, place: Place, rank: Rank, use: Use) -> None:
        owner = None if use.owner is None else (use.owner, place.group)
        self._order.put(place.chunk, place.before, rank, owner=owner, needs_before=False)


class NativeOffloader(GroupedOffloader):
    """Copies between one engine's blocks and vLLM's own host memory, where the policy decides nothing."""

    _yields = False

    def __init__(self, tiers: OffloadTiers, kv: KvCache) -> None:
        """Raises ConfigError for a disk."""
        if len(tiers.tiers) > 1:
            raise ConfigError("offload native is simulated with host memory only, without a disk")
        super().__init__(tiers, kv)
        self._tiers = self._native = NativeTiers(
            tiers.tiers[0], len(kv.config.windows), tail_first=kv.config.vllm_release != "0.32"
        )

    def follow(self, driver: Driver) -> None:
        """Report to this driver what is stored and held. Its policy ranks nothing here."""
        super().follow(driver)
        self._is_ordered = False

    def leave(self, request: Request, turn: Turn | None, now_s: float) -> None:
        """A request ends. vLLM stores what an aborted one has computed, too."""
        super().leave(request, turn, now_s)
        request.is_stored = True

    def store_computed(self, request: Request, now_s: float) -> float:
        """Store what a running request has computed. What could not be stored is tried again."""
        groups, num_failed = self._layout.get_chunks(request), self._native.num_failed
        before = [chunks.num_stored for chunks in groups]
        done_s = super().store_computed(request, now_s)
        if self._native.num_failed > num_failed:
            for chunks, num_stored in zip(groups, before, strict=True):
                chunks.num_stored = num_stored
        return done_s

    def _get_use(self, request: Request, now_s: float) -> Use:
        use = super()._get_use(request, now_s)
        return Use((request.turn_id,)) if use is NOBODY else use

    def _make_use(self, turn: Turn, now_s: float, wish: Wish | None) -> Use:
        # vLLM's own host memory knows neither policies nor wishes.
        return Use((turn.turn_id,), turn.job.job_id)
