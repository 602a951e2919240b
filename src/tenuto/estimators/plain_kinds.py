"""Which requests are plain: those of jobs that call no tool, such as a person's question.

A job's first turn does not show whether its job is an agent. Jobs of one tenant whose prompts begin alike are
of one kind, so a kind tells: its turns that ended with a tool call are counted beside the others. A kind that
was not seen before goes by how the first turns of new kinds turned out. Before anything was seen, requests
are plain: then they are served as stock vLLM does.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from tenuto.core.types import Job, Turn

MEMORY_TURNS = 500.0
"""Counts of a kind fade to 1/e over so many of its turns."""
MAX_SHARE = 0.25
"""Above this share of turns with a tool call, a kind is an agent's. The last turn of an agent calls none, so
agents of two turns have half."""
MAX_KINDS = 4096
"""Tenants and prompts are made up by clients, so kinds are bounded; the one seen longest ago goes first."""


FAIR_SHARE = 0.5
"""Plain requests and jobs that call tools are two classes; a class that had its half does not go first."""
MEMORY_TOKENS = 50_000.0
"""Work falls to 1/e after so much of it, in prefill tokens: some seconds of a GPU."""


class _Counts:
    __slots__ = ("finished", "with_tool")

    def __init__(self) -> None:
        self.finished = self.with_tool = 0.0

    def observe(self, *, has_tool: bool) -> None:
        fade = 1 - 1 / MEMORY_TURNS
        self.finished = fade * self.finished + 1
        self.with_tool = fade * self.with_tool + has_tool

    @property
    def is_plain(self) -> bool:
        return self.with_tool <= MAX_SHARE * self.finished


class PlainKinds:
    """Shares of turns with a tool call, by tenant and kind; O(1) a turn."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str | None, str | None], _Counts] = OrderedDict()
        self._new_kinds = _Counts()
        """The first turns of all kinds."""

    def observe(self, turn: Turn) -> None:
        """A turn finished. That its client calls it not the last proves no agent: people go on, too."""
        job, has_tool = turn.job, turn.tool is not None
        counts = self._kinds.get((job.tenant, job.kind))
        if counts is None:
            self._new_kinds.observe(has_tool=has_tool)
            counts = self._kinds[job.tenant, job.kind] = _Counts()
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end((job.tenant, job.kind))
        counts.observe(has_tool=has_tool)

    def is_plain(self, job: Job) -> bool:
        """Whether such jobs call no tools."""
        return self._kinds.get((job.tenant, job.kind), self._new_kinds).is_plain

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
