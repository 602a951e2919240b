"""continuum-fixed: the public Continuum prototype, a fixed pin for tools that have been quick."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tenuto.core.policy import Key, Policy, setting
from tenuto.core.turn_work import MAX_NAMES
from tenuto.core.types import (
    Decision,
    EngineView,
    Keep,
    Lease,
    Release,
    ToolCall,
    Turn,
    Yields,
)

RENEW_S = 3600.0
"""How far variant A moves a pin's deadline once a turn of its job waits. That turn's start ends the pin."""


@dataclass(eq=False)
class MeanTimes:
    """Mean time per tool, over all its calls."""

    _means: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)

    def observe(self, tool: str, tool_s: float) -> None:
        """Count one call."""
        count, mean = self._means.pop(tool, (0, 0.0))
        self._means[tool] = (count + 1, mean + (tool_s - mean) / (count + 1))
        if len(self._means) > MAX_NAMES:
            self._means.popitem(last=False)

    def get_mean_s(self, tool: str) -> float:
        """Mean seconds of the tool; 0 for one not seen yet."""
        return self._means.get(tool, (0, 0.0))[1]


@dataclass
class ContinuumFixed(Policy):
    """Pin for 2 s unless the tool's mean time is longer; pinned jobs first, then by job arrival.

    Source: the prototype that accompanies arXiv 2511.02230. An unseen tool counts as 0 s. Variant A keeps
    an expired pin whose job already waits; variant B, behind the published sweeps, does not. A pin yields
    only when nothing could run otherwise. Known weakness: pins starve new jobs, and their first and second
    turns wait very long.
    """

    ttl_s: float = setting(2.0, "seconds a pin lasts; a tool with a longer mean is not pinned", minimum=0)
    variant: str = setting("B", "A keeps an expired pin whose job waits, B does not", choices=("A", "B"))
    tools: str = setting(
        "named",
        "which tool calls are pinned: those that the client or the workload names (named), or only those "
        "whose command the answer shows (shown), as the prototype's parser reads them",
        choices=("named", "shown"),
    )
    _tool_times: MeanTimes = field(init=False, default_factory=MeanTimes)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Pinned jobs first, then by the job's first arrival."""
        return (0 if turn.has_lease else 1, turn.job.arrival_s, turn.job.number)

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Pin if the turn calls a tool that has been quick so far."""
        tool = turn.tool
        if tool is None or (self.tools == "shown" and tool.command is None):
            return Release()
        if self._tool_times.get_mean_s(tool.name) > self.ttl_s:
            return Release()
        return Keep(view.now_s + self.ttl_s, yields=Yields.ON_DEADLOCK)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Variant A waits for a job that is already in the queue."""
        if self.variant == "A" and lease.next_turn_waiting:
            return Keep(view.now_s + RENEW_S, yields=Yields.ON_DEADLOCK)
        return Release()

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """The pin with the latest deadline goes first."""
        return (-lease.until_s,)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The newest job that is not on its last turn, then the newest."""
        return (1 if turn.is_last else 0, -turn.job.arrival_s)

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """Count the time of the tool that the job's previous turn called."""
        if tool is not None:
            self._tool_times.observe(tool.name, tool_s)
