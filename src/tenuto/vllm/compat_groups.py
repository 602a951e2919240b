"""Private names of vLLM for models with several layer groups: windows, states, blocks of different sizes.

`compat` has all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from tenuto.core.types import ShortHit
from tenuto.core.windows import count_spare_blocks, count_tail_blocks


def find_hit(scheduler: Any, hashes: Sequence[Any], max_tokens: int) -> tuple[tuple[list[Any], ...], int]:
    """The longest cached prefix of at most `max_tokens`: its blocks in each layer group, and its tokens.

    Blocks that a window or a state does not need are left out.
    """
    manager = scheduler.kv_cache_manager
    max_tokens = min(max_tokens, len(hashes) * scheduler.hash_block_size)
    if not manager.enable_caching or max_tokens <= 0:
        return (), 0
    groups, num_tokens = manager.coordinator.find_longest_cache_hit(hashes, max_tokens)[:2]
    return tuple([block for block in group if not block.is_null] for group in groups), int(num_tokens)


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


class WindowSpares:
    """Lets running requests keep the blocks that `cache_window_ends` needs, until `remove` is called.

    That is a block or so behind each window. vLLM keeps such blocks for drafters that compute a prompt's last
    tokens again. Nothing changes in a KV cache so small that the longest request would then not fit.
    """

    def __init__(self, scheduler: Any) -> None:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._spares = {each: _count_spares(scheduler, each) for each in managers if _is_window(each)}
        num_wanted = 0
        for each in managers:
            num_longest = -(-scheduler.max_model_len // each.block_size)
            most = each.max_admission_blocks_per_request
            num_wanted += num_longest if most is None else min(num_longest, most + self._spares.get(each, 0))
        if num_wanted > scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1:
            self._spares = {}
        self._add(1)

    def remove(self) -> None:
        """Undo it. Blocks that running requests have kept go with their next step."""
        self._add(-1)
        self._spares = {}

    def _add(self, sign: int) -> None:
        for manager, num_blocks in self._spares.items():
            manager.extra_retained_tokens += sign * num_blocks * manager.block_size
            manager.max_admission_blocks_per_request += sign * num_blocks


def _count_spares(scheduler: Any, manager: Any) -> int:
    # A drafter's look-up matches one block more, and drops it: a hit may end that much further back.
    alignment = scheduler.block_size + bool(manager.use_eagle) * manager.block_size
    return count_spare_blocks(manager.sliding_window, manager.block_size, alignment)


def _is_window(manager: Any) -> bool:
    return type(manager) is SlidingWindowManager and hasattr(manager, "extra_retained_tokens")


def cache_window_ends(scheduler: Any, request: Any) -> None:
    """Let look-ups find the end of a finishing request's sliding windows, where the job's next turn hits.

    By default vLLM caches a window's blocks only at the prompt's end, so the next turn computes the answer
    again. The blocks still have their content: the request has not given them back. Does nothing if some
    window has lost a block that the hit needs, or if the model has layers of a third kind.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        return
    managers = manager.coordinator.single_type_managers
    windows = [each for each in managers if type(each) is SlidingWindowManager]
    if not windows or not all(each in windows or type(each) is FullAttentionManager for each in managers):
        return
    # Only tokens whose KV is certain count as cached; the last one was sampled, but never computed.
    num_tokens = request.num_tokens - 1
    for each in managers:
        num_cached = each.num_cached_block.get(request.request_id, 0)
        # A drafter's look-up matches one block more, and drops it.
        num_tokens = min(num_tokens, (num_cached - bool(each.use_eagle)) * each.block_size)
    num_tokens -= num_tokens % scheduler.block_size
    if num_tokens <= 0:
        return
    tails = [_get_tail(each, num_tokens) for each in windows]
    tables = [each.req_to_blocks[request.request_id] for each in windows]
    if any(blocks[n].is_null for blocks, tail in zip(tables, tails, strict=True) for n in tail):
        return
    for each, blocks, tail in zip(windows, tables, tails, strict=True):
        for first, end in _get_runs(n for n in tail if blocks[n].block_hash is None):
            manager.block_pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=first,
                num_full_blocks=end,
                block_size=each.block_size,
                kv_cache_group_id=each.kv_cache_group_id,
            )


def _get_tail(manager: Any, num_tokens: int) -> range:
    """The blocks of a sliding window that a hit of so many tokens needs."""
    peek = int(bool(manager.use_eagle))
    end = num_tokens // manager.block_size + peek
    num_blocks = count_tail_blocks(manager.sliding_window, manager.block_size) + peek
    return range(max(0, end - num_blocks), end)


def _get_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Rising numbers as runs (first, end)."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n:
            runs[-1] = (runs[-1][0], n + 1)
        else:
            runs.append((n, n + 1))
    return runs
