"""vLLM's internals for offloading: keys, the cache policy, managers and the OffloadingConnector.

Needs vLLM 0.31 or later. `specs` makes the managers. The connector's calls in the scheduler's process:

    request arrives ─► get_num_new_matched_tokens ─► update_state_after_alloc ─► (worker loads) ─► starts
    step            ─► build_connector_meta: stores what was computed ─► (worker stores) ─► complete
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from tenuto.core.tier_order import Room, TierOrder, Use
from tenuto.core.windows import STATE_WINDOW, count_loaded_blocks
from tenuto.vllm.compat.check import check_connector

__all__ = [
    "JobResult",
    "LookupResult",
    "Medium",
    "RequestOffloadingContext",
]

MAX_PENDING_S = 30.0
"""The longest that a request waits for a chunk that is being written; then it computes the tokens."""
ORDER = ("OrderedChunks", __name__)
"""The name and the module of the cache policy that our specs give to vLLM's managers."""


# How chunks follow one another.

Place = tuple[bytes | None, int, int]
"""A chunk's place in its request: the chunk before it (None for the first chunk, and for a part of a block),
its end in tokens, and its layer group."""


class Chains:
    """The order of a request's chunks, for all its layer groups."""

    def __init__(self, num_groups: int = 1) -> None:
        self.has_ended = False
        """Whether the request has ended. Its stores to a disk may end later."""
        self.num_disk_stores = 0
        """Its stores to a disk that are in flight."""
        self._has_groups = num_groups > 1
        self._places: dict[bytes, Place] = {}
        self._last: dict[int, tuple[bytes, int, int]] = {}

    def __iter__(self) -> Iterator[bytes]:
        """All chunks so far."""
        return iter(self._places)

    def list_ends(self) -> list[tuple[bytes, int]]:
        """All chunks so far, each with its end in tokens."""
        return [(key, end) for key, (_, end, _) in self._places.items()]

    def get_all(self, keys: Sequence[bytes]) -> list[Place]:
        """The places of chunks. A chunk that vLLM has not numbered has none before it."""
        get = self._places.get
        return [get(key) or (None, 0, int(get_offload_group_idx(key))) for key in keys]

    def extend(self, positions: dict[bytes, int]) -> None:
        """Add the keys that vLLM has numbered since the last call. Takes time for the new keys only."""
        places, has_groups = self._places, self._has_groups
        if len(positions) == len(places):
            return  # `islice` passes each known key
        for key, end in islice(positions.items(), len(places), None):
            group = int(get_offload_group_idx(key)) if has_groups else 0
            last, last_end, size = self._last.get(group, (None, 0, end))
            # A key that is not exactly one chunk after the last is for a part of a block, and is in no chain.
            if end - last_end == size:
                places[key] = (last, end, group)
                self._last[group] = (key, end, size)
            else:
                places[key] = (None, end, group)

    def begin_after(self, key: bytes, end: int, size: int) -> None:
        """The first key of the only layer group, still to come, is for the chunk after this one.

        `end`, `size`: where this chunk ends, and its size, in tokens.
        """
        self._last[0] = (key, end, size)


def get_chains(req_context: Any, num_groups: int) -> Chains:
    """A request's chains of chunks so far."""
    chains: Chains | None = req_context.get_state(Chains)
    if chains is None:
        chains = Chains(num_groups)
        req_context.set_state(chains)
    chains.extend(req_context._offload_key_positions)
    return chains


def try_get_chains(req_context: Any) -> Chains | None:
    """A request's chains of chunks; None if host memory, which vLLM asks first, was asked about none."""
    chains: Chains | None = req_context.get_state(Chains)
    return chains


def get_use(req_context: Any) -> Use:
    """What ranks a request's chunks, as far as known."""
    use: Use | None = req_context.get_state(Use)
    return Use() if use is None else use


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a request: a digest of its files, None if unknown."""

    digest: str | None


Facts = Sequence[Use | Adapter]
"""What is known of a copy's request."""


def try_get_name(key: bytes, req_context: Any) -> bytes | None:
    """A name for a chunk's KV that is valid after a restart too; None if unknown.

    vLLM's key depends on an adapter's name and path, but not on its weights. This name depends on the
    weights.
    """
    adapter = req_context.get_state(Adapter) if req_context is not None else None
    if adapter is None:
        return key
    if adapter.digest is None:
        return None
    return hashlib.blake2b(adapter.digest.encode() + key, digest_size=32).digest()


# Host memory.


class OrderedChunks(CachePolicy):  # type: ignore[misc]
    """What host memory holds, and what it evicts first: the policy's order, tails before prefixes."""

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity`: the number of chunks that host memory has room for."""
        super().__init__(cache_capacity)
        self.order = TierOrder()
        self.windowed_groups: frozenset[int] = frozenset()
        """Layer groups with windows or states: a chunk of them can be hit without the chunks before it."""
        self._chunks: dict[Any, Any] = {}
        self._chains = Chains()
        self._use = Use()
        self._get_owner: Callable[[int], Hashable] = lambda group: None
        """The owner of the job's chunks in a layer group; None for a request that belongs to no job."""
        self._number = 0

    def begin(self, chains: Chains, use: Use) -> None:
        """The next calls are for the request with these chains of chunks."""
        self._chains, self._use = chains, use
        self._number = self.order.begin_use()
        # Many chunks share one owner.
        job_id = use.owner
        self._get_owner = functools.cache(lambda group: None if job_id is None else (job_id, group))

    # Called by vLLM's host manager.

    def get(self, key: Any) -> Any | None:
        """The chunk with this key, if it is stored or being written."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any, req_context: Any = None) -> None:
        """A chunk is about to be written; it cannot be evicted until the write has ended."""
        self._chunks[key] = chunk
        before, end, group = self._chains.get_all((key,))[0]
        self.order.put(
            key,
            before,
            (self._use.key, self._number, -end, group),
            owner=self._get_owner(group),
            needs_before=group not in self.windowed_groups,
            num_pins=0 if chunk.ref_cnt == 0 else 1,
        )
        self._try_keep(key, end)

    def remove(self, key: Any) -> None:
        """A chunk could not be written, or is dropped."""
        del self._chunks[key]
        self.order.remove(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """These chunks were used, in this order."""
        chunks, key, number, get_owner = self._chunks, self._use.key, self._number, self._get_owner
        present = [each for each in keys if each in chunks]
        for each, (_, end, group) in zip(present, self._chains.get_all(present), strict=True):
            self.order.rank(each, (key, number, -end, group), get_owner(group))
            self._try_keep(each, end)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        """Nothing: a chunk gets its rank when it is inserted."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """Nothing: our manager ranks all chunks of a request, not only those that vLLM's manager recorded."""

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """None: our manager makes room before vLLM's would evict (see `make_room`)."""
        return None if n else []

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self.order.clear()

    def mark_evictable(self, key: Any) -> None:
        """A copy of this chunk has ended."""
        self.order.unpin(key)

    def mark_non_evictable(self, key: Any) -> None:
        """A copy of this chunk begins."""
        self.order.pin(key)

    # Called by our own manager.

    def make_room(self, keys: Sequence[Any], num_free: int, stay: Container[Any]) -> Room:
        """Evict chunks that rank below the current request's, to make room for the new ones of `keys`.

        `stay`: chunks that are not evicted.
        """
        windowed = self.windowed_groups
        needed = [None if group in windowed else before for before, _, group in self._chains.get_all(keys)]
        return self.order.make_room(keys, needed, self._use.key, num_free, stay)

    def count_new(self, keys: Iterable[Any]) -> int:
        """How many parts of the sequence these keys cover: the keys of one group, if possible a full one."""
        groups = Counter(group for _, _, group in self._chains.get_all(list(keys)))
        full = {group: number for group, number in groups.items() if group not in self.windowed_groups}
        return max((full or groups).values(), default=0)

    def take(self, key: Any) -> Any:
        """Remove and return the chunk of a key that left the order."""
        return self._chunks.pop(key)

    def _try_keep(self, key: Any, end: int) -> None:
        """Keep a chunk as long as its client wishes, once the request has ended: it may still be aborted."""
        until_s = self._use.get_kept_until_s(end) if self._use.wished and self._chains.has_ended else 0.0
        if until_s:
            self.order.keep(key, until_s, self._use.tenant, end)


class Asker(Protocol):
    """Tells the job and the rank of each request."""

    def get_use(self, request_id: str) -> Use:
        """What ranks the chunks of this request."""

    def count_stored(self, request_id: str, job_id: str | None, num_chunks: int) -> None:
        """`num_chunks` chunks of the request will be stored; a chunk counts once for all layer groups."""


@dataclass
class _Waits:
    """Since when a request waits for chunks that are being written."""

    since_s: float


class HostManagerHooks:
    """Makes a host manager of vLLM, its next base class, store and evict chunks in the policy's order.

    A chunk is stored only if the chunk before it is, and only if the chunks evicted for it do not rank above
    it. So host memory never holds chunks that cannot be hit.
    """

    _policy: OrderedChunks
    _num_chunks: int
    _num_evictable_cache_chunks: int
    events: list[Any] | None
    asker: Asker | None = None
    num_groups = 1
    sizes = (1, 1)
    num_evicted = num_dropped = num_refused = 0

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        """Make room for those of these chunks that may be stored, and let vLLM's manager store them."""
        found = self._make_room(keys, req_context)
        if self.asker is not None and found is not None:
            num_new, owner = self._policy.count_new(found.keys_to_store), get_use(req_context).owner
            self.asker.count_stored(req_context.req_id, owner, num_new)
        return found

    @property
    def order(self) -> TierOrder:
        """What host memory holds, by job and layer group, in the order in which it is evicted."""
        return self._policy.order

    def _make_room(self, keys: Any, req_context: Any, stay: Container[Any] = ()) -> Any:
        """Let vLLM's manager store those of these chunks that are stored or may be stored now."""
        self._begin(req_context)
        policy, keys = self._policy, list(keys)
        policy.touch(keys, None)
        room = policy.make_room(keys, self._get_num_free_chunks(), stay)  # type: ignore[attr-defined]
        for key in room.evicted:
            self._free(key)
        self._report_removed(room.evicted)
        self.num_evicted += len(room.evicted)
        self.num_refused += room.num_refused
        new = set(room.new)
        wanted = [key for key in keys if key in new or policy.get(key) is not None]
        return super().prepare_store(wanted, req_context)  # type: ignore[misc]

    def _prepare_load(self, keys: Any, req_context: Any, *, record_access: bool) -> Any:
        if record_access:
            self._begin(req_context)
        spec = super()._prepare_load(keys, req_context, record_access=record_access)  # type: ignore[misc]
        if record_access:
            self._policy.touch(keys, req_context)
        return spec

    def on_request_finished(self, req_context: Any) -> None:
        """Rank all chunks that a request used by its job's current key, in all groups alike."""
        has_used = req_context.get_state(Chains) is not None
        chains = self._begin(req_context)
        chains.has_ended = True
        super().on_request_finished(req_context)  # type: ignore[misc]
        if has_used:
            self._policy.touch(chains, req_context)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a chunk is stored or being written, unless that takes too long."""
        chunk = self._policy.get(key)
        if chunk is None:
            return LookupResult.MISS
        if chunk.is_ready:
            return LookupResult.HIT
        now_s = time.monotonic()
        waits = req_context.get_state(_Waits)
        if waits is None:
            waits = _Waits(now_s)
            req_context.set_state(waits)
        return LookupResult.HIT_PENDING if now_s - waits.since_s < MAX_PENDING_S else LookupResult.MISS

    def touch(self, keys: Any, req_context: Any) -> None:
        """The request uses these chunks."""
        self._begin(req_context)
        super().touch(keys, req_context)  # type: ignore[misc]

    def forget(self, keys: Any) -> None:
        """Drop chunks that cannot be read. Chunks in a copy stay."""
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self.order.remove(key)
                self._free(key)

    def drop(self, job_id: str) -> int:
        """Drop the chunks that only this job used, and return their number. Chunks in a copy stay."""
        gone = [key for group in range(self.num_groups) for key in self.order.drop((job_id, group))]
        for key in gone:
            self._free(key)
        self._report_removed(gone)
        self.num_dropped += len(gone)
        return len(gone)

    def limit_kept(self, share: float, weights: Mapping[str, Any]) -> None:
        """Set the largest share of host memory that is evicted last because clients wished it."""
        kept = self.order.kept
        kept.max_chunks, kept.weights = int(share * self._num_chunks), weights

    def count_chunks(self) -> tuple[int, int]:
        """The number of chunks that host memory has room for, and the number that it holds."""
        return self._num_chunks, len(self.order)

    # Internal.

    def _begin(self, req_context: Any) -> Chains:
        if req_context.get_state(Use) is None and self.asker is not None:
            req_context.set_state(self.asker.get_use(req_context.req_id))
        chains = get_chains(req_context, self.num_groups)
        self._policy.begin(chains, get_use(req_context))
        return chains

    def _free(self, key: Hashable) -> None:
        self._free_chunk(self._policy.take(key))  # type: ignore[attr-defined]
        self._num_evictable_cache_chunks -= 1

    def _report_removed(self, keys: list[Hashable]) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=Medium.CPU, removed=True))


class HostManager(HostManagerHooks, CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of host memory, in our order."""


class PrimaryManager(HostManagerHooks, CPUPrimaryTierOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of host memory in front of other tiers, in our order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepare_write = self._prepare_write
        self._looking: Any = None
        self._hits: set[bytes] = set()
        """The chunks that the request that looked last has found. It may load them in this step."""

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a chunk is stored or being written. A chunk that was found stays during the look-up."""
        found = super().lookup(key, req_context)
        if self._looking is not req_context:
            self._looking, self._hits = req_context, set()
        if found is LookupResult.HIT:
            self._hits.add(key)
        return found

    def _prepare_write(self, keys: Any, req_context: Any) -> Any:
        """Make room for chunks from a lower tier; None, as vLLM expects, if there is no room.

        A look-up asks for one chunk after another. With several layer groups, or for a part of a block, it
        may do without the new one and load what it found before. So that is not evicted.
        """
        found = self._make_room(keys, req_context, self._hits if self._looking is req_context else ())
        return found if found is not None and found.keys_to_store else None


class SecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier below host memory."""

    @property
    def offloading_config(self) -> Any:
        """The layout of a chunk's bytes: vLLM's OffloadingConfig."""
        return self._offloading_spec.config


def get_host_manager(manager: Any) -> HostManagerHooks | None:
    """Our manager of host memory behind a connector's manager; None if it is not ours."""
    found = getattr(manager, "primary_tier", manager)
    return found if isinstance(found, HostManagerHooks) else None


# The connector.


def find_connector(scheduler: Any) -> Any | None:
    """The OffloadingConnector with our host manager, alone or in a MultiConnector; None if there is none."""
    connectors = (scheduler.connector, *getattr(scheduler.connector, "sub_connectors", ()))
    found = (each for each in connectors if isinstance(each, OffloadingConnector))
    return next((each for each in found if get_host_manager(each.connector_scheduler.manager)), None)


def _get_window(group: Any) -> int | None:
    """The window of one layer group, in tokens; None for full attention."""
    if group.sliding_window_size_in_chunks is None:
        return None
    spec = group.kv_cache_spec
    size = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return STATE_WINDOW if size is None else int(size)


@dataclass
class Copy:
    """A copy; it stands in for its request in vLLM's connector (`RequestOffloadState`)."""

    req_context: Any
    job_id: int
    transfer_jobs: set[int]
    has_failed: bool = False
    """Whether an ended load failed: its blocks do not hold the expected KV."""
    req: Any = field(default_factory=lambda: SimpleNamespace(is_finished=lambda: True))
    finished_signaled: bool = True
    group_states: tuple[Any, ...] = ()


class ConnectorPort:
    """Tenuto's access to one OffloadingConnector, and hooks in it. Sizes are in chunks.

    It also makes copies that no request asked for, of blocks of one layer group: prefetches, and stores after
    a request has ended. `hashes` are the block hashes of a prompt from its start, and `facts` what `describe`
    would be told of its request.
    """

    def __init__(self, connector: Any, scheduler: Any) -> None:
        self._connector = connector
        self._pool = pool = scheduler.kv_cache_manager.block_pool
        self.num_blocks = int(pool.num_gpu_blocks)
        self.get_num_free_blocks: Callable[[], int] = pool.get_num_free_blocks
        """Returns the number of blocks that an allocation could take now."""
        self.take_blocks: Callable[[int], list[Any]] = pool.get_new_blocks
        """Allocates free blocks; their content is lost."""
        self.hold_blocks: Callable[[Sequence[Any]], None] = pool.touch
        """Takes one reference to each block."""
        self._scheduler = connector.connector_scheduler
        check_connector(self._scheduler)
        self._manager: Any = self._scheduler.manager
        host = get_host_manager(self._manager)
        assert host is not None, "another's host manager"
        self.host: HostManagerHooks = host
        tiers = getattr(self._manager, "secondary_tiers", ())
        self.disks = [each for each in tiers if hasattr(each, "get_view")]
        """Tenuto's tiers below host memory (`tenuto.vllm.tiers.disk`)."""
        config = self._scheduler.config
        groups = config.kv_group_configs
        self.blocks_per_chunk = int(config.blocks_per_chunk)
        self.tokens_per_chunk = int(groups[0].tokens_per_chunk)
        windowed = {each.group_idx for each in groups if each.sliding_window_size_in_chunks is not None}
        host._policy.windowed_groups = frozenset(windowed)
        self._groups = [(_get_window(each), int(each.tokens_per_chunk)) for each in groups]
        self.is_plain = len(self._groups) == 1 and not windowed
        """Whether each block holds exactly the KV of its tokens, for all layers."""
        self._loads: dict[str, Copy] = {}
        """Our loads that the workers have not reported yet. After a reset, vLLM no longer knows them."""
        if scheduler.connector is not connector:
            self._watch_loads_of_others(scheduler.connector)

    # Requests.

    def count_loaded(self, num_hit_tokens: int, num_tokens: int) -> int:
        """Number of chunks, over all layer groups, that a load of `num_tokens` after a hit copies."""
        end = num_hit_tokens + num_tokens
        return sum(count_loaded_blocks(window, size, num_hit_tokens, end) for window, size in self._groups)

    def end_stores(self, request_id: str) -> None:
        """Let vLLM store nothing more of what this request computes."""
        status = self._scheduler._req_status.get(request_id)
        if status is not None:
            status.max_offload_tokens = 0

    def on_load_question(self, answer: Callable[[Any, int, int], int]) -> None:
        """Let `answer(request, tokens hit on the GPU, tokens offered)` say how many tokens are loaded.

        The answer is the offer, 0, or a number between them that ends with a chunk.
        """
        ask = self._connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            offered, is_async = ask(request, num_computed_tokens)
            if not offered:
                return offered, is_async
            num_tokens = answer(request, num_computed_tokens, offered)
            return num_tokens, is_async and num_tokens > 0

        self._connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    def _watch_loads_of_others(self, whole: Any) -> None:
        """Make stores that read blocks finish before another connector loads into those blocks.

        `whole`: the scheduler's connector. vLLM's MultiConnector names the blocks only to the connector that
        loads. The others do not see the request in a step either, because it waits for its load.
        """
        tell = whole.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            tell(request, blocks, num_external_tokens)
            if num_external_tokens:
                ids = {block.block_id for group in blocks.blocks for block in group if not block.is_null}
                self._scheduler._current_batch_allocated_block_ids |= ids

        whole.update_state_after_alloc = update_state_after_alloc

    def describe(self, request_id: str, fact: Use | Adapter) -> None:
        """Set the LoRA adapter of a request, or what ranks its chunks from now on."""
        status = self._scheduler._req_status.get(request_id)
        if status is not None:
            status.req_context.set_state(fact)

    def forget_uses(self) -> None:
        """Ask again what ranks the chunks of each request; those of ended ones are ranked by recency."""
        for status in self._scheduler._req_status.values():
            use = status.req_context._state.pop(Use, None)
            if use is not None and status.req.is_finished():
                # Nobody knows any more whose they are.
                status.req_context.set_state(Use(owner=use.owner, tenant=use.tenant))

    # Steps.

    def on_idle(self, has_work: Callable[[], bool]) -> None:
        """Make an idle engine run steps while `has_work()` is true."""
        ask = self._connector.has_pending_push_work
        self._connector.has_pending_push_work = lambda: ask() or has_work()

    def on_step(
        self, begin: Callable[[], None], holds_back: Callable[[], bool], add: Callable[[Any], None]
    ) -> None:
        """Call `begin` before vLLM chooses what a step stores, and `add(meta)` with its choice.

        While `holds_back` is true, KV of running requests is not stored; vLLM offers it again in a later
        step. KV of finished requests is stored at once, because their blocks may be reused.
        """
        scheduler = self._scheduler
        build, build_stores = scheduler.build_connector_meta, scheduler._build_store_jobs

        def build_connector_meta(scheduler_output: Any) -> Any:
            begin()
            preempted = scheduler_output.preempted_req_ids
            if preempted:
                # A reset preempts requests that may already be loading, which vLLM's connector does not
                # expect.
                scheduler_output.preempted_req_ids = {
                    each for each in preempted if not self._is_loading(each)
                }
            meta = build(scheduler_output)
            scheduler_output.preempted_req_ids = preempted
            add(meta)
            return meta

        def build_store_jobs(scheduler_output: Any) -> Any:
            if holds_back():
                finished = scheduler_output.finished_req_ids
                scheduler_output = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=finished)
            return build_stores(scheduler_output)

        reset = scheduler.reset_cache

        def reset_cache() -> None:
            # vLLM's connector does not expect a second reset before a step.
            waited_for = set(scheduler._current_batch_jobs_to_flush)
            scheduler._current_batch_jobs_to_flush.clear()
            reset()
            scheduler._current_batch_jobs_to_flush |= waited_for
            for disk in self.disks:
                disk.renew()

        if hasattr(scheduler, "_build_partial_tail_store_jobs"):
            scheduler._build_partial_tail_store_jobs = self._bound_parts(
                scheduler._build_partial_tail_store_jobs
            )
        scheduler.reset_cache = reset_cache
        scheduler.build_connector_meta = build_connector_meta
        scheduler._build_store_jobs = build_store_jobs

    def _bound_parts(self, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let vLLM store parts of blocks (hits may end there) only as far as a request may store.

        Where that is 0 (`end_stores`), vLLM stores them all the same. Where a client says less than its
        prompt (`max_offload_tokens`), vLLM ends the engine.
        """

        def build_parts(scheduler_output: Any) -> Any:
            state = scheduler_output.kv_connector_block_state
            if state is None or not state.boundary_state_offloads:
                return build(scheduler_output)
            parts = {
                request_id: [each for each in found if self._may_store(request_id, each[2])]
                for request_id, found in state.boundary_state_offloads.items()
            }
            # With a draft model, vLLM 0.33 also reads what the step computes.
            state = replace(state, boundary_state_offloads=parts)
            return build(replace(scheduler_output, kv_connector_block_state=state))

        return build_parts

    def _may_store(self, request_id: str, num_tokens: int) -> bool:
        scheduler = self._scheduler
        status = scheduler._req_status.get(request_id)
        return status is None or num_tokens <= scheduler._calc_num_offloadable_tokens(status, num_tokens)

    def _is_loading(self, request_id: str) -> bool:
        status = self._scheduler._req_status.get(request_id)
        jobs = self._scheduler._jobs
        return status is not None and any(not jobs[each].is_store for each in status.transfer_jobs)

    def on_copied(self, told: Callable[[bool, int, float], None]) -> None:
        """Call `told(is_load, bytes, seconds)` for each copy that the workers report.

        Our loads are removed from the reports, because vLLM would look for their requests. Only `_loads`
        tells which are ours: a client may choose any request id.
        """
        update = self._connector.update_connector_output

        def update_connector_output(output: Any) -> None:
            meta = output.kv_connector_worker_meta
            if isinstance(meta, OffloadingWorkerMetadata):
                for is_load, stats in ((True, meta.transfer_stats.load), (False, meta.transfer_stats.store)):
                    if not stats.is_empty():
                        told(is_load, stats.bytes, stats.time)
            update(output)
            ended = self._loads.keys() & (output.finished_recving or set())
            for load_id in ended:
                self._loads.pop(load_id).has_failed = load_id in output.failed_recving
            if ended:
                output.finished_recving = output.finished_recving - ended

        self._connector.update_connector_output = update_connector_output

    def count_moving(self) -> tuple[int, int]:
        """The number of chunks in loads in flight, and in stores in flight."""
        loads = stores = 0
        for job in self._scheduler._jobs.values():
            if job.is_store:
                stores += len(job.keys)
            else:
                loads += len(job.keys)
        return loads, stores

    @property
    def can_prefetch(self) -> bool:
        """Whether prefetches work here. They do not if vLLM publishes an event for each cached block.

        They do not work without a prefix cache either: vLLM would then take a block that still has a hash for
        a hit.
        """
        return self.is_plain and self._pool.enable_caching and not self._pool.enable_kv_cache_events

    # The GPU's blocks.

    def give_back_blocks(self, blocks: Sequence[Any]) -> None:
        """Release one reference to each block; the last block will be evicted first."""
        self._pool.free_blocks(list(reversed(blocks)))

    # Copies in flight.

    def is_moving(self, job_id: int) -> bool:
        """Whether this copy is in flight."""
        return job_id in self._scheduler._jobs

    # Loads that no request asked for.

    def find_cached(self, block_hash: Any) -> Any | None:
        """The GPU block with this content; None if there is none."""
        found = self._pool.get_cached_block(block_hash, [0])
        return found[0] if found else None

    def count_loadable(self, hashes: Sequence[Any], first: int, end: int) -> int:
        """How many blocks host memory has without a gap, from number `first` to before `end`."""
        size, context = self.blocks_per_chunk, ReqContext(req_id="")
        chunk = first // size
        while (chunk + 1) * size <= end:
            key = make_offload_key(hashes[(chunk + 1) * size - 1], 0)
            if self.host.lookup(key, context) is not LookupResult.HIT:
                break
            chunk += 1
        return max(0, chunk * size - first)

    def begin_load(
        self, blocks: Sequence[Any], hashes: Sequence[Any], meta: Any, *, first: int, facts: Facts
    ) -> Copy:
        """Load into these blocks what a prompt has from its block `first` on. Host memory must have it."""
        scheduler = self._scheduler
        context, keys = self._begin_copy(hashes, first, first + len(blocks), facts)
        source = self._manager.prepare_load(keys, context)
        ids = [block.block_id for block in blocks]
        target = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first])
        for block_id in ids:
            # As for a request's blocks: a store that still reads them must finish first.
            meta.jobs_to_flush |= scheduler._block_id_to_pending_jobs.get(block_id, set())
        load = self._loads[context.req_id] = self._register(context, set(keys), ids, is_store=False)
        if scheduler._chunks_being_loaded is not None:
            # A request that needs the same chunks waits for this load.
            scheduler._chunks_being_loaded.update(keys)
        meta.load_jobs[load.job_id] = TransferJob(context.req_id, source, target)
        self._manager.on_request_finished(context)
        return load

    def cache_blocks(self, hashes: Sequence[Any], blocks: list[Any], first: int) -> None:
        """Add `blocks` from number `first` on to the prefix cache, under their `hashes`."""
        owner = SimpleNamespace(block_hashes=hashes)
        size = self.tokens_per_chunk // self.blocks_per_chunk
        self._pool.cache_full_blocks(owner, blocks, first, len(blocks), size, 0)

    # Stores that no request asked for.

    def get_hashes(self, blocks: Sequence[Any]) -> list[Hashable]:
        """The chained hash of each block's content."""
        return [get_block_hash(block.block_hash) for block in blocks]

    def begin_store(
        self, blocks: Sequence[Any], hashes: Sequence[Any], meta: Any, *, first: int, facts: Facts
    ) -> int | None:
        """Store these blocks, which a prompt has from its block `first` on.

        Returns the number of the copy; None if host memory already has the chunks, or has no room for them.
        """
        size = self.blocks_per_chunk
        context, keys = self._begin_copy(hashes, first, first + len(blocks), facts)
        found = self._manager.prepare_store(keys, context)
        wanted = set(found.keys_to_store) if found is not None else set()
        numbers = [number for number, key in enumerate(keys) if key in wanted]
        job_id = None
        if numbers:
            ids = [block.block_id for n in numbers for block in blocks[n * size : (n + 1) * size]]
            source = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first + numbers[0] * size])
            job_id = self._register(context, wanted, ids, is_store=True).job_id
            meta.store_jobs[job_id] = TransferJob(context.req_id, source, found.store_spec)
        self._manager.on_request_finished(context)
        return job_id

    # Internal.

    def _begin_copy(self, hashes: Sequence[Any], first: int, end: int, facts: Facts) -> tuple[Any, list[Any]]:
        """A substitute for a request's context, and the keys of the chunks from block `first` to `end`.

        No request can have its id, whatever clients send.
        """
        size, context = self.blocks_per_chunk, ReqContext(req_id=f"tenuto-{secrets.token_hex(16)}")
        for each in facts:
            context.set_state(each)
        # Not the keys of all blocks before `first`: a long prompt is copied in many parts.
        num_before, num_tokens = first // size, self.tokens_per_chunk
        if num_before:
            chains = Chains()
            before = make_offload_key(hashes[num_before * size - 1], 0)
            chains.begin_after(before, num_before * num_tokens, num_tokens)
            context.set_state(chains)
        keys = [make_offload_key(each, 0) for each in hashes[(num_before + 1) * size - 1 : end : size]]
        for number, key in enumerate(keys, num_before + 1):
            context.set_offload_key_position(key, number * num_tokens)
        self._manager.on_new_request(context)
        return context, keys

    def _register(self, context: Any, keys: set[Any], block_ids: list[int], *, is_store: bool) -> Copy:
        """Register a copy with vLLM, so that its blocks are not reused before it ends."""
        scheduler = self._scheduler
        job_id = int(scheduler._generate_job_id())
        found = scheduler._req_status[context.req_id] = Copy(context, job_id, {job_id})
        scheduler._jobs[job_id] = TransferJobStatus(
            req_id=context.req_id,
            pending_count=scheduler.config.num_workers,
            keys=keys,
            is_store=is_store,
            fenced_block_ids=block_ids,
        )
        for block_id in block_ids:
            scheduler._block_id_to_pending_jobs.setdefault(block_id, set()).add(job_id)
        return found
