"""Folders of tiny models whose layers differ: a config and another model's tokenizer, for dummy weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Five layers with a window of 128 tokens to one with full attention.
    "gemma-3": {
        **COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 128,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # One to one, with experts and attention sinks.
    "gpt-oss": {
        **COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 150000.0,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    # Three layers with a recurrent state (gated delta net) to one with full attention.
    "qwen3-next": {
        **COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "max_position_embeddings": 65536,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
}


def make_model(name: str, folder: Path, tokenizer: Path) -> Path:
    """Write the folder of a model; `tokenizer` is a folder with a tokenizer of at most 49,152 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, folder / file)
    return folder
