"""Offloading in chunks of a whole prefix, with full attention: as in LMCache, or as a policy asks."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator
from operator import itemgetter

from tenuto.core.tier_order import Use
from tenuto.core.types import LoadOffer, Turn
from tenuto.core.wishes import Wish
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.pool import Row, Segment, skip_to
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.tiers.offloader import Offload, Offloader
from tenuto.sim.tiers.tier import NOBODY, OffloadTiers

Chunk = tuple[Segment, int]
"""A chunk's chained hash: the segment and the number of its last block."""


class ChainOffloader(Offloader):
    """Copies between one engine's blocks and its tiers, with full attention.

    blocks    │ 0 1 2 3 │ 4 5 6 7 │ 8 9 …      here 4 blocks a chunk
    chunks    │    0    │    1    │            only whole chunks are stored and loaded
    """

    stores_answers = False

    def __init__(self, tiers: OffloadTiers, kv: KvCache, offload: Offload, *, chunk_blocks: int) -> None:
        """`chunk_blocks`: blocks per chunk of the tiers."""
        super().__init__(tiers.tiers, offload, chunk_blocks)
        self._tiers = tiers
        self._kv = kv
        self._pool = kv.pool
        self._block_size = kv.config.block_size
        self._chunk_tokens = chunk_blocks * self._block_size
        for tier in tiers.tiers:
            tier.chunk_tokens = self._chunk_tokens
        self.stores: list[tuple[float, Row]] = []
        """Blocks that wait for the end of their store, the earliest end first."""

    # Loads.

    def get_offer(self, request: Request, num_hit_tokens: int, now_s: float) -> LoadOffer | None:
        """What a request that is about to start could load after its hit; None if nothing.

        tokens    │ hit from GPU   │ offer            │ rest │      at least one token is left to compute
        chunks    │    0    │    1    │    2    │   3 │      │      the first may be partly hit already
        """
        num_chunks = (request.num_tokens - 1) // self._chunk_tokens
        skip = num_hit_tokens // self._chunk_tokens
        if num_chunks <= skip:
            return None
        chunks = self._get_chunks(request, num_chunks)[:num_chunks]
        chunks = chunks[: self._tiers.hit_length(chunks)]
        num_tokens = len(chunks) * self._chunk_tokens - num_hit_tokens
        if num_tokens <= 0:
            return None
        return LoadOffer(num_tokens, self._tiers.get_loaded_s(chunks, now_s, skip) - now_s)

    def choose_part(self, num_hit_tokens: int, num_tokens: int, num_offered: int) -> int:
        """The number of offered tokens that are loaded. The load ends with a whole chunk."""
        return (num_hit_tokens + num_tokens) // self._chunk_tokens * self._chunk_tokens - num_hit_tokens

    def load(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> float:
        """Begin to copy an offer, or its first tokens, to the GPU; returns when that ends, in seconds."""
        num_chunks = (num_hit_tokens + num_tokens) // self._chunk_tokens
        skip = num_hit_tokens // self._chunk_tokens
        chunks = self._get_chunks(request, num_chunks)[:num_chunks]
        done_s = self._tiers.load(chunks, now_s, skip, *self._get_rank(request, skip, now_s))
        self.num_loaded_tokens += num_tokens
        self._report_held(now_s)
        request.num_stored_chunks = num_chunks
        return done_s

    # Stores.

    def store_computed(self, request: Request, now_s: float) -> float:
        """Store the computed part of a request's prompt. Returns the time at which the copy ends."""
        if not self._stores_all or not request.is_stored:
            return now_s
        num_chunks = min(request.num_computed_tokens, request.num_prompt_tokens) // self._chunk_tokens
        first = request.num_stored_chunks
        if num_chunks <= first:
            return now_s
        request.num_stored_chunks = num_chunks
        chunks = self._get_chunks(request, num_chunks)
        done_s = self._store(chunks, now_s, *self._get_rank(request, first, now_s), num_chunks, request)
        request.stored_s = max(request.stored_s, done_s)
        return done_s

    def store_finished(self, request: Request, now_s: float) -> None:
        """A turn has ended. Store its output too, if the turn is stored. Its blocks stay taken until then."""
        if self.is_sync or request.status is not Status.RUNNING:
            return
        row = self._kv.get_hit(request).rows[0]
        done_s, use = now_s, request.tier_use
        if use is not None:
            num_chunks = len(row) // self._chunk_blocks
            chunks = self._get_chunks(request, num_chunks)[:num_chunks]
            if request.is_stored and self._stores_all:
                done_s = self._store(chunks, now_s, use, request.num_stored_chunks)
            self._tiers.use(chunks, use)
            self._report_held(now_s)
        self._hold_until(row, max(done_s, request.stored_s), now_s)

    def release_stored(self, now_s: float) -> None:
        """Free the blocks whose stores are complete by now."""
        while self.stores and self.stores[0][0] <= now_s:
            self._pool.release(self.stores.pop(0)[1])

    def store_asked(self, row: Row, turn: Turn, now_s: float, wish: Wish | None = None) -> None:
        """Store blocks that the policy wants stored. Does nothing if all turns are stored anyway."""
        if not self._stores_all:
            chunks, use = list(self._get_row_chunks(row)), self._make_use(turn, now_s, wish)
            self._hold_until(row, self._store(chunks, now_s, use, 0), now_s)

    # Questions.

    def get_next_stored_s(self) -> float | None:
        """The end of the next store that blocks wait for; None if no block waits."""
        return self.stores[0][0] if self.stores else None

    # Inside.

    def _drop(self, job_id: str, now_s: float) -> None:
        self._tiers.drop(job_id, now_s)

    def _get_rank(self, request: Request, first: int, now_s: float) -> tuple[Use, int]:
        """The rank of a request's chunks, and the first number with this rank. LMCache ranks by recency."""
        return (NOBODY, 0) if self.is_sync else (self._get_use(request, now_s), first)

    def _store(
        self,
        chunks: list[Chunk],
        now_s: float,
        use: Use,
        first: int,
        end: int | None = None,
        request: Request | None = None,
    ) -> float:
        """Store cached chunks from `first` to before `end`. Returns when the copy is complete."""
        num_stored, done_s = self._tiers.store(chunks, now_s, use, first, end)
        self._count_stored(num_stored * self._chunk_tokens, use, now_s, request)
        return done_s

    def _hold_until(self, row: Row, done_s: float, now_s: float) -> None:
        """Keep blocks taken until their copy ends."""
        if done_s > now_s and row:
            row = Row(row.ranges)
            self._pool.hold(row)
            insort(self.stores, (done_s, row), key=itemgetter(0))

    def _get_chunks(self, request: Request, num_chunks: int) -> list[Chunk]:
        """A request's chunks, at least this many."""
        chunks, size = request.chunks, self._chunk_blocks
        if num_chunks <= len(chunks):
            return chunks
        last = (len(chunks) + 1) * size - 1
        for segment, _, stop in request.path.get_ranges(last, num_chunks * size):
            chunks += zip(itertools.repeat(segment), range(last, stop, size), strict=False)
            last = (len(chunks) + 1) * size - 1
        return chunks

    def _get_row_chunks(self, row: Row) -> Iterator[Chunk]:
        last = self._chunk_blocks - 1
        for extent, first, end in row.ranges:
            while last < end:
                extent = skip_to(extent, max(first, last))
                yield extent.segment, last
                last += self._chunk_blocks
