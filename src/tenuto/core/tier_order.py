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


MAX_EXPIRED = 256
"""Most chunks that one call stops keeping, because a client can give many the same deadline."""


class KeptChunks:
    """The chunks of a tier that are kept, each until its deadline. They are never all of the tier's chunks.

    A chunk that several tenants wish counts for each of them, so none can take it from another one's part. If
    there are too many, the tenant that has the most for its weight loses the chunk with the earliest
    deadline, the last one in its sequence first. A change takes O(log n) amortised time.
    """

    def __init__(self) -> None:
        self.max_chunks = 0
        """Most chunks that may be kept."""
        self.weights: Mapping[str, Any] = {}
        """Weights of tenants; 1 for others."""
        self._kept: dict[Hashable, dict[str, str | None]] = {}
        """By chunk and tenant: the job whose client wished it; None if several jobs of the tenant did."""
        self._by_owner: dict[str, dict[Hashable, str]] = {}
        """By job: the chunks that no other job of its tenant wished, each with the tenant."""
        self._by_end: IndexedHeap[tuple[Hashable, str]] = IndexedHeap()
        """By deadline: chunks and tenants. A chunk counts once for each tenant that wishes it."""
        self._by_tenant: dict[str, IndexedHeap[Hashable]] = {}
        """Each tenant's chunks, in the order in which it loses them."""
        self._most: IndexedHeap[str] = IndexedHeap()
        """Tenants; the one with the most chunks for its weight is first."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, chunk: Hashable) -> bool:
        return chunk in self._kept

    def keep(
        self, chunk: Hashable, until_s: float, tenant: str, end: int, owner: str | None = None
    ) -> list[Hashable]:
        """Keep a chunk. Returns the chunks that are kept no more because of it, maybe this one.

        A chunk keeps a later deadline that it has. `end`: where it ends in its sequence. `owner`: the job
        whose client wishes it.
        """
        owners = self._kept.setdefault(chunk, {})
        is_known = tenant in owners
        if is_known and owners[tenant] != owner:
            self._forget_owner(chunk, owners[tenant])
            owner = None
        owners[tenant] = owner
        if is_known and float(self._by_end.get_key((chunk, tenant))[0]) >= until_s:
            return []
        self._number += 1
        if owner is not None:
            self._by_owner.setdefault(owner, {})[chunk] = tenant
        self._by_tenant.setdefault(tenant, IndexedHeap()).push(chunk, (until_s, -end, self._number))
        self._by_end.push((chunk, tenant), (until_s, self._number))
        self._rank(tenant)
        lost: list[Hashable] = []
        for _ in range(MAX_EXPIRED):  # there are more if the limit became lower
            most = self._most.get_first()
            if len(self._by_end) <= self.max_chunks or most is None:
                break
            gone = self._by_tenant[most].get_first()
            self._remove(gone, most)
            lost += [] if gone in self._kept else [gone]
        return lost

    def discard(self, chunk: Hashable) -> None:
        """Stop keeping a chunk."""
        for tenant in list(self._kept.get(chunk, ())):
            self._remove(chunk, tenant)

    def end_job(self, job_id: str) -> None:
        """A client ended its job: stop keeping what it wished, unless other jobs wished it too."""
        for chunk, tenant in list(self._by_owner.get(job_id, {}).items()):
            self._remove(chunk, tenant)

    def expire(self, now_s: float) -> Iterator[Hashable]:
        """Stop keeping chunks whose deadline has passed, or that are too many, and return them.

        At most `MAX_EXPIRED`: the next calls find the others.
        """
        for _ in range(MAX_EXPIRED):
            first = self._by_end.get_first()
            if first is None:
                return
            chunk, tenant = first
            if float(self._by_end.get_key(first)[0]) > now_s:
                most = self._most.get_first()
                if len(self._by_end) <= self.max_chunks or most is None:
                    return
                chunk, tenant = self._by_tenant[most].get_first(), most
            self._remove(chunk, tenant)
            if chunk not in self._kept:
                yield chunk

    def clear(self) -> None:
        """Stop keeping all chunks."""
        for chunk in list(self._kept):
            self.discard(chunk)

    def _remove(self, chunk: Hashable, tenant: str) -> None:
        """A tenant's wish for a chunk is over."""
        owners = self._kept[chunk]
        self._forget_owner(chunk, owners.pop(tenant))
        if not owners:
            del self._kept[chunk]
        self._by_end.discard((chunk, tenant))
        self._by_tenant[tenant].discard(chunk)
        self._rank(tenant)

    def _forget_owner(self, chunk: Hashable, owner: str | None) -> None:
        if owner is None or (own := self._by_owner.get(owner)) is None:
            return
        own.pop(chunk, None)
        if not own:
            del self._by_owner[owner]

    def _rank(self, tenant: str) -> None:
        """A tenant's number of chunks has changed."""
        if number := len(self._by_tenant[tenant]):
            self._most.push(tenant, (-number / float(self.weights.get(tenant, 1.0)),))
        else:
            self._most.discard(tenant)
            del self._by_tenant[tenant]


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
    since_s: float = 0.0
    """When it wished, in seconds."""

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


Rank = tuple[Key, int, *tuple[int, ...]]
"""The smallest rank is evicted first: the policy's key, the number of the use, the negative index in the
sequence, and with several layer groups the group's index."""


@dataclass(slots=True, eq=False)
class _Chunk:
    chunk: Hashable
    before: Hashable | None = None
    """The chunk before this one in its sequence."""
    needed: _Chunk | None = None
    """The record of `before`, if this chunk is useless without it. It may be absent (`TierOrder._absent`)."""
    use: tuple[Key, int] = ((), 0)
    """The first two parts of its rank, which it shares with the other chunks of its last use."""
    place: tuple[int, ...] = ()
    """The other parts."""
    owner: Hashable | None = None
    num_pins: int = 0
    num_behind: int = 0
    """The chunks that need this one."""
    is_kept: bool = False
    is_shared: bool = False
    """Whether more than one owner used it since it was added."""
    is_present: bool = True

    @property
    def rank(self) -> Rank:
        """See `Rank`."""
        key, use = self.use
        return (key, use, *self.place)


_Entry = tuple[bool, tuple[Key, int], tuple[int, ...], int, _Chunk]
"""A chunk that may be evicted: whether it is kept, its rank in two parts, a serial number, and its record."""


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
        self._absent: dict[Hashable, _Chunk] = {}
        """Chunks that present ones need, although they were removed or not put yet."""
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
            self._add(chunk, before, owner, num_pins, needs_before=needs_before)
            self.changes.count(owner, 1)
        self.rank(chunk, rank, owner)

    def rank(self, chunk: Hashable, rank: Rank, owner: Hashable | None) -> None:
        """Give a present chunk a new rank and owner, as `put`."""
        known = self._chunks[chunk]
        known.use, known.place = rank[:2], rank[2:]
        if known.owner != owner:
            self._change_owner(known, owner)
        if owner is not None:
            self._tails[owner] = chunk
        self._offer(known)

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

        `chunks` follow each other from the turn's start, and those that are present have no gap before them.
        This is a faster way to `put` each of them: only the last one may be evicted now.
        """
        use, last = (key, self.begin_use()), len(chunks) if end is None else end
        if last <= first:
            return
        num_known = last
        while num_known > first and chunks[num_known - 1] not in self._chunks:
            num_known -= 1
        known = self._chunks.get(chunks[num_known - 1]) if num_known > first else None
        for _ in range(first, num_known):
            assert known is not None
            known.use = use
            if known.owner != owner:
                self._change_owner(known, owner)
            known = known.needed
        for number in range(num_known, last):
            before = chunks[number - 1] if number else None
            added = self._add(chunks[number], before, owner)
            added.use, added.place = use, (-number,)
        if last > num_known:
            self.changes.count(owner, last - num_known)
        if owner is not None:
            self._tails[owner] = chunks[last - 1]
        self._offer(self._chunks[chunks[last - 1]])

    def keep(self, chunk: Hashable, until_s: float, tenant: str, end: int) -> None:
        """Keep a present chunk: evict it last until `until_s`. `end`: its end in the sequence, in tokens."""
        kept = self._chunks[chunk]
        lost = self.kept.keep(chunk, until_s, tenant, end)
        kept.is_kept = True
        for each in lost:
            self._chunks[each].is_kept = False
        for changed in (kept, *map(self._chunks.__getitem__, lost)):
            self._offer(changed)

    def expire(self, now_s: float) -> None:
        """Chunks whose deadline has passed are evicted like any others."""
        for chunk in self.kept.expire(now_s):
            found = self._chunks[chunk]
            found.is_kept = False
            self._offer(found)

    def pin(self, chunk: Hashable) -> None:
        """Do not evict this chunk, because it is being copied."""
        self._chunks[chunk].num_pins += 1

    def unpin(self, chunk: Hashable) -> None:
        """Undo one `pin`."""
        found = self._chunks[chunk]
        found.num_pins -= 1
        assert found.num_pins >= 0, f"{chunk!r} has no pin"
        self._offer(found)

    def remove(self, chunk: Hashable) -> None:
        """Remove a chunk, pinned or not. Chunks that continue it stay."""
        needed = self._take_out(self._chunks[chunk])
        if needed is not None:
            self._offer(needed)

    def make_room(
        self,
        chunks: Sequence[Hashable],
        befores: Sequence[Hashable | None],
        key: Key,
        num_free: int,
        stay: Container[Hashable] = (),
    ) -> Room:
        """Evict chunks to make room for a store of these chunks, as far as it may add them.

        `befores`: for each chunk, the chunk that it needs, or None. A chunk is added only after the one that
        it needs. Beyond `num_free`, it takes the place of a chunk whose key is not greater than `key`. So a
        tier never holds chunks that cannot be hit. `stay`: chunks that are not evicted.
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
        gone = [each.chunk for each in self._pop_firsts(len(new) - num_free, key, spared, stay)]
        num_new = min(len(new), num_free + len(gone))
        return Room(new[:num_new], gone, len(new) - num_new)

    def pop_firsts(
        self, number: int, up_to: Key | None = None, spared: Container[Hashable] = ()
    ) -> list[Hashable]:
        """Remove and return the chunks to evict first: `number` of them, or fewer if no more may be evicted.

        `up_to`: the greatest key of a chunk to evict. `spared`: chunks that stay.
        """
        return [each.chunk for each in self._pop_firsts(number, up_to, spared)]

    def try_pop(self, number: int, spared: Container[Hashable]) -> list[Hashable] | None:
        """Remove and return the first `number` chunks. If fewer may be evicted, return None and remove none.

        Kept chunks (`keep`) lose their deadlines, so call this only where wishes do not count.
        """
        gone = self._pop_firsts(number, None, spared)
        if len(gone) >= number:
            return [each.chunk for each in gone]
        for each in reversed(gone):
            needs_before = each.needed is not None
            self.put(each.chunk, each.before, each.rank, owner=each.owner, needs_before=needs_before)
        return None

    def drop(self, owner: Hashable) -> list[Hashable]:
        """Remove and return the chunks that only this owner used, from the end of its sequence backwards.

        It stops at a chunk that another one continues, that another owner used too, or that is pinned. Chunks
        that this owner wished to keep are removed too.
        """
        dropped: list[Hashable] = []
        while (last := self._tails.get(owner)) is not None:
            found = self._chunks[last]
            if found.num_pins or found.num_behind or found.is_shared:
                self._offer(found)
                break
            dropped.append(last)
            needed = self._take_out(found)
            if needed is not None and needed.owner != owner:
                self._offer(needed)
        return dropped

    def forget_keys(self) -> None:
        """Rank present chunks only by recency, because another policy's keys will follow."""
        self._heap.clear()
        for found in self._chunks.values():
            found.use = ((), found.use[1])
            self._offer(found)

    def clear(self) -> None:
        """Forget everything."""
        for found in self._chunks.values():
            self.changes.count(found.owner, -1)
        self._chunks.clear()
        self._absent.clear()
        self._tails.clear()
        self._heap.clear()
        self.kept.clear()

    # Internal.

    def _add(
        self,
        chunk: Hashable,
        before: Hashable | None,
        owner: Hashable | None,
        num_pins: int = 0,
        *,
        needs_before: bool = True,
    ) -> _Chunk:
        """Add a chunk that is not present. It has no rank yet, and its owner's change is not counted."""
        added = self._absent.pop(chunk, None) or _Chunk(chunk)
        added.before, added.owner, added.num_pins, added.is_present = before, owner, num_pins, True
        added.needed, added.is_shared = None, False
        if before is not None and needs_before:
            added.needed = self._chunks.get(before) or self._absent.get(before)
            if added.needed is None:
                added.needed = self._absent[before] = _Chunk(before, is_present=False)
            added.needed.num_behind += 1
        self._chunks[chunk] = added
        return added

    def _leave(self, found: _Chunk) -> None:
        del self._chunks[found.chunk]
        self.changes.count(found.owner, -1)
        if found.is_kept:
            self.kept.discard(found.chunk)
        found.is_present = found.is_kept = False
        if found.num_behind:
            self._absent[found.chunk] = found
        if (needed := found.needed) is not None:
            needed.num_behind -= 1
            if not (needed.num_behind or needed.is_present):
                del self._absent[needed.chunk]

    def _get_before(self, found: _Chunk) -> _Chunk | None:
        """The record of the chunk before one that is or was present; None if there is none present."""
        if found.needed is None:
            return None if found.before is None else self._chunks.get(found.before)
        return found.needed if found.needed.is_present else None

    def _change_owner(self, known: _Chunk, owner: Hashable | None) -> None:
        if self._tails.get(known.owner) == known.chunk:
            # Its last owner used no chunk after it, and the chunks before it have the new owner too.
            del self._tails[known.owner]
        self.changes.count(known.owner, -1)
        self.changes.count(owner, 1)
        known.owner, known.is_shared = owner, True

    def _pop_firsts(
        self,
        number: int,
        up_to: Key | None,
        spared: Container[Hashable],
        stay: Container[Hashable] = (),
    ) -> list[_Chunk]:
        """Remove the chunks to evict first, up to `number`, and return their records. See `pop_firsts`."""
        heap, gone = self._heap, list[_Chunk]()
        passed: list[_Entry] = []
        # The chunk that the last one needed. It often goes next, and then never enters the heap.
        freed: _Entry | None = None
        while len(gone) < number and (heap or freed is not None):
            entry = heapq.heappop(heap) if freed is None else heapq.heappushpop(heap, freed)
            found, freed = entry[4], None
            if not _is_current(entry):
                continue
            if up_to is not None and entry[1][0] > up_to:
                passed.append(entry)
                break
            if found.chunk in spared or found.chunk in stay:
                passed.append(entry)
                continue
            gone.append(found)
            needed = self._take_out(found)
            if needed is not None and not (needed.num_pins or needed.num_behind):
                freed = self._make_entry(needed)
        if freed is not None:
            passed.append(freed)
        for entry in passed:
            heapq.heappush(heap, entry)
        return gone

    def _take_out(self, found: _Chunk) -> _Chunk | None:
        """Remove a chunk. Returns the one that it needed, if that is present: it may be evicted now."""
        self._leave(found)
        if found.owner is not None and self._tails.get(found.owner) == found.chunk:
            # The one before it becomes its owner's last, if it has the same owner.
            before = self._get_before(found)
            if before is not None and before.owner == found.owner:
                self._tails[found.owner] = before.chunk
            else:
                del self._tails[found.owner]
        return found.needed if found.needed is not None and found.needed.is_present else None

    def _offer(self, found: _Chunk) -> None:
        """Add a present chunk to the heap if it may be evicted."""
        if found.num_pins or found.num_behind:
            return
        if len(self._heap) > MIN_HEAP and len(self._heap) > 2 * len(self._chunks):
            self._heap = list({entry[4]: entry for entry in self._heap if _is_current(entry)}.values())
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._make_entry(found))

    def _make_entry(self, found: _Chunk) -> _Entry:
        self._num_pushed += 1
        return found.is_kept, found.use, found.place, self._num_pushed, found


def _is_current(entry: _Entry) -> bool:
    is_kept, use, place, _, found = entry
    return (
        found.is_present
        and found.use == use
        and found.place == place
        and is_kept == found.is_kept
        and not found.num_pins
        and not found.num_behind
    )
