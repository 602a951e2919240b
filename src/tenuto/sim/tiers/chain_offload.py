"""Offloading in chunks of a whole prefix, with full attention: as in LMCache, or as a policy asks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from tenuto.core.tier_order import Use
from tenuto.core.types import LoadOffer, Turn
from tenuto.core.wishes import Wish
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.pool import Row, skip_to
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.tiers.offloader import Offload, Offloader
from tenuto.sim.tiers.tier import NOBODY, Chunk, Chunks, OffloadTiers, Place, Tier


class ChainOffloader(Offloader):
    """Copies between one engine's blocks and its tiers, with full attention.

    blocks    │ 0 1 2 3 │ 4 5 6 7 │ 8 9 …      here 4 blocks a chunk
    chunks    │    0    │    1    │            only whole chunks are stored and loaded
    """

    stores_answers = False

    def __init__(self, tiers: Sequence[Tier], kv: KvCache, offload: Offload, *, chunk_blocks: int) -> None:
        """`chunk_blocks`: blocks per chunk of the tiers."""
        super().__init__(OffloadTiers(tiers), offload, chunk_blocks)
        self._kv = kv
        self._pool = kv.pool
        self._chunk_tokens = chunk_blocks * kv.config.block_size
        self._numbers = itertools.count()
        self.stores: list[tuple[float, int, Row]] = []
        """Blocks that wait for the end of their store, the earliest end first."""

    # Loads.

    def get_offer(self, request: Request, num_hit_tokens: int, now_s: float) -> LoadOffer | None:
        """What a request that is about to start could load after its hit; None if nothing.

        tokens    │ hit from GPU   │ offer            │ rest │      at least one token is left to compute
        chunks    │    0    │    1    │    2    │   3 │      │      the first may be partly hit already
        """
        own, size = self._get_chunks(request), self._chunk_tokens
        own.num_stored = 0
        first, last = num_hit_tokens // size, (request.num_tokens - 1) // size
        chunks = own.get(last)[:last]
        end = first + self._tiers.hit_length(chunks, first)
        num_tokens = end * size - num_hit_tokens
        if num_tokens <= 0:
            return None
        return LoadOffer(num_tokens, self._tiers.get_loaded_s(chunks[first:end], now_s) - now_s)

    def choose_part(self, num_hit_tokens: int, num_tokens: int, num_offered: int) -> int:
        """The number of offered tokens that are loaded. The load ends with a whole chunk."""
        return (num_hit_tokens + num_tokens) // self._chunk_tokens * self._chunk_tokens - num_hit_tokens

    def load(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> float:
        """Begin to copy an offer, or its first tokens, to the GPU; returns when that ends, in seconds."""
        size = self._chunk_tokens
        first, last = num_hit_tokens // size, (num_hit_tokens + num_tokens) // size
        own = self._get_chunks(request)
        # Some may be gone since the offer, because a lease that gave way was stored.
        end = first + self._tiers.hit_length(own.get(last)[:last], first)
        use = self._get_use(request, now_s)
        if self.is_sync:
            self._tiers.use(own.get_places(0, first), use)
        done_s = self._tiers.load(own.get_places(first, end), now_s, use)
        self.num_loaded_tokens += num_tokens
        self._report_held(now_s)
        own.num_stored = last
        return done_s

    # Stores.

    def store_computed(self, request: Request, now_s: float) -> float:
        """Store the computed part of a request's prompt. Returns the time at which the copy ends."""
        if not self._stores_all or not request.is_stored:
            return now_s
        num_chunks = min(request.num_computed_tokens, request.num_prompt_tokens) // self._chunk_tokens
        own = self._get_chunks(request)
        first, own.num_stored = own.num_stored, max(own.num_stored, num_chunks)
        if num_chunks <= first:
            return now_s
        places = own.get_places(0 if self.is_sync else first, num_chunks)
        done_s = self._store(places, now_s, self._get_use(request, now_s), request)
        request.stored_s = max(request.stored_s, done_s)
        return done_s

    def store_finished(self, request: Request, now_s: float) -> None:
        """A turn has ended. Store its output too, if the turn is stored. Its blocks stay taken until then."""
        if self.is_sync or request.status is not Status.RUNNING:
            return
        row = self._kv.get_hit(request).rows[0]
        done_s, use = now_s, request.tier_use
        if use is not None:
            own, num_chunks = self._get_chunks(request), len(row) // self._chunk_blocks
            if request.is_stored and self._stores_all:
                done_s = self._store(own.get_places(own.num_stored, num_chunks), now_s, use)
            self._tiers.use(own.get_places(0, num_chunks), use)
            self._report_held(now_s)
        self._hold_until(row, max(done_s, request.stored_s), now_s)

    def release_stored(self, now_s: float) -> None:
        """Free the blocks whose stores are complete by now."""
        while self.stores and self.stores[0][0] <= now_s:
            self._pool.release(heapq.heappop(self.stores)[2])

    def store_asked(self, row: Row, turn: Turn, now_s: float, wish: Wish | None = None) -> None:
        """Store blocks that the policy wants stored. Does nothing if all turns are stored anyway."""
        if not self._stores_all:
            places, use = list(self._get_row_places(row)), self._make_use(turn, now_s, wish)
            self._hold_until(row, self._store(places, now_s, use), now_s)

    # Questions.

    def get_next_stored_s(self) -> float | None:
        """The end of the next store that blocks wait for; None if no block waits."""
        return self.stores[0][0] if self.stores else None

    # Inside.

    def _get_use(self, request: Request, now_s: float) -> Use:
        """LMCache ranks by recency, and nobody owns its chunks."""
        return NOBODY if self.is_sync else super()._get_use(request, now_s)

    def _get_chunks(self, request: Request) -> Chunks:
        if not request.chunks:
            request.chunks = (Chunks(request.path, 0, self._chunk_tokens, num_blocks=self._chunk_blocks),)
        own: Chunks = request.chunks[0]
        return own

    def _store(
        self, places: Sequence[Place], now_s: float, use: Use, request: Request | None = None
    ) -> float:
        """Store cached chunks. Returns when the copy is complete."""
        new, done_s = self._tiers.store(places, now_s, use)
        self._count_stored(len(new) * self._chunk_tokens, use, now_s, request)
        return done_s

    def _hold_until(self, row: Row, done_s: float, now_s: float) -> None:
        """Keep blocks taken until their copy ends."""
        if done_s > now_s and row:
            row = Row(row.ranges)
            self._pool.hold(row)
            heapq.heappush(self.stores, (done_s, next(self._numbers), row))

    def _get_row_places(self, row: Row) -> Iterator[Place]:
        before: Chunk | None = None
        last = self._chunk_blocks - 1
        for extent, first, end in row.ranges:
            while last < end:
                extent = skip_to(extent, max(first, last))
                chunk = (0, extent.segment, last)
                yield Place(chunk, before, (last + 1) * self._kv.config.block_size, 0, needs_before=True)
                before, last = chunk, last + self._chunk_blocks
