"""All that is to come in a fleet, in the order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

SENDS = 1
"""The place of everything but steps among the events of one moment: see `tenuto.sim.fleet.engine`."""

Act = Callable[[], None]


class Events:
    """One heap. Events of one moment come by their place, then as they were added. O(log n) each."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Act]] = []
        self._num_added = 0
        self.num_of_clients = 0
        """Those without which the run would be over."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, at_s: float, act: Act, *, place: int = SENDS) -> None:
        """Something that happens as long as the run goes on: a step, a look at the metrics."""
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, place, self._num_added, act))

    def add_of_client(self, at_s: float, act: Act) -> None:
        """Something that the run waits for."""

        def act_once() -> None:
            self.num_of_clients -= 1
            act()

        self.num_of_clients += 1
        self.add(at_s, act_once)

    def pop(self) -> tuple[float, Act]:
        """The next one, and its time."""
        at_s, _, _, act = heapq.heappop(self._heap)
        return at_s, act
