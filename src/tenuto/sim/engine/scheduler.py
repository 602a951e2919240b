"""The scheduler of the simulated engine: vLLM V1's, with the driver asked at the same few places.

One loop without a prefill or a decode phase: every step gives each request tokens until its computed tokens
catch up with all it has, out of one token budget; running requests first, then waiting ones. Decisions equal
vLLM's step by step (`tests/differential`). Source: vllm/v1/core/sched/scheduler.py:schedule and
update_from_output, async_scheduler.py@0.32; the hooks stand where `tenuto.vllm.scheduler` has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tenuto.core.driver import Driver
from tenuto.core.jobs import Arrival, Finish
from tenuto.core.limits import Limits
from tenuto.core.policy import Key, Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.sim.engine.allocator import Allocator
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.driver_port import SimEngine
from tenuto.sim.engine.lifecycle import Lifecycle
from tenuto.sim.engine.request import BlockHashes, Request, Status
from tenuto.sim.engine.step import Step
from tenuto.sim.engine.waiting import GetKey, WaitingQueue
from tenuto.sim.kv.kv_cache import Hit, KvCache
from tenuto.sim.tiers.loading import Loading
from tenuto.sim.tiers.offload import make_offloader
from tenuto.sim.tiers.tier import OffloadTiers

PUBLISHED = Limits(always_yield=False, max_held_back_s=math.inf)
"""Policies run as published: a lease that says it yields on a stall is not taken back before, and nothing but
the policy ends a wait."""


class Scheduler:
    """Decides what each step computes; whoever steps it calls `schedule` and `finish_step` in turn."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        limits: Limits = PUBLISHED,
        *,
        tiers: OffloadTiers | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        """`tiers` belong to the engine that `config.offload` describes."""
        self.config = config
        self.kv = KvCache(config.kv, config.max_steps_in_flight * config.max_num_batched_tokens)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.by_priority = "priority" in (config.order, policy.engine_order)
        """Whether requests run, and yield, by their priority first."""
        self._asks_admission = policy.overrides("admit")
        self._asks_order = self._asks_admission or policy.overrides("queue_key")
        self._asks_budget = policy.overrides("step_budget")
        self.may_preempt_for_waiting = policy.overrides("may_preempt")
        self.offloader = make_offloader(config, tiers, self.kv)
        self._loading = None if self.offloader is None else Loading(self, self.offloader)
        self.waiting = WaitingQueue(self._choose_key())
        self.now_s = 0.0
        """When it was called last."""
        self.driver = Driver(policy, SimEngine(self), limits, by_priority=self.by_priority, log=log)
        self.allocator = Allocator(self, self.running)
        self._lifecycle = Lifecycle(self)

    # What an engine calls.

    def add_request(self, request: Request, now_s: float) -> None:
        """A turn came in. Raises ConfigError if it can never run here."""
        self.kv.enter(request)
        self.now_s = now_s
        self.requests[request.turn_id] = request
        what = Arrival(
            hints=request.hints,
            num_prompt_tokens=request.num_prompt_tokens,
            hashes=BlockHashes(request, self.config.kv.block_size),
            priority=request.priority,
        )
        self.driver.arrive(request.turn_id, now_s, what)
        is_parked = self._asks_admission and self.driver.needs_admission(request.turn_id)
        self.waiting.add(request, is_parked=is_parked)

    def schedule(self, now_s: float) -> Step:
        """Decide the next step; without tokens in it, nothing can run now."""
        self.now_s = now_s
        self.driver.expire(now_s)
        if self._loading is not None:
            self._loading.collect(now_s)
        if self.driver.tick(now_s):
            self.waiting.reorder_all()
        if self._asks_admission:
            self._admit_parked()
        budget = self.config.max_num_batched_tokens
        if self._asks_budget:
            budget = self.driver.get_step_budget(now_s, budget)
        # A request that is alone has nobody to starve.
        alone = len(self.running) + len(self.waiting) <= 1
        step = Step(budget, 0 if alone else self.config.long_prefill_token_threshold)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        self._lifecycle.advance(step)
        for turn_id, num_hit_tokens in (*step.new.items(), *step.resumed.items()):
            self.driver.start(turn_id, now_s, num_hit_tokens)
        return step

    def finish_step(
        self, step: Step, now_s: float, num_accepted: Mapping[str, int] | None = None
    ) -> list[tuple[Request, int]]:
        """A scheduled step was computed; steps are finished in the order they were scheduled in.

        `num_accepted` says how many of a request's drafts were right (none, unless told). Returns the
        requests that got output, with the number of new tokens; those that are done have `Status.FINISHED`.
        """
        self.now_s = now_s
        outputs = self._lifecycle.give_outputs(step, num_accepted or {})
        if self.config.num_draft_tokens and self.config.max_steps_in_flight == 1:
            for request, _ in outputs:
                request.num_drafts = self.config.num_draft_tokens
        return outputs

    def abort(self, turn_id: str, now_s: float) -> None:
        """The client of a turn went away; nothing happens if the turn is done."""
        request = self.requests.get(turn_id)
        if request is None:
            return
        self.now_s = now_s
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.LOADING:
            assert self._loading is not None
            self._loading.forget(request)
        else:
            self.waiting.remove(request)
        self._lifecycle.finish(request, Finish(request.num_output_tokens, aborted=True))

    def reset_prefix_cache(self, now_s: float, *, preempt_running: bool = False) -> bool:
        """Forget all cached content, leases included; False, and content stays, while requests run.

        With `preempt_running` these start over instead; output of theirs that is in flight is lost.
        """
        self.now_s = now_s
        self.driver.drop_all()
        if preempt_running:
            self._lifecycle.preempt_all()
        return self.kv.pool.reset()

    @property
    def has_loaded(self) -> bool:
        """Whether a request is about to start whose load is there."""
        return self._loading is not None and bool(self._loading.ready)

    @property
    def num_loading(self) -> int:
        """Requests that wait for KV from a tier, or have it and did not start yet."""
        return 0 if self._loading is None else self._loading.num_requests

    def get_next_event_s(self) -> float | None:
        """When something happens by itself: a lease runs out, a copy is complete."""
        times_s = [self.driver.get_next_deadline_s()]
        if self.offloader is not None:
            times_s.append(self.offloader.get_next_event_s())
        return min((each for each in times_s if each is not None), default=None)

    # One step.

    def _schedule_running(self, step: Step) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            num_new_tokens = self._count_new_tokens(request, step)
            if num_new_tokens == 0:
                index += 1
                continue
            while not self.allocator.try_allocate(request, num_new_tokens, None, self.now_s):
                victim = self._lifecycle.preempt_for(request, step)
                if victim is request:
                    return
                index = self.running.index(request)
            step.give(request, num_new_tokens)
            step.has_prefill |= request.is_prefill_chunk
            if request.num_drafts:
                num_certain = request.num_tokens + request.num_placeholders - request.num_computed_tokens
                if num_new_tokens > num_certain:
                    step.num_drafts[request.turn_id] = num_new_tokens - num_certain
                request.num_drafts = 0
            index += 1

    def _count_new_tokens(self, request: Request, step: Step) -> int:
        num_computed_tokens, num_placeholders = request.num_computed_tokens, request.num_placeholders
        if (
            num_placeholders > 0
            and num_computed_tokens + 2 - num_placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            # The steps in flight bring its last token, even if they reject all drafts.
            return 0
        num_tokens = request.num_tokens + request.num_drafts + num_placeholders
        # One slot stays for the token that is sampled.
        most = self.config.kv.max_model_len - num_computed_tokens - 1
        return min(step.bound(num_tokens - num_computed_tokens), most)

    def _schedule_waiting(self, step: Step) -> None:
        has_running = bool(step.num_tokens)
        while self.has_loaded and step.budget > 0 and len(self.running) < self.config.max_num_seqs:
            self._start_loaded(step)
        while step.budget > 0:
            request = self.waiting.get_first()
            if request is None:
                break
            if len(self.running) >= self.config.max_num_seqs and not self._lifecycle.preempt_for_waiting(
                request, step
            ):
                break
            if request.num_stale_tokens and not request.drops_stale:
                # Output in flight would arrive behind what it computes anew.
                self.waiting.skip_first()
                continue
            hit = self.kv.get_hit(request)
            if self._loading is not None:
                hit = self._loading.add_offer(request, hit)
                if hit.waits:
                    while not (fits := self._loading.try_begin(request, hit)):
                        if not self._lifecycle.preempt_for_waiting(request, step):
                            break
                    if not fits:
                        break
                    continue
            num_tokens = request.num_tokens - hit.num_computed_tokens
            num_drafts = self._count_padding(request, hit, step, has_running) if num_tokens == 1 else 0
            if 1 + num_drafts > step.budget:
                break
            num_new_tokens = step.bound(num_tokens + num_drafts)
            while not (fits := self.allocator.try_allocate(request, num_new_tokens, hit, self.now_s)):
                if not self._lifecycle.preempt_for_waiting(request, step):
                    break
            if not fits:
                break
            if hit.num_loaded_tokens and self._loading is not None:
                step.copies_done_s = max(step.copies_done_s, self._loading.load(request, hit))
            self._start(request, hit, step)
            step.give(request, num_new_tokens)
            if num_drafts:
                step.num_drafts[request.turn_id] = num_drafts
        self.waiting.restore_skipped()

    def _count_padding(self, request: Request, hit: Hit, step: Step, has_running: bool) -> int:
        """Draft slots added to a request that starts with one token, so that all decodes are alike."""
        num_drafts = self.config.num_draft_tokens
        fits = hit.num_tokens + 1 + num_drafts + 1 <= self.config.kv.max_model_len
        joins_decodes = not step.has_prefill and (has_running or hit.num_tokens > 0)
        return num_drafts if fits and joins_decodes else 0

    def _start(self, request: Request, hit: Hit, step: Step) -> None:
        started = step.resumed if request.num_preemptions else step.new
        started[request.turn_id] = hit.num_computed_tokens
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        request.num_computed_tokens = hit.num_computed_tokens

    def _start_loaded(self, step: Step) -> None:
        """A request whose load is there starts; its blocks are taken already."""
        assert self._loading is not None
        request = self._loading.ready.popleft()
        num_new_tokens = step.bound(request.num_tokens - request.num_computed_tokens)
        fits = self.kv.try_allocate(request, num_new_tokens, None, is_busy=True)
        assert fits, f"{request.turn_id} has loaded, but not its blocks"
        self._start(request, Hit(request.num_computed_tokens, ()), step)
        step.give(request, num_new_tokens)

    # Inside.

    def _admit_parked(self) -> None:
        while self.waiting.num_parked:
            idle = not self.running and not self.num_loading and self.waiting.get_first() is None
            admitted = self.driver.admit(self.waiting.get_first_parked(), self.now_s, idle=idle)
            if not admitted:
                return
            for turn_id in admitted:
                self.waiting.unpark(turn_id)

    def _choose_key(self) -> GetKey | None:
        if self._asks_order:
            return self._get_policy_key
        return (lambda request: (request.priority, request.arrival_s)) if self.by_priority else None

    def _get_policy_key(self, request: Request) -> Key:
        return self.driver.get_queue_key(request.turn_id, self.now_s)
