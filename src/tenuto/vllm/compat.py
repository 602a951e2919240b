"""Private names of vLLM's scheduler, its requests and its block pool.

Those of the engine process are in `compat_engine`, those of a finishing request's blocks in `compat_blocks`,
those of models with several layer groups in `compat_groups` and `compat_ends`; `compat_check` checks all of
them at start. Nothing outside these files may use a vLLM name that starts with an underscore or is not part
of its scheduler interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

__all__ = ["AsyncScheduler", "RequestQueue", "RequestStatus", "SyncScheduler"]

# Since 0.31.
_TAKES_PREFILL_END = (
    "prefill_end" in inspect.signature(KVCacheCoordinator.get_num_blocks_to_allocate).parameters
)


class PrivateHooks:
    """Overrides of vLLM's private scheduler methods. Each calls a public hook, and then vLLM's own method.

    Put it before a vLLM scheduler class in the list of base classes.
    """

    def on_turn_finishing(self, request: Any) -> None:
        """A request has its final status and still has its blocks."""

    def on_turn_preempting(self, request: Any) -> None:
        """A running request is about to lose its blocks."""

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.on_turn_finishing(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.on_turn_preempting(request)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _update_waiting_for_remote_kv(self, request: Any) -> None:
        """A connector's load ended. A request that it left without blocks has not begun.

        vLLM (0.31 to 0.33) goes on reserving the blocks that such a request would still need. If these and
        its next load's are more than the cache has, that load is refused in each step, and nothing runs.
        """
        super()._update_waiting_for_remote_kv(request)  # type: ignore[misc]
        if not request.num_computed_tokens:
            getattr(self, "_inflight_prefills", set()).discard(request)


def can_truncate_leases(scheduler: Any) -> bool:
    """Whether block i of a request always holds tokens i·size to (i+1)·size.

    This is true for a single layer group with full attention.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or scheduler.hash_block_size != get_block_size(scheduler):
        return False
    spec = groups[0].kv_cache_spec
    # Some windowed layers are described by a full-attention spec that names a window.
    is_windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return isinstance(spec, FullAttentionSpec) and not is_windowed


def get_reason_for_full_steps(scheduler: Any) -> str | None:
    """Why no step may have a smaller token budget than vLLM's configuration; None if steps may.

    If a step must compute some group of tokens as a whole, a smaller budget may never have room for the
    group, and the request would wait forever.
    """
    vllm_config = scheduler.vllm_config
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return "without chunked prefill a longer prompt would never fit"
    if vllm_config.speculative_config is not None:
        return "with speculative decoding each request takes its drafts too, and steps of even shape"
    if scheduler.is_encoder_decoder:
        return "an encoder's input is computed whole"
    if vllm_config.scheduler_config.disable_chunked_mm_input:
        return "multimodal items are computed whole (disable_chunked_mm_input)"
    # vLLM sets this attribute only for models with such layers.
    if scheduler.need_mamba_block_aligned_split:
        return "states are cached at block boundaries only (mamba_cache_mode align), and chunks end there"
    return None


def get_tokens_per_prompt(scheduler: Any) -> int:
    """The most tokens of one prompt in a step; 0 for no bound. vLLM reads it anew in each step."""
    return int(scheduler.scheduler_config.long_prefill_token_threshold)


def set_tokens_per_prompt(scheduler: Any, num_tokens: int) -> None:
    """Change what `get_tokens_per_prompt` says."""
    scheduler.scheduler_config.long_prefill_token_threshold = num_tokens


def get_block_size(scheduler: Any) -> int:
    """Tokens per block of the first layer group."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    # With context parallelism a block spans several ranks, so use the scheduler's own block size.
    return int(scheduler.block_size if len(groups) == 1 else groups[0].kv_cache_spec.block_size)


def get_cached_blocks(scheduler: Any, request: Any) -> tuple[list[Any], int]:
    """What a prompt extending this request would hit: blocks of all layer groups, and how many tokens."""
    hit, num_tokens = scheduler.kv_cache_manager.get_computed_blocks(request)[:2]
    return [block for group in hit.blocks for block in group if not block.is_null], int(num_tokens)


def get_num_cached_tokens(scheduler: Any, request: Any) -> int:
    """Tokens of a waiting request that are in the prefix cache now."""
    return int(scheduler.kv_cache_manager.get_computed_blocks(request)[1])


def has_release_hint(request: Any) -> bool:
    """Whether a request carries vLLM's own hint that its KV cache is not needed afterwards.

    Since 0.31 a request may have an envelope of actions (`vllm.v1.kv_hints`). What an action's type means is
    up to the component that reads it; `release` is the name in vLLM's proposals.
    """
    envelope = getattr(request, "kv_hints", None)
    actions = getattr(envelope, "actions", None) or ()
    return any(str(getattr(each, "action_type", "")).lower() == "release" for each in actions)


def has_content(block: Any, block_hash: Any) -> bool:
    """Whether a block holds the content with this hash."""
    return block.block_hash is not None and get_block_hash(block.block_hash) == block_hash


class AllocationGuard:
    """Calls `retry(allocate, request, num_new_tokens, kwargs)` whenever vLLM cannot allocate.

    vLLM allocates once per running request and step. To save time, the guard is removed while no allocation
    can fail.
    """

    def __init__(self, scheduler: Any, retry: Callable[..., Any]) -> None:
        self._manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        # A step's tokens, the longest prompt that may ask to fit as a whole, and the watermark.
        num_tokens = scheduler.max_num_scheduled_tokens + scheduler.max_model_len
        self._num_step_blocks = num_tokens // get_block_size(scheduler) + self._manager.watermark_blocks + 1
        allocate = self._manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
            blocks = allocate(request, num_new_tokens, **kwargs)
            return blocks if blocks is not None else retry(allocate, request, num_new_tokens, kwargs)

        self._guarded = allocate_slots
        self._is_on = False
        # A connector reserves blocks for its loads, and this bound does not include them.
        self._always = scheduler.connector is not None

    def set_for_step(self) -> None:
        """Guard this step's allocations only if the step could run out of blocks; takes O(1) time."""
        manager = self._manager
        # Each running request may need a block for its next token, per layer group.
        bound = (self._num_step_blocks + len(self._scheduler.running)) * manager.num_kv_cache_groups
        is_tight = self._always or manager.block_pool.get_num_free_blocks() < bound
        if is_tight == self._is_on:
            return
        self._is_on = is_tight
        if is_tight:
            manager.allocate_slots = self._guarded
        else:
            del manager.allocate_slots

    def remove(self) -> None:
        """Let vLLM allocate by itself again."""
        if self._is_on:
            self._is_on = False
            del self._manager.allocate_slots


def count_missing_blocks(scheduler: Any, request: Any, num_new_tokens: int, kwargs: dict[str, Any]) -> int:
    """How many free blocks this failed allocation lacked, over all layer groups.

    Uses vLLM's own computation, with the arguments of `KVCacheManager.allocate_slots`.
    """
    manager = scheduler.kv_cache_manager
    hit = kwargs.get("new_computed_blocks")
    num_local = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
    num_computed = num_local + kwargs.get("num_external_computed_tokens", 0)
    common = {
        "request_id": request.request_id,
        "new_computed_blocks": (hit if hit is not None else manager.empty_kv_cache_blocks).blocks,
        "num_encoder_tokens": kwargs.get("num_encoder_tokens", 0),
        "num_local_computed_tokens": num_local,
    }
    if _TAKES_PREFILL_END:
        common["prefill_end"] = max(request.num_prompt_tokens, request.num_tokens - 1)
    count = manager.coordinator.get_num_blocks_to_allocate
    num_main = num_computed + num_new_tokens
    num_slots = min(num_main + kwargs.get("num_lookahead_tokens", 0), scheduler.max_model_len)
    wanted = kwargs.get("reserved_blocks", 0) + count(
        num_tokens=num_slots, total_computed_tokens=num_computed, num_tokens_main_model=num_main, **common
    )
    if kwargs.get("full_sequence_must_fit"):
        num_full = min(request.num_tokens, scheduler.max_model_len)
        full = count(
            num_tokens=num_full,
            total_computed_tokens=min(num_computed, scheduler.max_model_len),
            num_tokens_main_model=num_full,
            apply_admission_cap=True,
            **common,
        )
        wanted = max(wanted, full)
    if kwargs.get("has_scheduled_reqs", True) and request.status != RequestStatus.RUNNING:
        wanted += manager.watermark_blocks
    return int(wanted - manager.block_pool.get_num_free_blocks())


def count_cached_blocks(pool: Any) -> int:
    """Number of distinct block contents in the prefix cache."""
    return len(pool.cached_block_hash_to_block)


def get_hit_tokens(request: Any) -> tuple[int, int]:
    """Prompt tokens found in cache at the first start: (this engine's, a connector's)."""
    stats = request.prefill_stats
    return (stats.num_local_cached_tokens, stats.num_external_cached_tokens) if stats is not None else (0, 0)


def get_connector_name(scheduler: Any) -> str | None:
    """The class of the connector that loads KV from outside the GPU; None without one."""
    return None if scheduler.connector is None else type(scheduler.connector).__name__


def get_started(output: Any) -> Iterable[tuple[str, int]]:
    """(request id, tokens already computed) for each request that a step starts or resumes."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                yield request_id, num_computed


def make_waiting_queue(scheduler: Any) -> Any:
    """An empty queue of the class that vLLM itself would use for waiting requests."""
    return create_request_queue(scheduler.policy)


def load_tokenizer(vllm_config: Any) -> Any | None:
    """The model's tokenizer, or None if the server runs without one."""
    if vllm_config.model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def is_diffusion(vllm_config: Any) -> bool:
    """Whether vLLM uses its diffusion scheduler for this model."""
    return bool(getattr(vllm_config.model_config, "is_diffusion", False))


def get_stock_class(vllm_config: Any) -> Any:
    """The scheduler class that vLLM would use without `--scheduler-cls`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if is_diffusion(vllm_config):
        from vllm.v1.core.sched import diffusion_scheduler

        name = "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name, diffusion_scheduler.DiffusionAsyncScheduler)
    return AsyncScheduler if is_async else SyncScheduler
