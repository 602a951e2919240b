"""The second half of a step: waiting requests start.

Source: vllm/v1/core/sched/scheduler.py:schedule@0.32, its second loop.
"""

from __future__ import annotations

from tenuto.sim.engine.aligned_chunks import cut_chunk
from tenuto.sim.engine.allocator import Allocator
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.loading import Loading
from tenuto.sim.engine.preemption import Preemption
from tenuto.sim.engine.state import EngineState
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.hits import Hit
from tenuto.sim.kv.request import Request, Status


class WaitingPass:
    """Starts waiting requests in their queue's order; the first that cannot start ends the step."""

    def __init__(
        self,
        config: EngineConfig,
        state: EngineState,
        allocator: Allocator,
        preemption: Preemption,
        loading: Loading | None,
    ) -> None:
        """`loading` is None in an engine without tiers."""
        self._config = config
        self._state = state
        self._allocator = allocator
        self._preemption = preemption
        self._loading = loading

    def schedule(self, step: Step) -> None:
        """Spend what is left of the step's budget on requests that start."""
        waiting = self._state.waiting
        has_running = bool(step.num_tokens)
        goes_on = self._start_loaded(step)
        while goes_on and step.budget > 0:
            request = waiting.get_first()
            if request is None or not self._has_seat(request, step):
                break
            if request.num_stale_tokens and not request.drops_stale:
                # Its output in flight would arrive after tokens that it computes anew.
                waiting.skip_first()
                continue
            hit = self._allocator.get_hit(request)
            if self._loading is not None:
                offered = self._loading.add_offer(request, hit)
                if offered is None:
                    waiting.skip_first()
                    continue
                hit = offered
            if hit.waits:
                goes_on = self._try_load(request, hit, step)
            else:
                goes_on = self._try_start(request, hit, step, has_running=has_running)
        waiting.restore_skipped()

    def _has_seat(self, request: Request, step: Step) -> bool:
        """Whether one more may run, after a preemption if need be."""
        has_seat = len(self._state.running) < self._config.max_num_seqs
        return has_seat or self._preemption.preempt_for_waiting(request, step)

    def _try_load(self, request: Request, hit: Hit, step: Step) -> bool:
        """Let a request wait for KV from a tier, with its blocks; False if these are short."""
        assert self._loading is not None
        while not self._loading.try_begin(request, hit):
            if not self._preemption.preempt_for_waiting(request, step):
                return False
        return True

    def _try_start(self, request: Request, hit: Hit, step: Step, *, has_running: bool) -> bool:
        """Start a request; False if its first tokens do not fit into the budget or the cache."""
        num_tokens = request.num_tokens - hit.num_computed_tokens
        num_drafts = self._count_padding(hit, step, has_running=has_running) if num_tokens == 1 else 0
        if 1 + num_drafts > step.budget:
            return False
        num_new_tokens = step.bound(num_tokens + num_drafts)
        if self._config.kv.has_states:
            start = hit.num_computed_tokens
            num_new_tokens = cut_chunk(request, start, num_new_tokens, step, self._config, hit.shared_tokens)
            if num_new_tokens == 0:
                return False
        while not self._allocator.try_allocate(request, num_new_tokens, hit):
            if not self._preemption.preempt_for_waiting(request, step):
                return False
        if hit.num_loaded_tokens and self._loading is not None:
            step.copies_done_s = max(step.copies_done_s, self._loading.load(request, hit))
        request.num_loaded_tokens = hit.num_loaded_tokens
        self._start(request, hit.num_computed_tokens, num_new_tokens, step)
        if num_drafts:
            step.num_drafts[request.turn_id] = num_drafts
        return True

    def _count_padding(self, hit: Hit, step: Step, *, has_running: bool) -> int:
        """Draft slots for a request that starts with one token, so that all decodes of the step are alike."""
        num_drafts = self._config.num_draft_tokens
        fits = hit.num_tokens + 1 + num_drafts + 1 <= self._config.kv.max_model_len
        joins_decodes = not step.has_prefill and (has_running or hit.num_tokens > 0)
        return num_drafts if fits and joins_decodes else 0

    def _start_loaded(self, step: Step) -> bool:
        """Start requests whose KV has come from a tier; False if the next one does not fit now.

        With full attention their blocks are taken already.
        """
        state = self._state
        while state.loaded and step.budget > 0 and len(state.running) < self._config.max_num_seqs:
            assert self._loading is not None
            request = state.loaded[0]
            self._loading.publish(request)
            start = request.num_computed_tokens
            num_new_tokens = step.bound(request.num_tokens - start)
            if self._config.kv.has_states:
                num_new_tokens = cut_chunk(request, start, num_new_tokens, step, self._config)
            if num_new_tokens == 0 or not self._allocator.try_allocate(request, num_new_tokens, None):
                return False
            state.loaded.popleft()
            self._start(request, start, num_new_tokens, step)
        return True

    def _start(self, request: Request, num_computed_tokens: int, num_new_tokens: int, step: Step) -> None:
        started = step.resumed if request.num_preemptions else step.new
        started[request.turn_id] = num_computed_tokens
        self._state.waiting.remove(request)
        self._state.running.append(request)
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.is_prefill_chunk = num_computed_tokens + num_new_tokens < request.num_tokens
        step.give(request, num_new_tokens)
