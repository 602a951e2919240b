"""The simulator's block pool: vLLM's prefix cache, without tokens and without single blocks.

*Content.* A sequence is a list of spans. Each span is the beginning of a named text. The tree of segments has
a node for each span after the spans before it:

    root ── system@0 ── job3/task@80 ── job3/out0@92 ── …
                   └─── job4/task@80 ── …

Two sequences that go through the same segment are equal up to the point where one of them ends in it. So
(segment, block index) says the same as vLLM's chained block hash, exactly and without hashing a token. A
segment lives as long as a request, a cached block, a tier's chunk or a remembered job refers to it. The tree
has weak references only, so that an engine that runs for weeks forgets what it has evicted.

*Blocks.* An extent is a run of cached blocks of one segment with the same number of references and one place
in the free queue. It is split when only a part of it is taken or freed. A row has the extents of one request
or lease, in the order of its tokens. Every operation costs O(extents), which is O(turns), and takes, hits and
evicts the same blocks as vLLM's pool:

    free queue    [blanks: a number]   extent → extent → …
                  evicted first        each from its last block to its first

- Blocks without content always go to the queue's front, and they are interchangeable. So only their number is
  kept, as for blocks in use that have no content yet.
- A request's blocks are freed from the last to the first, so each extent in the queue is evicted backwards.
- A block may be cached more than once. The copy cached first is hit: extents are numbered as they are cached.

Source: vllm/v1/core/block_pool.py:BlockPool@0.32. `tests.support.blocks` has the same rules block by block,
and `tests/sim/test_scheduler_pool.py` compares the two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from operator import attrgetter
from weakref import ref

Span = tuple[Hashable, int]
"""A text's name, and the number of its first tokens. The name covers everything that the KV depends on."""

BlockHash = tuple["Segment", int]


class Subtree:
    """All sequences that begin with the same text."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0
        """While it is the same, look-ups of these sequences find the same blocks, and the rows that they
        returned hold."""


class Segment:
    """One span at its place after everything before it."""

    __slots__ = ("__weakref__", "_before", "_following", "_key", "copies", "subtree")

    def __init__(
        self,
        num_groups: int,
        before: Segment | None = None,
        key: tuple[Hashable, int] | None = None,
        subtree: Subtree | None = None,
    ) -> None:
        """`key`: its text and the token at which it begins; None at the root. By default in a new subtree."""
        self.subtree = subtree or Subtree()
        # Cached content after a segment is found through it.
        self._before = before
        self._key = key
        self._following: dict[tuple[Hashable, int], ref[Segment]] = {}
        self.copies: tuple[list[Extent], ...] = tuple([[] for _ in range(num_groups)])
        """Per layer group, the cached extents that hold blocks of this segment."""

    def follow(self, content_id: Hashable, start: int) -> Segment:
        """The segment of the text that begins at token `start`, where this one ends."""
        key = (content_id, start)
        known = self._following.get(key)
        segment = None if known is None else known()
        if segment is None:
            # The root has no text, nor have the segments after it, one for each cache salt and adapter.
            has_text = self._before is not None and self._before._before is not None
            segment = Segment(len(self.copies), self, key, self.subtree if has_text else None)
            self._following[key] = ref(segment)
        return segment

    def __del__(self) -> None:
        """Leave the segment before it. A `WeakValueDictionary` does the same in twice the time."""
        if self._before is not None and self._key is not None:
            known = self._before._following.get(self._key)
            if known is not None and known() in (None, self):
                del self._before._following[self._key]

    def __repr__(self) -> str:
        """Unique for each text, because kinds of jobs are named by blocks of their prompts."""
        keys, segment = list[tuple[Hashable, int]](), self
        while segment._before is not None and segment._key is not None:
            keys.append(segment._key)
            segment = segment._before
        name = ""
        for content_id, start in reversed(keys):
            name = blake2b(f"{name} {content_id!r} {start}".encode(), digest_size=8).hexdigest()
        return name


class Extent:
    """A run of full blocks in the same state: `first` to before `end`, counted from the sequence's start.

    They are in one segment, have the same number of references, and one place in the free queue. Most are
    cached. Blocks that a sliding window fills between two of its checkpoints are not.
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
        """Whether look-ups find it. If not, its blocks become blank as soon as they are free."""
        self.num_holds = 0
        """The number of its references that leases have."""
        self.after: Extent | None = None
        """The extent that was split off after it. Older ranges find all their blocks through it."""
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

    __slots__ = ("first_blocks", "segments", "subtree")

    def __init__(self, root: Segment, key: Hashable, spans: Iterable[Span], block_size: int) -> None:
        """The path of these spans. `key`: what their KV also depends on, the cache salt and the adapter."""
        segment, start = root.follow(key, 0), 0
        self.first_blocks: list[int] = []
        self.segments: list[Segment] = []
        for content_id, num_tokens in spans:
            segment = segment.follow(content_id, start)
            self.first_blocks.append(start // block_size)
            self.segments.append(segment)
            start += num_tokens
        self.subtree = self.segments[0].subtree

    def get_ranges(self, first: int, end: int) -> list[tuple[Segment, int, int]]:
        """The blocks from `first` to before `end`, as (segment, first block, end) of each segment."""
        if first >= self.first_blocks[-1]:
            return [(self.segments[-1], first, end)] if first < end else []
        ranges: list[tuple[Segment, int, int]] = []
        index = bisect_right(self.first_blocks, first)
        for stop in self.first_blocks[index : bisect_left(self.first_blocks, end, index)]:
            if stop > first:
                ranges.append((self.segments[index - 1], first, stop))
                first = stop
            index += 1
        if first < end:
            ranges.append((self.segments[index - 1], first, end))
        return ranges

    def get_segment(self, block: int) -> Segment:
        """The segment that a block belongs to."""
        return self.segments[bisect_right(self.first_blocks, block) - 1]


Range = tuple[Extent, int, int]
"""`(extent, first, end)`: the blocks `first` to before `end` of a segment, in this extent and in those split
off after it."""


class Row:
    """Cached blocks of one sequence in order. It behaves like a list of blocks that is only cut at its tail.

    row        │ 0 1 2 3 4 5 │ 6 7 │ 8 9 …    blocks, counted from the row's start
    ranges     │  segment A  │  B  │  C  …    each lies in one segment
    row[7:]                    │ 7 │ 8 9 …    the tail that `del row[7:]` takes away
    """

    __slots__ = ("num_blocks", "ranges")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges = list(ranges)
        self.num_blocks = 0
        for _, first, end in self.ranges:
            self.num_blocks += end - first

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, tail: slice) -> Row:
        """The blocks from `tail.start` on."""
        row, left = Row(), self.num_blocks - (tail.start or 0)
        for extent, first, end in reversed(self.ranges):
            if left <= 0:
                break
            row.append(extent, max(first, end - left), end)
            left -= end - first
        row.ranges.reverse()
        return row

    def __delitem__(self, tail: slice) -> None:
        """Forget the blocks from `tail.start` on."""
        num_over = self.num_blocks - (tail.start or 0)
        if num_over <= 0:
            return
        self.num_blocks -= num_over
        # A copy of the row may share the list.
        self.ranges = self.ranges.copy()
        while num_over > 0:
            extent, first, end = self.ranges.pop()
            num_over -= end - first
            if num_over < 0:
                self.ranges.append((extent, first, first - num_over))

    def get_extents(self) -> dict[int, Extent]:
        """The extent of each block. Of two copies of a block, it tells which one this is."""
        return {n: skip_to(extent, n) for extent, first, end in self.ranges for n in range(first, end)}

    def append(self, extent: Extent, first: int, end: int) -> None:
        """Add blocks at the end."""
        self.ranges.append((extent, first, end))
        self.num_blocks += end - first


def skip_to(extent: Extent, block: int) -> Extent:
    """The extent that holds a block: this one, or one that was split off after it."""
    while extent.end <= block:
        assert extent.after is not None
        extent = extent.after
    return extent


class _Queue:
    """Extents in eviction order: a doubly linked ring around a sentinel."""

    def __init__(self) -> None:
        self.sentinel = Extent(Segment(0), [], 0, 0, 0)

    def __iter__(self) -> Iterator[Extent]:
        extent = self.sentinel.next
        while extent is not self.sentinel:
            yield extent
            extent = extent.next

    def append(self, extent: Extent) -> None:
        _link_before(self.sentinel, extent)


def _link_before(behind: Extent, extent: Extent) -> None:
    before = behind.previous
    before.next = behind.previous = extent
    extent.previous, extent.next = before, behind


def _unlink(extent: Extent) -> None:
    extent.previous.next, extent.next.previous = extent.next, extent.previous
    # An evicted extent must not refer to its neighbours, or it would keep all later evicted ones in memory.
    extent.previous = extent.next = extent


class ExtentPool:
    """All blocks of one engine: take, hit, hold, free, cache."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        """A pool of `num_blocks` blocks for this many layer groups; the null block is not counted."""
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self.num_leased_blocks = 0
        """Distinct blocks that leases hold references to."""
        self.num_idle_leased_blocks = 0
        """The leased blocks without other references. They are freed before an allocation fails."""
        self._num_blanks = num_blocks
        self._num_cached = 0
        self._free = _Queue()
        self.root = Segment(num_groups)

    @property
    def num_running_blocks(self) -> int:
        """Blocks in use that no lease holds."""
        return self.num_blocks - self.num_free_blocks - self.num_leased_blocks

    # Content.

    def find(self, path: Path, group: int, first: int, end: int) -> Row:
        """Cached blocks of a sequence from block `first` up to the first miss, and before `end`.

        blocks      │ first … │ … │ … │ … end)
        segments    │    A    │ B     │ C          one range for each segment, or for each copy in it
        cached      ├─────────┼───┤   ├──┤         the row ends where the first block is missing
        """
        ranges: list[Range] = []
        for segment, start, stop in path.get_ranges(first, end):
            copies = segment.copies[group]
            if len(copies) == 1 and copies[0].first <= start and stop <= copies[0].end:
                ranges.append((copies[0], start, stop))
                continue
            ranges += get_first_cached(copies, start, stop)
            if not ranges or ranges[-1][2] < stop:
                break
        return Row(ranges)

    def find_runs(self, path: Path, group: int, end: int) -> list[tuple[int, int]]:
        """All cached blocks of a sequence before block `end`, as runs (first, end) with gaps between them."""
        runs: list[tuple[int, int]] = []
        for segment, start, stop in path.get_ranges(0, end):
            for copy in sorted(segment.copies[group], key=attrgetter("first")):
                first, last = max(copy.first, start), min(copy.end, stop)
                if first < last and runs and first <= runs[-1][1]:
                    runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
                elif first < last:
                    runs.append((first, last))
        return runs

    def cache(self, row: Row, path: Path, group: int, first: int, end: int) -> None:
        """Let look-ups find the blocks `first` to before `end` of a sequence, and append them to its row.

        The caller has taken the blocks, and no other holder has them.
        """
        path.subtree.version += 1
        self._num_cached += 1
        for segment, start, stop in path.get_ranges(first, end):
            copies = segment.copies[group]
            last, begin, _ = row.ranges[-1] if row.ranges else (None, 0, 0)
            if last is not None and can_grow(last, copies, start, stop):
                # Blocks that decoding fills one by one make one extent.
                last.end = stop
                row.ranges[-1] = (last, begin, stop)
                row.num_blocks += stop - start
            else:
                extent = Extent(segment, copies, start, stop, self._num_cached)
                copies.append(extent)
                row.append(extent, start, stop)

    def fill(self, row: Row, path: Path, first: int, end: int) -> None:
        """Append the full blocks `first` to before `end` to a sequence's row. No look-up finds them."""
        path.subtree.version += 1
        for segment, start, stop in path.get_ranges(first, end):
            last, begin, _ = row.ranges[-1] if row.ranges else (None, 0, 0)
            if last is not None and not last.is_cached and last.segment is segment and last.end == start:
                last.end = stop
                row.ranges[-1] = (last, begin, stop)
                row.num_blocks += stop - start
            else:
                extent = Extent(segment, [], start, stop, 0)
                extent.is_cached = False
                row.append(extent, start, stop)

    def uncover(self, row: Row, group: int) -> None:
        """Let look-ups find blocks that `fill` added. Blocks that are cached already do not change."""
        self._num_cached += 1
        for extent in self._get_extents(row):
            extent.segment.subtree.version += 1
            if not extent.is_cached:
                extent.is_cached, extent.order = True, self._num_cached
                extent.home = extent.segment.copies[group]
                extent.home.append(extent)

    def reset(self) -> bool:
        """Forget all content. While any block is referenced, return False and change nothing."""
        if self.num_free_blocks != self.num_blocks:
            return False
        for extent in self._free:
            extent.segment.subtree.version += 1
            extent.home.clear()
        self._free = _Queue()
        self._num_blanks = self.num_blocks
        return True

    # References.

    def take(self, num_blocks: int) -> None:
        """Take blocks from the front of the free queue; their content is evicted.

        Raises ValueError, and changes nothing, if fewer are free.

        free queue    [ 3 blanks ]   [ extent 4-9 ]  [ … ]
        take(5)       └─ all 3 ──┘          └ 8, 9           the extent keeps 4-7
        """
        if num_blocks > self.num_free_blocks:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free_blocks} are free")
        self.num_free_blocks -= num_blocks
        num_blanks = min(num_blocks, self._num_blanks)
        self._num_blanks -= num_blanks
        num_blocks -= num_blanks
        while num_blocks > 0:
            extent = self._free.sentinel.next
            extent.segment.subtree.version += 1
            num_evicted = min(num_blocks, extent.end - extent.first)
            extent.end -= num_evicted
            num_blocks -= num_evicted
            if extent.end == extent.first:
                _unlink(extent)
                extent.home.remove(extent)

    def give_back(self, num_blanks: int) -> None:
        """Free blocks that were taken and never cached."""
        self._num_blanks += num_blanks
        self.num_free_blocks += num_blanks

    def hold(self, row: Row, *, for_lease: bool = False) -> None:
        """Take one more reference to each block (a prefix hit, a lease). Free blocks leave the queue."""
        extents = self._get_extents(row)
        for extent in extents:
            if extent.ref_cnt == 0:
                _unlink(extent)
                self.num_free_blocks -= extent.end - extent.first
            elif extent.ref_cnt == extent.num_holds:
                self.num_idle_leased_blocks -= extent.end - extent.first
            extent.ref_cnt += 1
        if for_lease:
            self._count_leased(extents, 1)

    def release(self, row: Row, *, for_lease: bool = False) -> None:
        """Drop one reference to each block, the last block first. `for_lease`: it is a lease's reference."""
        extents = self._get_extents(row)
        if for_lease:
            self._count_leased(extents, -1)
        for extent in reversed(extents):
            extent.ref_cnt -= 1
            if extent.ref_cnt > 0:
                if extent.ref_cnt == extent.num_holds:
                    self.num_idle_leased_blocks += extent.end - extent.first
                continue
            if extent.is_cached:
                self.num_free_blocks += extent.end - extent.first
                self._free.append(extent)
            else:
                self.give_back(extent.end - extent.first)

    def release_head(self, row: Row, num_blocks: int) -> None:
        """Drop the references to a row's first blocks, the last of them first, and remove them from the row.

        row    │ first num_blocks blocks │ the rest … │
                ←─────── freed ─────────   stays in the row
        """
        head = Row()
        while num_blocks > 0:
            extent, first, end = row.ranges[0]
            extent.segment.subtree.version += 1
            stop = min(end, first + num_blocks)
            head.append(extent, first, stop)
            num_blocks -= stop - first
            row.ranges[: 1 if stop == end else 0] = []
            if stop < end:
                row.ranges[0] = (extent, stop, end)
        row.num_blocks -= head.num_blocks
        self.release(head)
        if row.ranges:
            # Without this, every later walk would begin at an extent far before the row's first block.
            extent, first, end = row.ranges[0]
            row.ranges[0] = (skip_to(extent, first), first, end)

    def count_blocks(self, row: Row, *, ref_cnt: int) -> int:
        """The number of a row's blocks with `ref_cnt` references. Those with none are in the free queue."""
        num_blocks = 0
        for extent, first, end in row.ranges:
            while first < end:
                extent = skip_to(extent, first)
                stop = min(extent.end, end)
                if extent.ref_cnt == ref_cnt:
                    num_blocks += stop - first
                first = stop
        return num_blocks

    def count_tail(self, row: Row, num_blocks: int) -> int:
        """How many of a row's last blocks to release, so that this many become free; all if too few would."""
        num_released = 0
        for extent, first, end in reversed(row.ranges):
            extents = [skip_to(extent, first)]
            while extents[-1].end < end:
                extents.append(skip_to(extents[-1], extents[-1].end))
            for part in reversed(extents):
                num_here = min(part.end, end) - max(part.first, first)
                if part.ref_cnt == 1:
                    if num_here >= num_blocks:
                        return num_released + num_blocks
                    num_blocks -= num_here
                num_released += num_here
        return num_released

    def get_queue(self) -> tuple[int, list[Extent]]:
        """The free queue in eviction order: the number of blank blocks, then extents."""
        return self._num_blanks, list(self._free)

    # Inside.

    def _count_leased(self, extents: Sequence[Extent], change: int) -> None:
        """Count leased blocks: a lease has taken a reference to each (`change` 1), or drops it (-1)."""
        for extent in extents:
            was_leased, was_idle = extent.num_holds > 0, extent.num_holds == extent.ref_cnt
            extent.num_holds += change
            num_blocks, is_idle = extent.end - extent.first, extent.num_holds == extent.ref_cnt
            self.num_leased_blocks += num_blocks * ((extent.num_holds > 0) - was_leased)
            self.num_idle_leased_blocks += num_blocks * (is_idle - was_idle)

    def _get_extents(self, row: Row) -> list[Extent]:
        """The extents of exactly these blocks, in order. An extent that reaches beyond them is split.

        row        │    ├─────────────┤    │
        before     ├─── A ───┼─── B ───────┤
        after      ├ A ─┼ A' ┼── B ───┼ B' ┤      returns A' and B
        """
        extents = []
        for extent, first, end in row.ranges:
            if extent.end <= first:
                extent = skip_to(extent, first)
            if extent.first < first:
                extent = self._split(extent, first)
            while extent.end < end:
                extents.append(extent)
                extent = skip_to(extent, extent.end)
            if extent.end > end:
                self._split(extent, end)
            extents.append(extent)
        return extents

    def _split(self, extent: Extent, at: int) -> Extent:
        """Split an extent before block `at`; returns the new extent, which holds the blocks from `at` on."""
        tail = Extent(extent.segment, extent.home, at, extent.end, extent.order)
        tail.ref_cnt, tail.num_holds = extent.ref_cnt, extent.num_holds
        tail.is_cached = extent.is_cached
        tail.after, extent.after = extent.after, tail
        extent.end = at
        extent.home.append(tail)
        if extent.ref_cnt == 0:
            _link_before(extent, tail)
        return tail


def get_first_cached(copies: list[Extent], first: int, end: int) -> Iterator[Range]:
    """For each block from `first` up to the first miss, the copy that was cached first, as ranges.

    copy 1          ├──────┤
    copy 2    ├───────────────────┤
    hit       │  2  │  1   │  2   │
    """
    in_order = sorted(copies, key=attrgetter("first"))
    # Copies of one block are rare. But an extent that was split often has very many parts, for which the loop
    # below is linear.
    if any(one.end > other.first for one, other in pairwise(in_order)):
        while first < end and (holding := [each for each in copies if each.first <= first < each.end]):
            extent = min(holding, key=attrgetter("order"))
            earlier = (each.first for each in copies if each.order < extent.order and each.first > first)
            stop = min(end, extent.end, *earlier)
            yield extent, first, stop
            first = stop
        return
    for extent in in_order:
        if extent.end > first:
            if extent.first > first or first >= end:
                return
            yield extent, first, min(end, extent.end)
            first = extent.end


def can_grow(extent: Extent, copies: list[Extent], first: int, end: int) -> bool:
    """Whether blocks may join the extent before them: same holder, same content, no other copies."""
    if extent.end != first or extent.home is not copies or extent.ref_cnt != 1:
        return False
    for other in copies:  # noqa: SIM110 - it is asked for each block that is filled, and `all` takes twice as long
        if other.end > first and other.first < end:
            return False
    return True
