"""vLLM's waiting queue in the policy's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tenuto.core.driver import Driver
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.core.waiting import WaitingTurns
from tenuto.vllm.compat.scheduler import RequestQueue


class TurnQueue(WaitingTurns[Any], RequestQueue):  # type: ignore[misc]
    """Waiting requests in the order of the driver's keys.

    Parked requests count in `len`, so that vLLM's own counts and metrics stay correct.
    """

    def __init__(self, driver: Driver, clock: Any) -> None:
        """`clock`: the module `time`, or a test's."""
        super().__init__(
            lambda request_id: driver.get_queue_key(request_id, clock.monotonic()), driver.make_order
        )
        self._driver = driver
        self._popped: dict[str, Key | None] = {}
        """Keys of the requests that this step popped. It also pops those that it skips (they wait for a
        grammar or an adapter), and puts them back at its end. To ask for their keys each time is too slow."""

    def add_request(self, request: Any) -> None:
        """Add a request that arrived. It is parked if admission must be asked first."""
        request_id = request.request_id
        self._requests[request_id] = request
        if self._driver.needs_admission(request_id):
            self._parked.push(request_id, self._get_key(request_id))
        else:
            self._make_ready(request_id)

    def prepend_request(self, request: Any) -> None:
        """Add a request that returns to the queue, because it was preempted."""
        self._requests[request.request_id] = request
        self._make_ready(request.request_id)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests that return to the queue, because they were skipped in this step."""
        for self._num_skipped, request in enumerate(requests, 1):
            self._requests[request.request_id] = request
            self._make_ready(request.request_id, self._popped.pop(request.request_id, None))

    def pop_request(self) -> Any:
        """Remove and return the request that was peeked last.

        vLLM peeks, allocates for the peeked request, then pops it. Nothing changes the order in between.
        """
        key, request_id = self._ready.get_first_key(), self._ready.pop()
        self._popped[request_id] = key
        return self._requests.pop(request_id)

    def peek_request(self) -> Any:
        """The first request that is not parked."""
        # The last allocation may have taken leases of waiting turns.
        self._driver.settle()
        return self._get_first()

    def remove_request(self, request: Any) -> None:
        """Remove a request; does nothing if it is not in the queue."""
        self.discard(request.request_id)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove the requests that are in the queue; ignore the others."""
        for request in list(requests):
            self.discard(request.request_id)

    def reorder(self, turn_id: str) -> None:
        """Ask for a request's key again."""
        self._popped.pop(turn_id, None)
        super().reorder(turn_id)

    def get_request(self, request_id: str) -> Any:
        """The request with this id; raises KeyError if it is not in the queue."""
        return self._requests[request_id]

    def is_parked(self, request_id: str) -> bool:
        """Whether admission holds a request back."""
        return request_id in self._parked

    def get_first_ready(self, number: int) -> set[str]:
        """The first requests that are not parked, in the order of keys, at most `number`."""
        firsts: dict[str, Key] = {}
        while len(firsts) < number and (first := self._ready.get_first()) is not None:
            firsts[first] = self._ready.get_key(first)
            self._ready.discard(first)
        for request_id, key in firsts.items():
            self._ready.push(request_id, key)
        return set(firsts)

    def begin_step(self) -> None:
        """A step is about to be scheduled, and admission was asked."""
        self._popped.clear()
        self._num_skipped = 0

    def _make_ready(self, turn_id: str, key: Key | None = None) -> None:
        self._ready.push(turn_id, self._get_key(turn_id) if key is None else key)

    def _get_first(self) -> Any:
        first = self._ready.get_first()
        if first is None:
            raise IndexError("peek from an empty queue")
        return self._requests[first]


class SplitQueue(TurnQueue):
    """The queue with a canary: the policy orders its own jobs, and cannot make the others wait.

    Each request has a *place*: its place in stock vLLM's queue. Requests that run as in stock keep their
    places. Requests under the policy exchange theirs: when one of their places comes up, the first of them in
    the policy's order takes it.
    """

    def __init__(self, driver: Driver, clock: Any) -> None:
        super().__init__(driver, clock)
        self._stock: IndexedHeap[str] = IndexedHeap()
        """Requests that keep their places, by place."""
        self._places: IndexedHeap[str] = IndexedHeap()
        """Ready requests under the policy, by the place that each has now."""
        self._taken: dict[str, Key] = {}
        """Places that were taken in this step. A request that vLLM skips gets its place back."""

    def begin_step(self) -> None:
        """A step is about to be scheduled."""
        super().begin_step()
        self._taken.clear()

    def pop_request(self) -> Any:
        """Remove and return the request that was peeked last. It takes the first place."""
        request = self._get_first()
        if request.request_id in self._places:
            owner = self._places.get_first()
            assert owner is not None
            self._taken[request.request_id] = self._places.get_key(owner)
            self._places.push(owner, self._places.get_key(request.request_id))
            self._popped[request.request_id] = self._ready.get_key(request.request_id)
        self.discard(request.request_id)
        return request

    def discard(self, turn_id: str) -> None:
        """Remove a request, if it is in the queue."""
        super().discard(turn_id)
        self._stock.discard(turn_id)
        self._places.discard(turn_id)

    def _make_ready(self, turn_id: str, key: Key | None = None) -> None:
        place = self._driver.get_stock_key(turn_id)
        if self._driver.runs_as_stock(turn_id):
            self._stock.push(turn_id, place)
            return
        super()._make_ready(turn_id, key)
        taken = self._taken.pop(turn_id, None)
        self._places.push(turn_id, place if taken is None else min(place, taken))

    def _get_first(self) -> Any:
        place, first = self._places.get_first_key(), self._stock.get_first()
        if first is not None and (place is None or self._stock.get_key(first) < place):
            return self._requests[first]
        return super()._get_first()

    def __bool__(self) -> bool:
        return len(self._ready) > 0 or len(self._stock) > 0

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._requests.__getitem__, self._stock)
        yield from super().__iter__()
