"""The scheduler of the simulated engine: vLLM V1's, with the driver asked at the same few places.

There is no prefill phase and no decode phase. Every step has a budget of tokens and gives each request tokens
until its computed tokens catch up with all it has: running requests first, then waiting ones.

    schedule       leases expire, loads arrive, keys change ─► Passes ─► Progress.advance
    finish_step    Progress.give_outputs ─► requests finish ─► their blocks are leased or freed

The parts are passed what they work on: requests and the time are in `EngineState`, blocks in `KvCache`, and
the policy is asked through `Driver`. Decisions equal vLLM's step by step (`tests/differential`); the driver
is asked where `tenuto.vllm.scheduler` asks it. Source: vllm/v1/core/sched/scheduler.py and
async_scheduler.py@0.32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from tenuto.core.driver import Driver
from tenuto.core.jobs import Arrival, Finish
from tenuto.core.limits import Limits
from tenuto.core.policy import Key, Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.stats import DriverStats
from tenuto.core.types import ShortHit
from tenuto.core.windows import STATE
from tenuto.estimators.step_size import make_step_chooser
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.driver_port import SimEngine
from tenuto.sim.engine.fork_pass import ForkPasses
from tenuto.sim.engine.loading import Loading
from tenuto.sim.engine.passes import Passes
from tenuto.sim.engine.progress import FastForward, Progress
from tenuto.sim.engine.state import EngineState, GetKey, WaitingQueue
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import BlockHashes, Request, Status
from tenuto.sim.tiers.offload import make_offloader
from tenuto.sim.tiers.tier import OffloadTiers

PUBLISHED = Limits(
    max_leased_share=1.0,
    max_pinned_share=0.0,
    always_yield=False,
    max_held_back_s=math.inf,
    max_wait_over_stock=None,
    max_parallel_turns=8,
)
"""Policies run as published: a lease that yields on a deadlock only is not reclaimed before one, and only the
policy ends a wait."""


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
        strict: bool = False,
    ) -> None:
        """`tiers` belong to the engine that `config.offload` describes; `strict` is as in `Driver`."""
        self._by_priority = config.order == "priority"
        self._log, self._strict = log, strict
        self.config = config
        self.kv = kv = KvCache(
            config.kv,
            config.max_steps_in_flight * config.max_num_batched_tokens,
            keeps_ends=policy.overrides("retain"),
        )
        self.offloader = make_offloader(config.offload, tiers, kv, config.offload_chunk_tokens)
        self.state = EngineState(WaitingQueue(None))
        self._port = SimEngine(config, self.state, kv, self.offloader)
        self._load_numbers = itertools.count()
        self._follow(self._make_driver(policy, limits))

    def switch(self, policy: Policy, limits: Limits, now_s: float, *, keeps_leases: bool) -> None:
        """Let another policy decide from now on; requests that wait or run are not touched.

        `keeps_leases` is as in `Driver.take_over`.
        """
        self.state.now_s = now_s
        driver = self._make_driver(policy, limits, self.driver.stats)
        driver.take_over(self.driver, now_s, keeps_leases=keeps_leases)
        waiting = sorted(self.state.waiting, key=lambda request: driver.get_stock_key(request.turn_id))
        self._follow(driver)
        for request in waiting:
            self._add_waiting(request)

    def _make_driver(self, policy: Policy, limits: Limits, stats: DriverStats | None = None) -> Driver:
        return Driver(
            policy,
            self._port,
            limits,
            by_priority=self._by_priority,
            log=self._log,
            stats=stats,
            strict=self._strict,
            step_chooser=make_step_chooser(self.config.step_tokens),
        )

    def _follow(self, driver: Driver) -> None:
        """Make an empty queue in this driver's order, and the parts that ask it."""
        config, state, kv, policy = self.config, self.state, self.kv, driver.policy
        self.driver = driver
        self._asks_admission = policy.overrides("admit")
        state.waiting = WaitingQueue(self._choose_key(policy, by_priority=self._by_priority))
        if self._orders_by_policy(policy):
            state.waiting.share_fairly(driver.make_order)
        self._asks_budget = driver.bounds_steps
        self._progress = Progress(config, state, kv, driver, self.offloader)
        self._loading = None
        if self.offloader is not None:
            self.offloader.follow(driver)
            self._loading = Loading(state, kv, driver, self.offloader, self._load_numbers)
        passes = ForkPasses if config.scheduler == "continuum-fork" else Passes
        self._passes = passes(config, state, kv, driver, self._loading)
        self.fast_forward = FastForward(config, state, kv, driver, has_tiers=self.offloader is not None)

    # What an engine calls.

    def add_request(self, request: Request, now_s: float) -> None:
        """A turn came in. Raises ConfigError if it can never run here."""
        self.kv.enter(request)
        self.state.now_s = now_s
        self.state.requests[request.turn_id] = request
        arrival = Arrival(
            hints=request.hints,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt=request.prompt_ids,
            hashes=BlockHashes(request, self.config.kv.hash_block_size),
            priority=request.priority,
        )
        self.driver.arrive(request.turn_id, now_s, arrival)
        request.has_checkpoints = self.driver.is_first_turn(request.turn_id)
        if self.offloader is not None:
            self.offloader.arrive(request)
        self._add_waiting(request)

    def schedule(self, now_s: float) -> Step:
        """Decide the next step; without tokens in it, nothing can run now."""
        state, driver = self.state, self.driver
        state.now_s = now_s
        self.kv.begin_step()
        driver.expire(now_s)
        if self._loading is not None:
            self._loading.collect()
        if driver.tick(now_s):
            state.waiting.reorder_all()
        if self._asks_admission:
            self._admit_parked()
        budget, per_prompt = self.config.max_step_tokens, self.config.long_prefill_token_threshold
        if self._asks_budget:
            budget, chosen = driver.get_step_size(now_s, budget)
            per_prompt = per_prompt or chosen
        # A request that is alone has nobody to starve.
        is_alone = len(state.running) + len(state.waiting) <= 1
        step = Step(budget, 0 if is_alone else per_prompt)
        offloader = self.offloader
        copied_s = offloader.get_free_s(now_s) if offloader is not None else now_s
        self._passes.schedule(step)
        self._progress.advance(step)
        if offloader is not None and offloader.is_serial:
            step.copies_s = max(0.0, step.copies_done_s - copied_s)
        for turn_id, num_hit_tokens in (*step.new.items(), *step.resumed.items()):
            short_hit = _get_short_hit(state.requests[turn_id], num_hit_tokens)
            driver.start(turn_id, now_s, num_hit_tokens, short_hit)
        return step

    def finish_step(
        self, step: Step, now_s: float, num_accepted: Mapping[str, int] | None = None
    ) -> list[tuple[Request, int]]:
        """A scheduled step was computed; steps are finished in the order they were scheduled in.

        `num_accepted` says how many of a request's drafts were right (none, unless told). Returns the
        requests that got output, with the number of new tokens; those that are done have `Status.FINISHED`.
        """
        self.state.now_s = now_s
        outputs = self._progress.give_outputs(step, num_accepted or {})
        if self.config.num_draft_tokens and self.config.max_steps_in_flight == 1:
            for request, _ in outputs:
                request.num_drafts = self.config.num_draft_tokens
        return outputs

    def abort(self, turn_id: str, now_s: float) -> None:
        """The client of a turn went away; nothing happens if the turn is done."""
        request = self.state.requests.get(turn_id)
        if request is None:
            return
        self.state.now_s = now_s
        if request.status is Status.RUNNING:
            self.state.running.remove(request)
        elif request.status in (Status.LOADING, Status.LOADED):
            assert self._loading is not None
            self._loading.drop(request)
        else:
            self.state.waiting.remove(request)
        self._progress.finish(request, Finish(request.num_output_tokens, aborted=True))

    def reset_prefix_cache(self, now_s: float, *, preempt_running: bool = False) -> bool:
        """Forget all cached content, leases included; False, and content stays, while requests run.

        With `preempt_running` these start over instead; output of theirs that is in flight is lost.
        """
        self.state.now_s = now_s
        self.driver.drop_all(now_s)
        if preempt_running:
            self._passes.preempt_all()
        return self.kv.pool.reset()

    def get_next_event_s(self) -> float | None:
        """When something happens by itself: a lease runs out, or a copy is complete. None if nothing does."""
        times_s = [self.driver.get_next_deadline_s()]
        if self._loading is not None:
            times_s.append(self._loading.get_next_event_s())
        return min((each for each in times_s if each is not None), default=None)

    # Inside.

    def _add_waiting(self, request: Request) -> None:
        is_parked = self._asks_admission and self.driver.needs_admission(request.turn_id)
        self.state.waiting.add(request, is_parked=is_parked)

    def _admit_parked(self) -> None:
        state = self.state
        while state.waiting.num_parked:
            is_idle = not state.running and not state.num_loading and state.waiting.get_first() is None
            admitted = self.driver.admit(state.waiting.get_first_parked(), state.now_s, idle=is_idle)
            if not admitted:
                return
            for turn_id in admitted:
                state.waiting.unpark(turn_id)

    def _choose_key(self, policy: Policy, *, by_priority: bool) -> GetKey | None:
        """What waiting requests are ordered by; None for vLLM's "fcfs"."""
        if self._orders_by_policy(policy):
            return self._get_policy_key
        return (lambda request: (request.priority, request.arrival_s)) if by_priority else None

    def _orders_by_policy(self, policy: Policy) -> bool:
        return self._asks_admission or policy.overrides("queue_key")

    def _get_policy_key(self, request: Request) -> Key:
        return self.driver.get_queue_key(request.turn_id, self.state.now_s)


def _get_short_hit(request: Request, num_hit_tokens: int) -> ShortHit | None:
    layers = request.short_layers
    if layers is None:
        return None
    name = layers if layers == STATE else f"window {layers}"
    return ShortHit(name, request.shared_tokens - num_hit_tokens)
