"""Slots for tokens: from free blocks first, then from blocks that leases give up."""

from __future__ import annotations

from tenuto.core.driver import Driver
from tenuto.sim.engine.state import EngineState
from tenuto.sim.kv.hits import Hit
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request


class Allocator:
    """Allocates for the scheduler; asks the driver at the same places as `tenuto.vllm` does."""

    def __init__(self, state: EngineState, kv: KvCache, driver: Driver) -> None:
        self._state = state
        self._kv = kv
        self._driver = driver
        self._has_leases = driver.policy.overrides("retain")
        self.has_slots = kv.has_slots
        """Whether a running request needs no allocation for its next tokens."""

    def get_hit(self, request: Request) -> Hit:
        """The longest cached prefix of a waiting request."""
        return self._kv.get_hit(request)

    def try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None) -> bool:
        """Take slots for a request's next tokens; False, and nothing is taken, if blocks are short.

        A request that starts brings its hit, a running one None. Leases may have been shortened either way.
        """
        is_busy = bool(self._state.running)
        if self._kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
            return True
        if not self._has_leases:
            return False
        is_allocated = self._allocate_from_leases(request, num_new_tokens, hit)
        # Ending a lease may change the order of waiting turns; no queue changes inside an allocation.
        self._driver.settle()
        return is_allocated

    def _allocate_from_leases(self, request: Request, num_new_tokens: int, hit: Hit | None) -> bool:
        state, now_s = self._state, self._state.now_s
        is_busy = bool(state.running)
        # Requests whose loads are on their way will run without anyone's help.
        num_others = len(state.running) + state.num_loading - (1 if hit is None else 0)
        stalled = num_others <= 0
        num_wanted = self._kv.count_missing(request, num_new_tokens, hit, is_busy=is_busy)
        if not stalled and num_wanted > self._driver.get_num_reclaimable_blocks(request.turn_id):
            # All leases together would not be enough: ending them would help nobody.
            return False
        while self._driver.reclaim(num_wanted, now_s, for_turn_id=request.turn_id, stalled=stalled):
            if self._kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
                return True
            # What was given up is partly held by others, or part of the hit.
            num_wanted *= 2
        return False
