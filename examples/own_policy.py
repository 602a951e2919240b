"""A policy of your own, against stock vLLM and the default policy.

    python examples/own_policy.py

The policy keeps a job's cache while its tool is expected to be quick; it learns each tool's mean time. It
also lets the oldest job go first. Keeping alone helps little: a turn that waits behind many new jobs has lost
its cache by the time it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tenuto
from tenuto import Decision, EngineView, Keep, Key, Lease, Policy, Release, ToolCall, Turn, setting


@dataclass
class KeepQuick(Policy):
    """Keep the cache through tools whose mean time is short; the oldest job goes first."""

    quick_s: float = setting(2.0, "longest mean time of a quick tool, seconds", minimum=0)
    _total_s: dict[str, float] = field(init=False, default_factory=dict)
    _num_calls: dict[str, int] = field(init=False, default_factory=dict)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Waiting turns: those of the oldest job first."""
        return (turn.job.arrival_s,)

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Asked when a turn has ended. A tool that was never seen counts as quick."""
        if turn.tool is None:
            return Release()
        num_calls = self._num_calls.get(turn.tool.name, 0)
        mean_s = self._total_s[turn.tool.name] / num_calls if num_calls else 0.0
        return Keep(view.now_s + 2 * self.quick_s) if mean_s <= self.quick_s else Release()

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """When memory is short, the newest job's cache goes first."""
        return (-lease.turn.job.arrival_s,)

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """Told when the job is back from its tool."""
        if tool is not None:
            self._total_s[tool.name] = self._total_s.get(tool.name, 0.0) + tool_s
            self._num_calls[tool.name] = self._num_calls.get(tool.name, 0) + 1


def main() -> None:
    result = tenuto.compare(
        policies=["stock", "tenuto", KeepQuick()],
        gpu="A100-40",
        workload="ab8",
        jps=2.0,
        seeds=[1],
        window_s=20.0,
    )
    print(result)


if __name__ == "__main__":
    main()
