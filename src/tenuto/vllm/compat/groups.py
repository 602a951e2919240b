"""vLLM's internals for models with several layer groups: windows, states, blocks of different sizes.

**Hits.** A prefix hit ends where the first of the groups lacks a block.

**Ends of answers.** By default vLLM caches the end of a window, or a state, only where a prompt ends. So each
turn computes the answer before it again. While a request runs, it still has the blocks that a hit at its own
end needs. `EndSpares` makes it keep them, and `cache_ends` makes them visible to look-ups when a lease is
granted:

    prompt and answer   ├───────────────────┼──────────────┤
    blocks              │       │       │       │       │ ·
    window                              ├spare├── window ──┤
    state                                       │ kept  │ now

**Checkpoints of first prompts.** vLLM also caches these blocks where two prompts differ. But it learns that
place only when the second prompt arrives, so the second prompt hits nothing that it shares. Other jobs may
share the beginning of a job's first prompt. `FirstCheckpoints` therefore makes vLLM cache checkpoints inside
first prompts. A second prompt then hits up to the last checkpoint before the first token that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from tenuto.core.errors import IncompatibleError
from tenuto.core.types import ShortHit
from tenuto.core.windows import (
    MOST_STATES,
    choose_checkpoint_tokens,
    count_behind_kept_state,
    count_spare_blocks,
    count_tail_blocks,
    get_checkpoints,
    get_next_checkpoint,
)


def _get_managers(scheduler: Any) -> Sequence[Any]:
    """VLLM's block managers, one for each layer group."""
    managers: Sequence[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    return managers


# Hits.


def find_hit(scheduler: Any, hashes: Sequence[Any], max_tokens: int) -> tuple[tuple[list[Any], ...], int]:
    """The longest cached prefix of at most `max_tokens`: its blocks in each layer group, and its tokens.

    Blocks that a window or a state does not need are left out. With a draft model, a look-up matches one more
    block and drops it again. That block is included, because the next look-up needs it.
    """
    manager = scheduler.kv_cache_manager
    max_tokens = min(max_tokens, len(hashes) * scheduler.hash_block_size)
    if not manager.enable_caching or max_tokens <= 0:
        return (), 0
    groups, num_tokens = manager.coordinator.find_longest_cache_hit(hashes, max_tokens)[:2]
    found = tuple([block for block in group if not block.is_null] for group in groups)
    if num_tokens:
        for blocks, each in zip(found, _get_managers(scheduler), strict=True):
            if each.use_eagle and not isinstance(each, MambaManager):
                blocks += _get_dropped_block(scheduler, each, hashes, num_tokens)
    return found, int(num_tokens)


def _get_dropped_block(scheduler: Any, manager: Any, hashes: Sequence[Any], num_tokens: int) -> list[Any]:
    """The block after a hit in one group, if it is cached. A hit that ends inside a block needs no other."""
    block_size, hash_size = manager.block_size, scheduler.hash_block_size
    if num_tokens % block_size:
        return []
    pool = scheduler.kv_cache_manager.block_pool
    # A hash covers all tokens before it, so a larger block is known by the hash at its end. Where hits may
    # end inside blocks, only a part of the next block may be cached, and it is enough.
    for end in range(num_tokens + block_size, num_tokens, -min(block_size, get_hit_alignment(scheduler))):
        if end <= len(hashes) * hash_size:
            found = pool.get_cached_block(hashes[end // hash_size - 1], [manager.kv_cache_group_id])
            if found:
                return list(found)
    return []


def get_hit_alignment(scheduler: Any) -> int:
    """Hits end at multiples of this many tokens: all groups' block sizes, or less if parts can be hit."""
    is_fine = getattr(scheduler.kv_cache_manager.coordinator, "enable_partial_hash_hits", False)
    return int(scheduler.hash_block_size if is_fine else scheduler.block_size)


def get_tokens_per_block(scheduler: Any) -> int | None:
    """Tokens per block of a sequence, counting the blocks of all full-attention groups; None without any."""
    per_token = _count_full_blocks_per_token(scheduler)
    return max(1, int(1 / per_token)) if per_token else None


def _count_full_blocks_per_token(scheduler: Any) -> float:
    managers = _get_managers(scheduler)
    return sum(1 / int(each.block_size) for each in managers if isinstance(each, FullAttentionManager))


class ShortHits:
    """Watches vLLM's look-ups, to tell which layer group ended a hit while other groups had more.

    vLLM's look-up returns only the boundary of the hit, not the group.
    """

    def __init__(self, scheduler: Any) -> None:
        self._manager = manager = scheduler.kv_cache_manager
        kinds = getattr(manager.coordinator, "attention_groups", ())
        self.names = {
            kind[1][0]: _name(kind[0]) for kind in kinds if not isinstance(kind[0], FullAttentionSpec)
        }
        """The kinds of groups that can end a hit, by the number of each kind's first group."""
        self.found: dict[str, ShortHit] = {}
        """By request: the group that cut short its hit, in the look-ups of this step. Some did not start."""
        if len(kinds) < 2:
            self.names = {}
            return
        look_up = manager.get_computed_blocks

        def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = look_up(request, *args, **kwargs)
            # An earlier look-up, such as one for the turn's key, may have been short where this one is not.
            self.found.pop(request.request_id, None)
            # Before 0.31, a look-up returned no boundary.
            if len(found) > 2 and found[2] > found[1]:
                self.found[request.request_id] = ShortHit(self._find(request, found[2]), found[2] - found[1])
            return found

        manager.get_computed_blocks = get_computed_blocks

    def _find(self, request: Any, most_tokens: int) -> str:
        if len(self.names) == 1:
            return next(iter(self.names.values()))
        find_hits = self._manager.coordinator.find_longest_cache_hit_per_group
        _, hits = find_hits(request.block_hashes, most_tokens)
        return self.names[min(self.names, key=hits.__getitem__)]


def _name(spec: Any) -> str:
    if (window := getattr(spec, "sliding_window", None)) is not None:
        return f"window {window}"
    return "state" if isinstance(spec, MambaSpec) else type(spec).__name__.removesuffix("Spec")


# Ends of answers.

_CAP = "max_admission_blocks_per_request"
"""Name of the attribute with the most blocks that one request needs at once in a layer group, or None."""


def _get_cap_name(manager: Any) -> str:
    """The name of that bound in this release. Raises IncompatibleError if there is none."""
    # vLLM 0.30 has it with an underscore.
    for name in (_CAP, f"_{_CAP}"):
        if hasattr(manager, name):
            return name
    raise IncompatibleError(f"vLLM's {type(manager).__name__} has no {_CAP}")


class EndSpares:
    """Lets running requests keep the blocks that `cache_ends` needs, until `remove` is called.

    For each window that is about one block before it. (vLLM itself keeps such blocks for drafters that
    compute a prompt's last tokens again.) For each kind of state it is the answer's last state that ends at a
    block boundary. Nothing changes if the KV cache is so small that the longest request would no longer fit.
    """

    def __init__(self, scheduler: Any) -> None:
        managers = _get_managers(scheduler)
        windows = (each for each in managers if type(each) is SlidingWindowManager)
        with_spares = (each for each in windows if hasattr(each, "extra_retained_tokens"))
        self._windows = {each: _count_spares(scheduler, each) for each in with_spares}
        self._states = [each for each in managers if _is_state(each)]
        num_wanted = sum(self._count_longest(scheduler, each) for each in managers)
        if num_wanted > scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1:
            self._windows, self._states = {}, []
        self._add(1)
        self._coordinator = scheduler.kv_cache_manager.coordinator
        if self._windows:
            self._load_without_spares()
        for manager in self._states:
            self._wrap(scheduler, manager)

    def remove(self) -> None:
        """Stop keeping blocks. Running requests free those that they have kept in their next step."""
        self._add(-1)
        if self._windows:
            del self._coordinator.allocate_new_computed_blocks
            del self._coordinator.get_num_blocks_to_allocate
        for manager in self._states:
            del manager.remove_skipped_blocks
        self._windows, self._states = {}, []

    def _count_longest(self, scheduler: Any, manager: Any) -> int:
        """Blocks that the longest request needs in one group, including spare blocks."""
        num_longest: int = -(-scheduler.max_model_len // manager.block_size)
        most: int = num_longest
        if _is_state(manager):
            most = MOST_STATES + manager.num_speculative_blocks + 1 + _drops_blocks(scheduler)
        elif (cap := getattr(manager, _get_cap_name(manager))) is not None:
            most = cap + self._windows.get(manager, 0)
        return min(num_longest, most)

    def _add(self, sign: int) -> None:
        self._retain(sign)
        for manager, num_blocks in self._windows.items():
            name = _get_cap_name(manager)
            setattr(manager, name, getattr(manager, name) + sign * num_blocks)

    def _retain(self, sign: int) -> None:
        for manager, num_blocks in self._windows.items():
            manager.extra_retained_tokens += sign * num_blocks * manager.block_size

    def _load_without_spares(self) -> None:
        """Give a request that a connector loads no spare blocks, and count none when it is admitted.

        The connector has not looked for their content. It would load it all the same, and end the engine if
        it is not there.
        """
        allocate = self._coordinator.allocate_new_computed_blocks
        count = self._coordinator.get_num_blocks_to_allocate

        def allocate_new_computed_blocks(*args: Any, num_external_computed_tokens: int, **kwargs: Any) -> Any:
            kwargs["num_external_computed_tokens"] = num_external_computed_tokens
            return call(allocate, args, kwargs, is_load=num_external_computed_tokens > 0)

        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> Any:
            is_load = kwargs["total_computed_tokens"] > kwargs["num_local_computed_tokens"]
            return call(count, args, kwargs, is_load=is_load)

        def call(method: Any, args: Any, kwargs: Any, *, is_load: bool) -> Any:
            self._retain(-is_load)
            try:
                return method(*args, **kwargs)
            finally:
                self._retain(is_load)

        self._coordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
        self._coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate

    def _wrap(self, scheduler: Any, manager: Any) -> None:
        remove = manager.remove_skipped_blocks
        # With a drafter, a look-up matches one more block and drops it, so the hit ends one block earlier.
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
    """Cache what a hit at the end of a finishing request needs, so that its job's next turn hits up to there.

    The request has not freed the blocks yet, so they still have their content. Does nothing if one of them is
    lost, or if the model has layers of an unknown kind.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return
    managers = _get_managers(scheduler)
    others = [each for each in managers if type(each) is not FullAttentionManager]
    if not others or not all(type(each) is SlidingWindowManager or _is_state(each) for each in others):
        return
    # The last token was sampled but never computed, so it has no KV.
    num_tokens = request.num_tokens - 1
    for each in managers:
        num_cached = each.num_cached_block.get(request.request_id, 0)
        # With a drafter, a look-up matches one more block and drops it.
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


def _is_state(manager: Any) -> bool:
    if type(manager) is not MambaManager or manager.mamba_cache_mode != "align":
        return False
    # Where hits may end inside blocks, some models also write a prompt's state into a full block.
    is_fine = manager.cache_hit_alignment_tokens < manager.block_size
    return not (is_fine and getattr(manager, "has_prefill_checkpoint_blocks", False))


def _drops_blocks(scheduler: Any) -> bool:
    return any(each.use_eagle for each in _get_managers(scheduler))


def _count_spares(scheduler: Any, manager: Any) -> int:
    # With a drafter, a look-up matches one more block and drops it, so a hit may end one block earlier.
    alignment = scheduler.block_size + bool(manager.use_eagle) * manager.block_size
    return count_spare_blocks(manager.sliding_window, manager.block_size, alignment)


def _get_tail(manager: Any, num_tokens: int) -> range:
    """The blocks of a window or a state that a hit of `num_tokens` needs."""
    # Of a state, a look-up drops no block, with a drafter either.
    peek = int(bool(manager.use_eagle) and not _is_state(manager))
    end = num_tokens // manager.block_size
    return range(max(0, end - _count_blocks(manager)), end + peek)


def _get_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges (first, end), without the end."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n:
            runs[-1] = (runs[-1][0], n + 1)
        else:
            runs.append((n, n + 1))
    return runs


# Checkpoints of first prompts.

EXAMPLE_TOKENS = (3_000, 30_000)


class FirstCheckpoints:
    """Makes vLLM cache checkpoints of the added requests, until `remove` is called."""

    def __init__(self, scheduler: Any) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        self._alignment = int(scheduler.block_size)
        self._num_blocks = sum(map(_count_blocks, _get_managers(scheduler)))
        """Blocks that one checkpoint takes, over all windows and states."""
        self._full_blocks_per_token = _count_full_blocks_per_token(scheduler)
        self._tokens: int | None = None
        """The shortest distance between two checkpoints, in tokens; None if this engine has none."""
        # vLLM has a retention interval since 0.32. If it is not 0, the operator chose it.
        if getattr(coordinator, "retention_interval", None) == 0:
            self._tokens = choose_checkpoint_tokens(
                self._num_blocks, self._full_blocks_per_token, self._alignment
            )
        self._places: tuple[int, ...] = ()
        self._managers: list[Any] = []
        if self._tokens is not None:
            self._places = get_checkpoints(self._tokens, self._alignment, scheduler.max_model_len)
            self._managers = [each for each in _get_managers(scheduler) if _count_blocks(each)]
        self._requests: dict[str, int] = {}
        """For each request that caches checkpoints: where its latest state was cached, in tokens."""
        for manager in self._managers:
            self._wrap(manager)

    def describe_room(self, max_blocks: int) -> str:
        """How many prefixes that jobs share fit into this many blocks, for the log."""
        fit = " or ".join(
            f"{int(max_blocks / max(1, self._num_blocks + num_tokens * self._full_blocks_per_token)):,} "
            f"of {num_tokens:,} tokens"
            for num_tokens in EXAMPLE_TOKENS
        )
        text = f"prefixes that jobs share are pinned, in up to {max_blocks:,} blocks of the KV cache: {fit}"
        if self._tokens is not None:
            text += f"; the first prompt of a job caches checkpoints, {self._tokens:,} tokens apart or more"
        return text

    def add(self, request_id: str) -> None:
        """Cache checkpoints of this request."""
        if self._managers:
            self._requests[request_id] = 0

    def discard(self, request_id: str) -> None:
        """Cache no more checkpoints of this request."""
        self._requests.pop(request_id, None)

    def remove(self) -> None:
        """Restore vLLM's own caching."""
        for manager in self._managers:
            del manager.cache_blocks
        self._managers = []
        self._requests.clear()

    def _wrap(self, manager: Any) -> None:
        cache = manager.cache_blocks
        is_state = isinstance(manager, MambaManager)

        def cache_blocks(request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
            if request.request_id in self._requests:
                places = self._get_state(manager, request, num_tokens) if is_state else self._places
                kwargs["replay_boundaries"] = (*kwargs["replay_boundaries"], *places)
            cache(request, num_tokens, *args, **kwargs)

        manager.cache_blocks = cache_blocks

    def _get_state(self, manager: Any, request: Any, num_tokens: int) -> tuple[int, ...]:
        """The end of a chunk of the prompt, if it is far enough after the latest checkpoint.

        A state exists only where a chunk ends. vLLM calls this once for each group with states.
        """
        assert self._tokens is not None
        num_tokens -= num_tokens % manager.block_size
        last = self._requests[request.request_id]
        if not last < num_tokens <= request.num_prompt_tokens:
            return (num_tokens,) if num_tokens == last else ()
        if num_tokens < get_next_checkpoint(last, self._tokens, self._alignment):
            return ()
        self._requests[request.request_id] = num_tokens
        return (num_tokens,)


def _count_blocks(manager: Any) -> int:
    """Blocks that a hit needs before its end in one group with windows or states; none in others."""
    if type(manager) is SlidingWindowManager:
        return count_tail_blocks(manager.sliding_window, manager.block_size)
    return int(isinstance(manager, MambaManager) and manager.mamba_cache_mode == "align")
