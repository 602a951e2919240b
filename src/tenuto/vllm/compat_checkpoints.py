"""Private names of vLLM for the checkpoints of first prompts.

vLLM caches the end of a window, or a state, where a prompt ends and where two prompts part. It knows the
second place only when the second prompt comes, so that prompt hits nothing of what it shares. A job's first
prompt is the one that others may share. So of such prompts vLLM caches checkpoints on the way too
(`tenuto.core.windows`), and a second prompt hits up to the last one before the place where the two part.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager

from tenuto.core.windows import (
    choose_checkpoint_tokens,
    count_tail_blocks,
    get_checkpoints,
    get_next_checkpoint,
)


def get_checkpoint_blocks(scheduler: Any) -> int:
    """Blocks that one checkpoint takes in all windows and states."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(map(_count_blocks, managers))


def get_full_blocks_per_token(scheduler: Any) -> float:
    """Blocks that a token takes in all full-attention groups."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(1.0 / int(each.block_size) for each in managers if isinstance(each, FullAttentionManager))


class FirstCheckpoints:
    """Lets vLLM cache checkpoints of the requests that are named, until `remove` is called."""

    def __init__(self, scheduler: Any) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        self._alignment = int(scheduler.block_size)
        self.tokens: int | None = None
        """The shortest distance of two checkpoints; None if this engine has none of its own."""
        # Before 0.32 there was no interval; any other than 0 is the operator's choice.
        if getattr(coordinator, "retention_interval", None) == 0:
            self.tokens = choose_checkpoint_tokens(
                get_checkpoint_blocks(scheduler), get_full_blocks_per_token(scheduler), self._alignment
            )
        self._places: tuple[int, ...] = ()
        self._managers: list[Any] = []
        if self.tokens is not None:
            self._places = get_checkpoints(self.tokens, self._alignment, scheduler.max_model_len)
            self._managers = [each for each in coordinator.single_type_managers if _count_blocks(each)]
        self._requests: dict[str, int] = {}
        """The requests that cache checkpoints, and where the latest state of each was cached, in tokens."""
        for manager in self._managers:
            self._wrap(manager)

    def add(self, request_id: str) -> None:
        """This request caches checkpoints."""
        if self._managers:
            self._requests[request_id] = 0

    def discard(self, request_id: str) -> None:
        """This request ends."""
        self._requests.pop(request_id, None)

    def remove(self) -> None:
        """Leave vLLM's caching as it was."""
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
        """The end of a chunk of the prompt, if it is far enough behind the latest checkpoint.

        A state is there only where a chunk ends. All groups with states are asked in turn.
        """
        assert self.tokens is not None
        num_tokens -= num_tokens % manager.block_size
        last = self._requests[request.request_id]
        if not last < num_tokens <= request.num_prompt_tokens:
            return (num_tokens,) if num_tokens == last else ()
        if num_tokens < get_next_checkpoint(last, self.tokens, self._alignment):
            return ()
        self._requests[request.request_id] = num_tokens
        return (num_tokens,)


def _count_blocks(manager: Any) -> int:
    """Blocks of a checkpoint in one group."""
    if type(manager) is SlidingWindowManager:
        return count_tail_blocks(manager.sliding_window, manager.block_size)
    return int(isinstance(manager, MambaManager) and manager.mamba_cache_mode == "align")
