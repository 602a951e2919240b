"""The scheduler class vLLM loads: its own scheduler, with the driver asked at the few places that matter.

    vllm serve MODEL --scheduler-cls tenuto.vllm.Scheduler --additional-config '{"tenuto": {...}}'

Nothing of vLLM's `schedule()` is copied. A hook that the policy does not override is not installed, so
with policy `stock` vLLM's own code runs as it is.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import vllm

from tenuto.core.driver import Driver
from tenuto.core.errors import IncompatibleError
from tenuto.core.jobs import Arrival
from tenuto.core.policy import Key, Policy
from tenuto.core.policy_loader import get_engine_settings, load_policy
from tenuto.core.requests.hints import Hints, parse_hints
from tenuto.records.trace import TraceWriter
from tenuto.vllm import compat
from tenuto.vllm.engine import VllmEngine
from tenuto.vllm.idle import IdleTimer
from tenuto.vllm.metrics import Metrics
from tenuto.vllm.output import OutputReader
from tenuto.vllm.pressure import Pressure
from tenuto.vllm.settings import Settings, read_settings
from tenuto.vllm.state import StateFile
from tenuto.vllm.steps import StepTeller, StepTracer
from tenuto.vllm.tenants import take_tenant
from tenuto.vllm.waiting import TurnQueue

logger = logging.getLogger("vllm.tenuto")

MAX_RENEWALS = 32
"""Leases looked at again in one step: 1,000 of them once a second, and 10,000 cost a step no more."""
MAX_ORDERING_SHARE = 0.02
"""Of the time, for ordering all waiting turns anew; with a few thousand of them it is done less often."""

OUTSIDE = Hints(is_last=True)
"""For requests that run as in stock vLLM: nothing of theirs is ever retained."""


class _DrivenScheduler(compat.PrivateHooks):
    """A vLLM scheduler with a driver; mixed into vLLM's synchronous and asynchronous scheduler below."""

    # vLLM's own attributes that we use (see compat.ATTRIBUTES).
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    policy: Any
    max_num_scheduled_tokens: int
    scheduler_config: Any
    hash_block_size: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = read_settings(vllm_config.additional_config)
        policy = load_policy(settings.policy, settings.options)
        if get_engine_settings(settings.policy, policy).order == "priority":
            vllm_config.scheduler_config.policy = "priority"
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        compat.check_attributes(self)
        engine_core = compat.find_engine_core()
        engine_index = compat.get_engine_index(engine_core)
        self._trusts_clients = settings.tenants == "client"
        self._state = _open_state(policy, settings, engine_index)
        # After that: the trace's header has what the policy goes on with.
        trace_path = _get_file(settings.trace, engine_index) if settings.trace else None
        self._trace = (
            TraceWriter(trace_path, policy, settings.policy, settings.trace_options) if trace_path else None
        )
        self._engine = VllmEngine(self)
        self._metrics = Metrics(vllm_config, engine_index)
        log = self._trace.write if self._trace else None
        self.driver = Driver(
            policy,
            self._engine,
            settings.limits,
            by_priority=self.policy.value == "priority",
            log=log,
            strict=settings.strict,
            stats=self._metrics.stats,
        )
        self._metrics.refresh(self.driver, 0.0)
        # What follows a turn shows in its output: a tool call, or that the job is done.
        self._reads_output = any(map(policy.overrides, ("retain", "on_tool_returned", "on_job_ended")))
        self._reader = OutputReader(compat.load_tokenizer(vllm_config) if self._reads_output else None)
        self._steps = StepTracer(self._trace, self) if self._trace else None
        self._next_keys_s = 0.0
        self._idle_timer = IdleTimer(lambda: compat.wake(engine_core)) if engine_core is not None else None
        self._install(policy)
        logger.info("Tenuto runs policy %s on vLLM %s", settings.policy, vllm.__version__)
        # vLLM warns of every scheduler class that is not its own.
        logger.info(
            "vLLM's warning that a custom scheduler class may disable async scheduling does not apply to "
            "Tenuto; async scheduling is %s, as in stock vLLM with this configuration",
            "on" if vllm_config.scheduler_config.async_scheduling else "off",
        )

    def _install(self, policy: Policy) -> None:
        """Install what the policy overrides, and nothing else."""
        self._asks_admission = policy.overrides("admit")
        reason = compat.get_reason_for_full_steps(self) if policy.overrides("step_budget") else None
        self._asks_budget = policy.overrides("step_budget") and reason is None
        if reason is not None:
            logger.info("step budgets are vLLM's own, not the policy's: %s", reason)
        if self._asks_admission or policy.overrides("queue_key"):
            self.waiting = TurnQueue(self._get_queue_key, self._is_gated, self.driver.settle)
        self._step_teller = StepTeller(self.driver) if policy.overrides("on_step") else None
        retains = policy.overrides("retain") or policy.overrides("preempt_key")
        self._pressure = Pressure(self) if retains else None

    # vLLM calls these.

    def add_request(self, request: Any) -> None:
        """A request came in; a further piece of a streamed-in request is vLLM's business alone."""
        if request.request_id not in self.requests:
            started_s = time.perf_counter()
            arrival = _describe(request, trusts_clients=self._trusts_clients)
            self.driver.arrive(request.request_id, time.monotonic(), arrival)
            self.driver.stats.decision_s.observe(time.perf_counter() - started_s)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: expire leases, admit, set the budget; then vLLM's own schedule."""
        now_s = time.monotonic()
        self.driver.expire(now_s, MAX_RENEWALS)
        if self.driver.tick(now_s) and isinstance(self.waiting, TurnQueue):
            self._ask_all_keys(now_s)
        if self._asks_admission:
            self._admit_parked(now_s)
        if self._pressure is not None:
            self._pressure.begin_step(now_s)
        full_budget = self.max_num_scheduled_tokens
        if self._asks_budget:
            self.max_num_scheduled_tokens = self.driver.get_step_budget(now_s, full_budget)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            if self._step_teller is not None:
                self._step_teller.schedule(output, now_s, self.max_num_scheduled_tokens)
        finally:
            self.max_num_scheduled_tokens = full_budget
            self.driver.settle()
        for request_id, num_hit_tokens in compat.get_started(output):
            self.driver.start(request_id, now_s, num_hit_tokens)
        if self._steps is not None:
            self._steps.record(output, now_s)
        if self._state is not None:
            self._state.save_if_due(now_s)
        self._metrics.refresh(self.driver, now_s)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """A step was computed: a policy that learns from steps hears of it before what it brings."""
        if self._step_teller is not None:
            self._step_teller.finish(scheduler_output, time.monotonic())
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def on_turn_finishing(self, request: Any) -> None:
        """A request ended and still has its blocks: the driver may take a lease on them."""
        started_s = time.perf_counter()
        reads = self._reads_output and self.driver.needs_output(request.request_id)
        finish = self._reader.get_finish(request, reads_output=reads)
        self.driver.finish(request.request_id, time.monotonic(), finish)
        self.driver.stats.decision_s.observe(time.perf_counter() - started_s)

    def on_turn_preempting(self, request: Any) -> None:
        """A running request is about to be preempted."""
        self.driver.preempt(request.request_id, time.monotonic(), request.num_computed_tokens)

    def has_requests(self) -> bool:
        """Also true when a lease has run out, so that an idle engine takes one step and ends it."""
        if super().has_requests():  # type: ignore[misc]
            return True
        now_s = time.monotonic()
        deadline_s = self.driver.get_next_deadline_s()
        if deadline_s is not None and deadline_s <= now_s:
            return True
        if deadline_s is not None and self._idle_timer is not None:
            self._idle_timer.arm(deadline_s)
        self._metrics.refresh(self.driver, now_s, idle=True)
        if self._trace is not None:
            self._trace.flush()
        if self._state is not None:
            self._state.save_if_due(now_s, idle=True)
        return False

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """A reset takes everything, leases included."""
        self.driver.drop_all(time.monotonic())
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Let go of everything, save what was learned and complete the trace."""
        if self._idle_timer is not None:
            self._idle_timer.stop()
        self.driver.drop_all(time.monotonic())
        self._metrics.close()
        if self._state is not None:
            self._state.close()
        if self._trace is not None:
            self._trace.close()
        super().shutdown()  # type: ignore[misc]

    # The engine adapter calls these.

    def get_num_parked(self) -> int:
        """Waiting requests that admission holds back."""
        return self.waiting.num_parked if isinstance(self.waiting, TurnQueue) else 0

    def reorder_waiting(self, request_id: str) -> None:
        """A waiting request's key may have changed."""
        if isinstance(self.waiting, TurnQueue):
            self.waiting.reorder(request_id)

    # Inside.

    def _ask_all_keys(self, now_s: float) -> None:
        """Order all waiting turns anew, unless so many wait that it would take too much of the time."""
        if now_s < self._next_keys_s:
            return
        started_s = time.perf_counter()
        self.waiting.reorder_all()
        self._next_keys_s = now_s + (time.perf_counter() - started_s) / MAX_ORDERING_SHARE

    def _get_queue_key(self, request: Any) -> Key:
        return self.driver.get_queue_key(request.request_id, time.monotonic())

    def _is_gated(self, request: Any) -> bool:
        return self._asks_admission and self.driver.needs_admission(request.request_id)

    def _admit_parked(self, now_s: float) -> None:
        while self.waiting.num_parked:
            idle = not self.running and not self.waiting
            admitted = self.driver.admit(self.waiting.get_first_parked(), now_s, idle=idle)
            if not admitted:
                return
            for request_id in admitted:
                self.waiting.unpark(request_id)


class _SynchronousScheduler(_DrivenScheduler, compat.SyncScheduler):  # type: ignore[misc]
    """Used where vLLM itself would not schedule asynchronously (the CPU, pipeline stages …)."""


class Scheduler(_DrivenScheduler, compat.AsyncScheduler):  # type: ignore[misc]
    """The class to name in `--scheduler-cls`.

    Making one yields the scheduler that fits: asynchronous or not as vLLM's configuration says, and vLLM's
    own for pooling models, or for a vLLM that does not fit when `on_mismatch` is "stock".

    Raises IncompatibleError listing what does not fit, ConfigError for a bad setting.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Choose the class; vLLM passes everything by keyword."""
        settings = read_settings(vllm_config.additional_config)
        reason = _get_reason_for_stock(vllm_config, settings)
        if reason is not None:
            logger.warning("Tenuto stands aside, stock vLLM schedules: %s", reason)
            return compat.get_stock_class(vllm_config)(vllm_config, *args, **kwargs)
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning("prefix caching is off: nothing can be retained between turns")
        if not vllm_config.scheduler_config.async_scheduling:
            return _SynchronousScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


def _get_reason_for_stock(vllm_config: Any, settings: Settings) -> str | None:
    problems = compat.find_problems(vllm.__version__, allow_untested=settings.allow_untested)
    if problems:
        text = f"vLLM {vllm.__version__} does not fit: " + "; ".join(problems)
        if settings.on_mismatch == "stop":
            raise IncompatibleError(
                f'{text}. Install a supported release, or set tenuto.on_mismatch to "stock"'
            )
        return text
    if vllm_config.model_config.runner_type == "pooling":
        return "a pooling model has no turns"
    if compat.is_diffusion(vllm_config):
        return "a diffusion model has its own scheduler"
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        return "with the external launcher every rank schedules, and our clocks could differ"
    return None


def _open_state(policy: Policy, settings: Settings, engine_index: int) -> StateFile | None:
    if settings.state is None:
        return None
    path = _get_file(settings.state, engine_index)
    return StateFile(policy, settings.policy, path, settings.save_every_s)


def _get_file(path: str, engine_index: int) -> str:
    """One file per data-parallel engine: the first has the name as given."""
    return path if engine_index == 0 else f"{path}.engine{engine_index}"


def _describe(request: Any, *, trusts_clients: bool) -> Arrival:
    """What the driver needs to know of a request that came in."""
    num_prompt_tokens = request.num_prompt_tokens
    plain = request.sampling_params is not None and request.prompt_token_ids is not None
    if not plain or request.has_encoder_inputs or request.resumable:
        return Arrival(OUTSIDE, num_prompt_tokens, priority=request.priority)
    fields = request.sampling_params.extra_args
    fields = fields if trusts_clients else take_tenant(fields)
    return Arrival(
        hints=parse_hints(fields, getattr(request, "session_id", None)),
        num_prompt_tokens=num_prompt_tokens,
        prompt=request.prompt_token_ids,
        hashes=request.block_hashes,
        priority=request.priority,
    )
