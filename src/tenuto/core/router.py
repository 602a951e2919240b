"""The router interface: what a router sees, what it may answer, and its hooks.

A router sees what a real router can see: requests as they arrive, its own history, the operator's facts about
the engines, and the engines' metrics as they were last read. Times are seconds on the router's own clock. The
dispatcher (`tenuto.core.dispatcher`) calls the hooks. `tenuto.core.loader` finds routers by name.
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

    Two prompts share a prefix up to the first part that differs. A name may be a message's hash.
    """

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine, from the operator or from the engine at its start."""

    name: str
    speed: float = 1.0
    """Work per second, relative to the other engines."""
    num_kv_tokens: int | None = None
    """Tokens that its KV cache has room for; None if unknown."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's metrics, as they were last read."""

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
    """Turns that were sent to it and are not answered yet."""
    num_unstarted: int = 0
    """Those of the open turns whose first token has not arrived."""
    num_unstarted_tokens: int = 0
    """Prompt tokens of these unstarted turns."""
    metrics: EngineMetrics | None = None
    """None if metrics are not read, or were not read yet."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name


@dataclass(frozen=True, slots=True)
class FleetView:
    """The engines that take turns now. When a router is asked, there is at least one."""

    now_s: float
    engines: Mapping[str, EngineSeen]
    """By name, in the order in which they joined, without engines that drain or died."""
    copy_token_s: float | None = None
    """Seconds per token to copy KV from one engine to another; None if that is not possible."""


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """A turn to send to an engine, and what the dispatcher remembers of its job."""

    turn_id: str
    job_id: str
    """The client's job id. Without one, the job is recognised by its content, or else is new."""
    arrival_s: float
    num_prompt_tokens: int
    parts: Sequence[Part] = field(default=(), repr=False)
    """The prompt in pieces; empty if the caller does not read prompts."""
    parent: str | None = None
    """The id of the job that started this one as a sub-agent."""
    tenant: str | None = None
    num_turns: int = 1
    """Number of the job's turns that have arrived, including this one."""
    engine: str | None = None
    """The engine of the job's last turn, if it takes turns now. None for a job's first turn."""
    num_context_tokens: int = 0
    """Tokens of the last answered turn's prompt and answer, whose KV `engine` may still hold."""
    num_open: int = 0
    """Number of the job's other unanswered turns. If it is 0, this turn follows a tool call."""
    num_attempts: int = 0
    """How often it was sent before and failed."""
    must_go: bool = False
    """Whether `Hold` is no longer allowed: the turn was held for too long."""
    cached_tokens: Mapping[str, int] = field(default_factory=lambda: NO_TOKENS, repr=False)
    """By engine: tokens of its prompt that are cached there, from the engines' KV events. Empty unless the
    router needs them and the engines send them. Engines with none may be missing."""


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn whose answer is complete."""

    turn: RoutedTurn
    engine: str
    sent_s: float
    first_token_s: float | None
    num_output_tokens: int
    num_hit_tokens: int | None = None
    """Cached prompt tokens, from the answer's usage; None if the usage lacks them."""
    is_last: bool | None = None
    """Whether the client said that the job ends with this turn; None if it said nothing."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the turn to this engine."""

    engine: str
    copy_from: str | None = None
    """The engine from which the job's KV is copied first. If None, missing KV is computed again."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold the turn back until some turn ends; only for a job's first turn."""


Route = Send | Hold


class Arrival(NamedTuple):
    """A turn that arrived, as the client sent it."""

    turn_id: str
    """Unique among open turns."""
    job_id: str | None
    num_prompt_tokens: int
    parts: Sequence[Part] = ()
    parent: str | None = None
    tenant: str | None = None
    cached_tokens: Mapping[str, int] = NO_TOKENS
    text: Sequence[Any] = ()
    """The prompt, if it is one text or token ids. Its whole pieces are the parts."""


class Sending(NamedTuple):
    """Send this turn to this engine now."""

    turn_id: str
    engine: str
    copy_from: str | None = None
    """The engine from which the job's KV is copied first; only if the fleet can copy."""
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
    """A pseudo-random 64-bit number that depends only on the names: the same in every process and run."""
    text = "\0".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def get_least_loaded(engines: Iterable[EngineSeen]) -> EngineSeen:
    """The engine with the fewest open turns; among equals, the one that joined first."""
    return min(engines, key=lambda engine: engine.num_open)


@dataclasses.dataclass
class Router:
    """Sends each turn to the engine with the fewest open turns. A subclass is a dataclass.

    Fields made with `setting` are the router's parameters. Fields with `init=False` hold what it learns.
    *Asked* hooks return a decision and change nothing; asked again, they answer the same. So a router that
    needs random numbers derives them from the turn's id (`draw`). *Told* hooks (`on_…`) update what it
    remembers.
    """

    needs: ClassVar[RouterNeeds] = RouterNeeds()

    # Asked.

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Where a turn goes. `Hold` is allowed for a job's first turn, unless `turn.must_go`."""
        return Send(get_least_loaded(fleet.engines.values()).name)

    def held_key(self, turn: RoutedTurn, now_s: float) -> Key:
        """The key that orders held turns; the router is asked about the smallest first."""
        return (turn.arrival_s,)

    # Told.

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """A turn was sent to an engine. `turn.engine` is the job's engine before that."""

    def on_first_token(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """The first token of a turn's answer arrived."""

    def on_turn_answered(self, answered: AnsweredTurn, now_s: float) -> None:
        """A turn's answer is complete. The job's tool call begins, unless the job ends."""

    def on_turn_failed(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """A turn got no answer from its engine, or its client left."""

    def on_job_ended(self, job_id: str, now_s: float) -> None:
        """A job ended, or was forgotten because it was idle for too long."""

    def on_tick(self, now_s: float) -> None:
        """Told about every second while turns are held, before the router is asked about them again."""

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
"""All hooks by name. Told hooks begin with `on_`."""
