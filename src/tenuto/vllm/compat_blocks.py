"""Private names of vLLM for the blocks of one finishing request, where leases can be truncated.

A lease takes over the references that the request has, so vLLM need not free those blocks:

    request's blocks    │ cached │ cached │ cached │ part │
                        ├───── the lease's ────────┤ freed┤
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from tenuto.vllm.compat import get_block_size

# A turn of 6,000 tokens has 375 blocks. So loops over them run in C: not by the property `block_hash`, and
# lists are compared as a whole, which looks at the blocks' identity first.
_get_hash = attrgetter("_block_hash")


def get_own_cached_blocks(scheduler: Any, request: Any, num_hit_tokens: int) -> list[Any]:
    """Like `compat.get_cached_blocks`, without a look-up per block.

    The request references its own cached blocks, so they cannot have been evicted.
    """
    manager, size = scheduler.kv_cache_manager, get_block_size(scheduler)
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        return []
    own, hashes = manager.get_blocks(request.request_id).blocks[0], request.block_hashes
    # The last token was sampled, but never computed.
    num_full = min((request.num_tokens - 1) // size, len(hashes), len(own))
    while num_full and own[num_full - 1].block_hash is None:
        num_full -= 1
    blocks = list(own[:num_full])
    # Two requests may have computed the same block at the same time. A prompt hits the copy that was cached
    # first, so the lease holds that copy. Only where there are copies the map has no block, but a dict.
    new = blocks[num_hit_tokens // size :]
    cached = manager.block_pool.cached_block_hash_to_block
    if list(map(cached._cache.get, map(_get_hash, new))) != new:
        firsts = map(cached.get_one_block, map(_get_hash, new))
        blocks[num_hit_tokens // size :] = [first or own for first, own in zip(firsts, new, strict=True)]
    return blocks


def try_take_blocks(scheduler: Any, request_id: str, blocks: list[Any]) -> bool:
    """Take a finishing request's first blocks, and its references to them, away from it.

    False, and nothing changes, if they are not its own, or if a connector may still ask for its blocks.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if scheduler.connector is not None or type(managers[0]) is not FullAttentionManager:
        return False
    tables = managers[0].req_to_blocks
    own = tables.get(request_id, [])
    if own[: len(blocks)] != blocks:
        return False
    tables[request_id] = own[len(blocks) :]
    return True
