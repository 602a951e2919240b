"""Turns that load KV from the tiers: from the offer, over the copy, to their start."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tenuto.core.driver import Driver
from tenuto.sim.engine.state import EngineState, Load
from tenuto.sim.kv.hits import Hit
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.tiers.offloader import Offloader


class Loading:
    """Moves requests from `waiting` over `loading` to `loaded`, in an engine with tiers.

    tokens of a request   [ hit | loaded from a tier | computed anew ]
                           └─── num_computed_tokens ─┘
    """

    def __init__(
        self,
        state: EngineState,
        kv: KvCache,
        driver: Driver,
        offloader: Offloader,
        numbers: Iterator[int],
    ) -> None:
        """`numbers`: 0, 1, …; loads that end at the same time end in their order."""
        self._state = state
        self._kv = kv
        self._driver = driver
        self._offloader = offloader
        self._numbers = numbers

    def collect(self) -> None:
        """Move requests whose loads have ended to `loaded`.

        With full attention, what they loaded is cached from here on; where layers differ, from when they are
        about to start, as in vLLM. Blocks that were only waiting for their stores are freed first.
        """
        state = self._state
        self._offloader.release_stored(state.now_s)
        while state.loading and state.loading[0].done_s <= state.now_s:
            request = heapq.heappop(state.loading).request
            if self._offloader.takes_whole_prompts:
                self.publish(request)
            state.loaded.append(request)

    def publish(self, request: Request) -> None:
        """Let look-ups find what a request has loaded."""
        if request.status is Status.LOADING:
            self._kv.cache(request, request.num_computed_tokens)
            request.status = Status.LOADED

    def get_next_event_s(self) -> float | None:
        """When the next copy ends that a request or a block waits for; None if none does."""
        stored_s = self._offloader.get_next_stored_s()
        loaded_s = self._state.loading[0].done_s if self._state.loading else None
        return min((each for each in (stored_s, loaded_s) if each is not None), default=None)

    def add_offer(self, request: Request, hit: Hit) -> Hit | None:
        """The hit with what the tiers have behind it, if the policy wants to load that.

        None if the request had better ask again in a later step.
        """
        now_s = self._state.now_s
        offer = self._offloader.get_offer(request, hit.num_tokens, now_s)
        if offer is None:
            return hit
        if self._offloader.must_wait(request, hit.num_tokens, offer.num_tokens, now_s):
            return None
        num_tokens = self._driver.get_load_tokens(request.turn_id, offer, now_s)
        num_tokens = self._offloader.choose_part(hit.num_tokens, num_tokens, offer.num_tokens)
        if num_tokens <= 0:
            return hit
        num_reserved = 0 if self._offloader.takes_whole_prompts else self._count_reserved()
        return hit._replace(
            num_loaded_tokens=num_tokens,
            waits=not self._offloader.is_sync,
            num_reserved_blocks=num_reserved,
        )

    def load(self, request: Request, hit: Hit) -> float:
        """Begin to copy what a hit says; returns when it is there, in seconds."""
        return self._offloader.load(request, hit.num_tokens, hit.num_loaded_tokens, self._state.now_s)

    def count_new_tokens(self, request: Request, hit: Hit) -> int:
        """Tokens behind what it loads for which a request takes blocks before it loads.

        With full attention those of all its tokens, where vLLM takes only the blocks of the loaded ones. This
        differs on purpose: requests that hold these and wait for the rest could keep each other from starting
        for ever. Where layers differ it is as in vLLM, which leaves free what others need.
        """
        return request.num_tokens - hit.num_computed_tokens if self._offloader.takes_whole_prompts else 0

    def begin(self, request: Request, hit: Hit) -> None:
        """Begin to load what a hit says; the request has its blocks."""
        request.status = Status.LOADING
        request.num_computed_tokens = hit.num_computed_tokens
        request.num_loaded_tokens = hit.num_loaded_tokens
        load = Load(self.load(request, hit), next(self._numbers), request)
        heapq.heappush(self._state.loading, load)

    def drop(self, request: Request) -> None:
        """A request that loads, or has loaded, went away."""
        state = self._state
        if request in state.loaded:
            state.loaded.remove(request)
        else:
            state.loading = [load for load in state.loading if load.request is not request]
            heapq.heapify(state.loading)

    def _count_reserved(self) -> int:
        """Free blocks that requests which have begun need for the rest of their prompts.

        Source: _inflight_prefill_reserved_blocks in vllm/v1/core/sched/scheduler.py@0.32.
        """
        state = self._state
        begun = [load.request for load in state.loading]
        begun += [*state.loaded, *(each for each in state.running if each.is_prefill_chunk)]
        return sum(map(self._kv.count_rest, begun))
