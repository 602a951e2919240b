"""The table of jobs: finds a job by id or by content, and remembers a bounded number of idle jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tenuto.core.jobs import Arrival, JobState
from tenuto.core.requests.lineage import Lineage

KIND_CHARS = 32
"""Characters of a block hash that name a kind of job; enough to tell the kinds apart."""


class JobTable:
    """All jobs with a turn in the engine, and the most recently active idle jobs."""

    def __init__(self, max_idle: int, hash_block_size: int, *, infers: bool) -> None:
        """`infers`: whether the job of a turn without a job id is recognised by the prompt's content."""
        self.jobs: dict[str, JobState] = {}
        self.idle: OrderedDict[str, None] = OrderedDict()
        """Jobs without a turn in the engine; the job that has been idle longest is first."""
        self.lineage = Lineage(hash_block_size, max_idle)
        self._max_idle = max_idle
        self._infers = infers

    def __contains__(self, job_id: object) -> bool:
        return job_id in self.jobs

    def find(self, turn_id: str, arrival: Arrival, now_s: float) -> JobState:
        """The job of a turn that arrived; a new job if neither an id nor the content names a job."""
        job_id = arrival.hints.job_id
        if job_id is None and self._infers and arrival.hashes:
            job_id = self.lineage.find(arrival.hashes, arrival.prompt, arrival.hints.tenant)
        # Client ids are printable. An id with a tab is therefore never equal to a client's id.
        job_id = job_id if job_id is not None else f"\tturn:{turn_id}"
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = JobState(job_id, now_s, arrival.hints.tenant, _get_kind(arrival.hashes))
        self.idle.pop(job_id, None)
        return job

    def remember(self, job: JobState, arrival: Arrival) -> None:
        """Remember a finished turn, so that a prompt that extends it is assigned to the same job."""
        if arrival.hashes and self._infers:
            self.lineage.remember(job.job_id, arrival.hashes, arrival.prompt, job.tenant)

    def get(self, job_id: str) -> JobState | None:
        """A known job, or None."""
        return self.jobs.get(job_id)

    def take_over(self, other: JobTable) -> None:
        """Go on with the jobs that another table knows, the most recently active ones if it has more."""
        self.jobs, self.idle, self.lineage = other.jobs, other.idle, other.lineage
        self.lineage.set_max_jobs(self._max_idle)
        while len(self.idle) > self._max_idle:
            self.forget(self.jobs[next(iter(self.idle))])

    def mark_idle(self, job: JobState) -> JobState | None:
        """A job has no turn in the engine any more. Return a job that should now be forgotten, or None."""
        if job.last_finish_s is None:
            # None of its turns finished, so no later turn can extend one.
            return job
        self.idle[job.job_id] = None
        self.idle.move_to_end(job.job_id)
        return self.jobs[next(iter(self.idle))] if len(self.idle) > self._max_idle else None

    def forget(self, job: JobState) -> None:
        """Forget a job."""
        del self.jobs[job.job_id]
        self.idle.pop(job.job_id, None)
        self.lineage.forget(job.job_id)


def _get_kind(hashes: Sequence[Hashable]) -> str | None:
    """A name for the first block of a prompt; None if the prompt has no full block."""
    if not hashes:
        return None
    first = hashes[0]
    return first.hex()[:KIND_CHARS] if isinstance(first, bytes) else str(first)[:KIND_CHARS]
