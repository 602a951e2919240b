"""Tiers: host memory and disk that hold KV below the simulated GPU."""

from __future__ import annotations

from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.tiers.chain_offload import ChainOffloader
from tenuto.sim.tiers.grouped_offload import GroupedOffloader
from tenuto.sim.tiers.native_offload import NativeOffloader
from tenuto.sim.tiers.offloader import Offload, Offloader
from tenuto.sim.tiers.tier import OffloadTiers


def make_offloader(
    offload: Offload | None, tiers: OffloadTiers | None, kv: KvCache, chunk_tokens: int
) -> Offloader | None:
    """The offloader of an engine with tiers, in chunks of this many tokens; None without tiers.

    "async" with single blocks is vLLM's own connector, for any layers. "native" is the same without Tenuto.
    With windows or states chunks are single blocks, never of LMCache. Raises ConfigError for a native disk.
    """
    if tiers is None or offload is None:
        return None
    block_size = kv.config.block_size
    if offload == "native":
        return NativeOffloader(tiers, kv)
    is_connector = offload == "async" and chunk_tokens == block_size
    if kv.can_truncate and not is_connector:
        return ChainOffloader(tiers, kv, offload, chunk_blocks=chunk_tokens // block_size)
    return GroupedOffloader(tiers, kv)
