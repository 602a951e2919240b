"""How many tokens a step may have, and steps that were computed, as a policy is told of them.

The engine owns the size of steps, not the policy: it works beside any policy. A policy may say what it wants
(`EngineSettings.step_tokens`); what the user sets comes first.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from tenuto.core.errors import ConfigError
from tenuto.core.types import EngineView, StepView, Turn

ADAPTIVE = "adaptive"
"""Before each step, a `StepChooser` chooses the number of tokens."""
StepTokens = str | int
"""The most tokens of a step: "adaptive", or always the same number."""


def get_max_step_tokens(step_tokens: StepTokens | None, max_num_batched_tokens: int) -> int:
    """The most tokens that any step may have, given the engine's own budget."""
    return (
        min(step_tokens, max_num_batched_tokens) if isinstance(step_tokens, int) else max_num_batched_tokens
    )


class StepSize(NamedTuple):
    """The bounds of one step."""

    num_tokens: int
    """The most tokens in all."""
    per_prompt: int = 0
    """The most tokens of one prompt; 0 for no bound."""


class StepChooser(Protocol):
    """Chooses the size of each step from what it was told of turns and steps. See `estimators.step_size`."""

    def observe_step(self, step: StepView) -> None:
        """The engine computed a step."""

    def observe_arrival(self, turn: Turn, num_new_tokens: int) -> None:
        """A turn arrived; of its prompt, so many tokens are not known from its job's earlier turns."""

    def observe_start(self, turn_id: str) -> None:
        """A turn got its first step, or left without one."""

    def observe_turn(self, turn: Turn) -> None:
        """A turn finished; it was not aborted."""

    def choose(self, view: EngineView) -> StepSize | None:
        """The bounds of the next step; None leaves them to the engine. Changes nothing."""


def read_step_tokens(text: str) -> StepTokens:
    """What a command line says; `check_step_tokens` checks it."""
    return int(text) if text.isdecimal() else text


def check_step_tokens(given: StepTokens | None, where: str) -> None:
    """Raise ConfigError if this is neither "adaptive" nor a number from 1 up. `where` names the option."""
    is_number = isinstance(given, int) and not isinstance(given, bool) and given >= 1
    if not (given is None or given == ADAPTIVE or is_number):
        raise ConfigError(f"{where} must be {ADAPTIVE}, or a number of tokens from 1 up; got {given!r}")


class StepClock:
    """Makes a `StepView` of each step that ended. Steps end in the order in which they were scheduled."""

    def __init__(self, ended_s: float = -math.inf) -> None:
        """`ended_s`: no step ran before this time."""
        self._ended_s = ended_s

    def finish(
        self,
        now_s: float,
        scheduled_s: float,
        num_tokens: int,
        num_requests: int,
        *,
        is_full: bool,
    ) -> StepView:
        """The view of a step that just ended.

        `num_tokens` is without drafts: a request that decodes has one token however many are guessed behind
        it, and the rest of a step's tokens is its prefill.
        """
        duration_s = now_s - max(self._ended_s, scheduled_s)
        self._ended_s = now_s
        return StepView(now_s, duration_s, num_tokens, num_requests, is_full)
