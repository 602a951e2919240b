"""The chunks of a request in each layer group, and up to where a load finds all that it needs.

Source: OffloadingConnectorScheduler in
vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py@0.32.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tenuto.core.windows import STATE, count_loaded_blocks, get_window
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.request import Request
from tenuto.sim.tiers.grouped_tiers import GroupedTiers, Place


class GroupChunks:
    """The chunks of one request in one layer group: its blocks."""

    def __init__(self, request: Request, group: int, size: int, *, needs_before: bool) -> None:
        """`size`: tokens in a block."""
        self._path = request.paths[group]
        self._group = group
        self._size = size
        self._needs_before = needs_before
        self._chunks: list[Hashable] = []
        self.num_stored = 0
        """Chunks that were stored, loaded, or passed over for good."""
        self.num_unseen: int | None = None
        """Blocks that its window had left behind when it started; None before it starts."""
        self.lost: set[int] = set()
        """Blocks that are not stored, because vLLM takes them for given to others."""

    def get(self, num_chunks: int) -> Sequence[Hashable]:
        """The first chunks, or some more."""
        chunks = self._chunks
        for block in range(len(chunks), num_chunks):
            chunks.append((self._group, self._path.get_segment(block), block))
        return chunks

    def get_places(self, first: int, end: int) -> list[Place]:
        """Where the chunks from number `first` to before `end` stand."""
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


class GroupLayout:
    """The layer groups of a model, as its tiers see them."""

    def __init__(self, config: KvConfig) -> None:
        self.sizes = config.group_block_sizes
        """Tokens in a block of each group."""
        self.windows = [get_window(layers) for layers in config.windows]
        """Each group's window in tokens; None for full attention."""
        self.states = [group for group, layers in enumerate(config.windows) if layers == STATE]
        """The groups with states."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        self.windowed = sorted(windowed, key=lambda group: -self._count_window_chunks(group))
        """The groups with windows or states, the widest window first."""
        self.lookup_order = (*full, *self.windowed)
        """The groups as they are asked: full attention, then from the widest window on."""

    def find(self, request: Request, num_hit_tokens: int, tiers: GroupedTiers) -> int:
        """Up to where all layer groups can load behind a hit, in tokens; the hit itself, or less, if nowhere.

        Source: _lookup_complete_chunks. A group may shorten what others found, and then is asked again.
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
        """How many chunks of those from `first` to before `last` a load may end with in one group."""
        chunks = self.get_chunks(request)[group].get(last)
        if self.windows[group] is None:
            return tiers.hit_length(chunks[:last]) - first
        # A window's last chunk may be needed in part only; then one more at its start may be needed.
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
        """Chunks of a window, or of a state, that a load which ends at token `end` must find."""
        window, size = self.windows[group], self.sizes[group]
        assert window is not None
        if group in self.states:
            return 1
        return max(-(-window // size), -(-(window - 1 + -end % size) // size))

    def get_loaded(self, request: Request, num_hit_tokens: int, num_tokens: int) -> list[Place]:
        """The chunks that a load copies: of a window and of a state only what is still seen from its end."""
        places: list[Place] = []
        end = num_hit_tokens + num_tokens
        for chunks, window, size in zip(self.get_chunks(request), self.windows, self.sizes, strict=True):
            last = -(-end // size)
            num_loaded = count_loaded_blocks(window, size, num_hit_tokens, end)
            places += chunks.get_places(last - num_loaded, last)
        return places

    def get_wanted(self, request: Request, num_hit_tokens: int, num_tokens: int) -> list[Place]:
        """The chunks that were looked up for a load; of windows a few more than are loaded."""
        places: list[Place] = []
        end = num_hit_tokens + num_tokens
        for group, (chunks, size) in enumerate(zip(self.get_chunks(request), self.sizes, strict=True)):
            first, last = num_hit_tokens // size, -(-end // size)
            if self.windows[group] is not None:
                first = max(first, last - self._count_window_chunks(group, end))
            places += chunks.get_places(first, last)
        return places

    def get_chunks(self, request: Request) -> Sequence[GroupChunks]:
        """A request's chunks in each group."""
        if not request.group_chunks:
            request.group_chunks = tuple(
                GroupChunks(request, group, size, needs_before=window is None)
                for group, (size, window) in enumerate(zip(self.sizes, self.windows, strict=True))
            )
        return request.group_chunks
