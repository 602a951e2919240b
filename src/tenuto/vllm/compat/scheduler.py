"""vLLM's internals for its scheduler, its requests and its block pool.

`groups` has what only models with several layer groups need. A lease's blocks:

    request's blocks    │ cached │ cached │ cached │ part │    a lease takes over the references that the
                        ├───── the lease's ────────┤ freed┤    request has, so vLLM need not free those blocks

    vLLM's count      used = blocks of requests + blocks that only leases hold
    reported here     used = blocks of requests    (leases give their blocks back before an allocation fails)
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, overload

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus
from vllm.v1.utils import tensor_data

from tenuto.core.fairness import BlockRefCounts

__all__ = ["AsyncScheduler", "RequestQueue", "SyncScheduler"]

_ENDS = {
    RequestStatus.FINISHED_STOPPED: "stopped",
    RequestStatus.FINISHED_LENGTH_CAPPED: "cut",
    RequestStatus.FINISHED_REPETITION: "cut",
    RequestStatus.FINISHED_ABORTED: "aborted",
}
# New in 0.31.
_TAKES_PREFILL_END = (
    "prefill_end" in inspect.signature(KVCacheCoordinator.get_num_blocks_to_allocate).parameters
)


# Which scheduler runs.


def get_stock_class(vllm_config: Any) -> Any:
    """The scheduler class that vLLM would use without `--scheduler-cls`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if is_diffusion(vllm_config):
        from vllm.v1.core.sched import diffusion_scheduler

        name = "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name, diffusion_scheduler.DiffusionAsyncScheduler)
    return AsyncScheduler if is_async else SyncScheduler


def get_reason_for_stock(vllm_config: Any) -> str | None:
    """Why vLLM's own scheduler must run here; None if Tenuto's may."""
    if vllm_config.model_config.runner_type == "pooling":
        return "a pooling model has no turns"
    if is_diffusion(vllm_config):
        return "a diffusion model has its own scheduler"
    if vllm_config.is_mm_encoder_only:
        return "an engine that only encodes images has no KV cache"
    if vllm_config.attention_config.hisparse_config is not None:
        return "HiSparse has a second pool of blocks on the host, and leases know one pool"
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        return "with the external launcher every rank schedules, and our clocks could differ"
    return None


def is_diffusion(vllm_config: Any) -> bool:
    """Whether vLLM uses its diffusion scheduler for this model."""
    return bool(getattr(vllm_config.model_config, "is_diffusion", False))


def serve_by_priority(vllm_config: Any) -> None:
    """Make vLLM serve requests by their own priorities."""
    vllm_config.scheduler_config.policy = "priority"


def is_by_priority(scheduler: Any) -> bool:
    """Whether the requests' own priorities come first."""
    return bool(scheduler.policy.value == "priority")


def load_tokenizer(vllm_config: Any) -> Any | None:
    """The model's tokenizer, or None if the server runs without one."""
    if vllm_config.model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


# Hooks and steps.


class PrivateHooks:
    """Overrides of vLLM's private scheduler methods. Each calls a public hook, and then vLLM's own method.

    Put it before a vLLM scheduler class in the list of base classes.
    """

    requests: dict[str, Any]
    on_turn_finishing: Callable[[Any], None]
    """A request has its final status and still has its blocks."""
    on_turn_preempting: Callable[[Any], None]
    """A running request is about to lose its blocks."""
    keeps_for_now: Callable[[Any], bool]
    """Whether a request that ended keeps its blocks for now; then `LeasedBlocks` must free them later."""

    def _free_blocks(self, request: Any) -> None:
        if self.keeps_for_now(request):
            del self.requests[request.request_id]
        else:
            super()._free_blocks(request)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.on_turn_finishing(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.on_turn_preempting(request)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _update_waiting_for_remote_kv(self, request: Any) -> None:
        """A connector's load ended. If it left the request without blocks, the request has not begun.

        vLLM (0.31 to 0.33) keeps reserving the blocks that such a request would still need. If these and the
        blocks of its next load exceed the cache, that load is refused in each step, and nothing runs.
        """
        super()._update_waiting_for_remote_kv(request)  # type: ignore[misc]
        if not request.num_computed_tokens:
            getattr(self, "_inflight_prefills", set()).discard(request)


def make_waiting_queue(scheduler: Any) -> Any:
    """An empty queue of the class that vLLM itself would use for waiting requests."""
    return create_request_queue(scheduler.policy)


def count_waiting(scheduler: Any) -> int:
    """Requests that wait, without those whose client has not sent the next part of the prompt yet."""
    num_paused: int = getattr(scheduler, "num_waiting_for_streaming_input", 0)
    return int(scheduler.get_request_counts()[1]) - num_paused


def get_started(output: Any) -> Iterable[tuple[str, int]]:
    """(request id, tokens already computed) for each request that a step starts or resumes."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                yield request_id, num_computed


def get_prompts(output: Any) -> list[str]:
    """The requests of which a step computes more than one token."""
    if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
        return []
    return [request_id for request_id, number in output.num_scheduled_tokens.items() if number > 1]


def get_tokens_per_prompt(scheduler: Any) -> int:
    """The most tokens of one prompt in a step; 0 for no bound. vLLM reads it in every step."""
    return int(scheduler.scheduler_config.long_prefill_token_threshold)


def set_tokens_per_prompt(scheduler: Any, num_tokens: int) -> None:
    """Set the most tokens of one prompt in a step; 0 for no bound."""
    scheduler.scheduler_config.long_prefill_token_threshold = num_tokens


def get_reason_for_full_steps(scheduler: Any) -> str | None:
    """Why steps may not have a smaller token budget than vLLM's own; None if they may.

    If a group of tokens must be computed in one step, a smaller budget may never have room for the group. The
    request would wait forever.
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


# Requests.


def is_running(request: Any) -> bool:
    """Whether a request has blocks and takes part in steps."""
    return bool(request.status == RequestStatus.RUNNING)


def put_first(scheduler: Any, request_id: str) -> None:
    """Compute the rest of a prompt before those of other running requests, if one step can."""
    request = scheduler.requests.get(request_id)
    if request is None or not is_running(request):
        return
    if 0 < request.num_prompt_tokens - request.num_computed_tokens < scheduler.max_num_scheduled_tokens:
        scheduler.running.remove(request)
        scheduler.running.insert(0, request)


def put_decodes_first(scheduler: Any) -> None:
    """Let the next steps serve turns that decode before prompts; otherwise the order stays."""
    scheduler.running.sort(key=attrgetter("is_prefill_chunk"))


def get_end(request: Any) -> str:
    """How a request ended: stopped (by a token), cut (by a limit), aborted (from outside) or failed."""
    return _ENDS.get(request.status, "failed")


def get_hit_tokens(request: Any) -> tuple[int, int]:
    """Prompt tokens found in cache at the first start: (this engine's, a connector's)."""
    stats = request.prefill_stats
    return (stats.num_local_cached_tokens, stats.num_external_cached_tokens) if stats is not None else (0, 0)


def get_session_id(request: Any) -> str | None:
    """VLLM's own session id of a request. New in 0.31."""
    return getattr(request, "session_id", None)


def replace_fields(request: Any, fields: dict[str, Any]) -> None:
    """Give a request other fields for the workers and the KV connector, as vLLM does for a new request."""
    request.sampling_params.extra_args = fields
    request.kv_transfer_params = fields.get("kv_transfer_params")


def has_release_hint(request: Any) -> bool:
    """Whether a request carries vLLM's own hint that its KV cache is not needed afterwards.

    Since 0.31, a request may have an envelope of actions (`vllm.v1.kv_hints`). The component that reads an
    action defines what its type means. `release` is the name in vLLM's proposals.
    """
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        return False
    actions = getattr(envelope, "actions", None) or ()
    return any(str(getattr(each, "action_type", "")).lower() == "release" for each in actions)


class _MixedPrompt(Sequence[int]):
    """A prompt with embeddings. All of them have one token id, so a hash of each stands in its place.

    It is made when it is asked for: few places are, and an embedding has thousands of numbers.
    """

    def __init__(self, request: Any) -> None:
        self._request = request

    def __len__(self) -> int:
        return len(self._request.prompt_token_ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        request = self._request
        if request.prompt_is_token_ids[at]:
            return int(request.prompt_token_ids[at])
        return hash(bytes(tensor_data(request.prompt_embeds[at])))


def get_prompt(request: Any) -> Sequence[int]:
    """A prompt's token ids, with hashes in the places of embeddings; none if there are no token ids."""
    if request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None) is None:
        return request.prompt_token_ids or ()
    return _MixedPrompt(request)


def get_num_cached_tokens(scheduler: Any, request: Any) -> int:
    """Tokens of a waiting request that are in the prefix cache now."""
    return int(scheduler.kv_cache_manager.get_computed_blocks(request)[1])


# Blocks.


def get_block_size(scheduler: Any) -> int:
    """Tokens per block of the first layer group."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    # With context parallelism a block spans several ranks, so use the scheduler's own block size.
    return int(scheduler.block_size if len(groups) == 1 else groups[0].kv_cache_spec.block_size)


def can_truncate_leases(scheduler: Any) -> bool:
    """Whether block i of a request always holds tokens i·size to (i+1)·size.

    This is true for a single layer group with full attention.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or scheduler.hash_block_size != get_block_size(scheduler):
        return False
    # The managers derived from it may free blocks in the middle of a request (reference sliding windows).
    return type(scheduler.kv_cache_manager.coordinator.single_type_managers[0]) is FullAttentionManager


def has_content(block: Any, block_hash: Any) -> bool:
    """Whether a block holds the content with this hash."""
    return block.block_hash is not None and get_block_hash(block.block_hash) == block_hash


def count_cached_blocks(scheduler: Any) -> int:
    """Number of distinct block contents in the prefix cache."""
    return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


# A turn of 6,000 tokens has 375 blocks, so loops over them run in C. They avoid the property `block_hash`,
# and compare lists as a whole, which compares the blocks by identity first.
_get_hash, _get_block_id, _get_num_refs = map(attrgetter, ("_block_hash", "block_id", "ref_cnt"))


def _get_blocks(manager: Any, request_id: str) -> list[Any]:
    """The blocks of a request in the first layer group, in vLLM's own list."""
    blocks: list[Any] = manager.coordinator.single_type_managers[0].req_to_blocks.get(request_id, [])
    return blocks


def count_first_copies(scheduler: Any, request_id: str, num_known: int) -> int:
    """How many of a running request's leading blocks a prompt that extends it would hit.

    `num_known`: how many are already known to be hit. Two requests may have computed the same block at the
    same time. A prompt hits the copy that was cached first. That copy stays the first as long as its request
    has it.
    """
    manager = scheduler.kv_cache_manager
    own = _get_blocks(manager, request_id)
    num_full = len(own)
    while num_full > num_known and own[num_full - 1].block_hash is None:
        num_full -= 1
    new = own[num_known:num_full]
    # The map has a dict instead of a block only where there are several copies.
    found = list(map(manager.block_pool.cached_block_hash_to_block._cache.get, map(_get_hash, new)))
    if found == new:
        return num_full
    pairs = enumerate(zip(found, new, strict=True), num_known)
    return next(number for number, (first, block) in pairs if first is not block)


def get_own_cached_blocks(scheduler: Any, request: Any, num_known: int) -> list[Any]:
    """The blocks that a prompt extending this request would hit, without a look-up per block.

    `num_known`: how many of its leading blocks are known to be such, because they were hit or counted
    (`count_first_copies`). The request references its own cached blocks, so they cannot have been evicted.
    """
    manager, size = scheduler.kv_cache_manager, get_block_size(scheduler)
    if not manager.enable_caching:
        return []
    own, hashes = _get_blocks(manager, request.request_id), request.block_hashes
    # The last token was sampled but never computed.
    num_full = min((request.num_tokens - 1) // size, len(hashes), len(own))
    while num_full and own[num_full - 1].block_hash is None:
        num_full -= 1
    blocks = own[:num_full]
    # As in `count_first_copies`.
    new = blocks[num_known:]
    cached = manager.block_pool.cached_block_hash_to_block
    if list(map(cached._cache.get, map(_get_hash, new))) != new:
        firsts = map(cached.get_one_block, map(_get_hash, new))
        blocks[num_known:] = [first or own for first, own in zip(firsts, new, strict=True)]
    return blocks


def try_take_blocks(scheduler: Any, request_id: str, blocks: list[Any]) -> bool:
    """Take over a finishing request's first blocks, with its references to them.

    Returns False, and changes nothing, if they are not its own, or if a connector may still need its blocks.
    Only for engines of which `can_truncate_leases` is true.
    """
    if scheduler.connector is not None:
        return False
    tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    own = tables.get(request_id, [])
    if own[: len(blocks)] != blocks:
        return False
    tables[request_id] = own[len(blocks) :]
    return True


MAX_CHANGED = 10_000
"""Most blocks that wait for a look, which takes a millisecond or two for so many."""


class LeasedBlocks:
    """The references of leases to blocks of one vLLM block pool, and how many blocks only leases hold."""

    def __init__(self, scheduler: Any, do_yield: Callable[[], bool]) -> None:
        """`do_yield`: whether leases always yield at present. If not, the reported usage is vLLM's own."""
        pool = scheduler.kv_cache_manager.block_pool
        self.num_blocks = int(pool.num_gpu_blocks) - 1
        """Number of the pool's blocks, without the first one, which holds no tokens."""
        self.get_num_free_blocks: Callable[[], int] = pool.get_num_free_blocks
        """Returns the number of blocks that an allocation could take now."""
        self._do_yield = do_yield
        self._manager = scheduler.kv_cache_manager
        self._ended: deque[Any] = deque()
        """Requests that ended and still have their blocks, in the order in which they ended."""
        self._leased = BlockRefCounts()
        self._in_use: set[Hashable] = set()
        """Leased blocks that a request or a connector's transfer also uses; without those in `_changed`."""
        self._changed: list[Any] = []
        """Blocks whose references have changed since the last look at them; some are listed several times."""
        self._touch, self._free = pool.touch, pool.free_blocks
        self._get_vllm_usage = pool.get_usage
        pool.touch, pool.free_blocks = self._touch_for_request, self._free_for_request
        # Everything in vLLM that reports usage calls `get_usage`: the gauge on /metrics, the log, and the
        # load balancer of data-parallel ranks.
        pool.get_usage = self.get_usage

    def __len__(self) -> int:
        """Number of distinct leased blocks."""
        return len(self._leased)

    def count_idle(self) -> int:
        """Number of leased blocks that nothing but leases uses."""
        if self._changed:
            self._look()
        return len(self._leased) - len(self._in_use)

    def hold(self, blocks: Sequence[Any]) -> None:
        """Take one reference to each block for a lease."""
        self._touch(blocks)
        self._leased.add(list(map(_get_block_id, blocks)))
        self._note(blocks)

    def take_over(self, blocks: Sequence[Any]) -> None:
        """A finishing request passes its references to these blocks on to a lease."""
        if max(map(_get_num_refs, blocks), default=0) > 1:
            self._leased.add(list(map(_get_block_id, blocks)))
            self._note([block for block in blocks if block.ref_cnt > 1])
        else:
            # No other lease covers any of them, because it would have a reference too.
            self._leased.add_new(map(_get_block_id, blocks))

    def release(self, blocks: Sequence[Any]) -> None:
        """Release a lease's reference to each block; the last blocks will be evicted first."""
        self._free(reversed(blocks))
        self._leased.remove(list(map(_get_block_id, blocks)))
        if self._in_use:
            self._note(blocks)

    def free_later(self, request: Any) -> None:
        """A request ended. It keeps its blocks with content until `free_next`.

        vLLM puts the others first in its free queue, where the next step may take them.
        """
        own = _get_blocks(self._manager, request.request_id)
        num_cached = len(own)
        while num_cached and own[num_cached - 1].block_hash is None:
            num_cached -= 1
        self._free(own[num_cached:][::-1])
        del own[num_cached:]
        self._ended.append(request)

    def free_next(self) -> None:
        """Free the blocks of the request that ended first, without those that a lease took over."""
        self._manager.free(self._ended.popleft())

    def get_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1.

        Blocks that only yielding leases or an ended request hold count as free.
        """
        if not self.num_blocks or not self._do_yield():
            return float(self._get_vllm_usage())
        # The difference of two shares would be 5e-17 instead of 0 on an idle engine.
        num_used = self.num_blocks - self.get_num_free_blocks() - self.count_idle()
        for request in self._ended:
            own = _get_blocks(self._manager, request.request_id)
            num_used -= list(map(_get_num_refs, own)).count(1)
        return float(max(0, num_used) / self.num_blocks)

    # Called by vLLM in place of its own methods.

    def _touch_for_request(self, blocks: Sequence[Any]) -> None:
        self._touch(blocks)
        if len(self._leased):
            self._note(blocks)

    def _free_for_request(self, ordered_blocks: Iterable[Any]) -> None:
        if not self._in_use:
            self._free(ordered_blocks)
            return
        blocks = list(ordered_blocks)
        self._free(blocks)
        self._note([block for block in blocks if block.ref_cnt])

    def _note(self, blocks: Sequence[Any]) -> None:
        self._changed += blocks
        # Without yielding leases nobody counts.
        if len(self._changed) > MAX_CHANGED:
            self._look()

    def _look(self) -> None:
        changed, self._changed = self._changed, []
        if self._in_use:
            self._in_use.difference_update(map(_get_block_id, changed))
        # A leased block that something else uses too has two references or more.
        several = {block.block_id: block.ref_cnt for block in changed if block.ref_cnt > 1}
        self._in_use.update(self._leased.find_used(several))


# Allocations.


class AllocationGuard:
    """Calls `retry(allocate, request, num_new_tokens, kwargs)` whenever vLLM cannot allocate.

    vLLM allocates once per running request and step. To save time, the guard is removed while no allocation
    can fail.
    """

    def __init__(self, scheduler: Any, retry: Callable[..., Any]) -> None:
        self._manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        # A step's tokens, the longest prompt that may have to fit as a whole, and the watermark.
        num_tokens = scheduler.max_num_scheduled_tokens + scheduler.max_model_len
        # The layer groups with the fewest tokens per block take the most blocks.
        block_size = min(each.block_size for each in self._manager.coordinator.single_type_managers)
        self._num_step_blocks = num_tokens // block_size + self._manager.watermark_blocks + 1
        allocate = self._manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
            blocks = allocate(request, num_new_tokens, **kwargs)
            return blocks if blocks is not None else retry(allocate, request, num_new_tokens, kwargs)

        self._guarded = allocate_slots
        # This bound does not include the blocks that a connector reserves for its loads.
        self._always = scheduler.connector is not None

    def set_for_step(self) -> None:
        """Guard this step's allocations only if the step could run out of blocks; takes O(1) time.

        Waiting requests may each hit a long prefix that is cached and free, and take those blocks too. That
        matters beside leases only.
        """
        manager, scheduler = self._manager, self._scheduler
        # Each running request may need a block for its next token, per layer group.
        bound = (self._num_step_blocks + len(scheduler.running)) * manager.num_kv_cache_groups
        num_free_blocks = manager.block_pool.get_num_free_blocks()
        takes_prefixes = len(scheduler.leased_blocks) > 0 and count_waiting(scheduler) > 0
        if self._always or takes_prefixes or num_free_blocks < bound:
            manager.allocate_slots = self._guarded
        else:
            self.remove()

    def remove(self) -> None:
        """Remove the wrapper from vLLM's allocation."""
        if vars(self._manager).get("allocate_slots") is self._guarded:
            del self._manager.allocate_slots


def count_missing_blocks(scheduler: Any, request: Any, num_new_tokens: int, kwargs: dict[str, Any]) -> int:
    """How many free blocks a failed allocation lacked, over all layer groups.

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
