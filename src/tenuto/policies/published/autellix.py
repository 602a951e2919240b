"""autellix: jobs that have had the least engine time go first."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.estimators.attained_service import LeastAttainedService


@dataclass
class Autellix(LeastAttainedService):
    """Program-level attained service in queues: short jobs pass long ones, starving turns are promoted.

    Source: arXiv 2502.13965 (PLAS, ATLAS, Algorithm 1); its example in figure 2 comes out the same here. The
    paper does not print K, the quanta and beta. A turn of a loaded engine takes 0.3 to 10 s and a job tens of
    them: queues that double from 1 s tell jobs apart up to 127 s of service (K = 8). A beta of 10 promotes a
    job that has waited ten times its service; between 2 and 100 the mean moved by less than a tenth.

    Inside vLLM turns wait in this order and the worst-placed one is preempted when memory runs out, but no
    turn is preempted to seat a better one (`may_preempt` is the simulator's). Known weakness: jobs of equal
    length all finish last together, and taking turns is what an LRU cache is worst at.
    """
