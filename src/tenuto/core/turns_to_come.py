"""How many turns a job of a kind still sends, for the bound on waits.

Jobs of one tenant whose prompts begin alike are of one kind. Of each kind, it counts the turns that finished
and those after which the job came back. If a share p comes back, a job still sends 1 / (1 - p) turns, this
one included. A kind that was not seen before counts as single requests, so nobody can make a stranger wait
longer.
"""

from __future__ import annotations

from tenuto.core.jobs import JobState
from tenuto.core.kind_counts import KindCounts

PRIOR_TURNS = 2.0
"""A kind starts with so many turns after which no job came back."""
MAX_TURNS = 32.0
"""The most turns that a job is expected to send: it bounds what an error can cost."""
NO_KIND = ""
"""The name for jobs without a kind that came back."""


class TurnsToCome:
    """Turns to come by tenant and kind; O(1) a turn."""

    def __init__(self) -> None:
        self._kinds = KindCounts()
        """Finished turns; those after which the job came back are marked."""

    def finish(self, job: JobState) -> None:
        """A turn of this job finished."""
        name = _get_name(job.kind, job.num_turns)
        if name is not None:
            self._kinds.observe(job.tenant, name)

    def follow(self, job: JobState) -> None:
        """The job sent another turn after one that finished."""
        counts = self._kinds.get(job.tenant, _get_name(job.kind, job.num_turns - 1))
        if counts is not None:
            counts.marked += 1

    def get(self, job: JobState) -> float:
        """Turns that the job still sends, the one that arrives now included; 1 for an unknown kind."""
        counts = self._kinds.get(job.tenant, _get_name(job.kind, job.num_turns))
        if counts is None:
            return 1.0
        num_ended = max(0.0, counts.turns - counts.marked)
        return min(MAX_TURNS, (counts.turns + PRIOR_TURNS) / (num_ended + PRIOR_TURNS))


def _get_name(kind: str | None, num_turns: int) -> str | None:
    """What the turns of a job are counted under; None if they are not."""
    return kind if kind is not None or num_turns < 2 else NO_KIND
