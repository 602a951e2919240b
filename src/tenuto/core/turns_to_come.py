"""How many turns a job of a kind still sends, for the bound on waits.

Jobs of one tenant whose prompts begin alike are of one kind. Of each kind, it counts the turns that finished
and those after which the job came back. If a share p comes back, a job still sends 1 / (1 - p) turns, this
one included. A kind that was not seen before counts as single requests, so nobody can make a stranger wait
longer.
"""

from __future__ import annotations

from tenuto.core.kind_counts import KindCounts

PRIOR_TURNS = 2.0
"""A kind starts with so many turns after which no job came back."""
MAX_TURNS = 32.0
"""The most turns that a job is expected to send: it bounds what an error can cost."""


class TurnsToCome:
    """Turns to come by tenant and kind; O(1) a turn."""

    def __init__(self) -> None:
        self._kinds = KindCounts()
        """Finished turns; those after which the job came back are marked."""

    def finish(self, tenant: str | None, kind: str | None) -> None:
        """A turn finished."""
        if kind is not None:
            self._kinds.observe(tenant, kind)

    def follow(self, tenant: str | None, kind: str | None) -> None:
        """A job sent another turn after one that finished."""
        counts = self._kinds.get(tenant, kind)
        if counts is not None:
            counts.marked += 1

    def get(self, tenant: str | None, kind: str | None) -> float:
        """Turns that such a job still sends, the one that arrives now included; 1 for an unknown kind."""
        counts = self._kinds.get(tenant, kind)
        if counts is None:
            return 1.0
        num_ended = max(0.0, counts.turns - counts.marked)
        return min(MAX_TURNS, (counts.turns + PRIOR_TURNS) / (num_ended + PRIOR_TURNS))
