"""Chained block hashes and the longest cached prefix.

A block's hash covers its own tokens and, through its parent's hash, every token before it, so equal
hashes mean equal prefixes and a look-up may stop at the first miss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Extra = tuple[Hashable, ...]


def hash_block(parent: bytes | None, tokens: Sequence[int], extra: Extra = ()) -> bytes:
    """Hash of one full block: its parent's hash, its tokens, and what else its KV depends on.

    `extra` holds the cache salt, the LoRA adapter and multimodal inputs.
    """
    digest = hashlib.blake2b(parent or b"", digest_size=16)
    digest.update(repr((tuple(tokens), extra)).encode())
    return digest.digest()


def hash_blocks(tokens: Sequence[int], block_size: int, extra: Extra = ()) -> list[bytes]:
    """Hashes of the full blocks of a token sequence; a partly filled last block has none."""
    hashes: list[bytes] = []
    parent: bytes | None = None
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash_block(parent, tokens[start : start + block_size], extra)
        hashes.append(parent)
    return hashes


def get_hit_blocks(
    hashes: Iterable[Hashable], get_cached_block: Callable[[Any], Any | None], max_blocks: int
) -> list[Any]:
    """Cached blocks of the longest cached prefix, at most `max_blocks`.

    vLLM caps the hit at (prompt tokens − 1) // block size, so that at least one token is computed.
    """
    hit: list[Any] = []
    for block_hash in hashes:
        if len(hit) >= max_blocks:
            break
        block = get_cached_block(block_hash)
        if block is None:
            break
        hit.append(block)
    return hit


def count_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Number of leading entries two chained hash lists share; O(log n), because the hashes chain."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
