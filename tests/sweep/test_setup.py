"""From options to an engine."""

from __future__ import annotations

import pytest

from tenuto.core.errors import ConfigError, PolicyError
from tenuto.sim.gpus import GIB
from tenuto.sweep.setup import Setup, build


def make(**settings: object) -> Setup:
    return Setup(step_cost="roofline", **settings)  # type: ignore[arg-type]


def test_a_gpu_of_the_published_sweeps_has_the_kv_cache_that_its_server_reported() -> None:
    assert build(make(gpu="H200")).config.kv.num_blocks == 868_000 // 16
    assert build(make(gpu="RTX5090")).config.kv.num_blocks == 5402


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"kv_tokens": 32_000}, 2000),
        # 0.9 of the H200's memory, less weights and activations: see test_kv_budget.
        ({"gpu_memory_utilization": 0.9}, 868_880 // 16),
    ],
)
def test_the_kv_cache_can_be_set(settings: dict[str, object], num_blocks: int) -> None:
    assert build(make(gpu="H200", **settings)).config.kv.num_blocks == num_blocks


def test_a_policy_gets_the_engine_settings_it_wants_unless_others_are_given() -> None:
    assert build(make(policy="stock")).tiers is None
    machine = build(make(policy="offload-sync", gpu="H200"))
    assert machine.config.offload == "sync"
    assert machine.tiers is not None
    # 400 GiB in chunks of 256 tokens of 128 KiB each.
    assert machine.tiers.tiers[0].capacity_chunks == 400 * GIB // (256 * 131_072)
    assert build(make(policy="offload-sync", gpu="H200", offload="none")).tiers is None
    assert build(make(policy="stock", gpu="H200", offload="async")).tiers is not None


def test_disk_stands_behind_host_memory_and_tensor_parallelism_shares_both() -> None:
    machine = build(
        make(policy="offload-async", gpu="H100", model="llama-3.1-70b", tp=4, host_gb=100, disk_gb=1000)
    )
    assert machine.tiers is not None
    host, disk = machine.tiers.tiers
    assert (host.name, disk.name) == ("host", "disk")
    # A quarter of 100 GiB for a quarter of each token: 80 layers x 8 heads x 128 x 2 x 2 bytes / 4.
    assert host.capacity_chunks == 25 * GIB // (256 * 80 * 8 * 128 * 2 * 2 // 4)


def test_a_gpu_without_host_memory_has_no_tier() -> None:
    assert build(make(policy="offload-async", gpu="RTX5090")).tiers is None
    assert build(make(policy="offload-async", gpu="H200", host_gb=0)).tiers is None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gpu": "H3000"}, ConfigError, "unknown GPU 'H3000'"),
        ({"policy": "best"}, PolicyError, "no policy 'best'"),
        ({"options": {"speed": 1}}, ConfigError, "unknown key 'speed'"),
        ({"offload": "later"}, ConfigError, "offload must be one of none, sync, async, asked"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization"),
        ({"gpu": "L40S", "model": "llama-3.1-70b"}, ConfigError, "leaves no KV cache"),
        ({"policy": "offload-async", "gpu": "H100", "model": "gpt-oss-20b"}, ConfigError, "full attention"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        build(make(**settings)).make_scheduler()
