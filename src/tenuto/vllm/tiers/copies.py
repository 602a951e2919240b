"""One thread that copies KV between a CPU build's cache and host memory: loads first, stores behind them.

vLLM's own worker needs a GPU. This one does the same on a CPU build, so that tiers run and are tested there.

    cache   (num_blocks, page bytes)                     one array per layer
    host    (num_chunks, blocks per chunk, page bytes)   one array for each of them

A layer is read first and written then. A read can hang (of host memory that lies on a dead disk, say). Then
its job is given up: it writes nothing any more, and its blocks are free for others.
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
    """A job that ended. A failed one is not repeated."""

    job_id: int
    is_load: bool
    num_bytes: int
    busy_s: float
    has_failed: bool
    """The target does not hold what it should. Chunks of a failed store are never loaded."""


STUCK_S = 10.0
"""A layer's read that takes longer hangs. Until it ends, every job fails at once, so that nothing waits."""


def read_rows(part: Part) -> Array:
    """A copy of the source's rows; numpy lets other threads run meanwhile."""
    return part.source[part.sources]


@dataclass
class _Shared:
    """What the thread and its callers share, under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    loads: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    stores: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    reads_since_s: float | None = None
    """Since when the thread reads a layer; None while it does not."""
    is_stuck: bool = False
    urgent: set[int] = field(default_factory=set)
    done: list[Done] = field(default_factory=list)
    bad_chunks: set[int] = field(default_factory=set)
    is_closed: bool = False


class Copies:
    """The queue of jobs and the thread that works through it.

    A load goes before every store, and interrupts a store between two layers. A job that a caller waits for
    goes first. Jobs of one kind keep their order, so a chunk that is written twice ends with the later bytes.
    """

    def __init__(self, read: Callable[[Part], Array] = read_rows, stuck_s: float = STUCK_S) -> None:
        """`read` reads one part; tests pass one that fails or hangs."""
        self._read = read
        self._stuck_s = stuck_s
        self._shared = _Shared()
        self._thread = threading.Thread(target=self._run, name="tenuto-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once."""
        shared = self._shared
        with shared.changed:
            (shared.loads if job.is_load else shared.stores)[job.job_id] = job
            if shared.is_stuck:
                self._fail(job)
            shared.changed.notify_all()

    def take_done(self) -> list[Done]:
        """The jobs that ended since the last call, failed ones included."""
        shared = self._shared
        with shared.changed:
            self._give_up_if_stuck()
            done, shared.done = shared.done, []
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        """Return once none of these jobs is queued or running; they go before all others."""
        shared = self._shared
        with shared.changed:
            shared.urgent.update(each for each in job_ids if self._is_pending(each))
            shared.changed.notify_all()
            while not shared.is_closed and any(map(self._is_pending, job_ids)):
                shared.changed.wait(timeout=self._stuck_s / 4)
                self._give_up_if_stuck()
            shared.urgent.difference_update(job_ids)

    def close(self) -> None:
        """Stop after the copy of one layer; what is queued is dropped. A read that hangs is left behind."""
        shared = self._shared
        with shared.changed:
            shared.is_closed = True
            shared.loads.clear()
            shared.stores.clear()
            shared.changed.notify_all()
        self._thread.join(timeout=10)

    # Inside.

    def _is_pending(self, job_id: int) -> bool:
        return job_id in self._shared.loads or job_id in self._shared.stores

    def _run(self) -> None:
        shared = self._shared
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.is_closed or shared.loads or shared.stores)
                if shared.is_closed:
                    return
                job = self._choose()
                if job.is_load and not job.num_done and not shared.bad_chunks.isdisjoint(job.chunks):
                    # A store of these chunks failed: what is there is not what it should be.
                    self._fail(job)
            self._advance(job)
            with shared.changed:
                if not job.has_failed and job.num_done == len(job.parts):
                    self._finish(job)
                shared.changed.notify_all()

    def _give_up_if_stuck(self) -> None:
        """If the thread's read hangs, fail its job and all that wait behind it."""
        shared = self._shared
        since_s = shared.reads_since_s
        if shared.is_stuck or since_s is None or time.perf_counter() - since_s < self._stuck_s:
            return
        logger.error("a copy hangs; KV is computed and not loaded until it goes on")
        shared.is_stuck = True
        for job in [*shared.loads.values(), *shared.stores.values()]:
            self._fail(job)
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
        """Copy one more part of a job, unless the job is given up meanwhile."""
        if job.has_failed or job.num_done == len(job.parts):
            return
        shared, part = self._shared, job.parts[job.num_done]
        started_s = shared.reads_since_s = time.perf_counter()
        try:
            rows = self._read(part)
        except Exception:
            logger.exception("copy %d failed", job.job_id)
            rows = None
        with shared.changed:
            shared.reads_since_s = None
            shared.is_stuck = False
            if job.has_failed:
                return
            if rows is None:
                self._fail(job)
                return
        part.target[part.targets] = rows
        job.num_done += 1
        job.busy_s += time.perf_counter() - started_s

    def _fail(self, job: Job) -> None:
        job.has_failed = True
        self._finish(job)

    def _finish(self, job: Job) -> None:
        shared = self._shared
        (shared.loads if job.is_load else shared.stores).pop(job.job_id, None)
        if not job.is_load:
            change = shared.bad_chunks.update if job.has_failed else shared.bad_chunks.difference_update
            change(job.chunks)
        num_bytes = sum(part.num_bytes for part in job.parts[: job.num_done])
        shared.done.append(Done(job.job_id, job.is_load, num_bytes, job.busy_s, job.has_failed))


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
