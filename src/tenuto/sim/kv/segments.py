"""Content without tokens: which blocks of which requests are equal, and where they are cached.

A sequence is a list of spans. Each span is the beginning of a named text. The tree of segments has a node
for each span behind the spans before it:

    root ── system@0 ── job3/task@80 ── job3/out0@92 ── …
                   └─── job4/task@80 ── …

Two sequences that go through the same segment are equal up to the point where one of them ends in it. So
(segment, block index) says the same as vLLM's chained block hash, exactly and without hashing a token.

A segment lives as long as a request, a cached block, a tier's chunk or a remembered job refers to it. The
tree has weak references only, so that an engine that runs for weeks forgets what it has evicted.

The cached blocks of a segment are extents. A row has those of one request or lease, in the order of its
tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakValueDictionary

Span = tuple[Hashable, int]
"""A text's name and how many of its first tokens; what the KV of a token depends on is part of the name."""

BlockHash = tuple["Segment", int]


class Segment:
    """One span at its place behind everything before it."""

    __slots__ = ("__weakref__", "_before", "_following", "_name", "copies")

    def __init__(self, num_groups: int, before: Segment | None = None, name: str = "") -> None:
        """`name`: the same for the same text, and for no other."""
        self._name = name
        # What is cached behind a segment is found through it.
        self._before = before
        self._following: WeakValueDictionary[tuple[Hashable, int], Segment] = WeakValueDictionary()
        self.copies: tuple[list[Extent], ...] = tuple([] for _ in range(num_groups))
        """Per layer group, the cached extents that hold blocks of this segment (see `tenuto.sim.kv.pool`)."""

    def follow(self, content_id: Hashable, start: int) -> Segment:
        """The segment of the text that begins at token `start`, where this one ends."""
        key = (content_id, start)
        segment = self._following.get(key)
        if segment is None:
            name = blake2b(f"{self._name} {content_id!r} {start}".encode(), digest_size=8).hexdigest()
            segment = self._following[key] = Segment(len(self.copies), self, name)
        return segment

    def __repr__(self) -> str:
        """By its text: the driver tells kinds of jobs apart by what their first block's hash is called."""
        return self._name


class Extent:
    """A run of full blocks that share one fate: `first` to before `end`, counted from the sequence's start.

    They lie in one segment, have the same number of references, and one place in the free queue. Most are
    cached. Those that a sliding window fills between two of its checkpoints are not.
    """

    __slots__ = (
        "after",
        "end",
        "first",
        "home",
        "is_cached",
        "next",
        "num_holds",
        "order",
        "previous",
        "ref_cnt",
        "segment",
    )

    def __init__(self, segment: Segment, home: list[Extent], first: int, end: int, order: int) -> None:
        self.segment = segment
        self.home = home
        """The list in which look-ups find it: the segment's copies in one layer group."""
        self.first = first
        self.end = end
        self.order = order
        """Extents are numbered as they are cached; of several copies the smallest number is hit."""
        self.ref_cnt = 1
        self.is_cached = True
        """Whether look-ups find it; if not, its blocks are blank again as soon as they are free."""
        self.num_holds = 0
        """References among them that leases have."""
        self.after: Extent | None = None
        """The extent that was split off behind it, so that older ranges still find all their blocks."""
        self.previous = self.next = self

    def __repr__(self) -> str:
        return f"Extent({self.first}-{self.end}, ref_cnt={self.ref_cnt}, num_holds={self.num_holds})"


class Path:
    """The segments that a sequence goes through, in blocks.

    A block belongs to the segment that holds its last token. The last segment has no end, so the path does
    not change while the sequence grows.

        tokens     │ system ····· │ task ······ │ output ···→
        blocks     │ 0 │ 1 │ 2 │ 3  │ 4 │ 5 │ 6   │ 7 │ …
        segment      S   S   S   T    T   T   O     O            block 3 ends in the task
    """

    __slots__ = ("first_blocks", "segments", "starts")

    def __init__(self, root: Segment, key: Hashable, spans: Iterable[Span], block_size: int) -> None:
        """The path of these spans; `key` is what all their KV depends on too: the cache salt, the adapter."""
        segment, start = root.follow(key, 0), 0
        self.starts: list[int] = []
        self.segments: list[Segment] = []
        for content_id, num_tokens in spans:
            segment = segment.follow(content_id, start)
            self.starts.append(start)
            self.segments.append(segment)
            start += num_tokens
        self.first_blocks = [start // block_size for start in self.starts]

    def get_ranges(self, first: int, end: int) -> Iterator[tuple[Segment, int, int]]:
        """The blocks from `first` to before `end`, as (segment, first block, end) of each segment."""
        index = bisect_right(self.first_blocks, first) - 1
        while first < end:
            is_last = index + 1 == len(self.segments)
            stop = end if is_last else min(end, self.first_blocks[index + 1])
            if stop > first:
                yield self.segments[index], first, stop
                first = stop
            index += 1

    def get_segment(self, block: int) -> Segment:
        """The segment that a block belongs to."""
        return self.segments[bisect_right(self.first_blocks, block) - 1]


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
