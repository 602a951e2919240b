"""Private names of vLLM's offloading specs, and what their workers and connectors do not say of failures.

Checked on vLLM 0.32.0.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tenuto.vllm.compat_offload import HostManager, HostManagerHooks, PrimaryManager, get_host_manager

logger = logging.getLogger("vllm.tenuto")

MIN_LEFT_S = 120.0
"""Age from which a file of shared memory that no process maps counts as left behind."""
ORDER = ("OrderedChunks", "tenuto.vllm.tiers.chunks")
"""The cache policy that our specs make vLLM's managers use, and its module."""


class _SpecHooks:
    """What both specs do beside vLLM's own."""

    _worker: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.eviction_policy, self.cache_policy_module_path = ORDER
        report_failures()

    def make_cpu_worker(self, kv_caches: Any) -> Any:
        """The worker of a CPU build."""
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker: vLLM's own on a GPU, ours on a CPU build."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)  # type: ignore[misc]
        if not self._worker:
            self._worker = self.make_cpu_worker(kv_caches)
        return self._worker


class HostSpecBase(_SpecHooks, CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's own spec for host memory, with our order, and with a worker for CPU builds too."""

    _manager: Any

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


class DiskSpecBase(_SpecHooks, TieringOffloadingSpec):  # type: ignore[misc]
    """The same for vLLM's spec for host memory with further tiers behind it."""

    def get_manager(self) -> Any:
        """The manager, made once; vLLM names the class of its first tier in its module."""
        if not self._manager:
            remove_left_memory()
            tiering_spec.CPUPrimaryTierOffloadingManager = PrimaryManager
            try:
                super().get_manager()
            finally:
                tiering_spec.CPUPrimaryTierOffloadingManager = CPUPrimaryTierOffloadingManager
            _describe(self._manager.primary_tier, self)
        return self._manager

    def open_shared_memory(self) -> Any:
        """The host memory that the scheduler's process sees too, for the worker of a CPU build."""
        return SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )


def _describe(host: HostManagerHooks, spec: Any) -> None:
    """Tell a manager what its spec knows: layer groups, a chunk's bytes, and among how many workers."""
    host.num_groups = len(spec.config.groups)
    host.sizes = (int(spec.kv_bytes_per_chunk), int(spec.config.parallel.world_size))


def remove_left_memory() -> None:
    """Remove shared memory that servers left when they were killed: files that no process maps.

    vLLM names the file by the engine's id, which is new at every start, so nobody would find it again.
    """
    for path in Path("/dev/shm").glob("vllm_offload_*.mmap"):
        try:
            is_old = time.time() - path.stat().st_mtime > MIN_LEFT_S
            if is_old and not any(
                path.name in maps.read_text() for maps in Path("/proc").glob("[0-9]*/maps")
            ):
                path.unlink()
                logger.info("removed %s, which a killed server left", path)
        except OSError:
            # Another user's process, or gone meanwhile: if in doubt, the file stays.
            continue


def report_failures() -> None:
    """Let vLLM's connector tell of loads that failed, as `kv_load_failure_policy` wants it told.

    The connector itself knows no failures: it stops the engine at the first. A worker that knows of some has
    `take_failed_loads`. The scheduler's side then drops the chunks, or it would load them again and again.
    """
    if hasattr(OffloadingConnector, "tenuto_reports_failures"):
        return
    OffloadingConnector.tenuto_reports_failures = True
    get_results, update = (
        OffloadingConnector.get_transfer_results,
        OffloadingConnector.update_connector_output,
    )

    def get_transfer_results(self: Any, finished_req_ids: set[str]) -> Any:
        request_ids = dict(self.connector_worker._load_jobs)
        results = get_results(self, finished_req_ids)
        take = getattr(self.connector_worker.worker, "take_failed_loads", None)
        if take is not None:
            results.failed_recving.update(request_ids[each] for each in take() if each in request_ids)
        return results

    def update_connector_output(self: Any, connector_output: Any) -> None:
        scheduler, keys = self.connector_scheduler, set()
        for request_id in connector_output.failed_recving or ():
            status = scheduler._req_status.get(request_id)
            for job_id in status.transfer_jobs if status is not None else ():
                if not scheduler._jobs[job_id].is_store:
                    keys |= scheduler._jobs[job_id].keys
        update(self, connector_output)
        host = get_host_manager(scheduler.manager) if keys else None
        if host is not None:
            host.forget(keys)

    OffloadingConnector.get_transfer_results = get_transfer_results
    OffloadingConnector.update_connector_output = update_connector_output
