"""How much of the KV cache leases cover, when several may cover the same blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

from tenuto.core.limits import Limits


class BlockRefCounts:
    """Blocks that at least one lease covers. A change costs O(its blocks), in set operations."""

    def __init__(self) -> None:
        self._covered: set[Hashable] = set()
        self._more: Counter[Hashable] = Counter()
        """Leases beyond the first, by block; most blocks have none."""

    def __len__(self) -> int:
        return len(self._covered)

    def add(self, block_ids: Collection[Hashable]) -> None:
        """One more lease covers these blocks, each named once."""
        shared = self._covered.intersection(block_ids)
        self._covered.update(block_ids)
        if shared:
            self._more.update(shared)

    def remove(self, block_ids: Collection[Hashable]) -> None:
        """One lease less covers these blocks."""
        more = self._more
        shared = more.keys() & block_ids if more else ()
        for block_id in shared:
            more[block_id] -= 1
            if not more[block_id]:
                del more[block_id]
        self._covered.difference_update(block_ids)
        self._covered.update(shared)

    def count_new(self, block_ids: Collection[Hashable]) -> int:
        """How many of these blocks no lease covers yet."""
        return len(block_ids) - len(self._covered.intersection(block_ids))

    def copy(self) -> BlockRefCounts:
        """The same blocks, counted on their own from here on."""
        other = BlockRefCounts()
        other._covered, other._more = set(self._covered), Counter(self._more)
        return other


class Quota:
    """The limits on what leases may cover, of all and of one tenant; each block counts once in each."""

    def __init__(self, limits: Limits) -> None:
        self._max_share, self._max_tenant_share = limits.max_leased_share, limits.max_tenant_share
        self._all = BlockRefCounts()
        self._by_tenant: dict[str, BlockRefCounts] = {}

    @property
    def are_limited(self) -> bool:
        """Whether anything is to be counted at all."""
        return self._max_share < 1 or self._max_tenant_share < 1

    def __len__(self) -> int:
        return len(self._all) + sum(map(len, self._by_tenant.values()))

    def fit(self, tenant: str | None, block_ids: Collection[Hashable], num_blocks: int) -> bool:
        """Whether a tenant's lease of these blocks stays within the shares of a cache of `num_blocks`."""
        if self._exceeds(self._all, self._max_share, block_ids, num_blocks):
            return False
        # Those that name no tenant share no limit but that of all.
        own = self._by_tenant.get(tenant, BlockRefCounts()) if tenant is not None else None
        return own is None or not self._exceeds(own, self._max_tenant_share, block_ids, num_blocks)

    def add(self, tenant: str | None, block_ids: Collection[Hashable]) -> None:
        """A lease of a tenant covers these blocks."""
        self._all.add(block_ids)
        if tenant is not None:
            self._by_tenant.setdefault(tenant, BlockRefCounts()).add(block_ids)

    def remove(self, tenant: str | None, block_ids: Collection[Hashable]) -> None:
        """A lease of a tenant covers them no more."""
        self._all.remove(block_ids)
        if tenant is not None:
            own = self._by_tenant[tenant]
            own.remove(block_ids)
            if not own:
                del self._by_tenant[tenant]

    @staticmethod
    def _exceeds(
        coverage: BlockRefCounts, share: float, block_ids: Collection[Hashable], num_blocks: int
    ) -> bool:
        return share < 1 and len(coverage) + coverage.count_new(block_ids) > share * num_blocks
