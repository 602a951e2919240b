"""Protects clients from each other under any policy. The driver tells it each event once.

    waits     how long a turn may wait, compared with stock vLLM (`StockQueue`, in a file of its own)
    order     between tenants, the one that has received the least work goes first (`Shares`, `FairOrder`)
    memory    each tenant's part of the KV cache (`Quota`), by which `tenuto.core.leases` chooses who yields

*Order.* Each tenant has a virtual time: the work that the engine began for it, divided by its weight. An idle
tenant collects no credit: when it comes back, it starts at the virtual time of the tenant served last. With
priorities, it has such a time for each priority: a turn that waits behind urgent ones keeps no place among
these. All its work counts in each. Within a tenant, the policy decides the order. With only one tenant, the
order is exactly the policy's.
Source: start-time fair queueing (Goyal, Vin and Cheng, 1996), with work counted in tokens as in the virtual
token counter (Sheng et al., OSDI 2024).

*Memory.* A tenant is *active* while it has a turn in the engine or a lease. Its fair share of the cache is
its weight, divided by the weights of all active tenants. A tenant that uses more than `SLACK` times its fair
share is *over* its share: its leases yield first to tenants that use less, and its waiting turns take no
blocks from the leases of those tenants. A tenant that is the only active one may use everything.

Every event takes O(log n) time in the number of waiting turns and tenants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import NOBODY, UNVERIFIED, TurnState
from tenuto.core.limits import Limits
from tenuto.core.policy import Key, Policy
from tenuto.core.stock_queue import MovingMean, StockQueue
from tenuto.core.turn_work import MAX_NAMES, get_work
from tenuto.core.types import LeaseRefusal

UNVERIFIED_WEIGHT = 0.1
"""The weight, on a server that has tenants, of all turns without a verified tenant together."""
SLACK = 1.25
"""How many fair shares a tenant may use before its leases yield first. While tenants use about the same, the
policy decides the order of leases."""

MAX_PRIORITIES = 64
"""Most priorities with a start of their own for tenants that come back, and most that are remembered of a
tenant beside those of its waiting turns."""


class Fairness:
    """The fairness rules of one engine. The driver tells it each event of a turn once."""

    def __init__(
        self, policy: Policy, limits: Limits, num_blocks: int, block_size: int, *, by_priority: bool = False
    ) -> None:
        """`num_blocks`: size of the KV cache, in blocks of `block_size` tokens."""
        self.shares = Shares(limits.tenant_weights, by_priority=by_priority)
        self.quota = Quota(limits, num_blocks, block_size)
        makes_wait = any(policy.overrides(hook) for hook in ("queue_key", "admit", "may_reclaim"))
        self.waits = StockQueue(limits, num_blocks * block_size, is_bounded=makes_wait)

    def arrive(self, turn: TurnState, num_leased_tokens: int) -> None:
        """A turn arrived, while leases keep this many tokens."""
        self.shares.arrive(turn)
        self.waits.arrive(turn, num_leased_tokens)
        self.quota.arrive(turn)

    def start(self, turn: TurnState, num_hit_tokens: int, now_s: float) -> None:
        """A turn is about to get its first step."""
        self.shares.start(turn, num_hit_tokens)
        self.waits.start(turn, num_hit_tokens, now_s)
        self.quota.start(turn, self.shares.get_expected_tokens(turn.turn_id))

    def preempt(self, turn: TurnState, now_s: float) -> None:
        """A running turn lost its blocks and waits again."""
        self.quota.stop(turn)
        self.waits.preempt(turn, now_s)

    def resume(self, turn: TurnState, now_s: float) -> None:
        """A preempted turn runs again."""
        self.waits.resume(turn, now_s)
        self.quota.start(turn, self.shares.get_expected_tokens(turn.turn_id))

    def leave(self, turn: TurnState, num_output_tokens: int, now_s: float) -> None:
        """A turn ended, or left before it started; the quota knows it already."""
        self.shares.leave(turn, num_output_tokens)
        self.waits.leave(turn, num_output_tokens, now_s)

    def take_over(self, other: Fairness, weights: Mapping[str, float] | None) -> None:
        """Take over the shares of the engine's earlier driver, with new weights. Then `adopt` its turns."""
        self.shares = other.shares
        self.shares.set_weights(weights)
        self.quota.counts_blocks = other.quota.counts_blocks

    def adopt(self, turn: TurnState, num_leased_tokens: int, now_s: float) -> None:
        """Take over a waiting or running turn: as `arrive`, `start` and `preempt`, as far as it came."""
        self.waits.arrive(turn, num_leased_tokens)
        self.quota.arrive(turn)
        if turn.started:
            self.quota.start(turn, self.shares.get_expected_tokens(turn.turn_id))
            self.waits.start(turn, turn.num_hit_tokens, now_s)
            if turn.run_from is None:
                self.preempt(turn, now_s)


# Order.


@dataclass(slots=True)
class _Share:
    """What one tenant has received, and how many of its turns are in the engine."""

    weight: float
    time: float = 0.0
    """The work charged to it, divided by its weight."""
    leads: dict[int, float] = field(default_factory=dict)
    """By priority: how far its virtual time is ahead of `time`, if it is."""
    idle_leads: set[int] = field(default_factory=set)
    """Those of them of which no turn waits."""
    credit: float = 0.0
    """Work that was charged but not done, because outputs were shorter than expected."""
    num_waiting: Counter[int] = field(default_factory=Counter)
    """By priority."""
    num_live: int = 0
    latest: int = 0
    """The number of its latest arrival, among those of all tenants."""

    def get_time(self, priority: int) -> float:
        """Its virtual time among the turns of this priority."""
        return self.time + self.leads.get(priority, 0.0)

    def enter(self, priority: int, now: float) -> None:
        """A turn of this priority arrived. `now`: the time of the tenant served last."""
        # Even if other such turns wait: those that cannot start yet (for a grammar, say) earn no credit.
        if now > self.get_time(priority):
            self.leads[priority] = now - self.time
        self.idle_leads.discard(priority)
        self.num_waiting[priority] += 1

    def leave(self, priority: int) -> None:
        """Such a turn waits no more."""
        self.num_waiting[priority] -= 1
        if not self.num_waiting[priority]:
            del self.num_waiting[priority]
            if priority in self.leads:
                self.idle_leads.add(priority)
            if len(self.idle_leads) > MAX_PRIORITIES:  # clients may invent them
                least = min(self.idle_leads, key=self.leads.__getitem__)
                self.idle_leads.discard(least)
                del self.leads[least]


@dataclass(slots=True)
class _Charge:
    work: float = 0.0
    """The work that is included in its tenant's virtual time, in prefill tokens."""
    begin: float = 0.0
    """The virtual time of its tenant when it was taken off the queue."""
    has_blocked: bool = False
    """Whether it was first in the queue and did not fit, so that all others had to wait."""
    num_expected_tokens: float = 0.0
    """Tokens of its prompt and of an output of mean length; 0 before its start."""


class Shares:
    """The virtual times of the tenants, and which tenants have turns in the engine."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, by_priority: bool = False) -> None:
        """`weights`: the weights of some tenants; all others have weight 1."""
        self.by_priority = by_priority
        self._tenants: dict[str, _Share] = {}
        self.set_weights(weights)
        self._idle: IndexedHeap[str] = IndexedHeap()
        """Tenants without a turn that would gain by starting anew (`_forget_idle`), by virtual time."""
        self._now: dict[int, float] = {}
        """By priority, if the engine has them: the virtual time of the tenant served last, when its turn
        started."""
        self._floor = 0.0
        """The latest of such times that was forgotten, for the priorities without one."""
        self._output = MovingMean()
        """Mean output tokens of a turn."""
        self._charges: dict[str, _Charge] = {}
        """The charge of each turn in the engine."""
        self._num_arrived = 0

    def get_key(self, tenant: str, priority: int) -> tuple[float, int]:
        """Orders tenants: by virtual time, and of equal ones by which has not sent a turn for longest.

        It never decreases while such a turn of the tenant waits.
        """
        own = self._tenants.get(tenant)
        return (own.get_time(priority), own.latest) if own is not None else (0.0, 0)

    def set_weights(self, weights: Mapping[str, float] | None) -> None:
        """Use these weights from now on; all tenants that are not named have weight 1."""
        self._weights = weights or {}
        for name, own in self._tenants.items():
            own.weight = get_weight(self._weights, name)

    def arrive(self, turn: TurnState) -> None:
        """A turn arrived."""
        name = turn.job.tenant or NOBODY
        own = self._tenants.get(name)
        if own is None:
            own = self._tenants[name] = _Share(get_weight(self._weights, name))
        if not own.num_live:
            self._idle.discard(name)
        priority = self._get_priority(turn)
        own.enter(priority, self._now.get(priority, self._floor))
        self._num_arrived += 1
        own.latest = self._num_arrived
        self._charges[turn.turn_id] = _Charge()
        own.num_live += 1

    def take(self, turn: TurnState) -> None:
        """A turn was taken off the queue. Its work counts at once, because one step may start many turns."""
        if turn.started:
            return
        own = self._tenants[turn.job.tenant or NOBODY]
        self._charges[turn.turn_id].begin = own.get_time(self._get_priority(turn))
        self._charge(turn, own, self._get_work(turn, turn.num_reusable_tokens))

    def block(self, turn_id: str) -> None:
        """The first turn of the queue does not fit. If it leaves before it started, its work counts."""
        self._charges[turn_id].has_blocked = True

    def put_back(self, turn: TurnState) -> None:
        """A taken turn returns to the queue or leaves without having started."""
        if self._charges[turn.turn_id].work and not turn.started:
            self._charge(turn, self._tenants[turn.job.tenant or NOBODY], 0.0)

    def start(self, turn: TurnState, num_hit_tokens: int) -> None:
        """A turn got its first step."""
        charge = self._charges[turn.turn_id]
        if not charge.work:
            self.take(turn)
        # Not when it was taken: it may have been aborted, far behind the turns that go first.
        priority = self._get_priority(turn)
        if charge.begin > self._now.get(priority, self._floor):
            self._now[priority] = charge.begin
            if len(self._now) > MAX_PRIORITIES:  # clients may invent them too
                self._floor = self._now.pop(min(self._now, key=self._now.__getitem__))
            self._forget_idle()
        own = self._tenants[turn.job.tenant or NOBODY]
        own.leave(priority)
        charge.num_expected_tokens = turn.arrival.num_prompt_tokens + self._output.value
        self._charge(turn, own, self._get_work(turn, num_hit_tokens))

    def leave(self, turn: TurnState, num_output_tokens: int) -> None:
        """A turn ended, or left before it started."""
        name = turn.job.tenant or NOBODY
        own = self._tenants[name]
        own.num_live -= 1
        if turn.started:
            num_prompt_tokens = turn.arrival.num_prompt_tokens
            self._charge(turn, own, get_work(num_prompt_tokens, turn.num_hit_tokens, num_output_tokens))
            self._output.observe(num_output_tokens)
        else:
            own.leave(self._get_priority(turn))
            # Otherwise a client that aborts it just before it fits, and asks again, is first again.
            blocked = self._charges[turn.turn_id].has_blocked
            self._charge(turn, own, self._get_work(turn, turn.num_reusable_tokens) if blocked else 0.0)
        del self._charges[turn.turn_id]
        if not own.num_live:
            self._idle.push(name, (own.time + max(own.leads.values(), default=0.0),))
            self._forget_idle()
            if len(self._idle) > MAX_NAMES:
                # Clients may invent tenants. The one that goes first gains least by starting anew.
                del self._tenants[self._idle.pop()]
        if len(self._tenants) == len(self._idle):
            # The engine is idle, so all tenants begin equal again.
            self._tenants.clear()
            self._idle = IndexedHeap()
            self._now.clear()
            self._floor = 0.0

    def get_expected_tokens(self, turn_id: str) -> float:
        """The total number of tokens that a running turn is expected to reach."""
        return self._charges[turn_id].num_expected_tokens

    def _get_priority(self, turn: TurnState) -> int:
        return turn.arrival.priority if self.by_priority else 0

    def _get_work(self, turn: TurnState, num_hit_tokens: int) -> float:
        """The expected work of a turn whose output length is not known yet."""
        return get_work(turn.arrival.num_prompt_tokens, num_hit_tokens, self._output.value)

    def _charge(self, turn: TurnState, own: _Share, work: float) -> None:
        """Charge a turn's work to its tenant, less what was already charged."""
        # A virtual time must not decrease, because the order of tenants is corrected lazily.
        charge = self._charges[turn.turn_id]
        due = work - charge.work - own.credit
        charge.work = work
        if due > 0.0:
            own.credit = 0.0
            own.time += due / own.weight
        else:
            own.credit = -due

    def _forget_idle(self) -> None:
        """Forget tenants that would start there anyway, so that idle tenants use no memory."""
        now = min(self._now.values(), default=0.0)
        while (key := self._idle.get_first_key()) is not None and float(key[0]) <= now:
            del self._tenants[self._idle.pop()]


@dataclass(slots=True)
class _Lane:
    """The waiting turns of one tenant with one priority, in the policy's order."""

    priority: int
    tenant: str
    turns: IndexedHeap[str] = field(default_factory=IndexedHeap)


class FairOrder:
    """A priority queue of turns: by the request's priority, then by tenant, then by the policy's key.

    It has the methods of `IndexedHeap`. `get_first` may correct the order of the tenants.
    """

    def __init__(self, turns: Mapping[str, TurnState], shares: Shares) -> None:
        """`turns`: all turns in the engine, by id."""
        self._turns = turns
        self._shares = shares
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[str, str] = {}
        self._order: IndexedHeap[str] = IndexedHeap()
        """Lanes by priority and virtual time. A lane's time may have increased since it was added."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, item: object) -> bool:
        return item in self._lane_of

    def __iter__(self) -> Iterator[str]:
        """All ids, lane by lane, each in order; a copy."""
        lanes = sorted(self._lanes.values(), key=self._get_key)
        return iter([item for lane in lanes for item in lane.turns])

    def push(self, item: str, key: Key) -> None:
        """Add an id, or change the key of one that is there."""
        name = self._lane_of.get(item)
        if name is None:
            turn = self._turns[item]
            self._shares.put_back(turn)
            priority = turn.arrival.priority if self._shares.by_priority else 0
            tenant = turn.job.tenant or NOBODY
            name = self._lane_of[item] = f"{priority}\t{tenant}"
            if name not in self._lanes:
                lane = self._lanes[name] = _Lane(priority, tenant)
                self._order.push(name, self._get_key(lane))
        self._lanes[name].turns.push(item, key)

    def get_key(self, item: str) -> Key:
        """The policy's key of an id; raises KeyError if it is not in the queue."""
        return self._lanes[self._lane_of[item]].turns.get_key(item)

    def get_first(self) -> str | None:
        """The id that goes first, or None if the queue is empty."""
        lane = self._get_first_lane()
        return None if lane is None else lane.turns.get_first()

    def get_first_key(self) -> Key | None:
        """The policy's key of the first id, or None if the queue is empty."""
        lane = self._get_first_lane()
        return None if lane is None else lane.turns.get_first_key()

    def pop(self) -> str:
        """Remove and return the first id; raises IndexError if the queue is empty."""
        item = self.get_first()
        if item is None:
            raise IndexError("pop from an empty queue")
        self.discard(item)
        return item

    def discard(self, item: str) -> None:
        """Remove an id if it is there. Its work is charged, because most turns that leave the queue start."""
        name = self._lane_of.pop(item, None)
        if name is None:
            return
        waiting = self._lanes[name].turns
        waiting.discard(item)
        if not waiting:
            del self._lanes[name]
            self._order.discard(name)
        turn = self._turns.get(item)
        if turn is not None:
            self._shares.take(turn)

    def _get_first_lane(self) -> _Lane | None:
        if len(self._lanes) == 1:
            return next(iter(self._lanes.values()))
        while (name := self._order.get_first()) is not None:
            lane = self._lanes[name]
            key = self._get_key(lane)
            if key == self._order.get_first_key():
                return lane
            # The tenant was served since. Times only increase, so no other lane can be before its key.
            self._order.push(name, key)
        return None

    def _get_key(self, lane: _Lane) -> tuple[int, float, int]:
        return (lane.priority, *self._shares.get_key(lane.tenant, lane.priority))


# Memory.


class BlockRefCounts:
    """Counts the leases that cover each block. A change takes time linear in its number of blocks."""

    def __init__(self) -> None:
        self._covered: set[Hashable] = set()
        self._more: Counter[Hashable] = Counter()
        """For each block that several leases cover: the number of its leases minus one."""

    def __len__(self) -> int:
        return len(self._covered)

    def add(self, block_ids: Collection[Hashable]) -> None:
        """One more lease covers these blocks; each block must be named once."""
        if not self._covered.isdisjoint(block_ids):
            self._more.update(self._covered.intersection(block_ids))
        self._covered.update(block_ids)

    def add_new(self, block_ids: Iterable[Hashable]) -> None:
        """As `add`, for blocks that no lease covers yet."""
        self._covered.update(block_ids)

    def remove(self, block_ids: Collection[Hashable]) -> None:
        """One lease fewer covers these blocks."""
        more = self._more
        shared = more.keys() & block_ids if more else ()
        for block_id in shared:
            more[block_id] -= 1
            if not more[block_id]:
                del more[block_id]
        self._covered.difference_update(block_ids)
        self._covered.update(shared)

    def find_used(self, num_refs: Mapping[Hashable, int]) -> list[Hashable]:
        """The leased blocks that something else uses too. `num_refs`: all references to each block."""
        more = self._more
        return [
            each for each in self._covered.intersection(num_refs) if num_refs[each] > more.get(each, 0) + 1
        ]


@dataclass(slots=True)
class _Tenant:
    leased: BlockRefCounts = field(default_factory=BlockRefCounts)
    num_leases: int = 0
    num_live: int = 0
    """Number of waiting and running turns."""
    num_running_blocks: int = 0
    """Blocks that its running turns are expected to need. A shared block counts for each turn."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it uses for running turns and leases."""
        return len(self.leased) + self.num_running_blocks


class Quota:
    """The memory that each active tenant uses. Every event takes O(log n) time in the number of tenants.

    A block that several leases share counts once for each tenant among them. Counting begins when the first
    turn with a tenant arrives, so servers without tenants do not pay for it.
    """

    def __init__(self, limits: Limits, num_blocks: int, block_size: int) -> None:
        """`num_blocks`: size of the KV cache."""
        self._limits = limits
        self._weights = limits.tenant_weights or {}
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._tenants: dict[str, _Tenant] = {}
        self._sum_of_weights = 0.0
        self._running_blocks: dict[str, int] = {}
        """The blocks that each running turn is expected to need."""
        self._by_use: IndexedHeap[str] = IndexedHeap()
        """Tenants with leases, once blocks are counted. The one that uses most, for its weight, is first."""
        self.counts_blocks = False

    def __len__(self) -> int:
        return len(self._tenants)

    # Events.

    def arrive(self, turn: TurnState) -> None:
        """A turn arrived."""
        self._enter(turn.job.tenant or NOBODY).num_live += 1

    def start(self, turn: TurnState, num_expected_tokens: float) -> None:
        """A turn started or resumed. `num_expected_tokens`: the total tokens that it is expected to reach."""
        num_blocks = math.ceil(num_expected_tokens / self._block_size)
        self._run(turn, num_blocks - self._running_blocks.get(turn.turn_id, 0))
        self._running_blocks[turn.turn_id] = num_blocks

    def stop(self, turn: TurnState) -> None:
        """A running turn ended or was preempted. Ignores turns that do not run."""
        self._run(turn, -self._running_blocks.pop(turn.turn_id, 0))

    def leave(self, turn: TurnState) -> None:
        """A turn left the engine."""
        name = turn.job.tenant or NOBODY
        own = self._tenants[name]
        own.num_live -= 1
        own.num_running_blocks -= self._running_blocks.pop(turn.turn_id, 0)
        if self.counts_blocks:
            self._sort(name)
        if not own.num_live:
            self._forget_inactive(name)

    def grant(self, tenant: str) -> None:
        """A tenant got one more lease."""
        self._enter(tenant).num_leases += 1
        if self.counts_blocks:
            self._sort(tenant)

    def end(self, tenant: str) -> None:
        """A tenant has one lease less."""
        self._tenants[tenant].num_leases -= 1
        if self.counts_blocks:
            self._sort(tenant)
        self._forget_inactive(tenant)

    def add(self, tenant: str, block_ids: Collection[Hashable]) -> None:
        """A lease of this tenant now covers these blocks."""
        self._tenants[tenant].leased.add(block_ids)
        self._sort(tenant)

    def remove(self, tenant: str, block_ids: Collection[Hashable]) -> None:
        """A lease of this tenant no longer covers these blocks."""
        self._tenants[tenant].leased.remove(block_ids)
        self._sort(tenant)

    # Questions.

    def get_excess(self, tenant: str, num_leased: int) -> tuple[LeaseRefusal, int] | None:
        """The limit that this tenant's leases exceed, and by how many blocks or leases; None if none.

        `num_leased`: number of distinct blocks of all leases.
        """
        limits, own = self._limits, self._tenants[tenant]
        over = num_leased - int(limits.max_leased_share * self._num_blocks)
        if over > 0:
            return LeaseRefusal.OVER_SHARE, over
        if len(self._tenants) == 1:
            return None
        over = len(own.leased) - int(limits.max_tenant_share * self._num_blocks)
        if over > 0:
            return LeaseRefusal.TENANT_SHARE, over
        over = own.num_leases - limits.max_tenant_leases
        return (LeaseRefusal.TENANT_LEASES, over) if over > 0 else None

    def get_fair_share(self, tenant: str) -> float:
        """A tenant's fair share of the cache, from 0 to 1."""
        return self._get_weight(tenant) / self._sum_of_weights

    def is_over(self, tenant: str) -> bool:
        """Whether a tenant uses more memory than `SLACK` fair shares."""
        if len(self._tenants) < 2:
            return False
        return self.get_use(tenant) > SLACK * self._num_blocks / self._sum_of_weights

    def get_use(self, tenant: str) -> float:
        """The blocks that a tenant uses, divided by its weight."""
        own = self._tenants.get(tenant)
        return 0.0 if own is None else own.num_blocks / self._get_weight(tenant)

    def get_most_over(self) -> str | None:
        """The tenant with leases that uses most for its weight, if it is over its fair share; else None."""
        name = self._by_use.get_first() if self.counts_blocks else None
        return name if name is not None and self.is_over(name) else None

    def get_leased_blocks(self) -> dict[str, int]:
        """Number of distinct leased blocks of each tenant with leases, if they are counted. O(tenants)."""
        return {name: len(own.leased) for name, own in self._tenants.items() if own.num_leases}

    # Internal.

    def _enter(self, name: str) -> _Tenant:
        own = self._tenants.get(name)
        if own is None:
            own = self._tenants[name] = _Tenant()
            self._sum_of_weights += self._get_weight(name)
        return own

    def _forget_inactive(self, name: str) -> None:
        own = self._tenants[name]
        if not own.num_live and not own.num_leases:
            del self._tenants[name]
            self._sum_of_weights -= self._get_weight(name)

    def _run(self, turn: TurnState, change: int) -> None:
        name = turn.job.tenant or NOBODY
        self._tenants[name].num_running_blocks += change
        if self.counts_blocks:
            self._sort(name)

    def _sort(self, name: str) -> None:
        own = self._tenants[name]
        if own.num_leases:
            self._by_use.push(name, (-self.get_use(name),))
        else:
            self._by_use.discard(name)

    def _get_weight(self, name: str) -> float:
        return get_weight(self._weights, name)


def get_weight(weights: Mapping[str, float], tenant: str) -> float:
    """A tenant's weight: as the operator set it, else 1, or `UNVERIFIED_WEIGHT` for unverified tenants."""
    return float(weights.get(tenant, UNVERIFIED_WEIGHT if tenant == UNVERIFIED else 1.0))
