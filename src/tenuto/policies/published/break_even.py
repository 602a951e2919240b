"""break-even: hold a job's cache for as long as holding it costs less than restoring it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tenuto.core.policy import EngineSettings, Needs, setting
from tenuto.core.types import Decision, EngineView, Keep, Lease, Offload, Turn, Yields
from tenuto.policies.published._prefill import TakesPrefillProfile

RENEW_S = 600.0
"""How far a hold's deadline moves once a turn of its job waits. That turn's start ends the hold."""


@dataclass
class BreakEven(TakesPrefillProfile):
    """Hold for t* = reload cost / (share of the KV cache held), then store it below the GPU or let it go.

    Source: arXiv 2608.30830, the cost model C(t) = alpha · t + beta. Holding costs the share of the GPU that
    other jobs cannot use. The published alpha of 0.0176 GPU-seconds per second is 3,000 tokens in a pool of
    680,768 on four GPUs. The reload cost is the prefill time or, if a tier has the blocks, the GPU time of a
    load. The paper sets a deadline for host memory by the load; here the tier's own eviction decides.

    Known weakness: it ignores the load and the tool. The hold is as long on an idle server as on one with a
    queue.
    """

    needs: ClassVar[Needs] = Needs(engine=EngineSettings(offload="asked"))

    load_cost_s: float = setting(
        0.005, "GPU seconds that a load from a tier costs (0.02 over the paper's four GPUs)", minimum=0
    )

    def _get_hold_s(self, num_tokens: int, view: EngineView) -> float:
        """The break-even time: after it, holding the tokens has cost as much as reloading them."""
        reload_s = self._prefill.profile.get_s(num_tokens)
        if view.tiers:
            reload_s = min(reload_s, self.load_cost_s)
        return reload_s * view.num_blocks * view.block_size / num_tokens

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Hold until the break-even time."""
        hold_s = self._get_hold_s(turn.num_prompt_tokens + turn.num_output_tokens, view)
        return _hold(view.now_s + hold_s, view)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Store the blocks, unless the job's next turn already waits: then keep them for it."""
        if lease.next_turn_waiting:
            return _hold(view.now_s + RENEW_S, view)
        return Offload()


def _hold(until_s: float, view: EngineView) -> Keep:
    """Hold without yielding until the blocks can be stored, as in the paper; without a tier, yield."""
    return Keep(until_s, yields=Yields.ON_DEADLOCK if view.tiers else Yields.ALWAYS)
