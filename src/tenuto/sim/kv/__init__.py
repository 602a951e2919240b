"""The simulated KV cache, with runs of blocks instead of single ones.

    kv_cache ─► groups ─► request ─► pool

`kv_cache` finds prefix hits and takes slots for tokens. `groups` has each request's blocks in each layer
group. `pool` has the free queue and all cached blocks, and knows which content is equal.

The size and shape of the cache are here; vLLM's names where it has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tenuto.core.errors import ConfigError
from tenuto.core.windows import STATE, Layers


@dataclass(frozen=True, kw_only=True)
class KvConfig:
    """Size and shape of the KV cache. Raises ConfigError as `EngineConfig`."""

    vllm_release: Literal["0.32", "0.33"] = "0.32"
    """The release whose decisions are made, also by the scheduler and host memory.

    0.33 differs from 0.32 as follows. It caches drafts as soon as they are verified. With priorities, it
    continues scheduling after a request preempted itself. It registers a prompt's last state only once. It
    offers host memory all blocks of a resumed request again. Its own host memory evicts tails first.
    """
    num_blocks: int
    """With the null block, as in vLLM's `num_gpu_blocks` and in `KvBudget.num_blocks`."""
    block_size: int = 16
    windows: tuple[Layers, ...] = (None,)
    """The sliding window of each layer group, in tokens; None for full attention, "state" for a recurrent
    state."""
    block_sizes: tuple[int, ...] = ()
    """Tokens in a block of each layer group, if they differ; not with states. All blocks have one size in
    bytes."""
    retention_interval: int | None = 0
    """vLLM's `prefix_cache_retention_interval`: how often the end of a sliding window is cached, in tokens.

    0: only where a prompt ends, and where two prompts first differ. None: at every block."""
    max_model_len: int = 131_072
    reserve_full_sequence: bool = True
    """A waiting request starts only when all its tokens so far fit (`scheduler_reserve_full_isl`)."""
    watermark: float = 0.0
    """Share of the blocks that starting a waiting request must leave free while others run."""
    num_lookahead_tokens: int = 0
    """Slots past the scheduled tokens that a drafter writes to."""
    drops_last_hit_block: bool = False
    """Whether the hit's last block is computed again: an EAGLE drafter needs its hidden states. With full
    attention only."""

    @property
    def group_block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of each layer group."""
        return self.block_sizes or (self.block_size,) * len(self.windows)

    @property
    def hash_block_size(self) -> int:
        """Tokens that each hash of a request covers. Source: kv_cache_utils.resolve_kv_cache_block_sizes."""
        return math.gcd(*self.group_block_sizes)

    @property
    def hit_alignment(self) -> int:
        """Hits end at multiples of this many tokens, where the blocks of all groups end."""
        return math.lcm(*self.group_block_sizes)

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state."""
        return STATE in self.windows

    def __post_init__(self) -> None:
        interval = self.retention_interval
        if interval is not None and interval % self.hit_alignment:
            raise ConfigError(
                "prefix_cache_retention_interval must be a multiple of the block size "
                f"({self.hit_alignment}), or None; got {interval}"
            )
        if interval and not any(self.windows):
            # As in vLLM, which refuses to start.
            raise ConfigError(
                "prefix_cache_retention_interval is for models with sliding windows or states; set it to 0"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be at least 0 and below 1: {self}")
