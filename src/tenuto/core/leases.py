"""Leases: the blocks that are held for each job, until when, and which lease yields first.

    `Retention`        grants, claims, renews and reclaims leases, as the policy decides and within the limits
    `Yielding`         which lease yields next
    `LeaseTable`       all leases, by job, by deadline and in the order in which they yield
    `PinnedPrefixes`   prefixes that jobs share, which yield before any lease

Nothing here calls the driver. Methods that may end a lease return or yield events, which the driver applies
one by one. At each event, the table is in a consistent state.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass, field

from tenuto.core.engine import Blocks, Engine
from tenuto.core.fairness import Fairness, Quota
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import NOBODY, TurnState
from tenuto.core.limits import Limits
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
    Release,
    ShortHit,
    TakenBy,
    Turn,
    Yields,
    quick,
)
from tenuto.core.wishes import Wish


@dataclass(slots=True)
class LeaseState:
    """One lease; the lease table and `Retention` change it."""

    job_id: str
    turn: Turn
    """The finished turn that computed the blocks."""
    blocks: Blocks
    granted_s: float
    terms: Keep
    next_turn_id: str | None = None
    most_s: float | None = None
    """The client's limit on how long it may last; None for no limit."""
    wish: Wish | None = None
    """The client's wish, which counts once the policy gives the lease up."""

    @property
    def tenant(self) -> str:
        """The tenant of the lease's job."""
        return self.turn.job.tenant or NOBODY

    @property
    def is_unproven(self) -> bool:
        """Whether the lease is unproven: its job has never come back so far."""
        return not self.turn.job.came_back

    def get_view(self, terms: Keep | None = None) -> Lease:
        """The frozen view that a policy sees, with these terms, or by default with the lease's own."""
        terms = terms or self.terms
        return Lease(
            turn=self.turn,
            granted_s=self.granted_s,
            until_s=terms.until_s,
            value=terms.value,
            num_blocks=len(self.blocks),
            next_turn_waiting=self.next_turn_id is not None,
        )


@quick
@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A lease began."""

    lease: LeaseState
    now_s: float


@quick
@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """A finished turn got no lease."""

    turn: Turn
    reason: LeaseRefusal
    now_s: float


@quick
@dataclass(frozen=True, slots=True)
class LeaseTruncated:
    """The last blocks of a lease were reclaimed; the lease keeps the others."""

    lease: LeaseState
    num_blocks: int
    taken_by: TakenBy
    now_s: float


@quick
@dataclass(frozen=True, slots=True)
class LeaseShortened:
    """A lease may have given up its last blocks, because its job or its client needs only the others."""

    lease: LeaseState
    now_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease ended: it released all its blocks and left the table."""

    lease: LeaseState
    reason: LeaseEnd
    num_blocks: int
    """The number of blocks that it still had when it ended."""
    now_s: float
    taken_by: TakenBy | None = None
    """Who took its last blocks, if the reason is `REVOKED`."""


LeaseEvent = LeaseGranted | LeaseRefused | LeaseTruncated | LeaseShortened | LeaseEnded


@dataclass(slots=True)
class _TenantLeases:
    jobs: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The jobs that have leases, that of the oldest lease first."""
    unproven: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The jobs of unproven leases, the oldest first."""
    evict_order: dict[Yields, IndexedHeap[str]] = field(
        default_factory=lambda: {yields: IndexedHeap() for yields in Yields}
    )


class LeaseTable:
    """All leases, at most one per job. A change takes O(log n) time; nothing is scanned."""

    def __init__(self, engine: Engine, quota: Quota) -> None:
        self._engine = engine
        self._quota = quota
        self._leases: OrderedDict[str, LeaseState] = OrderedDict()
        """By job, the oldest lease first."""
        self._deadlines: IndexedHeap[str] = IndexedHeap()
        self.evict_order: dict[Yields, IndexedHeap[str]] = {yields: IndexedHeap() for yields in Yields}
        self.num_wished_blocks = Counter[str]()
        """Blocks of leases that only wishes keep, by tenant. A block that several have counts for each."""
        self._by_tenant: dict[str, _TenantLeases] = {}
        """The leases of each tenant, once there are tenants."""

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
        tenant = lease.tenant
        self._quota.grant(tenant)
        if self._quota.counts_blocks:
            self._quota.add(tenant, self._engine.get_block_ids(lease.blocks))
        self._enter(lease, evict_key)
        if lease.terms.yields is Yields.FIRST:
            self._count_wished(lease, len(lease.blocks))

    def count_by_tenant(self) -> None:
        """Count the leases of each tenant from now on."""
        if self._quota.counts_blocks:
            return
        self._quota.counts_blocks = True
        for lease in self:
            self._quota.add(lease.tenant, self._engine.get_block_ids(lease.blocks))
            self._enter_tenant(lease, self.evict_order[lease.terms.yields].get_key(lease.job_id))

    def renew(self, lease: LeaseState, terms: Keep, evict_key: Key) -> None:
        """Change a lease's deadline, its value or its place in the order in which leases yield."""
        if lease.terms.yields is not terms.yields:
            self._discard(lease)
        self._count_wished(lease, -len(lease.blocks))
        lease.terms = terms
        self._count_wished(lease, len(lease.blocks))
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
        self._count_wished(lease, -len(tail))
        if self._quota.counts_blocks:
            self._quota.remove(lease.tenant, self._engine.get_block_ids(tail))
        self._engine.release(tail)

    def replace(self, lease: LeaseState, blocks: Blocks) -> None:
        """Make a lease hold `blocks` instead of its own. Some may be in both lists."""
        self._engine.hold(blocks)
        old, lease.blocks = lease.blocks, blocks
        self._count_wished(lease, len(blocks) - len(old))
        if self._quota.counts_blocks:
            self._quota.add(lease.tenant, self._engine.get_block_ids(blocks))
            self._quota.remove(lease.tenant, self._engine.get_block_ids(old))
        self._engine.release(old)

    def get_due(self, now_s: float) -> LeaseState | None:
        """The lease with the earliest deadline if that deadline has passed, else None."""
        first = self._deadlines.get_first()
        if first is None or self._deadlines.get_key(first)[0] > now_s:  # type: ignore[operator]
            return None
        return self._leases[first]

    def get_next_deadline_s(self) -> float | None:
        """The earliest deadline, or None if there are no leases."""
        key = self._deadlines.get_first_key()
        return None if key is None else float(key[0])

    def get_first_to_yield(
        self, yields: Yields, spare_job_id: str | None = None, tenant: str | None = None
    ) -> LeaseState | None:
        """The lease that yields first, except the lease of the job `spare_job_id`.

        `tenant`: among this tenant's leases (none, if leases are not counted by tenant); None: among all.
        """
        whose = self if tenant is None else self._by_tenant.get(tenant)
        first = None if whose is None else whose.evict_order[yields].get_first_except(spare_job_id)
        return None if first is None else self._leases[first]

    def get_oldest(self, tenant: str | None) -> LeaseState:
        """The oldest lease of a tenant, or of all tenants if `tenant` is None. There must be one."""
        jobs = self._leases if tenant is None else self._by_tenant[tenant].jobs
        return self._leases[next(iter(jobs))]

    def get_oldest_unproven(self, tenant: str) -> LeaseState | None:
        """A tenant's oldest unproven lease; None if there is none."""
        own = self._by_tenant.get(tenant)
        first = None if own is None else next(iter(own.unproven), None)
        return None if first is None else self._leases[first]

    def _count_wished(self, lease: LeaseState, change: int) -> None:
        if lease.terms.yields is Yields.FIRST:
            self.num_wished_blocks[lease.tenant] += change
            if not self.num_wished_blocks[lease.tenant]:
                del self.num_wished_blocks[lease.tenant]

    def _enter(self, lease: LeaseState, evict_key: Key) -> None:
        self._deadlines.push(lease.job_id, (lease.terms.until_s,))
        self.evict_order[lease.terms.yields].push(lease.job_id, evict_key)
        if self._quota.counts_blocks:
            self._enter_tenant(lease, evict_key)

    def _enter_tenant(self, lease: LeaseState, evict_key: Key) -> None:
        own = self._by_tenant.setdefault(lease.tenant, _TenantLeases())
        own.jobs[lease.job_id] = None
        if lease.is_unproven:
            own.unproven[lease.job_id] = None
        own.evict_order[lease.terms.yields].push(lease.job_id, evict_key)

    def _discard(self, lease: LeaseState) -> None:
        """Remove a lease from the order in which leases yield."""
        self.evict_order[lease.terms.yields].discard(lease.job_id)
        own = self._by_tenant.get(lease.tenant)
        if own is not None:
            own.evict_order[lease.terms.yields].discard(lease.job_id)

    def _leave_tenant(self, lease: LeaseState) -> None:
        own = self._by_tenant.get(lease.tenant)
        if own is not None:
            own.jobs.pop(lease.job_id, None)
            own.unproven.pop(lease.job_id, None)
            if not own.jobs:
                del self._by_tenant[lease.tenant]


class Yielding:
    """Chooses the lease that yields next to a turn that needs blocks, in O(log n) time. It changes no lease.

    With one tenant, this is the first lease in the order of the policy's `evict_key`, if the policy lets the
    turn take its blocks. With several tenants, these rules come before that order:

    1. To turns of other tenants, the leases of the tenant furthest over its fair share yield first.
    2. A turn takes its own tenant's unproven leases (on jobs that have never come back) before
       those of another tenant. So a tenant that collects leases pays for it itself.
    3. A turn of a tenant over its share also takes its own tenant's other leases before those of a tenant
       that uses less. So does a turn that the policy would let wait.
    """

    def __init__(
        self,
        leases: LeaseTable,
        fairness: Fairness,
        limits: Limits,
        is_before: Callable[[TurnState, LeaseState, float], bool],
    ) -> None:
        """`is_before(turn, lease, now_s)`: whether a waiting turn may take a lease's blocks."""
        self._leases = leases
        self._waits = fairness.waits
        self._quota = fairness.quota
        self._limits = limits
        self._is_before = is_before

    def get_kinds(self, *, stalled: bool = False) -> list[Yields]:
        """The kinds of leases that yield now, in order. `stalled`: nothing can run otherwise."""
        return list(Yields) if stalled or self._limits.always_yield else [Yields.FIRST, Yields.ALWAYS]

    def choose(
        self, yields: Yields, spare: str | None, turn: TurnState | None, now_s: float, *, stalled: bool
    ) -> tuple[LeaseState, TakenBy] | None:
        """The lease that yields next to a turn, and the reason; None if the turn must wait.

        `spare`: the job whose lease does not yield.
        """
        lease = self._leases.get_first_to_yield(yields, spare)
        if lease is None:
            return None
        most = self._quota.get_most_over()
        over = None if most is None else self._leases.get_first_to_yield(yields, spare, most)
        if turn is None:
            return (lease, TakenBy.RUNNING) if over is None else (over, TakenBy.FAIR_SHARE)
        tenant, get_use = turn.job.tenant or NOBODY, self._quota.get_use
        is_fair = over is not None and over.tenant != tenant and get_use(over.tenant) > get_use(tenant)
        lease = over if over is not None and is_fair else lease
        if lease.tenant != tenant:
            lease = self._get_unproven(tenant, yields, spare) or lease
        if is_fair and lease is over:
            return lease, TakenBy.FAIR_SHARE
        if stalled:
            return lease, TakenBy.DEADLOCK
        is_late = self._waits.is_held_too_long(turn.turn_id, now_s)
        if lease.tenant != tenant and not is_late and get_use(lease.tenant) <= get_use(tenant):
            is_over = self._quota.is_over(tenant)
            own = self._leases.get_first_to_yield(yields, spare, tenant)
            if is_over and own is None and not turn.started and not lease.is_unproven:
                return None
            if is_over or self._waits.is_overdue(turn.turn_id):
                lease = own or lease
        taken_by = self._get_taker(lease, turn, now_s, is_late=is_late)
        return None if taken_by is None else (lease, taken_by)

    def _get_unproven(self, tenant: str, yields: Yields, spare: str | None) -> LeaseState | None:
        """A tenant's oldest unproven lease, if it may yield."""
        lease = self._leases.get_oldest_unproven(tenant)
        return None if lease is None or lease.terms.yields is not yields or lease.job_id == spare else lease

    def _get_taker(
        self, lease: LeaseState, turn: TurnState, now_s: float, *, is_late: bool
    ) -> TakenBy | None:
        """Why a lease yields to a turn; None if it does not.

        A lease always yields to a turn that has started or waited too long.
        """
        if turn.started:
            return TakenBy.RUNNING
        if is_late or self._waits.is_overdue(turn.turn_id):
            return TakenBy.OVERDUE
        if lease.terms.yields is not Yields.FIRST and not self._is_before(turn, lease, now_s):
            return None
        return TakenBy.WAITING if lease.terms.why is None else TakenBy.PRICE


# Prefixes that jobs share, on models whose layers differ: a second level after the free queue.
#
# On such a model, a hit needs the blocks of each window or state just before the hit's end. vLLM caches these
# where prompts differ. But they are evicted like any others, and no job's lease covers them. So when a second
# job uses a prefix, its blocks are held in all layer groups:
#
#     free queue          evicted first, oldest first
#     pinned prefixes     then these, the least recently used first
#     leases of jobs      then these, in the order of the policy's `evict_key`
#
# A pin is released as a whole before an allocation fails. Its blocks then join the free queue. Pins are
# references to blocks, as leases are, so no second queue of blocks is needed.


class PinnedPrefixes:
    """The pins of one engine. To use a pinned prefix takes O(1) time; only a new pin visits its blocks."""

    def __init__(self, engine: Engine, max_blocks: int, stats: DriverStats) -> None:
        self._engine = engine
        self.max_blocks = max_blocks
        """Most blocks that all pins may hold; 0 if nothing is pinned."""
        self._stats = stats
        self._pins: OrderedDict[Hashable, Blocks] = OrderedDict()
        """The blocks of each pin, by the chained hash of the prefix's last block; least recently used
        first."""
        self._shared: dict[str, int] = {}
        """For each running first turn without a pinned prefix: how many of its tokens other jobs share."""
        self.num_blocks = 0
        """Blocks of all pins together. A block that several pins share counts once for each."""

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Blocks]:
        return iter(list(self._pins.values()))

    def start(self, turn: TurnState, num_hit_tokens: int, short_hit: ShortHit | None) -> None:
        """A turn started. If it is its job's first, other jobs share the tokens that it found in the cache.

        These are its hit, and the tokens after the hit that only some layer groups have: vLLM now caches them
        for the other groups too.
        """
        num_tokens = num_hit_tokens + (0 if short_hit is None else short_hit.num_tokens)
        if turn.job.num_turns > 1 or not num_tokens:
            return
        is_pinned = self._use(self._get_key(turn, num_tokens))
        if short_hit is not None and not is_pinned:
            self._use(self._get_key(turn, num_hit_tokens))
        if not is_pinned:
            self._shared[turn.turn_id] = num_tokens

    def finish(self, turn: TurnState) -> None:
        """A turn ends and still has its blocks: pin the prefix that it shares, if that is still cached."""
        num_shared_tokens = self._shared.pop(turn.turn_id, 0)
        if not num_shared_tokens or turn.job.runs_as_stock:
            return
        blocks, num_tokens = self._engine.get_shared_blocks(turn.turn_id, num_shared_tokens)
        key = self._get_key(turn, num_tokens)
        if key is None or self._use(key) or not 0 < len(blocks) <= self.max_blocks:
            return
        self._engine.hold(blocks)
        self._pins[key] = blocks
        self.num_blocks += len(blocks)
        self._stats.num_prefixes_pinned += 1
        while self.num_blocks > self.max_blocks:
            self.demote()

    def demote(self) -> bool:
        """Release the least recently used pin; False if there is none."""
        if not self._pins:
            return False
        _, blocks = self._pins.popitem(last=False)
        self.num_blocks -= len(blocks)
        self._stats.num_prefixes_demoted += 1
        self._engine.release(blocks)
        return True

    def drop_all(self) -> None:
        """Release all pins."""
        while self.demote():
            pass

    def _use(self, key: Hashable | None) -> bool:
        """Record the use of a prefix; False if it is not pinned."""
        if key not in self._pins:
            return False
        self._pins.move_to_end(key)
        return True

    def _get_key(self, turn: TurnState, num_tokens: int) -> Hashable | None:
        number = num_tokens // self._engine.hash_block_size
        hashes = turn.arrival.hashes
        return hashes[number - 1] if 0 < number <= len(hashes) else None


# Called by the driver.

MIN_RENEWAL_S = 0.001
"""Shortest renewal, in seconds. For less, a policy would be asked again and again at almost one time."""
MAX_WISHED_SHARE = 0.25
"""Largest share of the KV cache that leases cover which only wishes keep. KV without a lease, such as that of
people's chats, is evicted before them. In stock it would outlive a few prompts that nobody sends again."""
MAX_YIELDING = 8
"""Most leases that are revoked or shortened for one new lease. It bounds the cost of a grant."""

_GIVEN_UP = {
    LeaseRefusal.IDLE: LeaseEnd.IDLE,
    LeaseRefusal.PRICE: LeaseEnd.PRICE,
    LeaseRefusal.NOT_EXPECTED_BACK: LeaseEnd.NOT_EXPECTED_BACK,
}
"""The `LeaseEnd` of a lease that the policy does not renew, by the policy's reason."""


class Retention:
    """Grants, renews, reclaims and ends the leases of one driver."""

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
        """`stats`: where to count pinned prefixes."""
        view = engine.get_view(0.0)
        self._quota = fairness.quota
        self.leases = LeaseTable(engine, fairness.quota)
        can_pin = not engine.can_truncate and caller.policy.overrides("retain")
        max_pinned_blocks = int(limits.max_pinned_share * view.num_blocks) if can_pin else 0
        self.pins = PinnedPrefixes(engine, max_pinned_blocks, stats)
        self._engine = engine
        self._block_size = view.block_size
        self._num_blocks = view.num_blocks
        self._caller = caller
        self._limits = limits
        self._by_priority = by_priority
        self._yielding = Yielding(self.leases, fairness, limits, self._is_before)

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state, including the number of leases."""
        return self._engine.get_view(now_s, len(self.leases))

    def get_num_leased_tokens(self) -> int:
        """Number of distinct tokens whose KV leases keep."""
        return self._engine.get_num_leased_blocks() * self._block_size

    def get_turn_view(self, turn: TurnState) -> Turn:
        """The policy's view of a turn that waits or runs."""
        lease = self.leases.get(turn.job.job_id)
        return turn.get_view(has_lease=lease is not None and lease.next_turn_id == turn.turn_id)

    # What happens to turns.

    def claim(self, turn: TurnState, now_s: float) -> LeaseEnded | LeaseShortened | None:
        """A turn arrived. Its job's lease now waits for it, unless the lease already waits for another turn.

        The lease is truncated to the blocks that the prompt shares. It ends if the prompt shares none. For a
        turn that cannot be kept, what it shares is not known, and the lease stays whole.
        """
        lease = self.leases.get(turn.lease_job_id)
        if lease is None or lease.next_turn_id is not None:
            return None
        if turn.arrival.is_supported:
            num_common = self._engine.count_common_tokens(lease.blocks, turn.arrival.hashes)
            # A hit ends before the prompt's last token, so later blocks would only waste memory.
            num_common = min(num_common, turn.arrival.num_prompt_tokens - 1)
            if not self._keep_tokens(lease, num_common):
                return self.leases.end(lease, LeaseEnd.SUPERSEDED, now_s)
        lease.next_turn_id = turn.turn_id
        return LeaseShortened(lease, now_s)

    def get_claimed(self, turn: TurnState | None) -> LeaseState | None:
        """The lease that waits for this turn, or None."""
        if turn is None:
            return None
        lease = self.leases.get(turn.lease_job_id)
        return lease if lease is not None and lease.next_turn_id == turn.turn_id else None

    def count_held_tokens(self, turn: TurnState) -> int:
        """How many of a waiting turn's first tokens the lease that waits for it holds."""
        lease = self.get_claimed(turn)
        if lease is None or not turn.arrival.is_supported:
            return 0
        return self._engine.count_common_tokens(lease.blocks, turn.arrival.hashes)

    def hit(self, turn: TurnState, now_s: float) -> LeaseEnded | None:
        """A turn started. It now holds the blocks that its lease kept, so the lease ends."""
        lease = self.get_claimed(turn)
        reason = LeaseEnd.HIT if turn.arrival.is_supported or turn.num_hit_tokens else LeaseEnd.SUPERSEDED
        return None if lease is None else self.leases.end(lease, reason, now_s)

    def leave(self, turn: TurnState) -> None:
        """A turn left the system. If a lease still waits for it, the lease stays: the client may retry."""
        if (lease := self.get_claimed(turn)) is not None:
            lease.next_turn_id = None

    def retain(
        self,
        state: TurnState,
        turn: Turn,
        now_s: float,
        *,
        wish: Wish | None = None,
        given_up: LeaseRefusal | None = None,
        is_side_answer: bool = False,
    ) -> Iterator[LeaseEvent]:
        """Ask the policy what to do with a finishing turn's blocks, and do it.

        `wish`: what the client would like to be kept if the policy keeps nothing.
        `given_up`: if set, the policy is not asked, for this reason, and only the wish counts.
        `is_side_answer`: see `TurnState.is_side_answer`; then the job's lease stays.
        """
        view = self.get_view(now_s)
        answer: Decision
        answer = self._caller.ask("retain", turn, view) if given_up is None else Release(given_up)
        retain_s = state.arrival.hints.retain_s
        terms, num_wished = self._get_terms(answer, wish, now_s, now_s, retain_s)
        old = self.leases.get(turn.job.job_id)
        # Another turn of the job may wait for the old lease. That turn has already arrived, and the turn
        # after this one has not. So the old lease has precedence.
        is_claimed = old is not None and (is_side_answer or old.next_turn_id is not None)
        if old is not None and not is_claimed:
            # The finished turn still references the blocks that both share. The others are not needed.
            yield self.leases.end(old, LeaseEnd.REPLACED, now_s)
        if isinstance(answer, Offload) and self._engine.can_store:
            cached = self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens)
            self._engine.store(cached, turn, wish)
        elif wish is not None and self._engine.can_store:
            cached = self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens)
            if part := self._cut(cached, wish.num_tokens):
                self._engine.store(part, turn, wish)
        reason: LeaseRefusal | None
        if terms is None:
            reason = answer.why or LeaseRefusal.POLICY
        elif terms.until_s <= now_s:
            reason = LeaseRefusal.TOO_LATE
        elif is_claimed:
            reason = LeaseRefusal.TURN_WAITING
        elif not (
            blocks := self._cut(
                self._engine.get_cached_blocks(turn.turn_id, state.num_held_tokens), num_wished
            )
        ):
            reason = LeaseRefusal.NOT_CACHED
        else:
            lease = LeaseState(turn.job.job_id, turn, blocks, now_s, terms, most_s=retain_s, wish=wish)
            self.leases.grant(lease, self._get_evict_key(lease.get_view(), view))
            reason = yield from self._make_room(lease, now_s)
            if reason is None:
                yield LeaseGranted(lease, now_s)
                return
            self.leases.end(lease, LeaseEnd.REVOKED, now_s)
        yield LeaseRefused(turn, reason, now_s)

    def end(self, job_id: str, reason: LeaseEnd, now_s: float) -> LeaseEnded | None:
        """End a job's lease, if it has one."""
        lease = self.leases.get(job_id)
        return None if lease is None else self.leases.end(lease, reason, now_s)

    def drop_all(self, reason: LeaseEnd, now_s: float) -> Iterator[LeaseEnded]:
        """End every lease and release all pinned prefixes."""
        self.pins.drop_all()
        for lease in self.leases:
            yield self.leases.end(lease, reason, now_s)

    def take_over(
        self, other: Retention, is_retained: Callable[[LeaseState], bool], now_s: float
    ) -> Iterator[LeaseTruncated | LeaseEnded]:
        """Take over another driver's leases, the oldest first; the other driver has none afterwards.

        `is_retained`: whether a lease stays. The limits apply to it as to a new lease, but it
        keeps its age.
        """
        other.pins.drop_all()
        for old in other.leases:
            terms = self._bound(old.terms, old.granted_s, old.most_s)
            lease = dataclasses.replace(old, blocks=copy.copy(old.blocks), terms=terms)
            self.leases.grant(lease, self._get_evict_key(lease.get_view(), self.get_view(now_s)))
            other.leases.end(old, LeaseEnd.SWITCHED, now_s)
        for lease in self.leases:
            if not is_retained(lease):
                yield self.leases.end(lease, LeaseEnd.SWITCHED, now_s)
        for lease in self.leases:
            while lease.job_id in self.leases:
                excess = self._quota.get_excess(lease.tenant, self._engine.get_num_leased_blocks())
                if excess is None:
                    break
                yield self._shrink(*self._choose_over(lease.tenant, *excess), TakenBy.QUOTA, now_s)

    # Time.

    def expire(
        self, now_s: float, max_leases: float
    ) -> Iterator[LeaseTruncated | LeaseEnded | LeaseShortened]:
        """End or renew leases whose deadline has passed, or shorten them to what their clients wish."""
        num_looked_at = 0
        view: EngineView | None = None
        while num_looked_at < max_leases and (lease := self.leases.get_due(now_s)) is not None:
            num_looked_at += 1
            # A renewal changes nothing in the engine's view, so one view serves many renewals.
            view = view or self.get_view(now_s)
            # Only a wish keeps this lease; the policy has already released it.
            is_wished = lease.terms.yields is Yields.FIRST
            answer: Decision
            answer = Release() if is_wished else self._caller.ask("reconsider", lease.get_view(), view)
            if isinstance(answer, Keep) and now_s < answer.until_s < now_s + MIN_RENEWAL_S:
                answer = dataclasses.replace(answer, until_s=now_s + MIN_RENEWAL_S)
            elif isinstance(answer, Offload):
                self._engine.store(lease.blocks, lease.turn, lease.wish)
            terms, num_wished = self._get_terms(answer, lease.wish, lease.granted_s, now_s, lease.most_s)
            if num_wished is not None and not self._keep_tokens(lease, num_wished):
                terms = None
            if terms is not None and terms.until_s > now_s:
                self.leases.renew(lease, terms, self._get_evict_key(lease.get_view(terms), view))
                if terms.yields is not Yields.FIRST:
                    continue
                if num_wished is not None:
                    yield LeaseShortened(lease, now_s)
                if (yield from self._make_room(lease, now_s)):
                    yield self.leases.end(lease, LeaseEnd.REVOKED, now_s, TakenBy.QUOTA)
            else:
                yield self.leases.end(lease, self._get_end(lease, answer), now_s)
            view = None

    # Memory.

    def get_num_reclaimable_blocks(self, turn: TurnState | None) -> int:
        """Upper bound on the leased blocks that `reclaim` could free for a turn while others run."""
        lease = self._get_spared(turn)
        return self._engine.get_num_leased_blocks() - (len(lease.blocks) if lease is not None else 0)

    def _get_spared(self, turn: TurnState | None) -> LeaseState | None:
        """The lease that a turn will hit. One that cannot be kept may read no cache, so it spares none."""
        return self.get_claimed(turn) if turn is not None and turn.arrival.is_supported else None

    def reclaim(
        self, num_blocks: int, turn: TurnState | None, now_s: float, *, stalled: bool
    ) -> Iterator[LeaseTruncated | LeaseEnded]:
        """Free at least `num_blocks` leased blocks, or as many as possible; see `Driver.reclaim`.

        Pinned prefixes are released first. The lease of the turn's own job yields last: to a turn that can be
        kept, only if it is stalled; to another whatever the policy says.
        """
        own = self.get_claimed(turn)
        own_id = None if own is None else own.job_id
        spares = [own_id] if own is None or not stalled else [own_id, None]
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
                num_cut = num_blocks - num_freed
                if self._engine.can_truncate:
                    num_cut = self._engine.count_tail(lease.blocks, num_cut)
                yield self._shrink(lease, num_cut, taken_by, now_s)
                num_freed = self._engine.get_num_free_blocks() - num_free_before
        if num_freed < num_blocks and self._get_spared(turn) is None and (own := self.get_claimed(turn)):
            yield self.leases.end(own, LeaseEnd.SUPERSEDED, now_s)

    def refuses_steadily(self, turn: TurnState, now_s: float) -> bool:
        """Whether `reclaim` frees nothing for a waiting turn, now and in each step that only decodes.

        Valid until the next deadline, or until the next turn has waited too long. False if in doubt.
        """
        if len(self.pins) or not self._caller.refuses_steadily:
            return False
        lease = self.get_claimed(turn)
        if lease is not self._get_spared(turn):
            return False
        spare = None if lease is None else lease.job_id
        return all(
            self._yielding.choose(yields, spare, turn, now_s, stalled=False) is None
            for yields in self._yielding.get_kinds()
        )

    # Internal.

    def _make_room(
        self, lease: LeaseState, now_s: float
    ) -> Generator[LeaseTruncated | LeaseEnded, None, LeaseRefusal | None]:
        """Revoke blocks of the oldest leases until a new lease is within all limits.

        The order in which leases yield is not used here: a client that collects leases under old ids could
        then keep them, and other clients would get none. Returns the limit that is still exceeded, or None.
        """
        before: tuple[LeaseRefusal, int] | None = None
        for num_left in range(MAX_YIELDING, -1, -1):
            excess = (self._get_wished_excess() if lease.terms.yields is Yields.FIRST else None) or (
                self._quota.get_excess(lease.tenant, self._engine.get_num_leased_blocks())
            )
            if excess is None:
                return None
            if excess[0] is LeaseRefusal.OVER_SHARE and self._demote_pins(excess[1]):
                continue
            first, num_blocks = self._choose_over(lease.tenant, *excess)
            # To free blocks that other leases share does not help.
            if first is lease or not num_left or excess == before:
                break
            if lease.terms.yields is Yields.FIRST and first.terms.yields is not Yields.FIRST:
                break
            before = excess
            yield self._shrink(first, num_blocks, TakenBy.QUOTA, now_s)
        return excess[0] if excess is not None else None

    def _get_wished_excess(self) -> tuple[LeaseRefusal, int] | None:
        """By how many blocks leases that only wishes keep exceed their share; None if they do not."""
        over = self.leases.num_wished_blocks.total() - int(MAX_WISHED_SHARE * self._num_blocks)
        return (LeaseRefusal.WISHED_SHARE, over) if over > 0 else None

    def _choose_over(self, tenant: str, reason: LeaseRefusal, number: int) -> tuple[LeaseState, int]:
        """The lease to shorten or revoke if a limit is exceeded, and how many blocks to free."""
        if reason is LeaseRefusal.WISHED_SHARE:
            counts = self.leases.num_wished_blocks
            is_over = counts[tenant] > self._quota.get_fair_share(tenant) * counts.total()
            of_wishes = self.leases.get_first_to_yield(Yields.FIRST, tenant=tenant if is_over else None)
            assert of_wishes is not None, "the new lease is one"
            return of_wishes, number
        of_all = reason is LeaseRefusal.OVER_SHARE
        whose = self._quota.get_most_over() if of_all else tenant
        wished = self.leases.get_first_to_yield(Yields.FIRST, tenant=whose)
        first = wished or self.leases.get_oldest(whose)
        return first, len(first.blocks) if reason is LeaseRefusal.TENANT_LEASES else number

    def _demote_pins(self, num_blocks: int) -> bool:
        """Release pinned prefixes until `num_blocks` blocks are free; False if there are none."""
        most = self._engine.get_num_leased_blocks() - num_blocks
        was_any = len(self.pins) > 0
        while self._engine.get_num_leased_blocks() > most and self.pins.demote():
            pass
        return was_any

    def _bound(self, terms: Keep, granted_s: float, most_s: float | None) -> Keep:
        latest_s = granted_s + self._limits.get_longest_s(most_s)
        return terms if terms.until_s <= latest_s else dataclasses.replace(terms, until_s=latest_s)

    def _get_terms(
        self, answer: Decision, wish: Wish | None, granted_s: float, now_s: float, most_s: float | None
    ) -> tuple[Keep | None, int | None]:
        """The terms of a lease by the policy's answer, or else by a wish; None if neither keeps anything.

        Also the number of tokens that only the wish keeps; None for all.
        """
        terms = self._bound(answer, granted_s, most_s) if isinstance(answer, Keep) else None
        if wish is None or (terms is not None and terms.until_s > now_s):
            return terms, None
        span = wish.get_span(now_s - granted_s)
        if span is None:
            return terms, None
        why = answer.why or LeaseRefusal.POLICY
        wished = self._bound(Keep(granted_s + span.keep_s, yields=Yields.FIRST, why=why), granted_s, most_s)
        return (wished, span.num_tokens) if wished.until_s > now_s else (terms, None)

    def _cut(self, blocks: Blocks, num_tokens: int | None) -> Blocks:
        """The blocks of a turn's first `num_tokens` tokens; all blocks if that is None."""
        if num_tokens is None:
            return blocks
        if self._engine.can_truncate:
            del blocks[num_tokens // self._block_size :]
            return blocks
        return self._engine.get_prefix(blocks, num_tokens) if num_tokens > 0 and blocks else []

    def _get_evict_key(self, lease: Lease, view: EngineView) -> Key:
        key: Key = self._caller.ask("evict_key", lease, view)
        return (-lease.turn.priority, *key) if self._by_priority else key

    def _is_before(self, turn: TurnState, lease: LeaseState, now_s: float) -> bool:
        """Whether a waiting turn may take a lease's blocks, by their priorities or by the policy."""
        if not self._caller.policy.overrides("may_reclaim"):
            return True
        if self._by_priority and lease.turn.priority != turn.arrival.priority:
            return lease.turn.priority > turn.arrival.priority
        views = lease.get_view(), self.get_turn_view(turn), self.get_view(now_s)
        return bool(self._caller.ask("may_reclaim", *views))

    def _get_end(self, lease: LeaseState, answer: Decision) -> LeaseEnd:
        """Why a lease ends at its deadline."""
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
        """Release the last `num_blocks` blocks of a lease, or all if the others could not be hit."""
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
