"""Retention: grants, claims, renews and reclaims leases, as the policy decides and within the limits.

Methods that may end a lease return or yield events, one by one. At each event the lease table is in a
consistent state, and the driver then applies the event.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from tenuto.core.engine import Engine
from tenuto.core.jobs import TurnState
from tenuto.core.leases import (
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseRefused,
    LeaseState,
    LeaseTable,
    LeaseTruncated,
)
from tenuto.core.limits import Limits
from tenuto.core.policy import Key
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.quota import Quota
from tenuto.core.types import (
    EngineView,
    Keep,
    Lease,
    LeaseEnd,
    LeaseRefusal,
    Offload,
    Turn,
    Yields,
)


class Retention:
    """The leases of one driver, which tells it what happens to turns and when."""

    def __init__(
        self,
        engine: Engine,
        caller: PolicyCaller,
        limits: Limits,
        *,
        by_priority: bool = False,
    ) -> None:
        self._quota = Quota(limits)
        self.leases = LeaseTable(engine, self._quota)
        self._engine = engine
        self._block_size = engine.get_view(0.0).block_size
        self._caller = caller
        self._limits = limits
        self._by_priority = by_priority

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state, including the number of leases."""
        return self._engine.get_view(now_s, len(self.leases))

    def get_turn_view(self, turn: TurnState) -> Turn:
        """The policy's view of a turn that waits or runs."""
        return turn.get_view(has_lease=self.get_claimed(turn) is not None)

    # What happens to turns.

    def claim(self, turn: TurnState, now_s: float) -> LeaseEnded | None:
        """A turn arrived. Its job's lease now waits for it, unless the lease already waits for another turn.

        The lease is truncated to the blocks that the prompt shares, and ends if it shares none.
        """
        lease = self.leases.get(turn.job.job_id)
        if lease is None or lease.next_turn_id is not None:
            return None
        num_common = self._engine.count_common_blocks(lease.blocks, turn.arrival.hashes)
        if self._engine.can_truncate:
            # A prefix hit ends before the prompt's last token, so a later block would only waste memory.
            num_common = min(num_common, (turn.arrival.num_prompt_tokens - 1) // self._block_size)
        if num_common == 0:
            return self.leases.end(lease, LeaseEnd.SUPERSEDED, now_s)
        self.leases.truncate(lease, num_common)
        lease.next_turn_id = turn.turn_id
        return None

    def get_claimed(self, turn: TurnState | None) -> LeaseState | None:
        """The lease that waits for this turn, if one does."""
        lease = self.leases.get(turn.job.job_id) if turn is not None else None
        return (
            lease if lease is not None and turn is not None and lease.next_turn_id == turn.turn_id else None
        )

    def hit(self, turn: TurnState, now_s: float) -> LeaseEnded | None:
        """A turn started and now holds the blocks that its lease kept, so the lease ends."""
        lease = self.get_claimed(turn)
        return None if lease is None else self.leases.end(lease, LeaseEnd.HIT, now_s)

    def unclaim(self, turn: TurnState) -> None:
        """A turn left the system. If a lease still waits for it, the lease stays: the client may retry."""
        lease = self.get_claimed(turn)
        if lease is not None:
            lease.next_turn_id = None

    def retain(self, state: TurnState, turn: Turn, now_s: float) -> Iterator[LeaseEvent]:
        """Ask the policy what to do with a finishing turn's blocks, and do it."""
        view = self.get_view(now_s)
        answer = self._caller.ask("retain", turn, view)
        terms = self._bound(answer, now_s) if isinstance(answer, Keep) else None
        old = self.leases.get(turn.job.job_id)
        # Another turn of the job may wait for the old lease. That turn has already arrived, while the turn
        # that will follow this one has not, so the old lease has precedence.
        is_claimed = old is not None and old.next_turn_id is not None
        if old is not None and not is_claimed:
            # The finished turn still references the blocks that both share, and the others are not needed.
            yield self.leases.end(old, LeaseEnd.REPLACED, now_s)
        if isinstance(answer, Offload) and self._engine.can_store:
            self._engine.store(self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens))
        if terms is None:
            yield LeaseRefused(turn, answer.why or LeaseRefusal.POLICY, now_s)
        elif terms.until_s <= now_s:
            yield LeaseRefused(turn, LeaseRefusal.TOO_LATE, now_s)
        elif is_claimed:
            yield LeaseRefused(turn, LeaseRefusal.TURN_WAITING, now_s)
        else:
            yield self._grant(state, turn, terms, view)

    def end(self, job_id: str, reason: LeaseEnd, now_s: float) -> LeaseEnded | None:
        """End a job's lease, if it has one."""
        lease = self.leases.get(job_id)
        return None if lease is None else self.leases.end(lease, reason, now_s)

    def drop_all(self, reason: LeaseEnd, now_s: float) -> Iterator[LeaseEnded]:
        """End every lease."""
        for lease in self.leases:
            yield self.leases.end(lease, reason, now_s)

    # Time.

    def expire(self, now_s: float, max_renewals: float) -> Iterator[LeaseEnded]:
        """End or renew leases whose deadline has passed."""
        num_renewed = 0
        view: EngineView | None = None
        while num_renewed < max_renewals and (lease := self.leases.get_due(now_s)) is not None:
            # A renewal changes nothing in the engine's view, so one view serves many renewals.
            view = view or self.get_view(now_s)
            answer = self._caller.ask("reconsider", lease.get_view(), view)
            terms = self._bound(answer, lease.granted_s) if isinstance(answer, Keep) else None
            if terms is not None and terms.until_s > now_s:
                self.leases.renew(lease, terms, self._get_evict_key(lease.get_view(terms), view))
                num_renewed += 1
            else:
                if isinstance(answer, Offload):
                    self._engine.store(lease.blocks)
                yield self.leases.end(lease, LeaseEnd.EXPIRED, now_s)
                view = None

    # Memory.

    def get_num_reclaimable_blocks(self, turn: TurnState | None) -> int:
        """Upper bound on the leased blocks that `reclaim` could free for a turn while others run."""
        lease = self.get_claimed(turn)
        return self._engine.get_num_leased_blocks() - (len(lease.blocks) if lease is not None else 0)

    def reclaim(
        self, num_blocks: int, turn: TurnState | None, now_s: float, *, stalled: bool
    ) -> Iterator[LeaseTruncated | LeaseEnded]:
        """Free at least `num_blocks` leased blocks, or as many as possible; see `Driver.reclaim`."""
        lease = self.get_claimed(turn)
        own = None if lease is None else lease.job_id
        all_yield = stalled or self._limits.always_yield or (turn is not None and turn.job.runs_as_stock)
        kinds = list(Yields) if all_yield else [Yields.ALWAYS]
        spares = [own] if own is None or not stalled else [own, None]
        num_free_before = self._engine.get_num_free_blocks()
        num_freed = 0
        for spare, yields in itertools.product(spares, kinds):
            while num_freed < num_blocks:
                lease = self.leases.get_first_to_yield(yields, spare)
                if lease is None or not (stalled or self._may_reclaim(lease, turn, now_s)):
                    break
                yield self._shrink(lease, num_blocks - num_freed, now_s)
                num_freed = self._engine.get_num_free_blocks() - num_free_before

    # Inside.

    def _grant(
        self, state: TurnState, turn: Turn, terms: Keep, view: EngineView
    ) -> LeaseGranted | LeaseRefused:
        """Grant a lease on the cached blocks of a finishing turn, if the shares allow it."""
        blocks = self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens)
        if not blocks:
            return LeaseRefused(turn, LeaseRefusal.NOT_CACHED, view.now_s)
        if not self._is_within_shares(turn.job.tenant, blocks, view.num_blocks):
            return LeaseRefused(turn, LeaseRefusal.OVER_SHARE, view.now_s)
        lease = LeaseState(turn.job.job_id, turn, blocks, view.now_s, terms)
        self.leases.grant(lease, self._get_evict_key(lease.get_view(), view))
        return LeaseGranted(lease, view.now_s)

    def _bound(self, terms: Keep, granted_s: float) -> Keep:
        latest_s = granted_s + self._limits.max_lease_s
        return terms if terms.until_s <= latest_s else dataclasses.replace(terms, until_s=latest_s)

    def _is_within_shares(self, tenant: str | None, blocks: list[Any], num_blocks: int) -> bool:
        if not self._quota.is_limited:
            return True
        return self._quota.fit(tenant, self._engine.get_block_ids(blocks), num_blocks)

    def _get_evict_key(self, lease: Lease, view: EngineView) -> Key:
        key: Key = self._caller.ask("evict_key", lease, view)
        return (-lease.turn.priority, *key) if self._by_priority else key

    def _may_reclaim(self, lease: LeaseState, turn: TurnState | None, now_s: float) -> bool:
        """Whether a lease yields to a turn.

        It always yields to a turn that has started or waited too long, and to one that runs as in stock.
        Otherwise the turns' priorities
        decide (if the engine uses them), and then the policy.
        """
        if turn is None or turn.started or turn.job.runs_as_stock:
            return True
        if not self._caller.policy.overrides("may_reclaim"):
            return True
        if turn.is_overdue or now_s - turn.arrival_s >= self._limits.max_held_back_s:
            return True
        if self._by_priority and lease.turn.priority != turn.arrival.priority:
            return lease.turn.priority > turn.arrival.priority
        view = self.get_view(now_s)
        return bool(self._caller.ask("may_reclaim", lease.get_view(), self.get_turn_view(turn), view))

    def _shrink(self, lease: LeaseState, num_blocks: int, now_s: float) -> LeaseTruncated | LeaseEnded:
        """Free the last `num_blocks` blocks of a lease, or all its blocks if the rest could not be hit."""
        num_left = max(0, len(lease.blocks) - num_blocks) if self._engine.can_truncate else 0
        if num_left == 0:
            return self.leases.end(lease, LeaseEnd.REVOKED, now_s)
        truncated = LeaseTruncated(len(lease.blocks) - num_left)
        self.leases.truncate(lease, num_left)
        return truncated
