"""The thread that copies KV between the cache and host memory on CPU builds; vLLM's worker needs a GPU.

It copies loads before stores:

    cache   (num_blocks, page bytes)                     one array per layer
    host    (num_chunks, blocks per chunk, page bytes)   one array for each of them

Each layer is first read, then written. A read can hang, for example if host memory is on a dead disk. Then
its job fails: it writes nothing more, and its blocks can be reused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger("vllm.tenuto")

STUCK_S = 10.0
"""A read of a layer that takes longer counts as hung. Until it ends, every job fails at once."""
Array = Any
"""A numpy array. The arrays are views of tensors, so the type is not narrower."""


@dataclass(frozen=True)
class Part:
    """The copy of one layer in a job: `target[targets] = source[sources]`."""

    source: Array
    sources: Any
    target: Array
    targets: Any
    num_bytes: int


@dataclass
class Job:
    """One load or store, with vLLM's job id."""

    job_id: int
    is_load: bool
    parts: list[Part]
    num_done: int = 0
    busy_s: float = 0.0
    has_failed: bool = False
    """Whether the target has wrong content. It is not tried again."""

    @property
    def num_bytes(self) -> int:
        """Bytes copied so far."""
        return sum(part.num_bytes for part in self.parts[: self.num_done])


def read_rows(part: Part) -> Array:
    """A copy of the source's rows. numpy lets other threads run meanwhile."""
    return part.source[part.sources]


class Copies:
    """The queue of jobs and the thread that works through it.

    A load goes before every store, and interrupts a store between two layers. A job that a caller waits for
    goes first. Jobs of one kind keep their order, so a chunk that is written twice ends with the later bytes.
    """

    def __init__(self, read: Callable[[Part], Array] = read_rows, stuck_s: float = STUCK_S) -> None:
        """`read` reads one part; tests pass one that fails or hangs."""
        self._read = read
        self._stuck_s = stuck_s
        # Shared with the thread, under one lock.
        self._changed = threading.Condition()
        self._loads: OrderedDict[int, Job] = OrderedDict()
        self._stores: OrderedDict[int, Job] = OrderedDict()
        self._reads_since_s: float | None = None
        """Since when the thread reads a layer; None while it does not."""
        self._is_stuck = self._is_closed = False
        self._urgent: set[int] = set()
        self._done: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="tenuto-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once."""
        with self._changed:
            (self._loads if job.is_load else self._stores)[job.job_id] = job
            if self._is_stuck:
                self._fail(job)
            self._changed.notify_all()

    def take_done(self) -> list[Job]:
        """The jobs that ended since the last call, failed ones included."""
        with self._changed:
            self._give_up_if_stuck()
            done, self._done = self._done, []
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        """Return once none of these jobs is queued or running. They go before all others."""
        with self._changed:
            self._urgent.update(each for each in job_ids if self._is_pending(each))
            self._changed.notify_all()
            while not self._is_closed and any(map(self._is_pending, job_ids)):
                self._changed.wait(timeout=self._stuck_s / 4)
                self._give_up_if_stuck()
            self._urgent.difference_update(job_ids)

    def close(self) -> None:
        """Stop after the current layer and drop the queue. Does not wait for a read that hangs."""
        with self._changed:
            self._is_closed = True
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()
        self._thread.join(timeout=10)

    # Internal.

    def _is_pending(self, job_id: int) -> bool:
        return job_id in self._loads or job_id in self._stores

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._loads or self._stores)
                if self._is_closed:
                    return
                job = self._choose()
            self._advance(job)
            with self._changed:
                if not job.has_failed and job.num_done == len(job.parts):
                    self._finish(job)
                self._changed.notify_all()

    def _give_up_if_stuck(self) -> None:
        """If the thread's read hangs, fail its job and all queued jobs."""
        since_s = self._reads_since_s
        if self._is_stuck or since_s is None or time.perf_counter() - since_s < self._stuck_s:
            return
        logger.error("a copy hangs: until it ends, KV is computed instead of loaded")
        self._is_stuck = True
        for job in [*self._loads.values(), *self._stores.values()]:
            self._fail(job)
        self._changed.notify_all()

    def _choose(self) -> Job:
        """The job whose next part is copied. At least one job must be queued."""
        queues = (self._loads, self._stores) if self._urgent else ()
        urgent = (each for each in queues if not self._urgent.isdisjoint(each))
        # Jobs of one kind keep their order, so the first job goes before the urgent one behind it.
        return next(iter(next(urgent, self._loads or self._stores).values()))

    def _advance(self, job: Job) -> None:
        """Copy one more part of a job, unless the job was failed meanwhile."""
        if job.has_failed or job.num_done == len(job.parts):
            return
        part = job.parts[job.num_done]
        started_s = self._reads_since_s = time.perf_counter()
        try:
            rows = self._read(part)
        except Exception:
            logger.exception("copy %d failed", job.job_id)
            rows = None
        with self._changed:
            self._reads_since_s = None
            self._is_stuck = False
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
        (self._loads if job.is_load else self._stores).pop(job.job_id, None)
        self._done.append(job)


def get_rows(chunks: Array, first: int, num_blocks: int, blocks_per_chunk: int) -> tuple[Array, Array]:
    """The places of consecutive blocks of one request in host memory: (chunk, place in the chunk) of each.

    `first`: the first block's index in the request. `chunks` begins with the chunk that holds it.
    """
    places = first % blocks_per_chunk + np.arange(num_blocks)
    return chunks[places // blocks_per_chunk], places % blocks_per_chunk


def make_part(cache: Array, host: Array, blocks: Array, rows: tuple[Array, Array], *, is_load: bool) -> Part:
    """The part of a job that copies one layer's blocks to or from these rows of host memory.

    `cache`: (num_blocks, page bytes). `host`: (num_chunks, blocks per chunk, page bytes).
    """
    num_bytes = len(blocks) * int(cache.shape[1])
    if is_load:
        return Part(host, rows, cache, blocks, num_bytes)
    return Part(cache, blocks, host, rows, num_bytes)
