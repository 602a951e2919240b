"""How requests get on: a scheduled step counts as computed, a computed one brings output, turns finish.

Where every running request decodes one token and nothing else happens, a step is *uneventful*. Doing many
of them together leaves behind what doing each would. Only their costs are still added up one by one
(`tenuto.sim.event_loop`), so that times are the same to the last bit.

Source: vllm/v1/core/sched/scheduler.py:_update_after_schedule, update_from_output and _free_request@0.32.
"""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.core.driver import Driver
from tenuto.core.jobs import Finish
from tenuto.core.types import Yields
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


class FastForward:
    """Knows how many of the next steps are uneventful, and does them."""

    def __init__(
        self, config: EngineConfig, state: EngineState, kv: KvCache, driver: Driver, *, has_tiers: bool
    ) -> None:
        self._config = config
        self._state = state
        self._kv = kv
        self._driver = driver
        self._has_tiers = has_tiers
        self._may_preempt_for_waiting = driver.policy.overrides("may_preempt")

    def count_steps(self) -> int:
        """How many of the next steps are uneventful if nothing comes from outside: at least so many.

        0 if in doubt. Changes nothing.
        """
        config, state, running = self._config, self._state, self._state.running
        if (
            not running
            or len(running) > config.max_step_tokens
            or config.num_draft_tokens
            or not self._kv.can_truncate
            or state.loaded
        ):
            return 0
        num_steps = self._count_steps_to_end(running)
        # All requests may fill their last blocks in the same step: free blocks must do for all of them.
        num_free_each = self._kv.pool.num_free_blocks // len(running)
        num_steps = min(num_steps, num_free_each * config.kv.block_size)
        if num_steps == 0 or self._may_start_one() or _has_equal_outputs(running):
            return 0
        return num_steps

    def run(self, num_steps: int) -> None:
        """Do what so many uneventful steps do to the requests and their blocks."""
        for request in self._state.running:
            # The last token of a sequence has no KV yet, so it completes no block.
            request.num_tokens += num_steps - 1
            if request.num_computed_tokens + num_steps > request.slots_end:
                fits = self._kv.try_allocate(request, num_steps, None, is_busy=True)
                assert fits, "uneventful steps ran out of blocks"
            request.num_tokens += 1
            request.num_computed_tokens += num_steps

    def _count_steps_to_end(self, running: list[Request]) -> int:
        """Steps before the one that may bring a request's last token; 0 if one does not decode steadily.

        steadily, with two steps in flight:   [ computed …  | placeholder ]
                                              [ num_tokens … ]
        """
        num_placeholders, max_model_len = self._config.max_steps_in_flight - 1, self._config.kv.max_model_len
        num_left = max_model_len
        for request in running:
            num_tokens = request.num_tokens
            if (
                request.num_placeholders != num_placeholders
                or request.num_computed_tokens - num_placeholders != num_tokens - 1
                or num_tokens == request.num_prompt_tokens
            ):
                return 0
            num_left = min(num_left, request.num_tokens_at_end - num_tokens, max_model_len - num_tokens)
        return max(0, num_left - 1)

    def _may_start_one(self) -> bool:
        """Whether a waiting request could start in one of the next steps; True if in doubt."""
        config, running, waiting = self._config, self._state.running, self._state.waiting
        request = waiting.get_first()
        if waiting.get_first_parked() is not None or (request and self._may_preempt_for_waiting):
            return True
        budget = config.max_step_tokens - len(running)
        if request is None or len(running) == config.max_num_seqs or budget == 0:
            return False
        hit = self._kv.get_hit(request)
        if not {each.path.segments[-1] for each in running}.isdisjoint(request.path.segments):
            # It goes on from what a running request generates: its hit may grow. Any other request's hit
            # can only shrink, and free blocks only get fewer.
            return True
        num_tokens = request.num_tokens - hit.num_tokens
        if not self._has_tiers:
            num_tokens = min(budget, num_tokens)
        num_missing = self._kv.count_missing(request, num_tokens, hit, is_busy=True)
        num_reclaimable = 0
        if self._may_reclaim():
            num_reclaimable = self._driver.get_num_reclaimable_blocks(request.turn_id)
        return num_missing <= num_reclaimable

    def _may_reclaim(self) -> bool:
        """Whether a lease could be shortened while something runs."""
        driver = self._driver
        return driver.limits.always_yield or bool(driver.leases.get_first_to_yield(Yields.ALWAYS))


def _has_equal_outputs(running: list[Request]) -> bool:
    """Whether two requests generate the same text: then it matters which of them caches a block first."""
    return len({request.path.segments[-1] for request in running}) < len(running)
