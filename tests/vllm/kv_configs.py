"""KV cache configurations as a server builds them: by vLLM's own code, from the layers of a model.

A `KVCacheConfig` written by hand lacks what a server's has: its `prefix_cache_retention_interval` is None,
where a server's is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.structured_output import StructuredOutputManager

try:
    # Since 0.33.
    from vllm.v1.core import kv_cache_planning
except ImportError:
    kv_cache_planning = kv_cache_utils


def get_attention(window: int | None, block_size: int) -> KVCacheSpec:
    """One layer's spec; `window` is its sliding window in tokens, None for full attention."""
    common: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1}
    if window is None:
        return FullAttentionSpec(**common, dtype=torch.float32)
    return SlidingWindowSpec(**common, dtype=torch.float32, sliding_window=window)


def make_scheduler_of_layers(
    cls: type,
    config: VllmConfig,
    layers: Sequence[KVCacheSpec],
    num_blocks: int,
    *,
    retention_interval: int | None = 0,
) -> Any:
    """A scheduler of the given class for a model with these layers, in this order.

    `num_blocks` counts the null block. The steps are those of `EngineCore._initialize_kv_caches`, but for the
    check that the longest possible request fits: small caches are the point of these tests.
    """
    init_none_hash(sha256)
    cache_config = config.cache_config
    cache_config.num_gpu_blocks_override = num_blocks
    cache_config.prefix_cache_retention_interval = retention_interval
    if hasattr(cache_config, "kv_cache_layout"):
        # Otherwise an attention backend is asked; the scheduler does not care where bytes lie.
        cache_config.kv_cache_layout = "LBHNC"
    specs = {f"layers.{n}.attn": spec for n, spec in enumerate(layers)}
    groups = kv_cache_planning.get_kv_cache_groups(config, specs)
    kv_cache_config = kv_cache_utils.generate_scheduler_kv_cache_config(
        [kv_cache_planning.get_kv_cache_config_from_groups(config, groups, 0)]
    )
    cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    cache_config.block_size = min(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, config)
    return cls(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
    )
