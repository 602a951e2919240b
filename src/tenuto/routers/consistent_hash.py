"""consistent-hash: the engine that the session's id hashes to."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from tenuto.core.router import EngineSeen, FleetView, Route, RoutedTurn, Router, Send, draw
from tenuto.core.settings import setting


@dataclass
class ConsistentHash(Router):
    """Hash the session's id onto a ring of engines. When one leaves, only its sessions go elsewhere.

    Source: `consistent_hash` of vllm-router, which puts each engine onto the ring 160 times.
    """

    num_points: int = setting(160, "number of places of each engine on the ring", minimum=1)
    _ring: list[tuple[int, str]] = field(init=False, default_factory=list)

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The first engine after the session on the ring."""
        place = bisect_left(self._ring, (draw(turn.job_id), ""))
        return Send(self._ring[place % len(self._ring)][1])

    def on_engine_joined(self, engine: EngineSeen, now_s: float) -> None:
        """Put it onto the ring."""
        self.on_engine_left(engine.name, now_s)
        self._ring += [(draw(engine.name, point), engine.name) for point in range(self.num_points)]
        self._ring.sort()

    def on_engine_left(self, name: str, now_s: float) -> None:
        """Take it off the ring."""
        self._ring = [point for point in self._ring if point[1] != name]
