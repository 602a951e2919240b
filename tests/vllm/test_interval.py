"""What `tenuto serve` says about the retention interval, from a model's config; vLLM is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.vllm.launch import build_command, describe_interval, get_hints, read_layers

GEMMA = {"text_config": {"num_hidden_layers": 12, "sliding_window": 1024, "sliding_window_pattern": 6}}
GPT_OSS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
QWEN = {"num_hidden_layers": 8, "full_attention_interval": 4}


def write(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (GEMMA, {"a window of 1024 tokens": 10, "full attention": 2}),
        (GPT_OSS, {"a window of 128 tokens": 2, "full attention": 2}),
        (QWEN, {"a recurrent state": 6, "full attention": 2}),
        ({"num_hidden_layers": 8}, None),
        ("[]", None),
        ("{", None),
        ({"text_config": 3}, None),
    ],
)
def test_layers_by_kind(config: Any, layers: dict[str, int] | None, tmp_path: Path) -> None:
    assert read_layers(write(tmp_path, config)) == layers


def test_what_is_said(tmp_path: Path) -> None:
    model = write(tmp_path, GEMMA)
    said = describe_interval(model, None, retains=True)
    assert said is not None and "stays 0: 10 layers with a window of 1024 tokens" in said and "pinned" in said
    assert "computes the previous answer again" in str(describe_interval(model, "0", retains=False))
    assert "without it Tenuto caches less" in str(describe_interval(model, "8192", retains=True))
    assert describe_interval("nobody/knows-this", None, retains=True) is None


def test_serve_says_it(tmp_path: Path) -> None:
    model = write(tmp_path, GPT_OSS)
    said = get_hints(build_command(model, {"policy": "continuum-fixed"}, []))
    assert len(said) == 1 and "Leases hold" in said[0]
    said = get_hints(build_command(model, {"policy": "stock"}, ["--prefix-cache-retention-interval=None"]))
    assert len(said) == 1 and "as you asked" in said[0]
    assert (
        get_hints(build_command(write(tmp_path, {"num_hidden_layers": 4}), {"policy": "continuum-fixed"}, []))
        == []
    )
