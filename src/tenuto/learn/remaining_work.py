"""How much work a job still has, in prefill tokens, and how well that can be foreseen.

    expected turns left (of jobs that had as many turns already) × work per turn (of this job and of all)

Predictions are held against what came: their correlation is the trust that they deserve. An order by
remaining work that is weighted by it falls back to the order of arrival where nothing can be foreseen.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.learn.remaining_turns import RemainingTurns

PRIOR_TURNS = 1.0
"""Turns of its own after which a job's mean work counts as much as that of all jobs."""
DECAY = 0.999
"""What a turn's weight in the mean of all falls to with each later one."""
MAX_PREDICTIONS = 64
"""Turns of one job whose predictions are held against what came."""


@dataclass(slots=True)
class _Job:
    num_turns: int = 0
    work: float = 0.0
    predictions: list[tuple[float, float]] = field(default_factory=list)
    """Work done, and remaining work as predicted then."""


class RemainingWork:
    """Work done per job and turns per job, of the jobs that are known and the latest that ended."""

    def __init__(self) -> None:
        self._turns_left = RemainingTurns()
        self._jobs: dict[str, _Job] = {}
        self._sum_work = self._num_turns = 0.0
        self._agreement = _Agreement()

    def observe_turn(self, job_id: str, work: float) -> None:
        """A job's turn is done, which took so much work."""
        job = self._jobs.setdefault(job_id, _Job())
        job.num_turns += 1
        job.work += work
        self._sum_work = DECAY * self._sum_work + work
        self._num_turns = DECAY * self._num_turns + 1
        if len(job.predictions) < MAX_PREDICTIONS:
            job.predictions.append((job.work, self.get_work_left(job_id)))

    def end_job(self, job_id: str) -> None:
        """A job will have no more turns."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        # The last prediction is of a job about to end; every job has one, right or wrong.
        for done, predicted in job.predictions[:-1]:
            self._agreement.observe(predicted, job.work - done)
        self._turns_left.observe(job.num_turns)

    def get_work_left(self, job_id: str, next_turn: float | None = None) -> float:
        """Expected work of a job's turns to come; of the next one where it is known, as that says."""
        job = self._jobs.get(job_id)
        num_turns, work = (0, 0.0) if job is None else (job.num_turns, job.work)
        mean = self._sum_work / self._num_turns if self._num_turns else 1.0
        mean = (PRIOR_TURNS * mean + work) / (PRIOR_TURNS + num_turns)
        num_left = self._turns_left.get_mean_left(num_turns)
        return mean * num_left if next_turn is None else next_turn + mean * (num_left - 1)

    def get_trust(self) -> float:
        """Correlation between predicted and actual work left, from 0 (none, or unknown) to 1."""
        return self._agreement.get_correlation()

    def get_state(self) -> dict[str, Any]:
        """What was learned of jobs that ended, as JSON can hold it."""
        return {
            "turns": self._turns_left.get_state(),
            "work": [self._sum_work, self._num_turns],
            "agreement": self._agreement.sums,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier run learned; raises if it is not a state, and then changes nothing."""
        turns_left = RemainingTurns(state["turns"])
        sum_work, num_turns = _get_numbers(state["work"], 2)
        sums = _get_numbers(state["agreement"], 6)
        self._turns_left, self._agreement.sums = turns_left, sums
        self._sum_work, self._num_turns = sum_work, num_turns

    def __repr__(self) -> str:
        return f"RemainingWork({self._jobs!r}, {self._turns_left!r}, {self._agreement!r})"


class _Agreement:
    """A decaying correlation."""

    def __init__(self) -> None:
        self.sums = [0.0] * 6

    def observe(self, x: float, y: float) -> None:
        added = (1.0, x, y, x * x, y * y, x * y)
        self.sums = [DECAY * total + more for total, more in zip(self.sums, added, strict=True)]

    def get_correlation(self) -> float:
        weight, x, y, xx, yy, xy = self.sums
        variances = (weight * xx - x * x) * (weight * yy - y * y)
        if weight < 8 or variances <= 0:
            return 0.0
        return max(0.0, (weight * xy - x * y) / math.sqrt(variances))

    def __repr__(self) -> str:
        return f"_Agreement({self.sums})"


def _get_numbers(values: Any, count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{count} numbers expected, got {values!r}")
    return numbers


def get_mean_left_s(sorted_s: Sequence[float], elapsed_s: float) -> float | None:
    """Mean time left of those samples that took longer than `elapsed_s`; None if none did."""
    longer = sorted_s[bisect_right(sorted_s, elapsed_s) :]
    return sum(longer) / len(longer) - elapsed_s if longer else None
