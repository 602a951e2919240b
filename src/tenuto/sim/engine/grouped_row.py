"""Leases on models with several layer groups: what they hold, and what a shorter one would hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tenuto.core.windows import get_max_tokens
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import BlockHashes, Request
from tenuto.sim.kv.rows import Row
from tenuto.sim.kv.segments import Path


class GroupedRow(Row):
    """Blocks of one lease: all layer groups' blocks of one hit, the first group's first.

    full      │ 0 ·········· num_tokens │
    window               │ first ······ │      rows, each up to the hit's end
    """

    __slots__ = ("num_tokens", "path", "paths", "rows")

    def __init__(self, path: Path, paths: Sequence[Path], rows: Sequence[Row], num_tokens: int) -> None:
        """`path` is in blocks of the hashes, `paths` in those of each group. `num_tokens`: the hit's."""
        super().__init__(part for row in rows for part in row.ranges)
        self.path = path
        self.paths = paths
        self.rows = rows
        self.num_tokens = num_tokens


def find(kv: KvCache, sequence: Request | GroupedRow, max_tokens: int) -> GroupedRow:
    """What the longest cached prefix of at most so many tokens has in each group."""
    hit = kv.find_hit(sequence.paths, max_tokens)
    return GroupedRow(sequence.path, sequence.paths, hit.rows, hit.num_tokens)


def count_common(row: GroupedRow, hashes: Sequence[Hashable], size: int) -> int:
    """How many leading tokens a prompt with these hashes, of `size` tokens each, shares."""
    assert isinstance(hashes, BlockHashes)
    num_common = 0
    most = min(row.num_tokens // size, len(hashes))
    for (own, first, stop), (other, _, other_stop) in zip(
        row.path.get_ranges(0, most), hashes.path.get_ranges(0, most), strict=False
    ):
        if own is not other:
            return first * size
        num_common = min(stop, other_stop)
        if stop != other_stop:
            break
    return num_common * size


def get_rest(kv: KvCache, row: GroupedRow, num_blocks: int) -> GroupedRow | None:
    """What a lease keeps if it gives up about so many blocks; None if a shorter one would free nothing."""
    sizes = kv.config.group_block_sizes
    full = [size for size, layers in zip(sizes, kv.config.windows, strict=True) if layers is None]
    if not full:
        # Of a window alone a shorter prefix needs as many blocks.
        return None
    tokens_per_block = max(1, int(1 / sum(1 / size for size in full)))
    rest = find(kv, row, get_max_tokens(row.num_tokens, num_blocks, tokens_per_block))
    num_freed = num_taken = 0
    for own, other, size in zip(row.rows, rest.rows, sizes, strict=True):
        #     own                first ├──────────┤ end
        #     other      first ├──────────┤ rest_end
        end, rest_end = row.num_tokens // size, rest.num_tokens // size
        own_first, other_first = end - len(own), rest_end - len(other)
        num_freed += kv.pool.count_blocks(own[max(0, rest_end - own_first) :], ref_cnt=1)
        taken = other[:]
        del taken[max(0, own_first - other_first) :]
        num_taken += kv.pool.count_blocks(taken, ref_cnt=0)
    return rest if rest and num_freed > num_taken else None
