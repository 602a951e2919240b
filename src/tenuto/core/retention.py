"""Retention: grants, claims, renews and reclaims leases, as the policy decides and within the limits.

Methods that may end a lease return or yield events, one by one. At each event the lease table is in a
consistent state, and the driver then applies the event.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator

from tenuto.core.engine import Engine
from tenuto.core.fairness import Fairness
from tenuto.core.jobs import TurnState
from tenuto.core.leases import (
    LeaseEnded,
    LeaseEvent,
    LeaseGranted,
    LeaseRefused,
    LeaseState,
    LeaseTable,
    LeaseTruncated,
    Yielding,
)
from tenuto.core.limits import Limits
from tenuto.core.pinned_prefixes import PinnedPrefixes
from tenuto.core.policy import Key
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.stats import DriverStats
from tenuto.core.types import (
    Decision,
    EngineView,
    Keep,
    Lease,
    LeaseEnd,
    LeaseRefusal,
    Offload,
    TakenBy,
    Turn,
)

MAX_YIELDING = 8
"""Most leases that make room for one new lease. It bounds the cost of a grant."""

_GIVEN_UP = {
    LeaseRefusal.IDLE: LeaseEnd.IDLE,
    LeaseRefusal.PRICE: LeaseEnd.PRICE,
    LeaseRefusal.NOT_EXPECTED_BACK: LeaseEnd.NOT_EXPECTED_BACK,
}
"""How a lease ends that the policy does not renew, by the reason that the policy gives."""


class Retention:
    """The leases of one driver, which tells it what happens to turns and when."""

    def __init__(
        self,
        engine: Engine,
        caller: PolicyCaller,
        limits: Limits,
        fairness: Fairness,
        stats: DriverStats,
        *,
        by_priority: bool = False,
    ) -> None:
        """`stats`: where pinned prefixes are counted."""
        view = engine.get_view(0.0)
        self._quota = fairness.quota
        self.leases = LeaseTable(engine, fairness.quota)
        can_pin = not engine.can_truncate and caller.policy.overrides("retain")
        max_pinned_blocks = int(limits.max_pinned_share * view.num_blocks) if can_pin else 0
        self.pins = PinnedPrefixes(engine, max_pinned_blocks, stats)
        self._engine = engine
        self._block_size = view.block_size
        self._caller = caller
        self._limits = limits
        self._by_priority = by_priority
        self._yielding = Yielding(self.leases, fairness, limits, self._is_before)

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state, including the number of leases."""
        return self._engine.get_view(now_s, len(self.leases))

    def get_num_leased_tokens(self) -> int:
        """Tokens whose KV cache leases keep, each once."""
        return self._engine.get_num_leased_blocks() * self._block_size

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
        num_common = self._engine.count_common_tokens(lease.blocks, turn.arrival.hashes)
        # A prefix hit ends before the prompt's last token, so a later block would only waste memory.
        num_common = min(num_common, turn.arrival.num_prompt_tokens - 1)
        if not self._keep_tokens(lease, num_common):
            return self.leases.end(lease, LeaseEnd.SUPERSEDED, now_s)
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

    def leave(self, turn: TurnState) -> None:
        """A turn left the system. If a lease still waits for it, the lease stays: the client may retry."""
        lease = self.get_claimed(turn)
        if lease is not None:
            lease.next_turn_id = None

    def retain(self, state: TurnState, turn: Turn, now_s: float) -> Iterator[LeaseEvent]:
        """Ask the policy what to do with a finishing turn's blocks, and do it."""
        view = self.get_view(now_s)
        answer = self._caller.ask("retain", turn, view)
        retain_s = state.arrival.hints.retain_s
        terms = self._bound(answer, now_s, retain_s) if isinstance(answer, Keep) else None
        old = self.leases.get(turn.job.job_id)
        # Another turn of the job may wait for the old lease. That turn has already arrived, while the turn
        # that will follow this one has not, so the old lease has precedence.
        is_claimed = old is not None and old.next_turn_id is not None
        if old is not None and not is_claimed:
            # The finished turn still references the blocks that both share, and the others are not needed.
            yield self.leases.end(old, LeaseEnd.REPLACED, now_s)
        if isinstance(answer, Offload) and self._engine.can_store:
            self._engine.store(self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens), turn)
        if terms is None:
            yield LeaseRefused(turn, answer.why or LeaseRefusal.POLICY, now_s)
        elif terms.until_s <= now_s:
            yield LeaseRefused(turn, LeaseRefusal.TOO_LATE, now_s)
        elif is_claimed:
            yield LeaseRefused(turn, LeaseRefusal.TURN_WAITING, now_s)
        else:
            yield from self._grant(state, turn, terms, view)

    def end(self, job_id: str, reason: LeaseEnd, now_s: float) -> LeaseEnded | None:
        """End a job's lease, if it has one."""
        lease = self.leases.get(job_id)
        return None if lease is None else self.leases.end(lease, reason, now_s)

    def drop_all(self, reason: LeaseEnd, now_s: float) -> Iterator[LeaseEnded]:
        """End every lease, and give all pinned prefixes up."""
        self.pins.drop_all()
        for lease in self.leases:
            yield self.leases.end(lease, reason, now_s)

    def take_over(
        self, other: Retention, is_retained: Callable[[str], bool], now_s: float
    ) -> Iterator[LeaseTruncated | LeaseEnded]:
        """Go on with another driver's leases, the oldest first; it has none afterwards.

        `is_retained`: whether the lease of a job goes on. The limits hold for it as if it began again; only
        its age stays.
        """
        other.pins.drop_all()
        for old in other.leases:
            terms = self._bound(old.terms, old.granted_s, old.most_s)
            lease = dataclasses.replace(old, blocks=copy.copy(old.blocks), terms=terms)
            self.leases.grant(lease, self._get_evict_key(lease.get_view(), self.get_view(now_s)))
            other.leases.end(old, LeaseEnd.SWITCHED, now_s)
        for lease in self.leases:
            if not is_retained(lease.job_id):
                yield self.leases.end(lease, LeaseEnd.SWITCHED, now_s)
        for lease in self.leases:
            while lease.job_id in self.leases and (excess := self._get_excess(lease.tenant)) is not None:
                yield self._shrink(*self._choose_over(lease.tenant, *excess), TakenBy.QUOTA, now_s)

    # Time.

    def expire(self, now_s: float, max_renewals: float) -> Iterator[LeaseEnded]:
        """End or renew leases whose deadline has passed."""
        num_renewed = 0
        view: EngineView | None = None
        while num_renewed < max_renewals and (lease := self.leases.get_due(now_s)) is not None:
            # A renewal changes nothing in the engine's view, so one view serves many renewals.
            view = view or self.get_view(now_s)
            answer = self._caller.ask("reconsider", lease.get_view(), view)
            terms = None
            if isinstance(answer, Keep):
                terms = self._bound(answer, lease.granted_s, lease.most_s)
            if terms is not None and terms.until_s > now_s:
                self.leases.renew(lease, terms, self._get_evict_key(lease.get_view(terms), view))
                num_renewed += 1
            else:
                if isinstance(answer, Offload):
                    self._engine.store(lease.blocks, lease.turn)
                yield self.leases.end(lease, self._get_end(lease, answer), now_s)
                view = None

    # Memory.

    def get_num_reclaimable_blocks(self, turn: TurnState | None) -> int:
        """Upper bound on the leased blocks that `reclaim` could free for a turn while others run."""
        lease = self.get_claimed(turn)
        return self._engine.get_num_leased_blocks() - (len(lease.blocks) if lease is not None else 0)

    def reclaim(
        self, num_blocks: int, turn: TurnState | None, now_s: float, *, stalled: bool
    ) -> Iterator[LeaseTruncated | LeaseEnded]:
        """Free at least `num_blocks` leased blocks, or as many as possible; see `Driver.reclaim`.

        Pinned prefixes go first.
        """
        lease = self.get_claimed(turn)
        own = None if lease is None else lease.job_id
        spares = [own] if own is None or not stalled else [own, None]
        num_free_before = self._engine.get_num_free_blocks()
        num_freed = 0
        while num_freed < num_blocks and self.pins.demote():
            num_freed = self._engine.get_num_free_blocks() - num_free_before
        for spare, yields in itertools.product(spares, self._yielding.get_kinds(stalled=stalled)):
            while num_freed < num_blocks:
                chosen = self._yielding.choose(yields, spare, turn, now_s, stalled=stalled)
                if chosen is None:
                    break
                lease, taken_by = chosen
                yield self._shrink(lease, num_blocks - num_freed, taken_by, now_s)
                num_freed = self._engine.get_num_free_blocks() - num_free_before

    # Inside.

    def _grant(self, state: TurnState, turn: Turn, terms: Keep, view: EngineView) -> Iterator[LeaseEvent]:
        """Grant a lease on the cached blocks of a finishing turn, if the limits allow it."""
        blocks = self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens)
        if not blocks:
            yield LeaseRefused(turn, LeaseRefusal.NOT_CACHED, view.now_s)
            return
        most_s = state.arrival.hints.retain_s
        lease = LeaseState(turn.job.job_id, turn, blocks, view.now_s, terms, most_s=most_s)
        self.leases.grant(lease, self._get_evict_key(lease.get_view(), view))
        reason = yield from self._make_room(lease, view.now_s)
        if reason is None:
            yield LeaseGranted(lease, view.now_s)
        else:
            self.leases.end(lease, LeaseEnd.REVOKED, view.now_s)
            yield LeaseRefused(turn, reason, view.now_s)

    def _make_room(
        self, lease: LeaseState, now_s: float
    ) -> Generator[LeaseTruncated | LeaseEnded, None, LeaseRefusal | None]:
        """Take blocks from the oldest leases, until a new lease keeps all limits.

        Not from those that yield first: a client that hoards leases under old ids would keep them, and other
        clients would get none. Returns the limit that still is exceeded; None if none is.
        """
        before: tuple[LeaseRefusal, int] | None = None
        for num_left in range(MAX_YIELDING, -1, -1):
            excess = self._get_excess(lease.tenant)
            if excess is None:
                return None
            if excess[0] is LeaseRefusal.OVER_SHARE and self._demote_pins(excess[1]):
                continue
            first, num_blocks = self._choose_over(lease.tenant, *excess)
            # Blocks that other leases share do not make room.
            if first is lease or not num_left or excess == before:
                break
            before = excess
            yield self._shrink(first, num_blocks, TakenBy.QUOTA, now_s)
        return excess[0] if excess is not None else None

    def _get_excess(self, tenant: str) -> tuple[LeaseRefusal, int] | None:
        """The limit that the leases of a tenant, or of all, exceed, and by how much."""
        return self._quota.get_excess(tenant, self._engine.get_num_leased_blocks())

    def _choose_over(self, tenant: str, reason: LeaseRefusal, number: int) -> tuple[LeaseState, int]:
        """The lease that makes room where a limit is exceeded, and how many of its blocks."""
        of_all = reason is LeaseRefusal.OVER_SHARE
        first = self.leases.get_oldest(self._quota.get_most_over() if of_all else tenant)
        return first, len(first.blocks) if reason is LeaseRefusal.TENANT_LEASES else number

    def _demote_pins(self, num_blocks: int) -> bool:
        """Give pinned prefixes up, for there are so many held blocks too many; False if there are none."""
        most = self._engine.get_num_leased_blocks() - num_blocks
        was_any = len(self.pins) > 0
        while self._engine.get_num_leased_blocks() > most and self.pins.demote():
            pass
        return was_any

    def _bound(self, terms: Keep, granted_s: float, most_s: float | None) -> Keep:
        longest_s = self._limits.max_lease_s
        latest_s = granted_s + (longest_s if most_s is None else min(longest_s, most_s))
        return terms if terms.until_s <= latest_s else dataclasses.replace(terms, until_s=latest_s)

    def _get_evict_key(self, lease: Lease, view: EngineView) -> Key:
        key: Key = self._caller.ask("evict_key", lease, view)
        return (-lease.turn.priority, *key) if self._by_priority else key

    def _is_before(self, turn: TurnState, lease: LeaseState, now_s: float) -> bool:
        """Whether a waiting turn goes before a lease, by their priorities or by the policy."""
        if not self._caller.policy.overrides("may_reclaim"):
            return True
        if self._by_priority and lease.turn.priority != turn.arrival.priority:
            return lease.turn.priority > turn.arrival.priority
        views = lease.get_view(), self.get_turn_view(turn), self.get_view(now_s)
        return bool(self._caller.ask("may_reclaim", *views))

    def _get_end(self, lease: LeaseState, answer: Decision) -> LeaseEnd:
        """Why a lease ends whose deadline has passed."""
        if lease.terms.until_s >= lease.granted_s + self._limits.max_lease_s:
            return LeaseEnd.TIME_LIMIT
        return _GIVEN_UP.get(answer.why, LeaseEnd.EXPIRED) if answer.why is not None else LeaseEnd.EXPIRED

    def _keep_tokens(self, lease: LeaseState, num_tokens: int) -> bool:
        """Shorten a lease to what its first tokens can hit; False, and no change, if that is nothing."""
        if self._engine.can_truncate:
            num_blocks = num_tokens // self._block_size
            if num_blocks > 0:
                self.leases.truncate(lease, num_blocks)
            return num_blocks > 0
        blocks = self._engine.get_prefix(lease.blocks, num_tokens)
        if blocks and blocks is not lease.blocks:
            self.leases.replace(lease, blocks)
        return bool(blocks)

    def _shrink(
        self, lease: LeaseState, num_blocks: int, taken_by: TakenBy, now_s: float
    ) -> LeaseTruncated | LeaseEnded:
        """Free the last `num_blocks` blocks of a lease, or all its blocks if the rest could not be hit."""
        num_before = len(lease.blocks)
        if self._engine.can_truncate:
            num_left = max(0, num_before - num_blocks)
            if num_left > 0:
                self.leases.truncate(lease, num_left)
                return LeaseTruncated(lease, num_before - num_left, taken_by, now_s)
        elif rest := self._engine.get_rest(lease.blocks, num_blocks):
            self.leases.replace(lease, rest)
            return LeaseTruncated(lease, num_before - len(rest), taken_by, now_s)
        return self.leases.end(lease, LeaseEnd.REVOKED, now_s, taken_by)
