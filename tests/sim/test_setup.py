"""From options to an engine."""

from __future__ import annotations

import math

import pytest

from tenuto.core.errors import ConfigError, PolicyError
from tenuto.sim.hardware.gpus import GIB
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.tiers.native_offload import NativeOffloader


def make(**settings: object) -> Setup:
    return Setup(step_cost="roofline", **settings)  # type: ignore[arg-type]


def test_a_gpu_of_the_published_sweeps_has_the_kv_cache_that_its_server_reported() -> None:
    assert build(make(gpu="H200")).config.kv.num_blocks == 868_000 // 16
    assert build(make(gpu="RTX5090")).config.kv.num_blocks == 5402


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"kv_tokens": 32_000}, 2000),
        # Shares of the H200's memory, less what else is in it: see test_kv_budget.
        ({"gpu_memory_utilization": 0.9}, 874_160 // 16),
        ({"gpu_memory_utilization": 0.9, "vllm": "0.33"}, 865_888 // 16),
    ],
)
def test_the_kv_cache_can_be_set(settings: dict[str, object], num_blocks: int) -> None:
    assert build(make(gpu="H200", **settings)).config.kv.num_blocks == num_blocks


def test_a_given_kv_cache_that_does_not_fit_is_said() -> None:
    model = {"gpu": "L40S", "model": "llama-3.1-70b", "kv_tokens": 100_000}
    notes = build(make(**model)).notes
    assert any("do not fit on L40S (tp 1)" in note and note.endswith("with --tp 4") for note in notes)
    assert not any("do not fit" in note for note in build(make(**model, tp=4)).notes)


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


def test_what_has_no_measured_times_runs_on_the_roofline_and_says_so() -> None:
    machine = build(Setup(gpu="H100", model="gemma-3-12b"))
    assert machine.step_cost_name == "roofline"
    assert len(machine.notes) == 1
    assert "step times on H100 are a roofline's" in machine.notes[0]
    assert "no measured times of gemma-3-12b" in machine.notes[0]
    assert build(Setup(gpu="RTX5090")).step_cost_name == "roofline"
    # Who asks for one of them gets it, or hears why not.
    assert build(Setup(gpu="H100", step_cost="roofline")).notes == ()
    with pytest.raises(ConfigError, match="no measured tables for gemma-3-12b"):
        build(Setup(gpu="H100", model="gemma-3-12b", step_cost="tables"))


def test_without_the_package_of_tables_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.sim.cost.installed_version", lambda: None)
    machine = build(Setup(gpu="H200"))
    assert machine.step_cost_name == "roofline"
    assert "pip install 'tenuto[tables]'" in machine.notes[0]


@pytest.mark.parametrize("model", ["gemma-3-12b", "gpt-oss-20b"])
def test_where_windows_slide_tiers_are_those_of_vllm(model: str) -> None:
    machine = build(make(policy="offload-async", gpu="H100", model=model, host_gb=10))
    assert machine.tiers is not None
    assert machine.make_scheduler().offloader is not None
    # A block of one layer group, and all groups have as many layers.
    group = machine.model.kv_groups()[0]
    block_bytes = 16 * group.num_layers * machine.model.kv_bytes_per_token_per_layer()
    assert machine.tiers.tiers[0].chunk_bytes == block_bytes
    asked = build(make(offload="asked", gpu="H100", model=model, host_gb=10))
    assert asked.config.offload == "async"
    assert any("every turn is stored" in note and model in note for note in asked.notes)


@pytest.mark.parametrize("model", ["gemma-3-12b", "qwen3-next-80b-a3b"])
def test_lmcache_has_no_tiers_where_layers_differ_and_that_is_said(model: str) -> None:
    machine = build(make(policy="offload-sync", gpu="B200", model=model, host_gb=10))
    assert machine.make_scheduler().offloader is None
    assert any("offload-sync runs without tiers" in note and model in note for note in machine.notes)
    with pytest.raises(ConfigError, match="LMCache's"):
        build(make(offload="serial", gpu="B200", model=model, host_gb=10))


def test_native_is_vllms_own_host_memory_in_single_blocks() -> None:
    machine = build(make(offload="native", host_gb=10))
    assert machine.config.offload_chunk_tokens == machine.config.kv.block_size
    assert isinstance(machine.make_scheduler().offloader, NativeOffloader)
    with pytest.raises(ConfigError, match="without a disk"):
        build(make(offload="native", host_gb=10, disk_gb=10)).make_scheduler()


def test_a_tier_holds_states_too() -> None:
    machine = build(make(offload="async", gpu="B200", model="qwen3-next-80b-a3b", host_gb=10))
    assert machine.config.offload_chunk_tokens == machine.config.kv.block_size > 256
    assert machine.make_scheduler().offloader is not None


@pytest.mark.parametrize(
    ("policy", "is_published"), [("tenuto", False), ("infercept", False), ("offload-sync", True)]
)
def test_only_lmcache_has_the_published_host_memory_unasked(policy: str, is_published: bool) -> None:
    """Others have none until somebody gives some, as in `tenuto serve`."""
    plain, asked = build(make(policy=policy)), build(make(policy=policy, offload="async"))
    assert (plain.host_gb, plain.tiers is not None) == (400.0 if is_published else 0.0, is_published)
    assert asked.host_gb == 400.0
    (said,) = plain.notes
    assert "--host-gb" in said and ("has 400 GiB" if is_published else "has no host memory") in said
    given = build(make(policy=policy, host_gb=10))
    assert (given.host_gb, given.tiers is not None, given.notes) == (10.0, True, ())


def test_host_memory_that_a_policy_does_not_use_is_said() -> None:
    machine = build(make(policy="stock", host_gb=10))
    assert (machine.host_gb, machine.tiers) == (0.0, None)
    assert "policy stock uses none of the host memory" in machine.notes[0]
    assert build(make(policy="stock", host_gb=10, offload="none")).notes == ()


def test_unknown_host_memory_is_said() -> None:
    machine = build(make(policy="offload-sync", gpu="A100-80"))
    assert machine.tiers is None
    assert any("--host-gb" in note for note in machine.notes)
    assert build(make(policy="offload-sync", gpu="A100-80", host_gb=0)).notes == ()
    assert build(make(policy="offload-sync", gpu="A100-80", host_gb=64)).tiers is not None


def test_types_of_weights_and_cache() -> None:
    plain = build(make(gpu="H100", gpu_memory_utilization=0.9))
    small = build(make(gpu="H100", dtype="fp8", kv_cache_dtype="fp8"))
    assert small.config.kv.num_blocks > 2 * plain.config.kv.num_blocks
    # The reported cache is that of bf16.
    assert build(make(gpu="H100", dtype="fp8")).config.kv.num_blocks != 434_000 // 16


def test_the_interval_of_windows_is_that_of_a_default_server() -> None:
    assert build(make()).config.kv.retention_interval == 0
    dense = build(make(gpu="H100", model="gemma-3-12b", prefix_cache_retention_interval=None))
    assert dense.config.kv.retention_interval is None


def test_leases_can_yield_as_under_the_plugin() -> None:
    assert not build(make()).make_scheduler().driver.limits.always_yield
    assert build(make(limits="plugin")).make_scheduler().driver.limits.always_yield


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gpu": "H3000"}, ConfigError, "unknown GPU 'H3000'"),
        ({"policy": "best"}, PolicyError, "no policy 'best'"),
        ({"options": {"speed": 1}}, ConfigError, "unknown key 'speed'"),
        (
            {"offload": "later"},
            ConfigError,
            "--offload must be one of none, async, sync, serial, asked, native; got 'later'",
        ),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "--gpu-memory-utilization must be at most 1"),
        ({"gpu": "L40S", "model": "llama-3.1-70b"}, ConfigError, "leaves no KV cache"),
        ({"offload": "sync", "gpu": "H100", "model": "gpt-oss-20b"}, ConfigError, "full attention"),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 513}, ConfigError, "at least --max-num-seqs"),
        ({"max_num_seqs": 0}, ConfigError, "--max-num-seqs must be at least 1"),
        (
            {"max_num_batched_tokens": 0},
            ConfigError,
            "--max-num-batched-tokens must be at least 1",
        ),
        ({"max_model_len": -1}, ConfigError, "--max-model-len must be"),
        ({"gpu_memory_utilization": 0.0}, ConfigError, "--gpu-memory-utilization must be above 0"),
        ({"prefix_cache_retention_interval": 64}, ConfigError, "is for models with sliding windows"),
        (
            {"prefix_cache_retention_interval": 40, "model": "gpt-oss-20b", "gpu": "H100"},
            ConfigError,
            "must be a multiple of the block size \\(16\\), or None; got 40",
        ),
        ({"step_cost_factor": 1e308}, ConfigError, "--step-cost-factor must be at most"),
        ({"max_model_len": 1}, ConfigError, "--max-model-len must be at least 2"),
        ({"block_size": 10**6}, ConfigError, "fewer than two blocks of 1,000,000 tokens; lower --block-size"),
        ({"kv_tokens": 17}, ConfigError, "--kv-tokens must be at least 32, two blocks; got 17"),
        ({"offload": "async", "host_gb": math.nan}, ConfigError, "--host-gb must be finite"),
        ({"offload": "async", "host_gb": math.inf}, ConfigError, "--host-gb must be finite"),
        ({"offload": "async", "host_gb": 1e300}, ConfigError, "--host-gb must be at most"),
        ({"offload": "async", "host_gb": 1.0, "disk_gb": 1e300}, ConfigError, "--disk-gb must be at most"),
        ({"offload": "async", "link_gb_s": 0.0}, ConfigError, "--link-gb-s must be"),
        ({"limits": "none"}, ConfigError, "--limits must be one of published, plugin"),
        ({"dtype": "int3"}, ConfigError, "dtype: is 'int3'"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        build(make(**settings)).make_scheduler()


def test_the_size_of_steps_is_what_the_policy_wants_unless_the_user_says() -> None:
    assert build(make(gpu="H100", policy="stock")).config.step_tokens is None
    assert build(make(gpu="H100", policy="tenuto")).config.step_tokens == "adaptive"
    assert build(make(gpu="H100", policy="tenuto", step_tokens=512)).config.max_step_tokens == 512
    config = build(make(gpu="H100", policy="stock", step_tokens="adaptive")).config
    assert (config.step_tokens, config.max_step_tokens) == ("adaptive", 8192)
    # The engine's own budget stays the most; it also says how much memory is left for the KV cache.
    assert build(make(gpu="H100", policy="stock", step_tokens=10**6)).config.max_step_tokens == 8192


@pytest.mark.parametrize("wrong", ["fast", 0, -512, 1.5, True])
def test_a_size_of_steps_that_is_none_is_refused(wrong: object) -> None:
    whole = r"adaptive, adaptive:X with X from 0 up, or a number"
    with pytest.raises(ConfigError, match=rf"--step-tokens must be ({whole}|str or int)"):
        make(step_tokens=wrong)


def test_a_prefill_interval_acts_on_one_engine_since_vllm_0_33() -> None:
    config = build(make(vllm="0.33", prefill_schedule_interval=4)).config
    assert (config.prefill_schedule_interval, config.kv.vllm_release) == (4, "0.33")
    with pytest.raises(ConfigError, match="add --vllm"):
        make(prefill_schedule_interval=4)
