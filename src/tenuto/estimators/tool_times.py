"""How long tools take, learned from the gaps between a job's turns."""

from __future__ import annotations

from collections import OrderedDict

MAX_TOOLS = 1000
"""Most tools remembered: names come from clients and model output. The one unseen for longest is dropped."""


class MeanTimes:
    """Mean time per tool, over all its calls."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def observe(self, tool: str, tool_s: float) -> None:
        """Count one call."""
        count, mean = self._means.pop(tool, (0, 0.0))
        self._means[tool] = (count + 1, mean + (tool_s - mean) / (count + 1))
        if len(self._means) > MAX_TOOLS:
            self._means.popitem(last=False)

    def get_mean_s(self, tool: str) -> float:
        """Mean seconds of the tool; 0 for one not seen yet."""
        return self._means.get(tool, (0, 0.0))[1]

    def __repr__(self) -> str:
        return f"MeanTimes({dict(self._means)})"
