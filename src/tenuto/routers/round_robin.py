"""round-robin: one engine after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.core.router import FleetView, Route, RoutedTurn, Router, Send


@dataclass
class RoundRobin(Router):
    """Send turns to one engine after the other. Source: `round_robin` of vllm-router and SGLang."""

    _num_sent: int = field(init=False, default=0)

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The next in turn."""
        names = list(fleet.engines)
        return Send(names[self._num_sent % len(names)])

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Count."""
        self._num_sent += 1
