"""Handles a failed allocation: reclaims leases first, and then lets vLLM preempt the policy's victim.

All of this runs inside vLLM's `allocate_slots`, so it must not reorder the waiting queue. The queue calls
`Driver.settle` before it is read again.
"""

from __future__ import annotations

from typing import Any

from tenuto.vllm import compat


class Pressure:
    """Handles the failed allocations of one scheduler that has a driver."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._guard = compat.AllocationGuard(scheduler, self._allocate_with_leases)
        self._now_s = 0.0
        self._victims: list[str] | None = None
        """Running turns in the order in which to preempt them; None until this step needs the order."""

    def remove(self) -> None:
        """Leave vLLM's allocation as it was."""
        self._guard.remove()

    def begin_step(self, now_s: float) -> None:
        """A step is about to be scheduled."""
        self._now_s = now_s
        self._guard.set_for_step()
        self._victims = None

    def _allocate_with_leases(
        self, allocate: Any, request: Any, num_new_tokens: int, kwargs: dict[str, Any]
    ) -> Any:
        """Reclaim leases until vLLM's allocation succeeds; if it still fails, return None."""
        scheduler, driver, now_s = self._scheduler, self._scheduler.driver, self._now_s
        is_running = request.status == compat.RequestStatus.RUNNING
        stalled = len(scheduler.running) <= (1 if is_running else 0)
        missing = compat.count_missing_blocks(scheduler, request, num_new_tokens, kwargs)
        # If all leases together are not enough, reclaiming them would not help.
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
        """Move the policy's victim to the end of `running`, because vLLM preempts the last request.

        Only requests that are not yet scheduled in this step may be preempted: `request` and those after it.
        In priority mode vLLM chooses the victim itself, and a move would make it visit a request twice.
        """
        if self._scheduler.policy.value == "priority":
            return
        running = self._scheduler.running
        if self._victims is None:
            # Ask only once per step: if many turns are preempted, asking for each one would take too long.
            driver = self._scheduler.driver
            self._victims = driver.get_victims([each.request_id for each in running], self._now_s)
        candidates = {each.request_id: each for each in running[running.index(request) :]}
        victim_id = next((each for each in self._victims if each in candidates), None)
        victim = candidates.get(victim_id) if victim_id is not None else None
        if victim is not None and victim is not running[-1]:
            running.remove(victim)
            running.append(victim)
