"""Each tenant's part of the KV cache: what its leases cover, what its turns use, and its fair share.

A tenant is *active* while it has a turn in the engine or a lease. Its fair share of the cache is its weight,
divided by the weights of all active tenants. A tenant that uses more than `SLACK` times its fair share is
*over* it: its leases yield first to tenants that use less, and its waiting turns take no blocks from the
leases of such tenants. One active tenant may use everything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import TurnState
from tenuto.core.limits import Limits
from tenuto.core.types import LeaseRefusal

NOBODY = ""
"""The tenant of turns without a tenant: they count as one tenant."""
SLACK = 1.25
"""How many fair shares a tenant may use before its leases yield first. It leaves the order of leases to the
policy while tenants use about the same."""


class BlockRefCounts:
    """Blocks that at least one lease covers. A change takes time linear in its number of blocks."""

    def __init__(self) -> None:
        self._covered: set[Hashable] = set()
        self._more: Counter[Hashable] = Counter()
        """For each block that several leases cover: the number of its leases minus one."""

    def __len__(self) -> int:
        return len(self._covered)

    def add(self, block_ids: Collection[Hashable]) -> None:
        """One more lease covers these blocks; each block must be named once."""
        shared = self._covered.intersection(block_ids)
        self._covered.update(block_ids)
        if shared:
            self._more.update(shared)

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

    def count_new(self, block_ids: Collection[Hashable]) -> int:
        """How many of these blocks are not covered by any lease yet."""
        return len(block_ids) - len(self._covered.intersection(block_ids))

    def get_count(self, block_id: Hashable) -> int:
        """How many leases cover this block."""
        return self._more[block_id] + 1 if block_id in self._more else int(block_id in self._covered)


@dataclass(slots=True)
class _Tenant:
    leased: BlockRefCounts = field(default_factory=BlockRefCounts)
    num_leases: int = 0
    num_turns: int = 0
    """Turns that wait or run."""
    num_running_blocks: int = 0
    """Blocks that its running turns are expected to need. Blocks that several share count for each."""

    @property
    def num_blocks(self) -> int:
        """The memory it uses, for running turns and leases."""
        return len(self.leased) + self.num_running_blocks


class Quota:
    """What each active tenant uses. Every event takes O(log n) time in the number of tenants.

    A block that several leases share counts once for each tenant that shares it. Blocks are counted only once
    a turn with a tenant has arrived, so servers without tenants do not pay for it.
    """

    def __init__(self, limits: Limits, num_blocks: int, block_size: int) -> None:
        """`num_blocks`: size of the KV cache."""
        self._limits = limits
        self._weights = limits.tenant_weights or {}
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._tenants: dict[str, _Tenant] = {}
        self._sum_of_weights = 0.0
        self._by_use = IndexedHeap()
        """Tenants with leases, once blocks are counted; the one that uses most, for its weight, is first."""
        self.counts_blocks = False

    def __len__(self) -> int:
        return len(self._tenants)

    # Events.

    def arrive(self, turn: TurnState) -> bool:
        """A turn arrived. Return True if the blocks of all leases must be counted from now on (`add`)."""
        self._enter(turn.job.tenant or NOBODY).num_turns += 1
        turn.num_counted_blocks = 0
        begins = turn.job.tenant is not None and not self.counts_blocks
        self.counts_blocks |= begins
        return begins

    def start(self, turn: TurnState) -> None:
        """A turn started, or started again."""
        self.stop(turn)
        turn.num_counted_blocks = math.ceil(turn.num_expected_tokens / self._block_size)
        self._run(turn, turn.num_counted_blocks)

    def stop(self, turn: TurnState) -> None:
        """A running turn ended or was preempted. Nothing happens if the turn does not run."""
        self._run(turn, -turn.num_counted_blocks)
        turn.num_counted_blocks = 0

    def leave(self, turn: TurnState) -> None:
        """A turn left the engine."""
        self.stop(turn)
        name = turn.job.tenant or NOBODY
        self._tenants[name].num_turns -= 1
        self._forget_inactive(name)

    def grant(self, tenant: str | None) -> None:
        """A tenant got one more lease."""
        self._enter(tenant or NOBODY).num_leases += 1
        self._sort(tenant or NOBODY)

    def end(self, tenant: str | None) -> None:
        """A tenant has one lease less."""
        name = tenant or NOBODY
        self._tenants[name].num_leases -= 1
        self._sort(name)
        self._forget_inactive(name)

    def add(self, tenant: str | None, block_ids: Collection[Hashable]) -> None:
        """A lease of this tenant now covers these blocks."""
        self._tenants[tenant or NOBODY].leased.add(block_ids)
        self._sort(tenant or NOBODY)

    def remove(self, tenant: str | None, block_ids: Collection[Hashable]) -> None:
        """A lease of this tenant no longer covers these blocks."""
        self._tenants[tenant or NOBODY].leased.remove(block_ids)
        self._sort(tenant or NOBODY)

    # Questions.

    def get_excess(self, tenant: str | None, num_leased: int) -> tuple[LeaseRefusal, int] | None:
        """The limit that this tenant's leases exceed, and by how many blocks or leases; None if they do not.

        `num_leased`: distinct blocks of all leases.
        """
        limits, own = self._limits, self._tenants[tenant or NOBODY]
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

    def is_over(self, tenant: str | None) -> bool:
        """Whether a tenant uses more memory than `SLACK` fair shares."""
        if len(self._tenants) < 2:
            return False
        return self.get_use(tenant) > SLACK * self._num_blocks / self._sum_of_weights

    def get_use(self, tenant: str | None) -> float:
        """The blocks that a tenant uses, divided by its weight."""
        own = self._tenants.get(tenant or NOBODY)
        return 0.0 if own is None else own.num_blocks / self._get_weight(tenant or NOBODY)

    def get_most_over(self) -> str | None:
        """Of the tenants with leases, the one that uses most for its weight, if it is over its fair share."""
        name = self._by_use.get_first() if self.counts_blocks else None
        return name if name is not None and self.is_over(name) else None

    def get_leased_blocks(self) -> dict[str, int]:
        """The distinct leased blocks of each tenant with leases, if they are counted. O(tenants)."""
        return {name: len(own.leased) for name, own in self._tenants.items() if own.num_leases}

    # Inside.

    def _enter(self, name: str) -> _Tenant:
        own = self._tenants.get(name)
        if own is None:
            own = self._tenants[name] = _Tenant()
            self._sum_of_weights += self._get_weight(name)
        return own

    def _forget_inactive(self, name: str) -> None:
        own = self._tenants[name]
        if not own.num_turns and not own.num_leases:
            del self._tenants[name]
            self._sum_of_weights -= self._get_weight(name)

    def _run(self, turn: TurnState, change: int) -> None:
        name = turn.job.tenant or NOBODY
        self._tenants[name].num_running_blocks += change
        self._sort(name)

    def _sort(self, name: str) -> None:
        if not self.counts_blocks:
            return
        own = self._tenants[name]
        if own.num_leases:
            self._by_use.push(name, (-self.get_use(name),))
        else:
            self._by_use.discard(name)

    def _get_weight(self, name: str) -> float:
        return float(self._weights.get(name, 1.0))
