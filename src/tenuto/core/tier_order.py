"""The order in which a tier below the GPU stores and evicts chunks, in the simulator and in vLLM."""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.core.wishes import Wish

MIN_HEAP = 64
"""A heap is rebuilt only if it is larger than this and most of its entries are stale."""
MAX_STORING_S = 0.1
"""New stores wait while those in flight need longer than this, so that loads do not wait long for stores."""


@dataclass(frozen=True, slots=True)
class _Kept:
    until_s: float
    tenant: str
    owner: Hashable | None


class KeptChunks:
    """The chunks of a tier that are kept, each until its deadline. They are never all of the tier's chunks.

    If there are too many, the tenant that has the most for its weight loses the chunk with the earliest
    deadline, the last one in its sequence first. A change takes O(log n) amortised time.
    """

    def __init__(self) -> None:
        self.max_chunks = 0
        """Most chunks that may be kept."""
        self.weights: Mapping[str, Any] = {}
        """Weights of tenants; 1 for others."""
        self._kept: dict[Hashable, _Kept] = {}
        self._by_end: list[tuple[float, int, Hashable]] = []
        self._by_tenant: dict[str, list[tuple[float, int, int, Hashable]]] = {}
        self._counts: dict[str, int] = {}
        self._most = IndexedHeap()
        """Tenants; the one with the most chunks for its weight is first."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._kept

    def get_owner(self, chunk: Hashable) -> Hashable | None:
        """The job for which a chunk is kept; None if it is not kept."""
        known = self._kept.get(chunk)
        return None if known is None else known.owner

    def keep(
        self, chunk: Hashable, until_s: float, tenant: str, end: int, owner: Hashable | None = None
    ) -> list[Hashable]:
        """Keep a chunk. Returns the chunks that lose their place for it, maybe this one.

        A chunk keeps a later deadline that it has. `end`: where it ends in its sequence. `owner`: the job.
        """
        known = self._kept.get(chunk)
        if known is not None and known.until_s >= until_s:
            return []
        if known is not None:
            self.discard(chunk)
        self._number += 1
        self._kept[chunk] = _Kept(until_s, tenant, owner)
        self._count(tenant, 1)
        own = self._by_tenant.setdefault(tenant, [])
        heapq.heappush(own, (until_s, -end, self._number, chunk))
        heapq.heappush(self._by_end, (until_s, self._number, chunk))
        if len(own) > max(MIN_HEAP, 2 * self._counts[tenant]):
            own[:] = sorted({each[3]: each for each in own if self._is_current(each[3], each[0])}.values())
        if len(self._by_end) > max(MIN_HEAP, 2 * len(self._kept)):
            current = {each[2]: each for each in self._by_end if self._is_current(each[2], each[0])}
            self._by_end = sorted(current.values())
        lost = []
        while len(self._kept) > self.max_chunks:
            lost.append(self._pop_of(str(self._most.get_first())))
        return lost

    def discard(self, chunk: Hashable) -> None:
        """Stop keeping a chunk."""
        known = self._kept.pop(chunk, None)
        if known is not None:
            self._count(known.tenant, -1)

    def expire(self, now_s: float) -> Iterator[Hashable]:
        """Stop keeping the chunks whose deadline has passed, and return them."""
        while self._by_end and self._by_end[0][0] <= now_s:
            until_s, _, chunk = heapq.heappop(self._by_end)
            if self._is_current(chunk, until_s):
                self.discard(chunk)
                yield chunk

    def clear(self) -> None:
        """Stop keeping all chunks."""
        for each in (self._kept, self._by_end, self._by_tenant, self._counts):
            each.clear()
        self._most = IndexedHeap()

    def _pop_of(self, tenant: str) -> Hashable:
        own = self._by_tenant[tenant]
        while True:
            until_s, _, _, chunk = heapq.heappop(own)
            known = self._kept.get(chunk)
            if known is not None and (known.until_s, known.tenant) == (until_s, tenant):
                self.discard(chunk)
                return chunk

    def _is_current(self, chunk: Hashable, until_s: float) -> bool:
        known = self._kept.get(chunk)
        return known is not None and known.until_s == until_s

    def _count(self, tenant: str, change: int) -> None:
        number = self._counts[tenant] = self._counts.get(tenant, 0) + change
        if number:
            self._most.push(tenant, (-number / float(self.weights.get(tenant, 1.0)),))
        else:
            self._most.discard(tenant)
            del self._counts[tenant]
            self._by_tenant.pop(tenant, None)


@dataclass(frozen=True)
class Use:
    """One request's use of a tier, which determines the rank of its chunks."""

    key: Key = ()
    """The policy's key (`Policy.tier_key`)."""
    owner: str | None = None
    """The request's job; None if it belongs to none."""
    tenant: str = ""
    """The tenant of the job; empty if there is none."""
    wished: tuple[tuple[float, float], ...] = ()
    """The client's wishes, each as (deadline in seconds, number of tokens)."""

    def get_kept_until_s(self, end: int) -> float:
        """The deadline until which a chunk that ends at token `end` is kept; 0 without a wish for it."""
        return max((until_s for until_s, num_tokens in self.wished if end <= num_tokens), default=0.0)


def list_wished(wish: Wish | None, now_s: float) -> tuple[tuple[float, float], ...]:
    """The spans of a wish, as in `Use.wished`."""
    return () if wish is None else tuple((now_s + span.keep_s, span.extent) for span in wish.spans)


class Room(NamedTuple):
    """The chunks that a store may add, and those that were evicted for it."""

    new: list[Hashable]
    evicted: list[Hashable]
    num_refused: int
    """Chunks that were not added, because everything that could be evicted for them ranks higher."""


class HeldChanges:
    """The change in each owner's number of chunks since the last `take`."""

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, int] = {}

    def count(self, owner: Hashable | None, change: int) -> None:
        """An owner's number of chunks changed by `change`. An owner of None is not counted."""
        if owner is not None:
            self._by_owner[owner] = self._by_owner.get(owner, 0) + change

    def take(self) -> dict[Hashable, int]:
        """The changes since the last call."""
        changes, self._by_owner = self._by_owner, {}
        return changes


Rank = tuple[Key, int, int] | tuple[Key, int, int, int]
"""The smallest rank is evicted first: the policy's key, the number of the use, the negative index in the
sequence, and with several layer groups the group's index."""


@dataclass(slots=True)
class _Chunk:
    before: Hashable | None
    """The chunk before this one in its sequence."""
    needs_before: bool
    """Whether this chunk is useless without the one before it."""
    use: tuple[Key, int]
    """The first two parts of its rank, which it shares with the other chunks of its last use."""
    place: tuple[int, ...]
    """The other parts."""
    owner: Hashable | None
    num_pins: int = 0

    @property
    def rank(self) -> Rank:
        """See `Rank`."""
        (key, use), place = self.use, self.place
        return (key, use, place[0]) if len(place) == 1 else (key, use, place[0], place[1])


_Entry = tuple[bool, tuple[Key, int], tuple[int, ...], int, Hashable]
"""A chunk that may be evicted: whether it is kept, its rank in two parts, a serial number, and the chunk."""


class TierOrder:
    """The chunks of a tier, in order of eviction.

    The turn that used a chunk last determines its rank: the policy's key, then recency. A chunk is evicted
    only after all chunks that continue it, whatever their ranks. So a tier always has the first chunks of a
    sequence, without gaps. If all keys are equal, the order is least recently used first.

        A ── B ── C        C and D are evicted before B, and A last
              └── D

    Until its deadline, a chunk with a client's wish (`keep`) is evicted after all chunks without one. Then it
    is evicted like any other.

    Every operation takes O(log n) time per chunk. In layer groups with sliding windows, chunks do not need
    the ones before them. They are put with `needs_before=False`: then only the rank counts, which puts tails
    first.
    """

    def __init__(self) -> None:
        self.changes = HeldChanges()
        """Changes in owners' numbers of chunks."""
        self._chunks: dict[Hashable, _Chunk] = {}
        self._num_behind: dict[Hashable, int] = {}
        self._tails: dict[Hashable, Hashable] = {}
        self._heap: list[_Entry] = []
        """Evictable chunks: those that are not kept first, then by rank."""
        self.kept = KeptChunks()
        self._num_uses = 0
        self._num_pushed = 0

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._chunks)

    def begin_use(self) -> int:
        """The number of a new use, higher than all before it."""
        self._num_uses += 1
        return self._num_uses

    def put(
        self,
        chunk: Hashable,
        before: Hashable | None,
        rank: Rank,
        *,
        owner: Hashable | None = None,
        needs_before: bool = True,
        num_pins: int = 0,
    ) -> None:
        """Add a chunk, or give it a new rank.

        `owner`: the job that used it last. All keys of one tier must be comparable.
        """
        if chunk not in self._chunks:
            self._chunks[chunk] = _Chunk(before, needs_before, rank[:2], rank[2:], owner, num_pins)
            self.changes.count(owner, 1)
            if before is not None and needs_before:
                self._num_behind[before] = self._num_behind.get(before, 0) + 1
        self.rank(chunk, rank, owner)

    def rank(self, chunk: Hashable, rank: Rank, owner: Hashable | None) -> None:
        """Give a present chunk a new rank and owner, as `put`."""
        known = self._chunks[chunk]
        known.use, known.place = rank[:2], rank[2:]
        if known.owner != owner:
            self._change_owner(chunk, known, owner)
        if owner is not None:
            self._tails[owner] = chunk
        if chunk not in self._num_behind:
            self._offer(chunk)

    def get_rank(self, chunk: Hashable) -> Rank:
        """The rank of a present chunk."""
        return self._chunks[chunk].rank

    def use(
        self,
        chunks: Sequence[Hashable],
        key: Key,
        owner: Hashable | None = None,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        """A turn used these chunks from number `first` to `end`; new ones are added.

        `chunks` follow each other from the turn's start. This is a faster way to `put` each of them: only the
        last one may be evicted now.
        """
        use, last = (key, self.begin_use()), len(chunks) if end is None else end
        known_chunks, num_behind = self._chunks, self._num_behind
        before = chunks[first - 1] if first else None
        num_more = 0
        for number in range(first, last):
            chunk = chunks[number]
            known = known_chunks.get(chunk)
            if known is None:
                known_chunks[chunk] = _Chunk(before, True, use, (-number,), owner)
                num_more += 1
                if before is not None:
                    num_behind[before] = num_behind.get(before, 0) + 1
            else:
                known.use = use
                if known.owner != owner:
                    self._change_owner(chunk, known, owner)
            before = chunk
        if num_more:
            self.changes.count(owner, num_more)
        if last > first:
            if owner is not None:
                self._tails[owner] = before
            if before not in num_behind:
                self._offer(before)

    def keep(self, chunk: Hashable, until_s: float, tenant: str, end: int) -> None:
        """Keep a present chunk: evict it last until `until_s`. `end`: its end in the sequence, in tokens."""
        owner = self._chunks[chunk].owner
        for changed in (chunk, *self.kept.keep(chunk, until_s, tenant, end, owner)):
            self._offer_again(changed)

    def expire(self, now_s: float) -> None:
        """Chunks whose deadline has passed are evicted like any others."""
        for chunk in self.kept.expire(now_s):
            self._offer_again(chunk)

    def pin(self, chunk: Hashable) -> None:
        """Do not evict this chunk, because it is being copied."""
        self._chunks[chunk].num_pins += 1

    def unpin(self, chunk: Hashable) -> None:
        """Undo one `pin`."""
        found = self._chunks[chunk]
        found.num_pins -= 1
        assert found.num_pins >= 0, f"{chunk!r} has no pin"
        self._offer(chunk)

    def remove(self, chunk: Hashable) -> None:
        """Remove a chunk, pinned or not. Chunks that continue it stay."""
        found = self._chunks.pop(chunk)
        self.changes.count(found.owner, -1)
        self.kept.discard(chunk)
        if found.owner is not None and self._tails.get(found.owner) == chunk:
            self._move_tail(found.owner, found.before)
        if self._leave(found) and found.before in self._chunks:
            self._offer(found.before)

    def make_room(
        self, chunks: Sequence[Hashable], befores: Sequence[Hashable | None], key: Key, num_free: int
    ) -> Room:
        """Evict chunks to make room for a store of these chunks, as far as it may add them.

        `befores`: for each chunk, the chunk that it needs, or None. A chunk is added only after the one that
        it needs. Beyond `num_free`, it takes the place of a chunk whose key is not greater than `key`. So a
        tier never holds chunks that cannot be hit.
        """
        present = set[Hashable]()
        new: list[Hashable] = []
        spared: set[Hashable | None] = set(chunks)
        for chunk, before in zip(chunks, befores, strict=True):
            if chunk not in self._chunks:
                if not (before is None or before in present or before in self._chunks):
                    continue
                new.append(chunk)
                spared.add(before)
            present.add(chunk)
        gone = self._pop_firsts(len(new) - num_free, key, spared)
        num_new = min(len(new), num_free + len(gone))
        return Room(new[:num_new], gone, len(new) - num_new)

    def pop_first(self, up_to: Key | None = None, spared: Container[Hashable] = ()) -> Hashable | None:
        """Remove and return the chunk to evict first; None if none may be evicted.

        `up_to`: the greatest key of a chunk to evict. `spared`: chunks that stay.
        """
        return next(iter(self._pop_firsts(1, up_to, spared)), None)

    def try_pop(self, number: int, spared: Container[Hashable]) -> list[Hashable] | None:
        """Remove and return the first `number` chunks. If fewer may be evicted, return None and remove none.

        Kept chunks (`keep`) lose their deadlines, so call this only where wishes do not count.
        """
        removed: list[_Chunk] = []
        gone = self._pop_firsts(number, None, spared, removed)
        if len(gone) >= number:
            return gone
        for chunk, found in zip(reversed(gone), reversed(removed), strict=True):
            self.put(chunk, found.before, found.rank, owner=found.owner, needs_before=found.needs_before)
        return None

    def drop(self, owner: Hashable) -> list[Hashable]:
        """Remove and return the chunks that only this owner used, from the end of its sequence backwards.

        It stops at a chunk that another one continues, that another owner used later or wished to keep, or
        that is pinned. Chunks that were kept for this owner are removed too.
        """
        dropped: list[Hashable] = []
        chunk = self._tails.pop(owner, None)
        while chunk is not None:
            found = self._chunks[chunk]
            is_anothers = self.kept.get_owner(chunk) not in (None, owner)
            if found.num_pins or chunk in self._num_behind or is_anothers:
                self._tails[owner] = chunk
                break
            dropped.append(chunk)
            del self._chunks[chunk]
            self.changes.count(owner, -1)
            self.kept.discard(chunk)
            before = self._chunks.get(found.before) if found.before is not None else None
            is_tail = self._leave(found)
            if before is not None and before.owner == owner:
                chunk = found.before
                continue
            chunk = None
            if is_tail and before is not None:
                self._offer(found.before)
        return dropped

    def forget_keys(self) -> None:
        """Rank present chunks only by recency, because another policy's keys will follow."""
        self._heap.clear()
        for chunk, found in self._chunks.items():
            found.use = ((), found.use[1])
            self._offer(chunk)

    def clear(self) -> None:
        """Forget everything."""
        for found in self._chunks.values():
            self.changes.count(found.owner, -1)
        self._chunks.clear()
        self._num_behind.clear()
        self._tails.clear()
        self._heap.clear()
        self.kept.clear()

    # Internal.

    def _change_owner(self, chunk: Hashable, known: _Chunk, owner: Hashable | None) -> None:
        if self._tails.get(known.owner) == chunk:
            # Its last owner used no chunk after it, and the chunks before it have the new owner too.
            del self._tails[known.owner]
        self.changes.count(known.owner, -1)
        self.changes.count(owner, 1)
        known.owner = owner

    def _pop_firsts(
        self,
        number: int,
        up_to: Key | None,
        spared: Container[Hashable],
        removed: list[_Chunk] | None = None,
    ) -> list[Hashable]:
        """Remove and return the chunks to evict first, up to `number`. See `pop_first`.

        `removed`: a list that receives their records.
        """
        gone: list[Hashable] = []
        passed: list[_Entry] = []
        while len(gone) < number and self._heap:
            entry = self._heap[0]
            is_current = self._is_current(entry)
            if is_current and up_to is not None and entry[1][0] > up_to:
                break
            heapq.heappop(self._heap)
            chunk = entry[4]
            if is_current and chunk in spared:
                passed.append(entry)
            elif is_current:
                gone.append(chunk)
                if removed is not None:
                    removed.append(self._chunks[chunk])
                self.remove(chunk)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return gone

    def _leave(self, found: _Chunk) -> bool:
        """A chunk was removed. Return whether no chunk continues the one before it any more."""
        if found.before is None or not found.needs_before:
            return False
        num_behind = self._num_behind[found.before] - 1
        if num_behind:
            self._num_behind[found.before] = num_behind
        else:
            del self._num_behind[found.before]
        return not num_behind

    def _move_tail(self, owner: Hashable, before: Hashable | None) -> None:
        """An owner's last chunk is removed. The one before it becomes its last, if it has the same owner."""
        found = self._chunks.get(before) if before is not None else None
        if found is not None and found.owner == owner and before is not None:
            self._tails[owner] = before
        else:
            del self._tails[owner]

    def _offer(self, chunk: Hashable) -> None:
        """Add a chunk to the heap if it may be evicted."""
        found = self._chunks[chunk]
        if found.num_pins or chunk in self._num_behind:
            return
        if len(self._heap) > max(MIN_HEAP, 2 * len(self._chunks)):
            self._heap = list({entry[4]: entry for entry in self._heap if self._is_current(entry)}.values())
            heapq.heapify(self._heap)
        self._num_pushed += 1
        heapq.heappush(self._heap, (chunk in self.kept, found.use, found.place, self._num_pushed, chunk))

    def _offer_again(self, chunk: Hashable) -> None:
        """Update a chunk's place in the heap after `keep` or its deadline."""
        if chunk in self._chunks:
            self._offer(chunk)

    def _is_current(self, entry: _Entry) -> bool:
        is_kept, use, place, _, chunk = entry
        found = self._chunks.get(chunk)
        return (
            found is not None
            and found.use == use
            and found.place == place
            and is_kept == (chunk in self.kept)
            and not found.num_pins
            and chunk not in self._num_behind
        )
