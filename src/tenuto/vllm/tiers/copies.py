"""One thread that copies KV between a CPU build's cache and host memory: loads first, stores behind them.

vLLM's own worker needs a GPU. This one does the same on a CPU build, so that tiers run and are tested there.

    cache   (num_blocks, page bytes)                     one array per layer
    host    (num_chunks, blocks per chunk, page bytes)   one array for each of them
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

logger = logging.getLogger("vllm.tenuto")

Array = Any
"""A numpy array; its type is left open because the arrays are views of tensors."""


@dataclass(frozen=True)
class Part:
    """What one job copies of one layer: `target[targets] = source[sources]`."""

    source: Array
    sources: Any
    target: Array
    targets: Any
    num_bytes: int


@dataclass
class Job:
    """One load or store, as vLLM numbers it."""

    job_id: int
    is_load: bool
    parts: list[Part]
    chunks: tuple[int, ...]
    """The chunks of host memory that it reads (a load) or writes (a store)."""
    num_done: int = 0
    busy_s: float = 0.0
    has_failed: bool = False


@dataclass(frozen=True)
class Done:
    """A job that ended. A failed one is not repeated: see `Copies.take_failed_loads`."""

    job_id: int
    is_load: bool
    num_bytes: int
    busy_s: float


def copy_rows(part: Part) -> None:
    """Copy rows; numpy lets other threads run meanwhile."""
    part.target[part.targets] = part.source[part.sources]


@dataclass
class _Shared:
    """What the thread and its callers share, under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    loads: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    stores: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    running: Job | None = None
    urgent: set[int] = field(default_factory=set)
    done: list[Done] = field(default_factory=list)
    failed_loads: set[int] = field(default_factory=set)
    bad_chunks: set[int] = field(default_factory=set)
    is_closed: bool = False


class Copies:
    """The queue of jobs and the thread that works through it.

    A load goes before every store, and interrupts a store between two layers. A job that a caller waits for
    goes first. Jobs of one kind keep their order, so a chunk that is written twice ends with the later bytes.
    """

    def __init__(self, copy: Callable[[Part], None] = copy_rows) -> None:
        """`copy` copies one part; tests pass one that fails or hangs."""
        self._copy = copy
        self._shared = _Shared()
        self._thread = threading.Thread(target=self._run, name="tenuto-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once."""
        shared = self._shared
        with shared.changed:
            (shared.loads if job.is_load else shared.stores)[job.job_id] = job
            shared.changed.notify_all()

    def take_done(self) -> list[Done]:
        """The jobs that ended since the last call, failed ones included."""
        shared = self._shared
        with shared.changed:
            done, shared.done = shared.done, []
        return done

    def take_failed_loads(self) -> set[int]:
        """The loads among the ended ones whose blocks do not hold what they should."""
        shared = self._shared
        with shared.changed:
            failed, shared.failed_loads = shared.failed_loads, set()
        return failed

    def wait(self, job_ids: Collection[int]) -> None:
        """Return once none of these jobs is queued or running; they go before all others."""
        shared = self._shared
        with shared.changed:
            shared.urgent.update(each for each in job_ids if self._is_pending(each))
            shared.changed.notify_all()
            shared.changed.wait_for(
                lambda: shared.is_closed or not any(map(self._is_pending, job_ids)), timeout=None
            )
            shared.urgent.difference_update(job_ids)

    def close(self) -> None:
        """Stop after the copy of one layer; what is queued is dropped."""
        shared = self._shared
        with shared.changed:
            shared.is_closed = True
            shared.loads.clear()
            shared.stores.clear()
            shared.changed.notify_all()
        self._thread.join(timeout=10)

    # Inside.

    def _is_pending(self, job_id: int) -> bool:
        shared = self._shared
        is_running = shared.running is not None and shared.running.job_id == job_id
        return is_running or job_id in shared.loads or job_id in shared.stores

    def _run(self) -> None:
        shared = self._shared
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.is_closed or shared.loads or shared.stores)
                if shared.is_closed:
                    return
                job = shared.running = self._choose()
                if not job.num_done and job.is_load and not shared.bad_chunks.isdisjoint(job.chunks):
                    # A store of these chunks failed: what is there is not what it should be.
                    job.has_failed = True
            self._advance(job)
            with shared.changed:
                shared.running = None
                if job.has_failed or job.num_done == len(job.parts):
                    self._finish(job)
                    shared.changed.notify_all()

    def _choose(self) -> Job:
        """The job whose next part is copied; call it with a job queued."""
        shared = self._shared
        queues = (shared.loads, shared.stores)
        for queue in queues if shared.urgent else ():
            first = _get_first(queue, shared.urgent)
            if first is not None:
                return first
        queue = shared.loads or shared.stores
        return next(iter(queue.values()))

    def _advance(self, job: Job) -> None:
        """Copy one more part of a job."""
        if job.has_failed or job.num_done == len(job.parts):
            return
        started_s = time.perf_counter()
        try:
            self._copy(job.parts[job.num_done])
            job.num_done += 1
        except Exception:
            logger.exception("copy %d failed", job.job_id)
            job.has_failed = True
        job.busy_s += time.perf_counter() - started_s

    def _finish(self, job: Job) -> None:
        shared = self._shared
        (shared.loads if job.is_load else shared.stores).pop(job.job_id, None)
        if job.is_load and job.has_failed:
            shared.failed_loads.add(job.job_id)
        elif job.has_failed:
            shared.bad_chunks.update(job.chunks)
        elif not job.is_load:
            shared.bad_chunks.difference_update(job.chunks)
        num_bytes = sum(part.num_bytes for part in job.parts[: job.num_done])
        shared.done.append(Done(job.job_id, job.is_load, num_bytes, job.busy_s))


def _get_first(queue: OrderedDict[int, Job], urgent: set[int]) -> Job | None:
    """The first job of a queue, if one of the urgent ones is in it: jobs of a kind keep their order."""
    return next(iter(queue.values())) if not urgent.isdisjoint(queue) else None


def get_rows(chunks: Array, first: int, num_blocks: int, blocks_per_chunk: int) -> tuple[Array, Array]:
    """Where consecutive blocks of one request lie in host memory: (chunk, place in the chunk) of each.

    `first` is the request's number of the first block; `chunks` begins with the chunk that holds it.
    """
    places = first % blocks_per_chunk + np.arange(num_blocks)
    return chunks[places // blocks_per_chunk], places % blocks_per_chunk


def make_part(cache: Array, host: Array, blocks: Array, rows: tuple[Array, Array], *, is_load: bool) -> Part:
    """The part of a job that copies one layer's blocks to these rows of host memory, or from there.

    `cache`: (num_blocks, page bytes). `host`: (num_chunks, blocks per chunk, page bytes).
    """
    num_bytes = len(blocks) * int(cache.shape[1])
    if is_load:
        return Part(host, rows, cache, blocks, num_bytes)
    return Part(cache, blocks, host, rows, num_bytes)
