"""Host memory's chunks in the order of `tenuto.core.tier_order`, as a cache policy of vLLM's host manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tenuto.core.tier_order import TierOrder, Use, Way
from tenuto.vllm.compat_offload import CachePolicy, Chains


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
        self._number = 0

    def begin(self, chains: Chains, use: Use) -> None:
        """What follows is done for the request with these chains of chunks."""
        self._chains, self._use = chains, use
        self._number = self.order.begin_use()

    # vLLM's host manager calls these.

    def get(self, key: Any) -> Any | None:
        """The chunk with this key, if it is there or on its way."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any, req_context: Any = None) -> None:
        """A chunk is about to be written; it stays until that has ended."""
        self._chunks[key] = chunk
        self._put(key, num_pins=0 if chunk.ref_cnt == 0 else 1)

    def remove(self, key: Any) -> None:
        """A chunk could not be written, or is dropped."""
        del self._chunks[key]
        self.order.remove(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """These chunks were used, in this order."""
        chunks, put = self._chunks, self._put
        for key in keys:
            if key in chunks:
                put(key)

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
        return self.order.make_way(keys, [self._get_needed(key) for key in keys], self._use.key, num_free)

    def take(self, key: Any) -> Any:
        """The chunk behind a key that left the order."""
        return self._chunks.pop(key)

    def _get_needed(self, key: Any) -> Any | None:
        """The chunk without which this one is worth nothing; None if there is none."""
        before, _, group = self._chains.get(key)
        return None if group in self.windowed_groups else before

    def _put(self, key: Any, num_pins: int = 0) -> None:
        use, (before, end, group) = self._use, self._chains.get(key)
        owner = None if use.owner is None else (use.owner, group)
        needs_before = group not in self.windowed_groups
        rank = (use.key, self._number, -end)
        self.order.put(key, before, rank, owner=owner, needs_before=needs_before, num_pins=num_pins)
