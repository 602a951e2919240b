"""When each turn is to be sent: the agenda.

An agenda is told what happened and when, and answers with the turns that now have a time:

    start() ──► first turns    on_sent / on_finished / on_returned(turn, now) ──► the turns that waited for it
                               on_failed(turn, now)                           ──► drops them instead

A turn's time follows from the plan and the events alone, never from when the client got round to it: what the
client is late is seen in its records, and not made up for. No I/O and no clock here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tenuto.core.errors import ConfigError
from tenuto.workload.schema import Event, Job, TurnSpec, Workload, find_roots

USER_GAP_S = 0.01
"""Between the beginnings of two users: all at one moment, the client would measure its own crowd."""


class Due(NamedTuple):
    """A turn, and the time at which it is to be sent."""

    job: Job
    turn: int
    """Index of the turn in its job, from 0."""
    at_s: float


class _Turn(NamedTuple):
    job_id: str
    number: int


_Event = Event | Literal["returned"]
"""A turn's tool returned, where tools are run and not slept."""


class Agenda:
    """When each turn of a workload is due. Times are the workload's own, in seconds.

    With `users`, that many users each work on one job at a time; whoever's job has ended, with all the jobs
    it started, begins the next one in the workload's order at that moment. Raises ConfigError if jobs of
    different users would wait for each other. With `runs_commands`, a turn that has a command is not followed
    before `on_returned`.
    """

    def __init__(self, workload: Workload, users: int | None = None, *, runs_commands: bool = False) -> None:
        self._loop = workload.loop
        self._runs_commands = runs_commands
        self._jobs = {job.job_id: job for job in workload.jobs}
        self._roots = find_roots(workload.name, workload.jobs)
        self._users = users
        self._families: dict[str, list[Job]] = {}
        for job in workload.jobs:
            self._families.setdefault(self._roots[job.job_id], []).append(job)
        self._num_open = {
            root: sum(len(job.turns) for job in family) for root, family in self._families.items()
        }
        self._next_families = iter(self._families)
        self._ready_s: dict[_Turn, float] = {}
        self._num_awaited: dict[_Turn, int] = {}
        self._waiting: dict[tuple[_Turn, _Event], list[tuple[_Turn, float]]] = {}
        if self._loop == "closed":
            for job in workload.jobs:
                self._add_events(job)

    def start(self) -> list[Due]:
        """The turns whose time is known from the start; called once."""
        if self._loop == "open":
            return [
                Due(job, index, job.arrival_s if turn.at_s is None else turn.at_s)
                for job in self._jobs.values()
                for index, turn in enumerate(job.turns)
            ]
        if self._users is None:
            return [due for root in self._families for due in self._begin(root, shift_s=0.0)]
        return [due for user in range(self._users) for due in self._begin_next(user * USER_GAP_S)]

    def on_sent(self, job_id: str, turn: int, now_s: float) -> list[Due]:
        """A turn was sent for the first time."""
        return list(self._fire(_Turn(job_id, turn), "sent", now_s))

    def on_finished(self, job_id: str, turn: int, now_s: float) -> list[Due]:
        """A turn's last token came."""
        due = list(self._fire(_Turn(job_id, turn), "finished", now_s))
        return due + self._close(job_id, now_s)

    def on_returned(self, job_id: str, turn: int, now_s: float) -> list[Due]:
        """The command that a turn called ended."""
        return list(self._fire(_Turn(job_id, turn), "returned", now_s))

    def on_failed(self, job_id: str, turn: int, now_s: float) -> list[Due]:
        """A turn was given up: all turns that wait for it, however indirectly, are dropped."""
        due: list[Due] = []
        lost = deque([_Turn(job_id, turn)])
        while lost:
            one = lost.popleft()
            due += self._close(one.job_id, now_s)
            events: tuple[_Event, ...] = ("sent", "finished", "returned")
            for event in events:
                for waiting, _ in self._waiting.pop((one, event), []):
                    if self._num_awaited.pop(waiting, None) is not None:
                        lost.append(waiting)
        return due

    def get_root(self, job_id: str) -> str:
        """The job that this job's chain of parents begins with."""
        return self._roots[job_id]

    def has_ended(self, root: str) -> bool:
        """Whether that job's turns, and those of all it started, are finished, failed or dropped."""
        return root not in self._num_open

    def is_over(self) -> bool:
        """Whether this holds of all jobs."""
        return not self._num_open

    def _add_events(self, job: Job) -> None:
        for index, turn in enumerate(job.turns):
            one = _Turn(job.job_id, index)
            for event in turn.after:
                if self._users is not None and self._roots[event.job_id] != self._roots[job.job_id]:
                    raise ConfigError(
                        f"no --users: job {job.job_id!r} waits for {event.job_id!r}, which it may never meet"
                    )
                self._await(one, _Turn(event.job_id, event.turn), event.event, event.delay_s)
            if index:
                self._await(one, _Turn(job.job_id, index - 1), *self._get_return(job.turns[index - 1]))

    def _get_return(self, turn: TurnSpec) -> tuple[_Event, float]:
        """What a job's next turn waits for, and for how long after it."""
        if self._runs_commands and turn.command is not None:
            return "returned", 0.0
        return "finished", turn.tool_s

    def _await(self, one: _Turn, other: _Turn, event: _Event, delay_s: float) -> None:
        self._waiting.setdefault((other, event), []).append((one, delay_s))
        self._num_awaited[one] = self._num_awaited.get(one, 0) + 1

    def _begin(self, root: str, shift_s: float) -> Iterator[Due]:
        for job in self._families[root]:
            if not job.turns[0].after:
                yield Due(job, 0, job.arrival_s + shift_s)

    def _begin_next(self, now_s: float) -> list[Due]:
        root = next(self._next_families, None)
        return [] if root is None else list(self._begin(root, now_s - self._jobs[root].arrival_s))

    def _fire(self, turn: _Turn, event: _Event, now_s: float) -> Iterator[Due]:
        for waiting, delay_s in self._waiting.pop((turn, event), []):
            if waiting not in self._num_awaited:  # dropped meanwhile
                continue
            self._ready_s[waiting] = max(self._ready_s.get(waiting, 0.0), now_s + delay_s)
            self._num_awaited[waiting] -= 1
            if self._num_awaited[waiting] == 0:
                del self._num_awaited[waiting]
                yield Due(self._jobs[waiting.job_id], waiting.number, self._ready_s.pop(waiting))

    def _close(self, job_id: str, now_s: float) -> list[Due]:
        root = self._roots[job_id]
        self._num_open[root] -= 1
        if self._num_open[root]:
            return []
        del self._num_open[root]
        return self._begin_next(now_s) if self._users is not None else []
