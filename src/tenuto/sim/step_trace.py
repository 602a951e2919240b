"""The trace's records of steps: the engine's state, and what it scheduled."""

from __future__ import annotations

from collections.abc import Callable

from tenuto.records.trace import StepState, TraceWriter
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step


class StepTracer:
    """Writes one `step` record per step, and one `admission` record per turn it starts."""

    def __init__(self, trace: TraceWriter, scheduler: Scheduler, count_in_flight: Callable[[], int]) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._count_in_flight = count_in_flight
        """Counts the steps that were scheduled and have not ended, including the one to record."""

    def record(self, step: Step, now_s: float) -> None:
        """Record a step that was just scheduled, then advance the trace's step number."""
        scheduler = self._scheduler
        started = {**step.new, **step.resumed}
        for turn_id, num_hit_tokens in started.items():
            self._trace.write(
                {
                    "kind": "admission",
                    "turn": turn_id,
                    "now_s": now_s,
                    "num_prompt_tokens": scheduler.state.requests[turn_id].num_prompt_tokens,
                    "num_hit_tokens": num_hit_tokens,
                    **self._get_load(turn_id, num_hit_tokens),
                }
            )
        state, pool = scheduler.state, scheduler.kv.pool
        num_blanks, *_ = pool.get_queue()
        num_blanks += sum(table.num_blanks for request in state.requests.values() for table in request.tables)
        self._trace.write(
            StepState(
                now_s=now_s,
                num_in_flight=self._count_in_flight() - 1,
                running=(request.turn_id for request in state.running),
                requests=state.requests,
                num_waiting=state.num_waiting,
                retained_jobs=(lease.job_id for lease in scheduler.driver.leases),
                num_retained_blocks=scheduler.driver.get_num_leased_blocks(),
                num_blocks=pool.num_blocks,
                num_free_blocks=pool.num_free_blocks,
                num_cached_blocks=pool.num_blocks - num_blanks,
                max_running=scheduler.config.max_num_seqs,
                max_tokens=step.budget + sum(step.num_tokens.values()),
                tiers=scheduler.get_tiers(),
                new=list(step.new),
                resumed=list(step.resumed),
                preempted=step.preempted,
                num_tokens=step.num_tokens,
            ).describe()
        )
        self._trace.end_step()

    def _get_load(self, turn_id: str, num_hit_tokens: int) -> dict[str, int | str]:
        """The part of a hit that came from the tiers, and how; nothing in an engine without tiers."""
        offload = self._scheduler.config.offload
        if offload is None:
            return {}
        num_loaded_tokens = self._scheduler.state.requests[turn_id].num_loaded_tokens
        return {
            "num_local_hit_tokens": num_hit_tokens - num_loaded_tokens,
            "num_external_hit_tokens": num_loaded_tokens,
            "connector": "tiers",
            "load": offload,
        }
