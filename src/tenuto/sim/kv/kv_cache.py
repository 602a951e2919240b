"""The KV cache of the simulated engine: prefix hits, block tables and slots for new tokens.

Models may mix full attention with sliding windows. Each layer group has its own blocks; all have one size and
come from one pool. The tokens of a request, from its start:

    ├── hit ──┼── loaded ──┼───────────── new ─────────────┼── lookahead ──┤
    │ from GPU│ from a tier│ computed in this step         │ slots only    │
    ├── num_computed_tokens┤                               │ for a drafter │

Source: vllm/v1/core/kv_cache_manager.py, kv_cache_coordinator.py and
single_type_kv_cache_manager.py@0.32.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from tenuto.core.errors import ConfigError
from tenuto.core.windows import (
    choose_checkpoint_tokens,
    count_spare_blocks,
    count_tail_blocks,
    get_checkpoints,
)
from tenuto.sim.kv.checkpoints import Checkpoints
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.pool import ExtentPool
from tenuto.sim.kv.request import BlockTable, Request
from tenuto.sim.kv.rows import Row
from tenuto.sim.kv.segments import Path


class Hit(NamedTuple):
    """The longest cached prefix of a request, and what a tier has behind it."""

    num_tokens: int
    rows: tuple[Row, ...]
    """Its blocks in each layer group; in a sliding window only those that the window still sees."""
    shared_tokens: int = 0
    """Where the prompt leaves what a layer group has cached, if that is behind the hit; else 0."""
    short_window: int | None = None
    """Then the sliding window that has the least of it."""
    num_loaded_tokens: int = 0
    """Tokens behind it that come from a tier."""
    waits: bool = False
    """Whether the request waits for them; its blocks are cached when they are there."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.num_tokens + self.num_loaded_tokens


class KvCache:
    """Which request has which blocks."""

    def __init__(
        self, config: KvConfig, max_in_flight_tokens: int, *, keeps_window_ends: bool = False
    ) -> None:
        """An empty cache.

        `max_in_flight_tokens`: the most that scheduled steps may hold unprocessed. `keeps_window_ends`: let
        running requests keep the blocks that `cache_window_ends` needs, if there is room for that.
        """
        self.config = config
        self.pool = ExtentPool(config.num_blocks - 1, len(config.windows))
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self._block_size = config.block_size
        self._num_lookahead_tokens = config.num_lookahead_tokens
        self._is_unitary = self.can_truncate
        self._full_groups = [n for n, window in enumerate(config.windows) if window is None]
        self._window_groups: dict[int, list[int]] = {}
        for group, window in enumerate(config.windows):
            if window is not None:
                self._window_groups.setdefault(window, []).append(group)
        places = self._get_checkpoints()
        self._checkpoints = {
            window: Checkpoints(window, config.block_size, config.retention_interval, places)
            for window in self._window_groups
        }
        # A window's blocks are given back as it moves on, so admission need not count a whole prompt's.
        self._num_spare = [0] * len(config.windows)
        self._max_admission_blocks = self._get_most_blocks(max_in_flight_tokens)
        if keeps_window_ends:
            self._keep_window_ends()

    @property
    def can_truncate(self) -> bool:
        """Whether block i of a request always holds tokens i·size to (i+1)·size: full attention only."""
        return self.config.windows == (None,)

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
        request.tables = tuple(BlockTable() for _ in self.config.windows)

    def get_hit(self, request: Request) -> Hit:
        """The longest cached prefix; at least its last token is left to compute. Changes nothing."""
        return self.find_hit(request.path, (request.num_tokens - 1) // self._block_size)

    def find_hit(self, path: Path, end: int) -> Hit:
        """The longest cached prefix of a sequence, of at most `end` blocks. Changes nothing."""
        find = self.pool.find
        if self.can_truncate:
            row = find(path, 0, 0, end)
            if self.config.drops_last_hit_block:
                del row[max(0, len(row) - 1) :]
            return Hit(len(row) * self._block_size, (row,))
        if self._full_groups:
            end = min(len(find(path, group, 0, end)) for group in self._full_groups)
        # Each kind of window accepts the length or shortens it, until all accept it. The first kind of layer
        # that was asked has the longest prefix.
        longest = end if self._full_groups else None
        previous_end = None
        while end != previous_end:
            previous_end = end
            for window, groups in self._window_groups.items():
                end = self._get_window_hit(path, window, groups, end)
                longest = end if longest is None else longest
        num_tokens = end * self._block_size
        shared_tokens, short_window = 0, None
        if longest is not None and longest > end:
            shared_tokens = longest * self._block_size
            ends = {
                window: self._get_window_hit(path, window, groups, longest)
                for window, groups in self._window_groups.items()
            }
            short_window = min(ends, key=lambda window: ends[window])
        rows = (
            find(path, group, self._count_skipped_blocks(window, num_tokens), end)
            for group, window in enumerate(self.config.windows)
        )
        return Hit(num_tokens, tuple(rows), shared_tokens, short_window)

    def try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None, *, is_busy: bool) -> bool:
        """Take slots for a request's next tokens and cache the blocks they fill; False if blocks are short.

        A request that starts brings its hit, a running one None. Blocks of a running one that its sliding
        window has left are freed in any case. Source: kv_cache_manager.py:allocate_slots@0.32.
        """
        if hit is None and self.has_slots(request, num_new_tokens):
            return True
        if hit is None and self._window_groups:
            self._leave_windows(request)
        if self.count_missing(request, num_new_tokens, hit, is_busy=is_busy) > 0:
            return False
        num_computed_tokens = request.num_computed_tokens
        if hit is not None:
            num_computed_tokens = hit.num_computed_tokens
            request.shared_tokens, request.short_window = hit.shared_tokens, hit.short_window
            for table, row, window in zip(request.tables, hit.rows, self.config.windows, strict=True):
                self.pool.hold(row)
                table.row = row
                table.num_nulls = self._count_skipped_blocks(window, hit.num_tokens)
        num_tokens = num_computed_tokens + num_new_tokens
        num_blocks = self._count_blocks(num_tokens + self.config.num_lookahead_tokens)
        for table in request.tables:
            num_new_blocks = num_blocks - table.num_blocks
            if num_new_blocks > 0:
                self.pool.take(num_new_blocks)
                table.num_blanks += num_new_blocks
        if hit is None or not hit.waits:
            # Drafts may be rejected: only what is certain is cached.
            self.cache(request, min(num_tokens, request.num_tokens))
        return True

    def count_missing(self, request: Request, num_new_tokens: int, hit: Hit | None, *, is_busy: bool) -> int:
        """How many free blocks an allocation is short of; 0 or less if it fits.

        `is_busy` says that other requests run, so that a starting one must leave the watermark free.
        """
        num_computed_tokens = request.num_computed_tokens if hit is None else hit.num_computed_tokens
        num_tokens = num_computed_tokens + num_new_tokens + self.config.num_lookahead_tokens
        num_blocks = self._count_blocks(num_tokens)
        if hit is None:
            num_wanted = sum(max(0, num_blocks - table.num_blocks) for table in request.tables)
            return num_wanted - self.pool.num_free_blocks
        # Blocks of the hit that are free leave the free queue too.
        num_free_hits = sum(self.pool.count_blocks(row, ref_cnt=0) for row in hit.rows)
        num_hit_blocks = hit.num_tokens // self._block_size
        num_wanted = max(0, num_blocks - num_hit_blocks) * len(hit.rows)
        if self.config.reserve_full_sequence:
            num_blocks = self._count_blocks(request.num_tokens)
            num_full = sum(
                max(0, min(num_blocks, most or num_blocks) - num_hit_blocks)
                for most in self._max_admission_blocks
            )
            num_wanted = max(num_wanted, num_full)
        watermark_blocks = self.watermark_blocks if is_busy else 0
        return num_wanted + num_free_hits + watermark_blocks - self.pool.num_free_blocks

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of a request's first tokens findable."""
        end = num_tokens // self._block_size
        if end <= request.tables[0].num_full and len(request.tables) == 1:
            return  # most tokens that are decoded fill no block
        for group, (table, window) in enumerate(zip(request.tables, self.config.windows, strict=True)):
            first = table.num_full
            if end <= first:
                continue
            table.num_blanks -= end - first
            if window is None:
                self.pool.cache(table.row, request.path, group, first, end)
                continue
            for start, stop in self._checkpoints[window].get_runs(request, first, end):
                self.pool.fill(table.row, request.path, first, start)
                self.pool.cache(table.row, request.path, group, start, stop)
                first = stop
            self.pool.fill(table.row, request.path, first, end)

    def cache_window_ends(self, request: Request) -> None:
        """Let look-ups find the end of a finishing request's windows, where its job's next turn hits.

        As `tenuto.vllm.compat_groups.cache_window_ends`: nothing happens if a window has lost such a block.
        """
        end = min((request.num_tokens - 1) // self._block_size, *(table.num_full for table in request.tables))
        tails = []
        for table, window in zip(request.tables, self.config.windows, strict=True):
            first = 0 if window is None else max(0, end - count_tail_blocks(window, self._block_size))
            if first < table.num_nulls:
                return
            tails.append((first - table.num_nulls, end - table.num_nulls))
        for group, (table, window) in enumerate(zip(request.tables, self.config.windows, strict=True)):
            if window is not None:
                start, stop = tails[group]
                row = table.row[start:]
                del row[stop - start :]
                self.pool.uncover(row, group)

    def free(self, request: Request) -> None:
        """Give all blocks of a request back."""
        for table in request.tables:
            self.pool.release(table.row)
            self.pool.give_back(table.num_blanks)
        request.tables = tuple(BlockTable() for _ in request.tables)

    def count_most_blocks(self, num_tokens: int) -> int:
        """How many blocks a request of so many tokens, output included, will have at once if it is alone."""
        num_blocks = self._count_blocks(num_tokens + self.config.num_lookahead_tokens)
        return sum(min(num_blocks, most or num_blocks) for most in self._max_admission_blocks)

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
        table, size = request.tables[0], self._block_size
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_full = table.num_nulls + table.row.num_blocks
        return (
            num_tokens + self._num_lookahead_tokens <= (num_full + table.num_blanks) * size
            and min(num_tokens, request.num_tokens) < (num_full + 1) * size
        )

    # Inside.

    def _get_checkpoints(self) -> tuple[int, ...]:
        """The checkpoints of first prompts, as `tenuto.vllm.compat_checkpoints.FirstCheckpoints`."""
        size, windows = self._block_size, self.config.windows
        num_blocks = sum(count_tail_blocks(window, size) for window in windows if window is not None)
        tokens = choose_checkpoint_tokens(num_blocks, len(self._full_groups) / size, size)
        if self.config.retention_interval != 0 or tokens is None:
            return ()
        return get_checkpoints(tokens, size, self.config.max_model_len)

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.config.max_model_len) // self._block_size)

    def _get_most_blocks(self, max_in_flight_tokens: int) -> list[int | None]:
        """Per layer group, the most blocks that a request has at once; None for as many as it has tokens."""
        # One more, for a window need not start where a block does.
        return [
            None if window is None else self._count_blocks(window - 1 + max_in_flight_tokens) + 1
            for window in self.config.windows
        ]

    def _keep_window_ends(self) -> None:
        """As `tenuto.vllm.compat_groups.WindowSpares`: not where the longest request would not fit."""
        config, size = self.config, self._block_size
        spare = [0 if window is None else count_spare_blocks(window, size, size) for window in config.windows]
        most = [
            None if num is None else num + more
            for num, more in zip(self._max_admission_blocks, spare, strict=True)
        ]
        num_longest = self._count_blocks(config.max_model_len)
        if sum(min(num_longest, num or num_longest) for num in most) <= self.pool.num_blocks:
            self._num_spare, self._max_admission_blocks = spare, most

    def _count_skipped_blocks(self, window: int | None, num_tokens: int) -> int:
        """Blocks that the next token's window has left behind."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self._block_size

    def _leave_windows(self, request: Request) -> None:
        # Steps in flight still read what only the processed tokens' window has left.
        num_tokens = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for table, window, spare in zip(request.tables, self.config.windows, self._num_spare, strict=True):
            num_skipped = min(self._count_skipped_blocks(window, num_tokens) - spare, table.num_blocks)
            if num_skipped > table.num_nulls:
                self.pool.release_head(table.row, num_skipped - table.num_nulls)
                table.num_nulls = num_skipped

    def _get_window_hit(self, path: Path, window: int, groups: Sequence[int], end: int) -> int:
        """The longest prefix, at most `end` blocks, whose window is cached in all these groups.

        The start of a sequence is a hit even where it is shorter than the window.
        """
        runs = self.pool.find_runs(path, groups[0], end)
        for group in groups[1:]:
            runs = _intersect(runs, self.pool.find_runs(path, group, end))
        num_window_blocks = count_tail_blocks(window, self._block_size)
        for first, last in reversed(runs):
            if last - first >= num_window_blocks or first == 0:
                return last
        return 0


def _intersect(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What two rising lists of runs have in common."""
    common = ((max(p[0], q[0]), min(p[1], q[1])) for p in a for q in b)
    return [run for run in common if run[0] < run[1]]
