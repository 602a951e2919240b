"""kv-aware: the engine where the turn costs least, given the caches that engines report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.router import AnsweredTurn, FleetView, Route, RoutedTurn, Router, RouterNeeds, Send
from tenuto.core.settings import setting


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
    _active: dict[str, int] = field(init=False, default_factory=dict)
    _prefill: dict[str, int] = field(init=False, default_factory=dict)
    _open: dict[str, tuple[int, int]] = field(init=False, default_factory=dict)
    """By turn: its prefill tokens that are not done, and all its tokens."""

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The engine with the least cost; of equal ones, the one that joined first."""

        def get_cost(name: str) -> float:
            prefill = turn.num_prompt_tokens - turn.cached_tokens.get(name, 0)
            return (
                self.overlap_weight * (self._prefill.get(name, 0) + prefill)
                + self._active.get(name, 0)
                + turn.num_prompt_tokens
            )

        return Send(min(fleet.engines, key=get_cost))

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Count its tokens there."""
        prefill = turn.num_prompt_tokens - turn.cached_tokens.get(engine, 0)
        self._open[turn.turn_id] = (prefill, turn.num_prompt_tokens)
        self._prefill[engine] = self._prefill.get(engine, 0) + prefill
        self._active[engine] = self._active.get(engine, 0) + turn.num_prompt_tokens

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
