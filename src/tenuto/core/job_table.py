"""Which jobs there are: found by id or by content, remembered between turns, forgotten in time."""

from __future__ import annotations

from collections import OrderedDict

from tenuto.core.jobs import Arrival, JobState
from tenuto.core.requests.lineage import Lineage


class JobTable:
    """Every job that has a turn in the engine, and of the others those that were idle for less long."""

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
        """The job of a turn that came in, a new one if nothing else says whose it is."""
        job_id = arrival.hints.job_id
        if job_id is None and self._infers and arrival.hashes:
            job_id = self.lineage.find(arrival.hashes, arrival.prompt)
        # The tab keeps ids we make apart from ids that clients choose, which are printable.
        job_id = job_id if job_id is not None else f"\tturn:{turn_id}"
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = JobState(job_id, now_s, arrival.hints.tenant)
        self.idle.pop(job_id, None)
        return job

    def remember(self, job: JobState, arrival: Arrival) -> None:
        """A turn of the job finished: from now on a prompt that extends it is the job's."""
        if arrival.hashes and self._infers:
            self.lineage.remember(job.job_id, arrival.hashes, arrival.prompt)

    def mark_idle(self, job: JobState) -> JobState | None:
        """A job has no turn in the engine any more; returns the job to forget for that, if there is one."""
        if job.last_finish_s is None:
            # Nothing of it was ever finished: there is nothing to come back to.
            return job
        self.idle[job.job_id] = None
        self.idle.move_to_end(job.job_id)
        return self.jobs[next(iter(self.idle))] if len(self.idle) > self._max_idle else None

    def forget(self, job: JobState) -> None:
        """Forget a job."""
        del self.jobs[job.job_id]
        self.idle.pop(job.job_id, None)
        self.lineage.forget(job.job_id)
