import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.roofline import RooflineStepCost
from tenuto.sim.cost.tables import (
    AICONFIGURATOR_VERSION,
    LENGTHS,
    AiconfiguratorTables,
    TableStepCost,
    installed_version,
    load_table_step_cost,
)
from tenuto.sim.hardware.gpus import GPUS
from tenuto.sim.hardware.models import bundled_models, load_model
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup

pytestmark = pytest.mark.slow

needs_tables = pytest.mark.skipif(
    installed_version() != AICONFIGURATOR_VERSION,
    reason=f"needs aiconfigurator-core=={AICONFIGURATOR_VERSION}",
)
LLAMA = load_model("llama-3.1-8b")
MEASURED = [gpu for gpu in GPUS.values() if gpu.table_system]


class SimpleTables:
    """A machine with a formula for every part, which counts how often it is read.

    Prefill attention has 5 us beside its pairs, and a kernel of 1 ns per pair: the share of a whole
    sequence's pairs that the chunk visits, as aiconfigurator scales it. Decode attention bends at 1,000.
    """

    def __init__(self) -> None:
        self.num_reads = 0

    def linear_s(self, num_tokens: int) -> float:
        self.num_reads += 1
        return 1e-3 + 1e-6 * num_tokens

    def head_s(self, num_requests: int) -> float:
        self.num_reads += 1
        return 1e-5 * num_requests

    def prefill_attention_s(self, num_chunks: int, num_tokens: int, num_context_tokens: int) -> float:
        self.num_reads += 1
        whole = num_tokens + num_context_tokens
        share = 1 - (num_context_tokens / whole) ** 2
        return 5e-6 + num_chunks * share * 1e-9 * whole**2 / 2

    def decode_attention_s(self, num_decodes: int, num_context_tokens: int) -> float:
        self.num_reads += 1
        return 1e-8 * num_decodes * max(num_context_tokens, 1000)


def test_the_parts_add_up_by_hand() -> None:
    cost = TableStepCost(SimpleTables())
    batch = StepBatch.of(prefills=[(100, 400)], decodes=[2048, 2048])
    # Linear: 1 ms + 102 x 1 us; head: 3 x 10 us; prefill: 5 us + 100 x 450 pairs x 1 ns;
    # decodes: 2 x 2,048 x 10 ns.
    assert cost.seconds(batch) == pytest.approx(1.102e-3 + 30e-6 + 5e-6 + 45e-6 + 40.96e-6, rel=1e-9)


def test_chunks_are_priced_by_their_own_pairs_not_by_their_mean() -> None:
    cost = TableStepCost(SimpleTables())
    uneven, even = (StepBatch.of(prefills=p) for p in ([(100, 0), (100, 800)], [(100, 400), (100, 400)]))
    assert cost.seconds(uneven) == pytest.approx(cost.seconds(even))
    long_and_short, equal = (
        StepBatch.of(prefills=p) for p in ([(190, 800), (10, 0)], [(100, 400), (100, 400)])
    )
    # 190 x 895 + 10 x 5 = 170,100 pairs, against 2 x 100 x 450 = 90,000.
    assert cost.seconds(long_and_short) - cost.seconds(equal) == pytest.approx(80_100e-9)


def test_between_lengths_it_is_linear_and_beyond_them_the_last_slope_goes_on() -> None:
    cost = TableStepCost(SimpleTables())
    below, above = max(n for n in LENGTHS if n < 1000), min(n for n in LENGTHS if n > 1000)
    middle = (below + above) / 2
    at_below, at_middle, at_above = (
        cost.seconds(StepBatch(0, 0, 0, 0.0, 2, round(2 * context))) for context in (below, middle, above)
    )
    # The tables bend at 1,000 and the interpolation does not.
    assert at_middle == pytest.approx((at_below + at_above) / 2)
    assert at_middle > 1e-3 + 2e-6 + 2e-5 + 2e-8 * max(middle, 1000)
    longest = LENGTHS[-1]
    beyond = cost.seconds(StepBatch.of(decodes=[2 * longest])) - cost.seconds(StepBatch.of(decodes=[longest]))
    assert beyond == pytest.approx(1e-8 * longest)


def test_every_size_is_read_once() -> None:
    tables = SimpleTables()
    cost = TableStepCost(tables)
    batches = [StepBatch.of(prefills=[(64, c)], decodes=[c] * 3) for c in (0, 1, 50, 3000)]
    first = [cost.seconds(batch) for batch in batches]
    num_reads = tables.num_reads
    assert [cost.seconds(batch) for batch in batches] == first
    assert tables.num_reads == num_reads


def test_an_empty_step_takes_no_time() -> None:
    assert TableStepCost(SimpleTables()).seconds(StepBatch.of()) == 0.0


@given(
    prefills=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 60_000)), max_size=3),
    decodes=st.lists(st.integers(0, 60_000), min_size=1, max_size=20),
)
def test_more_context_never_takes_less_time(prefills: list[tuple[int, int]], decodes: list[int]) -> None:
    cost = TableStepCost(SimpleTables())
    base = cost.seconds(StepBatch.of(prefills, decodes))
    assert cost.seconds(StepBatch.of(prefills, [c + 100 for c in decodes])) >= base
    longer = cost.seconds(StepBatch.of([(n, c + 100) for n, c in prefills], decodes))
    assert longer > base if prefills else longer == base


def direct(system: str, version: str) -> Callable[[StepBatch], float]:
    """aiconfigurator's own price of a whole step, which averages over the requests itself."""
    import aiconfigurator_core

    config = {
        "schema_version": 1,
        "model_name": "meta-llama/Meta-Llama-3.1-8B",
        "system_name": system,
        "backend": "vllm",
        "backend_version": version,
        "tp_size": 1,
        "pp_size": 1,
    }
    model = aiconfigurator_core.RustForwardPassPerfModel.from_native(json.dumps(config))

    def seconds(batch: StepBatch) -> float:
        requests: dict[str, Any] = {
            "num_prefill_requests": batch.num_prefills,
            "sum_prefill_tokens": batch.num_prefill_tokens,
            "sum_prefill_kv_tokens": batch.num_prefill_context_tokens,
            "num_decode_requests": batch.num_decodes,
            "sum_decode_kv_tokens": batch.num_decode_context_tokens,
        }
        milliseconds = model.estimate_forward_pass_time_ms(json.dumps({"scheduled_requests": requests}))
        assert milliseconds is not None
        return milliseconds / 1000

    return seconds


def random_steps(kind: str, count: int) -> Iterator[StepBatch]:
    """Steps of equal requests, sizes spread evenly over orders of magnitude."""
    rng = random.Random(7)

    def size(low: int, high: int) -> int:
        return round(low * math.exp(rng.random() * math.log(high / low)))

    for _ in range(count):
        num_prefills = 0 if kind == "decode" else size(1, 16)
        num_decodes = 0 if kind == "prefill" else size(1, 512)
        chunk = (size(1, 8192 // 16), size(1, 32_768) - 1)
        yield StepBatch.of([chunk] * num_prefills, [size(16, 32_768)] * num_decodes)


@needs_tables
@pytest.mark.parametrize("gpu", MEASURED, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    ("kind", "worst"),
    [
        ("prefill", 0.015),
        ("decode", 0.02),
        # A direct mixed step prices the output head for one request; ours for all that get a token.
        ("mixed", 0.04),
    ],
)
def test_interpolation_stays_close_to_direct_calls(gpu: Any, kind: str, worst: float) -> None:
    cost = load_table_step_cost(gpu, LLAMA, 1)
    direct_seconds = direct(gpu.table_system, "0.14.0" if gpu.table_system == "a100_sxm" else "0.24.0")
    for batch in random_steps(kind, 200):
        assert cost.seconds(batch) == pytest.approx(direct_seconds(batch), rel=worst), batch


@needs_tables
def test_the_h200_facts() -> None:
    cost = load_table_step_cost(GPUS["H200"], LLAMA, 1)
    facts_s = {
        StepBatch.of(prefills=[(2048, 0)]): 0.043,
        StepBatch.of(prefills=[(2048, 8192)]): 0.057,
        StepBatch.of(prefills=[(8192, 0)]): 0.199,
        StepBatch.of(decodes=[8192] * 64): 0.021,
    }
    for batch, seconds in facts_s.items():
        assert cost.seconds(batch) == pytest.approx(seconds, abs=0.0005)


STEPS = [
    StepBatch.of(prefills=[(2048, 0)]),
    StepBatch.of(prefills=[(8192, 0)]),
    StepBatch.of(prefills=[(2048, 8192)]),
    StepBatch.of(prefills=[(512, 12_000)]),
    StepBatch.of(decodes=[1024]),
    StepBatch.of(decodes=[4096] * 16),
    StepBatch.of(decodes=[8192] * 64),
    StepBatch.of(decodes=[2048] * 256),
    StepBatch.of(prefills=[(4000, 3000)] * 2, decodes=[6000] * 48),
]


@needs_tables
@pytest.mark.parametrize("gpu", MEASURED, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("llama-3.1-8b", 0.88, 1.12),
        ("qwen3-8b", 0.87, 1.13),
        # Experts are uneven in the tables and even in the roofline, which is wrongest for one token.
        ("qwen3-30b-a3b", 0.65, 1.65),
    ],
)
def test_the_roofline_is_close_to_the_tables(gpu: Any, name: str, low: float, high: float) -> None:
    model = load_model(name)
    measured, estimated = load_table_step_cost(gpu, model, 1), RooflineStepCost(gpu, model)
    for batch in STEPS:
        assert low < estimated.seconds(batch) / measured.seconds(batch) < high, batch


GROWING = [
    [StepBatch.of(prefills=[(n, 0)]) for n in (256, 1024, 4096, 16_384)],
    [StepBatch.of(prefills=[(2048, c)]) for c in (0, 2048, 8192, 32_768, 120_000)],
    [StepBatch.of(decodes=[4096] * n) for n in (1, 16, 64, 256)],
    [StepBatch.of(decodes=[c] * 32) for c in (256, 2048, 16_384, 120_000)],
    [StepBatch.of(prefills=[(n, 4096)], decodes=[4096] * 32) for n in (256, 1024, 4096)],
]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_more_work_takes_more_time_on_every_gpu_with_every_model(gpu: Any, tp: int) -> None:
    """Between neighbouring sizes measured kernels differ by more than they grow; over a factor of 4 not."""
    for name in bundled_models():
        cost = build(Setup(gpu=gpu.name, model=name, tp=tp, kv_tokens=10_000)).step_cost
        for batches in GROWING:
            times_s = [cost.seconds(batch) for batch in batches]
            assert times_s == sorted(times_s), (name, batches)


@needs_tables
def test_what_was_compiled_is_kept_and_gives_the_same_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def read() -> list[float]:
        tables = AiconfiguratorTables(GPUS["H100"], LLAMA, 2)
        return [
            tables.linear_s(777),
            tables.prefill_attention_s(2, 300, 5000),
            tables.decode_attention_s(9, 99),
        ]

    compiled = read()
    kept, times = sorted((tmp_path / "tenuto").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("aiconfigurator_core.sdk.EngineHandle.compile", None)
        times.unlink()
        assert read() == compiled
        # What was read before is not read again.
        patch.setattr("aiconfigurator_core.sdk.EngineHandle.run_static_per_op", None)
        assert read() == compiled
    spec, rows = kept.read_bytes(), times.read_bytes()
    assert rows.count(b"\n") == 5
    unlike = b"[1, 2]\n", b'[["prefill"], 1, 1, 0, 1, 1]\n', b'["prefill", 1, 1, 0, "a", 1]\n', b"\xff"
    for damage in (rows[:-5], rows[:-5] + rows, rows + b"]\n", *unlike):
        times.write_bytes(damage)
        assert read() == compiled
        assert times.read_bytes() == rows
    for damage in (b"", spec[:100]):
        times.unlink()
        kept.write_bytes(damage)
        assert read() == compiled
        assert len(kept.read_bytes()) > 100
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert read() == compiled  # no folder can be made there


@needs_tables
def test_any_config_works_by_path(tmp_path: Path) -> None:
    config = json.loads(LLAMA.config_path.read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 16}))
    half, whole = (load_table_step_cost(GPUS["H100"], model, 1) for model in (load_model(tmp_path), LLAMA))
    batch = StepBatch.of(prefills=[(4096, 0)])
    # Half the layers take half the time, but for the head of about 0.3 ms.
    assert half.seconds(batch) == pytest.approx(whole.seconds(batch) / 2, rel=0.005)


@needs_tables
def test_tensor_parallel_and_fp8_are_passed_on() -> None:
    batch = StepBatch.of(prefills=[(8192, 0)])
    one = load_table_step_cost(GPUS["H200"], LLAMA, 1).seconds(batch)
    assert load_table_step_cost(GPUS["H200"], LLAMA, 2).seconds(batch) < 0.65 * one
    assert (
        load_table_step_cost(GPUS["H200"], load_model("llama-3.1-8b", dtype="fp8"), 1).seconds(batch)
        < 0.75 * one
    )
    long_decodes = StepBatch.of(decodes=[30_000] * 64)
    fp8_cache = load_model("llama-3.1-8b", kv_cache_dtype="fp8")
    slower, faster = (
        load_table_step_cost(GPUS["H200"], model, 1).seconds(long_decodes) for model in (LLAMA, fp8_cache)
    )
    assert faster < 0.75 * slower


@needs_tables
@pytest.mark.parametrize(
    ("gpu", "name"), [("H200", "gemma-3-27b"), ("A100-80", "gpt-oss-20b")], ids=["architecture", "data type"]
)
def test_what_the_tables_lack_is_an_error_that_names_the_way_out(gpu: str, name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no measured tables for {name} on {gpu}, tp 1; choose the roofline: "
    ):
        load_table_step_cost(GPUS[gpu], load_model(name), 1)


@pytest.mark.parametrize(("num_decodes", "num_context_tokens"), [(1, 1), (3, 1), (7, 6_000), (5, 5_000_000)])
def test_a_stretch_of_decodes_is_priced_as_its_steps(num_decodes: int, num_context_tokens: int) -> None:
    cost = TableStepCost(SimpleTables())
    contexts = [num_context_tokens + number * num_decodes for number in range(3000)]
    steps = [cost.seconds(StepBatch(0, 0, 0, 0.0, num_decodes, context)) for context in contexts]
    assert cost.price_stretch(num_decodes, num_context_tokens, 3000) == steps
