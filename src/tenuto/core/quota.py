"""Counts how much of the KV cache leases cover; several leases may cover the same block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

from tenuto.core.limits import Limits


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


class Quota:
    """Limits the blocks that all leases, and the leases of one tenant, may cover.

    A block that several leases share counts once in the total, and once for each tenant that shares it.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_share, self._max_tenant_share = limits.max_leased_share, limits.max_tenant_share
        self._all = BlockRefCounts()
        self._by_tenant: dict[str, BlockRefCounts] = {}

    @property
    def is_limited(self) -> bool:
        """Whether any limit is below the whole cache. If not, the lease table does not count blocks here."""
        return self._max_share < 1 or self._max_tenant_share < 1

    def __len__(self) -> int:
        return len(self._all) + sum(map(len, self._by_tenant.values()))

    def fit(self, tenant: str | None, block_ids: Collection[Hashable], num_blocks: int) -> bool:
        """Whether a tenant's lease of these blocks stays within the shares of a cache of `num_blocks`."""
        if self._exceeds(self._all, self._max_share, block_ids, num_blocks):
            return False
        # Only the limit on all leases applies to a lease without a tenant.
        own = self._by_tenant.get(tenant, BlockRefCounts()) if tenant is not None else None
        return own is None or not self._exceeds(own, self._max_tenant_share, block_ids, num_blocks)

    def add(self, tenant: str | None, block_ids: Collection[Hashable]) -> None:
        """A lease of this tenant now covers these blocks."""
        self._all.add(block_ids)
        if tenant is not None:
            self._by_tenant.setdefault(tenant, BlockRefCounts()).add(block_ids)

    def remove(self, tenant: str | None, block_ids: Collection[Hashable]) -> None:
        """A lease of this tenant no longer covers these blocks."""
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
