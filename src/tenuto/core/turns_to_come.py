"""How many turns a job of a kind still sends, for the bound on waits.

Jobs of one tenant whose prompts begin alike are of one kind. Of each kind, it counts the turns that finished
and those after which the job came back. If a share p comes back, a job still sends 1 / (1 - p) turns, this
one included. A kind that was not seen before counts as single requests, so nobody can make a stranger wait
longer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

PRIOR_TURNS = 2.0
"""A kind starts with so many turns after which no job came back."""
MEMORY_TURNS = 500.0
"""Counts of a kind fade to 1/e over so many of its turns."""
MAX_TURNS = 32.0
"""The most turns that a job is expected to send: it bounds what an error can cost."""
MAX_KINDS = 4096
"""Tenants and prompts are made up by clients, so kinds are bounded; the one seen longest ago goes first."""


@dataclass(slots=True)
class _Counts:
    finished: float = 0.0
    followed: float = 0.0


class TurnsToCome:
    """Turns to come by tenant and kind; O(1) a turn."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str | None, str | None], _Counts] = OrderedDict()

    def finish(self, tenant: str | None, kind: str | None) -> None:
        """A turn finished."""
        if kind is None:
            return
        counts = self._kinds.setdefault((tenant, kind), _Counts())
        self._kinds.move_to_end((tenant, kind))
        fade = 1 - 1 / MEMORY_TURNS
        counts.finished = fade * counts.finished + 1
        counts.followed *= fade
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def follow(self, tenant: str | None, kind: str | None) -> None:
        """A job sent another turn after one that finished."""
        counts = self._kinds.get((tenant, kind))
        if counts is not None:
            counts.followed += 1

    def get(self, tenant: str | None, kind: str | None) -> float:
        """Turns that such a job still sends, the one that arrives now included; 1 for an unknown kind."""
        counts = self._kinds.get((tenant, kind))
        if counts is None:
            return 1.0
        num_ended = max(0.0, counts.finished - counts.followed)
        return min(MAX_TURNS, (counts.finished + PRIOR_TURNS) / (num_ended + PRIOR_TURNS))
