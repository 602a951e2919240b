"""How much work a job still has, in prefill tokens, and how well that can be predicted.

Each prediction is later compared with the actual work. The correlation of the two is the weight of a
prediction; the rest of the weight is on the mean of new jobs. So if nothing can be predicted, all predictions
are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tenuto.core.turn_work import get_work
from tenuto.core.types import Job, Turn

MAX_TURNS = 256
"""Largest turn number with statistics of its own; later turns count as this one."""
TURN_DECAY = 0.998
"""Factor on a turn's weight for each later turn of the same number."""
JOB_DECAY = 0.995
"""Factor on a job's weight for each later job, in the spread between and within jobs."""
PRIOR_TURNS = 4.0
"""What all turns show counts as this many turns of one size. Until enough jobs ended to learn it, it also
counts as this many turns of one job (the credibility)."""
MIN_JOBS = 5
"""Number of ended jobs from which the spread between and within jobs is estimated."""
CREDIBILITIES = (0.25, 100.0)
"""Bounds of the learned credibility, so that a job's own turns always have some weight."""


class Left(NamedTuple):
    """What a job is expected to have left, in prefill tokens."""

    work: float
    """Work of all its remaining turns."""
    this: float
    """Work of the next turn alone."""
    stops: float
    """The probability that the job sends nothing soon after the next turn; above 0."""


@dataclass(slots=True)
class Past:
    """What a table knows about one unfinished job."""

    num_turns: int = 0
    size: int = 0
    """Size class of its latest turn: see `_get_size`."""
    sum_logs: float = 0.0
    """Sum of ln(work of a turn / mean work of turns of its number); `sum_squares`: sum of the squares."""
    sum_squares: float = 0.0


@dataclass(slots=True)
class _Turns:
    """Statistics of turns of one number: their work, and whether a turn followed. All values decay."""

    count: float = 0.0
    work: float = 0.0
    new: float = 0.0
    """The part of `work` that is new prompt tokens."""
    num_ended: float = 0.0
    num_followed: float = 0.0
    num_stopped: float = 0.0
    """Turns after which the job did not come back soon."""
    by_size: dict[int, list[float]] = field(default_factory=dict)
    """Counts of turns by size class, at most 32: ended their job, were followed by another turn, were not
    followed soon, all."""

    def resolve(self, size: int, *, followed: bool) -> None:
        """A turn of this number ended its job, or was followed by another."""
        counts = self.by_size.setdefault(size, [0.0] * 4)
        counts[:2] = TURN_DECAY * counts[0] + (not followed), TURN_DECAY * counts[1] + followed
        self.num_ended = TURN_DECAY * self.num_ended + (not followed)
        self.num_followed = TURN_DECAY * self.num_followed + followed

    def go_on(self, size: int) -> None:
        """A turn of this number was followed soon, although it called no tool."""
        counts = self.by_size.setdefault(size, [0.0] * 4)
        counts[2] = max(0.0, counts[2] - 1)
        self.num_stopped = max(0.0, self.num_stopped - 1)


class TurnTable:
    """Turns by their number: their work, and whether another follows. From it, the work that a job has left.

        left at turn k  =  this turn  +  P(another follows) · factor · rest after k
        rest after k    =  Σ over i > k of  P(there is an i-th turn) · mean work of i-th turns

    A turn's new prompt tokens are known when it arrives. Its output is predicted as the mean of turns with
    its number. Probabilities and means come from all jobs of the table, unfinished ones included: each i-th
    turn either ended its job or was followed by another. Whether another follows also depends on this turn's
    own size. The factor compares the job's turns, this one included, with the mean turns of the same numbers.
    How much they tell about later turns is learned too (Bühlmann's credibility, on logarithms, because
    lengths of texts vary by factors).

    O(1) amortised: the sums over N turn numbers are computed again only after N/16 observations.
    """

    def __init__(self) -> None:
        self._turns: list[_Turns] = []
        self._spread = _Spread()
        self._share = 0.5
        """Share of all turns that are the last of their job."""
        self._work_after: list[float] = []
        """Item k: expected remaining work of a job with factor 1, after k turns, if one more turn follows."""
        self._num_new = 0
        """Number of turns and jobs observed since `_work_after` was computed."""
        self._sum_up()

    @property
    def num_jobs(self) -> float:
        """Jobs that the table has seen recently."""
        return self._turns[0].count if self._turns else 0.0

    @property
    def work(self) -> float:
        """Expected work of a new job."""
        return self._work_after[0]

    def observe(self, past: Past, num_new_tokens: float, work: float, *, stops: bool) -> None:
        """Count a finished turn of a job. `stops`: the job is expected to send nothing soon."""
        index = min(past.num_turns, MAX_TURNS - 1)
        if index == len(self._turns):
            self._turns.append(_Turns())
        turns, size = self._turns[index], _get_size(num_new_tokens)
        turns.num_stopped = TURN_DECAY * turns.num_stopped + stops
        counts = turns.by_size.setdefault(size, [0.0] * 4)
        counts[2:] = TURN_DECAY * counts[2] + stops, TURN_DECAY * counts[3] + 1
        turns.count = TURN_DECAY * turns.count + 1
        turns.work = TURN_DECAY * turns.work + work
        turns.new = TURN_DECAY * turns.new + num_new_tokens
        if index:
            self._turns[index - 1].resolve(past.size, followed=True)
        log = math.log(max(1.0, work) / max(1.0, turns.work / turns.count))
        past.num_turns += 1
        past.size = size
        past.sum_logs += log
        past.sum_squares += log * log
        self._sum_up()

    def go_on(self, past: Past) -> None:
        """A job sent its next turn soon, although its latest turn counted as a stop."""
        if self.has(past):
            self._turns[min(past.num_turns, MAX_TURNS) - 1].go_on(past.size)

    def end(self, past: Past) -> None:
        """A job of at least one turn has no more turns."""
        self._turns[min(past.num_turns, MAX_TURNS) - 1].resolve(past.size, followed=False)
        self._spread.observe(past.num_turns, past.sum_logs, past.sum_squares)
        self._sum_up()

    def has(self, past: Past) -> bool:
        """Whether the table has seen the job's latest turn."""
        return 0 < min(past.num_turns, MAX_TURNS) <= len(self._turns)

    def look(self, past: Past | None, num_new_tokens: float | None) -> Left:
        """What a job has left, at least one turn.

        `num_new_tokens`: the new tokens of the next turn's prompt, if they are known.
        """
        num_turns, sum_logs = (0, 0.0) if past is None else (past.num_turns, past.sum_logs)
        # Sums are computed only now and then, so they may lack the latest number.
        index = min(num_turns, len(self._work_after) - 1)
        turns = self._turns[index] if index < len(self._turns) else None
        factor = self._spread.get_factor(num_turns, sum_logs)
        if turns is None:
            if num_new_tokens is None:
                left = factor * self._work_after[index]
                return Left(left, left, self._share)
            return Left(num_new_tokens + factor * self._work_after[index], num_new_tokens, self._share)
        # The share that ended their job, shrunk towards the share of all turns.
        share = (turns.num_ended + self._share) / (turns.num_ended + turns.num_followed + 1)
        mean = turns.work / turns.count
        if num_new_tokens is None:
            return Left(factor * self._work_after[index], factor * mean, share)
        this = num_new_tokens + factor * (turns.work - turns.new) / turns.count
        log = math.log(max(1.0, this) / max(1.0, mean))
        factor = self._spread.get_factor(num_turns + 1, sum_logs + log)
        ended, followed, stopped, seen = turns.by_size.get(_get_size(num_new_tokens), (0.0,) * 4)
        ends = (ended + PRIOR_TURNS * share) / (ended + followed + PRIOR_TURNS)
        stops = (turns.num_stopped + share) / (turns.count + 1)
        stops = (stopped + PRIOR_TURNS * stops) / (seen + PRIOR_TURNS)
        after = self._work_after[min(index + 1, len(self._work_after) - 1)]
        return Left(this + (1 - ends) * factor * after, this, max(ends, stops))

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        turns = [
            [each.count, each.work, each.new, each.num_ended, each.num_followed, each.num_stopped]
            for each in self._turns
        ]
        sizes = [[[size, *counts] for size, counts in sorted(each.by_size.items())] for each in self._turns]
        return {"turns": turns, "sizes": sizes, "spread": self._spread.sums}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TurnTable:
        """Make a table from what `get_state` returned.

        Raises ValueError, TypeError or KeyError if it is malformed.
        """
        table = cls()
        rows = [get_numbers(row, 6) for row in state["turns"]]
        sizes = [[get_numbers(row, 5) for row in each] for each in state["sizes"]]
        counts = [count for row in (*rows, *(row for each in sizes for row in each)) for count in row]
        if len(rows) > MAX_TURNS or any(row[0] <= 0 for row in rows) or min(counts, default=0) < 0:
            raise ValueError(f"no more than {MAX_TURNS} kinds of turns expected, each seen, none negative")
        for row, each in zip(rows, sizes, strict=True):
            turns = _Turns(by_size={int(size): counts for size, *counts in each})
            turns.count, turns.work, turns.new, turns.num_ended, turns.num_followed, turns.num_stopped = row
            table._turns.append(turns)
        table._spread.set_sums(get_numbers(state["spread"], 6))
        table._num_new = MAX_TURNS
        table._sum_up()
        return table

    def _sum_up(self) -> None:
        """Compute the sums again, unless few turns were counted since the last time."""
        self._num_new += 1
        if self._num_new <= len(self._turns) // 16:
            return
        # A small table gets here after nearly every turn, so this is written for speed, without calls.
        num_ended = num_followed = 0.0
        for turns in self._turns:
            num_ended += turns.num_ended
            num_followed += turns.num_followed
        # The share of all turns that are the last: the prior for turn numbers that were hardly seen.
        share = (num_ended + 0.5) / (num_ended + num_followed + 1)
        last = self._turns[-1] if self._turns else None
        work = (1.0 if last is None else last.work / last.count) / share
        work_after = [work]
        for turns in reversed(self._turns):
            num_decided = turns.num_ended + turns.num_followed + 1
            work = turns.work / turns.count + (1 - (turns.num_ended + share) / num_decided) * work
            work_after.append(work)
        work_after.reverse()
        self._work_after, self._num_new, self._share = work_after, 0, share

    def __repr__(self) -> str:
        return f"TurnTable({self._turns!r}, {self._spread!r})"


class _Spread:
    """Variance of turns within a job and of means between jobs, on logarithms. All values decay."""

    def __init__(self) -> None:
        self.set_sums([0.0] * 6)

    def set_sums(self, sums: list[float]) -> None:
        """Replace the sums."""
        self.sums = sums
        self._summary = self._summarize()

    def observe(self, num_turns: int, sum_logs: float, sum_squares: float) -> None:
        """Count a job that ended: sums of its turns' logarithms and of their squares."""
        mean = sum_logs / num_turns
        within = max(0.0, sum_squares - num_turns * mean * mean)
        added = (1.0, mean, mean * mean, 1 / num_turns, within, num_turns - 1.0)
        self.set_sums([JOB_DECAY * total + more for total, more in zip(self.sums, added, strict=True)])

    def get_factor(self, num_turns: int, sum_logs: float) -> float:
        """Expected work of a job's next turns / mean work, given its past turns."""
        typical, credibility = self._summary
        return math.exp((sum_logs - num_turns * typical) / (credibility + num_turns))

    def _summarize(self) -> tuple[float, float]:
        """The mean logarithm of jobs, and the credibility: see `PRIOR_TURNS`."""
        num_jobs, sum_means, sum_squares, sum_inverses, sum_within, num_within = self.sums
        if num_jobs < MIN_JOBS or num_within < MIN_JOBS:
            return 0.0, PRIOR_TURNS
        within, typical = sum_within / num_within, sum_means / num_jobs
        # Means over few turns differ by chance. Subtract this part of their spread.
        between = sum_squares / num_jobs - typical * typical - within * sum_inverses / num_jobs
        least, most = CREDIBILITIES
        return typical, most if between * most <= within else max(least, within / between)

    def __repr__(self) -> str:
        return f"_Spread({self.sums})"


def get_numbers(values: Any, count: int) -> list[float]:
    """Read `count` finite numbers. Raises ValueError."""
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{count} numbers expected, got {values!r}")
    return numbers


def _get_size(num_tokens: float) -> int:
    """The class of a prompt's new tokens: the next power of two."""
    return min(31, max(1, int(num_tokens)).bit_length())


DECAY = 0.999
"""Factor on a prediction's weight for each later prediction."""
LONG_S = 10.0
"""A job that is idle for longer does not compete with the turns that wait now. Agents' tools rarely take
longer, people usually do."""
MAX_PREDICTIONS = 64
"""Number of turns per job whose predictions are compared with what happened."""


@dataclass(slots=True)
class _Job:
    work: float = 0.0
    context: int = 0
    """Tokens of its latest turn."""
    stops: bool = False
    """Whether its latest turn counted as a stop."""
    past: Past = field(default_factory=Past)
    predictions: list[tuple[float, float]] = field(default_factory=list)
    """For each prediction: the work done by then, and the predicted remaining work."""


class RemainingWork:
    """Predicts jobs' remaining work from all earlier jobs and from each job's own turns."""

    def __init__(self) -> None:
        self._all = TurnTable()
        self._jobs: dict[str, _Job] = {}
        self._agreement = _Agreement()

    def count_new_tokens(self, turn: Turn) -> int:
        """Prompt tokens of a turn that neither its job's latest turn nor the cache has; at least 1."""
        return max(1, turn.num_prompt_tokens - max(self._get_context(turn), turn.num_cached_tokens or 0))

    def _get_context(self, turn: Turn) -> int:
        """Tokens of the job's latest turn if this turn's prompt extends them, else 0."""
        known = self._jobs.get(turn.job.job_id)
        return 0 if known is None or turn.is_parted else known.context

    def observe(self, turn: Turn) -> None:
        """Count a finished turn of a job. It counts as a stop if it called no tool."""
        # A first turn's hits were computed by other jobs, so they are not its work.
        num_new = max(1, turn.num_prompt_tokens - (self._get_context(turn) or turn.num_hit_tokens))
        work = get_work(num_new, 0, turn.num_output_tokens)
        self.observe_turn(turn.job, float(num_new), work, stops=turn.tool is None)
        self._jobs[turn.job.job_id].context = turn.num_prompt_tokens + turn.num_output_tokens

    def observe_turn(self, job: Job, num_new_tokens: float, work: float, *, stops: bool) -> None:
        """Count a finished turn of a job; `work` is in prefill tokens, the prompt's new ones included.

        `stops`: whether the turn ended without a tool call, so that nothing is expected soon.
        """
        known = self._jobs.setdefault(job.job_id, _Job())
        if len(known.predictions) < MAX_PREDICTIONS:
            known.predictions.append((known.work, self._all.look(known.past, num_new_tokens).work))
        known.work += work
        known.stops = stops
        self._all.observe(known.past, num_new_tokens, work, stops=stops)

    def come_back(self, job_id: str, away_s: float) -> None:
        """A job sent its next turn, after this many seconds."""
        job = self._jobs.get(job_id)
        if job is None or not job.stops or away_s > LONG_S:
            return
        job.stops = False
        self._all.go_on(job.past)

    def end_job(self, job_id: str) -> None:
        """A job will have no more turns."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        for done, predicted in job.predictions:
            self._agreement.observe(predicted, job.work - done)
        self._all.end(job.past)

    def get_work_left(self, job: Job) -> float:
        """Expected work of a job's remaining turns, at least one, weighted by the trust in predictions."""
        return self._trust(self._look(job, None).work)

    def get_rank(self, turn: Turn, num_new_tokens: int) -> float:
        """Expected work per job that stops, if it runs for one turn or for all its turns: the smaller one.

        This is the Gittins index with two places to stop. So a small turn that is probably its job's last
        goes early, whatever else is known about the job. For a job's last turn, if the client says so, it is
        the turn's own work.
        """
        left = self._look(turn.job, float(num_new_tokens))
        if turn.is_last:
            return left.this
        return min(left.this / left.stops, self._trust(left.work))

    def get_state(self) -> dict[str, Any]:
        """What was learned of all jobs, as JSON values."""
        return {**self._all.get_state(), "agreement": self._agreement.sums}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        table, agreement = TurnTable.from_state(state), get_numbers(state["agreement"], 6)
        self._all, self._agreement.sums = table, agreement
        self._jobs = {}

    def _look(self, job: Job, num_new_tokens: float | None) -> Left:
        known = self._jobs.get(job.job_id)
        return self._all.look(known.past if known is not None else None, num_new_tokens)

    def _trust(self, work: float) -> float:
        trust = self._agreement.get_correlation()
        return (1 - trust) * self._all.work + trust * work

    def __repr__(self) -> str:
        return f"RemainingWork({self._jobs!r}, {self._all!r}, {self._agreement!r})"


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
