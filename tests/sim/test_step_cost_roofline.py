import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.roofline import RooflineStepCost
from tenuto.sim.hardware.gpus import GPUS
from tenuto.sim.hardware.models import load_model

H200 = GPUS["H200"]
LLAMA = load_model("llama-3.1-8b")


def test_one_decode_by_hand() -> None:
    # Weights of the layers: 32 x (2 x 4,096 x 40 x 128 + 3 x 4,096 x 14,336) x 2 bytes = 13.96 GB, and a head
    # of 128,256 x 4,096 x 2 bytes = 1.051 GB, at 0.75 x 4.8 TB/s: 3.878 + 0.292 ms.
    # KV: 1,000 tokens x 131,072 bytes at 0.91 x 4.8 TB/s = 0.030 ms.
    # Element-wise: 32 x (8 x 4,096 + 3 x 14,336) x 2 bytes at 0.8 x 4.8 TB/s = 0.001 ms.
    # Launches: 32 layers x 7 kernels x 3 us = 0.672 ms.
    seconds = RooflineStepCost(H200, LLAMA).seconds(StepBatch.of(decodes=[1000]))
    assert seconds == pytest.approx((3.878 + 0.292 + 0.030 + 0.001 + 0.672) * 1e-3, rel=1e-3)


def test_one_prefill_by_hand() -> None:
    # GEMMs: 2 x 6.979e9 parameters x 8,192 tokens = 114.3 TFLOP at 0.73 x 989.4 TFLOP/s = 158.3 ms.
    # Attention: 32 layers x 4 x 4,096 x 8,192 x 4,096 pairs = 17.59 TFLOP at 0.58 x 989.4 = 30.66 ms.
    # Element-wise: 8,192 x 4.850 MB at 3.84 TB/s = 10.35 ms; head 0.292 ms; launches 0.672 ms.
    seconds = RooflineStepCost(H200, LLAMA).seconds(StepBatch.of(prefills=[(8192, 0)]))
    assert seconds == pytest.approx((158.3 + 30.66 + 10.35 + 0.292 + 0.672) * 1e-3, rel=1e-3)


def test_tensor_parallel_splits_the_work_and_adds_all_reduces() -> None:
    model = load_model("llama-3.1-70b")
    batch = StepBatch.of(prefills=[(2048, 0)])
    one, four = (RooflineStepCost(H200, model, tp).seconds(batch) for tp in (1, 4))
    # A layer reduces 2,048 x 8,192 x 2 bytes twice: 1.5 x 33.55 MB at 0.62 x 450 GB/s, and 10 us: 190.4 us.
    # Not split: 80 x 7 launches of 3 us, and the norms' 8 x 8,192 x 2 bytes a token and layer at 3.84 TB/s.
    reduces_s = 160 * 190.4e-6
    unsplit_s = 80 * 7 * 3e-6 + 2048 * 80 * 8 * 8192 * 2 / 3.84e12
    assert four == pytest.approx((one - unsplit_s) / 4 + unsplit_s + reduces_s, rel=1e-3)


def hybrid(tmp_path: Path, window: int) -> RooflineStepCost:
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": window,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return RooflineStepCost(H200, load_model(tmp_path))


def test_a_sliding_window_bounds_what_decodes_read(tmp_path: Path) -> None:
    cost = hybrid(tmp_path, window=128)
    steps = [cost.seconds(StepBatch.of(decodes=[context])) for context in (100, 1000, 2000)]
    # From 1,000 to 2,000 only the full layer reads more: 1,000 x 2,048 bytes at 0.91 x 4.8 TB/s.
    assert steps[2] - steps[1] == pytest.approx(1000 * 2048 / (0.91 * 4.8e12), rel=1e-3)
    # From 100 to 1,000 the full layer reads 900 tokens more and the sliding one 28.
    assert steps[1] - steps[0] == pytest.approx(928 * 2048 / (0.91 * 4.8e12), rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "context", "sliding_pairs"),
    [
        (40, 60, 40 * 80),  # wholly inside the window of 100
        (100, 60, 40 * 80 + 60 * 100),  # leaves it after 40 tokens
        (100, 500, 100 * 100),  # wholly beyond it
    ],
)
def test_a_sliding_window_bounds_the_pairs_of_prefills(
    tmp_path: Path, tokens: int, context: int, sliding_pairs: int
) -> None:
    windowed, unbounded = hybrid(tmp_path, window=100), hybrid(tmp_path, window=10**6)
    batch = StepBatch.of(prefills=[(tokens, context)])
    saved_pairs = batch.num_prefill_pairs - sliding_pairs
    # 4 x 64 heads x 64 floating-point operations per pair at 0.58 x 989.4 TFLOP/s.
    saved_s = saved_pairs * 4 * 64 * 64 / (0.58 * 989.4e12)
    assert unbounded.seconds(batch) - windowed.seconds(batch) == pytest.approx(saved_s, rel=1e-3, abs=1e-12)


def test_few_tokens_read_few_experts() -> None:
    model = load_model("gpt-oss-20b")
    one, many = (RooflineStepCost(H200, model).seconds(StepBatch.of(decodes=[1] * n)) for n in (1, 64))
    # One token uses 4 of 32 experts, 64 tokens all: 28 x 24 experts of 3 x 2,880^2 at 4.25 bits more.
    # The arithmetic of the 63 other tokens takes less than half as long.
    extra_s = 28 * 24 * 3 * 2880**2 * 4.25 / 8 / (0.75 * 4.8e12)
    assert extra_s < many - one < 1.5 * extra_s


def test_fp8_weights_use_fp8_tensor_cores_where_there_are_some() -> None:
    batch = StepBatch.of(prefills=[(8192, 0)])
    fp8 = load_model("llama-3.1-8b", dtype="fp8")
    for name, low, high in (("H200", 0.55, 0.65), ("A100-80", 0.99, 1.01)):
        ratio = RooflineStepCost(GPUS[name], fp8).seconds(batch) / RooflineStepCost(
            GPUS[name], LLAMA
        ).seconds(batch)
        assert low < ratio < high


CHUNKS = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 30_000)), max_size=4)
CONTEXTS = st.lists(st.integers(0, 30_000), max_size=64)


@given(
    name=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "gemma-3-12b"]), prefills=CHUNKS, decodes=CONTEXTS
)
def test_more_work_never_takes_less_time(
    name: str, prefills: list[tuple[int, int]], decodes: list[int]
) -> None:
    cost = RooflineStepCost(H200, load_model(name))
    base = cost.seconds(StepBatch.of(prefills, decodes))
    assert cost.seconds(StepBatch.of(prefills, [*decodes, 100])) > base
    assert cost.seconds(StepBatch.of(prefills, [c + 1000 for c in decodes])) >= base
    assert cost.seconds(StepBatch.of([(n + 16, c) for n, c in prefills], decodes)) >= base
    assert cost.seconds(StepBatch.of([(n, c + 1000) for n, c in prefills], decodes)) >= base


def test_an_empty_step_takes_no_time() -> None:
    assert RooflineStepCost(H200, LLAMA).seconds(StepBatch.of()) == 0.0


def test_a_tensor_parallel_size_must_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match="does not divide 32 heads"):
        RooflineStepCost(H200, LLAMA, tp=5)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize(("num_decodes", "num_context_tokens"), [(1, 1), (7, 800), (64, 100_000)])
def test_a_stretch_of_decodes_is_priced_as_its_steps(
    name: str, num_decodes: int, num_context_tokens: int
) -> None:
    """On full attention, with windows that contexts grow beyond, and with states."""
    cost = RooflineStepCost(GPUS["H100"], load_model(name))
    contexts = [num_context_tokens + number * num_decodes for number in range(300)]
    steps = [cost.seconds(StepBatch(0, 0, 0, 0.0, num_decodes, context)) for context in contexts]
    assert cost.price_stretch(num_decodes, num_context_tokens, 300) == steps
