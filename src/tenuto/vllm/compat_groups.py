"""Private names of vLLM for models with several layer groups: windows, states, blocks of different sizes.

`compat_ends` has those of answers' ends, `compat_checkpoints` those of shared prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from tenuto.core.types import ShortHit


def find_hit(scheduler: Any, hashes: Sequence[Any], max_tokens: int) -> tuple[tuple[list[Any], ...], int]:
    """The longest cached prefix of at most `max_tokens`: its blocks in each layer group, and its tokens.

    Blocks that a window or a state does not need are left out. With a draft model a look-up matches one block
    more and drops it again, so that block belongs to it.
    """
    manager = scheduler.kv_cache_manager
    max_tokens = min(max_tokens, len(hashes) * scheduler.hash_block_size)
    if not manager.enable_caching or max_tokens <= 0:
        return (), 0
    groups, num_tokens = manager.coordinator.find_longest_cache_hit(hashes, max_tokens)[:2]
    found = tuple([block for block in group if not block.is_null] for group in groups)
    if num_tokens:
        for blocks, each in zip(found, manager.coordinator.single_type_managers, strict=True):
            if each.use_eagle and not isinstance(each, MambaManager):
                blocks += _get_dropped_block(scheduler, each, hashes, num_tokens)
    return found, int(num_tokens)


def _get_dropped_block(scheduler: Any, manager: Any, hashes: Sequence[Any], num_tokens: int) -> list[Any]:
    """The block behind a hit in one group, if it is cached."""
    # A hash covers all tokens before it, so a larger block has the hash at its end.
    end = (num_tokens // manager.block_size + 1) * manager.block_size // scheduler.hash_block_size
    pool = scheduler.kv_cache_manager.block_pool
    if end > len(hashes):
        return []
    return list(pool.get_cached_block(hashes[end - 1], [manager.kv_cache_group_id]) or ())


def get_hit_alignment(scheduler: Any) -> int:
    """Hits end at multiples of so many tokens: all groups' blocks, unless parts of a block can be hit."""
    is_fine = getattr(scheduler.kv_cache_manager.coordinator, "enable_partial_hash_hits", False)
    return int(scheduler.hash_block_size if is_fine else scheduler.block_size)


def get_tokens_per_block(scheduler: Any) -> int | None:
    """Tokens of a sequence per block of it, over all full-attention groups; None without such a group."""
    sizes = [
        manager.block_size
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
        if isinstance(manager, FullAttentionManager)
    ]
    return max(1, int(1 / sum(1 / size for size in sizes))) if sizes else None


class ShortHits:
    """Watches vLLM's look-ups: which layer group ended a hit before another group's blocks did.

    vLLM finds out that it happened (the boundary that a look-up returns); this names the group.
    """

    def __init__(self, scheduler: Any) -> None:
        self._manager = manager = scheduler.kv_cache_manager
        kinds = getattr(manager.coordinator, "attention_groups", ())
        self.names = {
            kind[1][0]: _name(kind[0]) for kind in kinds if not isinstance(kind[0], FullAttentionSpec)
        }
        """The kinds of groups that can end a hit, by the first group of each."""
        self._found: dict[str, ShortHit] = {}
        if len(kinds) < 2:
            self.names = {}
            return
        look_up = manager.get_computed_blocks

        def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = look_up(request, *args, **kwargs)
            # Until 0.31 a look-up returned no boundary.
            if len(found) > 2 and found[2] > found[1]:
                self._found[request.request_id] = ShortHit(self._find(request, found[2]), found[2] - found[1])
            return found

        manager.get_computed_blocks = get_computed_blocks

    def begin_step(self) -> None:
        """A step is about to be scheduled: forget the look-ups of requests that did not start."""
        self._found.clear()

    def get(self, request_id: str) -> ShortHit | None:
        """What made the hit of a request short that this step started; None if no group did."""
        return self._found.get(request_id)

    def _find(self, request: Any, most_tokens: int) -> str:
        if len(self.names) == 1:
            return next(iter(self.names.values()))
        _, hits = self._manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, most_tokens
        )
        return self.names[min(self.names, key=lambda group: hits[group])]


def _name(spec: Any) -> str:
    if (window := getattr(spec, "sliding_window", None)) is not None:
        return f"window {window}"
    return "state" if isinstance(spec, MambaSpec) else type(spec).__name__.removesuffix("Spec")
