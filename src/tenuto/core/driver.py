"""The driver: the only caller of policies. It owns jobs, leases, deadlines and revocation.

An engine reports what happens to its turns and asks what to do; the driver asks the policy, bounds the
answer and carries it out. A lease is a request, not a right: `take_back` returns blocks *before* an
allocation fails. Every call is O(log n) in jobs and leases.

    arrive → (start → preempt)* → start → finish → [lease] → arrive (the job's next turn) → …
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence

from tenuto.core.asking import DecisionLog, LogRecord, PolicyCaller
from tenuto.core.jobs import Arrival, Finish, JobState, TurnState
from tenuto.core.leases import Engine, LeaseState, LeaseTable
from tenuto.core.limits import Limits
from tenuto.core.lineage import Lineage
from tenuto.core.order import WaitingOrder
from tenuto.core.policy import TOLD_HOOKS, Key, Policy
from tenuto.core.stats import DriverStats
from tenuto.core.types import (
    EngineView,
    Keep,
    LeaseEnd,
    LoadOffer,
    Offload,
    Release,
    StepView,
    Strength,
    Turn,
    Yields,
)


class Driver:
    """One policy at work on one engine."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        limits: Limits | None = None,
        *,
        hash_block_size: int | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        """`hash_block_size`: tokens per hash of an `Arrival`, where that is not the engine's block size."""
        self.policy = policy
        self.limits = limits or Limits()
        self.stats = DriverStats()
        self._engine = engine
        self._caller = PolicyCaller(policy, log)
        self._log = log
        self._jobs: dict[str, JobState] = {}
        self._idle_jobs: OrderedDict[str, None] = OrderedDict()
        self._turns: dict[str, TurnState] = {}
        self.leases = LeaseTable(engine, self._on_lease_end)
        self._block_size = engine.get_view(0.0).block_size
        self._lineage = Lineage(hash_block_size or self._block_size, self.limits.max_remembered_jobs)
        # A policy that never tells jobs apart needs none recognised.
        self._infers = self.limits.infer_jobs and any(
            policy.overrides(hook) for hook in ("queue_key", "admit", "retain", "preempt_key", *TOLD_HOOKS)
        )
        self._now_s = 0.0
        self._ticked_s = -math.inf

    # What happens to turns.

    def arrive(self, turn_id: str, now_s: float, what: Arrival) -> None:
        """A turn came in. Finds its job; a lease that its prompt does not extend is cut to what it does."""
        self._now_s = now_s
        self.stats.num_events += 1
        job = self._find_job(turn_id, what)
        tool_s = None if job.last_finish_s is None or job.live_turn_ids else now_s - job.last_finish_s
        turn = TurnState(turn_id, job, now_s, what)
        turn.num_reusable_tokens = min(job.last_num_tokens, what.num_prompt_tokens - 1)
        job.num_turns += 1
        job.live_turn_ids[turn_id] = None
        self._idle_jobs.pop(job.job_id, None)
        self._turns[turn_id] = turn
        lease = self.leases.get(job.job_id)
        if lease is not None and lease.next_turn_id is None:
            self._claim(lease, turn)
        if tool_s is not None:
            self.stats.tool_s.observe(tool_s)
            if self._caller.hears("on_tool_returned"):
                self._caller.tell("on_tool_returned", self._view(turn), job.last_tool, tool_s)
        if self._caller.hears("on_turn_arrived"):
            self._caller.tell("on_turn_arrived", self._view(turn), now_s)
        self._record("arrived", turn, now_s, num_prompt_tokens=what.num_prompt_tokens, tool_s=tool_s)

    def start(self, turn_id: str, now_s: float, num_hit_tokens: int) -> None:
        """A turn got its first step, or its first after a preemption; its job's lease has served."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self._now_s = now_s
        self.stats.num_events += 1
        if turn.started:
            self.stats.num_recomputed_tokens += max(0, turn.num_lost_tokens - num_hit_tokens)
            if self._caller.hears("on_turn_resumed"):
                self._caller.tell("on_turn_resumed", self._view(turn), now_s)
            self._record("resumed", turn, now_s, num_hit_tokens=num_hit_tokens)
            return
        turn.started = turn.job.has_started = True
        turn.num_hit_tokens = num_hit_tokens
        self.stats.num_hit_tokens += num_hit_tokens
        self.stats.num_recomputed_tokens += max(0, turn.num_reusable_tokens - num_hit_tokens)
        self.stats.queue_s.observe(now_s - turn.arrival_s)
        lease = self.leases.get(turn.job.job_id)
        if lease is not None and lease.next_turn_id == turn_id:
            self.leases.end(lease, LeaseEnd.HIT)
        if self._caller.hears("on_turn_started"):
            self._caller.tell("on_turn_started", self._view(turn), now_s)
        self._record("started", turn, now_s, num_hit_tokens=num_hit_tokens, queue_s=now_s - turn.arrival_s)

    def preempt(self, turn_id: str, now_s: float, num_computed_tokens: int) -> None:
        """A running turn lost its blocks and waits again."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        self.stats.num_events += 1
        turn.num_preemptions += 1
        turn.num_lost_tokens = num_computed_tokens
        if self._caller.hears("on_turn_preempted"):
            self._caller.tell("on_turn_preempted", self._view(turn), now_s)
        self._record("preempted", turn, now_s, num_computed_tokens=num_computed_tokens)

    def finish(self, turn_id: str, now_s: float, how: Finish) -> None:
        """A turn ended; call just before the engine frees its blocks, so that a lease can take them."""
        turn = self._turns.pop(turn_id, None)
        if turn is None:
            return
        self._now_s = now_s
        self.stats.num_events += 1
        job = turn.job
        del job.live_turn_ids[turn_id]
        own_lease = self.leases.get(job.job_id)
        if own_lease is not None and own_lease.next_turn_id == turn_id:
            # It never started (aborted while waiting); what was kept for it waits for a retry.
            own_lease.next_turn_id = None
        self._record("finished", turn, now_s, num_output_tokens=how.num_output_tokens, aborted=how.aborted)
        if not how.aborted:
            self._complete(turn, now_s, how)
        elif self._caller.hears("on_turn_aborted"):
            self._caller.tell("on_turn_aborted", turn.get_finished_view(how), now_s)
        if job.job_id in self._jobs:
            self._leave(job)

    # Leases.

    def expire(self, now_s: float) -> int:
        """End or renew every lease whose deadline has passed; returns how many ended."""
        num_ended = 0
        while (lease := self.leases.get_due(now_s)) is not None:
            self._now_s = now_s
            view = self.get_view(now_s)
            answer = self._caller.ask("reconsider", (Keep, Offload, Release), lease.get_view(), view)
            terms = self._bound(answer, lease.granted_s) if isinstance(answer, Keep) else None
            if terms is not None and terms.until_s > now_s and terms.strength is lease.terms.strength:
                asked = dataclasses.replace(lease.get_view(), until_s=terms.until_s, value=terms.value)
                self.leases.renew(lease, terms, self._caller.ask("evict_key", tuple, asked, view))
            else:
                if isinstance(answer, Offload):
                    self._engine.store(lease.blocks)
                self.leases.end(lease, LeaseEnd.EXPIRED)
                num_ended += 1
        return num_ended

    def get_next_deadline_s(self) -> float | None:
        """When `expire` has something to do next; None without leases."""
        return self.leases.get_next_deadline_s()

    @property
    def num_policy_faults(self) -> int:
        """Policy hooks that failed so far."""
        return self._caller.num_faults

    def get_num_reclaimable_blocks(self, for_turn_id: str) -> int:
        """Held blocks, at most, that `take_back` could free while other turns run."""
        own = self._get_claimed_job_id(for_turn_id)
        lease = self.leases.get(own) if own is not None else None
        spared = len(lease.blocks) if lease is not None and lease.terms.strength is Strength.HOLD else 0
        return self._engine.get_num_held_blocks() - spared

    def take_back(
        self, num_blocks: int, now_s: float, *, for_turn_id: str | None = None, stalled: bool = False
    ) -> int:
        """Free at least `num_blocks` held blocks if leases cover so many, tails first; returns how many.

        The lease kept for the turn that needs them is spared: its blocks are what the turn will hit.
        `stalled` says that nothing can run otherwise; then it goes too, after all others.
        """
        self._now_s = now_s
        own = self._get_claimed_job_id(for_turn_id)
        kinds = list(Yields) if stalled or self.limits.always_yield else [Yields.ALWAYS]
        spares = [own] if own is None or not stalled else [own, None]
        num_free_before = self._engine.get_num_free_blocks()
        num_freed = 0
        for spare, yields in itertools.product(spares, kinds):
            while num_freed < num_blocks:
                lease = self.leases.get_first_to_yield(Strength.HOLD, yields, spare)
                if lease is None or not (stalled or self._gives_way(lease, for_turn_id)):
                    break
                self._shrink(lease, num_blocks - num_freed)
                num_freed = self._engine.get_num_free_blocks() - num_free_before
        return num_freed

    def make_room(self, num_blocks: int) -> None:
        """Give up to `num_blocks` kept-last blocks of the lease that yields first (see `KeepLastMixin`)."""
        for yields in Yields:
            lease = self.leases.get_first_to_yield(Strength.KEEP_LAST, yields)
            if lease is not None:
                self._shrink(lease, num_blocks)
                return

    def drop_all(self, why: LeaseEnd = LeaseEnd.RESET) -> None:
        """End every lease (a cache reset, a shutdown)."""
        for lease in self.leases:
            self.leases.end(lease, why)

    # Questions an engine asks.

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state with the leases filled in."""
        view = self._engine.get_view(now_s)
        if not len(self.leases):
            return view
        return dataclasses.replace(
            view,
            num_leases=len(self.leases),
            num_leased_blocks=sum(self.leases.num_blocks.values()),
        )

    def get_queue_key(self, turn_id: str, now_s: float) -> Key:
        """Where a waiting turn stands; smaller goes first."""
        turn = self._view(self._turns[turn_id])
        if self.policy.sees_hits and self._affords_look_up(now_s):
            turn = dataclasses.replace(turn, num_cached_tokens=self._engine.get_num_cached_tokens(turn_id))
        key: Key = self._caller.ask("queue_key", tuple, turn, now_s)
        return key

    def get_victim(self, turn_ids: Sequence[str], now_s: float) -> str | None:
        """Which of these running turns is preempted; None leaves it to the engine."""
        if not self.policy.overrides("preempt_key"):
            return None
        view = self.get_view(now_s)
        known = [turn_id for turn_id in turn_ids if turn_id in self._turns]
        if not known:
            return None
        order = WaitingOrder()
        for turn_id in known:
            turn = self._view(self._turns[turn_id])
            order.push(turn_id, self._caller.ask("preempt_key", tuple, turn, view))
        return order.get_first()

    def get_displaced(self, turn_id: str, running_ids: Sequence[str], now_s: float) -> str | None:
        """Which of these running turns is preempted so that a waiting turn fits; None if none may be."""
        victim_id = self.get_victim(running_ids, now_s)
        if victim_id is None or turn_id not in self._turns:
            return None
        turn, victim = (self._view(self._turns[each]) for each in (turn_id, victim_id))
        answer = self._caller.ask("displaces", bool, turn, victim, self.get_view(now_s))
        return victim_id if answer else None

    def may_load(self, turn_id: str, offer: LoadOffer, now_s: float) -> bool:
        """Whether a turn about to start loads what the tiers have of it."""
        if turn_id not in self._turns or not self.policy.overrides("load"):
            return True
        turn = self._view(self._turns[turn_id])
        return bool(self._caller.ask("load", bool, turn, offer, self.get_view(now_s)))

    def tick(self, now_s: float) -> bool:
        """Call before each step: whether all waiting turns are to be asked for their keys again now."""
        if now_s < self.get_next_tick_s():
            return False
        self._ticked_s = now_s
        if self._caller.hears("on_tick"):
            self._caller.tell("on_tick", self.get_view(now_s))
        return True

    def get_next_tick_s(self) -> float:
        """When `tick` has something to do next; infinity for a policy whose keys stay right."""
        return math.inf if self.policy.rekey_s is None else self._ticked_s + self.policy.rekey_s

    def step(self, step: StepView) -> None:
        """The engine computed a step; call only for a policy that overrides `on_step`."""
        self._caller.tell("on_step", step)

    def may_start(self, turn_id: str, now_s: float, *, idle: bool) -> bool:
        """Whether a waiting turn may start; any may when the engine is idle."""
        if not self.needs_admission(turn_id):
            return True
        turn = self._view(self._turns[turn_id])
        if not idle and not self._caller.ask("admit", bool, turn, self.get_view(now_s)):
            self.stats.num_admission_waits += 1
            return False
        if self._caller.hears("on_turn_admitted"):
            self._caller.tell("on_turn_admitted", turn, now_s)
        return True

    def is_known_last(self, turn_id: str) -> bool:
        """Whether the job is known to end with this turn, so that its output need not be read."""
        turn = self._turns.get(turn_id)
        return turn is None or turn.what.hints.is_last is True

    def needs_admission(self, turn_id: str) -> bool:
        """Whether the policy has to be asked before this turn starts."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.started:
            return False
        return self.policy.admits == "turns" or not turn.job.has_started

    def get_live_turn_ids(self, turn_id: str) -> list[str]:
        """All turns of this turn's job that wait or run, itself included."""
        turn = self._turns.get(turn_id)
        return [] if turn is None else list(turn.job.live_turn_ids)

    def get_step_budget(self, now_s: float, max_step_tokens: int) -> int:
        """Token budget of the next step: a token for each running turn at least, the engine's own at most."""
        view = self.get_view(now_s)
        answer: int | None = self._caller.ask("step_budget", (int, type(None)), view)
        if answer is None:
            return max_step_tokens
        return max(1, min(max(answer, view.num_running), max_step_tokens))

    # Inside.

    def _affords_look_up(self, now_s: float) -> bool:
        most = self.policy.max_waiting_for_hits
        return most is None or self._engine.get_view(now_s).num_waiting <= most

    def _find_job(self, turn_id: str, what: Arrival) -> JobState:
        job_id = what.hints.job_id
        if job_id is None and self._infers and what.hashes:
            job_id = self._lineage.find(what.hashes, what.prompt)
        # The tab keeps ids we make apart from ids that clients choose, which are printable.
        job_id = job_id if job_id is not None else f"\tturn:{turn_id}"
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = JobState(job_id, self._now_s, what.hints.tenant)
        return job

    def _gives_way(self, lease: LeaseState, turn_id: str | None) -> bool:
        """Whether a lease yields to a turn: always to one that runs, or if the policy does not mind."""
        turn = self._turns.get(turn_id) if turn_id is not None else None
        if turn is None or turn.started or not self.policy.overrides("gives_way"):
            return True
        view = self.get_view(self._now_s)
        return bool(self._caller.ask("gives_way", bool, lease.get_view(), self._view(turn), view))

    def _get_claimed_job_id(self, turn_id: str | None) -> str | None:
        turn = self._turns.get(turn_id) if turn_id is not None else None
        lease = self.leases.get(turn.job.job_id) if turn is not None else None
        return lease.job_id if lease is not None and lease.next_turn_id == turn_id else None

    def _claim(self, lease: LeaseState, turn: TurnState) -> None:
        num_common = self._engine.count_common_blocks(lease.blocks, turn.what.hashes)
        if self._engine.can_cut:
            # A hit ends before the prompt does; a block beyond it would only be in this turn's own way.
            num_common = min(num_common, (turn.what.num_prompt_tokens - 1) // self._block_size)
        if num_common == 0:
            self.leases.end(lease, LeaseEnd.SUPERSEDED)
        else:
            self.leases.cut(lease, num_common)
            lease.next_turn_id = turn.turn_id

    def _complete(self, turn: TurnState, now_s: float, how: Finish) -> None:
        job, view = turn.job, turn.get_finished_view(how)
        job.last_finish_s, job.last_tool = now_s, view.tool
        job.last_num_tokens = turn.what.num_prompt_tokens + how.num_output_tokens - 1
        if self._caller.hears("on_turn_finished"):
            self._caller.tell("on_turn_finished", view, now_s)
        if view.is_last and not job.live_turn_ids:
            self._end_job(job, now_s)
            return
        if turn.what.hashes and self._infers:
            self._lineage.remember(job.job_id, turn.what.hashes, turn.what.prompt)
        if not view.is_last and self.policy.overrides("retain"):
            self._retain(view, now_s)

    def _retain(self, turn: Turn, now_s: float) -> None:
        view = self.get_view(now_s)
        answer = self._caller.ask("retain", (Keep, Offload, Release), turn, view)
        terms = self._bound(answer, now_s) if isinstance(answer, Keep) else None
        old = self.leases.get(turn.job.job_id)
        if old is not None:
            # Its blocks stay referenced by the turn that just finished, or serve nobody any more.
            self.leases.end(old, LeaseEnd.REPLACED)
        if isinstance(answer, Offload):
            self._engine.store(self._engine.get_cached_blocks(turn.turn_id))
        if terms is None or terms.until_s <= now_s:
            return
        blocks = self._engine.get_cached_blocks(turn.turn_id)
        if not blocks or not self._is_within_quota(turn.job.tenant, len(blocks), view.num_blocks):
            return
        lease = LeaseState(turn.job.job_id, turn, blocks, now_s, terms)
        self.leases.grant(lease, self._caller.ask("evict_key", tuple, lease.get_view(), view))
        self.stats.num_leases_granted += 1
        self._record_lease(
            "lease-granted", lease, now_s, until_s=terms.until_s, strength=terms.strength.value
        )

    def _bound(self, terms: Keep, granted_s: float) -> Keep:
        return dataclasses.replace(terms, until_s=min(terms.until_s, granted_s + self.limits.max_lease_s))

    def _is_within_quota(self, tenant: str | None, num_blocks: int, total: int) -> bool:
        # A block that several leases share counts for each of them, so the sums may exceed the total:
        # a share of 1 is no bound.
        leased = sum(self.leases.num_blocks.values()) + num_blocks
        of_tenant = self.leases.num_blocks_by_tenant.get(tenant, 0) + num_blocks
        share, tenant_share = self.limits.max_leased_share, self.limits.max_tenant_share
        return (share >= 1 or leased <= share * total) and (
            tenant is None or tenant_share >= 1 or of_tenant <= tenant_share * total
        )

    def _shrink(self, lease: LeaseState, num_blocks: int) -> None:
        num_left = max(0, len(lease.blocks) - num_blocks) if self._engine.can_cut else 0
        self.stats.num_revoked_blocks += len(lease.blocks) - num_left
        if num_left:
            self.leases.cut(lease, num_left)
        else:
            self.leases.end(lease, LeaseEnd.REVOKED)

    def _on_lease_end(self, lease: LeaseState, why: LeaseEnd) -> None:
        self.stats.num_leases_ended[why] += 1
        self._record_lease(
            "lease-ended", lease, self._now_s, why=why.value, held_s=self._now_s - lease.granted_s
        )
        if lease.next_turn_id is not None and why is not LeaseEnd.HIT:
            self._engine.reorder(lease.next_turn_id)

    def _end_job(self, job: JobState, now_s: float) -> None:
        lease = self.leases.get(job.job_id)
        if lease is not None:
            self.leases.end(lease, LeaseEnd.JOB_ENDED)
        self._forget(job, now_s)

    def _leave(self, job: JobState) -> None:
        """A job has no turn in the engine: remember it, and forget the one that was silent longest."""
        if job.live_turn_ids:
            return
        if job.last_finish_s is None:
            # Nothing of it was ever finished: there is nothing to come back to.
            self._forget(job, self._now_s)
            return
        self._idle_jobs[job.job_id] = None
        self._idle_jobs.move_to_end(job.job_id)
        if len(self._idle_jobs) > self.limits.max_remembered_jobs:
            oldest = self._jobs[next(iter(self._idle_jobs))]
            lease = self.leases.get(oldest.job_id)
            if lease is not None:
                self.leases.end(lease, LeaseEnd.EXPIRED)
            self._forget(oldest, self._now_s)

    def _forget(self, job: JobState, now_s: float) -> None:
        if self._caller.hears("on_job_ended"):
            self._caller.tell("on_job_ended", job.get_view(), now_s)
        del self._jobs[job.job_id]
        self._idle_jobs.pop(job.job_id, None)
        self._lineage.forget(job.job_id)

    def _view(self, turn: TurnState) -> Turn:
        return turn.get_view(has_lease=self._get_claimed_job_id(turn.turn_id) is not None)

    def _record(self, event: str, turn: TurnState, now_s: float, **facts: object) -> None:
        if self._log is not None:
            record: LogRecord = {"kind": "job", "event": event, "job": turn.job.job_id, "turn": turn.turn_id}
            self._log({**record, "turn_number": turn.job.num_turns, "now_s": now_s, **facts})

    def _record_lease(self, event: str, lease: LeaseState, now_s: float, **facts: object) -> None:
        if self._log is not None:
            record: LogRecord = {
                "kind": "job",
                "event": event,
                "job": lease.job_id,
                "turn": lease.turn.turn_id,
            }
            self._log({**record, "now_s": now_s, "num_blocks": len(lease.blocks), **facts})
