"""The first half of a step: tokens for the requests that run already.

Source: vllm/v1/core/sched/scheduler.py:schedule@0.32, its first loop.
"""

from __future__ import annotations

from tenuto.sim.engine.aligned_chunks import cut_chunk
from tenuto.sim.engine.allocator import Allocator
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.preemption import Preemption
from tenuto.sim.engine.state import EngineState
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.request import Request


class RunningPass:
    """Gives running requests their next tokens, and preempts from the tail where blocks are short."""

    def __init__(
        self, config: EngineConfig, state: EngineState, allocator: Allocator, preemption: Preemption
    ) -> None:
        self._config = config
        self._state = state
        self._allocator = allocator
        self._preemption = preemption
        # What comes behind it in `running` may be more important, and has its blocks to take.
        self._goes_on_after_self = config.order == "priority" and config.kv.vllm_release != "0.32"
        self._has_drafts = config.num_draft_tokens > 0

    def schedule(self, step: Step) -> None:
        """Spend the step's budget on running requests, in their order."""
        running, allocator = self._state.running, self._allocator
        has_slots = allocator.has_slots
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_tokens = request.num_tokens
            if (
                request.num_computed_tokens + 1 == num_tokens + request.num_placeholders <= request.slots_end
                and num_tokens + 1 < request.num_tokens_at_end
                and not (request.is_prefill_chunk or self._has_drafts)
            ):
                # Most tokens: one more is decoded, in a block that it has.
                step.num_tokens[request.turn_id] = 1
                step.budget -= 1
                index += 1
                continue
            num_new_tokens = self._count_new_tokens(request, step)
            if num_new_tokens == 0:
                index += 1
                continue
            while not has_slots(request, num_new_tokens) and not allocator.try_allocate(
                request, num_new_tokens, None
            ):
                victim = self._preemption.preempt_for_running(request, step)
                if victim is request:
                    break
                index = running.index(request)
            else:
                self._give(request, num_new_tokens, step)
                index += 1
                continue
            if not self._goes_on_after_self:
                return

    def _give(self, request: Request, num_new_tokens: int, step: Step) -> None:
        step.give(request, num_new_tokens)
        step.has_prefill |= request.is_prefill_chunk
        if request.num_drafts:
            num_certain = request.num_tokens + request.num_placeholders - request.num_computed_tokens
            if num_new_tokens > num_certain:
                step.num_drafts[request.turn_id] = num_new_tokens - num_certain
            request.num_drafts = 0

    def _count_new_tokens(self, request: Request, step: Step) -> int:
        """How many tokens a running request gets.

        known tokens       [ prompt and output so far     | placeholders | drafts ]
        computed tokens    [ num_computed_tokens                 |  ← the new ones  ]
        """
        num_computed_tokens, num_placeholders = request.num_computed_tokens, request.num_placeholders
        if (
            num_placeholders > 0
            and num_computed_tokens + 2 - num_placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            # The steps in flight bring its last token, even if they reject all drafts.
            return 0
        num_tokens = request.num_tokens + request.num_drafts + num_placeholders
        # One slot stays for the token that is sampled.
        most = self._config.kv.max_model_len - num_computed_tokens - 1
        num_new_tokens = min(step.bound(num_tokens - num_computed_tokens), most)
        if not self._config.kv.has_states:
            return num_new_tokens
        return cut_chunk(request, num_computed_tokens, num_new_tokens, step, self._config)
