"""The running half of a step as the public Continuum prototype does it, a fork of vLLM 0.10.2.

It differs from vLLM's own pass where blocks are short:

- The victim is the policy's choice of *all* running requests. It may have tokens in this step already.
- The budget of the step does not get these tokens back.
- The position in `running` does not move back when the victim stood before it. So another request misses the
  step.

Source: `schedule` and `pop_running_request_based_on_last_step` of the fork's vllm/v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from tenuto.sim.engine.running_pass import RunningPass
from tenuto.sim.engine.step import Step


class ForkRunningPass(RunningPass):
    """Gives running requests their next tokens, with the fork's preemption."""

    def schedule(self, step: Step) -> None:
        """Spend the step's budget on running requests; a request that preempts itself ends the pass."""
        running = self._state.running
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_new_tokens = self._count_new_tokens(request, step)
            if num_new_tokens:
                while not self._allocator.try_allocate(request, num_new_tokens, None):
                    if self._preemption.preempt_as_fork(step) is request:
                        return
                self._give(request, num_new_tokens, step)
            index += 1
