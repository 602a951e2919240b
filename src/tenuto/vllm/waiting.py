"""vLLM's waiting queue in the policy's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tenuto.core.driver import Driver
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.vllm.compat.scheduler import RequestQueue


class TurnQueue(RequestQueue):  # type: ignore[misc]
    """Waiting requests in the order of the driver's keys.

    Requests that admission holds back are *parked*: they are never returned as the first. They count in
    `len`, so that vLLM's own counts and metrics stay correct.
    """

    def __init__(self, driver: Driver, clock: Any, *, asks_admission: bool) -> None:
        """`asks_admission`: whether the policy admits turns. `clock`: the module `time`, or a test's."""
        self._driver = driver
        self._clock = clock
        self._asks_admission = asks_admission
        self._requests: dict[str, Any] = {}
        self._ready = driver.make_order()
        self._parked = driver.make_order()
        self._popped: dict[str, Key | None] = {}
        """Keys of the requests that this step popped. It also pops those that it skips (they wait for a
        grammar or an adapter), and puts them back at its end. To ask for their keys each time is too slow."""

    def add_request(self, request: Any) -> None:
        """Add a request that arrived. It is parked if admission must be asked first."""
        request_id = request.request_id
        self._requests[request_id] = request
        if self._asks_admission and self._driver.needs_admission(request_id):
            self._parked.push(request_id, self._get_key(request_id))
        else:
            self._make_ready(request_id)

    def prepend_request(self, request: Any) -> None:
        """Add a request that returns to the queue, because it was preempted."""
        self._requests[request.request_id] = request
        self._make_ready(request.request_id)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests that return to the queue, because they were skipped in this step."""
        for request in requests:
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
        if self._requests.pop(request.request_id, None) is not None:
            self._ready.discard(request.request_id)
            self._parked.discard(request.request_id)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove the requests that are in the queue; ignore the others."""
        for request in list(requests):
            self.remove_request(request)

    def reorder(self, request_id: str) -> None:
        """Ask for a request's key again."""
        self._popped.pop(request_id, None)
        for order in (self._ready, self._parked):
            if request_id in order:
                order.push(request_id, self._get_key(request_id))

    def reorder_all(self) -> None:
        """Ask for every request's key again."""
        for request_id in self._requests:
            self.reorder(request_id)

    def get_request(self, request_id: str) -> Any:
        """The request with this id; raises KeyError if it is not in the queue."""
        return self._requests[request_id]

    @property
    def num_parked(self) -> int:
        """How many requests are parked."""
        return len(self._parked)

    def is_parked(self, request_id: str) -> bool:
        """Whether admission holds a request back."""
        return request_id in self._parked

    def get_first_parked(self) -> str | None:
        """The first parked request in the order of keys, or None."""
        return self._parked.get_first()

    def get_first_ready(self, number: int) -> set[str]:
        """The first requests that are not parked, in the order of keys, at most `number`."""
        firsts: dict[str, Key] = {}
        while len(firsts) < number and (first := self._ready.get_first()) is not None:
            firsts[first] = self._ready.get_key(first)
            self._ready.discard(first)
        for request_id, key in firsts.items():
            self._ready.push(request_id, key)
        return set(firsts)

    def unpark(self, request_id: str) -> None:
        """Let a request start, if it is parked."""
        if request_id in self._parked:
            self._parked.discard(request_id)
            self._make_ready(request_id)

    def begin_step(self) -> None:
        """A step is about to be scheduled."""
        self._popped.clear()

    def _get_key(self, request_id: str) -> Key:
        return self._driver.get_queue_key(request_id, self._clock.monotonic())

    def _make_ready(self, request_id: str, key: Key | None = None) -> None:
        self._ready.push(request_id, self._get_key(request_id) if key is None else key)

    def _get_first(self) -> Any:
        first = self._ready.get_first()
        if first is None:
            raise IndexError("peek from an empty queue")
        return self._requests[first]

    def __bool__(self) -> bool:
        return len(self._ready) > 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        for order in (self._ready, self._parked):
            yield from map(self._requests.__getitem__, order)


class SplitQueue(TurnQueue):
    """The queue with a canary: the policy orders its own jobs, and cannot make the others wait.

    Each request has a *place*: its place in stock vLLM's queue. Requests that run as in stock keep their
    places. Requests under the policy exchange theirs: when one of their places comes up, the first of them in
    the policy's order takes it.
    """

    def __init__(self, driver: Driver, clock: Any, *, asks_admission: bool) -> None:
        super().__init__(driver, clock, asks_admission=asks_admission)
        self._stock = IndexedHeap()
        """Requests that keep their places, by place."""
        self._places = IndexedHeap()
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
        self.remove_request(request)
        return request

    def remove_request(self, request: Any) -> None:
        """Remove a request; does nothing if it is not in the queue."""
        super().remove_request(request)
        self._stock.discard(request.request_id)
        self._places.discard(request.request_id)

    def _make_ready(self, request_id: str, key: Key | None = None) -> None:
        place = self._driver.get_stock_key(request_id)
        if self._driver.runs_as_stock(request_id):
            self._stock.push(request_id, place)
            return
        super()._make_ready(request_id, key)
        taken = self._taken.pop(request_id, None)
        self._places.push(request_id, place if taken is None else min(place, taken))

    def _get_first(self) -> Any:
        place, stock_place = self._places.get_first_key(), self._stock.get_first_key()
        if place is None or (stock_place is not None and stock_place < place):
            first = self._stock.get_first()
            if first is None:
                raise IndexError("peek from an empty queue")
            return self._requests[first]
        return super()._get_first()

    def __bool__(self) -> bool:
        return len(self._ready) > 0 or len(self._stock) > 0

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._requests.__getitem__, self._stock)
        yield from super().__iter__()
