"""The running half of a step as the public Continuum prototype does it, a fork of vLLM 0.10.2.

It differs from vLLM's own pass where blocks are short:

- The victim is the policy's choice of *all* running requests. It may have tokens in this step already.
- The budget of the step does not get these tokens back.
- The position in `running` does not move back when the victim stood before it. So another request misses the
  step.

Source: `schedule` and `pop_running_request_based_on_last_step` of the fork's vllm/v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from tenuto.sim.engine.passes import Passes
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.request import Request


class ForkPasses(Passes):
    """Fills steps, with the fork's preemption for running requests."""

    def _schedule_running(self, step: Step) -> None:
        """Spend the step's budget on running requests; a request that preempts itself ends the pass."""
        running = self._state.running
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_new_tokens = self._count_new_tokens(request, step)
            if num_new_tokens:
                while not self._try_allocate(request, num_new_tokens, None):
                    if self._preempt_as_fork(step) is request:
                        return
                self._give(request, num_new_tokens, step)
            index += 1

    def _preempt_as_fork(self, step: Step) -> Request:
        """Preempt the policy's choice of all that run."""
        running = self._state.running
        victim_id = self._driver.get_victim([each.turn_id for each in running], self._state.now_s)
        victim = running[-1] if victim_id is None else self._state.requests[victim_id]
        self._preempt(step, victim, gives_back=False)
        return victim
