"""Private names of vLLM for the ends of answers, on models whose layers differ.

By default vLLM caches the end of a window, or a state, only where a prompt ends, so each turn computes the
answer before it again. While a request runs, the blocks that a hit at its own end needs are still there. So
it keeps them (`EndSpares`), and when a lease is granted, look-ups are let find them (`cache_ends`):

    prompt and answer   ├───────────────────┼──────────────┤
    blocks              │       │       │       │       │ ·
    window                              ├spare├── window ──┤
    state                                       │ kept  │ now
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager

from tenuto.core.errors import IncompatibleError
from tenuto.core.windows import (
    MOST_STATES,
    count_behind_kept_state,
    count_spare_blocks,
    count_tail_blocks,
)

_CAP = "max_admission_blocks_per_request"
"""Most blocks that one request needs at once in a layer group, or None."""


def _get_cap_name(manager: Any) -> str:
    """The name of that bound in this release. Raises IncompatibleError if there is none."""
    # vLLM 0.30 has it with an underscore.
    for name in (_CAP, f"_{_CAP}"):
        if hasattr(manager, name):
            return name
    raise IncompatibleError(f"vLLM's {type(manager).__name__} has no {_CAP}")


class EndSpares:
    """Lets running requests keep the blocks that `cache_ends` needs, until `remove` is called.

    That is a block or so behind each window (vLLM keeps such blocks for drafters that compute a prompt's last
    tokens again), and of each kind of state the last one of the answer that ends where a block does. Nothing
    changes in a KV cache so small that the longest request would then not fit.
    """

    def __init__(self, scheduler: Any) -> None:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._windows = {each: _count_spares(scheduler, each) for each in managers if _is_window(each)}
        self._states = [each for each in managers if _is_state(each)]
        num_wanted = sum(self._count_longest(scheduler, each) for each in managers)
        if num_wanted > scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1:
            self._windows, self._states = {}, []
        self._add(1)
        for manager in self._states:
            self._wrap(scheduler, manager)

    def remove(self) -> None:
        """Undo it. Blocks that running requests have kept go with their next step."""
        self._add(-1)
        for manager in self._states:
            del manager.remove_skipped_blocks
        self._windows, self._states = {}, []

    def _count_longest(self, scheduler: Any, manager: Any) -> int:
        """Blocks of the longest request in one group, with its spares."""
        num_longest: int = -(-scheduler.max_model_len // manager.block_size)
        most: int = num_longest
        if _is_state(manager):
            most = MOST_STATES + manager.num_speculative_blocks + 1 + _drops_blocks(scheduler)
        elif (cap := getattr(manager, _get_cap_name(manager))) is not None:
            most = cap + self._windows.get(manager, 0)
        return min(num_longest, most)

    def _add(self, sign: int) -> None:
        for manager, num_blocks in self._windows.items():
            manager.extra_retained_tokens += sign * num_blocks * manager.block_size
            name = _get_cap_name(manager)
            setattr(manager, name, getattr(manager, name) + sign * num_blocks)

    def _wrap(self, scheduler: Any, manager: Any) -> None:
        remove = manager.remove_skipped_blocks
        # A drafter's look-up matches one block more, and drops it: the hit ends that much further back.
        num_kept = 1 + _drops_blocks(scheduler)

        def remove_skipped_blocks(request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> None:
            request = scheduler.requests.get(request_id)
            if request is not None:
                num_tokens = count_behind_kept_state(
                    num_tokens, request.num_prompt_tokens, manager.block_size, num_kept
                )
            remove(request_id, num_tokens, *args, **kwargs)

        manager.remove_skipped_blocks = remove_skipped_blocks


def cache_ends(scheduler: Any, request: Any) -> None:
    """Let look-ups find what a hit at the end of a finishing request needs: its job's next turn hits there.

    The blocks still have their content: the request has not given them back. Does nothing if one of them is
    lost, or if the model has layers of another kind.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        return
    managers = manager.coordinator.single_type_managers
    others = [each for each in managers if type(each) is not FullAttentionManager]
    if not others or not all(type(each) is SlidingWindowManager or _is_state(each) for each in others):
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
    tails = [_get_tail(each, num_tokens) for each in others]
    tables = [each.req_to_blocks[request.request_id] for each in others]
    if any(blocks[n].is_null for blocks, tail in zip(tables, tails, strict=True) for n in tail):
        return
    for each, blocks, tail in zip(others, tables, tails, strict=True):
        for first, end in _get_runs(n for n in tail if blocks[n].block_hash is None):
            manager.block_pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=first,
                num_full_blocks=end,
                block_size=each.block_size,
                kv_cache_group_id=each.kv_cache_group_id,
            )


def _is_window(manager: Any) -> bool:
    return type(manager) is SlidingWindowManager and hasattr(manager, "extra_retained_tokens")


def _is_state(manager: Any) -> bool:
    if type(manager) is not MambaManager or manager.mamba_cache_mode != "align":
        return False
    # Where hits end inside blocks, some models also write a prompt's state there: into a block that is full.
    is_fine = manager.cache_hit_alignment_tokens < manager.block_size
    return not (is_fine and getattr(manager, "has_prefill_checkpoint_blocks", False))


def _drops_blocks(scheduler: Any) -> bool:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(each.use_eagle for each in managers)


def _count_spares(scheduler: Any, manager: Any) -> int:
    # A drafter's look-up matches one block more, and drops it: a hit may end that much further back.
    alignment = scheduler.block_size + bool(manager.use_eagle) * manager.block_size
    return count_spare_blocks(manager.sliding_window, manager.block_size, alignment)


def _get_tail(manager: Any, num_tokens: int) -> range:
    """The blocks of a window, or of a state, that a hit of so many tokens needs."""
    if _is_state(manager):
        end = num_tokens // manager.block_size
        return range(end - 1, end)
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
