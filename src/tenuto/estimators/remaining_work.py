"""How much work a job still has, in prefill tokens, learned from jobs of its kind and from all jobs."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tenuto.core.turn_work import FADE, MAX_NAMES, MAX_SUM, PRIOR_CASES, forget_some, get_work
from tenuto.core.types import Job, Turn

MAX_ROWS = 256
"""Most kinds with a table, because clients can invent kinds. Also the largest turn number with statistics of
its own: later turns count as this one."""


class Left(NamedTuple):
    """What a job is expected to have left, in prefill tokens."""

    work: float
    """Work of all its remaining turns."""
    this: float
    """Work of the next turn alone."""
    ends: float
    """The probability that the job ends with the next turn; above 0."""


@dataclass(slots=True)
class _Turns:
    """Statistics of turns of one number: their work, and whether a turn followed. All values decay."""

    count: float = 0.0
    work: float = 0.0
    new: float = 0.0
    """The part of `work` that is new prompt tokens."""
    num_ended: float = 0.0
    num_followed: float = 0.0
    by_size: dict[int, list[float]] = field(default_factory=dict)
    """The same two counts by size class, at most 32."""

    def end(self, size: int) -> None:
        """Count a turn of this number as its job's last."""
        counts = self.by_size.setdefault(size, [0.0, 0.0])
        counts[:] = FADE * counts[0] + 1, FADE * counts[1]
        self.num_ended = FADE * self.num_ended + 1
        self.num_followed *= FADE

    def follow(self, size: int, *, was_last: bool) -> None:
        """Count a turn of this number as followed by another. `was_last`: it counted as its job's last."""
        counts = self.by_size.setdefault(size, [0.0, 0.0])
        counts[:] = FADE * max(0.0, counts[0] - was_last), FADE * counts[1] + 1
        self.num_ended = FADE * max(0.0, self.num_ended - was_last)
        self.num_followed = FADE * self.num_followed + 1


@dataclass(eq=False)
class TurnTable:
    """Turns by their number: their work, and whether another follows. From it, the work that a job has left.

        left at turn k  =  this turn  +  P(another follows) · rest after k
        rest after k    =  Σ over i > k of  P(there is an i-th turn) · mean work of i-th turns

    A turn's new prompt tokens are known when it arrives. Its output is predicted as the mean of turns with
    its number. Probabilities and means come from all jobs of the table, unfinished ones included: each i-th
    turn either ended its job or was followed by another. Whether another follows also depends on this turn's
    own size, which tells a flood of jobs from agents. A turn without a tool call counts as its job's last
    until the job comes back, because most clients never say that a job has ended.

    O(1) amortised: the sums over N turn numbers are computed again only after N/16 observations.
    """

    _turns: list[_Turns] = field(default_factory=list)
    _share: float = 0.5
    """Share of all turns that are the last of their job."""
    _work_after: list[float] = field(default_factory=lambda: [2.0])
    """Item k: expected remaining work of a job after k turns, if one more turn follows. Before any was seen,
    of two turns of one token."""
    _num_new: int = 0
    """Number of turns and jobs observed since `_work_after` was computed."""
    num_jobs: float = 0.0
    """Jobs that the table has seen; they decay."""

    def observe(self, past: Past, num_new_tokens: float, work: float, *, is_last: bool) -> None:
        """Count the next turn of a job. `is_last`: it is the job's last, as far as is known."""
        index = min(past.num_turns, MAX_ROWS - 1)
        if index == len(self._turns):
            self._turns.append(_Turns())
        turns = self._turns[index]
        turns.count = FADE * turns.count + 1
        turns.work = FADE * turns.work + work
        turns.new = FADE * turns.new + num_new_tokens
        if past.num_turns:
            self._get_latest(past).follow(past.size, was_last=past.is_last)
        else:
            self.num_jobs = turns.count
        if is_last:
            turns.end(_get_size(num_new_tokens))
        self._sum_up()

    def end(self, past: Past) -> None:
        """A job of at least one turn has no more turns."""
        if not past.is_last:
            self._get_latest(past).end(past.size)
            self._sum_up()

    def _get_latest(self, past: Past) -> _Turns:
        return self._turns[min(past.num_turns, MAX_ROWS) - 1]

    def look(self, num_turns: int, num_new_tokens: float | None) -> tuple[float, float, float]:
        """What a job has left after this many turns, at least one turn, as in `Left`.

        `num_new_tokens`: the new tokens of the next turn's prompt, if they are known.
        """
        # Sums are computed only now and then, so they may lack the latest number.
        last = len(self._work_after) - 1
        index = num_turns if num_turns < last else last
        if index == len(self._turns):
            after = self._work_after[index]
            if num_new_tokens is None:
                return after, after, self._share
            return num_new_tokens + after, num_new_tokens, self._share
        turns = self._turns[index]
        share = (turns.num_ended + self._share) / (turns.num_ended + turns.num_followed + 1)
        if num_new_tokens is None:
            return self._work_after[index], turns.work / turns.count, share
        this = num_new_tokens + (turns.work - turns.new) / turns.count
        # The share that ended their job, shrunk towards the share of all turns.
        ended, followed = turns.by_size.get(_get_size(num_new_tokens), (0.0, 0.0))
        ends = (ended + PRIOR_CASES * share) / (ended + followed + PRIOR_CASES)
        after = self._work_after[index + 1 if index < last else last]
        return this + (1 - ends) * after, this, ends

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        turns = [[each.count, each.work, each.new, each.num_ended, each.num_followed] for each in self._turns]
        sizes = [[[size, *counts] for size, counts in sorted(each.by_size.items())] for each in self._turns]
        return {"turns": turns, "sizes": sizes}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TurnTable:
        """Make a table from what `get_state` returned.

        Raises ValueError, TypeError or KeyError if it is malformed.
        """
        table = cls()
        rows = [get_numbers(row, 5) for row in state["turns"]]
        sizes = [[get_numbers(row, 3) for row in each] for each in state["sizes"]]
        counts = [count for row in (*rows, *(row for each in sizes for row in each)) for count in row]
        # A row begins with one turn, and sums decay. Others would make means and shares that are no numbers.
        are_sums = min(counts, default=0) >= 0 and max(counts, default=0) <= MAX_SUM
        if len(rows) > MAX_ROWS or any(row[0] < 1 for row in rows) or not are_sums:
            raise ValueError(f"no more than {MAX_ROWS} kinds of turns expected, each seen, none negative")
        for row, each in zip(rows, sizes, strict=True):
            count, work, new, num_ended, num_followed = row
            by_size = {int(size): counts for size, *counts in each}
            table._turns.append(_Turns(count, work, new, num_ended, num_followed, by_size))
        table._num_new = MAX_ROWS
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
    is_last: bool = False
    """Whether its latest turn counts as its last."""


@dataclass(eq=False)
class RemainingWork:
    """Predicts jobs' remaining work from earlier jobs of their tenant and kind, and from all jobs.

    What all jobs show counts as `PRIOR_CASES` jobs of the kind. Jobs whose kind nobody else has count as one.
    """

    _all: TurnTable = field(default_factory=TurnTable)
    _kinds: OrderedDict[tuple[str | None, str | None], TurnTable | None] = field(default_factory=OrderedDict)
    """By tenant and kind, the least recently seen first. A kind has a table from its second job on; the table
    of None is that of a tenant's other jobs."""
    _jobs: dict[str, Past] = field(default_factory=dict)
    _known: dict[tuple[int, TurnTable, float | None], Left] = field(default_factory=dict, repr=False)
    """What was looked up since a turn finished: turns that wait are looked up again and again."""

    def count_new_tokens(self, turn: Turn) -> int:
        """Prompt tokens of a turn that neither its job's latest turn nor the cache has; at least 1."""
        return max(1, turn.num_prompt_tokens - max(self._get_context(turn), turn.num_cached_tokens or 0))

    def _get_context(self, turn: Turn) -> int:
        """Tokens of the job's latest turn if this turn's prompt extends them, else 0."""
        past = self._jobs.get(turn.job.job_id)
        return 0 if past is None or turn.is_parted else past.context

    def observe(self, turn: Turn) -> None:
        """Count a finished turn of a job. Without a tool call, it counts as the job's last."""
        # A first turn's hits were computed by other jobs, so they are not its work.
        num_new = max(1, turn.num_prompt_tokens - (self._get_context(turn) or turn.num_hit_tokens))
        work = get_work(num_new, 0, turn.num_output_tokens)
        is_last = turn.tool is None if turn.is_last is None else turn.is_last
        self.observe_turn(turn.job, float(num_new), work, is_last=is_last)
        self._jobs[turn.job.job_id].context = turn.num_prompt_tokens + turn.num_output_tokens

    def observe_turn(self, job: Job, num_new_tokens: float, work: float, *, is_last: bool) -> None:
        """Count a finished turn of a job; `work` is in prefill tokens, the prompt's new ones included.

        `is_last`: it counts as the job's last until the job sends another.
        """
        self._known.clear()
        past = self._jobs.get(job.job_id)
        if past is None:
            self._see_kind(job)
            past = self._jobs[job.job_id] = Past(self._get_table(job))
        for table in (self._all, past.table):
            table.observe(past, num_new_tokens, work, is_last=is_last)
        past.num_turns, past.size, past.is_last = past.num_turns + 1, _get_size(num_new_tokens), is_last

    def end_job(self, job_id: str) -> None:
        """A job will have no more turns."""
        self._known.clear()
        past = self._jobs.pop(job_id, None)
        if past is not None:
            for table in (self._all, past.table):
                table.end(past)

    def get_work_left(self, job: Job) -> float:
        """Expected work of a job's remaining turns, at least one."""
        return self._look(job, None).work

    def get_rank(self, turn: Turn, num_new_tokens: int) -> float:
        """Expected work per job that ends, if it runs for one turn or for all its turns: the smaller one.

        This is the Gittins index with two places to stop. So a small turn that is probably its job's last
        goes early, whatever else is known about the job. For a job's last turn, if the client says so, it is
        the turn's own work.
        """
        left = self._look(turn.job, float(num_new_tokens))
        return left.this if turn.is_last else min(left.this / left.ends, left.work)

    def get_state(self) -> dict[str, Any]:
        """What was learned of all jobs, as JSON values. Kinds have names that do not outlive the engine."""
        return self._all.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        self._all = TurnTable.from_state(state)
        self._kinds.clear()
        self._known.clear()
        self._jobs = {}

    def _look(self, job: Job, num_new_tokens: float | None) -> Left:
        past = self._jobs.get(job.job_id)
        num_turns, table = (0, self._get_table(job)) if past is None else (past.num_turns, past.table)
        known = self._known.get((num_turns, table, num_new_tokens))
        if known is not None:
            return known
        work, this, ends = self._all.look(num_turns, num_new_tokens)
        own_work, own_this, own_ends = table.look(num_turns, num_new_tokens)
        weight = table.num_jobs / (table.num_jobs + PRIOR_CASES)
        if len(self._known) == MAX_NAMES:
            self._known.clear()
        known = self._known[num_turns, table, num_new_tokens] = Left(
            work + weight * (own_work - work),
            this + weight * (own_this - this),
            ends + weight * (own_ends - ends),
        )
        return known

    def _get_table(self, job: Job) -> TurnTable:
        return self._kinds.get((job.tenant, job.kind)) or self._kinds.get((job.tenant, None)) or self._all

    def _see_kind(self, job: Job) -> None:
        """Count a job that finished its first turn."""
        others, kind = (job.tenant, None), (job.tenant, job.kind)
        self._kinds[others] = self._kinds.get(others) or TurnTable()
        self._kinds[kind] = (self._kinds[kind] or TurnTable()) if kind in self._kinds else None
        for key in (others, kind):
            self._kinds.move_to_end(key)
        if len(self._kinds) > MAX_ROWS:
            forget_some(self._kinds, lambda table: table.num_jobs if table else 0.0)
