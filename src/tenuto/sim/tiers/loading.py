"""Turns that wait for KV from the tiers: from the offer, over the copy, to their start."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tenuto.sim.engine.request import Request, Status
from tenuto.sim.kv.kv_cache import Hit
from tenuto.sim.tiers.offload import Offloader

if TYPE_CHECKING:
    from tenuto.sim.engine.scheduler import Scheduler


class Loading:
    """The scheduler's requests that load, in an engine with tiers."""

    def __init__(self, scheduler: Scheduler, offloader: Offloader) -> None:
        self.ready: deque[Request] = deque()
        """Those whose load is there, in the order in which they start."""
        self._scheduler = scheduler
        self._offloader = offloader

    @property
    def num_requests(self) -> int:
        """Requests that wait for their load, or have it and did not start yet."""
        return len(self.ready) + self._offloader.num_loading

    def collect(self, now_s: float) -> None:
        """Make those ready whose loads are there by now."""
        for request in self._offloader.pop_loaded(now_s):
            self._scheduler.kv.cache(request, request.num_computed_tokens)
            self.ready.append(request)

    def add_offer(self, request: Request, hit: Hit) -> Hit:
        """The hit with what the tiers have behind it, if the policy wants to load that."""
        now_s = self._scheduler.now_s
        offer = self._offloader.get_offer(request, hit.num_tokens, now_s)
        if offer is None or not self._scheduler.driver.may_load(request.turn_id, offer, now_s):
            return hit
        return hit._replace(num_loaded_tokens=offer.num_tokens, waits=not self._offloader.is_sync)

    def load(self, request: Request, hit: Hit) -> float:
        """Begin to copy what a hit says; returns when it is there."""
        return self._offloader.load(request, hit.num_tokens, hit.num_loaded_tokens, self._scheduler.now_s)

    def try_begin(self, request: Request, hit: Hit) -> bool:
        """Take the blocks of a whole request and begin to load; False if they are short.

        On purpose not vLLM's, which takes the loaded tokens' blocks alone: requests that hold these and wait
        for the rest could then keep each other from starting for ever.
        """
        num_tokens = request.num_tokens - hit.num_computed_tokens
        if not self._scheduler.allocator.try_allocate(request, num_tokens, hit, self._scheduler.now_s):
            return False
        self._scheduler.waiting.remove(request)
        request.status = Status.LOADING
        request.num_computed_tokens = hit.num_computed_tokens
        self._offloader.wait_for(request, self.load(request, hit))
        return True

    def forget(self, request: Request) -> None:
        """A request that loads, or has, went away."""
        if request in self.ready:
            self.ready.remove(request)
        else:
            self._offloader.drop_load(request)
