"""The routers of other projects, one class each: `RoundRobin` is `round-robin`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.router import (
    AnsweredTurn,
    EngineSeen,
    FleetView,
    Route,
    RoutedTurn,
    Router,
    RouterNeeds,
    Send,
    draw,
    get_least_loaded,
)
from tenuto.core.settings import setting
from tenuto.routers._prefixes import Prefixes


@dataclass
class Random(Router):
    """Send each turn to a random engine, for any load. Source: `random` of vllm-router and SGLang."""

    seed: int = setting(0, "seed of the random choices")

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Draw an engine at random."""
        names = list(fleet.engines)
        return Send(names[draw(self.seed, turn.turn_id, turn.num_attempts) % len(names)])


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


@dataclass
class StickyLeastLoaded(Router):
    """Begin a session on the engine with the fewest open turns, and keep it there.

    Source: `sticky_least_loaded` of vllm-router.
    """

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The engine of the session, else the least loaded one."""
        return Send(turn.engine or get_least_loaded(fleet.engines.values()).name)


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
        self._ring += [(draw(engine.name, point), engine.name) for point in range(self.num_points)]
        self._ring.sort()

    def on_engine_left(self, name: str, now_s: float) -> None:
        """Take it off the ring."""
        self._ring = [point for point in self._ring if point[1] != name]


@dataclass
class CacheAware(Router):
    """The rule of `cache_aware` in vllm-router and SGLang's gateway, with their defaults.

    If the most loaded engine has over `balance_abs` open turns more than the least loaded one, and over
    `balance_rel` times as many, the least loaded one gets the turn. Else the engine that was sent the longest
    prefix of the prompt gets it, if that is over `cache_threshold` of the prompt. Else the least loaded one,
    or with `smallest_tree` the one that was sent the least text, as in older releases. Source: `RouterArgs`
    of vllm-router 0.1.17 and the description of the policy there.
    """

    needs: ClassVar[RouterNeeds] = RouterNeeds(prompts=True)

    cache_threshold: float = setting(
        0.3, "least share of a prompt that an engine must have been sent", minimum=0, maximum=1
    )
    balance_abs: int = setting(64, "largest difference in open turns between two engines", minimum=0)
    balance_rel: float = setting(1.5, "largest ratio of open turns between two engines", minimum=1)
    smallest_tree: bool = setting(False, "without a match, choose the engine that was sent the least text")
    max_tree_tokens: int = setting(
        2**23, "tokens of prompts that are remembered for each engine: 2^25 characters", minimum=1
    )
    _prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        self._prefixes = Prefixes(self.max_tree_tokens)

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """By load if loads differ too much, else by prefix."""
        least = get_least_loaded(fleet.engines.values())
        most = max(engine.num_open for engine in fleet.engines.values())
        if most - least.num_open > self.balance_abs and most > least.num_open * self.balance_rel:
            return Send(least.name)
        found = {name: num for name, num in self._prefixes.find(turn.parts).items() if name in fleet.engines}
        best = max(found, key=lambda name: found[name], default=None)
        if best is not None and found[best] > self.cache_threshold * turn.num_prompt_tokens:
            return Send(best)
        if self.smallest_tree:
            return Send(min(fleet.engines, key=self._prefixes.get_num_tokens))
        return Send(least.name)

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Remember the prompt."""
        self._prefixes.add(engine, turn.parts)

    def on_engine_left(self, name: str, now_s: float) -> None:
        """Its cache is gone."""
        self._prefixes.forget(name)


@dataclass
class KvAware(Router):
    """Least cost: prompt tokens that the engine would have to compute, plus tokens of its open turns.

    `cost = overlap_weight · prefill blocks + active blocks`. The prefill is that of this turn and of all
    turns sent there that have no first token yet. Caches are known from the engines' KV events. Source: the
    KV router of NVIDIA Dynamo (docs, "KV cache routing") and `kv_aware` of vllm-router 0.1.17, whose default
    temperature of 0 takes the least cost.
    """

    needs: ClassVar[RouterNeeds] = RouterNeeds(kv_events=True)

    overlap_weight: float = setting(1.0, "weight of prefill, in decoding tokens", minimum=0)
    _active: Counter[str] = field(init=False, default_factory=Counter)
    _prefill: Counter[str] = field(init=False, default_factory=Counter)
    _open: dict[str, tuple[int, int]] = field(init=False, default_factory=dict)
    """By turn: its prefill tokens that are not done, and all its tokens."""

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The engine with the least cost; of equal ones, the one that joined first."""

        def get_cost(name: str) -> float:
            prefill = turn.num_prompt_tokens - turn.cached_tokens.get(name, 0)
            return (
                self.overlap_weight * (self._prefill[name] + prefill)
                + self._active[name]
                + turn.num_prompt_tokens
            )

        return Send(min(fleet.engines, key=get_cost))

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Count its tokens there."""
        prefill = turn.num_prompt_tokens - turn.cached_tokens.get(engine, 0)
        self._open[turn.turn_id] = (prefill, turn.num_prompt_tokens)
        self._prefill[engine] += prefill
        self._active[engine] += turn.num_prompt_tokens

    def on_first_token(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Its prefill is done."""
        prefill, num_tokens = self._open[turn.turn_id]
        self._prefill[engine] -= prefill
        self._open[turn.turn_id] = (0, num_tokens)

    def on_turn_answered(self, answered: AnsweredTurn, now_s: float) -> None:
        """Stop counting its tokens."""
        self._leave(answered.turn, answered.engine)

    def on_turn_failed(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Stop counting its tokens."""
        self._leave(turn, engine)

    def _leave(self, turn: RoutedTurn, engine: str) -> None:
        prefill, num_tokens = self._open.pop(turn.turn_id)
        self._prefill[engine] -= prefill
        self._active[engine] -= num_tokens
        if not self._active[engine]:  # the engine may be gone
            del self._active[engine], self._prefill[engine]
