"""The specs that vLLM's OffloadingConnector loads by name, and a worker for CPU builds; vLLM's needs a GPU.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "HostSpec", "spec_module_path": "tenuto.vllm.tiers.worker",
        "cpu_bytes_to_use": …}}'

`tenuto serve --host-gb` writes this option. The disk is used only under Tenuto's scheduler, which tells it
what KV depends on. On a GPU, vLLM's own worker copies into vLLM's own memory. On a CPU build, one thread
copies KV between the cache and host memory, loads before stores, so that tiers can be tested there:

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
import torch

from tenuto.vllm.compat.offload import (
    DiskSpecBase,
    HostSpecBase,
    OffloadingWorker,
    TransferResult,
    get_copied_blocks,
    get_copied_chunks,
    get_group_layers,
    get_tensors,
)

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


@dataclass(frozen=True)
class Done:
    """A job that ended. A failed one is not repeated."""

    job_id: int
    is_load: bool
    num_bytes: int
    busy_s: float
    has_failed: bool
    """Whether the target has wrong content."""


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
        self._done: list[Done] = []
        self._thread = threading.Thread(target=self._run, name="tenuto-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once."""
        with self._changed:
            (self._loads if job.is_load else self._stores)[job.job_id] = job
            if self._is_stuck:
                self._fail(job)
            self._changed.notify_all()

    def take_done(self) -> list[Done]:
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
        num_bytes = sum(part.num_bytes for part in job.parts[: job.num_done])
        self._done.append(Done(job.job_id, job.is_load, num_bytes, job.busy_s, job.has_failed))


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


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies KV between the cache of a CPU build and host memory, while steps run.

    vLLM's connector cannot be told of a failed job, so such a job ends like any other, and `take_failed`
    reports it (`compat.offload.report_failures`). What was not loaded is computed again. Chunks of a failed
    store are dropped.
    """

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        num_chunks: int,
        memory: Any | None = None,
        copies: Copies | None = None,
    ) -> None:
        """`memory`: vLLM's shared region; by default the worker allocates host memory itself.

        `kv_caches`: vLLM's `CanonicalKVCaches`. Tests pass `copies` that are late or fail.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._memory = memory
        self._tensors: list[torch.Tensor] = []
        arrays: list[tuple[Array, Array]] = []
        for tensor, page in get_tensors(kv_caches):
            cache, num_bytes = tensor.view(torch.int8), page * blocks_per_chunk
            if memory is None:
                host = torch.zeros((num_chunks, num_bytes), dtype=torch.int8)
            else:
                host = memory.create_next_worker_view(num_bytes)
            self._tensors += [cache, host]
            arrays.append((cache.numpy(), host.unflatten(1, (blocks_per_chunk, page)).numpy()))
        # The layers of each group. The padding at the end of each page is copied too.
        self._layers = [[arrays[number] for number in group] for group in get_group_layers(kv_caches)]
        self._copies = copies or Copies()
        self._failed: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to chunks of host memory in the background."""
        self._copies.submit(self._make_job(job_id, src_spec, dst_spec, is_load=False))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks of host memory to blocks in the background."""
        self._copies.submit(self._make_job(job_id, dst_spec, src_spec, is_load=True))
        return True

    def get_finished(self) -> list[Any]:
        """The jobs that ended since the last call."""
        done = self._copies.take_done()
        self._failed |= {each.job_id for each in done if each.has_failed}
        return [TransferResult(each.job_id, True, each.num_bytes, each.busy_s) for each in done]

    def take_failed(self) -> set[int]:
        """The ids of failed jobs, among those that `get_finished` returned."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Return once these jobs have ended."""
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        """Stop copying and free the memory."""
        self._copies.close()
        self._layers.clear()
        self._tensors.clear()
        if self._memory is not None:
            self._memory.cleanup()

    def _make_job(self, job_id: int, gpu: Any, host: Any, *, is_load: bool) -> Job:
        """Make one job. `gpu`: blocks by layer group. `host`: the chunks, one group after the other."""
        parts: list[Part] = []
        first_chunk, size, all_chunks = 0, self._blocks_per_chunk, get_copied_chunks(host)
        for layers, (index, blocks) in zip(self._layers, get_copied_blocks(gpu), strict=True):
            num_blocks = len(blocks)
            if not num_blocks:
                continue
            num_chunks = -(-(index % size + num_blocks) // size)
            chunks = all_chunks[first_chunk : first_chunk + num_chunks]
            rows = get_rows(chunks, index, num_blocks, size)
            parts += [make_part(cache, memory, blocks, rows, is_load=is_load) for cache, memory in layers]
            first_chunk += num_chunks
        return Job(job_id, is_load, parts)


class HostSpec(HostSpecBase):
    """Host memory."""

    def make_cpu_worker(self, kv_caches: Any) -> HostWorker:
        """The worker of a CPU build."""
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


class DiskSpec(DiskSpecBase):
    """Host memory, with the tiers of `secondary_tiers` below it (`tenuto.vllm.tiers.disk`)."""

    def make_cpu_worker(self, kv_caches: Any) -> HostWorker:
        """The worker for a CPU build. The scheduler's process shares its memory."""
        memory = self.open_shared_memory()
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, memory=memory)
