"""The driver follows each turn from its arrival to its lease, and is the only caller of policies.

The engine reports what happens to its turns, and asks the driver what to do. The driver asks the policy,
bounds the answer and carries it out. A lease is a request, not a right: when an allocation would fail,
`reclaim` frees leased blocks first. Every call takes O(log n) time in the number of jobs and leases.

    arrive → (start → preempt)* → start → finish → [lease] → arrive (the job's next turn) → …

Each part of the driver is told of an event once, and each fact of a turn has one owner:

    `JobTable`    which job a turn belongs to, and which idle jobs are remembered
    `Fairness`    how long it may wait, and its tenant's share of the order and of memory
    `Order`       whether it may start, which turn starts first, and which is preempted
    `Retention`   leases: who gets one, until when, and which yields
    `Ledger`      what jobs and tenants used
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from tenuto.core.engine import Blocks, Engine, StepChooser, StepSize
from tenuto.core.fairness import Fairness, FairOrder, Quota, Shares
from tenuto.core.indexed_heap import IndexedHeap, SortKey, get_sort_key
from tenuto.core.jobs import NOBODY, Arrival, Finish, JobState, JobTable, TurnState
from tenuto.core.leases import (
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseRefused,
    LeaseShortened,
    LeaseState,
    LeaseTruncated,
    Retention,
)
from tenuto.core.ledger import Account, Ledger
from tenuto.core.limits import Canary, Limits
from tenuto.core.order import Order
from tenuto.core.policy import TOLD_HOOKS, Key, Policy
from tenuto.core.policy_caller import DecisionLog, LogRecord, PolicyCaller
from tenuto.core.requests import Hints
from tenuto.core.reuse import PrefixMarks, count_computed_tokens, count_lost_tokens, count_missed_tokens
from tenuto.core.stats import DriverStats
from tenuto.core.types import (
    DecodeSteps,
    EngineView,
    LeaseEnd,
    LeaseRefusal,
    LoadOffer,
    ShortHit,
    StepView,
    TakenBy,
    Turn,
    Yields,
    name_reason,
)
from tenuto.core.wishes import Verdict, Wish, judge


class Driver:
    """Runs one policy on one engine."""

    def __init__(  # noqa: PLR0913 - what an engine chooses, once
        self,
        policy: Policy,
        engine: Engine,
        limits: Limits | None = None,
        *,
        by_priority: bool = False,
        log: DecisionLog | None = None,
        stats: DriverStats | None = None,
        decided: DriverStats | None = None,
        canary: Canary | None = None,
        strict: bool = False,
        step_chooser: StepChooser | None = None,
    ) -> None:
        """Connect a policy to an engine.

        `by_priority`: the engine serves requests by their own priority, and the policy only decides the
        order among requests of equal priority.
        `stats`: the statistics to update; by default the driver makes an empty one.
        `decided`: where to count decisions such as leases; by default in `stats`. In shadow mode these are
        separate, because the engine does not follow the decisions.
        `canary`: the jobs that the policy applies to; all by default.
        `strict`: if a hook of the policy fails, raise PolicyError instead of counting the fault.
        `step_chooser`: chooses the size of each step; by default, steps are as large as the engine allows.
        """
        self.policy = policy
        self.limits = limits or Limits()
        self.stats = stats or DriverStats()
        self.decided = decided or self.stats
        self._canary = canary or Canary()
        self._num_earlier_faults = 0
        self._engine = engine
        self._step_chooser = step_chooser
        self._caller = PolicyCaller(policy, log, strict=strict)
        self._history = None if log is None else History(log, is_shadow=self.is_shadow)
        self._retains = policy.overrides("retain")
        # A policy that treats all jobs alike does not need to know which turns belong to one job.
        infers = self.limits.infer_jobs and any(
            policy.overrides(hook) for hook in ("queue_key", "admit", "retain", "preempt_key", *TOLD_HOOKS)
        )
        view = engine.get_view(0.0)
        self._block_size = view.block_size
        self._hit_alignment = engine.hit_alignment
        self._hash_block_size = engine.hash_block_size
        self._jobs = JobTable(self.limits.max_remembered_jobs, engine.hash_block_size, infers=infers)
        self._turns: dict[str, TurnState] = {}
        self._fairness = Fairness(
            policy, self.limits, view.num_blocks, view.block_size, by_priority=by_priority
        )
        self._retention = Retention(
            engine, self._caller, self.limits, self._fairness, self.decided, by_priority=by_priority
        )
        self._order = Order(
            self._caller,
            engine,
            self._retention,
            self._fairness.waits,
            self.decided,
            self._canary,
            by_priority=by_priority,
        )
        self.leases, self.pins = self._retention.leases, self._retention.pins
        self._to_reorder: deque[str] = deque()
        """Waiting turns that lost their lease; see `settle`."""
        self._reorder_s = math.inf if policy.needs.reorder_s is None else policy.needs.reorder_s
        self.next_reorder_s = math.inf if policy.needs.reorder_s is None else -math.inf
        """When the policy is next told of a tick and asked for all keys again."""

    # What happens to turns.

    def arrive(self, turn_id: str, now_s: float, arrival: Arrival) -> None:
        """A turn arrived. Find its job, and truncate the job's lease to the blocks that the prompt shares."""
        self.stats.num_events += 1
        job = self._jobs.find(turn_id, arrival, now_s)
        job.is_released = False
        self._place(job, arrival)
        pause_s = None if job.paused_s is None or job.live_turn_ids else now_s - job.paused_s
        turn = TurnState(turn_id, job, now_s, arrival, pause_s)
        job.awaits_tool &= bool(job.live_turn_ids)
        parted_at: int | None = None
        if (marks := job.last_marks) is not None:
            num_shared_blocks = marks.count_shared_blocks(arrival.hashes)
            turn.num_reusable_tokens = marks.count_reusable_tokens(
                num_shared_blocks, arrival.num_prompt_tokens, self._hit_alignment
            )
            turn.is_parted = not marks.is_followed_by(num_shared_blocks)
            turn.is_beside = self._is_beside(turn, marks.shares_half(num_shared_blocks))
            parted_at = marks.find_first_difference(num_shared_blocks, arrival.num_prompt_tokens)
            if parted_at is not None:
                self.stats.parted_at.observe(parted_at)
        if turn.is_beside:
            turn.pause_s = pause_s = None  # the tool still runs
        else:
            # If the client gives this turn up and asks again, it has called no other tool in between.
            job.paused_s = None
        job.num_turns += 1
        if len(job.live_turn_ids or ()) >= self.limits.max_parallel_turns:
            # Otherwise a client that sends all its requests under one job id would always go first.
            turn.job_arrival_s = now_s
        job.enter(turn_id)
        self._turns[turn_id] = turn
        self._fairness.arrive(turn, self._retention.get_num_leased_tokens())
        if job.tenant is not None:
            self.leases.count_by_tenant()
        self._order.enter(turn)
        if not turn.is_beside:
            self._apply(self._retention.claim(turn, now_s))
        if pause_s is not None:
            self.stats.tool_s.observe(pause_s)
            self._tell("on_tool_returned", turn, job.last_tool, pause_s)
        self._update_chooser(turn)
        self._tell("on_turn_arrived", turn, now_s)
        if self._history is not None:
            self._history.record_arrival(turn, now_s, pause_s, parted_at)

    @staticmethod
    def _is_beside(turn: TurnState, shares_half: bool) -> bool:
        """Whether a turn that arrived may be a request beside its job, whose tool still runs.

        A client that rewrites its prompts does so again and again; only the first time can it look like this.
        """
        job, hints = turn.job, turn.arrival.hints
        is_plain = hints.is_session and hints.is_last is None and turn.arrival.is_supported
        return bool(is_plain) and job.last_tool is not None and not (shares_half or job.is_rewritten)

    def start(
        self, turn_id: str, now_s: float, num_hit_tokens: int, short_hit: ShortHit | None = None
    ) -> bool:
        """A turn got its first step, or its first step after a preemption.

        If a lease waited for the turn, the lease ends. `short_hit`: the layer group that cut the hit short,
        if one did. Returns whether it is a plain request. If one step can compute the rest of its prompt,
        that goes before other prompts, because only its first step had room of its own.
        """
        turn = self._turns.get(turn_id)
        if turn is None:
            return False
        self.stats.num_events += 1
        turn.num_held_tokens = num_hit_tokens
        if turn.run_from is None:  # else it runs on, with the next part of a prompt that is streamed in
            turn.run_from = num_hit_tokens
        if turn.started:
            self._fairness.resume(turn, now_s)
            num_lost_tokens = count_lost_tokens(turn.num_computed_tokens, num_hit_tokens)
            self.stats.num_recomputed_tokens += num_lost_tokens
            turn.job.account.add(recomputed=num_lost_tokens)
            self._tell("on_turn_started", turn, now_s)
            if self._history is not None:
                self._history.record(
                    "resumed", turn, now_s, num_hit_tokens=num_hit_tokens, num_lost_tokens=num_lost_tokens
                )
            return False
        self._fairness.start(turn, num_hit_tokens, now_s)
        is_plain = self._step_chooser is not None and self._step_chooser.observe_start(turn_id)
        turn.started = True
        self._order.start(turn)
        turn.num_hit_tokens = num_hit_tokens
        self.stats.num_hit_tokens += num_hit_tokens
        self.stats.num_reusable_tokens += turn.num_reusable_tokens
        turn.job.num_reusable_tokens += turn.num_reusable_tokens
        num_reused_tokens = min(num_hit_tokens, turn.num_reusable_tokens)
        self.stats.num_reused_tokens += num_reused_tokens
        turn.job.num_reused_tokens += num_reused_tokens
        if not self.is_shadow:
            turn.job.num_kept_tokens += min(num_reused_tokens, self._retention.count_held_tokens(turn))
        turn.num_missed_tokens = count_missed_tokens(turn.num_reusable_tokens, num_hit_tokens)
        self.stats.num_recomputed_tokens += turn.num_missed_tokens
        turn.job.account.add(
            turns=1,
            prompt=turn.arrival.num_prompt_tokens,
            cached=max(0, num_hit_tokens - turn.num_loaded_tokens),
            recomputed=turn.num_missed_tokens,
        )
        if short_hit is not None:
            self.stats.num_short_tokens[short_hit.group] += short_hit.num_tokens
            short = turn.job.num_short_tokens = turn.job.num_short_tokens or Counter()
            short[short_hit.group] += short_hit.num_tokens
        self.stats.queue_s.observe(now_s - turn.arrival_s)
        if self._canary.is_on:
            self.stats.groups["stock" if turn.job.runs_as_stock else "policy"].start(turn, now_s)
        if self.pins.max_blocks:
            self.pins.start(turn, num_hit_tokens, short_hit)
        self._apply(self._retention.hit(turn, now_s))
        self._tell("on_turn_started", turn, now_s)
        if self._history is not None:
            self._history.record_start(turn, now_s, short_hit)
        return is_plain

    def preempt(self, turn_id: str, now_s: float, num_computed_tokens: int) -> None:
        """A running turn lost its blocks and waits again."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self.stats.num_events += 1
        turn.num_preemptions += 1
        turn.num_computed_tokens = num_computed_tokens
        if turn.run_from is not None:
            turn.job.account.add(computed=max(0, num_computed_tokens - turn.run_from))
        turn.run_from, turn.num_loaded_tokens = None, 0
        self._fairness.preempt(turn, now_s)
        self._tell("on_turn_preempted", turn, now_s)
        if self._history is not None:
            self._history.record("preempted", turn, now_s, num_computed_tokens=num_computed_tokens)

    def load(self, turn_id: str, num_tokens: int) -> None:
        """The engine loads `num_tokens` of a turn from a tier; they will count as hits."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            turn.num_loaded_tokens = num_tokens
            turn.job.account.add(loaded=num_tokens)

    def store(self, turn_id: str | None, job_id: str | None, num_tokens: int) -> None:
        """The engine stores `num_tokens` of a turn in tiers. `job_id`: the job, if the turn has ended."""
        turn = None if turn_id is None else self._turns.get(turn_id)
        job = turn.job if turn is not None else self._jobs.get(job_id or "")
        account = self.ledger.get_closed(job_id or "") if job is None else job.account
        (account or self.ledger.total).add(stored=num_tokens)

    def hold_below(self, job_id: str, place: str, num_blocks: int, now_s: float) -> None:
        """A tier stored `num_blocks` blocks that this job used last. A negative number: it evicted them."""
        job = self._jobs.get(job_id)
        self.ledger.move(job_id, None if job is None else job.account, place, num_blocks, now_s)

    def finish(
        self, turn_id: str, now_s: float, finish: Finish, num_prompt_tokens: int | None = None
    ) -> None:
        """A turn ended. Call this just before the engine frees the turn's blocks: a lease may keep them.

        `num_prompt_tokens`: of its whole prompt, of which parts may have been streamed in after its arrival.
        """
        turn = self._turns.pop(turn_id, None)
        if turn is None:
            return
        self.stats.num_events += 1
        job = turn.job
        job.leave(turn_id)
        if self.pins.max_blocks:
            self.pins.finish(turn)
        self._retention.leave(turn)
        self._fairness.quota.leave(turn)
        self._order.leave(turn_id)
        if self._history is not None:
            self._history.record(
                "finished", turn, now_s, num_output_tokens=finish.num_output_tokens, aborted=finish.aborted
            )
        view, is_side_answer = turn.get_finished_view(finish), turn.is_side_answer(finish)
        if view.tool is not None and job.live_turn_ids and not finish.aborted:
            job.awaits_tool = True
        if not finish.aborted and not is_side_answer:
            job.has_finished, job.paused_s, job.last_tool = True, now_s, view.tool
        self._tell("on_turn_finished", turn, now_s, view=view)
        turn.num_added_tokens = max(0, (num_prompt_tokens or 0) - turn.arrival.num_prompt_tokens)
        given_up: LeaseRefusal | None = None
        if finish.aborted:
            given_up = LeaseRefusal.ABORTED
        elif view.is_last or job.is_released or is_side_answer:
            given_up = turn.get_last_reason()
        retains = self._retains and not job.runs_as_stock
        wish = None if turn.arrival.hints.wish is None else self._grant_wish(turn, finish, now_s)
        if retains and given_up is not None and wish is None:
            self._apply(LeaseRefused(view, given_up, now_s))
        is_complete = job.is_released or (view.is_last and not finish.aborted and not is_side_answer)
        ends_job = is_complete and not job.live_turn_ids
        if ends_job:
            self._remember(turn, view, finish, now_s, is_followed=False)
            self._end_job(job, now_s, LeaseEnd.JOB_ENDED, keeps_copies=wish is not None)
        if retains and (given_up is None or wish is not None):
            refusal = None
            for event in self._retention.retain(
                turn, view, now_s, wish=wish, given_up=given_up, is_side_answer=is_side_answer
            ):
                self._apply(event)
                refusal = event.reason if isinstance(event, LeaseRefused) else None
            if wish is not None:
                # The tiers keep what no lease keeps.
                self._report_wish(turn, None if self._keeps_below else refusal, now_s)
        if ends_job:
            return
        # If too many jobs are idle, the one that has been idle longest is forgotten.
        forgotten = None if job.live_turn_ids else self._jobs.mark_idle(job)
        is_followed = not finish.aborted and not is_side_answer
        self._remember(turn, view, finish, now_s, is_followed=is_followed)
        if forgotten is not None:
            self._end_job(forgotten, now_s, LeaseEnd.FORGOTTEN)

    def _remember(
        self, turn: TurnState, view: Turn, finish: Finish, now_s: float, *, is_followed: bool
    ) -> None:
        """Keep what is left of a turn that ended. `is_followed`: its job's next turn goes on from it."""
        job, arrival = turn.job, turn.arrival
        self._fairness.leave(turn, finish.num_output_tokens, now_s)
        num_computed_tokens = finish.num_computed_tokens
        if not finish.aborted:
            num_prompt_tokens = arrival.num_prompt_tokens + turn.num_added_tokens
            num_computed_tokens = count_computed_tokens(num_prompt_tokens, finish.num_output_tokens)
        if is_followed:
            job.is_rewritten = turn.is_parted
            job.last_marks = PrefixMarks(
                arrival.hashes, arrival.num_prompt_tokens, num_computed_tokens, self._hash_block_size
            )
            if not job.is_released:
                self._jobs.remember(job, arrival)
        if turn.started:
            run_from = num_computed_tokens if turn.run_from is None else turn.run_from
            job.account.add(
                computed=max(0, num_computed_tokens - run_from),
                output=finish.num_output_tokens,
                prompt=turn.num_added_tokens,
            )
        if self._step_chooser is not None:
            if not turn.started:
                self._step_chooser.observe_start(turn.turn_id)
            if not finish.aborted:
                self._step_chooser.observe_turn(view, turn.num_missed_tokens, turn.pause_s)

    def release(self, job_id: str, now_s: float) -> bool:
        """The client says that a job is complete; return whether the job was known, or anything held for it.

        The job's lease ends, and its waiting and running turns will get none. The job ends with the last of
        these turns. A turn that arrives later begins a new job of this id; if it arrives before, the job goes
        on.
        """
        job = self._jobs.get(job_id)
        if job is None:
            # The job has ended, or is not known. Its client's wish may keep blocks, below the GPU even longer
            # than its lease.
            ended = self._retention.end(job_id, LeaseEnd.JOB_ENDED, now_s)
            self._apply(ended)
            account = self.ledger.get_closed(job_id)
            num_held = 0 if account is None else account.num_held_blocks
            self._engine.end_job(job_id)
            return ended is not None or (account is not None and account.num_held_blocks < num_held)
        job.is_released = True
        if not job.live_turn_ids:
            self._end_job(job, now_s, LeaseEnd.JOB_ENDED)
        else:
            self._apply(self._retention.end(job_id, LeaseEnd.JOB_ENDED, now_s))
        self.settle()
        return True

    def take_over(self, other: Driver, now_s: float, *, keeps_leases: bool = False) -> None:
        """Take over from another driver of the same engine; the engine asks this one from now on.

        Jobs and turns stay. Leases end, unless `keeps_leases` is true: then they stay if the limits and the
        canary allow it. The policy is told of each waiting and running turn as if it arrived now. It is asked
        again whether the waiting turns may start. A policy object that goes on knows all that already; its
        canary must be the same. The engine must then ask for the keys of all waiting turns.
        """
        if not keeps_leases:
            other.drop_all(now_s, LeaseEnd.SWITCHED)
        self._num_earlier_faults = other.num_policy_faults
        self._jobs.take_over(other._jobs)
        # The engine's queue of waiting turns (`make_order`) looks at both of these.
        self._turns = other._turns
        self._fairness.take_over(other._fairness, self.limits.tenant_weights)
        is_new = self.policy is not other.policy
        if is_new:
            for job in self._jobs.jobs.values():
                job.runs_as_stock = None
            self._order.forget_admissions(self._jobs.jobs.values(), self._turns.values())
        # Before the leases, because some limits on these count only while another tenant is active.
        for turn in self._turns.values():
            self._adopt(turn, now_s)
        for event in self._retention.take_over(other._retention, self._is_retained, now_s):
            self._apply(event)
        while (forgotten := self._jobs.get_first_to_forget()) is not None:
            self._end_job(forgotten, now_s, LeaseEnd.FORGOTTEN)
        # The engine asks for the keys of all waiting turns anyway.
        self._to_reorder.clear()
        if is_new:
            for turn in self._turns.values():
                self._introduce(turn, now_s)

    # Leases.

    def expire(self, now_s: float, max_leases: float = math.inf) -> int:
        """End or renew every lease whose deadline has passed; return how many leases ended.

        After `max_leases` of them, the remaining leases wait for the next call. One client's leases can all
        end at one time, and to free thousands of blocks takes long.
        """
        num_ended = 0
        for event in self._retention.expire(now_s, max_leases):
            self._apply(event)
            self.settle()
            num_ended += isinstance(event, LeaseEnded)
        return num_ended

    def reclaim(
        self, num_blocks: int, now_s: float, *, for_turn_id: str | None = None, stalled: bool = False
    ) -> int:
        """Free at least `num_blocks` leased blocks, or as many as possible; return how many were freed.

        Each lease loses its last blocks first. `for_turn_id` is the turn that needs the blocks. The lease
        that waits for this turn is skipped, because the turn will hit its blocks. `stalled`: nothing can run
        otherwise; then that lease is reclaimed too, after all others. The engine calls this during an
        allocation, so the waiting queue keeps its order. Call `settle` afterwards.
        """
        turn = self._turns.get(for_turn_id) if for_turn_id is not None else None
        num_free_before = self._engine.get_num_free_blocks()
        for event in self._retention.reclaim(num_blocks, turn, now_s, stalled=stalled):
            self._apply(event)
        return self._engine.get_num_free_blocks() - num_free_before

    def block(self, turn_id: str) -> None:
        """The first waiting turn does not fit, whatever leases give up, so all others wait too."""
        if turn_id in self._turns:
            self.shares.block(turn_id)

    def refuses_steadily(self, turn_id: str, now_s: float) -> bool:
        """Whether `reclaim` will free nothing for a waiting turn for as long as steps only decode."""
        turn = self._turns.get(turn_id)
        return turn is not None and self._retention.refuses_steadily(turn, now_s)

    def settle(self) -> None:
        """Reorder the waiting turns whose lease was reclaimed.

        Call after each allocation that reclaimed blocks, before the waiting queue is read again.
        """
        while self._to_reorder:
            self._engine.reorder(self._to_reorder.popleft())

    def drop_all(self, now_s: float, reason: LeaseEnd = LeaseEnd.RESET) -> None:
        """End every lease (a cache reset, a shutdown)."""
        for ended in self._retention.drop_all(reason, now_s):
            self._apply(ended)
            self.settle()

    # Called before and during a step.

    def tick(self, now_s: float) -> bool:
        """Do the work that depends on time; call this before each step.

        Return True if the engine must now ask again for the keys of all waiting turns.
        """
        for turn_id in self._order.pop_overdue(now_s):
            self.decided.num_overdue_turns += 1
            self._engine.reorder(turn_id)
        self.settle()  # the end of a turn may have taken a waiting turn's lease
        if now_s < self.next_reorder_s:
            return False
        self.next_reorder_s = now_s + self._reorder_s
        if "on_tick" in self._caller.heard:
            self._caller.tell("on_tick", self.get_view(now_s))
        return True

    def step(self, step: StepView) -> None:
        """The engine computed a step. Call this only if `hears_steps`."""
        if self._step_chooser is not None:
            self._step_chooser.observe_step(step)
        if "on_step" in self._caller.heard:
            self._caller.tell("on_step", step)

    def decode(self, steps: DecodeSteps) -> None:
        """As `step`, for several steps in a row that only decode."""
        if self._step_chooser is not None:
            self._step_chooser.observe_decodes(steps)
        if "on_step" in self._caller.heard:
            self._caller.tell_decodes(steps)

    def admit(self, first_id: str | None, now_s: float, *, idle: bool) -> list[str]:
        """Turns that may start now; `first_id` is the first parked turn. Call until the list is empty."""
        first = self._turns.get(first_id) if first_id is not None else None
        return self._order.admit(first, now_s, idle=idle)

    def may_start(self, turn_id: str, now_s: float, *, idle: bool) -> bool:
        """Whether a waiting turn may start; when the engine is idle, every turn may start."""
        return turn_id not in self._turns or self._order.may_start(self._turns[turn_id], now_s, idle=idle)

    # Questions of the engine.

    def get_next_deadline_s(self) -> float | None:
        """The next time at which `expire` has work to do; None if there are no leases."""
        return self.leases.get_next_deadline_s()

    @property
    def shares(self) -> Shares:
        """The engine's work by tenant."""
        return self._fairness.shares

    @property
    def ledger(self) -> Ledger:
        """What jobs and tenants used."""
        return self._jobs.ledger

    @property
    def quota(self) -> Quota:
        """The KV cache by tenant."""
        return self._fairness.quota

    @property
    def is_shadow(self) -> bool:
        """Whether the engine does not follow what this driver decides."""
        return self.decided is not self.stats

    @property
    def num_policy_faults(self) -> int:
        """How many calls of policy hooks have failed so far, those of earlier drivers included."""
        return self._num_earlier_faults + self._caller.num_faults

    def get_policy_figures(self) -> dict[str, float]:
        """The figures that the policy reports about what it learned; empty for most policies."""
        return self._caller.get_figures()

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases cover."""
        return self._engine.get_num_leased_blocks()

    def get_num_idle_leased_blocks(self) -> int:
        """Number of leased blocks that no turn uses."""
        return self._engine.get_num_idle_leased_blocks()

    def describe_job(self, job_id: str, now_s: float) -> dict[str, Any] | None:
        """What the driver knows of a job, in JSON types; None if the job is not known.

        It says what was found in the cache, also of what other jobs computed. Of a job that has ended, only
        what a wish keeps is known, and the account.
        """
        job, lease = self._jobs.get(job_id), self.leases.get(job_id)
        if job is None and lease is not None and lease.wish is not None:
            verdict = self.judge_wish(Hints(wish=lease.wish, retain_s=lease.most_s))
            job = JobState(job_id, lease.granted_s, None, num_turns=lease.turn.job.num_turns)
            job.account, job.wish_news = self.ledger.get_closed(job_id) or job.account, verdict
        if job is None:
            return None
        what, why = name_reason(job.lease_news)
        return {
            "turns": job.num_turns,
            "leased_blocks": 0 if lease is None or self.is_shadow else len(lease.blocks),
            "lease_news": what,
            "reason": why,
            "wish": None if job.wish_news is None else job.wish_news.describe(),
            "reusable_tokens": job.num_reusable_tokens,
            "reused_tokens": job.num_reused_tokens,
            "kept_tokens": job.num_kept_tokens,
            "short_tokens": dict(job.num_short_tokens or {}),
            "ledger": job.account.get_figures(now_s),
        }

    def get_account(self, job_id: str) -> Account | None:
        """The account of a job that is remembered."""
        job = self._jobs.get(job_id)
        return None if job is None else job.account

    def describe_ledger(self, now_s: float, max_jobs: int) -> dict[str, Any]:
        """The accounts in JSON types: the total, each tenant's, and those of the latest jobs."""
        jobs = self._jobs.jobs
        shown = itertools.islice(reversed(jobs.values()), max_jobs)
        return {
            "total": self.ledger.total.get_figures(now_s),
            "tenants": {name: each.get_figures(now_s) for name, each in self.ledger.tenants.items()},
            "jobs": [
                {
                    "job": job.job_id.rpartition("\t")[2],
                    "tenant": job.tenant,
                    **job.account.get_figures(now_s),
                }
                for job in shown
            ],
            "jobs_left_out": max(0, len(jobs) - max_jobs),
        }

    def get_claimed_blocks(self, turn_id: str) -> Blocks:
        """The leased blocks that wait for a turn; empty if there are none."""
        lease = self._retention.get_claimed(self._turns.get(turn_id))
        return [] if lease is None else lease.blocks

    def get_tenant_blocks(self) -> dict[str, int]:
        """Number of distinct leased blocks of each tenant that has leases; "" stands for no tenant."""
        if self.quota.counts_blocks:
            return self.quota.get_leased_blocks()
        return {NOBODY: self.get_num_leased_blocks()} if len(self.leases) else {}

    def get_num_reclaimable_blocks(self, for_turn_id: str) -> int:
        """Upper bound on the leased blocks that `reclaim` could free for this turn while other turns run."""
        return self._retention.get_num_reclaimable_blocks(self._turns.get(for_turn_id))

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state, including the number of leases."""
        return self._retention.get_view(now_s)

    def make_order(self) -> IndexedHeap[str] | FairOrder:
        """An empty queue of turns, for the engine to fill; the keys are those of `get_queue_key`."""
        if not self.limits.fair_tenants:
            return IndexedHeap()
        return FairOrder(self._turns, self.shares)

    def get_queue_key(self, turn_id: str, now_s: float) -> Key:
        """The key that orders a waiting turn in the queue; the smallest key goes first."""
        return self._order.get_queue_key(self._turns[turn_id], now_s)

    def get_stock_key(self, turn_id: str) -> Key:
        """The key that puts a waiting turn where stock vLLM would; the smallest key goes first."""
        return self._order.get_stock_key(self._turns[turn_id])

    def runs_as_stock(self, turn_id: str) -> bool:
        """Whether the policy leaves this turn alone, because its job is not in the canary."""
        return self._turns[turn_id].job.runs_as_stock is True

    def get_victim(self, turn_ids: Sequence[str], now_s: float) -> str | None:
        """Which of these running turns to preempt; None leaves the choice to the engine."""
        return next(iter(self.get_victims(turn_ids, now_s)), None)

    def get_victims(self, turn_ids: Sequence[str], now_s: float) -> list[str]:
        """These running turns in the order in which to preempt them.

        An empty list leaves the choice to the engine.
        """
        known = (self._turns[turn_id] for turn_id in turn_ids if turn_id in self._turns)
        return self._order.get_victims(known, now_s)

    def get_preempted_for(self, turn_id: str, running_ids: Sequence[str], now_s: float) -> str | None:
        """The running turn to preempt so that a waiting turn fits; None if no turn may be preempted."""
        victim_id = self.get_victim(running_ids, now_s)
        if victim_id is None or turn_id not in self._turns:
            return None
        turn, victim = self._turns[turn_id], self._turns[victim_id]
        return victim_id if self._order.may_preempt(turn, victim, now_s) else None

    def get_load_tokens(self, turn_id: str, offer: LoadOffer, now_s: float) -> int:
        """How many of the offer's first tokens a turn that is about to start loads."""
        if turn_id not in self._turns or not self.policy.overrides("load"):
            return offer.num_tokens
        turn = self._retention.get_turn_view(self._turns[turn_id])
        answer: bool | int = self._caller.ask("load", turn, offer, self.get_view(now_s))
        if isinstance(answer, bool):
            return offer.num_tokens if answer else 0
        return min(max(0, answer), offer.num_tokens)

    @property
    def orders_tiers(self) -> bool:
        """Whether the policy orders the tiers below the GPU.

        With a canary it does not: its keys would rank before the empty keys of jobs that run as in stock.
        """
        return self.policy.overrides("tier_key") and not self._canary.is_on

    def get_tier_key(self, turn: Turn, now_s: float) -> SortKey:
        """The key of this turn's KV in the tiers below the GPU; the smallest key is evicted first."""
        if not self.orders_tiers:
            return ()
        return get_sort_key(self._caller.ask("tier_key", turn, self.get_view(now_s)))

    def get_turn(self, turn_id: str) -> Turn | None:
        """The policy's view of a waiting or running turn; None if it is unknown or runs as in stock."""
        turn = self._turns.get(turn_id)
        return None if turn is None or turn.job.runs_as_stock else self._retention.get_turn_view(turn)

    def get_finished_turn(self, turn_id: str, finish: Finish) -> Turn | None:
        """The policy's view of a turn that is about to finish; None as in `get_turn`."""
        turn = self._turns.get(turn_id)
        return None if turn is None or turn.job.runs_as_stock else turn.get_finished_view(finish)

    def get_wish(self, turn_id: str) -> Wish | None:
        """The wish of a waiting or running turn's client; None if nothing is kept for it."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.arrival.hints.wish is None or self._get_wish_refusal(turn) is not None:
            return None
        return turn.arrival.hints.wish

    def judge_wish(self, hints: Hints, refusal: LeaseRefusal | None = None) -> Verdict | None:
        """What will become of a request's wish, judged by its hints; None if it has none.

        `refusal`: the reason why nothing is kept, if it is known.
        """
        if hints.wish is None:
            return None
        if refusal is None and not self._retains:
            refusal = LeaseRefusal.POLICY
        elif refusal is None and hints.is_last:
            refusal = LeaseRefusal.LAST_TURN
        most_s = self.limits.get_longest_s(hints.retain_s)
        return judge(hints.wish, most_s, has_tier=self._keeps_below, refusal=refusal)

    @property
    def _keeps_below(self) -> bool:
        """Whether tiers below the GPU keep chunks for wishes."""
        return self._engine.can_store and self.limits.max_wished_share > 0

    def get_next_tick_s(self) -> float:
        """The next time at which `tick` has work to do; infinity if nothing depends on time."""
        return min(self._fairness.waits.get_next_s(), self.next_reorder_s)

    @property
    def hears_steps(self) -> bool:
        """Whether `step` must be called for each step."""
        return self._step_chooser is not None or "on_step" in self._caller.heard

    def needs_output(self, turn_id: str) -> bool:
        """Whether the turn's output must be read to learn what follows it.

        It need not be read if the client said that this turn is the job's last.
        """
        turn = self._turns.get(turn_id)
        return turn is not None and turn.arrival.hints.is_last is not True

    def is_first_turn(self, turn_id: str) -> bool:
        """Whether a turn is its job's first, so that its prefix may be pinned if other jobs share it."""
        turn = self._turns.get(turn_id)
        if turn is None or not self.pins.max_blocks:
            return False
        return turn.job.num_turns == 1 and not turn.job.runs_as_stock

    def get_arrival_s(self, turn_id: str) -> float | None:
        """When a turn arrived; None if the driver does not know the turn."""
        turn = self._turns.get(turn_id)
        return None if turn is None else turn.arrival_s

    def get_oldest_arrival_s(self) -> float | None:
        """When the turn arrived that has waited longest for its first step; None if none waits."""
        return next((turn.arrival_s for turn in self._turns.values() if not turn.started), None)

    def has_started(self, turn_id: str) -> bool:
        """Whether a turn has had its first step; True for a turn that the driver does not know."""
        turn = self._turns.get(turn_id)
        return turn is None or turn.started

    def needs_admission(self, turn_id: str) -> bool:
        """Whether the policy must be asked before this turn starts."""
        return self._order.is_held(turn_id)

    @property
    def bounds_steps(self) -> bool:
        """Whether `get_step_size` must be asked before each step."""
        return self._step_chooser is not None or self.policy.overrides("step_budget")

    def get_step_size(
        self, now_s: float, max_num_batched_tokens: int, *, only_decodes: bool = False
    ) -> StepSize:
        """Bounds of the next step: at least one token per running turn, at most the engine's budget.

        Within these bounds, the size is the smaller one of the chooser's and the policy's answers. With a
        canary the policy is not asked, because a step serves all jobs. `only_decodes`: no turn waits, and no
        prompt is partly computed. Then the chooser is not asked, because it always leaves room for decoding
        turns.
        """
        if only_decodes and not self.policy.overrides("step_budget"):
            return StepSize(max_num_batched_tokens)
        num_running = self._engine.get_num_running()
        answers, per_prompt = [max_num_batched_tokens], 0
        if self._step_chooser is not None:
            chosen = self._step_chooser.choose(num_running, max_num_batched_tokens, self._block_size)
            if self._caller.log is not None:
                answer = chosen and chosen.num_tokens
                self._caller.log({"kind": "chosen", "what": "step_tokens", "answer": answer})
            if chosen is not None:
                answers.append(chosen.num_tokens)
                per_prompt = chosen.per_prompt
        if self.policy.overrides("step_budget") and not self._canary.is_on:
            bound: int | None = self._caller.ask("step_budget", self.get_view(now_s))
            answers += [] if bound is None else [bound]
        num_tokens = max(1, min(max(min(answers), num_running), max_num_batched_tokens))
        return StepSize(num_tokens, per_prompt)

    # Internal.

    def _apply(self, event: LeaseEvent | None) -> None:
        """Count, log and record an event of a lease, and the waiting turn that must be reordered for it."""
        if event is None:
            return
        job_id = event.turn.job.job_id if isinstance(event, LeaseRefused) else event.lease.job_id
        job, stats = self._jobs.get(job_id), self.decided
        if not isinstance(event, LeaseRefused) and stats is self.stats:
            account = None if job is None else job.account
            self._jobs.ledger.hold(job_id, account, "gpu", len(event.lease.blocks), event.now_s)
        news: LeaseEnd | LeaseRefusal | TakenBy | None
        match event:
            case LeaseShortened():
                return
            case LeaseGranted():
                news = None
                stats.num_leases_granted += 1
            case LeaseRefused():
                news = event.reason
                stats.num_lease_refusals[event.reason] += 1
            case LeaseTruncated():
                news = event.taken_by
                stats.num_revoked_blocks += event.num_blocks
                stats.num_takes[event.taken_by] += 1
            case LeaseEnded():
                news = event.taken_by or event.reason
                stats.num_leases_ended[event.reason] += 1
                if event.reason is LeaseEnd.REVOKED:
                    stats.num_revoked_blocks += event.num_blocks
                if event.taken_by is not None:
                    stats.num_takes[event.taken_by] += 1
                waiting_id = event.lease.next_turn_id
                if waiting_id is not None and event.reason is not LeaseEnd.HIT:
                    self._to_reorder.append(waiting_id)
        if job is not None and not (isinstance(event, LeaseRefused) and job_id in self.leases):
            job.lease_news = news
        if self._history is not None:
            self._history.record_lease(event)

    def _get_wish_refusal(self, turn: TurnState) -> LeaseRefusal | None:
        """The reason why nothing is kept for a turn, whatever its client wishes; None if there is none."""
        if not self._retains or turn.job.runs_as_stock:
            return LeaseRefusal.POLICY
        is_over = turn.arrival.hints.is_last or turn.job.is_released or not turn.arrival.is_supported
        return turn.get_last_reason() if is_over else None

    def _grant_wish(self, turn: TurnState, finish: Finish, now_s: float) -> Wish | None:
        """A finished turn's wish if it is accepted. If not, the result is reported at once."""
        refusal = LeaseRefusal.ABORTED if finish.aborted else self._get_wish_refusal(turn)
        wish = turn.arrival.hints.wish
        if refusal is None and wish is not None and wish.found_s > 0:
            return wish
        self._report_wish(turn, refusal, now_s)
        return None

    def _report_wish(self, turn: TurnState, refusal: LeaseRefusal | None, now_s: float) -> None:
        wish, verdict = turn.arrival.hints.wish, self.judge_wish(turn.arrival.hints, refusal)
        assert wish is not None
        self.decided.num_malformed_wishes.update(wish.malformed)
        if verdict is not None:
            self.decided.num_wishes[verdict.dialect, verdict.result] += 1
            turn.job.wish_news = verdict
        if self._history is not None:
            self._history.record_wish(turn, now_s, wish, verdict)

    def _end_job(self, job: JobState, now_s: float, reason: LeaseEnd, *, keeps_copies: bool = False) -> None:
        """End a job. `keeps_copies`: tiers below the GPU keep the KV that only this job used."""
        self._apply(self._retention.end(job.job_id, reason, now_s))
        view = job.get_view()
        if "on_job_ended" in self._caller.heard and not job.runs_as_stock:
            self._caller.tell("on_job_ended", view, now_s)
        # As `Turn.ends_job`. The client may also say it of any job.
        if reason is LeaseEnd.JOB_ENDED and (job.is_released or view.came_back) and not keeps_copies:
            self._engine.end_job(job.job_id)
        self._jobs.forget(job)
        self._fairness.waits.forget_job(job.job_id)

    def _adopt(self, turn: TurnState, now_s: float) -> None:
        job = turn.job
        self._place(job, turn.arrival)
        self._fairness.adopt(turn, self._retention.get_num_leased_tokens(), now_s)
        if job.tenant is not None:
            self.leases.count_by_tenant()
        self._order.enter(turn)
        if not turn.started:
            self._update_chooser(turn)

    def _introduce(self, turn: TurnState, now_s: float) -> None:
        """Tell a new policy of a turn that arrived earlier."""
        self._tell("on_turn_arrived", turn, now_s)
        if turn.started:
            if not turn.job.is_admitted or self.policy.needs.admit == "turns":
                self._tell("on_turn_admitted", turn, now_s)
            self._order.start(turn)
            self._tell("on_turn_started", turn, now_s)
            if turn.run_from is None:
                self._tell("on_turn_preempted", turn, now_s)

    def _is_retained(self, lease: LeaseState) -> bool:
        """Whether a lease that the other driver granted stays.

        A lease that only a wish keeps may outlast its job, whose group is then unknown.
        """
        job = self._jobs.get(lease.job_id)
        if job is None and lease.terms.yields is not Yields.FIRST:
            return False
        return self._canary.selects(lease.job_id, lease.turn.job.tenant, None if job is None else job.group)

    def _place(self, job: JobState, arrival: Arrival) -> None:
        """Decide, once for each job, whether it runs as in stock."""
        if job.runs_as_stock is None:
            hints = arrival.hints
            job.group = hints.group
            job.runs_as_stock = not self._canary.selects(job.job_id, hints.tenant, hints.group)

    def _update_chooser(self, turn: TurnState) -> None:
        if self._step_chooser is not None:
            num_new_tokens = turn.arrival.num_prompt_tokens - turn.num_reusable_tokens
            self._step_chooser.observe_arrival(self._retention.get_turn_view(turn), num_new_tokens)

    def _tell(self, hook: str, turn: TurnState, *inputs: object, view: Turn | None = None) -> None:
        """Tell the policy what happened to a turn, unless the turn runs as in stock."""
        if hook in self._caller.heard and not turn.job.runs_as_stock:
            self._caller.tell(hook, self._retention.get_turn_view(turn) if view is None else view, *inputs)


class History:
    """Writes what happens to turns and leases into the decision log as `job` records."""

    def __init__(self, log: DecisionLog, *, is_shadow: bool = False) -> None:
        """`is_shadow`: leases are not real, and their records say so."""
        self._log = log
        self._shadow: LogRecord = {"shadow": True} if is_shadow else {}

    def record(self, event: str, turn: TurnState, now_s: float, **facts: object) -> None:
        """Record an event of a turn."""
        record: LogRecord = {"kind": "job", "event": event, "job": turn.job.job_id, "turn": turn.turn_id}
        self._log({**record, "turn_number": turn.job.num_turns, "now_s": now_s, **facts})

    def record_arrival(
        self, turn: TurnState, now_s: float, tool_s: float | None, parted_at: int | None
    ) -> None:
        """A turn arrived. `parted_at`: the first token that differs from the job's last prompt."""
        hints = turn.arrival.hints
        said = {
            "parted_at": parted_at,
            "parent": hints.parent,
            "deadline_s": hints.deadline_s,
            "retain_s": hints.retain_s,
        }
        said = {name: value for name, value in said.items() if value is not None}
        num_prompt_tokens = turn.arrival.num_prompt_tokens
        self.record("arrived", turn, now_s, **said, num_prompt_tokens=num_prompt_tokens, tool_s=tool_s)

    def record_start(self, turn: TurnState, now_s: float, short_hit: ShortHit | None) -> None:
        """A turn got its first step."""
        facts: LogRecord = {
            "num_hit_tokens": turn.num_hit_tokens,
            "num_reusable_tokens": turn.num_reusable_tokens,
            "queue_s": now_s - turn.arrival_s,
        }
        if short_hit is not None:
            facts |= {"short_group": short_hit.group, "num_short_tokens": short_hit.num_tokens}
        self.record("started", turn, now_s, **facts)

    def record_wish(self, turn: TurnState, now_s: float, wish: Wish, verdict: Verdict | None) -> None:
        """Record what becomes of a finished turn's wish."""
        facts: LogRecord = {"malformed": list(wish.malformed)} if wish.malformed else {}
        if verdict is not None:
            facts |= {**verdict.describe(), "num_tokens": wish.num_tokens}
        self.record(
            "wished", turn, now_s, **{name: value for name, value in facts.items() if value is not None}
        )

    def record_lease(self, event: LeaseEvent) -> None:
        """Record that a lease began, was refused, lost its last blocks, or ended."""
        turn = event.turn if isinstance(event, LeaseRefused) else event.lease.turn
        facts: LogRecord
        match event:
            case LeaseRefused():
                what, facts = "lease-refused", {"reason": event.reason.value}
            case LeaseGranted():
                num_blocks, until_s = len(event.lease.blocks), event.lease.terms.until_s
                what, facts = "lease-granted", {"num_blocks": num_blocks, "until_s": until_s}
            case LeaseTruncated():
                what = "lease-truncated"
                facts = {"num_blocks": event.num_blocks, "taken_by": event.taken_by.value}
            case LeaseEnded():
                held_s = event.now_s - event.lease.granted_s
                what = "lease-ended"
                facts = {"num_blocks": event.num_blocks, "reason": event.reason.value, "held_s": held_s}
                if event.taken_by is not None:
                    facts["taken_by"] = event.taken_by.value
        place: LogRecord = {"kind": "job", "event": what, "job": turn.job.job_id, "turn": turn.turn_id}
        self._log({**place, "now_s": event.now_s, **facts, **self._shadow})
