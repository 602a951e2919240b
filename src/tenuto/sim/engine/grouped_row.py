"""Leases on models with several layer groups: what they hold, and what a shorter one would hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tenuto.core.take_back import get_max_tokens
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import BlockHashes
from tenuto.sim.kv.rows import Row
from tenuto.sim.kv.segments import Path


class GroupedRow(Row):
    """Blocks of one lease: all layer groups' blocks of one hit, the first group's first.

    full      │ 0 ················ end │
    window                │ first · end │      rows, each up to the hit's end
    """

    __slots__ = ("end", "path", "rows")

    def __init__(self, path: Path, rows: Sequence[Row], end: int) -> None:
        """`end`: the hit's length in blocks."""
        super().__init__(part for row in rows for part in row.ranges)
        self.path = path
        self.rows = rows
        self.end = end


def find(kv: KvCache, path: Path, end: int) -> GroupedRow:
    """What the longest cached prefix of at most `end` blocks has in each group."""
    hit = kv.find_hit(path, end)
    return GroupedRow(path, hit.rows, hit.num_tokens // kv.config.block_size)


def count_common(row: GroupedRow, hashes: Sequence[Hashable]) -> int:
    """How many leading blocks a prompt with these hashes shares."""
    assert isinstance(hashes, BlockHashes)
    num_common = 0
    most = min(row.end, len(hashes))
    for (own, first, stop), (other, _, other_stop) in zip(
        row.path.get_ranges(0, most), hashes.path.get_ranges(0, most), strict=False
    ):
        if own is not other:
            return first
        num_common = min(stop, other_stop)
        if stop != other_stop:
            return num_common
    return num_common


def get_rest(kv: KvCache, row: GroupedRow, num_blocks: int) -> GroupedRow | None:
    """What a lease keeps if it gives up about so many blocks; None if a shorter one would free nothing."""
    num_full_groups = kv.config.windows.count(None)
    if not num_full_groups:
        # Of a window alone a shorter prefix needs as many blocks.
        return None
    size = kv.config.block_size
    max_tokens = get_max_tokens(row.end * size, num_blocks, max(1, size // num_full_groups))
    rest = find(kv, row.path, max_tokens // size)
    num_freed = num_taken = 0
    for own, other in zip(row.rows, rest.rows, strict=True):
        #     own                first ├──────────┤ row.end
        #     other      first ├──────────┤ rest.end
        own_first, other_first = row.end - len(own), rest.end - len(other)
        num_freed += kv.pool.count_blocks(own[max(0, rest.end - own_first) :], ref_cnt=1)
        taken = other[:]
        del taken[max(0, own_first - other_first) :]
        num_taken += kv.pool.count_blocks(taken, ref_cnt=0)
    return rest if rest and num_freed > num_taken else None
