"""Preemption: who loses its blocks, and what that does to it.

Source: vllm/v1/core/sched/scheduler.py:schedule, _preempt_request and reset_prefix_cache@0.32.
"""

from __future__ import annotations

from tenuto.core.driver import Driver
from tenuto.sim.engine.state import EngineState
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request, Status


class Preemption:
    """Moves running requests back to `waiting`."""

    def __init__(self, state: EngineState, kv: KvCache, driver: Driver, *, by_priority: bool) -> None:
        """`by_priority`: the engine, not the policy, chooses who is preempted."""
        self._state = state
        self._kv = kv
        self._driver = driver
        self._by_priority = by_priority
        self._asks_for_waiting = driver.policy.overrides("may_preempt")

    def preempt_for_running(self, request: Request, step: Step) -> Request:
        """Preempt one running request so that another can go on; it may be that request itself."""
        running = self._state.running
        if self._by_priority:
            victim = max(running, key=lambda each: (each.priority, each.arrival_s))
        else:
            self._put_victim_last(request)
            victim = running[-1]
        self._preempt_in(step, victim)
        return victim

    def preempt_as_fork(self, step: Step) -> Request:
        """Preempt the policy's choice of all that run, as the Continuum fork does.

        A request that has tokens in this step may be taken too. The step's budget does not get them back.
        """
        running = self._state.running
        victim_id = self._driver.get_victim([each.turn_id for each in running], self._state.now_s)
        victim = running[-1] if victim_id is None else self._state.requests[victim_id]
        self._preempt_in(step, victim, gives_back=False)
        return victim

    def preempt_for_waiting(self, request: Request, step: Step) -> bool:
        """Preempt a running request for a waiting one that does not fit, if the policy says so."""
        if not self._asks_for_waiting:
            return False
        # What started in this step stays: so no request is preempted twice in it, and the step ends.
        started = step.new.keys() | step.resumed.keys()
        candidates = [each.turn_id for each in self._state.running if each.turn_id not in started]
        victim_id = self._driver.get_preempted_for(request.turn_id, candidates, self._state.now_s)
        if victim_id is None:
            return False
        self._preempt_in(step, self._state.requests[victim_id])
        return True

    def preempt_all(self) -> None:
        """Preempt all that run; what they have in flight is lost."""
        while self._state.running:
            self._give_up(self._state.running.pop(), drop_stale=True)

    def _put_victim_last(self, request: Request) -> None:
        """Move the policy's choice to the tail of `running`, where vLLM takes its victim.

        running   [scheduled in this step | request | not scheduled yet …]
                                           └────── candidates ──────────┘
        """
        running = self._state.running
        candidates = running[running.index(request) :]
        victim_id = self._driver.get_victim([each.turn_id for each in candidates], self._state.now_s)
        for each in candidates:
            if each.turn_id == victim_id:
                running.remove(each)
                running.append(each)

    def _preempt_in(self, step: Step, victim: Request, *, gives_back: bool = True) -> None:
        self._state.running.remove(victim)
        step.take_out(victim, gives_back=gives_back)
        step.preempted[victim.turn_id] = victim.num_computed_tokens
        self._give_up(victim)

    def _give_up(self, request: Request, *, drop_stale: bool = False) -> None:
        """Free all blocks of a request that has left `running`; it will be computed again."""
        self._driver.preempt(request.turn_id, self._state.now_s, request.num_computed_tokens)
        self._kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_drafts = request.num_placeholders = 0
        request.num_stored_chunks = 0
        request.drops_stale = drop_stale or (request.drops_stale and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self._state.waiting.add_back(request)
