"""A turn's work for the engine, in prefill tokens, and what all that is learned of turns shares."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

DECODE_TOKENS = 8.0
"""Prefill tokens that cost as much as one decoded token. `tenuto.sim.cost` gives 5 to 15 on GPUs. It need not
be exact, because work is only compared with work."""
MIN_WEIGHT = 0.05
"""Smallest weight of the latest value in a moving mean; the first values weigh more."""


def get_work(num_prompt_tokens: int, num_hit_tokens: int, num_output_tokens: float) -> float:
    """The work of a turn, at least 1: the prompt tokens that it computes, and its output."""
    work = num_prompt_tokens - num_hit_tokens + DECODE_TOKENS * num_output_tokens
    return work if work > 1.0 else 1.0


PRIOR_CASES = 4.0
"""What a wider group shows counts as this many turns, jobs or calls of a narrower one. A fit needs more steps
than this."""
MEMORY = 500
"""What is learned is of about this many turns of a kind, calls of a tool, or steps. The share of calls within
a time is then known to 2.2 % (one standard error)."""
FADE = 1 - 1 / MEMORY
"""What is left of one's weight after the next one."""
MAX_SUM = 1e12
"""More than any time in seconds, and than any decayed sum of turns, steps or tokens. Beyond it, what a
damaged state has would make means that are no numbers."""
MAX_NAMES = 4096
"""Most kinds, tools or classes that are remembered, because clients can invent them: see `forget_some`."""
MAX_LOOKED_AT = 64
"""Most waiting turns, or names to forget, that are examined one by one. Looking up a turn in the cache costs
as much as a start."""


_Value = TypeVar("_Value")


def forget_some(table: dict[Any, _Value], get_evidence: Callable[[_Value], float]) -> None:
    """Make room in a full table, which has the least recently seen first; O(1) amortised for each new name.

    Of the least recently seen, the half with the least evidence goes; the rest count as seen now. So whoever
    invents names pushes out only those that have as little evidence.
    """
    oldest = sorted(islice(table, MAX_LOOKED_AT), key=lambda name: get_evidence(table[name]))
    for name in oldest[: len(oldest) // 2]:
        del table[name]
    for name in oldest[len(oldest) // 2 :]:
        table[name] = table.pop(name)


@dataclass(slots=True, eq=False)
class Counts:
    """The numbers of all turns and of marked turns. Both decay."""

    turns: float = 0.0
    marked: float = 0.0

    def observe(self, *, is_marked: bool) -> None:
        """Count a turn."""
        self.turns = FADE * self.turns + 1
        self.marked = FADE * self.marked + is_marked

    def mark(self) -> None:
        """Mark the latest turn after all."""
        self.marked = min(self.turns, self.marked + 1)


@dataclass(eq=False)
class KindCounts:
    """Counts turns, and marked turns, by tenant and kind of job. Memory is bounded; O(1) time per turn.

    Jobs of one tenant whose prompts begin alike are of one kind. The caller decides what a mark means.
    """

    _kinds: dict[Hashable, Counts] = field(default_factory=dict)
    """By tenant and kind. Without a tenant by the kind alone, because a pair would take memory."""

    def __len__(self) -> int:
        return len(self._kinds)

    def get(self, tenant: str | None, kind: str | None) -> Counts | None:
        """The counts of a kind; None if it was never seen or was forgotten."""
        return self._kinds.get(kind if tenant is None else (tenant, kind))

    def observe(self, tenant: str | None, kind: str | None, *, is_marked: bool = False) -> Counts:
        """Count a turn of this kind. Returns the kind's counts; a new kind has one turn."""
        name = kind if tenant is None else (tenant, kind)
        counts = self._kinds.pop(name, None) or Counts()
        self._kinds[name] = counts
        counts.observe(is_marked=is_marked)
        if len(self._kinds) > MAX_NAMES:
            forget_some(self._kinds, lambda counts: counts.turns)
        return counts
