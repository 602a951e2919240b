"""The invariants of a block pool, of the leases on it, and of the driver's books on vLLM's scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tenuto.core.errors import IntegrityError
from tenuto.core.leases import LeaseTable


def check_integrity(
    pool: Any, leases: LeaseTable | None = None, *, pins: Iterable[list[Any]] = (), idle: bool = False
) -> None:
    """Check a block pool's invariants, ours or vLLM's. O(blocks).

    Free + referenced = total; in the free queue exactly with ref count 0; no block twice;
    every leased or pinned block referenced. With `idle` (no request anywhere) also: only leases and pins
    hold anything. Raises IntegrityError naming the first block that is wrong.
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
        pins = list(pins)
        _check_leases(pool, leases, pins, idle)
        if hasattr(pool, "get_usage"):
            _check_usage(pool, leases, pins)


def count_idle_leased_blocks(pool: Any, leases: LeaseTable, pins: Iterable[list[Any]] = ()) -> int:
    """Blocks that leases and pins hold and nothing else does, counted one by one."""
    held = _count_held(leases, pins)
    return sum(block.ref_cnt == held[block.block_id] > 0 for block in pool.blocks)


def _count_held(leases: LeaseTable, pins: Iterable[list[Any]]) -> Counter[int]:
    lists = [*(lease.blocks for lease in leases), *pins]
    return Counter(block.block_id for blocks in lists for block in blocks)


def _check_usage(pool: Any, leases: LeaseTable, pins: list[list[Any]]) -> None:
    """The reported usage counts the blocks that something else than leases holds."""
    num_blocks = sum(not block.is_null for block in pool.blocks)
    num_used = num_blocks - pool.free_block_queue.num_free_blocks
    num_used -= count_idle_leased_blocks(pool, leases, pins)
    if abs(pool.get_usage() - num_used / num_blocks) > 1e-9:
        raise IntegrityError(f"usage {pool.get_usage()}, but {num_used} of {num_blocks} blocks are used")


def _check_leases(pool: Any, leases: LeaseTable, pins: list[list[Any]], idle: bool) -> None:
    held = _count_held(leases, pins)
    for block in pool.blocks:
        references = held[block.block_id]
        if block.is_null:
            continue
        if block.ref_cnt < references or (idle and block.ref_cnt != references):
            raise IntegrityError(f"{block}: {references} leases and pins hold it")


def _check_tenants(driver: Any) -> None:
    """Each tenant's turns, leases and leased blocks are what its quota says."""
    turns, leases, quota = list(driver._turns.values()), list(driver.leases), driver.quota
    names = {turn.job.tenant or "" for turn in turns} | {lease.tenant for lease in leases}
    if names != quota._tenants.keys():
        raise IntegrityError(f"active tenants {sorted(names)[:5]}, counted {sorted(quota._tenants)[:5]}")
    for name, own in quota._tenants.items():
        ours = [lease for lease in leases if lease.tenant == name]
        num_blocks = len({block.block_id for lease in ours for block in lease.blocks})
        counted = len(own.leased) if quota.counts_blocks else num_blocks
        num_turns = sum((turn.job.tenant or "") == name for turn in turns)
        if (own.num_live, own.num_leases, counted) != (num_turns, len(ours), num_blocks):
            raise IntegrityError(f"{name!r}: {num_turns} turns, {len(ours)} leases, counted {own}")
    num_waiting = sum(own.num_waiting.total() for own in driver.shares._tenants.values())
    if num_waiting != sum(not turn.started for turn in turns):
        raise IntegrityError("the turns that wait are not those that the tenants' service counts")
    live = {turn.turn_id for turn in turns}
    waits, notes = driver._fairness.waits, {"charged": driver.shares._charges}
    notes |= {"counted as running": quota._running_blocks, "sharing prefixes": driver.pins._shared}
    notes["compared with stock"] = waits._live
    for name, kept in notes.items():
        if stray := kept.keys() - live:
            raise IntegrityError(f"{sorted(stray)[:5]} left, and still {name}")


def check_books(scheduler: Any) -> None:
    """Check that a driver and vLLM's scheduler agree on who is there. O(turns + jobs + leased blocks).

    Raises IntegrityError naming what differs.
    """
    driver = scheduler.driver
    turns, jobs = driver._turns, driver._jobs
    if turns.keys() != scheduler.requests.keys():
        differ = sorted(turns.keys() ^ scheduler.requests.keys())
        raise IntegrityError(f"the driver and the scheduler disagree on these requests: {differ[:5]}")
    live = {turn_id: job.job_id for job in jobs.jobs.values() for turn_id in job.live_turn_ids or ()}
    if live != {turn_id: turn.job.job_id for turn_id, turn in turns.items()}:
        raise IntegrityError("the jobs' live turns are not the driver's turns")
    if idle_and_live := [job_id for job_id in jobs.idle if jobs.jobs[job_id].live_turn_ids]:
        raise IntegrityError(f"a job is idle and has turns: {idle_and_live[0]!r}")
    if len(jobs.idle) > driver.limits.max_remembered_jobs:
        raise IntegrityError(f"{len(jobs.idle)} idle jobs are remembered")
    if len(jobs.jobs) > len(jobs.idle) + len(turns):
        raise IntegrityError(f"{len(jobs.jobs)} jobs, but {len(jobs.idle)} idle ones and {len(turns)} turns")
    for lease in driver.leases:
        if lease.job_id not in jobs.jobs or not (lease.next_turn_id is None or lease.next_turn_id in turns):
            raise IntegrityError(f"the lease of {lease.job_id!r} waits for a turn that is gone")
    _check_tenants(driver)
    leased = _count_held(driver.leases, driver.pins)
    if len(leased) != driver.get_num_leased_blocks():
        raise IntegrityError(f"{len(leased)} blocks leased, counted {driver.get_num_leased_blocks()}")
    stats = driver.stats
    if stats.num_leases_granted != sum(stats.num_leases_ended.values()) + len(driver.leases):
        raise IntegrityError(f"{stats.num_leases_granted} leases granted, not as many ended or held")
    if stray := driver._order._held.keys() - turns.keys():
        raise IntegrityError(f"admission waits for a turn that is gone: {sorted(stray)[0]}")


def check_nothing_is_left(scheduler: Any) -> None:
    """Check that no request is left, and no block, lease or note of one. Call it when all leases have ended.

    Raises IntegrityError naming what is left.
    """
    driver, pool = scheduler.driver, scheduler.kv_cache_manager.block_pool
    left = {
        "requests": len(scheduler.requests),
        "turns in the driver": len(driver._turns),
        "turns in admission": len(driver._order._held),
        "parked turns": scheduler.get_num_parked(),
        "leases": len(driver.leases),
        "leased blocks": driver.get_num_leased_blocks(),
        "blocks in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
    if any(left.values()) or scheduler.has_requests():
        raise IntegrityError(f"something is left: { ({name: n for name, n in left.items() if n}) }")
    check_integrity(pool, driver.leases, pins=driver.pins, idle=True)
    check_books(scheduler)
