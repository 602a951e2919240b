"""Which jobs are on which engine, the work that they still need, and the KV that they will hold together."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Placed:
    """A job on an engine, all in tokens. Work counts a generated token as several prompt tokens."""

    engine: str
    work: float = 0.0
    """Expected, of all its turns to come."""
    held: float = 0.0
    """Its KV now."""
    peak: float = 0.0
    """Its KV at its longest."""


@dataclass(slots=True)
class _Engine:
    work: float = 0.0
    most: float = 0.0
    jobs: dict[str, Placed] = field(default_factory=dict)


_NOTHING = _Engine()


class Placements:
    """The jobs of each engine. A change takes O(n log n) in the jobs of that engine alone."""

    def __init__(self) -> None:
        self._jobs: dict[str, Placed] = {}
        self._engines: dict[str, _Engine] = {}

    def get(self, job_id: str) -> Placed | None:
        """The job; None if it is on no engine."""
        return self._jobs.get(job_id)

    def count_jobs(self, engine: str) -> int:
        """Jobs there, those in tool calls included."""
        return len(self._engines.get(engine, _NOTHING).jobs)

    def get_work(self, engine: str) -> float:
        """The work that all jobs there still need."""
        return self._engines.get(engine, _NOTHING).work

    def get_most_tokens(self, engine: str, num_prompt_tokens: int) -> float:
        """The most KV that the jobs there will hold at one time, if one with such a prompt joins them now.

        All are taken to grow at one pace, and each leaves at its longest. So when one leaves, the others are
        not at their longest yet: less is needed than the sum of all peaks.
        """
        return self._engines.get(engine, _NOTHING).most + num_prompt_tokens

    def put(self, job_id: str, placed: Placed) -> None:
        """A job is on an engine, or something of it changed."""
        before = self._jobs.get(job_id)
        if before is not None and before.engine != placed.engine:
            self.remove(job_id)
        self._jobs[job_id] = placed
        engine = self._engines.setdefault(placed.engine, _Engine())
        engine.jobs[job_id] = placed
        _renew(engine)

    def remove(self, job_id: str) -> Placed | None:
        """A job ended. Returns what was known of it."""
        placed = self._jobs.pop(job_id, None)
        if placed is not None:
            engine = self._engines[placed.engine]
            del engine.jobs[job_id]
            _renew(engine)
            if not engine.jobs:
                del self._engines[placed.engine]
        return placed

    def leave(self, engine: str) -> None:
        """An engine is gone, and no job is there any more."""
        for job_id in self._engines.pop(engine, _NOTHING).jobs:
            del self._jobs[job_id]

    def __repr__(self) -> str:
        return f"Placements({self._jobs!r})"


def _renew(engine: _Engine) -> None:
    jobs = sorted((max(0.0, job.peak - job.held), job.held) for job in engine.jobs.values())
    held, most = sum(each for _, each in jobs), 0.0
    for num_gone, (growth, own) in enumerate(jobs):
        # Just before this one leaves. The one that joins has grown as much, too.
        most = max(most, held + (len(jobs) - num_gone + 1) * growth)
        held -= own
    engine.most = most
    engine.work = sum(job.work for job in engine.jobs.values())
