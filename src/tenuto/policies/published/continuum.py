"""continuum: the whole Continuum paper. A pin lasts as long as its expected gain exceeds its cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tenuto.core.policy import EngineSettings, Needs, setting
from tenuto.core.types import (
    Decision,
    EngineView,
    Keep,
    Lease,
    LeaseRefusal,
    Offload,
    ToolCall,
    Turn,
    Yields,
)
from tenuto.policies.published._continuum import MIN_SAMPLES, RENEW_S, LearnsTtl
from tenuto.policies.published._prefill import TakesPrefillProfile


@dataclass
class Continuum(TakesPrefillProfile, LearnsTtl):
    """Pin for the τ ≥ 0 that maximises P(tool time ≤ τ) · (T·η + PR) − τ; pinned jobs first, then by job.

    Source: arXiv 2511.02230.

    - P is the empirical CDF of the tool's own times. With no more than K of them it is the CDF of all tools'
      times, and with no more than K in all it is an exponential with mean 1 s.
    - T is the mean queueing delay of turns that came back and found no pin.
    - η = −Corr(k, N − k), over the turns k = 1 … N of finished jobs.
    - PR is the time to compute the context again, or to load it from a tier, in seconds.

    Known weaknesses: the full τ is charged even if the tool returns early. T keeps its last value after the
    queue is gone, until a turn without a pin is measured. There is one η for all kinds of jobs.
    """

    needs: ClassVar[Needs] = Needs(engine=EngineSettings(offload="asked"))

    min_samples: int = setting(
        MIN_SAMPLES, "trust a tool's own times only if more than this many are known (K)", minimum=1
    )
    unpin: str = setting(
        "stall",
        "when pins yield to the first waiting turn: once nothing else runs (stall), or whenever the turn "
        "does not fit (head)",
        choices=("stall", "head"),
    )

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Pin for the best τ, if that is not 0."""
        if turn.tool is None:
            return Offload()
        ttl_s = self._get_ttl_s(turn.tool.name, turn, view, self.min_samples)
        return self._pin(view.now_s + ttl_s) if ttl_s > 0 else Offload(LeaseRefusal.PRICE)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Unpin when the time is up, unless a turn of the job waits."""
        return self._pin(view.now_s + RENEW_S) if lease.next_turn_waiting else Offload()

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """Learn how long the tool took."""
        if tool is not None:
            self._tool_times.observe(tool.name, tool_s)

    def _pin(self, until_s: float) -> Keep:
        yields = Yields.ON_DEADLOCK if self.unpin == "stall" else Yields.ALWAYS
        return Keep(until_s, yields=yields)
