"""Offloading block by block, as vLLM's OffloadingConnector does it with Tenuto's host memory.

The layers may differ. What a turn loads ends where all layer groups can go on. Each kind of layers accepts a
length or shortens it:

    full attention    ├── GPU hit ──┤ loaded ···············│   from its first chunk on
    window                                 ├─ loaded ───────│   its last chunks before the end
    state                                            │loaded│   the last one

A turn stores each block with full attention as it computes it. Of a window it stores what vLLM's interval
wants kept of every request: its prompt's end and where prompts part, at the default of 0. A state is stored
when the GPU caches it. Stores wait while a load is under way, and while many are queued.

Source: OffloadingConnectorScheduler in
vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py@0.32.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Sequence

from tenuto.core.errors import ConfigError
from tenuto.core.tier_order import MAX_STORING_S, Use
from tenuto.core.types import LoadOffer
from tenuto.sim.kv.checkpoints import Checkpoints
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request, StateTable, Status
from tenuto.sim.tiers.group_layout import GroupLayout
from tenuto.sim.tiers.grouped_tiers import GroupedTiers, Place
from tenuto.sim.tiers.offloader import Offload, Offloader
from tenuto.sim.tiers.tier import OffloadTiers


class GroupedOffloader(Offloader):
    """Copies between one engine's blocks and its tiers, where each chunk is a block of one layer group."""

    takes_whole_prompts = False

    def __init__(self, tiers: OffloadTiers, kv: KvCache, offload: Offload, *, chunk_tokens: int) -> None:
        """Raises ConfigError for what vLLM has not on such models: LMCache's modes, and larger chunks."""
        config = kv.config
        if offload in ("sync", "serial"):
            raise ConfigError(
                f"offload {offload} is LMCache 0.3.7, which has full attention only; these layers differ"
            )
        if chunk_tokens != config.block_size:
            raise ConfigError(
                "where layers differ, tiers hold single blocks: offload_chunk_tokens must be "
                f"{config.block_size}, not {chunk_tokens}"
            )
        # Which of a lease's blocks are worth storing is not known group by group, so all turns are stored.
        super().__init__(tiers.tiers, "async", chunk_blocks=1)
        self._tiers = GroupedTiers(tiers.tiers, len(config.windows))
        self._pool = kv.pool
        self._layout = layout = GroupLayout(config)
        self._checkpoints = [
            _make_checkpoints(config, window, size)
            for window, size in zip(layout.windows, layout.sizes, strict=True)
        ]
        self._loading: list[tuple[float, int, frozenset[Hashable]]] = []
        self._numbers = itertools.count()
        self._stored_by_s = 0.0
        self._ended: list[tuple[Request, list[Place], Use]] = []
        self._ended_s = 0.0
        self._holds_back = False

    # Loads.

    def get_offer(self, request: Request, num_hit_tokens: int, now_s: float) -> LoadOffer | None:
        """What a request that is about to start could load behind its hit; None if nothing.

        It may end inside the prompt's last block: one token at least is left to compute.
        """
        for each in self._layout.get_chunks(request):
            each.num_unseen = None
            each.lost.clear()
        num_tokens = self._layout.find(request, num_hit_tokens, self._tiers) - num_hit_tokens
        if num_tokens <= 0:
            return None
        chunks = [place.chunk for place in self._layout.get_loaded(request, num_hit_tokens, num_tokens)]
        return LoadOffer(num_tokens, self._tiers.get_loaded_s(chunks, now_s) - now_s)

    def choose_part(self, num_hit_tokens: int, num_tokens: int, num_offered: int) -> int:
        """Whole blocks; all or nothing where layers differ: at a part's end, a window may not be there."""
        if num_tokens >= num_offered:
            return num_offered
        if self._layout.windows != [None]:
            return 0
        (size,) = self._layout.sizes
        return max(0, (num_hit_tokens + num_tokens) // size * size - num_hit_tokens)

    def must_wait(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> bool:
        """Whether some of what it would load is just being loaded: soon the GPU has it."""
        self._end_loads(now_s)
        if not self._loading:
            return False
        chunks = {place.chunk for place in self._layout.get_wanted(request, num_hit_tokens, num_tokens)}
        return any(not chunks.isdisjoint(loading) for _, _, loading in self._loading)

    def load(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> float:
        """Begin to copy an offer to the GPU; returns when that ends, in seconds."""
        places = self._layout.get_loaded(request, num_hit_tokens, num_tokens)
        done_s = self._tiers.load(places, now_s, self._get_use(request, now_s))
        self.num_loaded_tokens += num_tokens
        for chunks, size in zip(self._layout.get_chunks(request), self._layout.sizes, strict=True):
            chunks.num_stored = -(-(num_hit_tokens + num_tokens) // size)
        loading = frozenset(place.chunk for place in places)
        heapq.heappush(self._loading, (done_s, next(self._numbers), loading))
        return done_s

    # Stores.

    def begin_stores(self, requests: Iterable[Request], now_s: float) -> None:
        """Store the states that these requests have cached; decide whether the step's other stores wait."""
        self._end_loads(now_s)
        self._holds_back = bool(self._loading) or self._stored_by_s - now_s > MAX_STORING_S
        requests = list(requests)
        self._forget_hits(requests)
        for request in requests:
            for group in self._layout.states:
                table: StateTable = request.tables[group]
                if request.is_stored:
                    for block in table.new_states:
                        places = self._layout.get_chunks(request)[group].get_places(block, block + 1)
                        self._store(places, now_s, self._get_use(request, now_s))
                table.new_states.clear()

    def store_computed(self, request: Request, now_s: float) -> float:
        """Store what a request that runs has computed; returns when the copy ends, in seconds."""
        if self._holds_back or not request.is_stored:
            return now_s
        places = self._collect_places(request, min(request.num_computed_tokens, request.num_tokens))
        return self._store(places, now_s, self._get_use(request, now_s)) if places else now_s

    def store_finished(self, request: Request, now_s: float) -> None:
        """A request ends: what it has computed last is stored with the next step, as inside vLLM."""
        places: list[Place] = []
        self._ended_s = now_s
        if request.is_stored and request.status is Status.RUNNING:
            # The last token was sampled, but never computed.
            num_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
            places = self._collect_places(request, num_tokens)
        if places or request.tier_use is not None:
            self._ended.append((request, places, self._get_use(request, now_s)))

    def end_stores(self, now_s: float) -> None:
        """Store what ended requests have computed last, and rank all they used by where their jobs stand."""
        for _, places, use in self._ended:
            if places:
                self._store(places, now_s, use)
        for request, _, use in self._ended:
            used: list[Place] = []
            for chunks, size in zip(self._layout.get_chunks(request), self._layout.sizes, strict=True):
                used += chunks.get_places(0, request.num_tokens // size)
            self._tiers.use(used, use)
        self._ended.clear()

    def release_stored(self, now_s: float) -> None:
        """Store what ended requests have computed last, if the engine is idle since: it does not wait."""
        if now_s > self._ended_s:
            self.end_stores(now_s)

    # Inside.

    def _drop(self, job_id: str, now_s: float) -> None:
        self._tiers.drop(job_id, now_s)

    def _collect_places(self, request: Request, num_tokens: int) -> list[Place]:
        """What is to be stored of a request's first tokens, and was not yet."""
        places: list[Place] = []
        for group, (chunks, size) in enumerate(
            zip(self._layout.get_chunks(request), self._layout.sizes, strict=True)
        ):
            first, end = chunks.num_stored, num_tokens // size
            if end <= first:
                continue
            chunks.num_stored = end
            if group in self._layout.states:
                continue
            first = max(first, chunks.num_unseen or 0)
            checkpoints = self._checkpoints[group]
            runs = [(first, end)] if checkpoints is None else checkpoints.get_runs(request, first, end)
            for run in runs:
                for block, place in enumerate(chunks.get_places(*run), start=run[0]):
                    if self._is_there(request, group, block):
                        places.append(place)
        return places

    def _forget_hits(self, requests: Sequence[Request]) -> None:
        """Of a window, give up what is not stored yet and what a request that starts now has hit.

        vLLM takes the blocks of that request's hit for new ones, which others have lost.
        Source: _update_req_states.
        """
        hits = set[Hashable]()
        others: list[Request] = []
        for request in requests:
            groups = self._layout.get_chunks(request)
            if groups[0].num_unseen is not None:
                others.append(request)
                continue
            for group, (chunks, table) in enumerate(zip(groups, request.tables, strict=True)):
                chunks.num_unseen = 0 if group in self._layout.states else table.num_nulls
                if group in self._layout.windowed and not request.num_loaded_tokens:
                    end = request.num_computed_tokens // self._layout.sizes[group]
                    hits.update(chunks.get(end)[chunks.num_unseen : end])
        if not hits:
            return
        for request in others:
            for group in self._layout.windowed:
                chunks = self._layout.get_chunks(request)[group]
                end = -(-request.num_computed_tokens // self._layout.sizes[group])
                known = chunks.get(end)
                chunks.lost |= {n for n in range(chunks.num_stored, end) if known[n] in hits}
        self._ended = [
            (request, [each for each in places if each.needs_before or each.chunk not in hits], use)
            for request, places, use in self._ended
        ]

    def _is_there(self, request: Request, group: int, block: int) -> bool:
        """Whether a block is its request's still, or was given back but not to another one."""
        if block in self._layout.get_chunks(request)[group].lost:
            return False
        if block >= request.tables[group].num_nulls:
            return True
        return bool(self._pool.find(request.paths[group], group, block, block + 1))

    def _store(self, places: Sequence[Place], now_s: float, use: Use) -> float:
        new, done_s = self._tiers.store(places, now_s, use)
        # A token counts once, whatever the number of groups.
        counted = self._layout.lookup_order[0]
        num_new = sum(place.group == counted and place.chunk in new for place in places)
        self.num_stored_tokens += num_new * self._layout.sizes[counted]
        self._stored_by_s = max(self._stored_by_s, done_s)
        return done_s

    def _end_loads(self, now_s: float) -> None:
        while self._loading and self._loading[0][0] <= now_s:
            heapq.heappop(self._loading)


def _make_checkpoints(config: KvConfig, window: int | None, size: int) -> Checkpoints | None:
    """Which blocks of a group are stored; None for all."""
    full = {
        size for layers, size in zip(config.windows, config.group_block_sizes, strict=True) if layers is None
    }
    alignment = max(full or config.group_block_sizes)
    if window is None or len(full) > 1 or alignment % size:
        return None
    return Checkpoints(window, size, config.retention_interval, alignment)
