"""Room for tokens: from the KV cache, out of leases where they yield, else by the policy's victim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenuto.sim.engine.request import Request
from tenuto.sim.kv.kv_cache import Hit

if TYPE_CHECKING:
    from tenuto.sim.engine.scheduler import Scheduler


class Allocator:
    """Allocates for the scheduler, with the same hooks in the same order as `tenuto.vllm.scheduler`."""

    def __init__(self, scheduler: Scheduler, running: list[Request]) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._driver = scheduler.driver
        self._running = running
        self._has_leases = self._driver.policy.overrides("retain")

    def try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None, now_s: float) -> bool:
        """Slots for a request's next tokens; a request that starts brings its hit, a running one None."""
        is_busy = bool(self._running)
        if self._kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
            return True
        return self._has_leases and self._allocate_from_leases(request, num_new_tokens, hit, now_s)

    def _allocate_from_leases(
        self, request: Request, num_new_tokens: int, hit: Hit | None, now_s: float
    ) -> bool:
        is_busy = bool(self._running)
        # Loads on their way will run without anyone's help.
        num_others = len(self._running) + self._scheduler.num_loading - (1 if hit is None else 0)
        stalled = num_others <= 0
        num_wanted = self._kv.count_missing(request, num_new_tokens, hit, is_busy=is_busy)
        if not stalled and num_wanted > self._driver.get_num_reclaimable_blocks(request.turn_id):
            # Taking back what cannot be enough would cost the leases and help nobody.
            return False
        while self._driver.reclaim(num_wanted, now_s, for_turn_id=request.turn_id, stalled=stalled):
            if self._kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
                return True
            num_wanted *= 2
        return False

    def put_victim_last(self, request: Request, now_s: float) -> None:
        """The tail of `running` is preempted for this request: put the policy's choice there.

        Only those not yet scheduled in this step may go; they stand from the request on.
        """
        candidates = self._running[self._running.index(request) :]
        victim_id = self._driver.get_victim([each.turn_id for each in candidates], now_s)
        for each in candidates:
            if each.turn_id == victim_id:
                self._running.remove(each)
                self._running.append(each)
