"""The driver: the only caller of policies. It owns the jobs and their leases.

An engine reports what happens to its turns and asks what to do; the driver asks the policy, bounds the
answer and carries it out. A lease is a request, not a right: `reclaim` frees blocks *before* an
allocation fails. Every call is O(log n) in jobs and leases.

    arrive → (start → preempt)* → start → finish → [lease] → arrive (the job's next turn) → …
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from tenuto.core.admission import Admission
from tenuto.core.engine import Engine
from tenuto.core.history import History
from tenuto.core.indexed_heap import SortKey, get_sort_key
from tenuto.core.job_table import JobTable
from tenuto.core.jobs import Arrival, Finish, JobState, TurnState
from tenuto.core.leases import LeaseEnded, LeaseEvent, LeaseGranted, LeaseRefused, LeaseTruncated
from tenuto.core.limits import Limits
from tenuto.core.policy import TOLD_HOOKS, Key, Policy
from tenuto.core.policy_caller import DecisionLog, PolicyCaller
from tenuto.core.retention import Retention
from tenuto.core.reuse import PrefixMarks, count_computed_tokens, count_lost_tokens, count_missed_tokens
from tenuto.core.stats import DriverStats
from tenuto.core.stock_queue import make_stock_queue
from tenuto.core.types import EngineView, LeaseEnd, LoadOffer, StepView, Turn


class Driver:
    """One policy at work on one engine."""

    def __init__(  # noqa: PLR0913 - what an engine chooses, once
        self,
        policy: Policy,
        engine: Engine,
        limits: Limits | None = None,
        *,
        by_priority: bool = False,
        log: DecisionLog | None = None,
        stats: DriverStats | None = None,
        strict: bool = False,
    ) -> None:
        """`by_priority`: the engine serves requests by their own priority; a policy decides among equals.

        `stats`: where to count, an empty one of its own without it.
        `strict`: a policy's fault is raised as PolicyError instead of counted.
        """
        self.policy = policy
        self.limits = limits or Limits()
        self.stats = stats or DriverStats()
        self._engine = engine
        self._caller = PolicyCaller(policy, log, strict=strict)
        self._history = History(log)
        # A policy that treats all jobs alike needs none of them recognised.
        infers = self.limits.infer_jobs and any(
            policy.overrides(hook) for hook in ("queue_key", "admit", "retain", "preempt_key", *TOLD_HOOKS)
        )
        view = engine.get_view(0.0)
        self._block_size = view.block_size
        self._hash_block_size = engine.hash_block_size
        self._jobs = JobTable(self.limits.max_remembered_jobs, engine.hash_block_size, infers=infers)
        self._turns: dict[str, TurnState] = {}
        self._by_priority = by_priority
        self._retention = Retention(engine, self._caller, self.limits, by_priority=by_priority)
        stock_queue = make_stock_queue(policy, self.limits, view.num_blocks * view.block_size)
        self._admission = Admission(self._caller, self._retention, self.limits, self.stats, stock_queue)
        self.leases = self._retention.leases
        self._to_reorder: deque[str] = deque()
        """Waiting turns whose lease ended, until `settle` tells the engine."""
        self._ticked_s = -math.inf

    # What happens to turns.

    def arrive(self, turn_id: str, now_s: float, arrival: Arrival) -> None:
        """A turn came in. Finds its job, and truncates the job's lease to what the prompt shares with it."""
        self.stats.num_events += 1
        job = self._jobs.find(turn_id, arrival, now_s)
        tool_s = None if job.last_finish_s is None or job.live_turn_ids else now_s - job.last_finish_s
        turn = TurnState(turn_id, job, now_s, arrival)
        if job.last_marks is not None:
            turn.num_reusable_tokens = job.last_marks.count_reusable_tokens(
                arrival.hashes, arrival.num_prompt_tokens, self._block_size
            )
        job.num_turns += 1
        if len(job.live_turn_ids) >= self.limits.max_parallel_turns:
            # Otherwise a client that gives all its requests one id would go first for ever.
            turn.job_arrival_s = now_s
        job.live_turn_ids[turn_id] = None
        self._turns[turn_id] = turn
        self._admission.enter(turn)
        self._apply(self._retention.claim(turn, now_s))
        if tool_s is not None:
            self.stats.tool_s.observe(tool_s)
            if self._caller.hears("on_tool_returned"):
                self._caller.tell("on_tool_returned", self._view(turn), job.last_tool, tool_s)
        if self._caller.hears("on_turn_arrived"):
            self._caller.tell("on_turn_arrived", self._view(turn), now_s)
        self._history.record(
            "arrived", turn, now_s, num_prompt_tokens=arrival.num_prompt_tokens, tool_s=tool_s
        )

    def start(self, turn_id: str, now_s: float, num_hit_tokens: int) -> None:
        """A turn got its first step, or its first after a preemption. A lease that waited for it ends."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self.stats.num_events += 1
        turn.num_held_tokens = num_hit_tokens
        if turn.started:
            num_lost_tokens = count_lost_tokens(turn.num_computed_tokens, num_hit_tokens)
            self.stats.num_recomputed_tokens += num_lost_tokens
            if self._caller.hears("on_turn_started"):
                self._caller.tell("on_turn_started", self._view(turn), now_s)
            self._history.record(
                "resumed", turn, now_s, num_hit_tokens=num_hit_tokens, num_lost_tokens=num_lost_tokens
            )
            return
        turn.started = turn.job.is_admitted = True
        self._admission.start(turn, num_hit_tokens)
        turn.num_hit_tokens = num_hit_tokens
        self.stats.num_hit_tokens += num_hit_tokens
        self.stats.num_reusable_tokens += turn.num_reusable_tokens
        self.stats.num_recomputed_tokens += count_missed_tokens(turn.num_reusable_tokens, num_hit_tokens)
        self.stats.queue_s.observe(now_s - turn.arrival_s)
        self._apply(self._retention.hit(turn, now_s))
        if self._caller.hears("on_turn_started"):
            self._caller.tell("on_turn_started", self._view(turn), now_s)
        self._history.record(
            "started",
            turn,
            now_s,
            num_hit_tokens=num_hit_tokens,
            num_reusable_tokens=turn.num_reusable_tokens,
            queue_s=now_s - turn.arrival_s,
        )

    def preempt(self, turn_id: str, now_s: float, num_computed_tokens: int) -> None:
        """A running turn lost its blocks and waits again."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self.stats.num_events += 1
        turn.num_preemptions += 1
        turn.num_computed_tokens = num_computed_tokens
        if self._caller.hears("on_turn_preempted"):
            self._caller.tell("on_turn_preempted", self._view(turn), now_s)
        self._history.record("preempted", turn, now_s, num_computed_tokens=num_computed_tokens)

    def finish(self, turn_id: str, now_s: float, finish: Finish) -> None:
        """A turn ended; call just before the engine frees its blocks, so that a lease can take them."""
        turn = self._turns.pop(turn_id, None)
        if turn is None:
            return
        self.stats.num_events += 1
        job = turn.job
        del job.live_turn_ids[turn_id]
        self._retention.unclaim(turn)
        self._admission.finish(turn, finish.num_output_tokens)
        self._history.record(
            "finished", turn, now_s, num_output_tokens=finish.num_output_tokens, aborted=finish.aborted
        )
        if not finish.aborted:
            self._complete(turn, now_s, finish)
        elif self._caller.hears("on_turn_finished"):
            self._caller.tell("on_turn_finished", turn.get_finished_view(finish), now_s)
        if job.job_id in self._jobs:
            self._leave(job, now_s)

    # Leases.

    def expire(self, now_s: float, max_renewals: float = math.inf) -> int:
        """End or renew every lease whose deadline has passed; returns how many ended.

        After `max_renewals` the others wait for the next call: ends are paid for by grants, renewals are not.
        """
        num_ended = 0
        for ended in self._retention.expire(now_s, max_renewals):
            self._apply(ended)
            self.settle()
            num_ended += 1
        return num_ended

    def get_next_deadline_s(self) -> float | None:
        """When `expire` has something to do next; None without leases."""
        return self.leases.get_next_deadline_s()

    @property
    def num_policy_faults(self) -> int:
        """Policy hooks that failed so far."""
        return self._caller.num_faults

    def get_policy_figures(self) -> dict[str, float]:
        """What the policy shows of what it learned; nothing from most."""
        return self._caller.get_figures()

    def get_num_leased_blocks(self) -> int:
        """Distinct blocks that leases cover."""
        return self._engine.get_num_leased_blocks()

    def get_num_reclaimable_blocks(self, for_turn_id: str) -> int:
        """Leased blocks, at most, that `reclaim` could free while other turns run."""
        return self._retention.get_num_reclaimable_blocks(self._turns.get(for_turn_id))

    def reclaim(
        self, num_blocks: int, now_s: float, *, for_turn_id: str | None = None, stalled: bool = False
    ) -> int:
        """Free at least `num_blocks` leased blocks, if leases have so many, tails first; returns how many.

        The lease that waits for the turn which needs the blocks is spared: its blocks are what the turn
        will hit. `stalled` says that nothing can run otherwise; then that lease goes too, after all others.
        The engine calls this while it allocates, so nothing is reordered here: call `settle` afterwards.
        """
        turn = self._turns.get(for_turn_id) if for_turn_id is not None else None
        num_free_before = self._engine.get_num_free_blocks()
        for event in self._retention.reclaim(num_blocks, turn, now_s, stalled=stalled):
            self._apply(event)
        return self._engine.get_num_free_blocks() - num_free_before

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

    # Questions an engine asks.

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state, with the number of leases."""
        return self._retention.get_view(now_s)

    def get_queue_key(self, turn_id: str, now_s: float) -> Key:
        """Where a waiting turn stands; smaller goes first."""
        state = self._turns[turn_id]
        if state.is_overdue:
            first: Key = (-math.inf, state.number)
            return (state.arrival.priority, *first) if self._by_priority else first
        turn = self._view(state)
        if self.policy.needs.max_waiting_with_hits and self._affords_look_up(now_s):
            turn = dataclasses.replace(turn, num_cached_tokens=self._engine.get_num_cached_tokens(turn_id))
        key: Key = self._caller.ask("queue_key", turn, now_s)
        return (turn.priority, *key) if self._by_priority else key

    def get_victim(self, turn_ids: Sequence[str], now_s: float) -> str | None:
        """Which of these running turns to preempt; None leaves the choice to the engine."""
        return next(iter(self.get_victims(turn_ids, now_s)), None)

    def get_victims(self, turn_ids: Sequence[str], now_s: float) -> list[str]:
        """These running turns, first to preempt first; an empty list leaves the choice to the engine."""
        if not self.policy.overrides("preempt_key"):
            return []
        view = self.get_view(now_s)
        keys: dict[str, SortKey] = {}
        for turn_id in turn_ids:
            if turn_id in self._turns:
                turn = self._view(self._turns[turn_id])
                key = self._caller.ask("preempt_key", turn, view)
                keys[turn_id] = get_sort_key((-turn.priority, *key) if self._by_priority else key)
        return sorted(keys, key=lambda turn_id: (keys[turn_id], turn_id))

    def get_preempted_for(self, turn_id: str, running_ids: Sequence[str], now_s: float) -> str | None:
        """Which of these running turns to preempt so that a waiting turn fits; None if none may be."""
        victim_id = self.get_victim(running_ids, now_s)
        if victim_id is None or turn_id not in self._turns:
            return None
        turn, victim = (self._view(self._turns[each]) for each in (turn_id, victim_id))
        if self._by_priority and turn.priority > victim.priority:
            return None
        answer = self._caller.ask("may_preempt", turn, victim, self.get_view(now_s))
        return victim_id if answer else None

    def may_load(self, turn_id: str, offer: LoadOffer, now_s: float) -> bool:
        """Whether a turn that is about to start loads what the tiers have of it."""
        if turn_id not in self._turns or not self.policy.overrides("load"):
            return True
        turn = self._view(self._turns[turn_id])
        return bool(self._caller.ask("load", turn, offer, self.get_view(now_s)))

    def tick(self, now_s: float) -> bool:
        """Call before each step. True: ask for the keys of all waiting turns again now."""
        self._hurry(now_s)
        if now_s < self._get_next_rekey_s():
            return False
        self._ticked_s = now_s
        if self._caller.hears("on_tick"):
            self._caller.tell("on_tick", self.get_view(now_s))
        return True

    def get_next_tick_s(self) -> float:
        """When `tick` has something to do next; infinity if nothing depends on time."""
        return min(self._admission.get_next_overdue_s(), self._get_next_rekey_s())

    def step(self, step: StepView) -> None:
        """The engine computed a step; call only for a policy that overrides `on_step`."""
        self._caller.tell("on_step", step)

    def admit(self, first_id: str | None, now_s: float, *, idle: bool) -> list[str]:
        """Turns that may start now; `first_id` is the first parked one. Call until the list is empty."""
        first = self._turns.get(first_id) if first_id is not None else None
        return self._admission.admit(first, now_s, idle=idle)

    def may_start(self, turn_id: str, now_s: float, *, idle: bool) -> bool:
        """Whether a waiting turn may start; any may when the engine is idle."""
        return turn_id not in self._turns or self._admission.may_start(self._turns[turn_id], now_s, idle=idle)

    def needs_output(self, turn_id: str) -> bool:
        """Whether the output has to be read for what follows; not if the client said that nothing does."""
        turn = self._turns.get(turn_id)
        return turn is not None and turn.arrival.hints.is_last is not True

    def needs_admission(self, turn_id: str) -> bool:
        """Whether the policy has to be asked before this turn starts."""
        return self._admission.needs(self._turns.get(turn_id))

    def get_step_budget(self, now_s: float, max_num_batched_tokens: int) -> int:
        """Token budget of the next step: at least one per running turn, at most the engine's own."""
        view = self.get_view(now_s)
        answer: int | None = self._caller.ask("step_budget", view)
        if answer is None:
            return max_num_batched_tokens
        return max(1, min(max(answer, view.num_running), max_num_batched_tokens))

    # Inside.

    def _get_next_rekey_s(self) -> float:
        rekey_s = self.policy.needs.rekey_s
        return math.inf if rekey_s is None else self._ticked_s + rekey_s

    def _hurry(self, now_s: float) -> None:
        """Let the turns that are overdue go first."""
        for turn_id in self._admission.pop_overdue(now_s):
            self.stats.num_overdue_turns += 1
            self._engine.reorder(turn_id)

    def _apply(self, event: LeaseEvent | None) -> None:
        """Count and log what happened to a lease, and note whose place in the queue it may have changed."""
        match event:
            case LeaseGranted():
                self.stats.num_leases_granted += 1
                self._history.record_lease(event)
            case LeaseRefused():
                self.stats.num_lease_refusals[event.reason] += 1
                self._history.record_refusal(event)
            case LeaseTruncated():
                self.stats.num_revoked_blocks += event.num_blocks
            case LeaseEnded():
                self.stats.num_leases_ended[event.reason] += 1
                if event.reason is LeaseEnd.REVOKED:
                    self.stats.num_revoked_blocks += event.num_blocks
                self._history.record_lease(event)
                waiting_id = event.lease.next_turn_id
                if waiting_id is not None and event.reason is not LeaseEnd.HIT:
                    self._to_reorder.append(waiting_id)

    def _affords_look_up(self, now_s: float) -> bool:
        return self._engine.get_view(now_s).num_waiting <= self.policy.needs.max_waiting_with_hits

    def _complete(self, turn: TurnState, now_s: float, finish: Finish) -> None:
        job, view = turn.job, turn.get_finished_view(finish)
        job.last_finish_s, job.last_tool = now_s, view.tool
        num_computed_tokens = count_computed_tokens(turn.arrival.num_prompt_tokens, finish.num_output_tokens)
        job.last_marks = PrefixMarks(
            turn.arrival.hashes, turn.arrival.num_prompt_tokens, num_computed_tokens, self._hash_block_size
        )
        if self._caller.hears("on_turn_finished"):
            self._caller.tell("on_turn_finished", view, now_s)
        if view.is_last and not job.live_turn_ids:
            self._end_job(job, now_s, LeaseEnd.JOB_ENDED)
            return
        self._jobs.remember(job, turn.arrival)
        if not view.is_last and self.policy.overrides("retain"):
            for event in self._retention.retain(turn, view, now_s):
                self._apply(event)

    def _leave(self, job: JobState, now_s: float) -> None:
        """A turn left. A job without other turns is idle now, and the longest idle one may be forgotten."""
        forgotten = None if job.live_turn_ids else self._jobs.mark_idle(job)
        if forgotten is not None:
            self._end_job(forgotten, now_s, LeaseEnd.EXPIRED)

    def _end_job(self, job: JobState, now_s: float, reason: LeaseEnd) -> None:
        self._apply(self._retention.end(job.job_id, reason, now_s))
        if self._caller.hears("on_job_ended"):
            self._caller.tell("on_job_ended", job.get_view(), now_s)
        self._jobs.forget(job)

    def _view(self, turn: TurnState) -> Turn:
        return self._retention.get_turn_view(turn)
