"""Jobs whose client is away, in a tool call or for good: which of them are not expected back soon."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.core.indexed_heap import IndexedHeap

MAX_AWAY_S = 30.0
"""A job that is away for longer is not expected back soon, even if its client says that it comes back."""
PATIENCE = 3.0
"""Where clients do not say whether a job goes on, one that is away for so many times the mean has ended."""
DECAY = 0.02
"""Weight of the latest time away in the moving average."""


@dataclass
class AwayJobs:
    """Told when jobs leave and come back; says once of each job that it is silent. O(log n) a change."""

    _left: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """When it left, and whether its client said that it comes back."""
    _deadlines: IndexedHeap = field(default_factory=IndexedHeap, repr=False)
    mean_s: float = 0.0
    """Of the times away; 0 until one was seen."""

    def leave(self, job_id: str, now_s: float, *, will_return: bool) -> None:
        """A turn was answered, and no other turn of the job is open."""
        self._left[job_id] = (now_s, will_return)
        is_known = self.mean_s > 0 and not will_return
        away_s = min(MAX_AWAY_S, PATIENCE * self.mean_s) if is_known else MAX_AWAY_S
        self._deadlines.push(job_id, (now_s + away_s,))

    def come_back(self, job_id: str, now_s: float) -> None:
        """A turn of the job came."""
        if job_id in self._left:
            away_s = now_s - self._left[job_id][0]
            self.mean_s += (DECAY if self.mean_s else 1.0) * (away_s - self.mean_s)
            self.end(job_id)

    def end(self, job_id: str) -> None:
        """The job ended."""
        self._left.pop(job_id, None)
        self._deadlines.discard(job_id)

    def pop_silent(self, now_s: float) -> list[tuple[str, bool]]:
        """The jobs that have become silent, and whether each is taken to have ended."""
        silent = []
        while (key := self._deadlines.get_first_key()) is not None and key <= (now_s,):
            job_id = self._deadlines.pop()
            silent.append((job_id, not self._left.pop(job_id)[1]))
        return silent
