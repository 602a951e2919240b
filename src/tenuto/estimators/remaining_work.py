"""How much work a job still has, in prefill tokens, learned from jobs of its kind and from all jobs."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tenuto.core.turn_work import get_work
from tenuto.core.types import Job, Turn

MAX_TURNS = 256
"""Largest turn number with statistics of its own; later turns count as this one."""
TURN_DECAY = 0.998
"""Factor on a turn's weight for each later turn of the same number."""
PRIOR_TURNS = 4.0
"""What a wider group shows counts as this many turns, or jobs, of a narrower one."""
MAX_KINDS = 256
"""Kinds with statistics of their own, because clients can invent kinds. The least recently seen is forgotten
first."""
LONG_S = 10.0
"""A job that is idle for longer does not compete with the turns that wait now. Agents' tools rarely take
longer, people usually do."""


class Left(NamedTuple):
    """What a job is expected to have left, in prefill tokens."""

    work: float
    """Work of all its remaining turns."""
    this: float
    """Work of the next turn alone."""
    stops: float
    """The probability that the job sends nothing soon after the next turn; above 0."""


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

        left at turn k  =  this turn  +  P(another follows) · rest after k
        rest after k    =  Σ over i > k of  P(there is an i-th turn) · mean work of i-th turns

    A turn's new prompt tokens are known when it arrives. Its output is predicted as the mean of turns with
    its number. Probabilities and means come from all jobs of the table, unfinished ones included: each i-th
    turn either ended its job or was followed by another. Whether another follows also depends on this turn's
    own size.

    O(1) amortised: the sums over N turn numbers are computed again only after N/16 observations.
    """

    def __init__(self) -> None:
        self._turns: list[_Turns] = []
        self._share = 0.5
        """Share of all turns that are the last of their job."""
        self._work_after: list[float] = []
        """Item k: expected remaining work of a job after k turns, if one more turn follows."""
        self._num_new = 0
        """Number of turns and jobs observed since `_work_after` was computed."""
        self.num_jobs = 0.0
        """Jobs that the table has seen; they decay."""
        self._sum_up()

    def observe(self, past: Past, size: int, num_new_tokens: float, work: float, *, stops: bool) -> None:
        """Count the next turn of a job. `size`: see `_get_size`. `stops`: nothing is expected soon."""
        index = min(past.num_turns, MAX_TURNS - 1)
        if index == len(self._turns):
            self._turns.append(_Turns())
        turns = self._turns[index]
        turns.num_stopped = TURN_DECAY * turns.num_stopped + stops
        counts = turns.by_size.setdefault(size, [0.0] * 4)
        counts[2:] = TURN_DECAY * counts[2] + stops, TURN_DECAY * counts[3] + 1
        turns.count = TURN_DECAY * turns.count + 1
        turns.work = TURN_DECAY * turns.work + work
        turns.new = TURN_DECAY * turns.new + num_new_tokens
        if index:
            self._turns[index - 1].resolve(past.size, followed=True)
        else:
            self.num_jobs = turns.count
        self._sum_up()

    def go_on(self, past: Past) -> None:
        """A job sent its next turn soon, although its latest turn counted as a stop."""
        self._turns[min(past.num_turns, MAX_TURNS) - 1].go_on(past.size)

    def end(self, past: Past) -> None:
        """A job of at least one turn has no more turns."""
        self._turns[min(past.num_turns, MAX_TURNS) - 1].resolve(past.size, followed=False)
        self._sum_up()

    def look(self, num_turns: int, num_new_tokens: float | None) -> Left:
        """What a job has left after this many turns, at least one turn.

        `num_new_tokens`: the new tokens of the next turn's prompt, if they are known.
        """
        # Sums are computed only now and then, so they may lack the latest number.
        index = min(num_turns, len(self._work_after) - 1)
        turns = self._turns[index] if index < len(self._turns) else None
        if turns is None:
            this = self._work_after[index] if num_new_tokens is None else num_new_tokens
            return Left(
                this + (0.0 if num_new_tokens is None else self._work_after[index]), this, self._share
            )
        # The share that ended their job, shrunk towards the share of all turns.
        share = (turns.num_ended + self._share) / (turns.num_ended + turns.num_followed + 1)
        if num_new_tokens is None:
            return Left(self._work_after[index], turns.work / turns.count, share)
        this = num_new_tokens + (turns.work - turns.new) / turns.count
        ended, followed, stopped, seen = turns.by_size.get(_get_size(num_new_tokens), (0.0,) * 4)
        ends = (ended + PRIOR_TURNS * share) / (ended + followed + PRIOR_TURNS)
        stops = (turns.num_stopped + share) / (turns.count + 1)
        stops = (stopped + PRIOR_TURNS * stops) / (seen + PRIOR_TURNS)
        after = self._work_after[min(index + 1, len(self._work_after) - 1)]
        return Left(this + (1 - ends) * after, this, max(ends, stops))

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        turns = [
            [each.count, each.work, each.new, each.num_ended, each.num_followed, each.num_stopped]
            for each in self._turns
        ]
        sizes = [[[size, *counts] for size, counts in sorted(each.by_size.items())] for each in self._turns]
        return {"turns": turns, "sizes": sizes}

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
        return f"TurnTable({self._turns!r})"


def get_numbers(values: Any, count: int) -> list[float]:
    """Read `count` finite numbers. Raises ValueError."""
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{count} numbers expected, got {values!r}")
    return numbers


def _get_size(num_tokens: float) -> int:
    """The class of a prompt's new tokens: the next power of two."""
    return min(31, max(1, int(num_tokens)).bit_length())


@dataclass(slots=True)
class Past:
    """What is known about one unfinished job."""

    table: TurnTable
    """That of its kind."""
    num_turns: int = 0
    context: int = 0
    """Tokens of its latest turn."""
    size: int = 0
    """Size class of the latest turn's new tokens: see `_get_size`."""
    stops: bool = False
    """Whether its latest turn counted as a stop."""


class RemainingWork:
    """Predicts jobs' remaining work from earlier jobs of their tenant and kind, and from all jobs.

    What all jobs show counts as `PRIOR_TURNS` jobs of the kind. Jobs whose kind nobody else has count as one.
    """

    def __init__(self) -> None:
        self._all = TurnTable()
        self._kinds: OrderedDict[tuple[str | None, str | None], TurnTable | None] = OrderedDict()
        """By tenant and kind, the least recently seen first. A kind has a table from its second job on; the
        table of None is that of a tenant's other jobs."""
        self._jobs: dict[str, Past] = {}

    def count_new_tokens(self, turn: Turn) -> int:
        """Prompt tokens of a turn that neither its job's latest turn nor the cache has; at least 1."""
        return max(1, turn.num_prompt_tokens - max(self._get_context(turn), turn.num_cached_tokens or 0))

    def _get_context(self, turn: Turn) -> int:
        """Tokens of the job's latest turn if this turn's prompt extends them, else 0."""
        past = self._jobs.get(turn.job.job_id)
        return 0 if past is None or turn.is_parted else past.context

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
        past = self._jobs.get(job.job_id)
        if past is None:
            self._see_kind(job)
            past = self._jobs[job.job_id] = Past(self._get_table(job))
        size = _get_size(num_new_tokens)
        for table in (self._all, past.table):
            table.observe(past, size, num_new_tokens, work, stops=stops)
        past.num_turns, past.size, past.stops = past.num_turns + 1, size, stops

    def come_back(self, job_id: str, away_s: float) -> None:
        """A job sent its next turn, after this many seconds."""
        past = self._jobs.get(job_id)
        if past is None or not past.stops or away_s > LONG_S:
            return
        past.stops = False
        for table in (self._all, past.table):
            table.go_on(past)

    def end_job(self, job_id: str) -> None:
        """A job will have no more turns."""
        past = self._jobs.pop(job_id, None)
        if past is not None:
            for table in (self._all, past.table):
                table.end(past)

    def get_work_left(self, job: Job) -> float:
        """Expected work of a job's remaining turns, at least one."""
        return self._look(job, None).work

    def get_rank(self, turn: Turn, num_new_tokens: int) -> float:
        """Expected work per job that stops, if it runs for one turn or for all its turns: the smaller one.

        This is the Gittins index with two places to stop. So a small turn that is probably its job's last
        goes early, whatever else is known about the job. For a job's last turn, if the client says so, it is
        the turn's own work.
        """
        left = self._look(turn.job, float(num_new_tokens))
        return left.this if turn.is_last else min(left.this / left.stops, left.work)

    def get_state(self) -> dict[str, Any]:
        """What was learned of all jobs, as JSON values. Kinds have names that do not outlive the engine."""
        return self._all.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        self._all = TurnTable.from_state(state)
        self._kinds.clear()
        self._jobs = {}

    def _look(self, job: Job, num_new_tokens: float | None) -> Left:
        past = self._jobs.get(job.job_id)
        num_turns, table = (0, self._get_table(job)) if past is None else (past.num_turns, past.table)
        left, own = self._all.look(num_turns, num_new_tokens), table.look(num_turns, num_new_tokens)
        weight = table.num_jobs / (table.num_jobs + PRIOR_TURNS)
        return Left(
            left.work + weight * (own.work - left.work),
            left.this + weight * (own.this - left.this),
            left.stops + weight * (own.stops - left.stops),
        )

    def _get_table(self, job: Job) -> TurnTable:
        return self._kinds.get((job.tenant, job.kind)) or self._kinds.get((job.tenant, None)) or self._all

    def _see_kind(self, job: Job) -> None:
        """Count a job that finished its first turn."""
        others, kind = (job.tenant, None), (job.tenant, job.kind)
        self._kinds[others] = self._kinds.get(others) or TurnTable()
        self._kinds[kind] = (self._kinds[kind] or TurnTable()) if kind in self._kinds else None
        for key in (others, kind):
            self._kinds.move_to_end(key)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def __repr__(self) -> str:
        return f"RemainingWork({self._jobs!r}, {self._all!r}, {self._kinds!r})"
