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
    choose_checkpoint_tokens,
    count_tail_blocks,
    get_checkpoints,
    get_window,
)
from tenuto.sim.kv.attention import AttentionGroup
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.hits import Hit, HitFinder
from tenuto.sim.kv.pool import ExtentPool
from tenuto.sim.kv.request import BlockTable, Request, Status
from tenuto.sim.kv.segments import Path, Span
from tenuto.sim.kv.states import StateGroup


class KvCache:
    """Which request has which blocks."""

    def __init__(self, config: KvConfig, max_in_flight_tokens: int, *, keeps_ends: bool = False) -> None:
        """An empty cache.

        `max_in_flight_tokens`: the most that scheduled steps may hold unprocessed. `keeps_ends`: let
        running requests keep the blocks that `cache_ends` needs, if there is room for that.
        """
        self.config = config
        self.pool = ExtentPool(config.num_blocks - 1, len(config.windows))
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self._finder = HitFinder(config, self.pool)
        self._block_size = config.hash_block_size
        self._num_lookahead_tokens = config.num_lookahead_tokens
        self._is_unitary = self.can_truncate
        self._groups = self._make_groups(max_in_flight_tokens)
        self._state_groups = [group for group in self._groups if isinstance(group, StateGroup)]
        if keeps_ends:
            self._keep_ends()

    @property
    def can_truncate(self) -> bool:
        """Whether block i of a request always holds tokens i·size to (i+1)·size: full attention only."""
        return self.config.windows == (None,)

    def begin_step(self) -> None:
        """The next step is about to be scheduled."""
        for group in self._state_groups:
            group.begin_step()

    def enter(self, request: Request) -> None:
        """A new request: find its place among all content, and give it empty tables.

        Raises ConfigError if it can never run here.
        """
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
        request.path = Path(self.pool.root, request.key, spans, self._block_size)
        request.paths = self.get_paths(request.path, request.key, spans)
        request.tables = tuple(group.make_table() for group in self._groups)

    def get_paths(self, path: Path, key: Hashable, spans: Sequence[Span]) -> tuple[Path, ...]:
        """A sequence in the blocks of each layer group; `path` has it in those of the hashes."""
        paths = {self._block_size: path}
        for size in self.config.block_sizes:
            if size not in paths:
                paths[size] = Path(self.pool.root, key, spans, size)
        return tuple(paths[size] for size in self.config.group_block_sizes)

    def get_hit(self, request: Request) -> Hit:
        """The longest cached prefix; at least its last token is left to compute. Changes nothing."""
        return self._finder.find(request.paths, request.num_tokens - 1)

    def find_hit(self, paths: Sequence[Path], max_tokens: int) -> Hit:
        """The longest cached prefix, of at most so many tokens, of a sequence (its path in each group)."""
        return self._finder.find(paths, max_tokens)

    def try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None, *, is_busy: bool) -> bool:
        """Take slots for a request's next tokens and cache the blocks they fill; False if blocks are short.

        A request that starts brings its hit, a running one None. Blocks of a running one that its sliding
        window has left are freed in any case. Source: kv_cache_manager.py:allocate_slots@0.32.
        """
        if hit is None and self.has_slots(request, num_new_tokens):
            return True
        if hit is None and not self._is_unitary:
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
        num_slots = num_tokens + self._count_lookahead(hit)
        for table, group in zip(request.tables, self._groups, strict=True):
            group.extend(table, num_slots)
        if hit is None or not hit.waits:
            # Drafts may be rejected: only what is certain is cached.
            self.cache(request, min(num_tokens, request.num_tokens))
        self._note_slots(request)
        return True

    def count_missing(self, request: Request, num_new_tokens: int, hit: Hit | None, *, is_busy: bool) -> int:
        """How many free blocks an allocation is short of; 0 or less if it fits.

        `is_busy` says that other requests run, so that a starting one must leave the watermark free.
        """
        num_computed_tokens = request.num_computed_tokens if hit is None else hit.num_computed_tokens
        num_slots = num_computed_tokens + num_new_tokens + self._count_lookahead(hit)
        groups = self._groups
        if hit is None:
            parts = zip(request.tables, groups, strict=True)
            num_wanted = sum(group.count_new(table, num_slots) for table, group in parts)
            if request.status is Status.LOADED and (num_wanted or not self._is_unitary):
                # It took the loaded tokens' blocks only, and starts like any other. (LMCache's modes take
                # all blocks at once, and want none here.)
                if self.config.reserve_full_sequence:
                    num_wanted = max(num_wanted, self.count_rest(request))
                num_wanted += self.watermark_blocks if is_busy else 0
            return num_wanted - self.pool.num_free_blocks
        num_wanted = sum(group.count_first(hit, num_slots, at_once=False) for group in groups)
        num_wanted += hit.num_reserved_blocks
        if self.config.reserve_full_sequence:
            num_tokens = request.num_tokens
            num_full = sum(group.count_first(hit, num_tokens, at_once=True) for group in groups)
            num_wanted = max(num_wanted, num_full)
        # Blocks of the hit that are free leave the free queue too.
        num_wanted += sum(group.count_free(hit) for group in groups)
        watermark_blocks = self.watermark_blocks if is_busy else 0
        return num_wanted + watermark_blocks - self.pool.num_free_blocks

    def count_rest(self, request: Request) -> int:
        """Blocks that a request which has begun still needs for all its tokens so far."""
        parts = zip(request.tables, self._groups, strict=True)
        return sum(group.count_rest(table, request.num_tokens) for table, group in parts)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of a request's first tokens findable."""
        if self._is_unitary and num_tokens // self._block_size <= request.tables[0].num_full:
            return  # most tokens that are decoded fill no block
        num_tokens -= num_tokens % self.config.hit_alignment
        for table, group in zip(request.tables, self._groups, strict=True):
            group.cache(table, request, num_tokens)
        self._note_slots(request)

    def leave(self, request: Request) -> None:
        """Give back what the windows of a request that runs have left."""
        # Steps in flight still read what only the processed tokens' window has left.
        num_processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for table, group in zip(request.tables, self._groups, strict=True):
            group.leave(table, request, num_processed)

    def cache_ends(self, request: Request) -> None:
        """Let look-ups find what a hit at a finishing request's end needs, where its job's next turn hits.

        As `tenuto.vllm.compat.groups.cache_ends`: nothing happens if a block of that is lost.
        """
        parts = list(zip(request.tables, self._groups, strict=True))
        num_tokens = min(
            request.num_tokens - 1, *(table.num_full * group.block_size for table, group in parts)
        )
        num_tokens -= num_tokens % self.config.hit_alignment
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
        """How many blocks a request of so many tokens, output included, will have at once if it is alone."""
        num_slots = num_tokens + self._num_lookahead_tokens
        return sum(group.count_most_blocks(num_slots) for group in self._groups)

    def count_most_tokens(self) -> int:
        """The longest request that can run here, output included."""
        lengths = range(1, self.config.max_model_len + 1)
        return bisect_right(lengths, self.pool.num_blocks, key=self.count_most_blocks)

    def has_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Whether a running request's next tokens neither need nor fill a block: most decoded ones do not.

        False if in doubt.
        """
        if not self._is_unitary:
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

    def _note_slots(self, request: Request) -> None:
        if self._is_unitary:
            table: BlockTable = request.tables[0]
            size = self._block_size
            request.slots_end = min(
                table.num_blocks * size - self._num_lookahead_tokens,
                (table.num_full + 1) * size - 1,
                self.config.max_model_len - 2,
            )

    def _count_lookahead(self, hit: Hit | None) -> int:
        """A drafter's slots; not while a request only loads. Full attention takes all its blocks at once."""
        return 0 if hit is not None and hit.waits and not self._is_unitary else self._num_lookahead_tokens

    def _make_groups(self, max_in_flight_tokens: int) -> list[AttentionGroup | StateGroup]:
        """The layer groups, with the checkpoints of first prompts.

        As `tenuto.vllm.compat.groups.FirstCheckpoints`.
        """
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
