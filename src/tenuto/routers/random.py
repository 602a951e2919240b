"""random: any engine."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.router import FleetView, Route, RoutedTurn, Router, Send, draw
from tenuto.core.settings import setting


@dataclass
class Random(Router):
    """Send each turn to a random engine, for any load. Source: `random` of vllm-router and SGLang."""

    seed: int = setting(0, "seed of the random choices")

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Draw an engine at random."""
        names = list(fleet.engines)
        return Send(names[draw(self.seed, turn.turn_id, turn.num_attempts) % len(names)])
