"""autellix: jobs that have had the least engine time go first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.policy import Key, Needs, Policy, setting
from tenuto.core.types import EngineView, Job, Turn
from tenuto.estimators.attained_service import ServiceQueues

LOOK_S = 0.25
"""How often turns are demoted and promoted; the paper's every N steps are 5 to 20 of them."""


@dataclass
class Autellix(Policy):
    """Turns in the order of their job's attained service, in queues; starving turns are promoted.

    A turn's engine time is the wall time from its start to its end, without its waits after preemptions. All
    requests of a step share the step, so each is served for as long as the step takes. A turn may preempt a
    turn in a worse queue.

    Source: arXiv 2502.13965 (PLAS, ATLAS, Algorithm 1). A test reproduces its example in figure 2. The paper
    does not give K, the quanta and beta. On a loaded engine a turn takes 0.3 to 10 s, and a job has tens of
    turns. With quanta that double from 1 s, K = 8 queues separate jobs of up to 127 s of service. With a beta
    of 10, a job that has waited ten times its service is promoted; between 2 and 100, the mean job time
    changed by less than a tenth.

    Inside vLLM, turns wait in this order, and the last turn in it is preempted when memory runs out. But no
    turn is preempted to start a better one: only the simulator calls `may_preempt`. Known weakness: jobs of
    equal length all end late, at about the same time, and jobs that take turns defeat an LRU cache.
    """

    needs: ClassVar[Needs] = Needs(rekey_s=LOOK_S)

    num_levels: int = setting(8, "queues (the paper's K)", minimum=1)
    first_quantum_s: float = setting(1.0, "seconds of engine time in the first queue", minimum=0.001)
    growth: float = setting(2.0, "quantum of a queue / quantum of the queue before", minimum=1)
    starvation_ratio: float = setting(
        10.0, "time waited / time served from which a turn is promoted to the first queue (beta)", minimum=0
    )
    _queues: ServiceQueues = field(init=False)

    def __post_init__(self) -> None:
        """Make the queues."""
        self._queues = ServiceQueues(
            self.num_levels, self.first_quantum_s, self.growth, self.starvation_ratio
        )

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """By queue, then first come first served within it."""
        return self._queues.get_rank(turn.turn_id)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The turn in the worst queue, and there the one that joined it last."""
        level, queued_s = self._queues.get_rank(turn.turn_id)
        return (-level, -queued_s)

    def may_preempt(self, turn: Turn, running: Turn, view: EngineView) -> bool:
        """A turn takes the place of one in a worse queue, never of its equal."""
        return self._queues.get_rank(turn.turn_id)[0] < self._queues.get_rank(running.turn_id)[0]

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """It joins a queue."""
        self._queues.arrive(turn.turn_id, turn.job.job_id, now_s)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Its service begins, or goes on."""
        self._queues.run(turn.turn_id, now_s, is_running=True)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Its service stops."""
        self._queues.run(turn.turn_id, now_s, is_running=False)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its service counts for its job, also if it was aborted."""
        self._queues.leave(turn.turn_id, now_s)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Its service is forgotten."""
        self._queues.forget(job.job_id)

    def on_tick(self, view: EngineView) -> None:
        """Demote and promote."""
        self._queues.update(view.now_s)
