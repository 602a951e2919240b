"""What becomes of requests after they started: they advance, are preempted, get their output, finish.

Source: vllm/v1/core/sched/scheduler.py:_update_after_schedule, _preempt_request, update_from_output and
_free_request@0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tenuto.core.jobs import Finish
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.engine.request import Request, Status
from tenuto.sim.engine.step import Step

if TYPE_CHECKING:
    from tenuto.sim.engine.scheduler import Scheduler


class Lifecycle:
    """Moves the scheduler's requests from `running` to where they go next, with all they hold."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._allocator = scheduler.allocator
        self._kv = scheduler.kv
        self._driver = scheduler.driver
        self._requests = scheduler.requests
        self._running = scheduler.running
        self._waiting = scheduler.waiting
        self._offloader = scheduler.offloader

    # Steps.

    def advance(self, step: Step) -> None:
        """Count a step's tokens as computed, so that the next one can be scheduled at once."""
        is_async = self._config.max_steps_in_flight > 1
        chunk_tokens = chunk_context = num_decodes = decode_context = 0
        num_pairs = 0.0
        for turn_id, num_tokens in step.num_tokens.items():
            request = self._requests[turn_id]
            context = request.num_computed_tokens
            if num_tokens == 1:
                num_decodes += 1
                decode_context += context
            else:
                chunk_tokens += num_tokens
                chunk_context += context
                num_pairs += num_tokens * (context + num_tokens / 2)
            request.num_computed_tokens = context + num_tokens
            if self._offloader is not None:
                done_s = self._offloader.store_computed(request, self._scheduler.now_s)
                if self._offloader.is_sync:
                    step.copies_done_s = max(step.copies_done_s, done_s)
            request.num_in_flight_tokens += num_tokens
            request.is_prefill_chunk = context + num_tokens < request.num_tokens + request.num_placeholders
            if request.is_prefill_chunk:
                step.chunks.add(turn_id)
            elif is_async:
                request.num_placeholders += 1 + step.num_drafts.get(turn_id, 0)
                request.num_drafts = self._config.num_draft_tokens
        num_chunks = len(step.num_tokens) - num_decodes
        step.batch = StepBatch(
            num_chunks, chunk_tokens, chunk_context, num_pairs, num_decodes, decode_context
        )

    # Preemption.

    def preempt_for(self, request: Request, step: Step) -> Request:
        """Preempt the running request that yields first; it may be the one that needs the room."""
        if self._scheduler.by_priority:
            victim = max(self._running, key=lambda request: (request.priority, request.arrival_s))
        else:
            self._allocator.put_victim_last(request, self._scheduler.now_s)
            victim = self._running[-1]
        self._preempt_in(step, victim)
        return victim

    def preempt_for_waiting(self, request: Request, step: Step) -> bool:
        """Preempt a running request for a waiting one that does not fit, if the policy says so."""
        if not self._scheduler.may_preempt_for_waiting:
            return False
        # Those that started in this step stay: nobody is displaced twice in it, so it ends.
        started = step.new.keys() | step.resumed.keys()
        candidates = [each.turn_id for each in self._running if each.turn_id not in started]
        victim_id = self._driver.get_preempted_for(request.turn_id, candidates, self._scheduler.now_s)
        if victim_id is None:
            return False
        self._preempt_in(step, self._requests[victim_id])
        return True

    def preempt_all(self) -> None:
        """Preempt all that run; what they have in flight is lost."""
        while self._running:
            self._give_up(self._running.pop(), drop_stale=True)

    def _preempt_in(self, step: Step, victim: Request) -> None:
        self._running.remove(victim)
        step.take_out(victim)
        step.preempted[victim.turn_id] = victim.num_computed_tokens
        self._give_up(victim)

    def _give_up(self, request: Request, *, drop_stale: bool = False) -> None:
        """Take all blocks of a request that left `running`; it will be computed again."""
        self._driver.preempt(request.turn_id, self._scheduler.now_s, request.num_computed_tokens)
        self._kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_drafts = request.num_placeholders = 0
        request.num_stored_chunks = 0
        request.drops_stale = drop_stale or (request.drops_stale and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self._waiting.add_back(request)

    # Outputs.

    def give_outputs(self, step: Step, num_accepted: Mapping[str, int]) -> list[tuple[Request, int]]:
        """Add what a computed step brings to its requests; those that got some, with how many tokens."""
        outputs = []
        for turn_id, num_tokens in step.num_tokens.items():
            request = self._requests.get(turn_id)
            if request is None:
                continue  # aborted meanwhile
            request.num_in_flight_tokens -= num_tokens
            is_stale = request.num_stale_tokens > 0
            if is_stale:
                request.num_stale_tokens -= num_tokens
                if request.drops_stale:
                    continue
            if turn_id in step.chunks:
                continue
            num_right = num_accepted.get(turn_id, 0)
            if turn_id in step.num_drafts and not is_stale:
                _reject(request, step.num_drafts[turn_id] - num_right)
            outputs.append((request, self._append(request, 1 + num_right, is_stale=is_stale)))
        self._remove_finished(outputs)
        return outputs

    def _append(self, request: Request, num_new_tokens: int, *, is_stale: bool) -> int:
        """Add output tokens, up to the request's end; returns how many."""
        num_left = min(
            request.max_tokens - request.num_output_tokens,
            self._config.kv.max_model_len - request.num_tokens,
        )
        num_new_tokens = min(num_new_tokens, num_left)
        request.num_tokens += num_new_tokens
        if self._config.max_steps_in_flight > 1 and not is_stale:
            request.num_placeholders -= num_new_tokens
            self._kv.cache(request, request.num_computed_tokens - request.num_placeholders)
        if num_new_tokens == num_left:
            self.finish(request, Finish(request.num_output_tokens, request.tool, request.is_last))
        return num_new_tokens

    def finish(self, request: Request, how: Finish) -> None:
        """End a request; a lease may take its blocks over just before they are freed."""
        now_s = self._scheduler.now_s
        self._driver.finish(request.turn_id, now_s, how)
        if self._offloader is not None and request.status is Status.RUNNING:
            row = self._kv.get_hit(request).rows[0]
            self._offloader.store_finished(request, row, now_s, aborted=how.aborted)
        self._kv.free(request)
        request.status = Status.FINISHED
        del self._requests[request.turn_id]

    def _remove_finished(self, outputs: list[tuple[Request, int]]) -> None:
        finished = [request for request, _ in outputs if request.status is Status.FINISHED]
        if finished:
            self._running[:] = [each for each in self._running if each.status is not Status.FINISHED]
        for request in finished:
            # One that was preempted while its last token was in flight.
            self._waiting.remove(request)


def _reject(request: Request, num_drafts: int) -> None:
    """Drafts were wrong: what was computed for them does not count."""
    if request.num_computed_tokens > 0:
        request.num_computed_tokens -= num_drafts
    if request.num_placeholders > 0:
        request.num_placeholders -= num_drafts
