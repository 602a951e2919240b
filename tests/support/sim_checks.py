"""The checker of the simulated engine: does every reference have a holder, and every block a place?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tenuto.core.errors import IntegrityError
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.kv.pool import Extent, ExtentPool, Row, skip_to
from tenuto.sim.tiers.chain_offload import ChainOffloader


def check_integrity(scheduler: Scheduler, *, idle: bool = False) -> None:
    """Check the invariants of the KV cache, its block tables and leases; O(extents), for tests and debugging.

    Free + referenced = total; references = tables, leases and pins that hold a block; in the free queue
    exactly without references. With `idle` also: no request is left.
    Raises IntegrityError naming what is wrong.
    """
    pool, state = scheduler.kv.pool, scheduler.state
    if idle and (state.requests or state.running or len(state.waiting)):
        raise IntegrityError(f"requests are left: {sorted(state.requests)}")
    num_placed = len(state.running) + len(state.waiting) + state.num_loading
    if num_placed != len(state.requests):
        raise IntegrityError(f"{len(state.requests)} requests, but {num_placed} that run, wait or load")
    leases = list(scheduler.driver.leases)
    tables = [table for request in state.requests.values() for table in request.tables]
    held: list[Any] = [lease.blocks for lease in leases]
    rows = [table.row for table in tables]
    held += scheduler.driver.pins
    leased = _count(held)
    if _count_blocks(leased) != pool.num_leased_blocks or any(
        extent.num_holds != num_holds for extent, num_holds in leased.items()
    ):
        raise IntegrityError(f"leases hold {_count_blocks(leased)} blocks, counted {pool.num_leased_blocks}")
    num_idle = sum(
        extent.end - extent.first for extent, num_holds in leased.items() if extent.ref_cnt == num_holds
    )
    if num_idle != pool.num_idle_leased_blocks:
        raise IntegrityError(f"only leases hold {num_idle} blocks, counted {pool.num_idle_leased_blocks}")
    offloader = scheduler.offloader
    storing = [row for *_, row in offloader.stores] if isinstance(offloader, ChainOffloader) else []
    check_pool(pool, [*rows, *held, *storing], num_blanks=sum(table.num_blanks for table in tables))


def check_pool(pool: ExtentPool, held: Iterable[Row], *, num_blanks: int = 0) -> None:
    """Check a pool against all rows that are held, and the blank blocks in use."""
    references = _count(held)
    num_free_blanks, free = pool.get_queue()
    if len(set(free)) != len(free):
        raise IntegrityError("an extent is in the free queue twice")
    for extent in {*free, *references}:
        if extent.ref_cnt != references[extent]:
            raise IntegrityError(f"{extent} has {references[extent]} holders")
        if extent.first >= extent.end or (extent.is_cached and extent not in extent.home):
            raise IntegrityError(f"{extent} is empty, or no look-up finds it")
        if not extent.is_cached and references[extent] != 1:
            raise IntegrityError(f"{extent} is not cached, yet more than one holder found it")
        if (extent.ref_cnt == 0) != (extent in free):
            raise IntegrityError(f"{extent} is free or in use, but not both say so")
    num_free = num_free_blanks + _count_blocks(free)
    num_used = num_blanks + _count_blocks(references)
    if num_free != pool.num_free_blocks or num_free + num_used != pool.num_blocks:
        raise IntegrityError(f"{num_free} free + {num_used} used blocks, counted {pool.num_free_blocks} free")


def _count(rows: Iterable[Row]) -> Counter[Extent]:
    return Counter(extent for row in rows for extent in _get_extents(row))


def _count_blocks(extents: Iterable[Extent]) -> int:
    return sum(extent.end - extent.first for extent in extents)


def _get_extents(row: Row) -> Iterator[Extent]:
    """The extents that hold a row's blocks, in order; some may hold blocks beside them."""
    for extent, first, end in row.ranges:
        while first < end:
            extent = skip_to(extent, first)
            yield extent
            first = extent.end
