"""cache-aware: the engine that was sent the longest prefix of the prompt, unless loads differ too much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

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
from tenuto.routers._prefixes import Prefixes


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

    def on_engine_joined(self, engine: EngineSeen, now_s: float) -> None:
        """It begins with an empty cache."""
        self._prefixes.forget(engine.name)

    def on_engine_left(self, name: str, now_s: float) -> None:
        """Its cache is gone."""
        self._prefixes.forget(name)
