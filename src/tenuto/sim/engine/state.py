"""The requests of one engine, each in the place where it stands, and the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tenuto.sim.engine.waiting import WaitingQueue
from tenuto.sim.kv.request import Request


class Load(NamedTuple):
    """A request whose KV is on its way from a tier."""

    done_s: float
    number: int
    """Loads are numbered as they begin: of those that end together, the first begun is the first done."""
    request: Request


@dataclass(slots=True)
class EngineState:
    """All that changes from step to step, in one place; the scheduler's parts share it.

    A request is in exactly one of four places until it finishes:

        arrival ──► waiting ───────────────────────► running ──► finished
                     │   ▲ └─► loading ──► loaded ──►┘  │
                     │   └───────── preempted ──────────┘
                     └─► finished, if its client goes away
    """

    waiting: WaitingQueue
    requests: dict[str, Request] = field(default_factory=dict)
    """All of them, by turn id."""
    running: list[Request] = field(default_factory=list)
    """In the order in which they started; the last is preempted first, unless the policy chooses."""
    loading: list[Load] = field(default_factory=list)
    """A heap: the load that ends next is first."""
    loaded: deque[Request] = field(default_factory=deque)
    """Their KV has come from a tier. They start in the next step that has room, in this order."""
    now_s: float = 0.0
    """When the engine was called last."""

    @property
    def num_loading(self) -> int:
        """Requests that wait for their load, or have it and did not start yet."""
        return len(self.loading) + len(self.loaded)
