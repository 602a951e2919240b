"""Which jobs there are: found by id or by content, remembered between turns, forgotten in time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tenuto.core.jobs import Arrival, JobState
from tenuto.core.requests.lineage import Lineage

KIND_CHARS = 32
"""Of a block's hash, enough to tell kinds of jobs apart."""


class JobTable:
    """All jobs with a turn in the engine, and the idle ones that were active most recently."""

    def __init__(self, max_idle: int, hash_block_size: int, *, infers: bool) -> None:
        """`infers`: whether turns without an id are recognised by their content."""
        self.jobs: dict[str, JobState] = {}
        self.idle: OrderedDict[str, None] = OrderedDict()
        """Jobs without a turn in the engine, the longest idle first."""
        self.lineage = Lineage(hash_block_size, max_idle)
        self._max_idle = max_idle
        self._infers = infers

    def __contains__(self, job_id: object) -> bool:
        return job_id in self.jobs

    def find(self, turn_id: str, arrival: Arrival, now_s: float) -> JobState:
        """The job of a turn that came in; a new job if neither an id nor the content names one."""
        job_id = arrival.hints.job_id
        if job_id is None and self._infers and arrival.hashes:
            job_id = self.lineage.find(arrival.hashes, arrival.prompt, arrival.hints.tenant)
        # The tab keeps ids we make apart from ids that clients choose, which are printable.
        job_id = job_id if job_id is not None else f"\tturn:{turn_id}"
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = JobState(job_id, now_s, arrival.hints.tenant, _get_kind(arrival.hashes))
        self.idle.pop(job_id, None)
        return job

    def remember(self, job: JobState, arrival: Arrival) -> None:
        """A turn of the job finished. A prompt that extends it now belongs to the job."""
        if arrival.hashes and self._infers:
            self.lineage.remember(job.job_id, arrival.hashes, arrival.prompt, job.tenant)

    def mark_idle(self, job: JobState) -> JobState | None:
        """A job has no turn in the engine any more. Returns the job to forget, if there are too many now."""
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
    """A name for the first block of a prompt; None without a full block."""
    if not hashes:
        return None
    first = hashes[0]
    return first.hex()[:KIND_CHARS] if isinstance(first, bytes) else str(first)[:KIND_CHARS]
