"""The dispatcher's books: what is open on each engine, where each job is, which turns wait, and counts."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import IdleJobs
from tenuto.core.policy import Key
from tenuto.core.routing.types import EngineInfo, EngineMetrics, EngineSeen, Part, RoutedTurn
from tenuto.core.settings import setting


@dataclass(frozen=True)
class FleetLimits:
    """Bounds on what any router can make the dispatcher do."""

    max_held_s: float = setting(600.0, "longest time that a new job is held back, in seconds", minimum=0)
    max_held: int = setting(100_000, "most turns that are held back; further ones are sent", minimum=0)
    max_idle_jobs: int = setting(
        100_000, "jobs remembered between turns; of more, the one idle for longest is forgotten", minimum=1
    )


@dataclass
class DispatchStats:
    """Counts since the start."""

    num_sent: int = 0
    num_held: int = 0
    """Turns that waited for an engine before they were sent."""
    num_moves: int = 0
    """Turns that went to another engine than the job's last turn, though that one takes turns."""
    num_moved_tokens: int = 0
    """The contexts of those jobs."""
    num_copied_tokens: int = 0
    """The part of them that was copied."""
    num_resent: int = 0
    """Turns that were sent again because their engine failed."""


class Engines:
    """The engines that were told of. The view of one is replaced when something changes there: O(1)."""

    def __init__(self) -> None:
        self._all: dict[str, EngineSeen] = {}
        self._ready: dict[str, EngineSeen] = {}
        self.ready: Mapping[str, EngineSeen] = MappingProxyType(self._ready)
        """Those that take turns."""

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def join(self, info: EngineInfo) -> EngineSeen:
        """An engine takes turns from now on. One that drained is taken back with its open turns."""
        before = self._all.get(info.name)
        seen = EngineSeen(info) if before is None else dataclasses.replace(before, info=info)
        self._all[info.name] = self._ready[info.name] = seen
        return seen

    def drain(self, name: str) -> None:
        """An engine takes no more turns; those that are open there go on."""
        self._ready.pop(name, None)

    def remove(self, name: str) -> None:
        """An engine is gone."""
        self._all.pop(name, None)
        self._ready.pop(name, None)

    def report(self, name: str, metrics: EngineMetrics) -> None:
        """Its metrics were read."""
        if name in self._all:
            self._set(dataclasses.replace(self._all[name], metrics=metrics))

    def add(self, name: str, num_turns: int, num_unstarted: int, num_unstarted_tokens: int) -> None:
        """Change the counts of an engine's open turns, if it is still there."""
        old = self._all.get(name)
        if old is None:
            return
        self._set(
            EngineSeen(
                old.info,
                old.num_open + num_turns,
                old.num_unstarted + num_unstarted,
                old.num_unstarted_tokens + num_unstarted_tokens,
                old.metrics,
            )
        )

    def _set(self, seen: EngineSeen) -> None:
        self._all[seen.name] = seen
        if seen.name in self._ready:
            self._ready[seen.name] = seen


@dataclass(slots=True)
class JobBook:
    """What is remembered of a job."""

    tenant: str | None
    engine: str | None = None
    num_turns: int = 0
    num_context_tokens: int = 0
    num_open: int = 0
    content: int | None = None
    """The mark of its last prompt in `Contents`."""


class Jobs:
    """The jobs that are remembered. Of too many idle ones, the one that is idle longest is forgotten."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._jobs: dict[str, JobBook] = {}
        self._idle = IdleJobs()

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: str) -> JobBook | None:
        """The job; None if it is not known."""
        return self._jobs.get(job_id)

    def open_turn(self, job_id: str, tenant: str | None) -> JobBook:
        """A turn of a job came."""
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = JobBook(tenant)
        self._idle.discard(job_id)
        job.num_turns += 1
        job.num_open += 1
        return job

    def close_turn(self, job_id: str) -> str | None:
        """A turn of a job ended. Returns the id of a job to forget, if there are too many."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        job.num_open -= 1
        if job.num_open == 0:
            self._idle.add(job_id, job.tenant)
        return self._idle.get_first_to_forget() if len(self._idle) > self._max_idle else None

    def leave(self, engine: str) -> None:
        """An engine died, and its cache with it. If it comes back under its name, no job is there. O(n)."""
        for job in self._jobs.values():
            if job.engine == engine:
                job.engine = None

    def forget(self, job_id: str) -> JobBook | None:
        """Forget a job. Returns what was known of it."""
        self._idle.discard(job_id)
        return self._jobs.pop(job_id, None)


class Contents:
    """Recognises jobs without an id: a prompt that goes on where a job's last prompt ended is its next."""

    def __init__(self) -> None:
        self._jobs: dict[int, OrderedDict[str, None]] = {}

    def find(self, parts: Sequence[Part], tenant: str | None) -> str | None:
        """The job that a prompt continues; of several, the latest. None if it continues none."""
        mark, found = hash(tenant), None
        for part in parts:
            if mark in self._jobs:
                found = mark
            mark = hash((mark, part))
        return None if found is None else next(reversed(self._jobs[found]))

    def remember(self, job_id: str, job: JobBook, parts: Sequence[Part]) -> None:
        """A job's latest prompt."""
        self.forget(job_id, job)
        mark = hash(job.tenant)
        for part in parts:
            mark = hash((mark, part))
        job.content = mark
        self._jobs.setdefault(mark, OrderedDict())[job_id] = None

    def forget(self, job_id: str, job: JobBook) -> None:
        """Forget a job's latest prompt."""
        if job.content is None:
            return
        jobs = self._jobs[job.content]
        del jobs[job_id]
        if not jobs:
            del self._jobs[job.content]
        job.content = None


class HeldTurns:
    """Turns that wait for an engine, in order: the tenant with the fewest open turns is first, then the key.

    So a tenant that sends many jobs waits behind its own. Every change takes O(log n) time.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, RoutedTurn] = OrderedDict()
        self._by_tenant: dict[str, IndexedHeap] = {}
        self._tenants = IndexedHeap()
        self._num_open: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._turns

    def count_open(self, tenant: str | None, change: int) -> None:
        """Turns of a tenant were sent to an engine, or ended there."""
        name = tenant or ""
        num_open = self._num_open.get(name, 0) + change
        self._num_open[name] = num_open
        if num_open <= 0:
            del self._num_open[name]
        if name in self._tenants:
            self._tenants.push(name, (num_open,))

    def add(self, turn: RoutedTurn, key: Key) -> None:
        """Hold a turn back, or change its key."""
        name = turn.tenant or ""
        self._turns[turn.turn_id] = turn
        self._by_tenant.setdefault(name, IndexedHeap()).push(turn.turn_id, key)
        self._tenants.push(name, (self._num_open.get(name, 0),))

    def get_first(self) -> RoutedTurn | None:
        """The turn that is asked about first; None if none is held."""
        name = self._tenants.get_first()
        first = None if name is None else self._by_tenant[name].get_first()
        return None if first is None else self._turns[first]

    def get_oldest(self) -> RoutedTurn | None:
        """The turn that was held first of all; None if none is held."""
        return next(iter(self._turns.values()), None)

    def remove(self, turn_id: str) -> RoutedTurn | None:
        """Hold a turn no more. None if it was not held."""
        turn = self._turns.pop(turn_id, None)
        if turn is not None:
            name = turn.tenant or ""
            own = self._by_tenant[name]
            own.discard(turn_id)
            if not own:
                del self._by_tenant[name]
                self._tenants.discard(name)
        return turn
