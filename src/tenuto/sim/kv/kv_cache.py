"""The KV cache of the simulated engine: prefix hits, block tables and slots for new tokens.

Models may mix full attention with sliding windows and recurrent states. Each layer group has its own blocks;
all have one size in bytes and come from one pool. The tokens of a request, from its start:

    ├── hit ──┼── loaded ──┼───────────── new ─────────────┼── lookahead ──┤
    │ from GPU│ from a tier│ computed in this step         │ slots only    │
    ├── num_computed_tokens┤                               │ for a drafter │

Source: vllm/v1/core/kv_cache_manager.py and kv_cache_coordinator.py@0.32.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from tenuto.core.errors import ConfigError
from tenuto.core.windows import (
    STATE,
    Layers,
    choose_checkpoint_tokens,
    count_skipped_blocks,
    count_tail_blocks,
    get_checkpoints,
    get_window,
)
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.groups import AttentionGroup, BlockTable, StateGroup
from tenuto.sim.kv.pool import ExtentPool, Path, Span
from tenuto.sim.kv.request import Hit, Request, Status


class KvCache:
    """The blocks of all requests, and prefix hits."""

    def __init__(self, config: KvConfig, max_in_flight_tokens: int, *, keeps_ends: bool = False) -> None:
        """An empty cache.

        `max_in_flight_tokens`: most tokens that scheduled, unprocessed steps may have. `keeps_ends`: let
        running requests keep the blocks that `cache_ends` needs, if there is room.
        """
        self.config = config
        self.pool = ExtentPool(config.num_blocks - 1, len(config.windows))
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self._block_size = config.hash_block_size
        self._num_lookahead_tokens = config.num_lookahead_tokens
        self.can_truncate = config.windows == (None,)
        """Whether block i of a request always holds tokens i·size to (i+1)·size: full attention only."""
        self.holds_whole_prompts = False
        """Whether a turn that has loaded KV has the blocks of its whole prompt: see `Offloader`."""
        self._sizes = config.group_block_sizes
        self._alignment = config.hit_alignment
        self._windows = [get_window(layers) for layers in config.windows]
        kinds: dict[tuple[Layers, int], list[int]] = {}
        for group, kind in enumerate(zip(config.windows, self._sizes, strict=True)):
            kinds.setdefault(kind, []).append(group)
        self._full = [groups for (layers, _), groups in kinds.items() if layers is None]
        self._others = {kind: groups for kind, groups in kinds.items() if kind[0] is not None}
        self._groups = self._make_groups(max_in_flight_tokens)
        self._state_groups = [group for group in self._groups if isinstance(group, StateGroup)]
        if keeps_ends:
            self._keep_ends()

    def begin_step(self) -> None:
        """The next step is about to be scheduled."""
        for group in self._state_groups:
            group.begin_step()

    def enter(self, request: Request) -> None:
        """Give a new request its place in the content tree. Raises ConfigError if it can never run here."""
        num_tokens = request.num_prompt_tokens + request.max_tokens
        num_blocks, limit = self.count_most_blocks(num_tokens), self.config.max_model_len
        if request.num_prompt_tokens >= limit:
            raise ConfigError(
                f"turn {request.turn_id}: {request.num_prompt_tokens} prompt tokens, max_model_len is {limit}"
            )
        if num_blocks > self.pool.num_blocks:
            raise ConfigError(
                f"turn {request.turn_id} needs {num_blocks} KV blocks, there are {self.pool.num_blocks}"
            )
        spans = (*request.prompt, request.output)
        request.path, request.paths = self.make_paths(request.key, spans)
        request.tables = tuple(group.make_table() for group in self._groups)
        request.known_hit = None
        request.num_tokens_at_end = min(num_tokens, limit)

    def make_paths(self, key: Hashable, spans: Sequence[Span]) -> tuple[Path, tuple[Path, ...]]:
        """The path of a sequence in blocks of the hashes, and its path in blocks of each layer group."""
        paths: dict[int, Path] = {}
        for size in (self._block_size, *self._sizes):
            if size not in paths:
                paths[size] = Path(self.pool.root, key, spans, size)
        return paths[self._block_size], tuple(paths[size] for size in self._sizes)

    def get_hit(self, request: Request) -> Hit:
        """The longest cached prefix that leaves at least the last token to compute. Changes nothing."""
        # A turn that waits is looked up in every step.
        known, state = request.known_hit, (request.path.subtree.version, request.num_tokens)
        if known is None or known[0] != state:
            known = request.known_hit = state, self.find_hit(request.paths, request.num_tokens - 1)
        return known[1]

    def find_hit(self, paths: Sequence[Path], max_tokens: int) -> Hit:
        """The longest cached prefix of a sequence, at most `max_tokens`. `paths`: its path in each group.

        Each kind of layers accepts a length or shortens it, until all accept it:

            full attention    ├──────────────────────┤          cached from the start
            window            ├──┤      ├──────┤  ├──┤          needs its last blocks before the hit's end
            state             │      │         │   │            needs the one block before it
            hit               ├────────────────┤

        Source: kv_cache_coordinator.py:HybridKVCacheCoordinator.find_longest_cache_hit.
        """
        if self.can_truncate:
            size = self._sizes[0]
            row = self.pool.find(paths[0], 0, 0, max_tokens // size)
            if self.config.drops_last_hit_block:
                del row[max(0, len(row) - 1) :]
            return Hit(len(row) * size, (row,))
        # The first kind of layers has the longest prefix.
        num_tokens, longest = max_tokens, None
        for groups in self._full:
            size = self._sizes[groups[0]]
            end = num_tokens // size
            num_tokens = min(len(self.pool.find(paths[group], group, 0, end)) for group in groups) * size
            num_tokens -= num_tokens % self._alignment
            longest = num_tokens if longest is None else longest
        previous = None
        while num_tokens != previous:
            previous = num_tokens
            for groups in self._others.values():
                num_tokens = self._find_end(paths, groups, num_tokens)
                longest = num_tokens if longest is None else longest
        shared_tokens, short_layers = 0, None
        if longest is not None and longest > num_tokens:
            shared_tokens = longest
            ends = {kind: self._find_end(paths, groups, longest) for kind, groups in self._others.items()}
            short_layers, _ = min(ends, key=lambda kind: ends[kind])
        rows = (
            self.pool.find(path, group, count_skipped_blocks(window, size, num_tokens), num_tokens // size)
            for group, (path, window, size) in enumerate(zip(paths, self._windows, self._sizes, strict=True))
        )
        return Hit(num_tokens, tuple(rows), shared_tokens, short_layers)

    def _find_end(self, paths: Sequence[Path], groups: Sequence[int], max_tokens: int) -> int:
        """The longest prefix, at most `max_tokens`, before whose end these groups have their whole window.

        The start of a sequence is a hit even if it is shorter than the window.
        """
        first_group = groups[0]
        size, window = self._sizes[first_group], self._windows[first_group]
        assert window is not None
        end = max_tokens // size
        runs = self.pool.find_runs(paths[first_group], first_group, end)
        for group in groups[1:]:
            others = self.pool.find_runs(paths[group], group, end)
            common = ((max(a[0], b[0]), min(a[1], b[1])) for a in runs for b in others)
            runs = [run for run in common if run[0] < run[1]]
        num_tail_blocks = count_tail_blocks(window, size)
        num_aligned = self._alignment // size
        for first, last in reversed(runs):
            aligned = last - last % num_aligned
            if aligned > first and (aligned - first >= num_tail_blocks or first == 0):
                return aligned * size
        return 0

    def try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None, *, is_busy: bool) -> bool:
        """Take slots for a request's next tokens and cache the blocks they fill. False if blocks are short.

        `hit`: the hit of a request that starts; None for a running one. Blocks that a running request's
        sliding window has left are freed in any case. Source: kv_cache_manager.py:allocate_slots@0.32.
        """
        if hit is None and self.can_truncate and request.status is Status.RUNNING:
            return self._try_extend(request, num_new_tokens)
        if hit is None and not self.can_truncate:
            self.leave(request)
        if self.count_missing(request, num_new_tokens, hit, is_busy=is_busy) > 0:
            return False
        num_computed_tokens = request.num_computed_tokens
        if hit is not None:
            num_computed_tokens = hit.num_computed_tokens
            request.shared_tokens, request.short_layers = hit.shared_tokens, hit.short_layers
            for table, group in zip(request.tables, self._groups, strict=True):
                group.start(table, hit)
        num_tokens = num_computed_tokens + num_new_tokens
        num_slots = num_tokens + self._count_lookahead(num_new_tokens)
        for table, group in zip(request.tables, self._groups, strict=True):
            group.extend(table, num_slots)
        if hit is None or not hit.waits:
            # Drafts may be rejected, so only certain tokens are cached.
            self.cache(request, min(num_tokens, request.num_tokens))
        self._note_slots(request)
        return True

    def count_missing(self, request: Request, num_new_tokens: int, hit: Hit | None, *, is_busy: bool) -> int:
        """The number of free blocks that an allocation lacks; 0 or less if it fits.

        `is_busy` says that other requests run, so that a starting one must leave the watermark free.
        """
        num_computed_tokens = request.num_computed_tokens if hit is None else hit.num_computed_tokens
        num_slots = num_computed_tokens + num_new_tokens + self._count_lookahead(num_new_tokens)
        groups = self._groups
        if hit is None:
            parts = zip(request.tables, groups, strict=True)
            num_wanted = sum([group.count_new(table, num_slots) for table, group in parts])
            if request.status is Status.LOADED and not self.holds_whole_prompts:
                # It has only the blocks of the loaded tokens, and starts like any other request.
                if self.config.reserve_full_sequence:
                    num_wanted = max(num_wanted, self.count_rest(request))
                num_wanted += self.watermark_blocks if is_busy else 0
            return num_wanted - self.pool.num_free_blocks
        num_wanted = sum([group.count_first(hit, num_slots, at_once=False) for group in groups])
        num_wanted += hit.num_reserved_blocks
        if self.config.reserve_full_sequence:
            num_tokens = request.num_tokens
            num_full = sum([group.count_first(hit, num_tokens, at_once=True) for group in groups])
            num_wanted = max(num_wanted, num_full)
        # Blocks of the hit that are free leave the free queue too.
        num_wanted += sum([group.count_free(hit) for group in groups])
        watermark_blocks = self.watermark_blocks if is_busy else 0
        return num_wanted + watermark_blocks - self.pool.num_free_blocks

    def count_rest(self, request: Request, num_more_tokens: int = 0) -> int:
        """Blocks that a started request still needs for all its tokens so far, and as many more."""
        parts = zip(request.tables, self._groups, strict=True)
        num_tokens = request.num_tokens + num_more_tokens
        return sum(group.count_rest(table, num_tokens) for table, group in parts)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Let look-ups find the full blocks of a request's first tokens."""
        if self.can_truncate and num_tokens // self._block_size <= request.tables[0].num_full:
            return  # most decoded tokens fill no block
        num_tokens -= num_tokens % self._alignment
        for table, group in zip(request.tables, self._groups, strict=True):
            group.cache(table, request, num_tokens)
        self._note_slots(request)

    def leave(self, request: Request) -> None:
        """Free the blocks that the windows of a running request have left."""
        # Steps in flight still read their own windows, so only processed tokens count.
        num_processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for table, group in zip(request.tables, self._groups, strict=True):
            group.leave(table, request, num_processed)

    def cache_ends(self, request: Request) -> None:
        """Let look-ups find the blocks of a hit at a finishing request's end, where its job's next turn hits.

        As in `tenuto.vllm.compat.groups.cache_ends`, nothing happens if one of these blocks is lost.
        """
        parts = list(zip(request.tables, self._groups, strict=True))
        num_tokens = min(
            request.num_tokens - 1, *(table.num_full * group.block_size for table, group in parts)
        )
        num_tokens -= num_tokens % self._alignment
        if num_tokens <= 0 or any(group.get_tail(table, num_tokens) is None for table, group in parts):
            return
        for table, group in parts:
            group.uncover(table, request, num_tokens)

    def free(self, request: Request) -> None:
        """Give all blocks of a request back."""
        for table, group in zip(request.tables, self._groups, strict=True):
            group.free(table)
        request.tables = tuple(group.make_table() for group in self._groups)
        request.slots_end = 0

    def count_most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of this many tokens, output included, will have at once if it is alone."""
        num_slots = num_tokens + self._num_lookahead_tokens
        return sum(group.count_most_blocks(num_slots) for group in self._groups)

    def count_most_tokens(self) -> int:
        """The longest request that can run here, output included."""
        lengths = range(1, self.config.max_model_len + 1)
        return bisect_right(lengths, self.pool.num_blocks, key=self.count_most_blocks)

    def has_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Whether a running request's next tokens neither need nor fill a block. False if in doubt."""
        if not self.can_truncate:
            return False
        table: BlockTable = request.tables[0]
        size = self._block_size
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_full = table.num_nulls + table.row.num_blocks
        return (
            num_tokens + self._num_lookahead_tokens <= (num_full + table.num_blanks) * size
            and min(num_tokens, request.num_tokens) < (num_full + 1) * size
        )

    # Inside.

    def _try_extend(self, request: Request, num_new_tokens: int) -> bool:
        """`try_allocate` for a running request with full attention, the most frequent case."""
        table: BlockTable = request.tables[0]
        size = self._block_size
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_slots = min(num_tokens + self._num_lookahead_tokens, self.config.max_model_len)
        num_full = table.num_nulls + table.row.num_blocks
        num_wanted = -(-num_slots // size) - num_full - table.num_blanks
        if num_wanted > 0:
            if num_wanted > self.pool.num_free_blocks:
                return False
            self.pool.take(num_wanted)
            table.num_blanks += num_wanted
        # Drafts may be rejected, so only certain tokens are cached.
        num_certain = min(num_tokens, request.num_tokens)
        if num_certain // size > num_full:
            for group in self._groups:
                group.cache(request.tables[0], request, num_certain)
            self._note_slots(request)
        elif num_wanted > 0:
            self._note_slots(request)
        return True

    def _note_slots(self, request: Request) -> None:
        if self.can_truncate:
            table: BlockTable = request.tables[0]
            size, num_full = self._block_size, table.row.num_blocks
            request.slots_end = min(
                (num_full + table.num_blanks) * size - self._num_lookahead_tokens,
                (num_full + 1) * size - 1,
                self.config.max_model_len - 2,
            )

    def _count_lookahead(self, num_new_tokens: int) -> int:
        """A drafter's slots; none for a request that only loads."""
        return self._num_lookahead_tokens if num_new_tokens else 0

    def _make_groups(self, max_in_flight_tokens: int) -> list[AttentionGroup | StateGroup]:
        """With the checkpoints of first prompts, as `tenuto.vllm.compat.groups.FirstCheckpoints`."""
        config = self.config
        kinds = list(zip(map(get_window, config.windows), config.group_block_sizes, strict=True))
        tokens: int | None = None
        places: tuple[int, ...] = ()
        if config.retention_interval == 0:
            tokens = choose_checkpoint_tokens(
                sum(count_tail_blocks(window, size) for window, size in kinds if window is not None),
                sum(1 / size for window, size in kinds if window is None),
                config.hit_alignment,
            )
        if tokens is not None:
            places = get_checkpoints(tokens, config.hit_alignment, config.max_model_len)
        return [
            StateGroup(config, self.pool, index, tokens)
            if layers == STATE
            else AttentionGroup(config, self.pool, index, layers, max_in_flight_tokens, places)
            for index, layers in enumerate(config.windows)
        ]

    def _keep_ends(self) -> None:
        """As `tenuto.vllm.compat.groups.EndSpares`: not where the longest request would not fit."""
        num_wanted = 0
        for group in self._groups:
            num_longest = group.count_blocks(self.config.max_model_len)
            most = group.max_blocks
            num_wanted += num_longest if most is None else min(num_longest, most + group.num_spare_wanted)
        if num_wanted <= self.pool.num_blocks:
            for group in self._groups:
                group.keep_spares()
