"""The table of jobs: finds a job by id or by content, and remembers a bounded number of idle jobs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tenuto.core.idle_jobs import IdleJobs
from tenuto.core.jobs import Arrival, JobState
from tenuto.core.requests.lineage import Lineage

KIND_CHARS = 32
"""Characters of a block hash that name a kind of job; enough to tell the kinds apart."""


class JobTable:
    """All jobs with a turn in the engine, and the most recently active idle jobs."""

    def __init__(self, max_idle: int, hash_block_size: int, *, infers: bool) -> None:
        """`infers`: whether the job of a turn without a job id is recognised by the prompt's content."""
        self.jobs: dict[str, JobState] = {}
        self.idle = IdleJobs()
        # Jobs are forgotten there when they are forgotten here. Its own bound is for jobs with live turns.
        self.lineage = Lineage(hash_block_size, 2 * max_idle)
        self._max_idle = max_idle
        self._infers = infers

    def __contains__(self, job_id: object) -> bool:
        return job_id in self.jobs

    def find(self, turn_id: str, arrival: Arrival, now_s: float) -> JobState:
        """The job of a turn that arrived; a new job if neither an id nor the content names a job."""
        job_id, name = arrival.hints.job_id, arrival.hints.conversation
        if job_id is None and self._infers and arrival.hashes:
            named = None if name is None else self.jobs.get(name)
            preferred = name if named is not None and not named.live_turn_ids else None
            job_id = self.lineage.find(arrival.hashes, arrival.prompt, arrival.hints.tenant, preferred)
            job_id = job_id or self._find_repeated(arrival)
        if job_id is None and self._infers and name not in self.jobs:
            # Another job may have begun with the same words; then this one has no name that is its own.
            job_id = name
        # Client ids are printable. An id with a tab is therefore never equal to a client's id.
        job_id = job_id if job_id is not None else f"\tturn:{turn_id}"
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = JobState(job_id, now_s, arrival.hints.tenant, _get_kind(arrival.hashes))
        self.idle.discard(job_id)
        return job

    def _find_repeated(self, arrival: Arrival) -> str | None:
        """The idle job whose last turn the client asks for again, so that its answer is not needed.

        Not after a job's first turn: two jobs may begin with the same prompt. Later prompts have an answer in
        them.
        """
        job_id = self.lineage.find_repeated(arrival.hashes, arrival.prompt, arrival.hints.tenant)
        job = None if job_id is None else self.jobs.get(job_id)
        is_retry = job is not None and job.num_turns > 1 and not job.live_turn_ids
        return job_id if is_retry else None

    def remember(self, job: JobState, arrival: Arrival) -> None:
        """Remember a finished turn, so that a prompt that extends it is assigned to the same job."""
        if arrival.hashes and self._infers:
            self.lineage.remember(job.job_id, arrival.hashes, arrival.prompt, job.tenant)

    def get(self, job_id: str) -> JobState | None:
        """A known job, or None."""
        return self.jobs.get(job_id)

    def take_over(self, other: JobTable) -> None:
        """Go on with the jobs that another table knows; forget some if it has more."""
        self.jobs, self.idle, self.lineage = other.jobs, other.idle, other.lineage
        self.lineage.set_max_jobs(2 * self._max_idle)
        while (job := self._get_first_to_forget()) is not None:
            self.forget(job)

    def mark_idle(self, job: JobState) -> JobState | None:
        """A job has no turn in the engine any more. Return a job that should now be forgotten, or None."""
        if job.last_finish_s is None:
            # None of its turns finished, so no later turn can extend one.
            return job
        self.idle.add(job.job_id, job.tenant)
        return self._get_first_to_forget()

    def forget(self, job: JobState) -> None:
        """Forget a job."""
        del self.jobs[job.job_id]
        self.idle.discard(job.job_id)
        self.lineage.forget(job.job_id)

    def _get_first_to_forget(self) -> JobState | None:
        """The job to forget now; None if the idle jobs are not too many."""
        first = self.idle.get_first_to_forget() if len(self.idle) > self._max_idle else None
        return None if first is None else self.jobs[first]


def _get_kind(hashes: Sequence[Hashable]) -> str | None:
    """A name for the first block of a prompt; None if the prompt has no full block."""
    if not hashes:
        return None
    first = hashes[0]
    return first.hex()[:KIND_CHARS] if isinstance(first, bytes) else str(first)[:KIND_CHARS]
