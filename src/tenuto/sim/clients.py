"""The clients of the simulated engine: when each turn of each job is sent, and what is said about it.

Jobs are plain data of the shape below; `tenuto.workload.schema` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from tenuto.sim.kv.segments import Span

Loop = Literal["closed", "open"]
Event = Literal["sent", "finished"]


class After(Protocol):
    """An event of another turn that a turn waits for."""

    @property
    def job_id(self) -> str:
        """The other turn's job."""

    @property
    def turn(self) -> int:
        """The other turn's index in its job, from 0."""

    @property
    def event(self) -> Event:
        """What has to happen to it."""

    @property
    def delay_s(self) -> float:
        """Seconds from then on."""


class Turn(Protocol):
    """One request of a job."""

    @property
    def prompt(self) -> Sequence[Span]:
        """Its prompt, as the beginnings of named texts."""

    @property
    def output(self) -> Span:
        """What it generates."""

    @property
    def tool(self) -> str | None:
        """The tool its output calls."""

    @property
    def command(self) -> str | None:
        """That call's command line or arguments."""

    @property
    def tool_s(self) -> float:
        """Seconds from its last token until the job's next turn is sent."""

    @property
    def at_s(self) -> float | None:
        """When it is sent in an open loop; of a job's first turn the job's arrival says so."""

    @property
    def after(self) -> Sequence[After]:
        """What else it waits for in a closed loop."""


class Job(Protocol):
    """One agent task."""

    @property
    def job_id(self) -> str:
        """Its name; no other job has it."""

    @property
    def arrival_s(self) -> float:
        """When its first turn is sent, unless that waits for another job's."""

    @property
    def turns(self) -> Sequence[Turn]:
        """Its requests."""

    @property
    def tenant(self) -> str | None:
        """Whose it is."""


class Send(NamedTuple):
    """A turn and when it is sent."""

    at_s: float
    job: Job
    turn: int
    """Its index in the job, from 0."""


@dataclass(slots=True)
class _Pending:
    job: Job
    index: int
    at_s: float
    num_awaited: int


class Clients:
    """Sends every turn at its time.

    Closed loop: `tool_s` after the job's previous turn has finished, and not before the last of its `after`
    events; a first turn at its job's arrival, or after its `after` events alone. Open loop: at its recorded
    time, whatever has finished.
    """

    def __init__(self, jobs: Sequence[Job], loop: Loop = "closed") -> None:
        self._is_open = loop == "open"
        self._waiting: dict[tuple[str, int, Event], list[tuple[_Pending, float]]] = {}
        self.first_sends = [
            Send(pending.at_s, job, pending.index) for job in jobs for pending in self._enter(job)
        ]
        """The turns that wait for nothing."""

    def tell(self, job: Job, index: int, event: Event, now_s: float) -> Iterator[Send]:
        """A turn was sent or finished; returns the turns that waited for nothing else."""
        for pending, delay_s in self._waiting.pop((job.job_id, index, event), ()):
            pending.at_s = max(pending.at_s, now_s + delay_s)
            pending.num_awaited -= 1
            if pending.num_awaited == 0:
                yield Send(pending.at_s, pending.job, pending.index)

    def _enter(self, job: Job) -> Iterator[_Pending]:
        for index, turn in enumerate(job.turns):
            awaited: list[tuple[tuple[str, int, Event], float]] = []
            if not self._is_open:
                awaited += [((a.job_id, a.turn, a.event), a.delay_s) for a in turn.after]
                if index > 0:
                    awaited.append(((job.job_id, index - 1, "finished"), job.turns[index - 1].tool_s))
            at_s = job.arrival_s if index == 0 else turn.at_s if self._is_open else None
            pending = _Pending(job, index, 0.0 if awaited or at_s is None else at_s, len(awaited))
            for event, delay_s in awaited:
                self._waiting.setdefault(event, []).append((pending, delay_s))
            if not awaited:
                yield pending
