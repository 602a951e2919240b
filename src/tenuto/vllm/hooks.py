"""The hooks of one policy in one vLLM scheduler. A live change of the settings replaces them.

Only the hooks that the policy overrides are installed, so with policy `stock` vLLM's own code runs unchanged.
In mode off, no hook is installed. In shadow mode, the policy is asked, but vLLM does not follow it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from tenuto.core.driver import Driver
from tenuto.core.engine import StepClock, StepTokens, get_max_step_tokens, get_prompt_weight
from tenuto.core.loader import get_engine_settings
from tenuto.core.policy import Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.estimators.step_size import AdaptiveSteps
from tenuto.vllm.compat.groups import EndSpares, FirstCheckpoints
from tenuto.vllm.compat.scheduler import (
    AllocationGuard,
    count_missing_blocks,
    count_waiting,
    get_hit_tokens,
    get_prompts,
    get_reason_for_full_steps,
    is_by_priority,
    is_running,
    make_waiting_queue,
    put_first,
)
from tenuto.vllm.engine import VllmEngine
from tenuto.vllm.metrics import Metrics
from tenuto.vllm.settings import Settings
from tenuto.vllm.shadow import Shadow, ShadowEngine
from tenuto.vllm.waiting import SplitQueue, TurnQueue

MAX_DUE = 32
"""Most leases that one step renews or ends. It is enough to renew 1,000 leases once a second, and it bounds
the cost of a step even with 10,000 leases."""
MAX_ORDERING_SHARE = 0.02
"""Largest share of time spent on reordering all waiting turns. With thousands, this is done less often."""

logger = logging.getLogger("vllm.tenuto")


class Hooks:
    """A driver with a policy, and its hooks in the scheduler."""

    def __init__(
        self,
        scheduler: Any,
        settings: Settings,
        policy: Policy,
        metrics: Metrics,
        log: DecisionLog | None,
        clock: Any,
    ) -> None:
        """Changes nothing in the scheduler before `install`. `clock`: the module `time`, or a test's."""
        self.settings = settings
        self.policy = policy
        """The configured policy, even while the mode is off."""
        asked = Policy() if settings.mode == "off" else policy
        self._scheduler = scheduler
        self._clock = clock
        self._is_shadow = settings.mode == "shadow"
        self.engine = engine = ShadowEngine(scheduler) if self._is_shadow else VllmEngine(scheduler)
        self._step_tokens, self.asks_budget = self._find_step_tokens()
        prompt_weight = get_prompt_weight(self._step_tokens)
        self.chooses_steps = prompt_weight is not None
        """Whether steps are adaptive."""
        self.driver = Driver(
            asked,
            engine,
            settings.limits,
            by_priority=is_by_priority(scheduler),
            log=log,
            strict=settings.strict,
            stats=metrics.stats,
            decided=metrics.shadow if self._is_shadow else None,
            canary=settings.canary,
            step_chooser=None if prompt_weight is None else AdaptiveSteps(prompt_weight),
        )
        # The output shows what follows the turn: a tool call, or the end of the job.
        self.reads_output = any(map(asked.overrides, ("retain", "on_tool_returned", "on_job_ended")))
        self.asks_admission = asked.overrides("admit")
        self._asks_policy_budget = self.asks_budget and asked.overrides("step_budget")
        self._has_order = self.asks_admission or asked.overrides("queue_key")
        self._keeps_blocks = asked.overrides("retain")
        is_fair = self._has_order and settings.limits.fair_tenants
        self._handles_pressure = self._keeps_blocks or asked.overrides("preempt_key") or is_fair
        """Whether failed allocations matter: for leases, for who is preempted, or for what turns that leave
        cost their tenants."""
        self.order: TurnQueue | None = None
        """The waiting requests in the policy's order."""
        self.steps: StepReporter | None = None
        """The steps in flight, if the driver or the trace needs them."""
        if self.driver.hears_steps or log is not None:
            self.steps = scheduler.steps
        self.first_tokens = FirstTokens(scheduler, self.driver) if settings.canary.is_on else None
        is_simple = engine.can_truncate and scheduler.connector is None
        self.frees_later = self._keeps_blocks and not self._is_shadow and is_simple
        """Whether a turn that ended keeps its blocks until the driver has been told, which may keep them."""
        self.ends_later = self.frees_later or not (self._keeps_blocks or scheduler.tier)
        """Whether the driver may be told later that a turn ended."""
        self._spares: EndSpares | None = None
        self._checkpoints: FirstCheckpoints | None = None
        self._pressure: Pressure | None = None
        self._next_keys_s = 0.0
        self.is_followed = (
            self._has_order
            or self._handles_pressure
            or self.asks_budget
            or self._is_shadow
            or asked.needs.reorder_s is not None
        )
        """Whether steps depend on the driver's answers. If not, the driver only counts."""
        self.shadow: Shadow | None = None
        if isinstance(engine, ShadowEngine):
            self.shadow = Shadow(self.driver, engine, metrics.shadow_stats, log)

    def can_keep_leases_of(self, before: Hooks) -> bool:
        """Whether leases that were granted under the settings `before` are still valid under these."""
        old, new = before.settings, self.settings
        return old.mode == new.mode == "on" and old.policy == new.policy

    def install(self, before: Hooks | None = None) -> None:
        """Install the hooks; they replace those of `before`.

        The scheduler's `driver` must be this object's. Waiting requests keep waiting, in the new order.
        """
        scheduler = self._scheduler
        size = get_max_step_tokens(self._step_tokens, scheduler.max_step_tokens)
        # Every turn that runs needs a token in each step.
        scheduler.max_num_scheduled_tokens = max(size, len(scheduler.running))
        for each in () if before is None else (before._pressure, before._spares, before._checkpoints):
            if each is not None:
                each.remove()
        waiting = list(scheduler.waiting)
        if self._has_order:
            # Not earlier: the driver may first have to take over another driver's turns.
            make_queue = SplitQueue if self.settings.canary.is_on else TurnQueue
            self.order = make_queue(self.driver, self._clock)
            if self.shadow is not None:
                self.shadow.order = self.order
            for request in waiting:
                # In shadow mode the policy orders only turns that have not started yet.
                if not self._is_shadow or not self.driver.has_started(request.request_id):
                    self.order.add_request(request)
        if self.order is not None and not self._is_shadow:
            scheduler.waiting = self.order
        elif isinstance(scheduler.waiting, TurnQueue):
            scheduler.waiting = make_waiting_queue(scheduler)
            for request in sorted(waiting, key=lambda each: self.driver.get_stock_key(each.request_id)):
                scheduler.waiting.add_request(request)
        if self._is_shadow:
            return
        if self._handles_pressure:
            self._pressure = Pressure(scheduler)
        if self._keeps_blocks:
            self._spares = EndSpares(scheduler)
        if self.driver.pins.max_blocks:
            self._checkpoints = FirstCheckpoints(scheduler)

    def describe_pins(self) -> str | None:
        """How many shared prefixes can be pinned, as a text; None if nothing is pinned."""
        made = self._checkpoints
        return None if made is None else made.describe_room(self.driver.pins.max_blocks)

    def arrive(self, request: Any) -> None:
        """A request arrived; the driver knows it already."""
        if self.shadow is not None:
            self.shadow.arrive(request)
        if self._checkpoints is not None and self.driver.is_first_turn(request.request_id):
            self._checkpoints.add(request.request_id)

    def start(self, started: list[tuple[str, int]], now_s: float) -> None:
        """These requests started or resumed, with this many hit tokens each."""
        if self.shadow is not None:
            requests = self._scheduler.requests
            self.shadow.start([(requests[each], num_hits) for each, num_hits in started], now_s)
        for request_id, num_hit_tokens in started:
            if self.first_tokens is not None:
                self.first_tokens.start(request_id)
            if self._scheduler.connector is not None and not self.driver.has_started(request_id):
                self.driver.load(request_id, get_hit_tokens(self._scheduler.requests[request_id])[1])
            short_hit = self._scheduler.short_hits.found.get(request_id)
            if self.driver.start(request_id, now_s, num_hit_tokens, short_hit):
                put_first(self._scheduler, request_id)

    def look(self, output: Any) -> None:
        """A step was scheduled: check which blocks of its prompts can be kept, if leases are possible."""
        if self._keeps_blocks:
            for request_id in get_prompts(output):
                if request_id in self._scheduler.requests:
                    self.engine.look(request_id)

    def leave(self, request: Any, now_s: float) -> None:
        """A request ends; the driver has not been told yet."""
        if self.first_tokens is not None:
            self.first_tokens.finish(request, now_s)
        if self.shadow is not None:
            self.shadow.leave(request)
        if self._checkpoints is not None:
            self._checkpoints.discard(request.request_id)

    def prepare_memory(self, now_s: float) -> None:
        """A step is about to be scheduled: it may run out of memory."""
        if self._pressure is not None:
            self._pressure.begin_step(now_s)

    def is_quiet(self, now_s: float, *, has_partial_prompt: bool) -> bool:
        """Whether the driver decides nothing about the next step, unless it runs out of memory.

        `has_partial_prompt`: whether the last step may have left part of a prompt uncomputed.
        """
        if not self.is_followed:
            return True
        if self._is_shadow or count_waiting(self._scheduler):
            return False
        deadline_s = self.driver.get_next_deadline_s()
        if now_s >= self.driver.next_reorder_s or (deadline_s is not None and deadline_s <= now_s):
            return False
        return not (self.asks_budget and (has_partial_prompt or self._asks_policy_budget))

    def begin_step(self, now_s: float) -> None:
        """A step that is not quiet is about to be scheduled."""
        self.driver.expire(now_s, MAX_DUE)
        if self.driver.tick(now_s) and self.order is not None:
            self._ask_all_keys(self.order, now_s)
        if self.order is not None:
            if self.asks_admission:
                self.order.admit(self.driver, now_s, idle=not self._scheduler.running)
            self.order.begin_step()
        if self.shadow is not None:
            self.shadow.begin_step(now_s)

    def _find_step_tokens(self) -> tuple[StepTokens | None, bool]:
        """The step size on this engine, and whether the driver must be asked before each step."""
        settings = self.settings
        if settings.mode != "on":
            return None, False
        step_tokens = settings.step_tokens
        if step_tokens is None and not settings.canary.is_on:
            # A step serves all jobs, so with a canary the policy's wish does not count.
            step_tokens = get_engine_settings(settings.policy, self.policy).step_tokens
        if step_tokens is None and not self.policy.overrides("step_budget"):
            return None, False
        reason = get_reason_for_full_steps(self._scheduler)
        if reason is not None:
            logger.info("steps have vLLM's own budget, no smaller one: %s", reason)
            return None, False
        asks = get_prompt_weight(step_tokens) is not None or self.policy.overrides("step_budget")
        return step_tokens, asks

    def _ask_all_keys(self, order: TurnQueue, now_s: float) -> None:
        """Reorder all waiting turns, unless this would exceed the share of time `MAX_ORDERING_SHARE`."""
        if now_s < self._next_keys_s:
            return
        started_s = self._clock.perf_counter()
        order.reorder_all()
        self._next_keys_s = now_s + (self._clock.perf_counter() - started_s) / MAX_ORDERING_SHARE


class Pressure:
    """Handles failed allocations: reclaims leases first, then lets vLLM preempt the policy's victim.

    All of this runs inside vLLM's allocation, so it must not reorder the waiting queue. The queue calls
    `Driver.settle` before it is read again.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._guard = AllocationGuard(scheduler, self._allocate_with_leases)
        self.remove = self._guard.remove
        """Leaves vLLM's allocation as it was."""
        self._now_s = 0.0
        self._victims: list[str] | None = None
        """Running turns in order of preemption; None until this step needs the order."""

    def begin_step(self, now_s: float) -> None:
        """A step is about to be scheduled."""
        self._now_s = now_s
        self._guard.set_for_step()
        self._victims = None

    def _allocate_with_leases(
        self, allocate: Any, request: Any, num_new_tokens: int, kwargs: dict[str, Any]
    ) -> Any:
        """Reclaim leases until vLLM's allocation succeeds. Return None if it still fails."""
        # In a quiet step, the driver may not have been told yet of turns that ended.
        scheduler, driver, now_s = self._scheduler, self._scheduler.driver, self._now_s
        driver.expire(now_s, MAX_DUE)
        runs = is_running(request)
        stalled = len(scheduler.running) <= (1 if runs else 0)
        missing = count_missing_blocks(scheduler, request, num_new_tokens, kwargs)
        if missing <= 0 and (blocks := allocate(request, num_new_tokens, **kwargs)) is not None:
            return blocks
        # If all leases together are not enough, reclaiming them would not help. While loads and streamed-in
        # requests that wait for input hold blocks, that is so even if nothing runs.
        leased = scheduler.leased_blocks
        if stalled and leased.get_num_free_blocks() + len(leased) < leased.num_blocks:
            can_help = missing <= len(leased)
        else:
            can_help = stalled or missing <= driver.get_num_reclaimable_blocks(request.request_id)
        wanted = max(1, missing)
        while can_help:
            num_freed = driver.reclaim(wanted, now_s, for_turn_id=request.request_id, stalled=stalled)
            if num_freed == 0:
                break
            blocks = allocate(request, num_new_tokens, **kwargs)
            if blocks is not None:
                return blocks
            wanted *= 2
        if runs:
            self._put_victim_last(request)
        else:
            driver.block(request.request_id)
        return None

    def _put_victim_last(self, request: Any) -> None:
        """Move the policy's victim to the end of `running`, because vLLM preempts the last request.

        Only requests that are not yet scheduled in this step may be preempted: `request` and those after it.
        In priority mode vLLM chooses the victim itself, and a move would make it visit a request twice.
        """
        if is_by_priority(self._scheduler):
            return
        running = self._scheduler.running
        if self._victims is None:
            # Ask only once per step: if many turns are preempted, asking for each would take too long.
            driver = self._scheduler.driver
            self._victims = driver.get_victims([each.request_id for each in running], self._now_s)
        candidates = {each.request_id: each for each in running[running.index(request) :]}
        victim = next((candidates[each] for each in self._victims if each in candidates), None)
        if victim is not None and victim is not running[-1]:
            running.remove(victim)
            running.append(victim)


class FirstTokens:
    """Measures times to first token in the engine, for the two groups of a canary.

    It watches a turn from its start to its first token, so each step checks only those turns.
    """

    def __init__(self, scheduler: Any, driver: Driver) -> None:
        self._scheduler = scheduler
        self._driver = driver
        self._pending: dict[str, float] = {}
        """Arrival times of turns that have started but have no token yet."""

    def start(self, request_id: str) -> None:
        """A turn got a step. Call this before the driver is told."""
        arrival_s = self._driver.get_arrival_s(request_id)
        if arrival_s is not None and not self._driver.has_started(request_id):
            self._pending[request_id] = arrival_s

    def look(self, now_s: float) -> None:
        """A step's results have been processed."""
        requests = self._scheduler.requests
        for request_id in [each for each in self._pending if requests[each].num_output_tokens]:
            self._observe(request_id, now_s)

    def finish(self, request: Any, now_s: float) -> None:
        """A turn ends. Call this before the driver is told."""
        if request.request_id in self._pending:
            if request.num_output_tokens:
                self._observe(request.request_id, now_s)
            else:
                del self._pending[request.request_id]

    def _observe(self, request_id: str, now_s: float) -> None:
        group = "stock" if self._driver.runs_as_stock(request_id) else "policy"
        self._driver.stats.groups[group].first_token_s.observe(now_s - self._pending.pop(request_id))


@dataclass(slots=True)
class _Scheduled:
    """A step that was scheduled, and has not ended."""

    output: Any
    at_s: float
    """When it was scheduled."""
    is_full: bool
    """Whether it uses its whole token budget."""
    launched_s: float | None = None
    """When vLLM had launched its forward pass; None before that."""


class StepReporter:
    """Tells the driver about each computed step. vLLM finishes steps in the order of scheduling.

    vLLM looks at a step's results only after it has launched the next step. Without a CUDA graph a launch may
    take longer than the GPU needs (30 ms for prompts of an 8B model). So if vLLM launched for longer than it
    then waited for the results, the difference is time of the step that was launched. What a step takes that
    only decodes is left to the one before.
    """

    def __init__(self) -> None:
        self._clock = StepClock()
        self._decode_s = math.inf
        """Seconds of the latest step that only decoded and that no launch delayed, or was no longer than this
        although one did."""
        self._scheduled: deque[_Scheduled] = deque()

    def __len__(self) -> int:
        """Number of scheduled steps that have not ended."""
        return len(self._scheduled)

    def schedule(self, output: Any, now_s: float, *, is_full: bool) -> None:
        """A step was scheduled. A step without tokens is never computed, so it is not counted.

        `is_full`: whether it uses its whole token budget.
        """
        if output.total_num_scheduled_tokens:
            self._scheduled.append(_Scheduled(output, now_s, is_full))

    def launch(self, output: Any, now_s: float) -> None:
        """VLLM has launched the forward pass of the step that was scheduled last."""
        if self._scheduled and self._scheduled[-1].output is output:
            self._scheduled[-1].launched_s = now_s

    def finish(self, output: Any, now_s: float, driver: Driver) -> None:
        """The results of a step have arrived."""
        # Steps that were scheduled while nothing needed them are not in `_scheduled`.
        if all(each.output is not output for each in self._scheduled):
            return
        # Steps before it that have not ended will not: they failed, and vLLM goes on (fault tolerance).
        while (step := self._scheduled.popleft()).output is not output:
            pass
        num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        num_tokens = output.total_num_scheduled_tokens - num_drafts
        num_requests = len(output.num_scheduled_tokens)
        duration_s = now_s - max(self._clock.ended_s, step.at_s)
        late_s = min(self._get_launch_s(now_s), duration_s - self._decode_s)
        if late_s <= 0 and num_tokens == num_requests:
            self._decode_s = duration_s
        ended_s = now_s - max(0.0, late_s)
        driver.step(self._clock.finish(ended_s, step.at_s, num_tokens, num_requests, is_full=step.is_full))

    def _get_launch_s(self, now_s: float) -> float:
        """Seconds that vLLM spent on launching the next step, beyond those that it waited for results."""
        following = self._scheduled[0] if self._scheduled else None
        if following is None or following.launched_s is None or following.launched_s > now_s:
            return 0.0
        return 2 * following.launched_s - following.at_s - now_s
