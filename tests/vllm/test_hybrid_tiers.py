"""Host memory and a disk below models whose layers differ: vLLM's scheduler, its connector and our managers.

There is no worker: a copy ends with the step in which it begins.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", "0.31.0")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.outputs import KVConnectorOutput

from tenuto.vllm.compat.scheduler import get_started
from tests.vllm.layouts import Chaos, send, start
from tests.vllm.workerless import Engine

CHUNK_BYTES = 4096
"""Of these layouts' blocks, rounded up to a page of memory."""


class TieredEngine(Engine):
    """Ends each copy at once, and each read and write of the disk before the next step."""

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    def _run(self, output: Any) -> Any:
        result, meta = super()._run(output), output.kv_connector_metadata
        done = OffloadingWorkerMetadata()
        for job_id in (*meta.load_jobs, *meta.store_jobs):
            done.mark_completed(job_id)
        loaded = {job.req_id for job in meta.load_jobs.values()}
        result.kv_connector_output = KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=done)
        for tier in getattr(self.manager, "secondary_tiers", ()):
            tier.drain_jobs()
        return result


def begin(
    name: str, num_chunks: int, folder: Path | None = None, max_files: int = 1000, **more: Any
) -> TieredEngine:
    """An engine with host memory, and a disk below it if there is a folder."""
    extra: dict[str, Any] = {
        "spec_name": "HostSpec",
        "spec_module_path": "tenuto.vllm.tiers.worker",
        "cpu_bytes_to_use": num_chunks * CHUNK_BYTES,
        "blocks_per_chunk": 1,
        "offload_prompt_only": False,
    }
    if folder is not None:
        limit = max_files * (CHUNK_BYTES + 100)
        disk = {"type": "DiskTier", "module_path": "tenuto.vllm.tiers.disk", "folder": str(folder)}
        extra |= {"spec_name": "DiskSpec", "secondary_tiers": [{**disk, "max_bytes": limit}]}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    engine: TieredEngine = start(name, transfer=transfer, engine=TieredEngine, interval=None, **more)
    return engine


def test_a_load_brings_what_the_window_needs_and_no_block_before_it() -> None:
    """Requests keep a block before each window. No look-up asks whether host memory has it too."""
    engine = begin("window of a block and a half", 200)
    prompt = list(range(10, 330))
    send(engine, "a", prompt, max_tokens=2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    host = engine.manager
    # All tokens but the last can be hit. The window of 24 tokens needs the last two of 20 blocks.
    before = [
        key
        for key in host._policy.order
        if get_offload_group_idx(key) == 1 and -host._policy.order.get_rank(key)[2] <= 18 * 16
    ]
    assert len(before) == 18
    host.forget(before)
    send(engine, "b", prompt, max_tokens=2)
    engine.step()
    started = dict(each for _ in range(4) for each in get_started(engine.step()))
    assert started == {"b": 319}
    engine.run()


@pytest.mark.parametrize("of", ["a client", "Tenuto"])
def test_a_part_of_a_block_is_not_stored_beyond_what_a_request_may_store(of: str) -> None:
    """VLLM's own connector stores the part if the bound is 0, and ends the engine if it is another."""
    engine = begin("states, all blocks large", 200, match_unit=16, policy={"policy": "stock"})
    bound = {"kv_transfer_params": {"max_offload_tokens": 1}} if of == "a client" else None
    send(engine, "a", list(range(10, 330)), max_tokens=60, xargs=bound)
    if of == "Tenuto":
        # As for what runs during a reset of host memory.
        engine.scheduler.tier._port.end_stores("a")
    engine.run()
    assert len(engine.manager._policy.order) == 0


def test_vllm_sees_the_whole_step_when_it_stores_parts_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model, vLLM 0.33 reads there what the step computes. Without that the engine ends."""
    build, seen = OffloadingConnectorScheduler._build_partial_tail_store_jobs, []

    def build_parts(self: Any, output: Any) -> Any:
        if output.kv_connector_block_state.boundary_state_offloads:
            seen.append(output.num_scheduled_tokens)
        return build(self, output)

    monkeypatch.setattr(OffloadingConnectorScheduler, "_build_partial_tail_store_jobs", build_parts)
    engine = begin("states, all blocks large", 200, match_unit=16, policy={"policy": "stock"})
    send(engine, "a", list(range(10, 330)), max_tokens=60)
    engine.run()
    assert seen
    assert all("a" in each for each in seen)


@pytest.mark.parametrize(("name", "seed"), [("states, all blocks large", 26)])
def test_random_jobs_above_a_small_host_memory_and_a_small_disk(name: str, seed: int, tmp_path: Path) -> None:
    """Parts of what a request needs are on the GPU, in host memory, on the disk, and nowhere."""
    unit = 16 if "large" in name else None
    engine = begin(name, 20, tmp_path, 60, match_unit=unit, num_blocks=120, policy={"policy": "stock"})
    chaos = Chaos(engine, random.Random(seed), num_jobs=8, most_tokens=400)
    for _ in range(500):
        chaos.act()
    engine.run()
    engine.scheduler.shutdown()
