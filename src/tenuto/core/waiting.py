"""The waiting turns of one engine. Both engines' queues are subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tenuto.core.driver import Driver
from tenuto.core.fairness import FairOrder
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key

Request = TypeVar("Request")
"""What the engine has for a turn."""
GetKey = Callable[[str], Key]


class WaitingTurns(Generic[Request]):
    """Requests in the order of their keys, smallest first.

    Requests that admission holds back are *parked*: they count in `len`, but never go first.
    """

    def __init__(
        self, get_key: GetKey, make_order: Callable[[], IndexedHeap[str] | FairOrder] = IndexedHeap
    ) -> None:
        """`get_key`: returns a turn's present key."""
        self._get_key = get_key
        self._requests: dict[str, Request] = {}
        """By turn id."""
        self._ready, self._parked = make_order(), make_order()
        self._num_skipped = 0
        """How many requests may go, but the last step could not start them."""

    def __len__(self) -> int:
        return len(self._requests)

    def __bool__(self) -> bool:
        """Whether any request may go."""
        return len(self._ready) > 0

    def __iter__(self) -> Iterator[Request]:
        """All requests: those that may go, then those that are parked, each part in order."""
        for order in (self._ready, self._parked):
            yield from map(self._requests.__getitem__, order)

    def discard(self, turn_id: str) -> None:
        """Remove a request, if it is in the queue."""
        if self._requests.pop(turn_id, None) is not None:
            self._ready.discard(turn_id)
            self._parked.discard(turn_id)

    def reorder(self, turn_id: str) -> None:
        """Ask for a turn's key again, if it waits here."""
        for order in (self._ready, self._parked):
            if turn_id in order:
                order.push(turn_id, self._get_key(turn_id))

    def reorder_all(self) -> None:
        """Ask for every turn's key again."""
        for turn_id in self._requests:
            self.reorder(turn_id)

    @property
    def num_parked(self) -> int:
        """How many requests are parked."""
        return len(self._parked)

    def admit(self, driver: Driver, now_s: float, *, idle: bool) -> None:
        """Unpark the turns that may start now. `idle`: nothing runs."""
        while self._parked:
            # Turns that wait for something else, such as a grammar, do not make others wait.
            is_idle = idle and len(self) - self.num_parked <= self._num_skipped
            admitted = driver.admit(self._parked.get_first(), now_s, idle=is_idle)
            if not admitted:
                return
            for turn_id in admitted:
                if turn_id in self._parked:
                    self._parked.discard(turn_id)
                    self._make_ready(turn_id)

    def _make_ready(self, turn_id: str) -> None:
        self._ready.push(turn_id, self._get_key(turn_id))
