"""Private names of vLLM's OffloadingConnector for copies that no request asked for.

Checked on vLLM 0.32.0. Prefetches load so, and what requests have left is stored so.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key

from tenuto.vllm.compat_offload import HostManagerHooks


def make_copy_id() -> str:
    """A name for a copy where vLLM wants a request's id. No request has it, whatever ids clients choose."""
    return f"tenuto-{secrets.token_hex(16)}"


@dataclass
class Copy:
    """A copy; it stands in for its request in vLLM's connector (`RequestOffloadState`)."""

    req_context: Any
    job_id: int
    transfer_jobs: set[int]
    has_failed: bool = False
    """Of a load that has ended: whether its blocks do not hold what they should."""
    req: Any = field(default_factory=lambda: SimpleNamespace(is_finished=lambda: True))
    finished_signaled: bool = True
    group_states: tuple[Any, ...] = ()


class CopyPort:
    """Copies between the GPU's blocks and host memory, of one OffloadingConnector; blocks of one layer group.

    `hashes` are those of a prompt's blocks from its start, and `blocks` the GPU's blocks with that content.
    """

    def __init__(self, connector: Any, pool: Any, host: HostManagerHooks) -> None:
        """`pool`: the GPU's blocks. `host`: the manager of host memory."""
        self._connector = connector
        self._pool = pool
        self._host = host
        self._scheduler = connector.connector_scheduler
        self._manager: Any = self._scheduler.manager
        self.blocks_per_chunk = int(self._scheduler.config.blocks_per_chunk)
        self._tokens_per_chunk = int(self._scheduler.config.kv_group_configs[0].tokens_per_chunk)
        self._loads: dict[str, Copy] = {}
        """The loads that the workers have not reported yet; after a reset vLLM knows them no more."""
        self._take_reports()

    def is_moving(self, job_id: int) -> bool:
        """Whether this copy is under way."""
        return job_id in self._scheduler._jobs

    def _take_reports(self) -> None:
        """Take our loads out of what the workers report: vLLM would look for their requests.

        They are known by this list alone. What a request's id looks like is its client's choice.
        """
        update = self._connector.update_connector_output

        def update_connector_output(output: Any) -> None:
            update(output)
            ended = self._loads.keys() & (output.finished_recving or set())
            for load_id in ended:
                self._loads.pop(load_id).has_failed = load_id in output.failed_recving
            if ended:
                output.finished_recving = output.finished_recving - ended

        self._connector.update_connector_output = update_connector_output

    # Loads.

    def find_cached(self, block_hash: Any) -> Any | None:
        """The GPU's block with this content; None if there is none."""
        found = self._pool.get_cached_block(block_hash, [0])
        return found[0] if found else None

    def count_loadable(self, hashes: Sequence[Any], first: int, end: int) -> int:
        """How many blocks from `first` on, up to `end`, host memory has without a gap."""
        size, context = self.blocks_per_chunk, ReqContext(req_id="")
        chunk = first // size
        while (chunk + 1) * size <= end:
            key = make_offload_key(hashes[(chunk + 1) * size - 1], 0)
            if self._host.lookup(key, context) is not LookupResult.HIT:
                break
            chunk += 1
        return max(0, chunk * size - first)

    def begin_load(
        self, load_id: str, hashes: Sequence[Any], blocks: Sequence[Any], first: int, meta: Any
    ) -> Copy:
        """Load `blocks` from number `first` on, which host memory has. `load_id`: of `make_copy_id`."""
        scheduler, size = self._scheduler, self.blocks_per_chunk
        context, keys = self._name_chunks(load_id, hashes, len(blocks) // size)
        keys = keys[first // size :]
        self._manager.on_new_request(context)
        source = self._manager.prepare_load(keys, context)
        ids = [block.block_id for block in blocks[first:]]
        target = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first])
        for block_id in ids:
            # As for a request's blocks: a store that still reads what they hold comes first.
            meta.jobs_to_flush |= scheduler._block_id_to_pending_jobs.get(block_id, set())
        load = self._loads[load_id] = self._begin(context, set(keys), ids, is_store=False)
        if scheduler._chunks_being_loaded is not None:
            # A request that wants the same waits for this load.
            scheduler._chunks_being_loaded.update(keys)
        meta.load_jobs[load.job_id] = TransferJob(req_id=load_id, src_spec=source, dst_spec=target)
        self._manager.on_request_finished(context)
        return load

    def cache_blocks(self, hashes: Sequence[Any], blocks: list[Any], first: int) -> None:
        """Put `blocks` from number `first` on into the prefix cache, with these contents."""
        owner = SimpleNamespace(block_hashes=hashes)
        size = self._tokens_per_chunk // self.blocks_per_chunk
        self._pool.cache_full_blocks(owner, blocks, first, len(blocks), size, 0)

    # Stores.

    def get_hashes(self, blocks: Sequence[Any]) -> list[Hashable]:
        """The chained hash of each block's content."""
        return [get_block_hash(block.block_hash) for block in blocks]

    def begin_store(
        self, store_id: str, blocks: Sequence[Any], hashes: Sequence[Any], meta: Any, *, first: int, end: int
    ) -> int | None:
        """Store chunks `first` to `end` of blocks that a request had from its start.

        Returns the number of the copy; None if host memory has them, or has no room for them.
        """
        size = self.blocks_per_chunk
        context, keys = self._name_chunks(store_id, hashes, end)
        self._manager.on_new_request(context)
        found = self._manager.prepare_store(keys[first:], context)
        wanted = set(found.keys_to_store) if found is not None else set()
        numbers = [number for number in range(first, end) if keys[number] in wanted]
        job_id = None
        if numbers:
            ids = [block.block_id for n in numbers for block in blocks[n * size : (n + 1) * size]]
            source = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[numbers[0] * size])
            job_id = self._begin(context, wanted, ids, is_store=True).job_id
            meta.store_jobs[job_id] = TransferJob(req_id=store_id, src_spec=source, dst_spec=found.store_spec)
        self._manager.on_request_finished(context)
        return job_id

    # Inside.

    def _name_chunks(self, copy_id: str, hashes: Sequence[Any], end: int) -> tuple[Any, list[Any]]:
        """The stand-in for a request's context, and the keys of the first `end` chunks."""
        size, context = self.blocks_per_chunk, ReqContext(req_id=copy_id)
        keys = [make_offload_key(hashes[(n + 1) * size - 1], 0) for n in range(end)]
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * self._tokens_per_chunk)
        return context, keys

    def _begin(self, context: Any, keys: set[Any], block_ids: list[int], *, is_store: bool) -> Copy:
        """Tell vLLM of a copy, and that nobody else may use its blocks before it ends."""
        scheduler = self._scheduler
        job_id = int(scheduler._generate_job_id())
        found = scheduler._req_status[context.req_id] = Copy(context, job_id, {job_id})
        scheduler._jobs[job_id] = TransferJobStatus(
            req_id=context.req_id,
            pending_count=scheduler.config.num_workers,
            keys=keys,
            is_store=is_store,
            fenced_block_ids=block_ids,
        )
        for block_id in block_ids:
            scheduler._block_id_to_pending_jobs.setdefault(block_id, set()).add(job_id)
        return found
