"""How requests get on: a scheduled step counts as computed, a computed one brings output, turns finish.

Source: vllm/v1/core/sched/scheduler.py:_update_after_schedule, update_from_output and _free_request@0.32.
"""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.core.driver import Driver
from tenuto.core.jobs import Finish
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.state import EngineState
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.tiers.offloader import Offloader


class Progress:
    """Changes requests as steps are scheduled and computed."""

    def __init__(
        self,
        config: EngineConfig,
        state: EngineState,
        kv: KvCache,
        driver: Driver,
        offloader: Offloader | None,
    ) -> None:
        self._config = config
        self._state = state
        self._kv = kv
        self._driver = driver
        self._offloader = offloader

    def advance(self, step: Step) -> None:
        """Count a step's tokens as computed, so that the next step can be scheduled at once."""
        requests, offloader = self._state.requests, self._offloader
        is_async, has_drafts = self._config.max_steps_in_flight > 1, self._config.num_draft_tokens > 0
        chunk_tokens = chunk_context = num_decodes = decode_context = 0
        num_pairs = 0.0
        if offloader is not None:
            offloader.begin_stores((requests[turn_id] for turn_id in step.num_tokens), self._state.now_s)
        for turn_id, num_tokens in step.num_tokens.items():
            request = requests[turn_id]
            context = request.num_computed_tokens
            if num_tokens == 1:
                num_decodes += 1
                decode_context += context
            else:
                chunk_tokens += num_tokens
                chunk_context += context
                num_pairs += num_tokens * (context + num_tokens / 2)
            request.num_computed_tokens = context + num_tokens
            if offloader is not None and offloader.may_store(request):
                done_s = offloader.store_computed(request, self._state.now_s)
                if offloader.is_sync:
                    step.copies_done_s = max(step.copies_done_s, done_s)
            request.num_in_flight_tokens += num_tokens
            request.is_prefill_chunk = context + num_tokens < request.num_tokens + request.num_placeholders
            if request.is_prefill_chunk:
                step.chunks.add(turn_id)
            elif is_async:
                request.num_placeholders += 1
                if has_drafts:
                    request.num_placeholders += step.num_drafts.get(turn_id, 0)
                    request.num_drafts = self._config.num_draft_tokens
        if offloader is not None:
            offloader.end_stores(self._state.now_s)
        num_chunks = len(step.num_tokens) - num_decodes
        step.batch = StepBatch(
            num_chunks, chunk_tokens, chunk_context, num_pairs, num_decodes, decode_context
        )

    def give_outputs(self, step: Step, num_accepted: Mapping[str, int]) -> list[tuple[Request, int]]:
        """Add what a computed step brings to its requests; returns those that got some, with the tokens.

        `num_accepted` says how many drafts of a request were right. Requests that are done have finished.
        """
        outputs = []
        requests, chunks = self._state.requests, step.chunks
        is_async, has_drafts = self._config.max_steps_in_flight > 1, self._config.num_draft_tokens > 0
        for turn_id, num_tokens in step.num_tokens.items():
            request = requests.get(turn_id)
            if request is None:
                continue  # aborted meanwhile
            request.num_in_flight_tokens -= num_tokens
            if (
                request.num_computed_tokens <= request.slots_end
                and request.num_tokens + 1 < request.num_tokens_at_end
                and not (request.num_stale_tokens or has_drafts or turn_id in chunks)
            ):
                # Most tokens: no block is full with it, and it is not the last one.
                request.num_tokens += 1
                if is_async:
                    request.num_placeholders -= 1
                outputs.append((request, 1))
                continue
            is_stale = request.num_stale_tokens > 0
            if is_stale:
                request.num_stale_tokens -= num_tokens
                if request.drops_stale:
                    continue
            if turn_id in chunks:
                continue
            num_right = num_accepted.get(turn_id, 0)
            if turn_id in step.num_drafts and not is_stale:
                _reject(request, step.num_drafts[turn_id] - num_right)
            outputs.append((request, self._append(request, 1 + num_right, is_stale=is_stale)))
        self._remove_finished(outputs)
        return outputs

    def finish(self, request: Request, finish: Finish) -> None:
        """End a request and free its blocks. Just before, a lease may take them over."""
        now_s, offloader = self._state.now_s, self._offloader
        if offloader is not None:
            offloader.leave(request, self._driver.get_finished_turn(request.turn_id, finish), now_s)
        self._driver.finish(request.turn_id, now_s, finish)
        if offloader is not None:
            offloader.store_finished(request, now_s)
            # As vLLM does before it asks its connector: so these blocks are free before the others.
            self._kv.leave(request)
        self._kv.free(request)
        request.status = Status.FINISHED
        del self._state.requests[request.turn_id]

    def _append(self, request: Request, num_new_tokens: int, *, is_stale: bool) -> int:
        """Add output tokens, up to the request's end; returns how many."""
        num_left = min(
            request.max_tokens - request.num_output_tokens,
            self._config.kv.max_model_len - request.num_tokens,
        )
        num_cut = max(0, num_new_tokens - num_left)
        num_new_tokens -= num_cut
        request.num_tokens += num_new_tokens
        if not is_stale:
            self._cache_output(request, num_new_tokens, num_cut)
        if num_new_tokens == num_left:
            self.finish(request, Finish(request.num_output_tokens, request.tool, request.is_last))
        return num_new_tokens

    def _cache_output(self, request: Request, num_new_tokens: int, num_cut: int) -> None:
        """Cache the blocks that new output fills, where they were not cached when they were scheduled.

        `num_cut`: tokens of the output that are beyond the request's end.
        """
        is_async = self._config.max_steps_in_flight > 1
        if self._config.kv.vllm_release == "0.32":
            if is_async:
                request.num_placeholders -= num_new_tokens
                self._kv.cache(request, request.num_computed_tokens - request.num_placeholders)
            return
        if is_async:
            request.num_placeholders -= num_new_tokens + num_cut
        if is_async or self._config.num_draft_tokens:
            request.num_computed_tokens -= num_cut
            self._kv.cache(request, request.num_computed_tokens - request.num_in_flight_tokens)

    def _remove_finished(self, outputs: list[tuple[Request, int]]) -> None:
        finished = [request for request, _ in outputs if request.status is Status.FINISHED]
        if finished:
            running = self._state.running
            running[:] = [each for each in running if each.status is not Status.FINISHED]
        for request in finished:
            # One that was preempted while its last token was in flight waits.
            self._state.waiting.remove(request)


def _reject(request: Request, num_drafts: int) -> None:
    """Drafts were wrong: what was computed for them does not count."""
    if request.num_computed_tokens > 0:
        request.num_computed_tokens -= num_drafts
    if request.num_placeholders > 0:
        request.num_placeholders -= num_drafts
