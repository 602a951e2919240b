"""autellix: jobs that have had the least engine time go first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.policy import Key, Needs, Policy, setting
from tenuto.core.types import EngineView, Job, Turn

LOOK_S = 0.25
"""Seconds between two rounds of demotions and promotions: 5 to 20 steps. The paper has one every N steps."""


@dataclass(slots=True)
class _Served:
    """Engine time of all finished turns of a job."""

    served_s: float = 0.0
    """Engine time along the longest chain of turns, if several ran at the same time."""
    waited_s: float = 0.0
    """Time that its turns waited since a turn was last promoted."""
    promoted_at_s: float = 0.0
    """Engine time that it had had when a turn was last promoted."""


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
    """The time up to which the fields below count."""
    is_running: bool = False
    served_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class Autellix(Policy):
    """Turns in the order of their job's attained service, in queues; starving turns are promoted.

    Queue 0 goes first. Queue i has a range of one quantum, first_quantum_s · growth^i seconds, above the
    ranges of the queues before it; the last one has no limit.

        arrive → the queue of its job's service → quantum spent: one down → waited too long: back to the first

    A turn's engine time is the wall time from its start to its end, without its waits after preemptions. All
    requests of a step share it, so each is served for the whole step. A turn may preempt a turn in a worse
    queue.

    Source: arXiv 2502.13965 (PLAS, ATLAS, Algorithm 1). A test reproduces its example in figure 2. The paper
    does not give K, the quanta and beta. On a loaded engine a turn takes 0.3 to 10 s, and a job has tens of
    turns. With quanta that double from 1 s, K = 8 queues separate jobs of up to 127 s of service. With a beta
    of 10, a job that has waited ten times its service is promoted; between 2 and 100, the mean job time
    changed by less than a tenth.

    Inside vLLM, turns wait in this order, and the last turn in it is preempted when memory runs out. But no
    turn is preempted to start a better one: only the simulator calls `may_preempt`. Known weakness: jobs of
    equal length all end late, at about the same time, and jobs that take turns defeat an LRU cache.
    """

    needs: ClassVar[Needs] = Needs(reorder_s=LOOK_S)

    num_levels: int = setting(8, "queues (the paper's K)", minimum=1, maximum=64)
    first_quantum_s: float = setting(1.0, "seconds of engine time in the first queue", minimum=0.001)
    growth: float = setting(2.0, "quantum of a queue / quantum of the queue before", minimum=1, maximum=1000)
    starvation_ratio: float = setting(
        10.0, "time waited / time served from which a turn is promoted to the first queue (beta)", minimum=0
    )
    _quanta_s: list[float] = field(init=False)
    _jobs: dict[str, _Served] = field(init=False, default_factory=dict)
    """The process table: PLAS for jobs with one turn at a time, ATLAS for jobs with several."""
    _calls: dict[str, _Call] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        limited = [self.first_quantum_s * self.growth**level for level in range(self.num_levels - 1)]
        self._quanta_s = [*limited, float("inf")]

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """By queue, then first come first served within it."""
        return self._get_rank(turn.turn_id)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The turn in the worst queue; of several, the one that joined it last."""
        level, queued_s = self._get_rank(turn.turn_id)
        return (-level, -queued_s)

    def may_preempt(self, turn: Turn, running: Turn, view: EngineView) -> bool:
        """A turn may take the place of one in a worse queue, never of one in the same queue."""
        return self._get_rank(turn.turn_id)[0] < self._get_rank(running.turn_id)[0]

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """It joins the queue of its job's service, with that queue's quantum. O(levels)."""
        job = self._jobs.setdefault(turn.job.job_id, _Served())
        level, above_s = 0, job.served_s
        while above_s >= self._quanta_s[level]:
            above_s -= self._quanta_s[level]
            level += 1
        quantum_s = self._quanta_s[level]
        self._calls[turn.turn_id] = _Call(job, job.served_s, level, now_s, quantum_s, counted_s=now_s)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Its service begins, or continues."""
        self._run(turn, now_s, is_running=True)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Its service stops."""
        self._run(turn, now_s, is_running=False)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its service counts for its job, also if it was aborted."""
        call = self._calls.pop(turn.turn_id, None)
        if call is not None:
            self._count(call, now_s)
            call.job.served_s = max(call.job.served_s, call.job_served_s + call.served_s)
            call.job.waited_s += call.waited_s

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Its service is forgotten."""
        self._jobs.pop(job.job_id, None)

    def on_tick(self, view: EngineView) -> None:
        """Demote the turns whose quantum is spent and promote those that starve. O(live turns)."""
        promoted: list[_Call] = []
        for call in self._calls.values():
            self._count(call, view.now_s)
            while call.quantum_left_s <= 0:
                # Turns are examined at intervals, so time beyond the quantum counts in the next one.
                self._join(call, call.level + 1, view.now_s, beyond_s=-call.quantum_left_s)
            waited_s = call.job.waited_s + call.waited_s
            served_s = call.job.served_s + call.served_s - call.job.promoted_at_s
            if call.level > 0 and waited_s >= self.starvation_ratio * served_s:
                self._join(call, 0, view.now_s)
                promoted.append(call)
        # Only now: a job's other turns starve as well, and are promoted with it.
        for call in promoted:
            call.waited_s = call.job.waited_s = 0.0
            call.job.promoted_at_s = max(call.job.promoted_at_s, call.job.served_s + call.served_s)

    def _get_rank(self, turn_id: str) -> tuple[int, float]:
        """(queue, when it joined); smaller goes first. Unknown turns are in the first queue."""
        call = self._calls.get(turn_id)
        return (0, 0.0) if call is None else (call.level, call.queued_s)

    def _run(self, turn: Turn, now_s: float, *, is_running: bool) -> None:
        """From now on, a turn's time counts as service or as waiting."""
        call = self._calls.get(turn.turn_id)
        if call is not None:
            self._count(call, now_s)
            call.is_running = is_running

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
