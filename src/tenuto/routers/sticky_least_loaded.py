"""sticky-least-loaded: a session stays where it began."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.router import FleetView, Route, RoutedTurn, Router, Send, get_least_loaded


@dataclass
class StickyLeastLoaded(Router):
    """Begin a session on the engine with the fewest open turns, and keep it there.

    Source: `sticky_least_loaded` of vllm-router.
    """

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The engine of the session, else the least loaded one."""
        return Send(turn.engine or get_least_loaded(fleet.engines.values()).name)
