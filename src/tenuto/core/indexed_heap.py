"""A priority queue of ids. The key of an id may change while the id is in the queue."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from tenuto.core.policy import Key

Item = TypeVar("Item", bound=Hashable)
SortKey = tuple[bool | float | int | str, ...]


def get_sort_key(key: Key) -> SortKey:
    """A key that compares with any other, numbers before strings.

    Keys of one hook may differ in shape: if the hook fails once, stock's answer is used in its place. Before
    each part stands whether it is a string. One flat tuple is made and compared faster than pairs.
    """
    parts: list[bool | float | int | str] = []
    for part in key:
        parts += (isinstance(part, str), part)
    return tuple(parts)


class IndexedHeap(Generic[Item]):
    """Ids ordered by key, smallest first. A change takes O(log n) amortised time.

    Of equal keys, the one that was set first goes first. Ids come from clients, so they decide nothing.
    """

    def __init__(self) -> None:
        # A changed or removed id leaves its old heap entry behind; an entry counts only while it is
        # the one in _entries. Rebuilt when more than half is stale, so memory stays linear in len().
        self._entries: dict[Item, tuple[SortKey, int, Item, Key]] = {}
        self._heap: list[tuple[SortKey, int, Item, Key]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """All ids in order; a copy, so the queue may change meanwhile."""
        return iter([item for _, _, item, _ in sorted(self._entries.values())])

    def push(self, item: Item, key: Key) -> None:
        """Add an id, or change the key of one that is there."""
        known = self._entries.get(item)
        if known is not None and known[3] == key:
            return
        self._num_pushed += 1
        entry = self._entries[item] = (get_sort_key(key), self._num_pushed, item, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._forget_stale()

    def get_key(self, item: Item) -> Key:
        """The key of an id; raises KeyError if it is not in the queue."""
        return self._entries[item][3]

    def get_first(self) -> Item | None:
        """The id with the smallest key, or None if the queue is empty."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def get_first_key(self) -> Key | None:
        """The smallest key, or None if the queue is empty."""
        first = self.get_first()
        return None if first is None else self._entries[first][3]

    def get_first_except(self, spared: Item | None) -> Item | None:
        """The id with the smallest key other than `spared`, or None if there is no other id."""
        first = self.get_first()
        if first is None or first != spared:
            return first
        entry = heapq.heappop(self._heap)
        second = self.get_first()
        heapq.heappush(self._heap, entry)
        return second

    def pop(self) -> Item:
        """Remove and return the id with the smallest key; raises IndexError if the queue is empty."""
        item = self.get_first()
        if item is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._entries[item]
        return item

    def discard(self, item: Item) -> None:
        """Remove an id if it is there."""
        self._entries.pop(item, None)
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._forget_stale()

    def _forget_stale(self) -> None:
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
