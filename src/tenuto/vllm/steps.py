"""Reports the engine's steps to the policy, and writes them to the trace."""

from __future__ import annotations

from collections import deque
from typing import Any

from tenuto.core.driver import Driver
from tenuto.core.engine import StepClock
from tenuto.records.trace import StepState, TraceWriter
from tenuto.vllm.compat.scheduler import count_cached_blocks, get_connector_name, get_hit_tokens, get_started


class StepReporter:
    """Tells the policy about each computed step. vLLM finishes steps in the order of scheduling."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._clock = StepClock()
        self._scheduled: deque[tuple[Any, float, bool]] = deque()
        """For each scheduled step: its output, when it was scheduled, and whether it uses the whole token
        budget."""

    def schedule(self, output: Any, now_s: float, *, is_full: bool) -> None:
        """A step was scheduled. A step without tokens is never computed, so it is not counted.

        `is_full`: whether it uses its whole token budget.
        """
        if output.total_num_scheduled_tokens:
            self._scheduled.append((output, now_s, is_full))

    def finish(self, output: Any, now_s: float) -> None:
        """The results of a step have arrived."""
        # Steps that were in flight when this object was made are not in `_scheduled`.
        if not self._scheduled or self._scheduled[0][0] is not output:
            return
        _, scheduled_s, is_full = self._scheduled.popleft()
        num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        num_tokens = output.total_num_scheduled_tokens - num_drafts
        num_requests = len(output.num_scheduled_tokens)
        step = self._clock.finish(now_s, scheduled_s, num_tokens, num_requests, is_full=is_full)
        self._driver.step(step)


class StepTracer:
    """Writes one `step` record per step, and one `admission` record per turn it starts."""

    def __init__(self, trace: TraceWriter, scheduler: Any) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._num_in_flight = 0
        """Scheduled steps with tokens that have not ended."""

    def finish(self, output: Any) -> None:
        """The results of a step have arrived."""
        if output.total_num_scheduled_tokens:
            self._num_in_flight = max(0, self._num_in_flight - 1)

    def record(self, output: Any, now_s: float, max_tokens: int) -> None:
        """Record one step, after the driver was told of it; the trace's step number increases by one.

        `max_tokens`: the step's token budget.
        """
        scheduler = self._scheduler
        connector = get_connector_name(scheduler)
        new: list[str] = []
        resumed: list[str] = []
        for request_id, num_hit_tokens in get_started(output):
            request = scheduler.requests[request_id]
            (resumed if request.num_preemptions else new).append(request_id)
            local, external = get_hit_tokens(request)
            self._trace.write(
                {
                    "kind": "admission",
                    "turn": request_id,
                    "now_s": now_s,
                    "num_prompt_tokens": request.num_prompt_tokens,
                    "num_hit_tokens": num_hit_tokens,
                    "num_local_hit_tokens": local,
                    "num_external_hit_tokens": external,
                    **({} if connector is None else {"connector": connector}),
                }
            )
        driver = scheduler.driver
        leases = () if driver.is_shadow else driver.leases
        self._trace.write(
            StepState(
                now_s=now_s,
                num_in_flight=self._num_in_flight,
                running=(request.request_id for request in scheduler.running),
                requests=scheduler.requests,
                num_waiting=scheduler.get_request_counts()[1],
                retained_jobs=(lease.job_id for lease in leases),
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
        self._num_in_flight += bool(output.total_num_scheduled_tokens)
        self._trace.end_step()
