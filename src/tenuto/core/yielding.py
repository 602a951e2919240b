"""Which lease yields next to a turn that needs blocks.

With one tenant it is the first in the order of the policy's `evict_key`, if the policy lets the turn go
before it. Between tenants, before that order:

1. the leases of the tenant that is furthest over its fair share yield first, to tenants that use less;
2. before a turn takes anything from another tenant, it takes its own tenant's *bets*, which are leases on
   jobs that have never come back. So a tenant that hoards pays for it itself;
3. a turn of a tenant over its share, and a turn that the policy would let wait, take their own tenant's other
   leases too before those of a tenant that uses less.
"""

from __future__ import annotations

from collections.abc import Callable

from tenuto.core.jobs import TurnState
from tenuto.core.leases import LeaseState, LeaseTable
from tenuto.core.limits import Limits
from tenuto.core.quota import NOBODY, Quota
from tenuto.core.types import TakenBy, Yields


class Yielding:
    """Chooses leases; it changes none. O(log n) a choice."""

    def __init__(
        self,
        leases: LeaseTable,
        quota: Quota,
        limits: Limits,
        is_before: Callable[[TurnState, LeaseState, float], bool],
    ) -> None:
        """`is_before`: whether a waiting turn goes before a lease at this time."""
        self._leases = leases
        self._quota = quota
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
            if is_over or turn.is_overdue:
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
        if turn.is_overdue or is_late:
            return TakenBy.OVERDUE
        if not self._is_before(turn, lease, now_s):
            return None
        return TakenBy.WAITING if lease.terms.why is None else TakenBy.PRICE
