"""Host memory's chunks in the order of `tenuto.core.tier_order`, as a cache policy of vLLM's host manager."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from tenuto.core.tier_order import TierOrder, Use, Way
from tenuto.vllm.compat_offload import CachePolicy, Chains


class _Owners(dict[int, Hashable]):
    """The owner of a job's chunks in each layer group; None for a request that belongs to no job."""

    def __init__(self, job_id: str | None) -> None:
        super().__init__()
        self._job_id = job_id

    def __missing__(self, group: int) -> Hashable:
        owner = self[group] = None if self._job_id is None else (self._job_id, group)
        return owner


class OrderedChunks(CachePolicy):  # type: ignore[misc]
    """What host memory holds, and what goes first: the order of the policy, tails before prefixes."""

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity`: chunks that host memory holds."""
        super().__init__(cache_capacity)
        self.order = TierOrder()
        self.windowed_groups: frozenset[int] = frozenset()
        """Layer groups with windows or states: their chunks do not build on the ones before them."""
        self._chunks: dict[Any, Any] = {}
        self._chains = Chains()
        self._use = Use()
        self._owners = _Owners(None)
        self._number = 0

    def begin(self, chains: Chains, use: Use) -> None:
        """What follows is done for the request with these chains of chunks."""
        self._chains, self._use = chains, use
        self._number = self.order.begin_use()
        self._owners = _Owners(use.owner)

    # vLLM's host manager calls these.

    def get(self, key: Any) -> Any | None:
        """The chunk with this key, if it is there or on its way."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any, req_context: Any = None) -> None:
        """A chunk is about to be written; it stays until that has ended."""
        self._chunks[key] = chunk
        before, end, group = self._chains.get_all((key,))[0]
        self.order.put(
            key,
            before,
            (self._use.key, self._number, -end, group),
            owner=self._owners[group],
            needs_before=group not in self.windowed_groups,
            num_pins=0 if chunk.ref_cnt == 0 else 1,
        )

    def remove(self, key: Any) -> None:
        """A chunk could not be written, or is dropped."""
        del self._chunks[key]
        self.order.remove(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """These chunks were used, in this order."""
        chunks, key, number, owners = self._chunks, self._use.key, self._number, self._owners
        present = [each for each in keys if each in chunks]
        for each, (_, end, group) in zip(present, self._chains.get_all(present), strict=True):
            self.order.rank(each, (key, number, -end, group), owners[group])

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        """Nothing: a chunk gets its rank when it is inserted."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """Nothing: our manager ranks all chunks of a request, not only those that vLLM's took note of."""

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """None: our manager makes way before vLLM's would take chunks away (see `make_way`)."""
        return None if n else []

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self.order.clear()

    def mark_evictable(self, key: Any) -> None:
        """No copy uses this chunk any more."""
        self.order.unpin(key)

    def mark_non_evictable(self, key: Any) -> None:
        """A copy uses this chunk."""
        self.order.pin(key)

    # Our own manager calls these.

    def make_way(self, keys: Sequence[Any], num_free: int) -> Way:
        """Give chunks up that do not go behind the present request's, for those of `keys` that are new."""
        windowed = self.windowed_groups
        needed = [None if group in windowed else before for before, _, group in self._chains.get_all(keys)]
        return self.order.make_way(keys, needed, self._use.key, num_free)

    def take(self, key: Any) -> Any:
        """The chunk behind a key that left the order."""
        return self._chunks.pop(key)
