import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.models import KvGroup, bundled_models, load_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, changes: dict[str, Any], *, without: str | None = None) -> Path:
    config = {field: value for field, value in {**LLAMA, **changes}.items() if field != without}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


# Parameter counts that the models' authors publish (the safetensors index of each).
PUBLISHED_PARAMS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-3-27b": 27_009_346_304,  # the language model alone
    "qwen3-next-80b-a3b": 79_674_391_296,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_parameters_match_the_published_count(name: str) -> None:
    assert load_model(name).num_params == pytest.approx(PUBLISHED_PARAMS[name], rel=4e-4)


def test_llama_parameters_match_exactly() -> None:
    assert load_model("llama-3.1-8b").num_params == 8_030_261_248
    assert load_model("llama-3.1-70b").num_params == 70_553_706_496


def test_every_bundled_config_loads() -> None:
    assert {"gemma-3-12b", *PUBLISHED_PARAMS} == set(bundled_models())
    for name in bundled_models():
        assert load_model(name).name == name


def test_kv_bytes_of_llama_8b() -> None:
    # 2 (key, value) x 8 heads x 128 x 2 bytes = 4,096 per layer; x 32 layers = 131,072 per token.
    model = load_model("llama-3.1-8b")
    assert model.kv_bytes_per_token_per_layer() * model.num_layers == 131_072
    assert model.kv_bytes_per_token_per_layer(tp=4) == 1024
    # 8 heads over 32 GPUs: each holds a copy of one whole head.
    assert model.kv_bytes_per_token_per_layer(tp=32) == 512
    assert load_model("llama-3.1-8b", kv_cache_dtype="fp8").kv_bytes_per_token_per_layer() == 2048


def test_weight_bytes_follow_the_dtypes() -> None:
    model = load_model("llama-3.1-8b")
    assert model.weights_bytes() == 2 * 8_030_261_248
    assert model.weights_bytes(tp=2) == 8_030_261_248
    # Embedding and head, 2 x 128,256 x 4,096, and 65 norms of 4,096 keep 2 bytes; the rest has 1.
    kept = 2 * 128_256 * 4096 + 65 * 4096
    assert load_model("llama-3.1-8b", dtype="fp8").weights_bytes() == 8_030_261_248 + kept
    # gpt-oss's experts have 4.25 bits; its model card names checkpoints of 12.8 and 60.8 GiB.
    assert load_model("gpt-oss-20b").weights_bytes() / 2**30 == pytest.approx(12.8, rel=0.002)
    assert load_model("gpt-oss-120b").weights_bytes() / 2**30 == pytest.approx(60.8, rel=0.002)


def test_a_quantised_checkpoint_stays_so_in_16_bits(tmp_path: Path) -> None:
    path = write(tmp_path, {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float16"})
    model = load_model(path, dtype="bfloat16")
    assert (model.base_dtype, model.attention_dtype, model.expert_dtype) == ("bfloat16", "fp8", "fp8")
    named, default = load_model("gpt-oss-120b", dtype="bfloat16"), load_model("gpt-oss-120b")
    assert named.weights_bytes() == default.weights_bytes()


def test_hybrid_layers_are_grouped_as_vllm_groups_them() -> None:
    # 12 of 24 layers slide: two groups of 12. 52 of 62 slide: six groups of 10, the last padded.
    assert load_model("gpt-oss-20b").kv_groups() == (KvGroup(12, None), KvGroup(12, 128))
    assert load_model("gemma-3-27b").kv_groups() == (KvGroup(10, None), *[KvGroup(10, 1024)] * 6)
    assert load_model("qwen3-8b").kv_groups() == (KvGroup(36, None),)


def test_nearly_equal_kinds_of_layers_make_one_group_each(tmp_path: Path) -> None:
    # 3 full and 4 sliding: 4 < 1.5 x 3, so groups of 4 rather than 3 groups of 3.
    kinds = ["full_attention"] * 3 + ["sliding_attention"] * 4
    path = write(tmp_path, {"num_hidden_layers": 7, "layer_types": kinds, "sliding_window": 128})
    assert load_model(path).kv_groups() == (KvGroup(4, None), KvGroup(4, 128))


def test_gemma_windows_every_layer_but_each_sixth() -> None:
    windows = load_model("gemma-3-12b").windows
    assert windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert windows.count(None) == 8


def test_a_config_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    assert load_model(path) == load_model(tmp_path) == load_model(str(tmp_path))
    assert load_model(path).head_dim == 16  # 64 / 4, because the config has no head_dim


@pytest.mark.parametrize(
    ("name", "bundled"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ],
)
def test_the_name_on_the_hub_is_known_too(name: str, bundled: str) -> None:
    assert load_model(name) == load_model(bundled)


def test_an_unknown_name_lists_the_bundled_ones() -> None:
    with pytest.raises(ConfigError, match=r"'llama-9'.*gemma-3-12b, .*qwen3-8b.*config\.json"):
        load_model("llama-9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, r"model_type: is 'deepseek_v3'; known are llama, mistral"),
        ({"hidden_size": -1}, r"hidden_size: must be a whole number from 1 to \d+, got -1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: must be a whole number"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types: is 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, r"layer_types: must have one entry per layer \(2\)"),
        ({"use_sliding_window": True}, r"use_sliding_window: must be false"),
        ({"torch_dtype": "int4"}, r"torch_dtype: is 'int4'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config.quant_method: is 'awq'"),
        ({"quantization_config": "fp8"}, r"quantization_config: must be an object"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers: must be \[\]"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(write(tmp_path, changes))


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: is missing"):
        load_model(write(tmp_path, {}, without=field))


def test_only_the_first_llamas_may_leave_their_groups_of_heads_out(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, {"model_type": "llama"}, without="num_key_value_heads"))
    assert model.num_kv_heads == model.num_heads
    with pytest.raises(ConfigError, match="num_key_value_heads: is missing"):
        load_model(write(tmp_path, {"model_type": "qwen3"}, without="num_key_value_heads"))


@pytest.mark.parametrize("text", ["{", "[]", "[3]"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"config\.json(:1|\[0\])?: (not valid JSON|is empty|must be a JSON object)"
    ):
        load_model(path)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: is 'int8'"):
        load_model("llama-3.1-8b", dtype="int8")
    with pytest.raises(ConfigError, match="kv_cache_dtype: is 'mxfp4'"):
        load_model("llama-3.1-8b", kv_cache_dtype="mxfp4")


@pytest.mark.parametrize("tp", [0, -1, 3])
def test_a_tensor_parallel_size_must_divide_the_heads(tp: int) -> None:
    with pytest.raises(ConfigError, match="choose one of 1, 2, 4, 8, 16, 32"):
        load_model("llama-3.1-8b").weights_bytes(tp=tp)


def test_kv_heads_are_divided_or_copied_whole(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, {"num_attention_heads": 40, "num_key_value_heads": 8}))
    with pytest.raises(ConfigError, match="40 heads and 8 KV heads; choose one of 1, 2, 4, 8, 40"):
        model.check_tp(5)
    assert model.kv_bytes_per_token_per_layer(tp=40) == model.kv_bytes_per_token_per_layer(tp=8)


def test_blocks_of_a_model_with_states_are_as_large_as_a_state() -> None:
    """As vLLM says at start: 544 tokens for Qwen3-Next. Of its 48 layers every fourth has full attention."""
    model = load_model("qwen3-next-80b-a3b")
    assert [(group.num_layers, group.window) for group in model.kv_groups()] == [
        (12, None),
        *[(12, "state")] * 3,
    ]
    # 3 inputs of 8,192 channels, and 32 matrices of 128 x 128; a token has 2 x 2 x 256 values of 2 bytes.
    assert model.state_bytes_per_layer() == 2 * (3 * 8192 + 32 * 128 * 128) == 536 * 2048
    assert model.get_block_size(16) == 544 and model.get_block_size(1024) == 1024
    assert load_model("llama-3.1-8b").get_block_size(16) == 16
