"""Retention: leases granted, claimed, reconsidered and taken back, as the policy says within the limits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tenuto.core.history import History
from tenuto.core.jobs import TurnState
from tenuto.core.leases import Engine, LeaseState, LeaseTable
from tenuto.core.limits import Limits
from tenuto.core.policy import Key
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.quota import Quota
from tenuto.core.stats import DriverStats
from tenuto.core.types import (
    EngineView,
    Keep,
    Lease,
    LeaseEnd,
    Offload,
    Turn,
    Yields,
)


class Retention:
    """The leases of one driver, which tells it what happens to turns and what time it is."""

    def __init__(
        self,
        engine: Engine,
        caller: PolicyCaller,
        limits: Limits,
        stats: DriverStats,
        history: History,
        *,
        by_priority: bool = False,
    ) -> None:
        self._quota = Quota(limits)
        self.leases = LeaseTable(engine, self._quota, self._on_end)
        self.now_s = 0.0
        """When the engine last said something."""
        self._engine = engine
        self._block_size = engine.get_view(0.0).block_size
        self._caller = caller
        self._limits = limits
        self._stats = stats
        self._history = history
        self._by_priority = by_priority

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state with the leases filled in."""
        return self._engine.get_view(now_s, len(self.leases))

    def get_turn_view(self, turn: TurnState) -> Turn:
        """A turn that waits or runs, as the policy sees it."""
        return turn.get_view(has_lease=self.get_claimed(turn) is not None)

    # What happens to turns.

    def claim(self, turn: TurnState) -> None:
        """A turn arrived: what its job has leased waits for it, unless it waits for another one already."""
        lease = self.leases.get(turn.job.job_id)
        if lease is None or lease.next_turn_id is not None:
            return
        num_common = self._engine.count_common_blocks(lease.blocks, turn.what.hashes)
        if self._engine.can_truncate:
            # A hit ends before the prompt does; a block beyond it would only be in this turn's own way.
            num_common = min(num_common, (turn.what.num_prompt_tokens - 1) // self._block_size)
        if num_common == 0:
            self.leases.end(lease, LeaseEnd.SUPERSEDED)
        else:
            self.leases.truncate(lease, num_common)
            lease.next_turn_id = turn.turn_id

    def get_claimed(self, turn: TurnState | None) -> LeaseState | None:
        """The lease that waits for this turn, if one does."""
        lease = self.leases.get(turn.job.job_id) if turn is not None else None
        return (
            lease if lease is not None and turn is not None and lease.next_turn_id == turn.turn_id else None
        )

    def hit(self, turn: TurnState) -> None:
        """A turn started and has the blocks that were kept for it."""
        lease = self.get_claimed(turn)
        if lease is not None:
            self.leases.end(lease, LeaseEnd.HIT)

    def unclaim(self, turn: TurnState) -> None:
        """A turn left without having started; what was kept for it waits for a retry."""
        lease = self.get_claimed(turn)
        if lease is not None:
            lease.next_turn_id = None

    def retain(self, state: TurnState, turn: Turn) -> None:
        """Ask what becomes of a finishing turn's blocks, and do it."""
        view = self.get_view(self.now_s)
        answer = self._caller.ask("retain", turn, view)
        terms = self._bound(answer, self.now_s) if isinstance(answer, Keep) else None
        old = self.leases.get(turn.job.job_id)
        # Another turn of the job may wait for what is kept: that one is here, what follows this is not.
        is_claimed = old is not None and old.next_turn_id is not None
        if old is not None and not is_claimed:
            # Its blocks stay referenced by the turn that just finished, or serve nobody any more.
            self.leases.end(old, LeaseEnd.REPLACED)
        if isinstance(answer, Offload) and self._engine.can_store:
            self._engine.store(self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens))
        if terms is not None and terms.until_s > self.now_s and not is_claimed:
            blocks = self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens)
            if blocks and self._is_within_shares(turn.job.tenant, blocks, view.num_blocks):
                self._grant(LeaseState(turn.job.job_id, turn, blocks, self.now_s, terms), view)

    def end(self, job_id: str, why: LeaseEnd) -> None:
        """End a job's lease, if it has one."""
        lease = self.leases.get(job_id)
        if lease is not None:
            self.leases.end(lease, why)

    def drop_all(self, why: LeaseEnd) -> None:
        """End every lease."""
        for lease in self.leases:
            self.leases.end(lease, why)

    # Time.

    def expire(self, max_renewals: float) -> int:
        """End or renew leases whose deadline has passed; returns how many ended."""
        num_ended = num_renewed = 0
        view: EngineView | None = None
        while num_renewed < max_renewals and (lease := self.leases.get_due(self.now_s)) is not None:
            # Renewing many leases changes nothing of what the engine's view shows.
            view = view or self.get_view(self.now_s)
            answer = self._caller.ask("reconsider", lease.get_view(), view)
            terms = self._bound(answer, lease.granted_s) if isinstance(answer, Keep) else None
            if terms is not None and terms.until_s > self.now_s:
                self.leases.renew(lease, terms, self._get_evict_key(lease.get_view(terms), view))
                num_renewed += 1
            else:
                if isinstance(answer, Offload):
                    self._engine.store(lease.blocks)
                self.leases.end(lease, LeaseEnd.EXPIRED)
                num_ended += 1
                view = None
        return num_ended

    # Memory.

    def get_num_reclaimable_blocks(self, turn: TurnState | None) -> int:
        """Leased blocks, at most, that `reclaim` could free for a turn while others run."""
        lease = self.get_claimed(turn)
        return self._engine.get_num_leased_blocks() - (len(lease.blocks) if lease is not None else 0)

    def reclaim(self, num_blocks: int, turn: TurnState | None, *, stalled: bool) -> int:
        """Free at least so many held blocks for a turn if leases cover so many; see `Driver.reclaim`."""
        lease = self.get_claimed(turn)
        own = None if lease is None else lease.job_id
        kinds = list(Yields) if stalled or self._limits.always_yield else [Yields.ALWAYS]
        spares = [own] if own is None or not stalled else [own, None]
        num_free_before = self._engine.get_num_free_blocks()
        num_freed = 0
        for spare, yields in itertools.product(spares, kinds):
            while num_freed < num_blocks:
                lease = self.leases.get_first_to_yield(yields, spare)
                if lease is None or not (stalled or self._may_reclaim(lease, turn)):
                    break
                self._shrink(lease, num_blocks - num_freed)
                num_freed = self._engine.get_num_free_blocks() - num_free_before
        return num_freed

    # Inside.

    def _grant(self, lease: LeaseState, view: EngineView) -> None:
        self.leases.grant(lease, self._get_evict_key(lease.get_view(), view))
        self._stats.num_leases_granted += 1
        self._history.record_lease("lease-granted", lease, self.now_s, until_s=lease.terms.until_s)

    def _bound(self, terms: Keep, granted_s: float) -> Keep:
        latest_s = granted_s + self._limits.max_lease_s
        return terms if terms.until_s <= latest_s else dataclasses.replace(terms, until_s=latest_s)

    def _is_within_shares(self, tenant: str | None, blocks: list[Any], num_blocks: int) -> bool:
        if not self._quota.are_limited:
            return True
        return self._quota.fit(tenant, self._engine.get_block_ids(blocks), num_blocks)

    def _get_evict_key(self, lease: Lease, view: EngineView) -> Key:
        key: Key = self._caller.ask("evict_key", lease, view)
        return (-lease.turn.priority, *key) if self._by_priority else key

    def _may_reclaim(self, lease: LeaseState, turn: TurnState | None) -> bool:
        """Whether a lease yields to a turn: always to one that runs, or if the policy does not mind."""
        if turn is None or turn.started or not self._caller.policy.overrides("may_reclaim"):
            return True
        if self.now_s - turn.arrival_s >= self._limits.max_held_back_s:
            return True
        if self._by_priority and lease.turn.priority != turn.what.priority:
            return lease.turn.priority > turn.what.priority
        view = self.get_view(self.now_s)
        return bool(self._caller.ask("may_reclaim", lease.get_view(), self.get_turn_view(turn), view))

    def _shrink(self, lease: LeaseState, num_blocks: int) -> None:
        num_left = max(0, len(lease.blocks) - num_blocks) if self._engine.can_truncate else 0
        self._stats.num_revoked_blocks += len(lease.blocks) - num_left
        if num_left:
            self.leases.truncate(lease, num_left)
        else:
            self.leases.end(lease, LeaseEnd.REVOKED)

    def _on_end(self, lease: LeaseState, why: LeaseEnd) -> None:
        self._stats.num_leases_ended[why] += 1
        held_s = self.now_s - lease.granted_s
        self._history.record_lease("lease-ended", lease, self.now_s, why=why.value, held_s=held_s)
        if lease.next_turn_id is not None and why is not LeaseEnd.HIT:
            self._engine.reorder(lease.next_turn_id)
