"""The driver: the only caller of policies. It owns the jobs and their leases.

The engine reports what happens to its turns, and asks the driver what to do. The driver asks the policy,
bounds the answer and carries it out. A lease is a request, not a right: when an allocation would fail,
`reclaim` frees leased blocks first. Every call takes O(log n) time in the number of jobs and leases.

    arrive → (start → preempt)* → start → finish → [lease] → arrive (the job's next turn) → …
"""

from __future__ import annotations

import math

from tenuto.core.driver_parts import DriverParts
from tenuto.core.jobs import Arrival, Finish, JobState, TurnState
from tenuto.core.leases import LeaseRefused
from tenuto.core.reuse import PrefixMarks, count_computed_tokens, count_lost_tokens, count_missed_tokens
from tenuto.core.types import LeaseEnd, LeaseRefusal, ShortHit, StepView, Turn


class Driver(DriverParts):
    """One policy at work on one engine."""

    # What happens to turns.

    def arrive(self, turn_id: str, now_s: float, arrival: Arrival) -> None:
        """A turn arrived. Find its job, and truncate the job's lease to the blocks that the prompt shares."""
        self.stats.num_events += 1
        job = self._jobs.find(turn_id, arrival, now_s)
        job.is_released = False
        self._place(job, arrival)
        tool_s = None if job.last_finish_s is None or job.live_turn_ids else now_s - job.last_finish_s
        turn = TurnState(turn_id, job, now_s, arrival)
        if job.last_marks is not None:
            turn.num_reusable_tokens = job.last_marks.count_reusable_tokens(
                arrival.hashes, arrival.num_prompt_tokens, self._hit_alignment
            )
            turn.is_parted = not job.last_marks.is_followed_by(arrival.hashes)
        self.stats.count_parting((said := arrival.describe(job.last_marks)).get("parted_at"))
        job.num_turns += 1
        if len(job.live_turn_ids) >= self.limits.max_parallel_turns:
            # Otherwise a client that sends all its requests under one job id would always go first.
            turn.job_arrival_s = now_s
        job.live_turn_ids[turn_id] = None
        self._turns[turn_id] = turn
        self.service.arrive(turn)
        self._admission.enter(turn)
        self._retention.enter(turn)
        self._ledger.apply(self._retention.claim(turn, now_s))
        if tool_s is not None:
            self.stats.tool_s.observe(tool_s)
            self._tell("on_tool_returned", turn, job.last_tool, tool_s)
        self._tell_chooser(turn)
        self._tell("on_turn_arrived", turn, now_s)
        said |= {"num_prompt_tokens": arrival.num_prompt_tokens, "tool_s": tool_s}
        self._history.record("arrived", turn, now_s, **said)

    def start(
        self, turn_id: str, now_s: float, num_hit_tokens: int, short_hit: ShortHit | None = None
    ) -> None:
        """A turn got its first step, or its first step after a preemption.

        If a lease waited for the turn, the lease ends. `short_hit`: what made the hit short, if a layer group
        did.
        """
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self.stats.num_events += 1
        turn.num_held_tokens = num_hit_tokens
        if turn.started:
            self._admission.resume(turn, now_s)
            num_lost_tokens = count_lost_tokens(turn.num_computed_tokens, num_hit_tokens)
            self.stats.num_recomputed_tokens += num_lost_tokens
            self.quota.start(turn)
            self._tell("on_turn_started", turn, now_s)
            self._history.record(
                "resumed", turn, now_s, num_hit_tokens=num_hit_tokens, num_lost_tokens=num_lost_tokens
            )
            return
        self.service.start(turn, num_hit_tokens)
        if self._step_chooser is not None:
            self._step_chooser.observe_start(turn_id)
        turn.started = turn.job.is_admitted = True
        self._admission.start(turn, num_hit_tokens, now_s)
        turn.num_hit_tokens = num_hit_tokens
        self.stats.num_hit_tokens += num_hit_tokens
        self.stats.num_reusable_tokens += turn.num_reusable_tokens
        turn.job.num_reusable_tokens += turn.num_reusable_tokens
        turn.job.num_reused_tokens += min(num_hit_tokens, turn.num_reusable_tokens)
        self.stats.num_recomputed_tokens += count_missed_tokens(turn.num_reusable_tokens, num_hit_tokens)
        cut: dict[str, object] = {}
        if short_hit is not None:
            self.stats.num_short_tokens[short_hit.group] += short_hit.num_tokens
            cut = {"short_group": short_hit.group, "num_short_tokens": short_hit.num_tokens}
        self.stats.queue_s.observe(now_s - turn.arrival_s)
        if self._canary.is_on:
            self.stats.groups["stock" if turn.job.runs_as_stock else "policy"].start(
                turn, num_hit_tokens, now_s
            )
        self.pins.start(turn, num_hit_tokens, short_hit)
        self._ledger.apply(self._retention.hit(turn, now_s))
        self._tell("on_turn_started", turn, now_s)
        self._history.record(
            "started",
            turn,
            now_s,
            num_hit_tokens=num_hit_tokens,
            num_reusable_tokens=turn.num_reusable_tokens,
            queue_s=now_s - turn.arrival_s,
            **cut,
        )

    def preempt(self, turn_id: str, now_s: float, num_computed_tokens: int) -> None:
        """A running turn lost its blocks and waits again."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self.stats.num_events += 1
        turn.num_preemptions += 1
        turn.num_computed_tokens = num_computed_tokens
        self.quota.stop(turn)
        self._admission.preempt(turn, now_s)
        self._tell("on_turn_preempted", turn, now_s)
        self._history.record("preempted", turn, now_s, num_computed_tokens=num_computed_tokens)

    def finish(self, turn_id: str, now_s: float, finish: Finish) -> None:
        """A turn ended. Call this just before the engine frees the turn's blocks: a lease may keep them."""
        turn = self._turns.pop(turn_id, None)
        if turn is None:
            return
        self.stats.num_events += 1
        job = turn.job
        del job.live_turn_ids[turn_id]
        if self._step_chooser is not None and not turn.started:
            self._step_chooser.observe_start(turn_id)
        if not job.runs_as_stock:
            self.pins.finish(turn)
        self._retention.leave(turn)
        self.service.leave(turn, finish.num_output_tokens)
        self._admission.finish(turn, finish.num_output_tokens, now_s)
        self._history.record(
            "finished", turn, now_s, num_output_tokens=finish.num_output_tokens, aborted=finish.aborted
        )
        if not finish.aborted:
            self._complete(turn, now_s, finish)
        else:
            view = turn.get_finished_view(finish)
            self._tell("on_turn_finished", turn, now_s, view=view)
            if not view.is_last and self._can_retain(job):
                self._ledger.apply(LeaseRefused(view, LeaseRefusal.ABORTED, now_s))
        if job.job_id not in self._jobs:
            return
        if job.is_released and not job.live_turn_ids:
            self._end_job(job, now_s, LeaseEnd.JOB_ENDED)
        else:
            self._leave(job, now_s)

    def release(self, job_id: str, now_s: float) -> bool:
        """The client says that a job is complete; return whether the job was known.

        The job's lease ends, and its turns that still wait or run get none. The job itself ends with the last
        of them. A turn that arrives later begins the job anew.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.is_released = True
        if not job.live_turn_ids:
            self._end_job(job, now_s, LeaseEnd.JOB_ENDED)
        else:
            self._ledger.apply(self._retention.end(job_id, LeaseEnd.JOB_ENDED, now_s))
        self.settle()
        return True

    def take_over(self, other: Driver, now_s: float, *, keeps_leases: bool = False) -> None:
        """Go on where another driver of the same engine stops; the engine asks this one from now on.

        Jobs and turns stay. Leases end, unless `keeps_leases`: then those stay that the limits and the canary
        allow. The policy is told of each turn that waits or runs, as if it arrived now, and it is asked again
        whether the waiting ones may start. The engine must then ask for the keys of all waiting turns.
        """
        if not keeps_leases:
            other.drop_all(now_s, LeaseEnd.SWITCHED)
        self._num_earlier_faults = other.num_policy_faults
        self._jobs.take_over(other._jobs)
        # The engine's queue of waiting turns (`make_order`) looks at both of these.
        self._turns, self.service = other._turns, other.service
        self.service.set_weights(self.limits.tenant_weights)
        for event in self._retention.take_over(other._retention, self._is_retained, now_s):
            self._ledger.apply(event)
        self._ledger.forget_to_reorder()
        for job in self._jobs.jobs.values():
            job.runs_as_stock, job.is_admitted = None, False
        for turn in self._turns.values():
            self._adopt(turn, now_s)

    # Leases.

    def expire(self, now_s: float, max_renewals: float = math.inf) -> int:
        """End or renew every lease whose deadline has passed; return how many leases ended.

        After `max_renewals` renewals, the remaining leases wait for the next call. Only renewals need this
        limit: a lease ends once, but it can be renewed any number of times.
        """
        num_ended = 0
        for ended in self._retention.expire(now_s, max_renewals):
            self._ledger.apply(ended)
            self.settle()
            num_ended += 1
        return num_ended

    def reclaim(
        self, num_blocks: int, now_s: float, *, for_turn_id: str | None = None, stalled: bool = False
    ) -> int:
        """Free at least `num_blocks` leased blocks, or as many as possible; return how many were freed.

        Each lease loses its last blocks first. `for_turn_id` is the turn that needs the blocks. The lease
        that waits for this turn is spared, because the turn will hit its blocks. `stalled` means that
        nothing can run otherwise: then that lease is reclaimed too, after all others. The engine calls
        this during an allocation, so the waiting queue keeps its order; call `settle` afterwards.
        """
        turn = self._turns.get(for_turn_id) if for_turn_id is not None else None
        num_free_before = self._engine.get_num_free_blocks()
        for event in self._retention.reclaim(num_blocks, turn, now_s, stalled=stalled):
            self._ledger.apply(event)
        return self._engine.get_num_free_blocks() - num_free_before

    def settle(self) -> None:
        """Reorder the waiting turns whose lease was reclaimed.

        Call after each allocation that reclaimed blocks, before the waiting queue is read again.
        """
        for turn_id in self._ledger.pop_to_reorder():
            self._engine.reorder(turn_id)

    def drop_all(self, now_s: float, reason: LeaseEnd = LeaseEnd.RESET) -> None:
        """End every lease (a cache reset, a shutdown)."""
        for ended in self._retention.drop_all(reason, now_s):
            self._ledger.apply(ended)
            self.settle()

    # Asked before and during a step.

    def tick(self, now_s: float) -> bool:
        """Do the work that depends on time; call this before each step.

        Return True if the engine must now ask again for the keys of all waiting turns.
        """
        self._hurry(now_s)
        if now_s < self._get_next_rekey_s():
            return False
        self._ticked_s = now_s
        if self._caller.hears("on_tick"):
            self._caller.tell("on_tick", self.get_view(now_s))
        return True

    def step(self, step: StepView) -> None:
        """The engine computed a step. Call this only if `hears_steps`."""
        if self._step_chooser is not None:
            self._step_chooser.observe_step(step)
        if self._caller.hears("on_step"):
            self._caller.tell("on_step", step)

    def admit(self, first_id: str | None, now_s: float, *, idle: bool) -> list[str]:
        """Turns that may start now; `first_id` is the first parked turn. Call until the list is empty."""
        first = self._turns.get(first_id) if first_id is not None else None
        return self._admission.admit(first, now_s, idle=idle)

    def may_start(self, turn_id: str, now_s: float, *, idle: bool) -> bool:
        """Whether a waiting turn may start; when the engine is idle, every turn may start."""
        return turn_id not in self._turns or self._admission.may_start(self._turns[turn_id], now_s, idle=idle)

    # Inside.

    def _hurry(self, now_s: float) -> None:
        """Move the overdue turns to the front of the queue."""
        for turn_id in self._admission.pop_overdue(now_s):
            self.decided.num_overdue_turns += 1
            self._engine.reorder(turn_id)

    def _complete(self, turn: TurnState, now_s: float, finish: Finish) -> None:
        job, view = turn.job, turn.get_finished_view(finish)
        job.last_finish_s, job.last_tool = now_s, view.tool
        num_computed_tokens = count_computed_tokens(turn.arrival.num_prompt_tokens, finish.num_output_tokens)
        job.last_marks = PrefixMarks(
            turn.arrival.hashes, turn.arrival.num_prompt_tokens, num_computed_tokens, self._hash_block_size
        )
        if self._step_chooser is not None:
            self._step_chooser.observe_turn(view)
        self._tell("on_turn_finished", turn, now_s, view=view)
        if (view.is_last or job.is_released) and self._can_retain(job):
            self._ledger.apply(LeaseRefused(view, turn.get_last_reason(), now_s))
        if job.is_released:
            return
        if view.is_last and not job.live_turn_ids:
            self._end_job(job, now_s, LeaseEnd.JOB_ENDED)
            return
        self._jobs.remember(job, turn.arrival)
        if not view.is_last and self._can_retain(job):
            for event in self._retention.retain(turn, view, now_s):
                self._ledger.apply(event)

    def _can_retain(self, job: JobState) -> bool:
        return not job.runs_as_stock and self.policy.overrides("retain")

    def _leave(self, job: JobState, now_s: float) -> None:
        """A turn left. If its job has no other turns, the job is now idle.

        The job that has been idle longest may then be forgotten.
        """
        forgotten = None if job.live_turn_ids else self._jobs.mark_idle(job)
        if forgotten is not None:
            self._end_job(forgotten, now_s, LeaseEnd.FORGOTTEN)

    def _end_job(self, job: JobState, now_s: float, reason: LeaseEnd) -> None:
        self._ledger.apply(self._retention.end(job.job_id, reason, now_s))
        view = job.get_view()
        if self._caller.hears("on_job_ended") and not job.runs_as_stock:
            self._caller.tell("on_job_ended", view, now_s)
        # As `Turn.ends_job`; and the client may say it itself, of any job.
        if reason is LeaseEnd.JOB_ENDED and (job.is_released or view.came_back):
            self._engine.end_job(job.job_id)
        self._jobs.forget(job)

    def _adopt(self, turn: TurnState, now_s: float) -> None:
        """Take over a turn that another driver knew."""
        job = turn.job
        self._place(job, turn.arrival)
        turn.is_admitted = turn.is_overdue = False
        self._admission.enter(turn)
        self._retention.enter(turn)
        self._tell("on_turn_arrived", turn, now_s)
        if not turn.started:
            self._tell_chooser(turn)
            # In a log, a driver begins anew, and this turn will start. A running turn is left out.
            num_prompt_tokens = turn.arrival.num_prompt_tokens
            self._history.record(
                "arrived", turn, turn.arrival_s, num_prompt_tokens=num_prompt_tokens, tool_s=None
            )
        else:
            if not job.is_admitted or self.policy.needs.admit == "turns":
                self._tell("on_turn_admitted", turn, now_s)
            job.is_admitted = True
            self._admission.start(turn, turn.num_hit_tokens, now_s)
            self._tell("on_turn_started", turn, now_s)

    def _is_retained(self, job_id: str) -> bool:
        """Whether a lease that another driver granted to this job goes on."""
        job = self._jobs.get(job_id)
        return job is not None and self._canary.selects(job_id, job.tenant, job.group)

    def _place(self, job: JobState, arrival: Arrival) -> None:
        """Decide, once for each job, whether it runs as in stock."""
        if job.runs_as_stock is None:
            hints = arrival.hints
            job.group = hints.group
            job.runs_as_stock = not self._canary.selects(job.job_id, hints.tenant, hints.group)

    def _tell_chooser(self, turn: TurnState) -> None:
        """Tell the chooser of step sizes that a turn waits."""
        if self._step_chooser is not None:
            num_new_tokens = turn.arrival.num_prompt_tokens - turn.num_reusable_tokens
            self._step_chooser.observe_arrival(self._view(turn), num_new_tokens)

    def _tell(self, hook: str, turn: TurnState, *inputs: object, view: Turn | None = None) -> None:
        """Tell the policy what happened to a turn, unless the turn runs as in stock."""
        if self._caller.hears(hook) and not turn.job.runs_as_stock:
            self._caller.tell(hook, self._view(turn) if view is None else view, *inputs)
