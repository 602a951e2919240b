"""How much work a job still has, in prefill tokens, and how well that can be predicted.

    left after k turns = job's factor · Σ over i > k of  P(there is an i-th turn) · mean work of i-th turns

Probabilities and means come from all jobs, including unfinished ones: some i-th turns ended their job, the
others were followed by one more. The factor compares this job's past turns with the mean turns of the same
numbers. How much past turns tell about the next ones is learned too (Bühlmann's credibility, on logarithms,
because sizes of texts vary by factors).

Predictions are compared with what happened. Their correlation is the trust that they deserve. An order by
remaining work that is weighted by it becomes the order of arrival if nothing can be predicted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_TURNS = 256
"""Largest turn number with statistics of its own; later turns count as this one."""
TURN_DECAY = 0.998
"""Factor on a turn's weight for each later turn of the same number."""
JOB_DECAY = 0.995
"""Factor on a job's weight for each later job, in the spread between and within jobs."""
DECAY = 0.999
"""Factor on a prediction's weight for each later prediction."""
MIN_JOBS = 5
"""Number of ended jobs from which the spread between and within jobs is estimated."""
DEFAULT_CREDIBILITY = 4.0
"""Default until enough jobs ended: after this many turns, a job's own turns weigh as much as all jobs'."""
CREDIBILITIES = (0.25, 100.0)
"""Bounds of the learned credibility. So a job's own turns always have some weight."""
MAX_PREDICTIONS = 64
"""Number of turns per job whose predictions are compared with what happened."""


@dataclass(slots=True)
class _Turns:
    """Statistics of turns of one number: their work, and whether a turn followed. All values decay."""

    count: float = 0.0
    work: float = 0.0
    num_ended: float = 0.0
    num_followed: float = 0.0

    @property
    def mean(self) -> float:
        return self.work / self.count


@dataclass(slots=True)
class _Job:
    num_turns: int = 0
    work: float = 0.0
    sum_logs: float = 0.0
    """Sum of ln(work of a turn / mean work of turns of its number); `sum_squares`: sum of the squares."""
    sum_squares: float = 0.0
    predictions: list[tuple[float, float]] = field(default_factory=list)
    """For each prediction: the work done by then, and the predicted remaining work."""


class RemainingWork:
    """Work of turns by their number, of all jobs, and of the jobs that are known by themselves.

    All is O(1) amortised: sums over turns are made anew once a sixteenth as many were observed.
    """

    def __init__(self) -> None:
        self._turns: list[_Turns] = []
        self._jobs: dict[str, _Job] = {}
        self._spread = _Spread()
        self._agreement = _Agreement()
        self._work_after: list[float] = []
        """Item k: expected remaining work of a job with factor 1, after k turns, if one more turn follows."""
        self._num_new = 0
        """Number of turns and jobs observed since `_work_after` was computed."""
        self._sum_up()

    def observe_turn(self, job_id: str, work: float) -> None:
        """Count a finished turn of a job; `work` is in prefill tokens."""
        job = self._jobs.setdefault(job_id, _Job())
        index = min(job.num_turns, MAX_TURNS - 1)
        if index == len(self._turns):
            self._turns.append(_Turns())
        turns = self._turns[index]
        turns.count = TURN_DECAY * turns.count + 1
        turns.work = TURN_DECAY * turns.work + work
        if index:
            before = self._turns[index - 1]
            before.num_followed = TURN_DECAY * before.num_followed + 1
        log = math.log(max(1.0, work) / max(1.0, turns.mean))
        job.num_turns += 1
        job.work += work
        job.sum_logs += log
        job.sum_squares += log * log
        self._count_new()
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
        last = self._turns[min(job.num_turns, MAX_TURNS) - 1]
        last.num_ended = TURN_DECAY * last.num_ended + 1
        self._spread.observe(job.num_turns, job.sum_logs, job.sum_squares)
        self._count_new()

    def get_work_left(self, job_id: str, next_turn: float | None = None) -> float:
        """Expected work of a job's remaining turns, at least one, in prefill tokens.

        `next_turn`: the next turn's work if it is known; it replaces the expectation for that turn.
        """
        job = self._jobs.get(job_id)
        num_turns, sum_logs = (0, 0.0) if job is None else (job.num_turns, job.sum_logs)
        index = min(num_turns, len(self._work_after) - 1)
        work = self._work_after[index]
        factor = self._spread.get_factor(num_turns, sum_logs)
        if next_turn is None:
            return factor * work
        next_mean = self._turns[index].mean if index < len(self._turns) else 0.0
        return next_turn + factor * max(0.0, work - next_mean)

    def get_trust(self) -> float:
        """Correlation between predicted and actual remaining work, from 0 (none, or unknown) to 1."""
        return self._agreement.get_correlation()

    def get_state(self) -> dict[str, Any]:
        """What was learned of all jobs, as JSON values."""
        return {
            "turns": [[each.count, each.work, each.num_ended, each.num_followed] for each in self._turns],
            "spread": self._spread.sums,
            "agreement": self._agreement.sums,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        turns = [_Turns(*_get_numbers(row, 4)) for row in state["turns"]]
        counts = [count for each in turns for count in (each.work, each.num_ended, each.num_followed)]
        if len(turns) > MAX_TURNS or any(each.count <= 0 for each in turns) or min(counts, default=0) < 0:
            raise ValueError(f"no more than {MAX_TURNS} kinds of turns expected, each seen, none negative")
        spread, agreement = _get_numbers(state["spread"], 6), _get_numbers(state["agreement"], 6)
        self._turns, self._spread.sums, self._agreement.sums = turns, spread, agreement
        self._jobs = {}
        self._sum_up()

    def _count_new(self) -> None:
        self._num_new += 1
        if self._num_new > len(self._turns) // 16:
            self._sum_up()

    def _sum_up(self) -> None:
        num_ended = sum(each.num_ended for each in self._turns)
        num_decided = num_ended + sum(each.num_followed for each in self._turns)
        # How often any turn is the last: what a number seen once or never goes by.
        share = (num_ended + 0.5) / (num_decided + 1)
        work = (self._turns[-1].mean if self._turns else 1.0) / share
        work_after = [work]
        for turns in reversed(self._turns):
            last = (turns.num_ended + share) / (turns.num_ended + turns.num_followed + 1)
            work = turns.mean + (1 - last) * work
            work_after.append(work)
        self._work_after, self._num_new = work_after[::-1], 0

    def __repr__(self) -> str:
        return f"RemainingWork({self._jobs!r}, {self._turns!r}, {self._spread!r}, {self._agreement!r})"


class _Spread:
    """Variance of turns within a job and of means between jobs, on logarithms. All values decay."""

    def __init__(self) -> None:
        self.sums = [0.0] * 6

    def observe(self, num_turns: int, sum_logs: float, sum_squares: float) -> None:
        """Count a job that ended: sums of its turns' logarithms and of their squares."""
        mean = sum_logs / num_turns
        within = max(0.0, sum_squares - num_turns * mean * mean)
        added = (1.0, mean, mean * mean, 1 / num_turns, within, num_turns - 1.0)
        self.sums = [JOB_DECAY * total + more for total, more in zip(self.sums, added, strict=True)]

    def get_factor(self, num_turns: int, sum_logs: float) -> float:
        """Expected work of a job's next turns / mean work, given its past turns."""
        typical, credibility = self._summarize()
        return math.exp((sum_logs - num_turns * typical) / (credibility + num_turns))

    def _summarize(self) -> tuple[float, float]:
        """The mean logarithm of jobs, and the credibility: see `DEFAULT_CREDIBILITY`."""
        num_jobs, sum_means, sum_squares, sum_inverses, sum_within, num_within = self.sums
        if num_jobs < MIN_JOBS or num_within < MIN_JOBS:
            return 0.0, DEFAULT_CREDIBILITY
        within, typical = sum_within / num_within, sum_means / num_jobs
        # Part of the spread of means is that of the few turns they are made of.
        between = sum_squares / num_jobs - typical * typical - within * sum_inverses / num_jobs
        least, most = CREDIBILITIES
        return typical, most if between * most <= within else max(least, within / between)

    def __repr__(self) -> str:
        return f"_Spread({self.sums})"


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
