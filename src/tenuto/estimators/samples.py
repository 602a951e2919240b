"""Times of every tool's last calls, with the cold-start ladder of Continuum (arXiv 2511.02230)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tenuto.estimators.empirical import MAX_TIMES, RecentTimes
from tenuto.estimators.tool_times import MAX_TOOLS

MIN_SAMPLES = 100
"""K of the ladder: a sample is trusted if it has more than K values."""


class ToolSamples:
    """Recent times per tool and over all tools; of too many tools, the longest unseen is dropped."""

    def __init__(self, max_tools: int = MAX_TOOLS, max_times: int = MAX_TIMES) -> None:
        self._max_tools = max_tools
        self._max_times = max_times
        self._tools: OrderedDict[str, RecentTimes] = OrderedDict()
        self._all = RecentTimes(max_times=max_times)

    def observe(self, tool: str, tool_s: float) -> None:
        """Count one call."""
        self._all.observe(tool_s)
        if tool not in self._tools:
            self._tools[tool] = RecentTimes(max_times=self._max_times)
        self._tools[tool].observe(tool_s)
        self._tools.move_to_end(tool)
        if len(self._tools) > self._max_tools:
            self._tools.popitem(last=False)

    def try_get(self, tool: str) -> RecentTimes | None:
        """The tool's own times; None for one not seen."""
        return self._tools.get(tool)

    def try_get_trusted(self, tool: str, min_samples: int = MIN_SAMPLES) -> RecentTimes | None:
        """The times to judge a tool by: its own if over `min_samples`, else all tools', else None."""
        own = self._tools.get(tool)
        if own is not None and len(own) > min_samples:
            return own
        return self._all if len(self._all) > min_samples else None

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""
        tools = {tool: times.get_state() for tool, times in self._tools.items()}
        return {"all": self._all.get_state(), "tools": tools}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier run learned; raises if it is not a state, and then changes nothing."""
        own = [(str(tool), RecentTimes(times, self._max_times)) for tool, times in state["tools"].items()]
        times_of_all = RecentTimes(state["all"], self._max_times)
        self._tools = OrderedDict(own[-self._max_tools :])
        self._all = times_of_all

    def __repr__(self) -> str:
        return f"ToolSamples({self._all}, {dict(self._tools)})"
