"""Base classes of policies that need the cost of prefill: `continuum`, `infercept` and `break-even`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Learns, Policy, setting
from tenuto.core.types import StepView, Turn
from tenuto.estimators.prefill_cost import PrefillCost, PrefillProfile, read_prefill_profile


@dataclass
class TakesPrefillProfile(Policy):
    """Base of policies that can be given a measured prefill profile in their settings."""

    prefill_token_s: float = setting(
        0.0, "measured prefill time, seconds per token; 0 learns it from the engine's steps", minimum=0
    )
    prefill_token_pair_s: float = setting(
        0.0, "measured prefill time, seconds per token squared; only with prefill_token_s", minimum=0
    )
    prefill_fixed_s: float = setting(
        0.0,
        "measured prefill time that does not depend on the tokens, seconds; only with prefill_token_s",
        minimum=0,
    )

    prefill_profile: str = setting(
        "", "file that `tenuto profile` wrote: the measured prefill time, instead of the three numbers"
    )

    def _try_get_profile(self) -> PrefillProfile | None:
        """The measured profile, None if there is none.

        Raises ConfigError for one without its main part or named twice, DataError for another file.
        """
        if self.prefill_profile:
            if self.prefill_token_s or self.prefill_fixed_s or self.prefill_token_pair_s:
                raise ConfigError("give prefill_profile or the prefill times, not both")
            path = Path(self.prefill_profile)
            if not path.is_file():
                raise ConfigError(f"prefill_profile: {path}: no such file")
            return read_prefill_profile(path)
        if self.prefill_token_s:
            return PrefillProfile(self.prefill_fixed_s, self.prefill_token_s, self.prefill_token_pair_s)
        if self.prefill_fixed_s or self.prefill_token_pair_s:
            raise ConfigError("prefill_fixed_s and prefill_token_pair_s need prefill_token_s beside them")
        return None


@dataclass
class LearnsPrefill(TakesPrefillProfile, Learns):
    """Base of policies that know the cost of prefill, from their settings or learned from the steps."""

    _prefill: PrefillCost = field(init=False)

    def __post_init__(self) -> None:
        """Take the profile, if there is one."""
        self._prefill = PrefillCost(self._try_get_profile())

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Its prefill begins."""
        self._prefill.on_started(turn)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Its prefill stops."""
        self._prefill.on_stopped(turn)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its prefill is over."""
        self._prefill.on_stopped(turn)

    def on_step(self, step: StepView) -> None:
        """Learn what prefill costs."""
        self._prefill.observe(step)

    def get_state(self) -> dict[str, Any]:
        """The learned cost."""
        return {"prefill": self._prefill.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned."""
        self._prefill.set_state(state["prefill"])
