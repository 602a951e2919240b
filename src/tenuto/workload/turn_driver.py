"""When each turn of a workload is sent: one set of rules for the simulator and for the bench.

The driver is told what happened and when. It answers with the turns whose time is now known:

    start() ──────────────────────────────► the first turns
    on_sent / on_finished / on_returned ──► the turns that waited for this event alone
    on_failed ────────────────────────────► none: the turns that waited for this one are never sent

With `users`, the end of a user's job is also the beginning of the next one, if that one has arrived.

A turn's time follows from the workload and from the events alone. If the bench sends a turn late, its records
show the delay; later turns are not moved to make up for it. No I/O and no clock here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tenuto.core.errors import ConfigError
from tenuto.workload.schema import Event, Job, TurnSpec, Workload

USER_GAP_S = 0.01
"""Seconds between the first jobs of two users. If all began at once, the client would measure its own
burst."""


class Due(NamedTuple):
    """A turn, and when it is to be sent."""

    job: Job
    turn: int
    """Index of the turn in its job, from 0."""
    at_s: float
    """On the workload's clock, in seconds."""


class _Turn(NamedTuple):
    job_id: str
    number: int


_Event = Event | Literal["returned"]
"""`returned`: the turn's command ended. Only where commands really run, and are not replaced by a sleep."""


class TurnDriver:
    """Says when each turn is due. Times are in seconds on the workload's clock.

    `workload.schema` has the rules of a closed and of an open loop. These are added:

    - `users`: this many users have one job each. When a user's job and all jobs that it started have ended,
      the user begins the next job of the workload at that moment. `keeps_arrivals`: not before it arrives, so
      that jobs arrive at their rate, and at most `users` of them are under way.
    - `runs_commands`: after a turn with a command, the next turn waits until `on_returned` is called for it.

    Raises ConfigError if jobs of different users would wait for each other.
    """

    def __init__(
        self,
        workload: Workload,
        users: int | None = None,
        *,
        keeps_arrivals: bool = False,
        runs_commands: bool = False,
    ) -> None:
        self._is_open_loop = workload.loop == "open"
        self._users = users
        self._keeps_arrivals = keeps_arrivals
        self._runs_commands = runs_commands
        self._jobs = {job.job_id: job for job in workload.jobs}
        self._roots = workload.roots
        self._families = workload.get_families()
        self._num_open = {
            root: sum(len(job.turns) for job in family) for root, family in self._families.items()
        }
        self._next_roots = iter(self._families)
        self._waiting: dict[tuple[_Turn, _Event], list[tuple[_Turn, float]]] = {}
        """The turns that wait for an event, each with its delay in seconds."""
        self._num_awaited: dict[_Turn, int] = {}
        """How many events each waiting turn still waits for."""
        self._ready_s: dict[_Turn, float] = {}
        """The latest time that the events so far allow a waiting turn."""
        if not self._is_open_loop:
            for job in workload.jobs:
                self._add_events(job)

    def start(self) -> list[Due]:
        """The turns whose time is known from the start, in the workload's order. Call it once."""
        if self._is_open_loop:
            return [
                Due(job, index, job.arrival_s if turn.at_s is None else turn.at_s)
                for job in self._jobs.values()
                for index, turn in enumerate(job.turns)
            ]
        if self._users is None:
            return [Due(job, 0, job.arrival_s) for job in self._jobs.values() if not job.turns[0].after]
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
        """A turn was given up: drops all turns that wait for it, directly or through others."""
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
        """The job at the beginning of this job's chain of parents; the job itself if no other started it."""
        return self._roots[job_id]

    def has_ended(self, root: str) -> bool:
        """Whether all turns of this job, and of all jobs that it started, are finished, failed or dropped."""
        return root not in self._num_open

    def is_over(self) -> bool:
        """Whether all turns of the workload are finished, failed or dropped."""
        return not self._num_open

    def _add_events(self, job: Job) -> None:
        for index, turn in enumerate(job.turns):
            one = _Turn(job.job_id, index)
            for event in turn.after:
                if self._users is not None and self._roots[event.job_id] != self._roots[job.job_id]:
                    raise ConfigError(
                        f"--users does not go with this workload: job {job.job_id!r} waits for "
                        f"{event.job_id!r}, a job of another user; leave --users out"
                    )
                self._await(one, _Turn(event.job_id, event.turn), event.event, event.delay_s)
            if index:
                self._await(one, _Turn(job.job_id, index - 1), *self._get_return(job.turns[index - 1]))

    def _get_return(self, turn: TurnSpec) -> tuple[_Event, float]:
        """The event of a turn that the job's next turn waits for, and the delay after it in seconds."""
        if self._runs_commands and turn.command is not None:
            return "returned", 0.0
        return "finished", turn.tool_s

    def _await(self, one: _Turn, other: _Turn, event: _Event, delay_s: float) -> None:
        self._waiting.setdefault((other, event), []).append((one, delay_s))
        self._num_awaited[one] = self._num_awaited.get(one, 0) + 1

    def _begin_next(self, now_s: float) -> list[Due]:
        """The first turns of the next job, which begins now or when it arrives, and of the jobs it starts."""
        root = next(self._next_roots, None)
        if root is None:
            return []
        # A sub-agent may call a model before its parent does.
        first = [job for job in self._families[root] if not job.turns[0].after]
        start_s = min(job.arrival_s for job in first)
        begin_s = max(now_s, start_s) if self._keeps_arrivals else now_s
        # Subtract first, so that the earliest job begins at exactly `begin_s`.
        return [Due(job, 0, begin_s + (job.arrival_s - start_s)) for job in first]

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
        """Count one turn as ended. With `users`, begin the next job if it was the family's last turn."""
        root = self._roots[job_id]
        self._num_open[root] -= 1
        if self._num_open[root]:
            return []
        del self._num_open[root]
        return self._begin_next(now_s) if self._users is not None else []
