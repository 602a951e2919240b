"""The specs that vLLM's OffloadingConnector loads by name, and a worker for CPU builds; vLLM's needs a GPU.

Needs vLLM 0.31 or later. On a GPU, vLLM's own worker copies into vLLM's own memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tenuto.vllm.compat.offload import ORDER, HostManager, HostManagerHooks, PrimaryManager, get_host_manager
from tenuto.vllm.tiers.copies import Array, Copies, Job, Part, get_rows, make_part

logger = logging.getLogger("vllm.tenuto")

SHARED_MEMORY = Path("/dev/shm")
MIN_LEFT_S = 120.0
"""From this age on, a shared memory file that no process maps counts as abandoned."""


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies KV between the cache of a CPU build and host memory, while steps run.

    vLLM's connector stops the engine at a failed job. So such a job ends like any other, and its failure is
    reported as the end of a job that does not exist (see `report_failures`).
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
        arrays: list[tuple[Array, Array]] = []
        for each in kv_caches.tensors:
            page = each.page_size_bytes
            cache, num_bytes = each.tensor.view(torch.int8), page * blocks_per_chunk
            if memory is None:
                host = torch.zeros((num_chunks, num_bytes), dtype=torch.int8)
            else:
                host = memory.create_next_worker_view(num_bytes)
            arrays.append((cache.numpy(), host.unflatten(1, (blocks_per_chunk, page)).numpy()))
        # The layers of each group. The padding at the end of each page is copied too.
        self._layers = [[arrays[each.tensor_idx] for each in group] for group in kv_caches.group_data_refs]
        self._copies = copies or Copies()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to chunks of host memory in the background."""
        self._copies.submit(self._make_job(job_id, src_spec, dst_spec, is_load=False))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks of host memory to blocks in the background."""
        self._copies.submit(self._make_job(job_id, dst_spec, src_spec, is_load=True))
        return True

    def get_finished(self) -> list[Any]:
        """The jobs that ended since the last call. A failed job n is there a second time, as job -1 - n."""
        done = self._copies.take_done()
        results = [TransferResult(job.job_id, True, job.num_bytes, job.busy_s) for job in done]
        return results + [TransferResult(-1 - job.job_id, True) for job in done if job.has_failed]

    def wait(self, job_ids: set[int]) -> None:
        """Return once these jobs have ended."""
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        """Stop copying and free the memory."""
        self._copies.close()
        self._layers.clear()
        if self._memory is not None:
            self._memory.cleanup()

    def _make_job(self, job_id: int, gpu: Any, host: Any, *, is_load: bool) -> Job:
        """Make one job. `gpu`: blocks by layer group. `host`: the chunks, one group after the other."""
        parts: list[Part] = []
        first_block = first_chunk = 0
        size = self._blocks_per_chunk
        # `index`: the number, in the request, of a group's first block.
        for layers, num_blocks, index in zip(self._layers, gpu.group_sizes, gpu.block_indices, strict=True):
            if not num_blocks:
                continue
            blocks = gpu.block_ids[first_block : first_block + num_blocks]
            num_chunks = -(-(index % size + num_blocks) // size)
            chunks = host.block_ids[first_chunk : first_chunk + num_chunks]
            rows = get_rows(chunks, index, num_blocks, size)
            parts += [make_part(cache, memory, blocks, rows, is_load=is_load) for cache, memory in layers]
            first_block, first_chunk = first_block + num_blocks, first_chunk + num_chunks
        return Job(job_id, is_load, parts)


# The specs.


class _SpecHooks:
    """What both of our specs add to vLLM's."""

    _worker: Any
    _manager: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.eviction_policy, self.cache_policy_module_path = ORDER
        report_failures()

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker: vLLM's own on a GPU, ours on a CPU build."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)  # type: ignore[misc]
        if not self._worker:
            sizes = self.blocks_per_chunk, self.num_chunks  # type: ignore[attr-defined]
            self._worker = HostWorker(kv_caches, *sizes, memory=self._open_memory())
        return self._worker

    def _open_memory(self) -> Any | None:
        """The host memory that the scheduler's process shares with the worker of a CPU build, if it does."""
        return None


class HostSpec(_SpecHooks, CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's own spec for host memory, with our order, and with a worker for CPU builds too."""

    def get_manager(self) -> Any:
        """The manager, made once."""
        if not self._manager:
            self._manager = HostManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
            _describe(self._manager, self)
        return self._manager


class DiskSpec(_SpecHooks, TieringOffloadingSpec):  # type: ignore[misc]
    """As `HostSpec`, with the tiers of `secondary_tiers` below host memory (`tenuto.vllm.tiers.disk`)."""

    def get_manager(self) -> Any:
        """The manager, made once. vLLM looks up the class of its first tier in its own module."""
        if not self._manager:
            remove_left_memory()
            tiering_spec.CPUPrimaryTierOffloadingManager = PrimaryManager
            try:
                super().get_manager()
            finally:
                tiering_spec.CPUPrimaryTierOffloadingManager = CPUPrimaryTierOffloadingManager
            _describe(self._manager.primary_tier, self)
        return self._manager

    def _open_memory(self) -> Any:
        return SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )


def _describe(host: HostManagerHooks, spec: Any) -> None:
    """Give a manager the facts of its spec: layer groups, bytes of a chunk, and the number of workers."""
    host.num_groups = len(spec.config.groups)
    host.sizes = (int(spec.kv_bytes_per_chunk), int(spec.config.parallel.world_size))


def remove_left_memory() -> None:
    """Remove shared memory files that killed servers left: those that no process maps.

    vLLM names the file by the engine's id, which is new at every start, so no later start would reuse it.
    """
    for path in SHARED_MEMORY.glob("vllm_offload_*.mmap"):
        # It belongs to another user, or is gone meanwhile.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > MIN_LEFT_S and not _is_mapped(path.name):
                path.unlink()
                logger.info("removed %s, which a killed server left", path)


def _is_mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # The process has ended, or may not be inspected. If it maps the file, it keeps the memory even after
        # the file is removed.
        with contextlib.suppress(OSError):
            if name in maps.read_text():
                return True
    return False


# Failed copies.


def report_failures() -> None:
    """Let vLLM's connector report failed copies; of loads, as `kv_load_failure_policy` wants it.

    vLLM's report has no place for a failed copy. So our worker reports its job n as a completed job -1 - n
    too. The scheduler then drops the chunks: of a failed load, because it would load them again and again; of
    a failed store, because they have wrong content, which a disk below would keep.
    """
    if hasattr(OffloadingConnector, "tenuto_reports_failures"):
        return
    OffloadingConnector.tenuto_reports_failures = True
    get_results, update = (
        OffloadingConnector.get_transfer_results,
        OffloadingConnector.update_connector_output,
    )

    def get_transfer_results(self: Any, finished_req_ids: set[str]) -> Any:
        worker = self.connector_worker
        request_ids = dict(worker._load_jobs)
        results = get_results(self, finished_req_ids)
        failed = _find_failed(worker._connector_worker_meta)
        results.failed_recving.update(request_ids[each] for each in failed & request_ids.keys())
        return results

    def update_connector_output(self: Any, connector_output: Any) -> None:
        scheduler, meta = self.connector_scheduler, connector_output.kv_connector_worker_meta
        manager, jobs = scheduler.manager, scheduler._jobs
        failed = scheduler.__dict__.setdefault("tenuto_failed", set())
        """Failed jobs that not all workers have ended."""
        if isinstance(meta, OffloadingWorkerMetadata):
            failed |= _find_failed(meta)
            meta.completed_jobs = {each: num for each, num in meta.completed_jobs.items() if each >= 0}
        failed.intersection_update(jobs)
        if not failed:
            update(self, connector_output)
            return
        complete = manager.complete_store
        loads = [jobs[each].keys for each in failed if not jobs[each].is_store]
        stores = [jobs[each].keys for each in failed if jobs[each].is_store]

        def complete_store(keys: Any, req_context: Any) -> None:
            complete(keys, req_context, not any(keys is each for each in stores))

        manager.complete_store = complete_store
        try:
            update(self, connector_output)
        finally:
            del manager.complete_store
        host = get_host_manager(manager)
        if host is not None:
            # While a worker still loads a chunk, it stays.
            host.forget(set().union(*loads))

    OffloadingConnector.get_transfer_results = get_transfer_results
    OffloadingConnector.update_connector_output = update_connector_output


def _find_failed(meta: Any) -> set[int]:
    """The failed jobs in what a worker reports."""
    return {-1 - job_id for job_id in meta.completed_jobs if job_id < 0}
