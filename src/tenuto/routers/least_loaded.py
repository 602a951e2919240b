"""least-loaded: the engine with the fewest open turns."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.router import (
    EngineSeen,
    FleetView,
    Route,
    RoutedTurn,
    Router,
    RouterNeeds,
    Send,
    get_least_loaded,
)
from tenuto.core.settings import setting


@dataclass
class LeastLoaded(Router):
    """Send each turn to the engine with the fewest turns.

    The router counts turns itself, as SGLang's gateway and vllm-router do. With `by_metrics` it uses the
    engines' own latest metrics, as the scorers of llm-d's endpoint picker and production-stack do.
    """

    needs = RouterNeeds(metrics=True)

    by_metrics: bool = setting(False, "compare the engines' own figures, as they were when last read")

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The one with the fewest."""
        engines = fleet.engines.values()
        least = min(engines, key=_get_load) if self.by_metrics else get_least_loaded(engines)
        return Send(least.name)


def _get_load(engine: EngineSeen) -> int:
    metrics = engine.metrics
    return engine.num_open if metrics is None else metrics.num_running + metrics.num_waiting
