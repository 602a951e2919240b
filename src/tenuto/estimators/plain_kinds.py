"""Which requests are plain: those of jobs that call no tool, such as a person's question.

A job's first turn does not show whether its job is an agent. Jobs of one tenant whose prompts begin alike are
of one kind, so a kind tells: its turns that ended with a tool call are counted beside the others. A kind that
was not seen before goes by how the first turns of new kinds turned out. Before anything was seen, requests
are plain: then they are served as stock vLLM does.
"""

from __future__ import annotations

import math

from tenuto.core.turn_work import Counts, KindCounts
from tenuto.core.types import Job, Turn

MAX_SHARE = 0.25
"""Above this share of turns with a tool call, a kind is an agent's. The last turn of an agent calls none, so
agents of two turns have half."""
FAIR_SHARE = 0.5
"""Plain requests and jobs that call tools are two classes; a class that had its half does not go first."""
MEMORY_TOKENS = 50_000.0
"""Work falls to 1/e after so much of it, in prefill tokens: some seconds of a GPU."""


class PlainKinds:
    """Shares of turns with a tool call, by tenant and kind; O(1) a turn."""

    def __init__(self) -> None:
        self._kinds = KindCounts()
        """Finished turns; those with a tool call are marked."""
        self._new_kinds = Counts()
        """The first turns of all kinds."""

    def observe(self, turn: Turn) -> None:
        """A turn finished. That its client calls it not the last proves no agent: people go on, too."""
        job, has_tool = turn.job, turn.tool is not None
        if self._kinds.get(job.tenant, job.kind) is None:
            self._new_kinds.observe(is_marked=has_tool)
        self._kinds.observe(job.tenant, job.kind, is_marked=has_tool)

    def is_plain(self, job: Job) -> bool:
        """Whether such jobs call no tools."""
        counts = self._kinds.get(job.tenant, job.kind) or self._new_kinds
        return counts.marked <= MAX_SHARE * counts.turns

    def __repr__(self) -> str:
        return f"PlainKinds({len(self._kinds)} kinds)"


class PlainShare:
    """The share of the engine's latest work that plain requests had."""

    def __init__(self) -> None:
        self._plain = self._all = 0.0

    def observe(self, work: float, *, is_plain: bool) -> None:
        """A turn of so much work finished."""
        fade = math.exp(-work / MEMORY_TOKENS)
        self._all = fade * self._all + work
        self._plain = fade * self._plain + (work if is_plain else 0.0)

    @property
    def is_flood(self) -> bool:
        """Whether plain requests had more than their share; a few requests are no flood."""
        return self._plain > FAIR_SHARE * max(self._all, MEMORY_TOKENS)

    def __repr__(self) -> str:
        return f"PlainShare({self._plain}, {self._all})"
