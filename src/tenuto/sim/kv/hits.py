"""Prefix hits: the longest cached prefix that all layer groups have.

Each kind of layers accepts a length or shortens it, until all accept it:

    full attention    ├──────────────────────┤          cached from the start
    window            ├──┤      ├──────┤  ├──┤          needs its last blocks before the hit's end
    state             │      │         │   │            needs the one block before it
    hit               ├────────────────┤

Source: vllm/v1/core/kv_cache_coordinator.py:HybridKVCacheCoordinator.find_longest_cache_hit@0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tenuto.core.windows import Layers, count_skipped_blocks, count_tail_blocks, get_window
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.pool import ExtentPool
from tenuto.sim.kv.segments import Path, Row


class Hit(NamedTuple):
    """The longest cached prefix of a request, and what a tier has behind it."""

    num_tokens: int
    rows: tuple[Row, ...]
    """Its blocks in each layer group; in a sliding window only those that the window still sees."""
    shared_tokens: int = 0
    """Where the prompt leaves what a layer group has cached, if that is behind the hit; else 0."""
    short_layers: Layers = None
    """Then the sliding window or state that has the least of it."""
    num_loaded_tokens: int = 0
    """Tokens behind it that come from a tier."""
    waits: bool = False
    """Whether the request waits for them; its blocks are cached when they are there."""
    num_reserved_blocks: int = 0
    """Then free blocks that it leaves to others."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.num_tokens + self.num_loaded_tokens


class HitFinder:
    """Looks for hits in one pool. Changes nothing."""

    def __init__(self, config: KvConfig, pool: ExtentPool) -> None:
        self._pool = pool
        self._sizes = config.group_block_sizes
        self._alignment = config.hit_alignment
        self._windows = [get_window(layers) for layers in config.windows]
        self._is_unitary = config.windows == (None,)
        self._drops_last_block = config.drops_last_hit_block
        kinds: dict[tuple[Layers, int], list[int]] = {}
        for group, kind in enumerate(zip(config.windows, self._sizes, strict=True)):
            kinds.setdefault(kind, []).append(group)
        self._full = [groups for (layers, _), groups in kinds.items() if layers is None]
        self._others = {kind: groups for kind, groups in kinds.items() if kind[0] is not None}

    def find(self, paths: Sequence[Path], max_tokens: int) -> Hit:
        """The longest cached prefix of a sequence, of at most so many tokens."""
        if self._is_unitary:
            size = self._sizes[0]
            row = self._pool.find(paths[0], 0, 0, max_tokens // size)
            if self._drops_last_block:
                del row[max(0, len(row) - 1) :]
            return Hit(len(row) * size, (row,))
        # The first kind of layers that was asked has the longest prefix.
        num_tokens, longest = max_tokens, None
        for groups in self._full:
            num_tokens = self._find_full(paths, groups, num_tokens)
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
            self._pool.find(path, group, count_skipped_blocks(window, size, num_tokens), num_tokens // size)
            for group, (path, window, size) in enumerate(zip(paths, self._windows, self._sizes, strict=True))
        )
        return Hit(num_tokens, tuple(rows), shared_tokens, short_layers)

    def _find_full(self, paths: Sequence[Path], groups: Sequence[int], max_tokens: int) -> int:
        """The longest prefix, of at most so many tokens, that these groups with full attention have."""
        size = self._sizes[groups[0]]
        end = max_tokens // size
        num_tokens = min(len(self._pool.find(paths[group], group, 0, end)) for group in groups) * size
        return num_tokens - num_tokens % self._alignment

    def _find_end(self, paths: Sequence[Path], groups: Sequence[int], max_tokens: int) -> int:
        """The longest prefix, of at most so many tokens, before whose end these groups have their window.

        The start of a sequence is a hit even where it is shorter than the window.
        """
        first_group = groups[0]
        size, window = self._sizes[first_group], self._windows[first_group]
        assert window is not None
        end = max_tokens // size
        runs = self._pool.find_runs(paths[first_group], first_group, end)
        for group in groups[1:]:
            runs = _intersect(runs, self._pool.find_runs(paths[group], group, end))
        num_tail_blocks = count_tail_blocks(window, size)
        num_aligned = self._alignment // size
        for first, last in reversed(runs):
            aligned = last - last % num_aligned
            if aligned > first and (aligned - first >= num_tail_blocks or first == 0):
                return aligned * size
        return 0


def _intersect(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What two rising lists of runs have in common."""
    common = ((max(p[0], q[0]), min(p[1], q[1])) for p in a for q in b)
    return [run for run in common if run[0] < run[1]]
