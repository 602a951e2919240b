"""Fair shares of the order: between tenants, the one that has received the least service goes first.

Each tenant has a virtual time: the work that the engine began for it, divided by its weight. A tenant that
waited for nothing gets no credit for it: when it comes back, it starts at the virtual time of the tenant
served last. Within a tenant, the policy's order holds. With one tenant this is exactly the policy's order.

Source: start-time fair queueing (Goyal, Vin and Cheng, 1996) with work counted in tokens, as in the virtual
token counter (Sheng et al., OSDI 2024). Every event takes O(log n) time in the turns and tenants that wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import TurnState
from tenuto.core.policy import Key
from tenuto.core.quota import NOBODY
from tenuto.core.turn_work import MovingMean, get_work


@dataclass(slots=True)
class _Tenant:
    """What one tenant has received, and how many of its turns are in the engine."""

    weight: float
    time: float = 0.0
    credit: float = 0.0
    """Work that was charged but not done, because outputs were shorter than expected."""
    num_waiting: int = 0
    num_live: int = 0


class Service:
    """The virtual times of the tenants, and which tenants have turns in the engine."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: the shares of some tenants; a tenant that is not named has weight 1."""
        self._tenants: dict[str, _Tenant] = {}
        self.set_weights(weights)
        self._idle = IndexedHeap()
        """Tenants without a turn that are still ahead of `_now`, by virtual time."""
        self._now = 0.0
        """The virtual time of the tenant served last, when its turn started."""
        self._output = MovingMean()
        """Output tokens of a turn."""
        self._waiting: OrderedDict[str, TurnState] = OrderedDict()
        """Turns that wait for their first step, in order of arrival."""
        self.num_live_tenants = 0
        """Tenants with a turn in the engine."""

    def get_time(self, tenant: str) -> float:
        """The tenant's virtual time. It never decreases while the tenant has a turn in the engine."""
        own = self._tenants.get(tenant)
        return own.time if own is not None else self._now

    def set_weights(self, weights: Mapping[str, float] | None) -> None:
        """Share by other weights from now on; a tenant that is not named has weight 1."""
        self._weights = weights or {}
        for name, own in self._tenants.items():
            own.weight = self._weights.get(name, 1.0)

    def get_oldest_arrival_s(self) -> float | None:
        """When the turn arrived that waits longest for its first step; None if none waits."""
        turn = next(iter(self._waiting.values()), None)
        return None if turn is None else turn.arrival_s

    def arrive(self, turn: TurnState) -> None:
        """A turn arrived."""
        name = get_tenant(turn)
        own = self._tenants.get(name)
        if own is None:
            own = self._tenants[name] = _Tenant(self._weights.get(name, 1.0), self._now)
        if not own.num_live:
            self._idle.discard(name)
            self.num_live_tenants += 1
        if not own.num_waiting:
            own.time = max(own.time, self._now)
        self._waiting[turn.turn_id] = turn
        own.num_waiting += 1
        own.num_live += 1

    def take(self, turn: TurnState) -> None:
        """A turn was taken off the queue. Its work counts at once, because one step takes many turns."""
        if turn.started:
            return
        own = self._tenants[get_tenant(turn)]
        if own.time > self._now:
            self._now = own.time
            self._forget_idle()
        self._charge(turn, own, self._get_work(turn, turn.num_reusable_tokens))

    def put_back(self, turn: TurnState) -> None:
        """A turn that was taken returns to the queue, or leaves, without having started."""
        if turn.charged_work and not turn.started:
            self._charge(turn, self._tenants[get_tenant(turn)], 0.0)

    def start(self, turn: TurnState, num_hit_tokens: int) -> None:
        """A turn got its first step."""
        if not turn.charged_work:
            self.take(turn)
        own = self._tenants[get_tenant(turn)]
        own.num_waiting -= 1
        del self._waiting[turn.turn_id]
        turn.num_expected_tokens = turn.arrival.num_prompt_tokens + self._output.value
        self._charge(turn, own, self._get_work(turn, num_hit_tokens))

    def leave(self, turn: TurnState, num_output_tokens: int) -> None:
        """A turn ended, or left before it started."""
        name = get_tenant(turn)
        own = self._tenants[name]
        own.num_live -= 1
        if turn.started:
            num_prompt_tokens = turn.arrival.num_prompt_tokens
            self._charge(turn, own, get_work(num_prompt_tokens, turn.num_hit_tokens, num_output_tokens))
            self._output.observe(num_output_tokens)
        else:
            own.num_waiting -= 1
            del self._waiting[turn.turn_id]
            self._charge(turn, own, 0.0)
        if not own.num_live:
            self.num_live_tenants -= 1
            self._idle.push(name, (own.time,))
            self._forget_idle()
        if not self.num_live_tenants:
            # Nobody waits for anybody, so nobody is ahead.
            self._tenants.clear()
            self._idle = IndexedHeap()

    def _get_work(self, turn: TurnState, num_hit_tokens: int) -> float:
        """The work of a turn whose output is not known yet."""
        return get_work(turn.arrival.num_prompt_tokens, num_hit_tokens, self._output.value)

    def _charge(self, turn: TurnState, own: _Tenant, work: float) -> None:
        """Charge a turn's work to its tenant; a part of it may be charged already."""
        # A virtual time never decreases, or the order of the tenants would have to be corrected at once.
        due = work - turn.charged_work - own.credit
        turn.charged_work = work
        if due > 0.0:
            own.credit = 0.0
            own.time += due / own.weight
        else:
            own.credit = -due

    def _forget_idle(self) -> None:
        """Forget tenants that would start at `_now` anyway, so that only busy tenants use memory."""
        while (key := self._idle.get_first_key()) is not None and float(key[0]) <= self._now:
            del self._tenants[self._idle.pop()]


@dataclass(slots=True)
class _Lane:
    """The waiting turns of one tenant with one priority, in the policy's order."""

    priority: int
    tenant: str
    turns: IndexedHeap = field(default_factory=IndexedHeap)


class FairOrder:
    """A priority queue of turns: by the request's priority, then by tenant, then by the policy's key.

    It has the methods of `IndexedHeap`. `get_first` may correct the order of the tenants.
    """

    def __init__(
        self, turns: Mapping[str, TurnState], service: Service, *, by_priority: bool = False
    ) -> None:
        """`turns`: all turns in the engine, by id."""
        self._turns = turns
        self._service = service
        self._by_priority = by_priority
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[str, str] = {}
        self._order = IndexedHeap()
        """Lanes by priority and virtual time. The time of a lane may have increased since."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, item: object) -> bool:
        return item in self._lane_of

    def __iter__(self) -> Iterator[str]:
        """All ids: the first lane's in order, then the next lane's; a copy."""
        lanes = sorted((self._get_key(lane), name) for name, lane in self._lanes.items())
        return iter([item for _, name in lanes for item in self._lanes[name].turns])

    def push(self, item: str, key: Key) -> None:
        """Add an id, or change the key of one that is there."""
        name = self._lane_of.get(item)
        if name is None:
            turn = self._turns[item]
            self._service.put_back(turn)
            priority = turn.arrival.priority if self._by_priority else 0
            tenant = get_tenant(turn)
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
        """Remove an id if it is there. Most that leave the queue start, so its work is charged."""
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
            self._service.take(turn)

    def _get_first_lane(self) -> _Lane | None:
        while (name := self._order.get_first()) is not None:
            lane = self._lanes[name]
            key = self._get_key(lane)
            if key == self._order.get_first_key():
                return lane
            # The tenant was served since. Times only increase, so the other lanes are not before their keys.
            self._order.push(name, key)
        return None

    def _get_key(self, lane: _Lane) -> tuple[int, float]:
        return lane.priority, self._service.get_time(lane.tenant)


def get_tenant(turn: TurnState) -> str:
    """The tenant whose share a turn uses."""
    return turn.job.tenant or NOBODY
