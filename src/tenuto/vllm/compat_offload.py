"""Private names of vLLM's offloading: its keys, its cache policies, and its manager of host memory.

Checked on vLLM 0.32.0. `compat_specs` has the specs, `compat_connector` and `compat_copies` the
connector's scheduler side.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingWorker,
    RequestOffloadingContext,
    TransferResult,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from tenuto.core.tier_order import Use

__all__ = [
    "CachePolicy",
    "JobResult",
    "LookupResult",
    "Medium",
    "OffloadingWorker",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "TransferResult",
]

MAX_PENDING_S = 30.0
"""A request waits for a chunk that is on its way at most this long; then it computes it."""


Place = tuple[bytes | None, int, int]
"""Where a chunk stands in its request: the chunk that it continues (None for a first one, and for a part of a
block), where it ends, in tokens, and its layer group."""


class Chains:
    """Which chunk of a request continues which, for all its layer groups."""

    def __init__(self, num_groups: int = 1) -> None:
        self._has_groups = num_groups > 1
        self._places: dict[bytes, Place] = {}
        self._last: dict[int, tuple[bytes, int, int]] = {}

    def __iter__(self) -> Iterator[bytes]:
        """All chunks so far."""
        return iter(self._places)

    def get_all(self, keys: Sequence[bytes]) -> list[Place]:
        """The places of chunks; one that vLLM has not numbered stands alone."""
        get = self._places.get
        return [get(key) or (None, 0, int(get_offload_group_idx(key))) for key in keys]

    def extend(self, positions: dict[bytes, int]) -> None:
        """Take up the keys that vLLM has numbered since; takes time for the new ones only."""
        places, has_groups = self._places, self._has_groups
        for key, end in islice(positions.items(), len(places), None):
            group = int(get_offload_group_idx(key)) if has_groups else 0
            last, last_end, size = self._last.get(group, (None, 0, end))
            # A key elsewhere than one chunk behind the last belongs to a part of a block, and to no chain.
            if end - last_end == size:
                places[key] = (last, end, group)
                self._last[group] = (key, end, size)
            else:
                places[key] = (None, end, group)


def get_chains(req_context: Any, num_groups: int) -> Chains:
    """A request's chains of chunks, as far as it has come."""
    chains: Chains | None = req_context.get_state(Chains)
    if chains is None:
        chains = Chains(num_groups)
        req_context.set_state(chains)
    chains.extend(req_context._offload_key_positions)
    return chains


class Asker(Protocol):
    """Who knows which request is whose."""

    def get_use(self, request_id: str) -> Use:
        """What ranks the chunks of this request."""

    def end_use(self, request_id: str) -> None:
        """The manager will not ask for this request again."""


@dataclass
class _Waits:
    """Since when a request waits for chunks that are on their way."""

    since_s: float


class HostManagerHooks:
    """Put before a host manager of vLLM: what is stored, and what goes for it, follow the policy's order.

    A chunk is stored only behind the chunk that it continues, and only if the chunks that make room for it do
    not go behind it. So host memory never holds what cannot be hit.
    """

    _policy: Any
    _num_chunks: int
    _num_evictable_cache_chunks: int
    events: list[Any] | None
    asker: Asker | None = None
    num_groups = 1
    sizes = (1, 1)
    num_evicted = num_dropped = num_refused = 0

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        """Make room for what may be stored of these chunks, and let vLLM's manager take it."""
        self._begin(req_context)
        wanted = self._get_wanted(list(keys))
        return super().prepare_store(wanted, req_context)  # type: ignore[misc]

    def _prepare_load(self, keys: Any, req_context: Any, *, record_access: bool) -> Any:
        if record_access:
            self._begin(req_context)
        spec = super()._prepare_load(keys, req_context, record_access=record_access)  # type: ignore[misc]
        if record_access:
            self._policy.touch(keys, req_context)
        return spec

    def on_request_finished(self, req_context: Any) -> None:
        """Rank all chunks of a request that used some, by where its job stands now: groups together."""
        has_used = req_context.get_state(Chains) is not None
        chains = self._begin(req_context)
        super().on_request_finished(req_context)  # type: ignore[misc]
        if has_used:
            self._policy.touch(chains, req_context)
        if self.asker is not None:
            self.asker.end_use(req_context.req_id)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a chunk is there, or on its way; not one that is on its way for too long."""
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
        """Drop chunks that cannot be read; those in a copy stay."""
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self._policy.order.remove(key)
                self._free(key)

    def drop(self, job_id: str) -> int:
        """Drop what only this job used; returns how many chunks. Chunks in a copy stay."""
        gone = [key for group in range(self.num_groups) for key in self._policy.order.drop((job_id, group))]
        for key in gone:
            self._free(key)
        self._tell_removed(gone)
        self.num_dropped += len(gone)
        return len(gone)

    def forget_keys(self) -> None:
        """The policy changed: from here on its keys count, for what is there only recency."""
        self._policy.order.forget_keys()

    def count_chunks(self) -> tuple[int, int]:
        """Chunks that host memory has room for, and chunks that it holds."""
        return self._num_chunks, len(self._policy.order)

    # Inside.

    def _begin(self, req_context: Any) -> Chains:
        use = self.asker.get_use(req_context.req_id) if self.asker is not None else Use()
        chains = get_chains(req_context, self.num_groups)
        self._policy.begin(chains, use)
        return chains

    def _get_wanted(self, keys: list[bytes]) -> list[bytes]:
        """The keys whose chunks are there or may be stored now."""
        policy = self._policy
        policy.touch(keys, None)
        way = policy.make_way(keys, self._get_num_free_chunks())  # type: ignore[attr-defined]
        for key in way.gone:
            self._free(key)
        self._tell_removed(way.gone)
        self.num_evicted += len(way.gone)
        self.num_refused += way.num_refused
        new = set(way.new)
        return [key for key in keys if key in new or policy.get(key) is not None]

    def _free(self, key: bytes) -> None:
        """The chunk of this key has left the order: its place is free."""
        self._free_chunk(self._policy.take(key))  # type: ignore[attr-defined]
        self._num_evictable_cache_chunks -= 1

    def _tell_removed(self, keys: list[bytes]) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=Medium.CPU, removed=True))


class HostManager(HostManagerHooks, CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of host memory, in our order."""


class PrimaryManager(HostManagerHooks, CPUPrimaryTierOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of host memory in front of other tiers, in our order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepare_write = self._prepare_write

    def _prepare_write(self, keys: Any, req_context: Any) -> Any:
        """Room for chunks that come from a tier behind; None, as vLLM wants it, if there is none for them."""
        found = self.prepare_store(keys, req_context)
        return found if found is not None and found.keys_to_store else None


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a request: a digest of its files; None if it is not known what was loaded."""

    digest: str | None


def try_get_name(key: bytes, req_context: Any) -> bytes | None:
    """What names a chunk's KV beyond this start, for a request; None if that is not known.

    vLLM's key has an adapter's name and path, and not its weights.
    """
    adapter = req_context.get_state(Adapter) if req_context is not None else None
    if adapter is None:
        return key
    if adapter.digest is None:
        return None
    return hashlib.blake2b(adapter.digest.encode() + key, digest_size=32).digest()


def get_host_manager(manager: Any) -> HostManagerHooks | None:
    """Our manager of host memory behind a connector's manager; None if it is another's."""
    found = getattr(manager, "primary_tier", manager)
    return found if isinstance(found, HostManagerHooks) else None
