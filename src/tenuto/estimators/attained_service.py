"""How much engine time each job has had, and the queues that order turns by it.

    arrive → the queue of its job's service → quantum spent: one down → waited too long: back to the first

Source: arXiv 2502.13965, Algorithm 1 and section 4.2 (process table, PLAS for jobs of one turn at a time,
ATLAS for those with several). The policy `autellix` asks it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Served:
    """Engine time of all finished turns of a job."""

    served_s: float = 0.0
    """Engine time along the longest chain of turns, if several ran at the same time."""
    waited_s: float = 0.0


@dataclass(slots=True)
class _Call:
    """A turn that waits or runs."""

    job: _Served
    job_served_s: float
    """Engine time of its job when the turn arrived."""
    level: int
    queued_s: float
    """When it joined its queue."""
    quantum_left_s: float
    counted_s: float
    """Until when its time is counted below."""
    is_running: bool = False
    served_s: float = 0.0
    waited_s: float = 0.0


class ServiceQueues:
    """The process table and the queues of Algorithm 1; O(live turns) per `update`, else O(levels).

    Queue 0 goes first. A job's service decides the queue of its next turn: queue i is for services of one
    quantum's width, first_quantum_s · growth^i seconds, above those of the queues before it; the last has no
    end.
    """

    def __init__(
        self, num_levels: int, first_quantum_s: float, growth: float, starvation_ratio: float
    ) -> None:
        self._quanta_s = [first_quantum_s * growth**level for level in range(num_levels - 1)] + [float("inf")]
        self._starvation_ratio = starvation_ratio
        self._jobs: dict[str, _Served] = {}
        self._calls: dict[str, _Call] = {}

    def __repr__(self) -> str:
        return f"ServiceQueues({self._jobs}, {self._calls})"

    def arrive(self, turn_id: str, job_id: str, now_s: float) -> None:
        """A turn came in: it joins the queue of its job's service, with that queue's quantum."""
        job = self._jobs.setdefault(job_id, _Served())
        level, above_s = 0, job.served_s
        while above_s >= self._quanta_s[level]:
            above_s -= self._quanta_s[level]
            level += 1
        quantum_s = self._quanta_s[level]
        self._calls[turn_id] = _Call(job, job.served_s, level, now_s, quantum_s, counted_s=now_s)

    def run(self, turn_id: str, now_s: float, *, is_running: bool) -> None:
        """From now on, a turn's time counts as service, or as waiting."""
        call = self._calls.get(turn_id)
        if call is not None:
            self._count(call, now_s)
            call.is_running = is_running

    def leave(self, turn_id: str, now_s: float) -> None:
        """A turn finished: its engine time counts for its job."""
        call = self._calls.pop(turn_id, None)
        if call is not None:
            self._count(call, now_s)
            call.job.served_s = max(call.job.served_s, call.job_served_s + call.served_s)
            call.job.waited_s += call.waited_s

    def forget(self, job_id: str) -> None:
        """A job will not come back."""
        self._jobs.pop(job_id, None)

    def update(self, now_s: float) -> None:
        """Demote the turns whose quantum is spent and promote those that starve."""
        for call in self._calls.values():
            self._count(call, now_s)
            while call.quantum_left_s <= 0:
                # What it ran beyond its quantum, as it is looked at now and then only, counts in the next.
                self._join(call, call.level + 1, now_s, beyond_s=-call.quantum_left_s)
            waited_s = call.job.waited_s + call.waited_s
            served_s = call.job.served_s + call.served_s
            if call.level > 0 and waited_s >= self._starvation_ratio * served_s:
                self._join(call, 0, now_s)
                # Of the turn alone: its job's other turns are as starved and follow at once.
                call.waited_s = call.served_s = 0.0

    def get_rank(self, turn_id: str) -> tuple[int, float]:
        """(queue, when it joined); smaller goes first. A turn that never arrived is in the first queue."""
        call = self._calls.get(turn_id)
        return (0, 0.0) if call is None else (call.level, call.queued_s)

    def _join(self, call: _Call, level: int, now_s: float, *, beyond_s: float = 0.0) -> None:
        call.level, call.queued_s = level, now_s
        call.quantum_left_s = self._quanta_s[level] - beyond_s

    def _count(self, call: _Call, now_s: float) -> None:
        elapsed_s, call.counted_s = now_s - call.counted_s, now_s
        if call.is_running:
            call.served_s += elapsed_s
            call.quantum_left_s -= elapsed_s
        else:
            call.waited_s += elapsed_s
