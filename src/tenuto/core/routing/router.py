"""The router interface: the hooks, what a router needs, and the check for misspelt hooks.

The dispatcher (`tenuto.core.routing.dispatcher`) calls the hooks; `tenuto.core.routing.loader` finds routers
by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from tenuto.core.errors import PolicyError
from tenuto.core.hook_names import check_arguments
from tenuto.core.policy import Key
from tenuto.core.routing.types import AnsweredTurn, EngineSeen, FleetView, Route, RoutedTurn, Send
from tenuto.core.suggest import suggest

__all__ = ["HOOKS", "Router", "RouterNeeds", "get_least_loaded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterNeeds:
    """What a router needs, in addition to the hooks that it overrides."""

    prompts: bool = False
    """Whether it reads `RoutedTurn.parts`."""
    metrics: bool = False
    """Whether it reads `EngineSeen.metrics`."""
    kv_events: bool = False
    """Whether it reads `RoutedTurn.cached_tokens`."""


def get_least_loaded(engines: Iterable[EngineSeen]) -> EngineSeen:
    """The engine with the fewest open turns; of several, the one that joined first."""
    return min(engines, key=lambda engine: engine.num_open)


@dataclasses.dataclass
class Router:
    """Sends each turn to the engine with the fewest open turns. A subclass is a dataclass.

    Fields made with `setting` are the router's parameters. Fields with `init=False` hold what it learns.
    *Asked* hooks return a decision and change nothing: asked again, they answer the same. So a router that
    draws lots draws them from the turn's id. *Told* hooks (`on_…`) update what the router remembers.
    """

    needs: ClassVar[RouterNeeds] = RouterNeeds()

    # Asked.

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Where a turn goes. `Hold` is for a job's first turn, and not if `turn.must_go`."""
        return Send(get_least_loaded(fleet.engines.values()).name)

    def held_key(self, turn: RoutedTurn, now_s: float) -> Key:
        """The key that orders turns that are held: the smallest is asked about first."""
        return (turn.arrival_s,)

    # Told.

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """A turn was sent to an engine. `turn.engine` is where the job was before."""

    def on_first_token(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """The first token of a turn's answer came."""

    def on_turn_answered(self, answered: AnsweredTurn, now_s: float) -> None:
        """A turn's answer is complete. The job's tool call begins, unless the job ends."""

    def on_turn_failed(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """A turn got no answer from its engine, or its client left."""

    def on_job_ended(self, job_id: str, now_s: float) -> None:
        """A job ended, or it was silent for so long that it is forgotten."""

    def on_tick(self, now_s: float) -> None:
        """Time passes: told every second or so while turns are held, before they are asked about again."""

    def on_engine_joined(self, engine: EngineSeen, now_s: float) -> None:
        """An engine takes turns from now on."""

    def on_engine_left(self, name: str, now_s: float) -> None:
        """An engine takes no more turns: it drains or died. Its jobs go elsewhere."""

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether this router overrides a hook."""
        return getattr(cls, hook) is not getattr(Router, hook)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the names and the arguments of the hooks. Raises PolicyError."""
        super().__init_subclass__(**kwargs)
        annotations = vars(cls).get("__annotations__", {})
        fields = {name for name, kind in annotations.items() if "ClassVar" not in str(kind)}
        known = {*HOOKS, "needs", "overrides"}
        for name in {**vars(cls), **annotations}:
            if name.startswith("_") or name in fields:
                continue
            if name not in known:
                hint = suggest(name, known)
                raise PolicyError(
                    f"{cls.__qualname__}.{name}: no hook has this name{hint}; begin the name of a helper "
                    "with an underscore"
                )
            if name in HOOKS:
                check_arguments(cls, name, HOOKS[name])


HOOKS = {
    name: hook for name, hook in vars(Router).items() if inspect.isfunction(hook) and not name.startswith("_")
}
"""All hooks by name; those that are told begin with `on_`."""
