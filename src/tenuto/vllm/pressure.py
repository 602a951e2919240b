"""What happens when vLLM cannot allocate: leases are reclaimed, and then the policy's victim yields.

All of this runs inside vLLM's `allocate_slots`, so it reorders nothing: the waiting queue calls
`Driver.settle` before it is read again.
"""

from __future__ import annotations

from typing import Any

from tenuto.vllm import compat


class Pressure:
    """Stands behind the allocations of one scheduler that has a driver."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._guard = compat.AllocationGuard(scheduler, self._allocate_with_leases)
        self._now_s = 0.0
        self._victims: list[str] | None = None
        """Running turns in the order in which they yield, once a step needs it."""

    def begin_step(self, now_s: float) -> None:
        """A step is about to be scheduled."""
        self._now_s = now_s
        self._guard.set_for_step()
        self._victims = None

    def _allocate_with_leases(
        self, allocate: Any, request: Any, num_new_tokens: int, kwargs: dict[str, Any]
    ) -> Any:
        """VLLM could not allocate: reclaim leases until it can, and only then let it fail."""
        scheduler, driver, now_s = self._scheduler, self._scheduler.driver, self._now_s
        is_running = request.status == compat.RequestStatus.RUNNING
        stalled = len(scheduler.running) <= (1 if is_running else 0)
        missing = compat.count_missing_blocks(scheduler, request, num_new_tokens, kwargs)
        # If all leases together are not enough, reclaiming them would help nobody.
        can_help = stalled or missing <= driver.get_num_reclaimable_blocks(request.request_id)
        wanted = max(1, missing)
        while can_help:
            num_freed = driver.reclaim(wanted, now_s, for_turn_id=request.request_id, stalled=stalled)
            if num_freed == 0:
                break
            blocks = allocate(request, num_new_tokens, **kwargs)
            if blocks is not None:
                return blocks
            wanted *= 2
        if is_running:
            self._put_victim_last(request)
        return None

    def _put_victim_last(self, request: Any) -> None:
        """VLLM preempts the tail of `running`: put the policy's choice there.

        Only those not yet scheduled in this step may go; they stand from this request on. In its priority
        mode vLLM chooses for itself, and moving anything would make it meet a request twice.
        """
        if self._scheduler.policy.value == "priority":
            return
        running = self._scheduler.running
        if self._victims is None:
            # Once in a step: when many have to yield, asking about everyone for each would hold all up.
            driver = self._scheduler.driver
            self._victims = driver.get_victims([each.request_id for each in running], self._now_s)
        candidates = {each.request_id: each for each in running[running.index(request) :]}
        victim_id = next((each for each in self._victims if each in candidates), None)
        victim = candidates.get(victim_id) if victim_id is not None else None
        if victim is not None and victim is not running[-1]:
            running.remove(victim)
            running.append(victim)
