"""The router interface: what a router sees, what it may answer, and its hooks.

A router sees what a real one can see: requests as they come, its own history, what the operator told it of
the engines, and the engines' metrics as they were last read. Times are seconds on the router's own clock.
The dispatcher (`tenuto.core.dispatcher`) calls the hooks; `tenuto.core.loader` finds routers by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from tenuto.core.policy import Key, check_hooks

NO_TOKENS: Mapping[str, int] = MappingProxyType({})


class Part(NamedTuple):
    """A piece of a prompt: the first `num_tokens` tokens of the text with this name.

    Two prompts share a prefix as far as their parts are equal. A name may be a message's hash.
    """

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the operator tells of an engine, or the engine of itself when it starts."""

    name: str
    speed: float = 1.0
    """Work per second, as a multiple of any other engine's."""
    num_kv_tokens: int | None = None
    """Tokens that its KV cache holds; None if that is not known."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's own figures, as they were when they were last read."""

    read_s: float
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of its KV cache that running turns hold, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """An engine that takes turns now, as the router knows it."""

    info: EngineInfo
    num_open: int = 0
    """Turns that were sent there and are not answered yet."""
    num_unstarted: int = 0
    """Those of them whose first token has not come."""
    num_unstarted_tokens: int = 0
    """The prompts' tokens of those."""
    metrics: EngineMetrics | None = None
    """None if they are not read, or were not read yet."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name


@dataclass(frozen=True, slots=True)
class FleetView:
    """The engines that take turns now. At least one does when a router is asked."""

    now_s: float
    engines: Mapping[str, EngineSeen]
    """By name, in the order in which they joined. An engine that drains or died is not here."""
    copy_token_s: float | None = None
    """Seconds per token to copy KV from one engine to another; None if that is not possible."""


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """A turn that is to be sent to an engine, and what the router remembers of its job."""

    turn_id: str
    job_id: str
    """The client's id of the job. A job without one is known by its content, else it is a new one."""
    arrival_s: float
    num_prompt_tokens: int
    parts: Sequence[Part] = field(default=(), repr=False)
    """The prompt in pieces; empty if the caller does not look into prompts."""
    parent: str | None = None
    """The id of the job that started this one as a sub-agent."""
    tenant: str | None = None
    num_turns: int = 1
    """Turns of the job that have come, this one included."""
    engine: str | None = None
    """The engine of the job's last turn, if it takes turns now. None for a job's first turn."""
    num_context_tokens: int = 0
    """The last answered turn's prompt and answer: the KV that `engine` may still hold."""
    num_open: int = 0
    """The job's other turns that are not answered yet. If there are none, this one ends a tool call."""
    num_attempts: int = 0
    """How often it was sent before, and failed."""
    must_go: bool = False
    """Whether `Hold` is no longer allowed: the turn was held for too long."""
    cached_tokens: Mapping[str, int] = field(default_factory=lambda: NO_TOKENS, repr=False)
    """By engine, the tokens of its prompt that are in the cache there, as the engines' KV events say. Empty
    unless the router needs them and the engines send them; an engine that has none may be missing."""


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn whose answer is complete."""

    turn: RoutedTurn
    engine: str
    sent_s: float
    first_token_s: float | None
    num_output_tokens: int
    num_hit_tokens: int | None = None
    """Prompt tokens that were cached, as the answer's usage says; None if it does not say."""
    is_last: bool | None = None
    """Whether the client said that the job ends with this turn; None if it said nothing."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the turn to this engine."""

    engine: str
    copy_from: str | None = None
    """The engine whose KV of the job is copied there first. Without, what is missing is computed again."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the turn back until something ends somewhere; only for a job's first turn."""


Route = Send | Hold


class Arrival(NamedTuple):
    """A turn that came in, as the client sent it."""

    turn_id: str
    """Not that of any other turn that is open."""
    job_id: str | None
    num_prompt_tokens: int
    parts: Sequence[Part] = ()
    parent: str | None = None
    tenant: str | None = None
    cached_tokens: Mapping[str, int] = NO_TOKENS


class Sending(NamedTuple):
    """Send this turn to this engine now."""

    turn_id: str
    engine: str
    copy_from: str | None = None
    """The engine whose KV of the job is copied there first; only if the fleet can copy."""
    num_copied_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterNeeds:
    """What a router needs, in addition to the hooks that it overrides."""

    prompts: bool = False
    """Whether it reads `RoutedTurn.parts`."""
    metrics: bool = False
    """Whether it reads `EngineSeen.metrics`."""
    kv_events: bool = False
    """Whether it reads `RoutedTurn.cached_tokens`."""


def draw(*names: object) -> int:
    """A 64-bit number that looks random and depends on the names alone: the same in every process and run."""
    text = "\0".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def get_least_loaded(engines: Iterable[EngineSeen]) -> EngineSeen:
    """The engine with the fewest open turns; of several, the one that joined first."""
    return min(engines, key=lambda engine: engine.num_open)


@dataclasses.dataclass
class Router:
    """Sends each turn to the engine with the fewest open turns. A subclass is a dataclass.

    Fields made with `setting` are the router's parameters. Fields with `init=False` hold what it learns.
    *Asked* hooks return a decision and change nothing: asked again, they answer the same. So a router that
    draws lots draws them from the turn's id (`draw`). *Told* hooks (`on_…`) update what the router remembers.
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
        """A job ended, or it is forgotten because it was idle for too long."""

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
        check_hooks(cls, HOOKS)


HOOKS = {
    name: hook for name, hook in vars(Router).items() if inspect.isfunction(hook) and not name.startswith("_")
}
"""All hooks by name; those that are told begin with `on_`."""
