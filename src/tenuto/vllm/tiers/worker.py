"""The worker of a CPU build: it finds the rows that a job of vLLM's connector moves, and queues them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tenuto.vllm.compat_offload import OffloadingWorker, TransferResult
from tenuto.vllm.tiers.copies import Array, Copies, Job, Part, get_rows, make_part


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies KV between the cache of a CPU build and host memory, beside the steps.

    A job that fails ends like any other for vLLM, whose connector has no word for failure. The blocks of a
    failed load are reported by `take_failed_loads`, and computed again. Chunks of a failed store are never
    loaded.
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

        `kv_caches` are vLLM's `CanonicalKVCaches`. Tests pass `copies` that are late or fail.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._memory = memory
        caches: list[Array] = []
        hosts: list[Array] = []
        self._tensors: list[torch.Tensor] = []
        for each in kv_caches.tensors:
            page = each.page_size_bytes
            cache = each.tensor.view(torch.int8)
            num_bytes = page * blocks_per_chunk
            if memory is None:
                host = torch.zeros((num_chunks, num_bytes), dtype=torch.int8)
            else:
                host = memory.create_next_worker_view(num_bytes)
            self._tensors += [cache, host]
            caches.append(cache.numpy())
            hosts.append(host.unflatten(1, (blocks_per_chunk, page)).numpy())
        # A group's layers; a layer's padding at the end of each page is copied too.
        self._layers = [
            [(caches[ref.tensor_idx], hosts[ref.tensor_idx]) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._copies = copies or Copies()
        self._failed_loads: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to chunks of host memory, beside what follows."""
        self._copies.submit(self._make_job(job_id, src_spec, dst_spec, is_load=False))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks of host memory to blocks, beside what follows."""
        self._copies.submit(self._make_job(job_id, dst_spec, src_spec, is_load=True))
        return True

    def get_finished(self) -> list[Any]:
        """What has ended since the last call."""
        done = self._copies.take_done()
        self._failed_loads |= {each.job_id for each in done if each.is_load and each.has_failed}
        return [TransferResult(each.job_id, True, each.num_bytes, each.busy_s) for each in done]

    def take_failed_loads(self) -> set[int]:
        """The ids of loads that `get_finished` named, and whose blocks do not hold what they should."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Return once these jobs have ended."""
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        """Stop copying, and let the memory go."""
        self._copies.close()
        self._layers.clear()
        self._tensors.clear()
        if self._memory is not None:
            self._memory.cleanup()

    def _make_job(self, job_id: int, gpu: Any, host: Any, *, is_load: bool) -> Job:
        """The rows of one job. `gpu`: blocks by layer group; `host`: the chunks of all groups in a row."""
        parts: list[Part] = []
        first_block = first_chunk = 0
        groups: Sequence[tuple[int, int]] = list(zip(gpu.group_sizes, gpu.block_indices, strict=True))
        for layers, (num_blocks, index) in zip(self._layers, groups, strict=True):
            if not num_blocks:
                continue
            blocks = gpu.block_ids[first_block : first_block + num_blocks]
            num_chunks = -(-(index % self._blocks_per_chunk + num_blocks) // self._blocks_per_chunk)
            chunks = host.block_ids[first_chunk : first_chunk + num_chunks]
            rows = get_rows(chunks, index, num_blocks, self._blocks_per_chunk)
            parts += [make_part(cache, memory, blocks, rows, is_load=is_load) for cache, memory in layers]
            first_block, first_chunk = first_block + num_blocks, first_chunk + num_chunks
        return Job(job_id, is_load, parts, tuple(map(int, host.block_ids)))
