"""Turns by their number: their work, and whether another turn follows. From it, the work that a job has left.

    left at turn k  =  this turn  +  P(another follows) · factor · rest after k
    rest after k    =  Σ over i > k of  P(there is an i-th turn) · mean work of i-th turns

Of this turn the new prompt tokens are known when it arrives; what it will generate is the mean of such turns.
Probabilities and means come from all jobs of the table, including unfinished ones: some i-th turns ended
their job, the others were followed by one more. Whether another follows also depends on this turn's own size.
The factor compares the job's turns, this one included, with the mean turns of the same numbers. How much they
tell about the next ones is learned too (Bühlmann's credibility, on logarithms, because sizes of texts vary by
factors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_TURNS = 256
"""Largest turn number with statistics of its own; later turns count as this one."""
TURN_DECAY = 0.998
"""Factor on a turn's weight for each later turn of the same number."""
JOB_DECAY = 0.995
"""Factor on a job's weight for each later job, in the spread between and within jobs."""
SIZE_PRIOR = 4.0
"""Turns of one number and size weigh against all turns of that number as if these were so many."""
MIN_JOBS = 5
"""Number of ended jobs from which the spread between and within jobs is estimated."""
DEFAULT_CREDIBILITY = 4.0
"""Default until enough jobs ended: after this many turns, a job's own turns weigh as much as all jobs'."""
CREDIBILITIES = (0.25, 100.0)
"""Bounds of the learned credibility. So a job's own turns always have some weight."""


class Left(NamedTuple):
    """What a job is expected to have left, in prefill tokens."""

    work: float
    """Of all its turns to come."""
    this: float
    """Of the next turn alone."""
    stops: float
    """The probability that the job sends nothing soon after the next turn; above 0."""

    def blend(self, other: Left, share: float) -> Left:
        """This guess with the weight 1 - share, the other one with the weight share."""
        rest = 1 - share
        return Left(
            rest * self.work + share * other.work,
            rest * self.this + share * other.this,
            rest * self.stops + share * other.stops,
        )


@dataclass(slots=True)
class Past:
    """What a table knows of one unfinished job."""

    num_turns: int = 0
    size: int = 0
    """Of its latest turn; see `_get_size`."""
    sum_logs: float = 0.0
    """Sum of ln(work of a turn / mean work of turns of its number); `sum_squares`: sum of the squares."""
    sum_squares: float = 0.0


@dataclass(slots=True)
class _Turns:
    """Statistics of turns of one number: their work, and whether a turn followed. All values decay."""

    count: float = 0.0
    work: float = 0.0
    new: float = 0.0
    """Of the work, the new tokens of the prompts."""
    num_ended: float = 0.0
    num_followed: float = 0.0
    num_stopped: float = 0.0
    """After so many nothing came soon."""
    by_size: dict[int, list[float]] = field(default_factory=dict)
    """For each size: how many turns ended their job, how many were followed, after how many nothing came
    soon, and how many were seen. At most 32 sizes."""

    @property
    def mean(self) -> float:
        return self.work / self.count

    def observe(self, num_new_tokens: float, work: float, *, stops: bool) -> None:
        self.num_stopped = TURN_DECAY * self.num_stopped + stops
        counts = self.by_size.setdefault(_get_size(num_new_tokens), [0.0] * 4)
        counts[2:] = TURN_DECAY * counts[2] + stops, TURN_DECAY * counts[3] + 1
        self.count = TURN_DECAY * self.count + 1
        self.work = TURN_DECAY * self.work + work
        self.new = TURN_DECAY * self.new + num_new_tokens

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

    def get_share_ended(self, share: float) -> float:
        """The share that ended their job, drawn towards that of all turns."""
        return (self.num_ended + share) / (self.num_ended + self.num_followed + 1)


class TurnTable:
    """The turns of many jobs.

    O(1) amortised: sums over turns are made anew once a sixteenth as many were seen.
    """

    def __init__(self) -> None:
        self._turns: list[_Turns] = []
        self._spread = _Spread()
        self._share = 0.5
        """How often any turn is the last."""
        self._work_after: list[float] = []
        """Item k: expected remaining work of a job with factor 1, after k turns, if one more turn follows."""
        self._num_new = 0
        """Number of turns and jobs observed since `_work_after` was computed."""
        self._sum_up()

    @property
    def num_jobs(self) -> float:
        """Jobs that the table has seen, of late."""
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
        turns = self._turns[index]
        turns.observe(num_new_tokens, work, stops=stops)
        if index:
            self._turns[index - 1].resolve(past.size, followed=True)
        log = math.log(max(1.0, work) / max(1.0, turns.mean))
        past.num_turns += 1
        past.size = _get_size(num_new_tokens)
        past.sum_logs += log
        past.sum_squares += log * log
        self._count_new()

    def go_on(self, past: Past) -> None:
        """A job sent its next turn soon after one that was taken for a stop."""
        if self.has(past):
            self._turns[min(past.num_turns, MAX_TURNS) - 1].go_on(past.size)

    def end(self, past: Past) -> None:
        """A job of at least one turn has no more turns."""
        self._turns[min(past.num_turns, MAX_TURNS) - 1].resolve(past.size, followed=False)
        self._spread.observe(past.num_turns, past.sum_logs, past.sum_squares)
        self._count_new()

    def has(self, past: Past) -> bool:
        """Whether the table has seen the job's latest turn."""
        return 0 < min(past.num_turns, MAX_TURNS) <= len(self._turns)

    def look(self, past: Past | None, num_new_tokens: float | None) -> Left:
        """What a job has left, at least one turn.

        `num_new_tokens`: the new tokens of the next turn's prompt, if they are known.
        """
        num_turns, sum_logs = (0, 0.0) if past is None else (past.num_turns, past.sum_logs)
        # Sums are made anew now and then only, so they may lack the latest number.
        index = min(num_turns, len(self._work_after) - 1)
        turns = self._turns[index] if index < len(self._turns) else None
        factor = self._spread.get_factor(num_turns, sum_logs)
        if num_new_tokens is None:
            ends = self._share if turns is None else turns.get_share_ended(self._share)
            left = factor * self._work_after[index]
            return Left(left, left if turns is None else factor * turns.mean, ends)
        if turns is None:
            return Left(num_new_tokens + factor * self._work_after[index], num_new_tokens, self._share)
        this = num_new_tokens + factor * (turns.work - turns.new) / turns.count
        log = math.log(max(1.0, this) / max(1.0, turns.mean))
        factor = self._spread.get_factor(num_turns + 1, sum_logs + log)
        share = turns.get_share_ended(self._share)
        ended, followed, stopped, seen = turns.by_size.get(_get_size(num_new_tokens), (0.0,) * 4)
        ends = (ended + SIZE_PRIOR * share) / (ended + followed + SIZE_PRIOR)
        stops = (turns.num_stopped + share) / (turns.count + 1)
        stops = (stopped + SIZE_PRIOR * stops) / (seen + SIZE_PRIOR)
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
        """What `get_state` returned. Raises ValueError, TypeError or KeyError if it is malformed."""
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
        table._sum_up()
        return table

    def _count_new(self) -> None:
        self._num_new += 1
        if self._num_new > len(self._turns) // 16:
            self._sum_up()

    def _sum_up(self) -> None:
        # After nearly every turn while the table is small, so it is written for speed.
        num_ended = sum([each.num_ended for each in self._turns])
        num_decided = num_ended + sum([each.num_followed for each in self._turns])
        # How often any turn is the last: what a number seen once or never goes by.
        share = (num_ended + 0.5) / (num_decided + 1)
        work = (self._turns[-1].mean if self._turns else 1.0) / share
        work_after = [work]
        for turns in reversed(self._turns):
            work = turns.mean + (1 - turns.get_share_ended(share)) * work
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
        """Go on from these sums."""
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


def get_numbers(values: Any, count: int) -> list[float]:
    """So many finite numbers. Raises ValueError."""
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{count} numbers expected, got {values!r}")
    return numbers


def _get_size(num_tokens: float) -> int:
    """The class of a prompt's new tokens: the next power of two."""
    return min(31, max(1, int(num_tokens)).bit_length())
