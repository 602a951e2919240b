"""A block may be cached more than once: which copy is hit, and when a new block may join an extent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tenuto.sim.kv.rows import Range
from tenuto.sim.kv.segments import Extent


def get_first_cached(copies: list[Extent], first: int, end: int) -> Iterator[Range]:
    """For each block from `first` up to the first miss the copy that was cached first, as ranges.

    copy 1          ├──────┤
    copy 2    ├───────────────────┤
    hit       │  2  │  1   │  2   │
    """
    in_order = sorted(copies, key=_get_first)
    # Copies of one block are rare, but an extent that was split often has very many parts: for these the loop
    # below is linear.
    if any(one.end > other.first for one, other in pairwise(in_order)):
        while first < end and (extent := _get_copy(copies, first)) is not None:
            stop = _get_stop(copies, extent, first, end)
            yield Range(extent, first, stop)
            first = stop
        return
    for extent in in_order:
        if extent.end > first:
            if extent.first > first or first >= end:
                return
            yield Range(extent, first, min(end, extent.end))
            first = extent.end


def _get_first(extent: Extent) -> int:
    return extent.first


def _get_copy(copies: list[Extent], block: int) -> Extent | None:
    """The copy of a block that was cached first, or None."""
    found = None
    for extent in copies:
        if extent.first <= block < extent.end and (found is None or extent.order < found.order):
            found = extent
    return found


def _get_stop(copies: list[Extent], extent: Extent, first: int, end: int) -> int:
    """The block at which, after `first`, another copy was cached earlier; or the copy's end."""
    stop = min(end, extent.end)
    for other in copies:
        if other.order < extent.order and first < other.first < stop:
            stop = other.first
    return stop


def can_grow(extent: Extent, copies: list[Extent], first: int, end: int) -> bool:
    """Whether blocks may join the extent before them: same holder, same content, no other copy of them."""
    return (
        extent.end == first
        and extent.home is copies
        and extent.ref_cnt == 1
        and all(other.end <= first or other.first >= end for other in copies)
    )
