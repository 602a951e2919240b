"""What the names of KV on the disk depend on, and what gives host memory and disk a new beginning."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", "0.31.0")

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheConfig

from tenuto.vllm.compat import origin
from tenuto.vllm.compat.origin import UnknownOriginError, get_origin, may_span_machines
from tenuto.vllm.compat.process import watch_weights
from tenuto.vllm.tiers import host
from tests.vllm.slow_copies import SlowCopies
from tests.vllm.tiered import TieredEngine
from tests.vllm.workerless import TINY_LLAMA, make_request

RECENT_NS = 10**18


@pytest.fixture(autouse=True)
def started_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine began after the model's files were written, which a test cannot wait for."""
    monkeypatch.setattr(origin, "_get_start_s", lambda: float("inf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "blob").write_bytes(b"weights 1")
    os.utime(tmp_path / "blob", ns=(RECENT_NS, RECENT_NS))
    # As in a snapshot of the hub.
    (model / "model.bin").symlink_to(tmp_path / "blob")
    return model


@pytest.fixture(scope="module")
def kv_config() -> Any:
    return TieredEngine().scheduler.kv_cache_config


def find(folder: Path, kv_config: KVCacheConfig, **more: Any) -> str:
    """The origin of a tiny model; `more`: arguments of its configs by name, or whole parts of VllmConfig."""
    model = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, **more.pop("model", {})}
    cache = {"block_size": 16, "enable_prefix_caching": True, **more.pop("cache", {})}
    pictures = more.pop("pictures", None)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), **model),
        cache_config=CacheConfig(**cache),
        parallel_config=more.pop("parallel_config", ParallelConfig()),
        scheduler_config=SchedulerConfig(
            max_num_seqs=more.pop("max_num_seqs", 16),
            max_num_batched_tokens=2048,
            max_model_len=1024,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"),
        **{name: value for name, value in more.items() if name != "layout"},
    )
    config.model_config.multimodal_config = pictures
    layout = build_offloading_config(config, kv_config)
    return get_origin(config, kv_config, dataclasses.replace(layout, **more.get("layout", {})))


def test_the_same_is_the_same_whatever_else_changes(folder: Path, kv_config: Any) -> None:
    first = find(folder, kv_config)
    assert len(bytes.fromhex(first)) == origin.NUM_DIGEST_BYTES
    assert find(folder, kv_config) == first
    others: list[dict[str, Any]] = [
        {"max_num_seqs": 3},
        {"model": {"served_model_name": "x"}},
        {"model": {"enforce_eager": True}},
        {"additional_config": {"tenuto": {"policy": "stock"}}},
        {"cache": {"gpu_memory_utilization": 0.5}},
        {"instance_id": "another"},
    ]
    assert {find(folder, kv_config, **each) for each in others} == {first}


@pytest.mark.parametrize(
    "more",
    [
        {"model": {"dtype": "bfloat16"}},
        {"model": {"hf_overrides": {"rope_theta": 500000.0}}},
        {"model": {"max_model_len": 512}},
        {"cache": {"block_size": 8}},
        {"cache": {"cache_dtype": "fp8"}},
        {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}},
        {"lora_config": LoRAConfig(max_lora_rank=8)},
        {"parallel_config": ParallelConfig(pipeline_parallel_size=2)},
        {"layout": {"kv_cache_layout": "HND"}},
        {"layout": {"worker_kv_bytes_per_block": 12345}},
    ],
    ids=lambda each: (
        "-".join([*each, *map(str, next(iter(each.values())))])
        if isinstance(next(iter(each.values())), dict)
        else next(iter(each))
    ),
)
def test_each_setting_that_changes_kv_counts(more: dict[str, Any], folder: Path, kv_config: Any) -> None:
    assert find(folder, kv_config, **more) != find(folder, kv_config)


def test_what_changes_pictures_counts(folder: Path, kv_config: Any) -> None:
    """VLLM's own key of a picture has what a request says of its processing, but not what the server says."""
    stock = find(folder, kv_config, pictures=MultiModalConfig())
    for kwargs in ({"mm_processor_kwargs": {"max_pixels": 1000}}, {"mm_encoder_attn_dtype": "fp8"}):
        assert find(folder, kv_config, pictures=MultiModalConfig(**kwargs)) != stock, kwargs
    assert find(folder, kv_config, pictures=MultiModalConfig(mm_processor_cache_gb=1)) == stock


def _replace(folder: Path) -> None:
    """Through the link, of the same size, and with the old time."""
    (folder / "model.bin").write_bytes(b"weights 2")
    os.utime(folder / "model.bin", ns=(RECENT_NS, RECENT_NS))


def _point_elsewhere(folder: Path) -> None:
    other = folder.parent / "other"
    other.write_bytes(b"weights 2")
    os.utime(other, ns=(RECENT_NS, RECENT_NS))
    (folder / "model.bin").unlink()
    (folder / "model.bin").symlink_to(other)


def _add(folder: Path) -> None:
    (folder / "model-2.bin").write_bytes(b"more")


@pytest.mark.parametrize("change", [_replace, _point_elsewhere, _add])
def test_other_weights_count(change: Callable[[Path], None], folder: Path, kv_config: Any) -> None:
    first = find(folder, kv_config)
    change(folder)
    assert find(folder, kv_config) != first


def test_versions_and_environment_count(
    folder: Path, kv_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [find(folder, kv_config)]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    found.append(find(folder, kv_config))
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    found.append(find(folder, kv_config))
    monkeypatch.setattr(origin.importlib.metadata, "version", lambda package: "9.9")
    found.append(find(folder, kv_config))
    assert len(set(found)) == 4


def test_what_is_not_known_is_said(folder: Path, kv_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import LoadConfig

    with pytest.raises(UnknownOriginError, match="--load-format dummy"):
        find(folder, kv_config, load_config=LoadConfig(load_format="dummy"))
    with pytest.raises(UnknownOriginError, match="set PYTHONHASHSEED"):
        find(folder, kv_config, cache={"prefix_caching_hash_algo": "xxhash"})
    monkeypatch.setattr(origin, "_get_start_s", lambda: folder.stat().st_ctime - 1)
    with pytest.raises(UnknownOriginError, match="changed since the engine began"):
        find(folder, kv_config)
    monkeypatch.setattr(origin, "_get_device", lambda: 1 / 0)
    monkeypatch.setattr(origin, "_get_start_s", lambda: float("inf"))
    with pytest.raises(UnknownOriginError, match="ZeroDivisionError"):
        find(folder, kv_config)


@pytest.mark.parametrize("changed", ["model", "link", "link/model"])
def test_a_model_that_another_took_the_place_of_during_the_start_is_not_known(
    changed: str, folder: Path, kv_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there now may not be what was loaded, though its files are old."""
    link = folder.parent / "link"
    link.symlink_to(folder if changed == "link" else folder.parent)
    find(folder.parent / changed, kv_config)
    now_s = max(each.lstat().st_ctime for each in (folder, *folder.iterdir(), folder.parent / "blob", link))
    monkeypatch.setattr(origin, "_get_start_s", lambda: now_s + 1e-6)
    find(folder.parent / changed, kv_config)
    while time.time() < now_s + 0.05:
        pass
    place = folder if changed == "model" else link
    place.rename(folder.parent / "away")
    (folder.parent / "away").rename(place)
    with pytest.raises(UnknownOriginError, match="changed since the engine began"):
        find(folder.parent / changed, kv_config)


def test_the_start_of_this_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    began_s = origin._get_start_s()
    assert Path("/proc/self").exists()
    assert 0 < began_s <= origin.time.time()
    assert began_s == pytest.approx(origin._get_start_s(), abs=0.1)


# A new beginning.


class Core:
    """What stands for vLLM's EngineCore."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> str:
        self.calls.append(method)
        if method == "fails":
            raise ValueError(method)
        return "done"

    def add_lora(self, lora_request: Any) -> bool:
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        pass


def test_calls_that_may_change_weights_are_told() -> None:
    core, told = Core(), []
    watch_weights(core, told.append, lambda name, path, load: load())
    for method in ("update_weights", "list_loras", "reload_weights", "compute_weight_checksums", "my_own"):
        assert core.collective_rpc(method, None) == "done"
    with pytest.raises(ValueError, match="fails"):
        core.collective_rpc("fails")
    core.sleep(1)
    core.sleep(level=2)
    assert told == ["update_weights", "reload_weights", "my_own", "fails", "sleep"]


def fill(engine: TieredEngine, name: str, *, is_done: bool = True) -> None:
    engine.add(make_request(name, [ord(name[0])] * 160, max_tokens=20))
    if is_done:
        engine.drain()
    else:
        for _ in range(4):
            engine.step()


def count(engine: TieredEngine) -> int:
    return len(engine.host._policy.order)


def test_what_runs_during_a_reset_is_not_stored_afterwards() -> None:
    """The GPU's cache cannot be reset while blocks are in use; nothing of it may come below, until it is."""
    engine = TieredEngine(num_blocks=101, num_chunks=200)
    fill(engine, "a")
    fill(engine, "b", is_done=False)
    assert count(engine) > 10
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    # This one hits on the GPU what "b" computed before.
    fill(engine, "b1", is_done=False)
    assert engine.hits["b1"][0] > 0
    engine.drain()
    assert count(engine) == 0
    # When no request has a block, the GPU is reset too, and all is as before.
    fill(engine, "c")
    fill(engine, "b2")
    assert count(engine) == 2 * (179 // 16)
    engine.assert_clean()


def test_other_weights_in_memory_begin_anew() -> None:
    engine = TieredEngine(num_blocks=101, num_chunks=200)
    fill(engine, "a")
    engine.tier.change_weights("update_weights")
    assert count(engine) == 0
    fill(engine, "a2")
    assert sum(engine.hits["a2"]) == 0
    assert count(engine) == 179 // 16
    engine.assert_clean()


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_adapter_that_is_loaded_anew_with_other_weights_begins_anew(
    is_changed: bool, tmp_path: Path
) -> None:
    engine = TieredEngine(num_blocks=101, num_chunks=200)
    (tmp_path / "adapter").write_bytes(b"one")
    for number in range(2):
        assert engine.tier.load_adapter("x", str(tmp_path / "adapter"), lambda: True) is True
        assert count(engine) == (0 if number == 0 or is_changed else 179 // 16)
        fill(engine, "a")
        if is_changed:
            (tmp_path / "adapter").write_bytes(b"two")
    engine.assert_clean()


def test_copies_under_way_do_not_reach_what_is_read_after_an_adapter_is_loaded_anew(
    tmp_path: Path,
) -> None:
    """Chunks of host memory are free again, and workers still write to them until their next step."""
    adapter, copies = tmp_path / "adapter", SlowCopies(random.Random(0))
    engine = TieredEngine(
        num_blocks=101, num_chunks=200, copies=copies, disk={"folder": str(tmp_path / "kv")}
    )

    def load(text: str) -> None:
        adapter.write_text(text)
        engine.tier.load_adapter("x", str(adapter), lambda: True)

    load("one")
    fill(engine, "b")
    load("two")
    copies.share_done = 0.0
    fill(engine, "a", is_done=False)
    load("three")
    # What the disk still has is read before the workers hear of the next step.
    flush = engine._worker.handle_preemptions

    def flush_late(meta: Any) -> None:
        engine.disk.drain_jobs()
        flush(meta)

    engine._worker.handle_preemptions = flush_late
    copies.share_done = 1.0
    # It compares each block that a request hits with what it should hold.
    fill(engine, "b2")
    assert engine.hits["b2"] == (0, 0)


@pytest.mark.parametrize("facts", [{"nnodes_within_dp": 2}, {"world_size": 2, "uses_ray": True}])
def test_a_disk_is_not_used_if_workers_may_be_on_several_machines(
    facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the host memory of one machine only. The others' share of a chunk would be another's."""
    engine = TieredEngine(disk={"folder": str(tmp_path)})
    assert engine.disk._space is not None
    engine.shutdown()
    backend = "ray" if facts.pop("uses_ray", False) else "mp"
    parallel = SimpleNamespace(
        **{"nnodes_within_dp": 1, "world_size": 1, "distributed_executor_backend": backend, **facts}
    )
    monkeypatch.setattr(host, "may_span_machines", lambda _: may_span_machines(parallel))
    engine = TieredEngine(disk={"folder": str(tmp_path)})
    assert engine.disk._space is None
    fill(engine, "a")
    engine.shutdown()
    assert not list(tmp_path.rglob("*.kv"))


def test_what_is_stored_on_request_is_found_on_disk_after_a_restart(tmp_path: Path) -> None:
    """With an adapter too, whose KV has other names there."""
    adapter = tmp_path / "adapter"
    adapter.write_text("weights")
    lora = LoRARequest("x", 1, str(adapter))
    policy = {"policy": "tests.vllm.policies:StoresAtTheEnd", "strict": True}
    for number in range(2):
        engine = TieredEngine(disk={"folder": str(tmp_path / "kv")}, tenuto=policy)
        engine.tier.load_adapter("x", str(adapter), lambda: True)
        for name, each in (("plain", None), ("adapted", lora)):
            hints = {"job_id": name, "tool": "slow"}
            prompt = [ord(name[0])] * 160
            engine.add(make_request(name, prompt, max_tokens=2, xargs=hints, lora_request=each))
            engine.drain()
            assert sum(engine.hits[name]) == number * 160, name
        engine.disk.drain_jobs()
        engine.shutdown()
