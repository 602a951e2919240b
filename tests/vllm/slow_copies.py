"""Stands in for the thread that copies: copies happen late, or fail, as a test says."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection

from tenuto.vllm.tiers.copies import Job


class SlowCopies:
    """Copies at the last moment: when a caller waits for them, or when chance lets them end."""

    def __init__(self, rng: random.Random, *, share_done: float = 1.0, share_failed: float = 0.0) -> None:
        """Each step, each job ends with probability `share_done`; it fails with `share_failed`."""
        self.rng = rng
        self.share_done = share_done
        self.share_failed = share_failed
        self.num_bytes = 0
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._done: list[Job] = []

    def submit(self, job: Job) -> None:
        self._jobs[job.job_id] = job

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in sorted(job_ids):
            if job_id in self._jobs:
                self._finish(self._jobs.pop(job_id))

    def advance(self) -> None:
        """A step has passed. Loads and stores do not wait for each other; each kind keeps its order."""
        for is_load in (True, False):
            for job_id in [each for each, job in self._jobs.items() if job.is_load is is_load]:
                if self.rng.random() >= self.share_done:
                    break
                self._finish(self._jobs.pop(job_id))

    def take_done(self) -> list[Job]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass

    def _finish(self, job: Job) -> None:
        fails = self.rng.random() < self.share_failed
        for part in job.parts:
            rows = part.source[part.sources]
            part.target[part.targets] = -rows if fails else rows
        job.num_done, job.has_failed = len(job.parts), fails
        job.busy_s = job.num_bytes / 1e9
        self.num_bytes += job.num_bytes
        self._done.append(job)
