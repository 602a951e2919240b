"""The invariants of a block pool and of the leases on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tenuto.core.errors import IntegrityError
from tenuto.core.leases import LeaseTable


def check_integrity(pool: Any, leases: LeaseTable | None = None, *, idle: bool = False) -> None:
    """Check a block pool's invariants, ours or vLLM's. O(blocks).

    Free + referenced = total; in the free queue exactly with ref count 0; no block twice;
    every leased block referenced. With `idle` (no request anywhere) also: only leases hold
    anything. Raises IntegrityError naming the first block that is wrong.
    """
    free = pool.free_block_queue.get_all_free_blocks()
    free_ids = [block.block_id for block in free]
    if len(set(free_ids)) != len(free_ids):
        raise IntegrityError("a block is in the free queue twice")
    if len(free) != pool.free_block_queue.num_free_blocks:
        raise IntegrityError(f"{len(free)} free blocks, counted {pool.free_block_queue.num_free_blocks}")
    in_queue = set(free_ids)
    for block in pool.blocks:
        if block.is_null:
            if block.block_id in in_queue:
                raise IntegrityError("the null block is in the free queue")
            continue
        if block.ref_cnt < 0:
            raise IntegrityError(f"{block} has a negative ref count")
        if (block.ref_cnt == 0) != (block.block_id in in_queue):
            raise IntegrityError(f"{block} is free or in use, but not both counts say so")
    if leases is not None:
        _check_leases(pool, leases, idle)


def _check_leases(pool: Any, leases: LeaseTable, idle: bool) -> None:
    held: Counter[int] = Counter()
    for lease in leases:
        held.update(block.block_id for block in lease.blocks)
    if held.total() != leases.num_blocks:
        raise IntegrityError(f"leases cover {held.total()} blocks, counted {leases.num_blocks}")
    for block in pool.blocks:
        references = held[block.block_id]
        if block.is_null:
            continue
        if block.ref_cnt < references or (idle and block.ref_cnt != references):
            raise IntegrityError(f"{block}: {references} leases hold it")
