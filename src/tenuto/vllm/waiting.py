"""vLLM's waiting queue in the policy's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tenuto.core.fair_order import FairOrder
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.vllm.compat import RequestQueue


class TurnQueue(RequestQueue):  # type: ignore[misc]
    """Waiting requests in the order of their policy keys.

    Requests that admission holds back are *parked* and are never returned as the first. They count in
    `len`, so that vLLM's own counts and metrics stay correct.
    """

    def __init__(
        self,
        get_key: Callable[[Any], Key],
        is_gated: Callable[[Any], bool],
        settle: Callable[[], None],
        make_order: Callable[[], IndexedHeap | FairOrder] = IndexedHeap,
    ) -> None:
        """`settle` updates the order of the queue; it is called before the first request is looked up."""
        self._get_key = get_key
        self._is_gated = is_gated
        self._settle = settle
        self._requests: dict[str, Any] = {}
        self._ready = make_order()
        self._parked = make_order()

    def add_request(self, request: Any) -> None:
        """Add a request that arrived; it is parked if admission must be asked first."""
        self._requests[request.request_id] = request
        order = self._parked if self._is_gated(request) else self._ready
        order.push(request.request_id, self._get_key(request))

    def prepend_request(self, request: Any) -> None:
        """Add a request that returns to the queue (preempted, or skipped in this step)."""
        self._requests[request.request_id] = request
        self._ready.push(request.request_id, self._get_key(request))

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests that return to the queue."""
        for request in requests:
            self.prepend_request(request)

    def pop_request(self) -> Any:
        """Remove and return the request that was peeked last.

        vLLM peeks, allocates for the peeked request, then pops it. Nothing changes the order in between.
        """
        return self._requests.pop(self._ready.pop())

    def peek_request(self) -> Any:
        """The first request that is not parked."""
        self._settle()
        return self._get_first()

    def remove_request(self, request: Any) -> None:
        """Remove a request; does nothing if it is not in the queue."""
        if self._requests.pop(request.request_id, None) is not None:
            self._ready.discard(request.request_id)
            self._parked.discard(request.request_id)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove those of the requests that are in the queue."""
        for request in list(requests):
            self.remove_request(request)

    def reorder(self, request_id: str) -> None:
        """Ask for a request's key again."""
        for order in (self._ready, self._parked):
            if request_id in order:
                order.push(request_id, self._get_key(self._requests[request_id]))

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

    def get_first_parked(self) -> str | None:
        """The first parked request in the order of keys, or None."""
        return self._parked.get_first()

    def unpark(self, request_id: str) -> None:
        """Let a request start, if it is parked."""
        if request_id in self._parked:
            self._parked.discard(request_id)
            self._ready.push(request_id, self._get_key(self._requests[request_id]))

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
            for request_id in order:
                yield self._requests[request_id]
