"""power-of-two: the less loaded of two engines."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.router import FleetView, Route, RoutedTurn, Router, Send, draw, get_least_loaded
from tenuto.core.settings import setting


@dataclass
class PowerOfTwo(Router):
    """Draw two engines, send to the one with fewer open turns. Source: `power_of_two` of vllm-router."""

    seed: int = setting(0, "seed of the random choices")

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Draw two engines at random and compare them."""
        engines = list(fleet.engines.values())
        lot = draw(self.seed, turn.turn_id, turn.num_attempts)
        first = engines.pop(lot % len(engines))
        if not engines:
            return Send(first.name)
        second = engines[(lot >> 32) % len(engines)]
        return Send(get_least_loaded((first, second)).name)
