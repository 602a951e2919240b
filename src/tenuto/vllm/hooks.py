"""The hooks of one policy on one vLLM scheduler. A live change removes them and installs others.

Only the hooks that the policy overrides are installed, so with policy `stock` vLLM's own code runs unchanged.
There are none at all while leases are off. In shadow mode the policy is asked, and vLLM does not follow.
"""

from __future__ import annotations

import logging
from typing import Any

from tenuto.core.driver import Driver
from tenuto.core.pinned_prefixes import describe_room
from tenuto.core.policy import Key, Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.policy_loader import get_engine_settings
from tenuto.core.steps import StepTokens, get_max_step_tokens
from tenuto.estimators.step_size import make_step_chooser
from tenuto.vllm import compat
from tenuto.vllm.compat_checkpoints import FirstCheckpoints, get_checkpoint_blocks, get_full_blocks_per_token
from tenuto.vllm.compat_ends import EndSpares
from tenuto.vllm.engine import VllmEngine
from tenuto.vllm.first_tokens import FirstTokens
from tenuto.vllm.metrics import Metrics
from tenuto.vllm.pressure import Pressure
from tenuto.vllm.settings import Settings
from tenuto.vllm.shadow import Shadow, ShadowEngine
from tenuto.vllm.steps import StepTeller
from tenuto.vllm.waiting import SplitQueue, TurnQueue

MAX_ORDERING_SHARE = 0.02
"""Largest share of time spent on reordering all waiting turns; with thousands, this is done less often."""

logger = logging.getLogger("vllm.tenuto")


class Hooks:
    """A driver with a policy, and all that it needs in the scheduler."""

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
        """The policy of the settings, also while it is off."""
        asked = Policy() if settings.mode == "off" else policy
        self._scheduler = scheduler
        self._clock = clock
        self._is_shadow = settings.mode == "shadow"
        engine = ShadowEngine(scheduler) if self._is_shadow else VllmEngine(scheduler)
        self._step_tokens, self.asks_budget = self._find_step_tokens()
        self.driver = Driver(
            asked,
            engine,
            settings.limits,
            by_priority=scheduler.policy.value == "priority",
            log=log,
            strict=settings.strict,
            stats=metrics.stats,
            decided=metrics.shadow if self._is_shadow else None,
            canary=settings.canary,
            step_chooser=make_step_chooser(self._step_tokens),
        )
        # The output shows what follows a turn: a tool call, or the end of the job.
        self.reads_output = any(map(asked.overrides, ("retain", "on_tool_returned", "on_job_ended")))
        self.asks_admission = asked.overrides("admit")
        self._has_order = self.asks_admission or asked.overrides("queue_key")
        self.order: TurnQueue | None = None
        """The waiting requests in the policy's order."""
        self.steps = StepTeller(self.driver) if self.driver.hears_steps else None
        self.first_tokens = FirstTokens(scheduler, self.driver) if settings.canary.is_on else None
        self._retains = asked.overrides("retain") or asked.overrides("preempt_key")
        self._keeps_blocks = asked.overrides("retain")
        self._spares: EndSpares | None = None
        self._checkpoints: FirstCheckpoints | None = None
        self._pressure: Pressure | None = None
        self._next_keys_s = 0.0
        self.shadow: Shadow | None = None
        if isinstance(engine, ShadowEngine):
            self.shadow = Shadow(self.driver, engine, metrics.shadow_stats, log)

    def can_keep_leases_of(self, before: Hooks) -> bool:
        """Whether leases that were granted under other settings mean the same under these."""
        old, new = before.settings, self.settings
        return old.mode == new.mode == "on" and old.policy == new.policy

    def install(self, before: Hooks | None = None) -> None:
        """Install the hooks, in the place of others that were installed before.

        The scheduler's `driver` must be this one's. Requests that wait keep waiting, in the new order.
        """
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens = get_max_step_tokens(self._step_tokens, scheduler.max_step_tokens)
        if before is not None and before._pressure is not None:
            before._pressure.remove()
        if before is not None and before._spares is not None:
            before._spares.remove()
        if before is not None and before._checkpoints is not None:
            before._checkpoints.remove()
        waiting = list(scheduler.waiting)
        if self._has_order:
            # Only now, because the driver may have taken over the turns of another.
            self.order = self._make_queue()
            if self.shadow is not None:
                self.shadow.order = self.order
            for request in waiting:
                # In shadow mode the policy orders first starts only.
                if not self._is_shadow or not self.driver.has_started(request.request_id):
                    self.order.add_request(request)
        if self.order is not None and not self._is_shadow:
            scheduler.waiting = self.order
        elif isinstance(scheduler.waiting, TurnQueue):
            scheduler.waiting = compat.make_waiting_queue(scheduler)
            for request in sorted(waiting, key=self._get_place):
                scheduler.waiting.add_request(request)
        if self._retains and not self._is_shadow:
            self._pressure = Pressure(scheduler)
        if self._keeps_blocks and not self._is_shadow:
            self._spares = EndSpares(scheduler)
        if self.driver.pins.max_blocks and not self._is_shadow:
            self._checkpoints = FirstCheckpoints(scheduler)

    def describe_pins(self) -> str | None:
        """How many shared prefixes can be pinned; None if none are."""
        if self._checkpoints is None:
            return None
        return describe_room(
            self.driver.pins.max_blocks,
            get_checkpoint_blocks(self._scheduler),
            get_full_blocks_per_token(self._scheduler),
            self._checkpoints.tokens,
        )

    def arrive(self, request: Any) -> None:
        """A request arrived; the driver knows it already."""
        if self.shadow is not None:
            self.shadow.arrive(request)
        if self._checkpoints is not None and self.driver.is_first_turn(request.request_id):
            self._checkpoints.add(request.request_id)

    def start(self, started: list[tuple[str, int]], now_s: float) -> None:
        """These requests started or resumed, with so many hit tokens each."""
        if self.shadow is not None:
            requests = self._scheduler.requests
            self.shadow.start([(requests[each], num_hits) for each, num_hits in started], now_s)
        for request_id, num_hit_tokens in started:
            if self.first_tokens is not None:
                self.first_tokens.start(request_id)
            short_hit = self._scheduler.short_hits.get(request_id)
            self.driver.start(request_id, now_s, num_hit_tokens, short_hit)

    def leave(self, request: Any, now_s: float) -> None:
        """A request ends; the driver still knows it."""
        if self.first_tokens is not None:
            self.first_tokens.finish(request, now_s)
        if self.shadow is not None:
            self.shadow.leave(request)
        if self._checkpoints is not None:
            self._checkpoints.discard(request.request_id)

    def begin_step(self, now_s: float) -> None:
        """A step is about to be scheduled."""
        if self.driver.tick(now_s) and self.order is not None:
            self._ask_all_keys(self.order, now_s)
        if self.order is not None:
            self.order.begin_step()
            if self.asks_admission:
                self._admit_parked(self.order, now_s)
        if self._pressure is not None:
            self._pressure.begin_step(now_s)
        if self.shadow is not None:
            self.shadow.begin_step(now_s)

    def _find_step_tokens(self) -> tuple[StepTokens | None, bool]:
        """The size of steps that holds on this engine, and whether each step's budget must be asked for."""
        settings = self.settings
        if settings.mode != "on":
            return None, False
        step_tokens = settings.step_tokens or get_engine_settings(settings.policy, self.policy).step_tokens
        if step_tokens is None and not self.policy.overrides("step_budget"):
            return None, False
        reason = compat.get_reason_for_full_steps(self._scheduler)
        if reason is not None:
            logger.info("steps have vLLM's own budget, no smaller one: %s", reason)
            return None, False
        asks = make_step_chooser(step_tokens) is not None or self.policy.overrides("step_budget")
        return step_tokens, asks

    def _make_queue(self) -> TurnQueue:
        driver = self.driver
        if not self.settings.canary.is_on:
            return TurnQueue(self._get_key, self._is_gated, driver.settle, driver.make_order)
        return SplitQueue(
            self._get_key,
            self._is_gated,
            driver.settle,
            driver.make_order,
            self._get_place,
            lambda request: driver.runs_as_stock(request.request_id),
        )

    def _get_key(self, request: Any) -> Key:
        return self.driver.get_queue_key(request.request_id, self._clock.monotonic())

    def _get_place(self, request: Any) -> Key:
        return self.driver.get_stock_key(request.request_id)

    def _is_gated(self, request: Any) -> bool:
        return self.asks_admission and self.driver.needs_admission(request.request_id)

    def _ask_all_keys(self, order: TurnQueue, now_s: float) -> None:
        """Reorder all waiting turns, unless this would exceed the share of time `MAX_ORDERING_SHARE`."""
        if now_s < self._next_keys_s:
            return
        started_s = self._clock.perf_counter()
        order.reorder_all()
        self._next_keys_s = now_s + (self._clock.perf_counter() - started_s) / MAX_ORDERING_SHARE

    def _admit_parked(self, order: TurnQueue, now_s: float) -> None:
        while order.num_parked:
            idle = not self._scheduler.running and not order
            admitted = self.driver.admit(order.get_first_parked(), now_s, idle=idle)
            if not admitted:
                return
            for request_id in admitted:
                order.unpark(request_id)
