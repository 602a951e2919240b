"""How long tools take, and jobs are away, learned from the gaps between a job's turns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.core.turn_work import MAX_NAMES, MAX_SUM, MEMORY, PRIOR_CASES, forget_some
from tenuto.core.types import Job


class RecentTimes:
    """The last `max_times` samples in seconds, oldest forgotten first, also kept sorted."""

    def __init__(self, times_s: Iterable[float] = (), max_times: int = MEMORY) -> None:
        self._max_times = max_times
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        for time_s in times_s:
            self.observe(time_s)

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, time_s: float) -> None:
        """Add one sample; raises ValueError if it is not a time. Moves at most `max_times` pointers."""
        if not 0 <= time_s <= MAX_SUM:
            raise ValueError(f"a time must be from 0 to {MAX_SUM:g} s, got {time_s!r}")
        if len(self._recent) == self._max_times:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(time_s)
        insort(self._sorted, time_s)

    def get_sorted(self) -> Sequence[float]:
        """The samples in ascending order; not to be changed."""
        return self._sorted

    def get_state(self) -> list[float]:
        """The samples as JSON values, oldest first. The constructor accepts them."""
        return list(self._recent)

    def __repr__(self) -> str:
        return f"RecentTimes({list(self._recent)})"


@dataclass(eq=False)
class ToolSamples:
    """Recent times per tool. Of too many tools, some are dropped: see `forget_some`."""

    _tools: OrderedDict[str, RecentTimes] = field(default_factory=OrderedDict)

    def observe(self, tool: str, tool_s: float) -> None:
        """Count one call."""
        times = self._tools.get(tool) or RecentTimes()
        times.observe(tool_s)
        self._tools[tool] = times
        self._tools.move_to_end(tool)
        if len(self._tools) > MAX_NAMES:
            forget_some(self._tools, len)

    def get_left_s(self, tool: str, elapsed_s: float, said_s: float | None) -> float:
        """Expected seconds until the call returns: the mean over earlier calls that took longer.

        Without such calls: what the client said, or as long again as it has taken, at least 1 s.
        """
        times = self._tools[tool].get_sorted() if tool in self._tools else ()
        longer = times[bisect_right(times, elapsed_s) :]
        return sum(longer) / len(longer) - elapsed_s if longer else max(elapsed_s, said_s or 0.0, 1.0)

    def get_share_longer(self, elapsed_s: float, *tools: str) -> float:
        """The share of the last tool's earlier calls that took longer, shrunk towards that of the one before.

        The first one's share is shrunk towards 1.
        """
        share = 1.0
        for tool in tools:
            times = self._tools[tool].get_sorted() if tool in self._tools else ()
            num_longer = len(times) - bisect_right(times, elapsed_s)
            share = (num_longer + PRIOR_CASES * share) / (len(times) + PRIOR_CASES)
        return share

    def try_get(self, tool: str) -> RecentTimes | None:
        """The tool's own times; None for one not seen."""
        return self._tools.get(tool)

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"tools": {tool: times.get_state() for tool, times in self._tools.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        tools = [(str(tool), RecentTimes(times)) for tool, times in state["tools"].items()]
        self._tools = OrderedDict(tools[-MAX_NAMES:])


@dataclass(eq=False)
class Pauses:
    """How long jobs are away: by the tool they called, or by their kind if no call was seen.

    Each tenant has its own times, so that no stranger's calls of a tool with the same name change them.
    """

    tools: ToolSamples = field(default_factory=ToolSamples)
    _kinds: ToolSamples = field(default_factory=ToolSamples)
    """Kinds have names that do not outlive the engine, so they are kept apart."""

    def observe(self, job: Job, tool: str | None, pause_s: float) -> None:
        """Count one pause of a job that came back."""
        samples, names = self._find(job, tool)
        for name in names:
            samples.observe(name, pause_s)

    def get_left_s(self, job: Job, tool: str | None, elapsed_s: float, said_s: float | None) -> float:
        """Expected seconds until the job is back: see `ToolSamples.get_left_s`."""
        samples, names = self._find(job, tool)
        return samples.get_left_s(names[-1], elapsed_s, said_s)

    def get_share_longer(self, job: Job, tool: str | None, elapsed_s: float) -> float:
        """The share of such pauses that took longer: see `ToolSamples.get_share_longer`."""
        samples, names = self._find(job, tool)
        return samples.get_share_longer(elapsed_s, *names)

    def _find(self, job: Job, tool: str | None) -> tuple[ToolSamples, tuple[str, ...]]:
        """The samples of such pauses, and the names by which they are found there, the narrowest last."""
        if tool is None:
            return self._kinds, (repr((job.tenant,)), repr((job.tenant, job.kind)))
        return self.tools, (repr((job.tenant, tool)),)
