"""The lease table: which blocks are held for which job, until when, and which lease yields first.

The table never calls the policy or the driver. It returns an event, and the driver applies the event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tenuto.core.engine import Engine
from tenuto.core.fairness import Fairness, Quota
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import NOBODY, TurnState
from tenuto.core.limits import Limits
from tenuto.core.policy import Key
from tenuto.core.types import Keep, Lease, LeaseEnd, LeaseRefusal, TakenBy, Turn, Yields


@dataclass(slots=True)
class LeaseState:
    """One lease; the lease table and `Retention` change it."""

    job_id: str
    turn: Turn
    """The finished turn that computed the blocks."""
    blocks: list[Any]
    granted_s: float
    terms: Keep
    next_turn_id: str | None = None
    most_s: float | None = None
    """The client wants it to last no longer."""

    @property
    def tenant(self) -> str:
        """Whose lease it is."""
        return self.turn.job.tenant or NOBODY

    @property
    def is_bet(self) -> bool:
        """Whether the job has never come back so far."""
        return not self.turn.job.came_back

    def get_view(self, terms: Keep | None = None) -> Lease:
        """The frozen view that a policy sees, with these terms or, by default, the lease's own."""
        terms = terms or self.terms
        return Lease(
            turn=self.turn,
            granted_s=self.granted_s,
            until_s=terms.until_s,
            value=terms.value,
            num_blocks=len(self.blocks),
            next_turn_waiting=self.next_turn_id is not None,
        )


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A lease began."""

    lease: LeaseState
    now_s: float


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """A finished turn got no lease."""

    turn: Turn
    reason: LeaseRefusal
    now_s: float


@dataclass(frozen=True, slots=True)
class LeaseTruncated:
    """The last blocks of a lease were taken back; the lease keeps the others."""

    lease: LeaseState
    num_blocks: int
    taken_by: TakenBy
    now_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease ended: it released all its blocks and left the table."""

    lease: LeaseState
    reason: LeaseEnd
    num_blocks: int
    """How many blocks it still had when it ended."""
    now_s: float
    taken_by: TakenBy | None = None
    """Who took its last blocks, if the reason is `REVOKED`."""


LeaseEvent = LeaseGranted | LeaseRefused | LeaseTruncated | LeaseEnded


@dataclass(slots=True)
class _TenantLeases:
    """The leases of one tenant, by job."""

    jobs: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The oldest lease first."""
    bets: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Those of jobs that have never come back, the oldest first."""
    evict_order: dict[Yields, IndexedHeap] = field(
        default_factory=lambda: {yields: IndexedHeap() for yields in Yields}
    )


class LeaseTable:
    """All leases, at most one per job. A change takes O(log n) time; nothing is scanned."""

    def __init__(self, engine: Engine, quota: Quota) -> None:
        self._engine = engine
        self._quota = quota
        self._leases: OrderedDict[str, LeaseState] = OrderedDict()
        """By job, the oldest lease first."""
        self._deadlines = IndexedHeap()
        self._evict_order = {yields: IndexedHeap() for yields in Yields}
        self._by_tenant: dict[str, _TenantLeases] = {}
        """The leases of each tenant, once there are tenants."""
        self.num_blocks = 0
        """Blocks of all leases together; a block that several leases share counts once for each."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LeaseState]:
        return iter(list(self._leases.values()))

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._leases

    def get(self, job_id: str) -> LeaseState | None:
        """The job's lease, or None."""
        return self._leases.get(job_id)

    def grant(self, lease: LeaseState, evict_key: Key) -> None:
        """Add a lease and hold its blocks. The job must not have a lease yet."""
        assert lease.job_id not in self._leases
        self._leases[lease.job_id] = lease
        self._engine.hold(lease.blocks)
        self.num_blocks += len(lease.blocks)
        self._quota.grant(lease.tenant)
        if self._quota.counts_blocks:
            self._quota.add(lease.tenant, self._engine.get_block_ids(lease.blocks))
        self._enter(lease, evict_key)

    def begin_counting(self) -> None:
        """Count the leases of each tenant from now on."""
        for lease in self:
            self._quota.add(lease.tenant, self._engine.get_block_ids(lease.blocks))
            self._enter_tenant(lease, self._get_order(lease).get_key(lease.job_id))

    def renew(self, lease: LeaseState, terms: Keep, evict_key: Key) -> None:
        """Change a lease's deadline, its value, or when it yields."""
        self._discard(lease)
        lease.terms = terms
        self._enter(lease, evict_key)

    def end(
        self, lease: LeaseState, reason: LeaseEnd, now_s: float, taken_by: TakenBy | None = None
    ) -> LeaseEnded:
        """Release all blocks of a lease and remove it from the table."""
        del self._leases[lease.job_id]
        self._deadlines.discard(lease.job_id)
        self._discard(lease)
        self._leave_tenant(lease)
        ended = LeaseEnded(lease, reason, len(lease.blocks), now_s, taken_by)
        self.truncate(lease, 0)
        self._quota.end(lease.tenant)
        return ended

    def truncate(self, lease: LeaseState, num_blocks: int) -> None:
        """Release the last blocks of a lease, so that it keeps its first `num_blocks`."""
        tail = lease.blocks[num_blocks:]
        if not tail:
            return
        del lease.blocks[num_blocks:]
        self.num_blocks -= len(tail)
        if self._quota.counts_blocks:
            self._quota.remove(lease.tenant, self._engine.get_block_ids(tail))
        self._engine.release(tail)

    def replace(self, lease: LeaseState, blocks: list[Any]) -> None:
        """Let a lease hold these blocks instead of its own. Some may be in both lists."""
        self._engine.hold(blocks)
        old, lease.blocks = lease.blocks, blocks
        self.num_blocks += len(blocks) - len(old)
        if self._quota.counts_blocks:
            self._quota.add(lease.tenant, self._engine.get_block_ids(blocks))
            self._quota.remove(lease.tenant, self._engine.get_block_ids(old))
        self._engine.release(old)

    def get_due(self, now_s: float) -> LeaseState | None:
        """The lease with the earliest deadline, if that deadline has passed; otherwise None."""
        key = self._deadlines.get_first_key()
        if key is None or key[0] > now_s:  # type: ignore[operator]
            return None
        first = self._deadlines.get_first()
        assert first is not None
        return self._leases[first]

    def get_next_deadline_s(self) -> float | None:
        """The earliest deadline, or None if there are no leases."""
        key = self._deadlines.get_first_key()
        return None if key is None else float(key[0])

    def get_first_to_yield(self, yields: Yields, spare_job_id: str | None = None) -> LeaseState | None:
        """The lease that yields first, except the lease of the spared job."""
        first = self._evict_order[yields].get_first_except(spare_job_id)
        return None if first is None else self._leases[first]

    def get_tenants_first_to_yield(
        self, tenant: str, yields: Yields, spare_job_id: str | None = None
    ) -> LeaseState | None:
        """Of one tenant's leases the one that yields first; None if the leases of tenants are not counted."""
        own = self._by_tenant.get(tenant)
        first = None if own is None else own.evict_order[yields].get_first_except(spare_job_id)
        return None if first is None else self._leases[first]

    def get_oldest(self, tenant: str | None) -> LeaseState:
        """The oldest lease of a tenant that has leases; of all tenants if it is None. There must be one."""
        jobs = self._leases if tenant is None else self._by_tenant[tenant].jobs
        return self._leases[next(iter(jobs))]

    def get_oldest_bet(self, tenant: str) -> LeaseState | None:
        """Of a tenant's leases on jobs that have never come back, the oldest; None if there is none."""
        own = self._by_tenant.get(tenant)
        first = None if own is None else next(iter(own.bets), None)
        return None if first is None else self._leases[first]

    def _enter(self, lease: LeaseState, evict_key: Key) -> None:
        self._deadlines.push(lease.job_id, (lease.terms.until_s,))
        self._get_order(lease).push(lease.job_id, evict_key)
        if self._quota.counts_blocks:
            self._enter_tenant(lease, evict_key)

    def _enter_tenant(self, lease: LeaseState, evict_key: Key) -> None:
        own = self._by_tenant.setdefault(lease.tenant, _TenantLeases())
        own.jobs[lease.job_id] = None
        if lease.is_bet:
            own.bets[lease.job_id] = None
        own.evict_order[lease.terms.yields].push(lease.job_id, evict_key)

    def _discard(self, lease: LeaseState) -> None:
        """Take a lease out of the order in which leases yield."""
        self._get_order(lease).discard(lease.job_id)
        own = self._by_tenant.get(lease.tenant)
        if own is not None:
            own.evict_order[lease.terms.yields].discard(lease.job_id)

    def _leave_tenant(self, lease: LeaseState) -> None:
        own = self._by_tenant.get(lease.tenant)
        if own is not None:
            own.jobs.pop(lease.job_id, None)
            own.bets.pop(lease.job_id, None)
            if not own.jobs:
                del self._by_tenant[lease.tenant]

    def _get_order(self, lease: LeaseState) -> IndexedHeap:
        return self._evict_order[lease.terms.yields]


class Yielding:
    """Which lease yields next to a turn that needs blocks; it changes none. O(log n) a choice.

    With one tenant it is the first in the order of the policy's `evict_key`, if the policy lets the turn go
    before it. Between tenants, before that order:

    1. the leases of the tenant that is furthest over its fair share yield first, to tenants that use less;
    2. before a turn takes anything from another tenant, it takes its own tenant's *bets*, which are leases on
       jobs that have never come back. So a tenant that hoards pays for it itself;
    3. a turn of a tenant over its share, and a turn that the policy would let wait, take their own tenant's
       other leases too before those of a tenant that uses less.
    """

    def __init__(
        self,
        leases: LeaseTable,
        fairness: Fairness,
        limits: Limits,
        is_before: Callable[[TurnState, LeaseState, float], bool],
    ) -> None:
        """`is_before`: whether a waiting turn goes before a lease at this time."""
        self._leases = leases
        self._fairness = fairness
        self._quota = fairness.quota
        self._limits = limits
        self._is_before = is_before

    def get_kinds(self, *, stalled: bool = False) -> list[Yields]:
        """The kinds of leases that yield now, in order; `stalled` means that nothing can run otherwise."""
        return list(Yields) if stalled or self._limits.always_yield else [Yields.ALWAYS]

    def choose(
        self, yields: Yields, spare: str | None, turn: TurnState | None, now_s: float, *, stalled: bool
    ) -> tuple[LeaseState, TakenBy] | None:
        """The lease that yields next to a turn, and why it does; None if the turn must wait.

        `spare`: the job whose lease does not yield.
        """
        lease = self._leases.get_first_to_yield(yields, spare)
        if lease is None:
            return None
        over = self._get_first_over(yields, spare)
        if turn is None:
            return (lease, TakenBy.RUNNING) if over is None else (over, TakenBy.FAIR_SHARE)
        tenant = turn.job.tenant or NOBODY
        use = self._quota.get_use(tenant)
        is_fair = over is not None and over.tenant != tenant and self._quota.get_use(over.tenant) > use
        lease = over if over is not None and is_fair else lease
        if lease.tenant != tenant:
            lease = self._get_bet(tenant, yields, spare) or lease
        if is_fair and lease is over:
            return lease, TakenBy.FAIR_SHARE
        if stalled:
            return lease, TakenBy.DEADLOCK
        is_late = now_s - turn.arrival_s >= self._limits.max_held_back_s
        if lease.tenant != tenant and not is_late and self._quota.get_use(lease.tenant) <= use:
            is_over = self._quota.is_over(tenant)
            own = self._leases.get_tenants_first_to_yield(tenant, yields, spare)
            if is_over and own is None and not turn.started and not lease.is_bet:
                return None
            if is_over or self._fairness.is_overdue(turn.turn_id):
                lease = own or lease
        taken_by = self._get_taker(lease, turn, now_s, is_late=is_late)
        return None if taken_by is None else (lease, taken_by)

    def _get_bet(self, tenant: str, yields: Yields, spare: str | None) -> LeaseState | None:
        """A tenant's oldest lease on a job that has never come back, if it may yield."""
        bet = self._leases.get_oldest_bet(tenant)
        return None if bet is None or bet.terms.yields is not yields or bet.job_id == spare else bet

    def _get_first_over(self, yields: Yields, spare: str | None) -> LeaseState | None:
        """The first lease of the tenant that is furthest over its fair share, if one is."""
        name = self._quota.get_most_over()
        return None if name is None else self._leases.get_tenants_first_to_yield(name, yields, spare)

    def _get_taker(
        self, lease: LeaseState, turn: TurnState, now_s: float, *, is_late: bool
    ) -> TakenBy | None:
        """Why a lease yields to a turn; None if it does not.

        It always yields to a turn that has started or waited too long.
        """
        if turn.started:
            return TakenBy.RUNNING
        if is_late or self._fairness.is_overdue(turn.turn_id):
            return TakenBy.OVERDUE
        if not self._is_before(turn, lease, now_s):
            return None
        return TakenBy.WAITING if lease.terms.why is None else TakenBy.PRICE
