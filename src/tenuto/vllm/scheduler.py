"""The scheduler class that vLLM loads: vLLM's own scheduler, with calls to the driver at a few places.

    vllm serve MODEL --scheduler-cls tenuto.vllm.Scheduler --additional-config '{"tenuto": {...}}'

No code of vLLM's `schedule()` is copied. Everything that depends on the policy is in `tenuto.vllm.hooks`, so
that an operator can change the policy while requests wait and run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tenuto.core.control import ADMIN_VARIABLE, Control
from tenuto.core.driver import Driver
from tenuto.core.errors import IncompatibleError
from tenuto.core.loader import get_server_settings, load_policy
from tenuto.core.policy import Policy
from tenuto.core.types import LeaseEnd
from tenuto.records.prototype import LiveTimestamps
from tenuto.records.trace import StepState, TraceWriter
from tenuto.vllm.compat.check import VERSION, check_attributes, find_problems
from tenuto.vllm.compat.groups import ShortHits
from tenuto.vllm.compat.process import find_engine_core, get_engine_index, offer_call, wake, watch_weights
from tenuto.vllm.compat.scheduler import (
    AsyncScheduler,
    LeasedBlocks,
    PrivateHooks,
    SyncScheduler,
    count_cached_blocks,
    count_waiting,
    get_hit_tokens,
    get_reason_for_stock,
    get_started,
    get_stock_class,
    get_tokens_per_prompt,
    is_by_priority,
    load_tokenizer,
    put_decodes_first,
    serve_by_priority,
    set_tokens_per_prompt,
)
from tenuto.vllm.complaints import Complaints
from tenuto.vllm.control_http import CALL
from tenuto.vllm.engine import Ended
from tenuto.vllm.hooks import Hooks, StepReporter
from tenuto.vllm.metrics import Metrics
from tenuto.vllm.requests import OutputReader, describe, drop_deep_fields
from tenuto.vllm.settings import OUTPUT_VARIABLE, Settings, read_settings
from tenuto.vllm.state import StateFile
from tenuto.vllm.tenants import INTRODUCE, TenantVerifier, check_names

logger = logging.getLogger("vllm.tenuto")


class _DrivenScheduler(PrivateHooks):
    """A vLLM scheduler with a driver; mixed into vLLM's synchronous and asynchronous scheduler below."""

    # vLLM's own attributes.
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    max_num_scheduled_tokens: int
    hash_block_size: int
    get_request_counts: Any

    _hooks: Any = None
    _is_handling = False
    _has_partial_prompt = True
    """Whether the last step may have left part of a prompt uncomputed."""
    tier: Any = None
    """Tenuto's host memory below the GPU (`tenuto.vllm.tiers.host.HostTier`), or None."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = read_settings(vllm_config.additional_config)
        policy = load_policy(settings.policy, settings.options)
        for name in settings.own_policies or ():
            load_policy(name)
        wanted = get_server_settings(settings.policy, policy)
        if wanted.order == "priority":
            serve_by_priority(vllm_config)
        self.tenants = TenantVerifier(trusts_clients=settings.tenants == "client")
        check_names((*(settings.limits.tenant_weights or ()), *(settings.canary.tenants or ())))
        self._deep_fields = Complaints("request")
        self._queued: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Events that the driver has not been told yet, in order."""
        self._has_queued_step = False
        self._adapters: set[tuple[str, str]] = set()
        """The adapters that were loaded so far, by name and path, if there is no host memory."""
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        check_attributes(self)
        engine_core = find_engine_core()
        engine_index = get_engine_index(engine_core)
        self.max_step_tokens = self.max_num_scheduled_tokens
        self._state: StateFile | None = None
        if settings.state is not None:
            path = _get_file(settings.state, engine_index)
            self._state = StateFile(policy, settings.policy, path, settings.save_every_s)
        # Open the trace after the state is restored, because the trace's header contains that state.
        self._trace = self._timestamps = None
        if settings.trace:
            if folder := os.environ.get(OUTPUT_VARIABLE):
                path = _get_file(os.path.join(folder, "scheduler_timestamps"), engine_index)
                self._timestamps = LiveTimestamps(Path(path))
            name, facts = _get_header(settings)
            asked = Policy() if settings.mode == "off" else policy
            path = _get_file(settings.trace, engine_index)
            self._trace = TraceWriter(path, asked, name, settings.trace_options, facts).open()
        self._metrics = Metrics(vllm_config, engine_index)
        self.short_hits = ShortHits(self)
        self._metrics.tenants = self.tenants
        self._metrics.groups = tuple(self.short_hits.names.values())
        self.leased_blocks = LeasedBlocks(self, lambda: self._hooks.driver.limits.always_yield)
        self.tier = _find_tier(self, settings, policy)
        if self.tier is not None:
            self._metrics.watch_tier(self.tier)
        self.steps = StepReporter()
        self._hooks = self.prepare(settings, policy)
        self._hooks.install()
        self._metrics.refresh(self.driver, 0.0)
        reads_output = self._hooks.reads_output or bool(os.environ.get(ADMIN_VARIABLE))
        self._reader = OutputReader(load_tokenizer(vllm_config) if reads_output else None)
        self._idle_timer = IdleTimer(lambda: wake(engine_core)) if engine_core is not None else None
        self.control = Control(
            self,
            engine_index,
            by_priority=is_by_priority(self),
            read_fields=self.tenants.read_release,
            logger=logger,
        )
        if engine_core is not None:
            offer_call(engine_core, CALL, self.control.answer)
            offer_call(engine_core, INTRODUCE, self.tenants.answer)
            watch_weights(engine_core, self.change_weights, self.load_adapter)
        logger.info("Tenuto runs policy %s on vLLM %s", settings.policy, VERSION)
        if text := self._hooks.describe_pins():
            logger.info("%s", text)
        # vLLM logs a warning about every scheduler class that is not its own.
        logger.info(
            "vLLM's warning that a custom scheduler class may disable async scheduling does not apply to "
            "Tenuto; async scheduling is %s, as in stock vLLM with this configuration",
            "on" if vllm_config.scheduler_config.async_scheduling else "off",
        )

    # Called by vLLM.

    def add_request(self, request: Any) -> None:
        """A request arrived. The driver is not told of later pieces of a request that is streamed in."""
        drop_deep_fields(request, self._deep_fields)
        if request.request_id not in self.requests:
            self._queue(self._handle_arrival, request, time.monotonic())
            if self._hooks.is_followed:
                # The driver decides the request's place in the queue.
                self._handle_queued()
        super().add_request(request)  # type: ignore[misc]
        if self.tier is not None:
            self.tier.arrive(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule one step with vLLM's own code. The driver is asked if there is something to decide."""
        now_s = time.monotonic()
        if self._has_queued_step:
            self._handle_queued()
        max_tokens = self.max_num_scheduled_tokens
        is_quiet = self._hooks.is_quiet(now_s, has_partial_prompt=self._has_partial_prompt)
        if not is_quiet:
            self._handle_queued()
        # After that: whether memory may run out depends on the leases of turns that have just ended.
        self._hooks.prepare_memory(now_s)
        if is_quiet:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            self._has_partial_prompt = output.total_num_scheduled_tokens >= max_tokens
        else:
            output, max_tokens = self._schedule_as_decided(now_s, *args, **kwargs)
        self._has_queued_step = True
        self._queue(self._handle_step, output, now_s, max_tokens)
        if not output.total_num_scheduled_tokens:
            # Nothing will be computed, so vLLM will not ask for a grammar bitmask.
            self._use_free_time()
        return output

    def _schedule_as_decided(self, now_s: float, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        """Expire leases, admit turns, set the budget, then run vLLM's schedule. Returns the budget too."""
        hooks, full_budget = self._hooks, self.max_num_scheduled_tokens
        hooks.begin_step(now_s)
        if not hooks.asks_budget:
            return super().schedule(*args, **kwargs), full_budget  # type: ignore[misc]
        per_prompt = get_tokens_per_prompt(self)
        only_decodes = not self._has_partial_prompt and not count_waiting(self)
        size = hooks.driver.get_step_size(now_s, full_budget, only_decodes=only_decodes)
        self.max_num_scheduled_tokens = size.num_tokens
        set_tokens_per_prompt(self, per_prompt or size.per_prompt)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            is_full = output.total_num_scheduled_tokens >= size.num_tokens
            self._has_partial_prompt = is_full or get_tokens_per_prompt(self) > 0
        finally:
            self.max_num_scheduled_tokens = full_budget
            set_tokens_per_prompt(self, per_prompt)
        return output, size.num_tokens

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """VLLM asks for this after it has launched a step, while the GPU computes."""
        launched_s = time.monotonic()
        self._use_free_time()
        if self._hooks.steps is not None:
            self._hooks.steps.launch(scheduler_output, launched_s)
        return super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """A step was computed. The policy is told before vLLM processes the results."""
        if self._has_queued_step:
            self._handle_queued()
        if self._hooks.steps is not None:
            self._queue(self._handle_result, scheduler_output, time.monotonic())
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._hooks.first_tokens is not None:
            self._hooks.first_tokens.look(time.monotonic())
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Requests end from outside. The driver first hears of earlier ends, with the queue of that time."""
        self._handle_queued()
        return super().finish_requests(*args, **kwargs)  # type: ignore[misc]

    def on_turn_finishing(self, request: Any) -> None:
        """A request ended. It still has its blocks, so the driver can grant a lease on them."""
        num_free_blocks = self.leased_blocks.get_num_free_blocks()
        ended = Ended(request, time.monotonic(), len(self.running), num_free_blocks)
        self._hooks.leave(request, ended.now_s)
        if self._hooks.ends_later:
            self._queue(self._handle_end, ended)
            return
        self._handle_queued()
        self._handle_end(ended)

    def keeps_for_now(self, request: Any) -> bool:
        if self._hooks.frees_later:
            self.leased_blocks.free_later(request)
            self._queue(self.leased_blocks.free_next)
            return True
        return False

    def on_turn_preempting(self, request: Any) -> None:
        self.driver.preempt(request.request_id, time.monotonic(), request.num_computed_tokens)
        self._hooks.engine.forget(request.request_id)

    def has_requests(self) -> bool:
        """Also true if a lease has passed its deadline: an idle engine then runs a step, which ends it.

        VLLM asks once, then sleeps. The timer makes it ask again when there is something to end or to write.
        """
        if super().has_requests():  # type: ignore[misc]
            return True
        self._handle_queued()
        now_s = time.monotonic()
        # To end a lease, or to prefetch the KV of a job.
        dues = [self.driver.get_next_deadline_s(), self.tier.get_next_due_s() if self.tier else None]
        if any(each is not None and each <= now_s for each in dues):
            return True
        self._metrics.refresh(self.driver, now_s, idle=True)
        dues.append(self._metrics.get_idle_due_s(self.driver, now_s))
        if self._trace is not None:
            self._trace.flush()
        if self._timestamps is not None:
            self._timestamps.save(now_s)
            dues.append(self._timestamps.get_due_s())
        if self._state is not None:
            self._state.save_if_due(now_s, idle=True)
            dues.append(self._state.get_idle_due_s())
        due_s = min((each for each in dues if each is not None), default=None)
        if due_s is not None and self._idle_timer is not None:
            self._idle_timer.arm(due_s)
        return False

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the prefix cache. This ends all leases."""
        self.driver.drop_all(time.monotonic())
        if self.tier is not None:
            self.tier.reset()
        is_clean = False
        try:
            is_clean = bool(super().reset_prefix_cache(reset_running_requests, reset_connector))  # type: ignore[misc]
        finally:
            if self.tier is not None:
                self.tier.end_reset(is_whole=reset_connector, is_clean=is_clean)
        return is_clean

    def change_weights(self, what: str) -> None:
        """The weights may have changed. Leases end, so that older KV stays no longer than in stock vLLM."""
        if self.tier is not None:
            self.tier.change_weights(what)
        else:
            self.driver.drop_all(time.monotonic())

    def load_adapter(self, name: str, path: str, load: Callable[[], bool]) -> bool:
        """Let vLLM load an adapter. VLLM's keys have its name and path only, so older KV must not stay."""
        if self.tier is not None:
            return bool(self.tier.load_adapter(name, path, load))
        done = load()
        if (name, path) in self._adapters:
            self.reset_prefix_cache()
        self._adapters.add((name, path))
        return done

    def shutdown(self) -> None:
        """End all leases, save what the policy learned, and complete the trace."""
        if self._idle_timer is not None:
            self._idle_timer.stop()
        self.driver.drop_all(time.monotonic())
        self._metrics.close()
        if self._state is not None:
            self._state.close()
        if self._trace is not None:
            self._trace.close()
        if self._timestamps is not None:
            self._timestamps.save()
        super().shutdown()  # type: ignore[misc]

    # Events for the driver are queued, and most can wait until the GPU computes. The driver must be told of
    # all of them, in order, before it is asked anything.

    @property
    def driver(self) -> Driver:
        """The driver, after it was told of all events."""
        self._handle_queued()
        driver: Driver = self._hooks.driver
        return driver

    def _queue(self, handle: Callable[..., None], *facts: Any) -> None:
        self._queued.append((handle, facts))

    def _handle_queued(self) -> None:
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._queued:
                handle, facts = self._queued.popleft()
                handle(*facts)
        finally:
            self._is_handling = self._has_queued_step = False

    def _use_free_time(self) -> None:
        self._handle_queued()
        now_s = time.monotonic()
        if self._state is not None:
            self._state.save_if_due(now_s)
        self._metrics.refresh(self._hooks.driver, now_s)

    def _handle_arrival(self, request: Any, now_s: float) -> None:
        started_s = time.perf_counter()
        driver = self._hooks.driver
        driver.arrive(request.request_id, now_s, describe(request, self.tenants, self._reader))
        self._hooks.arrive(request)
        driver.stats.decision_s.observe(time.perf_counter() - started_s)

    def _handle_step(self, output: Any, now_s: float, max_tokens: int) -> None:
        hooks = self._hooks
        if hooks.steps is not None:
            hooks.steps.schedule(output, now_s, is_full=output.total_num_scheduled_tokens >= max_tokens)
        hooks.driver.settle()
        hooks.start(list(get_started(output)), now_s)
        if hooks.chooses_steps and self._has_partial_prompt:
            # Turns behind a prompt that a step cuts would get nothing from the next ones, if these are small.
            put_decodes_first(self)
        hooks.look(output)
        self.short_hits.found.clear()
        if self._trace is not None:
            record_step(self._trace, self, output, now_s, max_tokens)

    def _handle_result(self, output: Any, now_s: float) -> None:
        if self._hooks.steps is not None:
            self._hooks.steps.finish(output, now_s, self._hooks.driver)

    def _handle_end(self, ended: Ended) -> None:
        started_s = time.perf_counter()
        request, hooks = ended.request, self._hooks
        driver = hooks.driver
        reads = hooks.reads_output and driver.needs_output(request.request_id)
        finish = self._reader.get_finish(request, reads_output=reads)
        if self.tier is not None:
            self.tier.finish(request, driver.get_finished_turn(request.request_id, finish))
        hooks.engine.begin_end(ended)
        try:
            driver.finish(request.request_id, ended.now_s, finish, request.num_prompt_tokens)
        finally:
            hooks.engine.leave(request.request_id)
        driver.stats.decision_s.observe(time.perf_counter() - started_s)

    # Called by the engine adapter.

    def get_num_parked(self) -> int:
        """Number of waiting requests that admission holds back."""
        return self.order.num_parked if self.order is not None else 0

    @property
    def order(self) -> Any:
        """The waiting requests in the policy's order; None if it has none."""
        return self._hooks.order if self._hooks is not None else None

    # Called by the operator's control (`tenuto.core.control.Controlled`).

    @property
    def settings(self) -> Settings:
        settings: Settings = self._hooks.settings
        return settings

    @property
    def configured_policy(self) -> Policy:
        """The configured policy, after it was told of all events."""
        self._handle_queued()
        policy: Policy = self._hooks.policy
        return policy

    def count_changes(self, changed: Iterable[str]) -> None:
        self._metrics.count_changes(changed)

    def prepare(self, settings: Settings, policy: Policy) -> Hooks:
        """Make the hooks of these settings without installing them. Raises if a setting is wrong."""
        log = self._write_record if self._trace else None
        return Hooks(self, settings, policy, self._metrics, log, time)

    def switch(self, hooks: Hooks) -> None:
        """Run these hooks from now on; waiting and running requests are not affected.

        Leases stay if the policy is still the same; its options, the limits and the canary may differ.
        """
        now_s = time.monotonic()
        # What happened before belongs to the old policy, in the trace too.
        before, driver = self._hooks, self.driver
        keeps_leases = hooks.can_keep_leases_of(before)
        if not keeps_leases:
            driver.drop_all(now_s, LeaseEnd.SWITCHED)
        if self._state is not None:
            self._state.follow(hooks.policy, hooks.settings.policy)
        if self._trace is not None and hooks.driver.policy is not driver.policy:
            self._trace.begin_run(hooks.driver.policy, *_get_header(hooks.settings))
        hooks.driver.take_over(driver, now_s, keeps_leases=keeps_leases)
        self._hooks = hooks
        if self.tier is not None:
            self.tier.follow_policy(hooks.settings, hooks.policy)
        hooks.install(before)
        self._metrics.settings = hooks.settings
        self._metrics.refresh(self.driver, now_s, idle=True)

    def get_now_s(self) -> float:
        return time.monotonic()

    def release(self, job_id: str) -> bool:
        released: bool = self.driver.release(job_id, time.monotonic())
        self._use_free_time()  # the policy may have learned from it
        return released

    # Internal.

    def _write_record(self, record: dict[str, Any]) -> None:
        assert self._trace is not None
        self._trace.write(record)
        if self._timestamps is not None:
            self._timestamps.see(record)


class _SynchronousScheduler(_DrivenScheduler, SyncScheduler):  # type: ignore[misc]
    """Used where vLLM itself schedules synchronously (on CPUs, with pipeline stages …)."""


class Scheduler(_DrivenScheduler, AsyncScheduler):  # type: ignore[misc]
    """The class to name in `--scheduler-cls`.

    Constructing it returns an asynchronous or a synchronous scheduler, as vLLM's configuration says. It
    returns vLLM's own scheduler for models without turns, such as pooling models. It also does so for a vLLM
    that does not fit, if `on_mismatch` is "stock".

    Raises IncompatibleError, which lists what does not fit, or ConfigError for a bad setting.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Choose the class. vLLM passes all arguments by keyword."""
        settings = read_settings(vllm_config.additional_config)
        reason = _get_reason_for_stock(vllm_config, settings)
        if reason is not None:
            logger.warning("Tenuto is inactive, and stock vLLM schedules: %s", reason)
            return get_stock_class(vllm_config)(vllm_config, *args, **kwargs)
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning("prefix caching is off: nothing can be retained between turns")
        if not vllm_config.scheduler_config.async_scheduling:
            return _SynchronousScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


def _get_reason_for_stock(vllm_config: Any, settings: Settings) -> str | None:
    problems = find_problems(VERSION, allow_untested=settings.allow_untested)
    if problems:
        text = f"vLLM {VERSION} does not fit: " + "; ".join(problems)
        if settings.on_mismatch == "stop":
            raise IncompatibleError(
                f'{text}. Install a supported release, or set tenuto.on_mismatch to "stock"'
            )
        return text
    return get_reason_for_stock(vllm_config)


def _find_tier(scheduler: Any, settings: Settings, policy: Policy) -> Any:
    """Tenuto's host memory below this scheduler; None if it has none, or another's.

    vLLM's offloading code is imported only if a connector is used.
    """
    if scheduler.connector is None:
        return None
    try:
        from tenuto.vllm.compat.offload import find_connector
        from tenuto.vllm.tiers.host import HostTier
    except ImportError:
        # This vLLM's offloading differs, so it cannot have loaded our spec either.
        return None
    connector = find_connector(scheduler)
    return None if connector is None else HostTier(scheduler, connector, settings, policy, time)


def _get_file(path: str, engine_index: int) -> str:
    """The file of one data-parallel engine; the first engine uses the path unchanged."""
    return path if engine_index == 0 else f"{path}.engine{engine_index}"


def _get_header(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The settings in the trace's header: the name of the policy that is asked, and other facts."""
    facts: dict[str, Any] = {"mode": settings.mode}
    if settings.canary.is_on:
        facts["canary"] = dataclasses.asdict(settings.canary)
    return "stock" if settings.mode == "off" else settings.policy, facts


def record_step(trace: TraceWriter, scheduler: Any, output: Any, now_s: float, max_tokens: int) -> None:
    """Write one `step` record, after the driver was told of the step, and an `admission` per started turn.

    `max_tokens`: the step's token budget.
    """
    connector = scheduler.connector
    new: list[str] = []
    resumed: list[str] = []
    for request_id, num_hit_tokens in get_started(output):
        request = scheduler.requests[request_id]
        (resumed if request.num_preemptions else new).append(request_id)
        local, external = get_hit_tokens(request)
        trace.write(
            {
                "kind": "admission",
                "turn": request_id,
                "now_s": now_s,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_hit_tokens": num_hit_tokens,
                "num_local_hit_tokens": local,
                "num_external_hit_tokens": external,
                **({} if connector is None else {"connector": type(connector).__name__}),
            }
        )
    driver = scheduler.driver
    trace.write(
        StepState(
            now_s=now_s,
            num_in_flight=len(scheduler.steps) - bool(output.total_num_scheduled_tokens),
            running=(request.request_id for request in scheduler.running),
            requests=scheduler.requests,
            num_waiting=scheduler.get_request_counts()[1],
            num_retained_jobs=0 if driver.is_shadow else len(driver.leases),
            num_retained_blocks=0 if driver.is_shadow else driver.get_num_leased_blocks(),
            num_blocks=scheduler.leased_blocks.num_blocks,
            num_free_blocks=scheduler.leased_blocks.get_num_free_blocks(),
            num_cached_blocks=count_cached_blocks(scheduler),
            max_running=scheduler.vllm_config.scheduler_config.max_num_seqs,
            max_tokens=max_tokens,
            tiers=() if scheduler.tier is None else scheduler.tier.get_views(),
            new=new,
            resumed=resumed,
            preempted=output.preempted_req_ids or (),
            num_tokens=output.num_scheduled_tokens,
        ).describe()
    )
    trace.end_step()


class IdleTimer:
    """Wakes a sleeping engine when the armed deadline (monotonic clock) has passed."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._deadline_s: float | None = None
        self._timer: threading.Timer | None = None

    def arm(self, deadline_s: float) -> None:
        """Wake at this time; replaces the deadline armed before."""
        if self._deadline_s != deadline_s:
            self.stop()
            self._deadline_s = deadline_s
            self._timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), self._ring)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Wake no more, unless armed again."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._deadline_s = None
        self._wake()
