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

    A turn's engine time is the wall time from its start to its end, without what it waited after a
    preemption: all requests of a step share it, so each is served for as long as the step takes. A turn may
    preempt one in a worse queue.

    Source: arXiv 2502.13965 (PLAS, ATLAS, Algorithm 1); its example in figure 2 comes out the same here. The
    paper does not print K, the quanta and beta. A turn of a loaded engine takes 0.3 to 10 s and a job tens of
    them: queues that double from 1 s tell jobs apart up to 127 s of service (K = 8). A beta of 10 promotes a
    job that has waited ten times its service; between 2 and 100 the mean moved by less than a tenth.

    Inside vLLM turns wait in this order and the worst-placed one is preempted when memory runs out, but no
    turn is preempted to seat a better one (`may_preempt` is the simulator's). Known weakness: jobs of equal
    length all finish last together, and taking turns is what an LRU cache is worst at.
    """

    needs: ClassVar[Needs] = Needs(rekey_s=LOOK_S)

    num_levels: int = setting(8, "queues (the paper's K)", minimum=1)
    first_quantum_s: float = setting(1.0, "seconds of engine time in the first queue", minimum=0.001)
    growth: float = setting(2.0, "each queue's quantum, in those of the queue before", minimum=1)
    starvation_ratio: float = setting(
        10.0, "seconds waited per second served that bring a turn to the first queue (beta)", minimum=0
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
