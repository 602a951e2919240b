"""Rows: the cached blocks of one request or lease, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tenuto.sim.kv.segments import Extent


class Range(NamedTuple):
    """The blocks `first` to before `end` of a segment: in this extent and in those split off behind it."""

    extent: Extent
    first: int
    end: int


class Row:
    """Cached blocks of one sequence in order; behaves like a list of blocks that is only cut at its tail.

    row        │ 0 1 2 3 4 5 │ 6 7 │ 8 9 …    blocks, counted from the row's start
    ranges     │  segment A  │  B  │  C  …    each lies in one segment
    row[7:]                    │ 7 │ 8 9 …    the tail that `del row[7:]` takes away
    """

    __slots__ = ("num_blocks", "ranges")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges = list(ranges)
        self.num_blocks = sum(part.end - part.first for part in self.ranges)

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, tail: slice) -> Row:
        """The blocks from `tail.start` on."""
        skip, ranges = tail.start or 0, []
        for extent, first, end in self.ranges:
            if end - first > skip:
                ranges.append(Range(extent, first + skip, end))
            skip = max(0, skip - (end - first))
        return Row(ranges)

    def __delitem__(self, tail: slice) -> None:
        """Forget the blocks from `tail.start` on."""
        left = self.num_blocks = min(self.num_blocks, tail.start or 0)
        ranges, self.ranges = self.ranges, []
        for extent, first, end in ranges:
            if left > 0:
                self.ranges.append(Range(extent, first, min(end, first + left)))
            left -= end - first

    def get_extents(self) -> Iterator[Extent]:
        """The extents that hold these blocks, in order; some may hold blocks beside them.

        range            [first ········· end)
        extents     │ A ──┼──│ B    │ C ──┼──│      A has blocks before `first`, C has some from `end` on
        """
        for extent, first, end in self.ranges:
            while first < end:
                extent = skip_to(extent, first)
                yield extent
                first = extent.end

    def append(self, extent: Extent, first: int, end: int) -> None:
        """Add blocks at the end."""
        self.ranges.append(Range(extent, first, end))
        self.num_blocks += end - first


def skip_to(extent: Extent, block: int) -> Extent:
    """The extent that holds a block: this one, or one that was split off behind it."""
    while extent.end <= block:
        assert extent.after is not None
        extent = extent.after
    return extent
