"""vLLM's scheduler with a tier below it, without a model: blocks hold numbers that say what they should be.

Both sides of vLLM's OffloadingConnector are real, and so are our spec, manager and worker. Only the thread
that copies is replaced: copies happen late, in pieces, or fail, as a test says.

    a block's page   [ hash of all tokens before the block | its tokens ]
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tenuto.vllm.compat.offload import find_connector
from tenuto.vllm.compat.scheduler import get_hit_tokens
from tenuto.vllm.compat.specs import HostSpec, HostWorker
from tenuto.vllm.scheduler import Scheduler
from tests.vllm.other_connector import Load
from tests.vllm.slow_copies import SlowCopies
from tests.vllm.workerless import Engine, make_config, make_scheduler

BLOCK_SIZE = 16
OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "tests.vllm.other_connector",
    "kv_role": "kv_both",
}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}


class _Shared:
    """The worker's side of the memory that the scheduler's side has a view of, for a chunk larger than it."""

    def __init__(self, view: memoryview) -> None:
        self._chunks = torch.from_numpy(np.asarray(view).view(np.int8))

    def create_next_worker_view(self, num_bytes: int) -> Any:
        return self._chunks[:, :num_bytes]

    def cleanup(self) -> None:
        del self._chunks


class TieredEngine(Engine):
    """Steps a scheduler with host memory of `num_chunks` chunks, and checks what blocks hold."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        num_chunks: int = 200,
        blocks_per_chunk: int = 1,
        copies: SlowCopies | None = None,
        depth: int = 1,
        block_size: int = BLOCK_SIZE,
        tenuto: dict[str, Any] | None = None,
        connectors: tuple[str, ...] = ("ours",),
        disk: dict[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        """`connectors`: more than one, in this order, under vLLM's MultiConnector; "other" is another's.

        `disk`: the arguments of a `DiskTier` behind host memory. Its files are real; `shutdown` ends it.
        """
        config = make_config(is_async=depth > 1, tenuto=tenuto, **scheduler)
        self._block_size = block_size
        page = (block_size + 1) * 8
        # The scheduler's own idea of a block's bytes: one layer, one head of one float for K and V.
        chunk_bytes = -(-2 * 4 * block_size * blocks_per_chunk // 4096) * 4096
        ours = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostSpec",
                "spec_module_path": "tenuto.vllm.tiers.worker",
                "cpu_bytes_to_use": chunk_bytes * num_chunks,
                "blocks_per_chunk": blocks_per_chunk,
                "offload_prompt_only": False,
            },
        }
        if disk is not None:
            ours["kv_connector_extra_config"] |= {
                "spec_name": "DiskSpec",
                "secondary_tiers": [{"type": "DiskTier", "module_path": "tenuto.vllm.tiers.disk"} | disk],
            }
        all_of_them = [ours if each == "ours" else OTHER for each in connectors]
        self._connectors = connectors
        whole = MULTI | {"kv_connector_extra_config": {"connectors": all_of_them}}
        transfer = whole if len(connectors) > 1 else all_of_them[0]
        config.kv_transfer_config = KVTransferConfig(**transfer, kv_load_failure_policy="recompute")
        made = make_scheduler(Scheduler, config, num_blocks=num_blocks, block_size=block_size)
        super().__init__(made, self._sample, depth=depth)
        self.copies = copies or SlowCopies(random.Random(0))
        cache = torch.zeros((num_blocks, page), dtype=torch.int8)
        self.content = cache.numpy().view(np.int64)
        self._worker: Any = None
        if "ours" in connectors:
            kv_config = self.scheduler.kv_cache_config
            own = copy.copy(config)
            own.kv_transfer_config = KVTransferConfig(**ours)
            spec = HostSpec(build_offloading_config(own, kv_config))
            assert spec.num_chunks == num_chunks
            self._worker = OffloadingConnectorWorker(spec, own, kv_config)
            tensor = CanonicalKVCacheTensor(cache, page)
            caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, page)]])
            memory = None if disk is None else _Shared(self.host.get_kv_memoryview())
            self._worker.worker = HostWorker(
                caches, blocks_per_chunk, num_chunks, memory=memory, copies=self.copies
            )
            self._worker_side = SimpleNamespace(
                connector_worker=self._worker, get_finished=self._worker.get_finished
            )
        self._aggregator = KVOutputAggregator(expected_finished_count=1)
        self._other_loads: list[Load] = []
        self.num_other_blocks = 0
        self._hashes: dict[str, list[int]] = {}
        self._prompts: dict[str, list[int]] = {}
        self.num_checked = 0
        self.hits: dict[str, tuple[int, int]] = {}
        """Prompt tokens that each request found when it first started: on the GPU, and in host memory."""

    @property
    def tier(self) -> Any:
        return self.scheduler.tier

    @property
    def host(self) -> Any:
        return getattr(self.connector.manager, "primary_tier", self.connector.manager)

    @property
    def disk(self) -> Any:
        """The tier behind host memory."""
        return self.connector.manager.secondary_tiers[0]

    @property
    def connector(self) -> Any:
        """The scheduler's side of our connector."""
        return find_connector(self.scheduler).connector_scheduler

    def add(self, request: Any) -> None:
        self._prompts[request.request_id] = list(request.prompt_token_ids)
        self.scheduler.add_request(request)

    def get_prompt(self, request_id: str) -> list[int]:
        """A request's prompt tokens."""
        return list(self._prompts[request_id])

    def drain(self, max_steps: int = 2000) -> None:
        """Step until no request is left and no copy is under way; fails if that does not come about."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
            if not any(self.scheduler.get_request_counts()):
                # Threads write to the disk meanwhile.
                time.sleep(0.001)
        raise AssertionError(f"still busy: {self.scheduler.get_request_counts()}")

    def shutdown(self) -> None:
        """Let shared memory go: first the worker's view of it."""
        self._worker.worker.shutdown()
        self.scheduler.shutdown()

    def assert_clean(self) -> None:
        """Nothing is left of any request: no block, no copy, no pin."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_usage() == 0
        leased = self.scheduler.driver.get_num_leased_blocks()
        held = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
        assert pool.get_num_free_blocks() + leased == pool.num_gpu_blocks - 1, held
        assert not self._other_loads
        if self._worker is None:
            return
        connector = self.connector
        assert not connector._jobs
        assert not connector._req_status
        assert not connector._block_id_to_pending_jobs
        assert not self.tier._port._loads
        assert not len(self.tier.later)
        assert not len(self.tier.prefetch)
        self.assert_host_whole()
        host = self.host
        assert host._num_evictable_cache_chunks == len(host._policy.order)

    def assert_host_whole(self) -> None:
        """Every chunk of host memory is free or held, and no chunk is there without the one it continues."""
        host = self.host
        chunks = host._policy._chunks
        taken = [chunk.chunk_id for chunk in chunks.values()]
        assert len(set(taken)) == len(taken)
        assert sorted(taken + host._free_list) == list(range(host._num_allocated_chunks))
        assert set(host._policy.order) == set(chunks)

    # Inside.

    def _run(self, output: Any) -> ModelRunnerOutput:
        # Workers are other processes where there are several.
        meta = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        metas = dict(
            zip(self._connectors, meta.metadata if len(self._connectors) > 1 else (meta,), strict=True)
        )
        # First of all, as in vLLM's model runner: copies out of blocks that are others' from this step on.
        if self._worker is not None:
            self._worker.handle_preemptions(metas["ours"])
        # What the other loads before the step, and beside it.
        self._other_loads += metas["other"].loads if "other" in metas else []
        received = self._load_for_other(before_step=True)
        self._compute(output)
        result = super()._run(output)
        received |= self._load_for_other(before_step=False)
        failed, worker_meta = set[str](), None
        if self._worker is not None:
            ours, failed, worker_meta = self._copy(metas["ours"])
            received |= ours
        if len(self._connectors) > 1:
            parts = tuple(worker_meta if each == "ours" else None for each in self._connectors)
            worker_meta = MultiKVConnectorWorkerMetadata(parts)
        result.kv_connector_output = KVConnectorOutput(
            finished_recving=received, failed_recving=failed, kv_connector_worker_meta=worker_meta
        )
        # As what several workers report.
        return self._aggregator.aggregate([result])

    def _copy(self, meta: Any) -> tuple[set[str], set[str], Any]:
        """What our worker does in a step: requests whose loads ended, failed ones, and what it reports."""
        worker = self._worker
        worker.start_kv_transfers(meta)
        worker.prepare_store_kv(meta)
        self.copies.advance()
        results = OffloadingConnector.get_transfer_results(self._worker_side, set())
        return results.finished_recving, results.failed_recving, worker.build_connector_worker_meta()

    def _load_for_other(self, *, before_step: bool) -> set[str]:
        """Carry out the other's loads: all that a step waits for, and by chance those that run beside it."""
        received: set[str] = set()
        for load in list(self._other_loads):
            if load.is_async is before_step or (load.is_async and self.copies.rng.random() < 0.5):
                continue
            self._other_loads.remove(load)
            if load.is_async:
                received.add(load.request_id)
            if load.request_id not in self.scheduler.requests:
                continue
            blocks = self.scheduler.kv_cache_manager.get_block_ids(load.request_id)[0]
            for number in range(load.first, load.end):
                self.num_other_blocks += 1
                row = self.content[blocks[number]]
                row[0] = self._hash(load.request_id, number)
                first = number * self._block_size
                row[1:] = [self._token(load.request_id, first + n) for n in range(self._block_size)]
        return received

    def _compute(self, output: Any) -> None:
        """Write what the step computes, after checking what it reads."""
        begun = {each.req_id for each in output.scheduled_new_reqs}
        begun |= output.scheduled_cached_reqs.resumed_req_ids
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            end = request.num_computed_tokens
            start = end - num_tokens
            if request_id in begun and request_id not in self.hits:
                self.hits[request_id] = get_hit_tokens(request)
            first = 0 if request_id in begun or end % 8 == 0 else max(0, start // self._block_size)
            self._check(request_id, blocks, first, start)
            for position in range(start, end):
                number, place = divmod(position, self._block_size)
                row = self.content[blocks[number]]
                if place == 0:
                    row[:] = 0
                    row[0] = self._hash(request_id, number)
                row[1 + place] = self._token(request_id, position)

    def _check(self, request_id: str, blocks: list[int], first: int, end: int) -> None:
        for number in range(first, -(-end // self._block_size)):
            num_filled = min(self._block_size, end - number * self._block_size)
            tokens = [self._token(request_id, number * self._block_size + n) for n in range(num_filled)]
            row = self.content[blocks[number]]
            assert row[0] == self._hash(request_id, number), f"{request_id}: block {number} is another's"
            assert row[1 : 1 + num_filled].tolist() == tokens, f"{request_id}: block {number}"
            self.num_checked += 1

    def _token(self, request_id: str, position: int) -> int:
        prompt = self._prompts[request_id]
        if position < len(prompt):
            return prompt[position]
        return self._sample(request_id, position - len(prompt))

    def _sample(self, request_id: str, index: int) -> int:  # type: ignore[override]
        return 5 + (hash((request_id, index)) % 900)

    def _hash(self, request_id: str, number: int) -> int:
        """What stands for all tokens before a block."""
        hashes = self._hashes.setdefault(request_id, [1])
        while len(hashes) <= number:
            first = (len(hashes) - 1) * self._block_size
            tokens = tuple(self._token(request_id, first + n) for n in range(self._block_size))
            hashes.append(hash((hashes[-1], tokens)))
        return hashes[number]
