"""Offloading block by block, as vLLM's OffloadingConnector does it with Tenuto's host memory.

The model may be hybrid. A turn's load ends where all layer groups can continue. Each kind of layers accepts a
length or shortens it:

    full attention    ├── GPU hit ──┤ loaded ···············│   from its first chunk on
    window                                 ├─ loaded ───────│   its last chunks before the end
    state                                            │loaded│   the last one

A turn stores each block with full attention when it is computed. Of a window it stores the blocks that vLLM's
retention interval keeps: at the default of 0, where its prompt ends and where prompts differ. A state is
stored when the GPU caches it. Stores wait during a load, and while many stores are queued.

Source: OffloadingConnectorScheduler in
vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py@0.32.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from tenuto.core.tier_order import MAX_STORING_S, Use
from tenuto.core.types import LoadOffer
from tenuto.core.windows import STATE, count_loaded_blocks, get_window
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.groups import Checkpoints, StateTable
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.pool import Extent
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.tiers.offloader import Offloader
from tenuto.sim.tiers.tier import OffloadTiers, Tier


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


class GroupedTiers:
    """Tiers, nearest first (see `tenuto.sim.tiers.tier.OffloadTiers`)."""

    def __init__(self, tiers: Sequence[Tier], num_groups: int) -> None:
        self.tiers = tuple(tiers)
        self._num_groups = num_groups

    def __contains__(self, chunk: Hashable) -> bool:
        return any(chunk in tier.order for tier in self.tiers)

    def hit_length(self, chunks: Sequence[Hashable], first: int) -> int:
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
        """Use a tier's copies of these chunks, and let it store missing ones if allowed; return these."""
        order = tier.order
        number = order.begin_use()

        def put(place: Place) -> None:
            owner = None if use.owner is None else (use.owner, place.group)
            rank = (use.key, number, -place.end, place.group)
            order.put(place.chunk, place.before, rank, owner=owner, needs_before=place.needs_before)
            if use.wished:
                tier.keep(place.chunk, place.end, use)

        for place in places:
            if place.chunk in order:
                put(place)
        befores = [place.before if place.needs_before else None for place in places]
        chunks = [place.chunk for place in places]
        new = order.make_room(chunks, befores, use.key, tier.capacity_chunks - len(order)).new
        taken = set(new)
        for place in places:
            if place.chunk in taken:
                put(place)
        return new


class GroupChunks:
    """The chunks of one request in one layer group: its blocks."""

    def __init__(self, request: Request, group: int, size: int, window: int | None) -> None:
        """`size`: tokens in a block. `window`: in tokens; None for full attention."""
        self.size = size
        self.window = window
        self._path = request.paths[group]
        self._group = group
        self._chunks: list[Hashable] = []
        self.num_stored = 0
        """Number of first chunks that were stored, loaded, or will never be stored."""
        self.num_unseen: int | None = None
        """Blocks before its window when it started; None before it starts."""
        self.lost: set[int] = set()
        """Blocks that are not stored, because vLLM assumes that other requests have them."""

    def get(self, num_chunks: int) -> Sequence[Hashable]:
        """At least the first `num_chunks` chunks."""
        chunks = self._chunks
        for block in range(len(chunks), num_chunks):
            chunks.append((self._group, self._path.get_segment(block), block))
        return chunks

    def get_places(self, first: int, end: int) -> list[Place]:
        """The places of the chunks from number `first` to before `end`."""
        chunks, size, is_full = self.get(end), self.size, self.window is None
        return [
            Place(chunks[n], chunks[n - 1] if n else None, (n + 1) * size, self._group, needs_before=is_full)
            for n in range(first, end)
        ]


class GroupLayout:
    """The layer groups of a model, as its tiers see them."""

    def __init__(self, config: KvConfig) -> None:
        self.sizes = config.group_block_sizes
        """Tokens in a block of each group."""
        self.windows = [get_window(layers) for layers in config.windows]
        """Each group's window in tokens; None for full attention."""
        self.states = [group for group, layers in enumerate(config.windows) if layers == STATE]
        self.sliding = [group for group, layers in enumerate(config.windows) if layers not in (None, STATE)]
        """The groups with windows of tokens."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        self.windowed = sorted(windowed, key=lambda group: -self._count_window_chunks(group))
        """The groups with windows or states, the widest window first."""
        self.lookup_order = (*full, *self.windowed)
        """The groups in the order of look-ups: full attention, then the widest window first."""

    def find(self, request: Request, num_hit_tokens: int, tiers: GroupedTiers) -> int:
        """The end of what all layer groups can load after a hit, in tokens; at most the hit if nothing.

        Source: _lookup_complete_chunks. If a group shortens the result, the others are asked again.
        """
        start, end = num_hit_tokens, request.num_tokens
        if self.windowed:
            end -= 1
        if self.states:
            end -= end % self.sizes[self.states[0]]
        previous = 0
        groups: Sequence[int] = self.lookup_order
        while groups:
            asks_again, has_asked_window = False, False
            for group in groups:
                size = self.sizes[group]
                num_whole = request.num_tokens // size
                end = min(end, num_whole * size)
                if end - start < size:
                    return start
                first, last = start // size, min(-(-end // size), num_whole)
                num_found = self._count_found(request, tiers, group, first, last, end)
                end = min(end, (first + num_found) * size)
                if num_found == 0 or end - start < size:
                    return start
                asks_again |= end - start < previous and has_asked_window
                has_asked_window |= self.windows[group] is not None
                previous = end - start
            groups = self.windowed if asks_again else ()
        return end

    def _count_found(
        self, request: Request, tiers: GroupedTiers, group: int, first: int, last: int, end: int
    ) -> int:
        """The number of chunks from `first` to before `last` after which a load may end in one group."""
        chunks = self.get_chunks(request)[group].get(last)
        if self.windows[group] is None:
            return tiers.hit_length(chunks[:last], first)
        # If only a part of a window's last chunk is needed, one more chunk at its start may be needed.
        wanted = self._count_window_chunks(group, min(end, last * self.sizes[group]))
        num_in_a_row = 0
        for number in range(last - 1, first - 1, -1):
            if chunks[number] in tiers:
                num_in_a_row += 1
            else:
                num_in_a_row = 0
                wanted = self._count_window_chunks(group)
            if num_in_a_row == wanted:
                return number + wanted - first
        return num_in_a_row

    def _count_window_chunks(self, group: int, end: int = 0) -> int:
        """Number of chunks of a window or a state that a load to token `end` needs."""
        window, size = self.windows[group], self.sizes[group]
        assert window is not None
        if group in self.states:
            return 1
        return max(-(-window // size), -(-(window - 1 + -end % size) // size))

    def get_loaded(self, request: Request, num_hit_tokens: int, num_tokens: int) -> list[Place]:
        """The chunks that a load copies; of a window or a state only those that its end still covers."""
        places: list[Place] = []
        end = num_hit_tokens + num_tokens
        for chunks in self.get_chunks(request):
            last = -(-end // chunks.size)
            num_loaded = count_loaded_blocks(chunks.window, chunks.size, num_hit_tokens, end)
            places += chunks.get_places(last - num_loaded, last)
        return places

    def get_wanted(self, request: Request, num_hit_tokens: int, num_tokens: int) -> list[Place]:
        """The chunks that were looked up for a load: for windows a few more than are loaded."""
        places: list[Place] = []
        end = num_hit_tokens + num_tokens
        for group, chunks in enumerate(self.get_chunks(request)):
            first, last = num_hit_tokens // chunks.size, -(-end // chunks.size)
            if chunks.window is not None:
                first = max(first, last - self._count_window_chunks(group, end))
            places += chunks.get_places(first, last)
        return places

    def get_chunks(self, request: Request) -> Sequence[GroupChunks]:
        """A request's chunks in each group."""
        if not request.group_chunks:
            request.group_chunks = tuple(
                GroupChunks(request, group, size, window)
                for group, (size, window) in enumerate(zip(self.sizes, self.windows, strict=True))
            )
        return request.group_chunks


class GroupedOffloader(Offloader):
    """Copies between one engine's blocks and its tiers, where each chunk is a block of one layer group."""

    takes_whole_prompts = False
    _yields = True
    """Whether stores wait for loads, and while many are queued."""

    def __init__(self, tiers: OffloadTiers, kv: KvCache) -> None:
        config = kv.config
        # It is not known by group which of a lease's blocks are worth storing, so all turns are stored.
        super().__init__(tiers.tiers, "async", chunk_blocks=1)
        self._tiers = GroupedTiers(tiers.tiers, len(config.windows))
        self._pool = kv.pool
        self._layout = layout = GroupLayout(config)
        # A turn that resumes after a preemption offers again what it stored before.
        self._offers_again = config.vllm_release != "0.32"
        self._checkpoints = [
            _make_checkpoints(config, window, size)
            for window, size in zip(layout.windows, layout.sizes, strict=True)
        ]
        self._loading: list[tuple[float, frozenset[Hashable]]] = []
        """Loads: when each ends, and its chunks."""
        self._stored_by_s = 0.0
        self._ended: list[tuple[Request, int, Use]] = []
        self._ended_s = 0.0
        self._holds_back = False
        self._hits: dict[Hashable, Extent] = {}
        """Blocks of windows that requests which start or load in this step have hit."""

    # Loads.

    def get_offer(self, request: Request, num_hit_tokens: int, now_s: float) -> LoadOffer | None:
        """What a request that is about to start could load after its hit; None if nothing.

        Where windows slide it leaves the last token of the prompt, so it may end inside a block. With full
        attention it may be the whole prompt, of which the last token is computed again.
        """
        for each in self._layout.get_chunks(request):
            each.num_unseen = None
            each.lost.clear()
            if self._offers_again:
                each.num_stored = 0
        num_tokens = self._layout.find(request, num_hit_tokens, self._tiers) - num_hit_tokens
        if num_tokens <= 0:
            return None
        chunks = [place.chunk for place in self._layout.get_loaded(request, num_hit_tokens, num_tokens)]
        return LoadOffer(num_tokens, self._tiers.get_loaded_s(chunks, now_s) - now_s)

    def choose_part(self, num_hit_tokens: int, num_tokens: int, num_offered: int) -> int:
        """Whole blocks. Hybrid models load all or nothing: a window may be missing at the end of a part."""
        if num_tokens >= num_offered:
            return num_offered
        if self._layout.windows != [None]:
            return 0
        (size,) = self._layout.sizes
        return max(0, (num_hit_tokens + num_tokens) // size * size - num_hit_tokens)

    def must_wait(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> bool:
        """Whether a part of what it would load is being loaded now, so that the GPU will have it soon."""
        self._end_loads(now_s)
        if not self._loading:
            return False
        chunks = {place.chunk for place in self._layout.get_wanted(request, num_hit_tokens, num_tokens)}
        return any(not chunks.isdisjoint(loading) for _, loading in self._loading)

    def load(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> float:
        """Begin to copy an offer to the GPU; returns when that ends, in seconds."""
        places = self._layout.get_loaded(request, num_hit_tokens, num_tokens)
        done_s = self._tiers.load(places, now_s, self._get_use(request, now_s))
        self.num_loaded_tokens += num_tokens
        self._report_held(now_s)
        for chunks in self._layout.get_chunks(request):
            chunks.num_stored = -(-(num_hit_tokens + num_tokens) // chunks.size)
        self._loading.append((done_s, frozenset(place.chunk for place in places)))
        self._note_hits(request)
        return done_s

    # Stores.

    def begin_stores(self, requests: Sequence[Request], loaded: Iterable[Request], now_s: float) -> None:
        """Store the states that these requests have cached; decide whether the step's other stores wait."""
        self._end_loads(now_s)
        is_busy = bool(self._loading) or self._stored_by_s - now_s > MAX_STORING_S
        self._holds_back = self._yields and is_busy
        self._forget_hits(requests)
        for request in (*requests, *loaded):
            for group in self._layout.states:
                table: StateTable = request.tables[group]
                if request.is_stored:
                    for block in table.new_states:
                        places = self._layout.get_chunks(request)[group].get_places(block, block + 1)
                        self._store(places, now_s, self._get_use(request, now_s))
                table.new_states.clear()

    def store_computed(self, request: Request, now_s: float) -> float:
        """Store what a running request has computed. Returns the time at which the copy ends."""
        if self._holds_back or not request.is_stored:
            return now_s
        places = self._collect_places(request, min(request.num_computed_tokens, request.num_tokens))
        return self._store(places, now_s, self._get_use(request, now_s)) if places else now_s

    def store_finished(self, request: Request, now_s: float) -> None:
        """A request ends. Its latest computed blocks are stored with the next step, as inside vLLM."""
        num_tokens, self._ended_s = 0, now_s
        if request.is_stored and request.status is Status.RUNNING:
            # The last token was sampled but never computed. An aborted prompt may be computed in part.
            num_stable = max(request.num_prompt_tokens, request.num_tokens - 1)
            num_tokens = min(request.num_computed_tokens, num_stable)
        if num_tokens or request.tier_use is not None:
            self._ended.append((request, num_tokens, self._get_use(request, now_s)))

    def end_stores(self, now_s: float) -> None:
        """Store the latest blocks of ended requests, and rank all their chunks by their jobs' states."""
        for request, num_tokens, use in self._ended:
            if places := self._collect_places(request, num_tokens):
                self._store(places, now_s, use)
        for request, _, use in self._ended:
            used: list[Place] = []
            for chunks in self._layout.get_chunks(request):
                used += chunks.get_places(0, request.num_tokens // chunks.size)
            self._tiers.use(used, use)
        self._ended.clear()
        self._report_held(now_s)

    def release_stored(self, now_s: float) -> None:
        """Store the latest blocks of ended requests if the engine is idle, instead of waiting for a step."""
        if now_s > self._ended_s:
            self.end_stores(now_s)

    # Inside.

    def _drop(self, job_id: str, now_s: float) -> None:
        self._tiers.drop(job_id, now_s)

    def _collect_places(self, request: Request, num_tokens: int) -> list[Place]:
        """The chunks of a request's first tokens that are to be stored and were not stored yet."""
        places: list[Place] = []
        for group, chunks in enumerate(self._layout.get_chunks(request)):
            first, end = chunks.num_stored, num_tokens // chunks.size
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
        """In windows, skip unstored blocks that a request which starts or loads now has hit.

        vLLM treats the blocks of that request's hit as new ones, which other requests have lost. Source:
        _update_req_states.
        """
        others = [request for request, _, _ in self._ended]
        for request in requests:
            groups = self._layout.get_chunks(request)
            if groups[0].num_unseen is not None:
                others.append(request)
                continue
            for group, (chunks, table) in enumerate(zip(groups, request.tables, strict=True)):
                chunks.num_unseen = 0 if group in self._layout.states else table.num_nulls
            self._note_hits(request)
        hits, self._hits = self._hits, {}
        for request in others if hits else ():
            for group in self._layout.sliding:
                chunks = self._layout.get_chunks(request)[group]
                end = -(-request.num_computed_tokens // chunks.size)
                known, table = chunks.get(end), request.tables[group]
                extents = table.row.get_extents()
                for n in range(chunks.num_stored, end):
                    # If the GPU has the block twice, the hit may be the other copy.
                    is_freed = not table.num_nulls <= n < table.num_blocks
                    if known[n] in hits and (is_freed or extents.get(n) is hits[known[n]]):
                        chunks.lost.add(n)

    def _note_hits(self, request: Request) -> None:
        for group in self._layout.sliding:
            chunks = self._layout.get_chunks(request)[group]
            end = request.num_computed_tokens // chunks.size
            known, extents = chunks.get(end), request.tables[group].row.get_extents()
            self._hits.update((known[n], extent) for n, extent in extents.items() if n < end)

    def _is_there(self, request: Request, group: int, block: int) -> bool:
        """Whether a block still belongs to its request, or was freed and has no other owner yet.

        vLLM does not ask this of the blocks with full attention of a request that has ended.
        """
        if block in self._layout.get_chunks(request)[group].lost:
            return False
        is_over = request.status is Status.FINISHED and group in self._layout.windowed
        if block >= request.tables[group].num_nulls and not is_over:
            return True
        return bool(self._pool.find(request.paths[group], group, block, block + 1))

    def _store(self, places: Sequence[Place], now_s: float, use: Use) -> float:
        new, done_s = self._tiers.store(places, now_s, use)
        # A token counts once, for any number of groups.
        counted = self._layout.lookup_order[0]
        num_new = sum(place.group == counted and place.chunk in new for place in places)
        self._count_stored(num_new * self._layout.sizes[counted], use, now_s)
        self._stored_by_s = max(self._stored_by_s, done_s)
        return done_s

    def _end_loads(self, now_s: float) -> None:
        self._loading = [load for load in self._loading if load[0] > now_s]


def _make_checkpoints(config: KvConfig, window: int | None, size: int) -> Checkpoints | None:
    """The places of the blocks of a group that are stored; None for all blocks."""
    full = {
        size for layers, size in zip(config.windows, config.group_block_sizes, strict=True) if layers is None
    }
    alignment = max(full or config.group_block_sizes)
    if window is None or len(full) > 1 or alignment % size:
        return None
    return Checkpoints(window, size, config.retention_interval, alignment)
