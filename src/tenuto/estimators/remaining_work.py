"""How much work a job still has, in prefill tokens, and how well that can be predicted.

Jobs that begin alike are alike: a kind of jobs has its own `TurnTable`, next to that of all jobs. What it
says counts the more, the more of its jobs were seen.

Predictions are compared with what happened. Their correlation is the trust that they deserve: a guess is
drawn towards the mean of new jobs by what is missing from 1. So if nothing can be predicted, all guesses are
equal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tenuto.core.types import Job
from tenuto.estimators.turn_table import Left, Past, TurnTable, get_numbers

DECAY = 0.999
"""Factor on a prediction's weight for each later prediction."""
LONG_S = 10.0
"""A job that is away for longer does not compete with those that wait now. Few tools of agents take longer;
people do."""
MAX_PREDICTIONS = 64
"""Number of turns per job whose predictions are compared with what happened."""
KIND_PRIOR = 8.0
"""All jobs weigh against those of a kind as if they were so many."""
MAX_KINDS = 256
"""Tenants and prompts are made up by clients, so kinds are bounded."""
NUM_LOOKED_AT = 8
"""Of so many kinds that were seen longest ago, the one with the fewest jobs is forgotten first."""

_Kind = tuple[str | None, str | None]


@dataclass(slots=True)
class _Job:
    kind: _Kind
    work: float = 0.0
    stops: bool = False
    """Whether its latest turn was taken for a stop."""
    past: Past = field(default_factory=Past)
    past_of_kind: Past = field(default_factory=Past)
    predictions: list[tuple[float, float]] = field(default_factory=list)
    """For each prediction: the work done by then, and the predicted remaining work."""


class RemainingWork:
    """Work of turns by number, of all jobs and by kind, and of the jobs that are known by themselves."""

    def __init__(self, *, by_kind: bool = True) -> None:
        """`by_kind`: whether kinds have tables of their own."""
        self._by_kind = by_kind
        self._all = TurnTable()
        self._kinds: OrderedDict[_Kind, TurnTable] = OrderedDict()
        self._jobs: dict[str, _Job] = {}
        self._agreement = _Agreement()

    @property
    def num_kinds(self) -> int:
        """Kinds with a table of their own."""
        return len(self._kinds)

    def observe_turn(self, job: Job, num_new_tokens: float, work: float, *, stops: bool) -> None:
        """Count a finished turn of a job; `work` is in prefill tokens, the prompt's new ones included.

        `stops`: whether the turn ended without a tool call, so that nothing is expected soon.
        """
        known = self._jobs.get(job.job_id)
        if known is None:
            known = self._jobs[job.job_id] = _Job((job.tenant, job.kind))
        if len(known.predictions) < MAX_PREDICTIONS:
            known.predictions.append((known.work, self._look(job, num_new_tokens).work))
        known.work += work
        known.stops = stops
        self._all.observe(known.past, num_new_tokens, work, stops=stops)
        if self._by_kind and job.kind is not None:
            self._get_table(known).observe(known.past_of_kind, num_new_tokens, work, stops=stops)

    def come_back(self, job_id: str, away_s: float) -> None:
        """A job sent its next turn, after so many seconds."""
        job = self._jobs.get(job_id)
        if job is None or not job.stops or away_s > LONG_S:
            return
        job.stops = False
        self._all.go_on(job.past)
        if (table := self._kinds.get(job.kind)) is not None:
            table.go_on(job.past_of_kind)

    def end_job(self, job_id: str) -> None:
        """A job will have no more turns."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        for done, predicted in job.predictions:
            self._agreement.observe(predicted, job.work - done)
        self._all.end(job.past)
        # A table that was forgotten meanwhile has not seen all turns of the job.
        table = self._kinds.get(job.kind)
        if table is not None and table.has(job.past_of_kind):
            table.end(job.past_of_kind)

    def get_work_left(self, job: Job, num_new_tokens: float | None = None) -> float:
        """Expected work of a job's remaining turns, at least one, as far as it can be trusted.

        `num_new_tokens`: the new prompt tokens of the next turn, if they are known.
        """
        return self._trust(self._look(job, num_new_tokens).work)

    def get_rank(self, job: Job, num_new_tokens: float, share_back: float = 1.0) -> float:
        """The least work per job that is expected to be complete, either by the next turn or by all to come.

        This is Gittins' index with two places to stop. A turn that is known to be small, and likely to be its
        job's last, goes early whatever else is known of its job.

        `share_back`: so much of the job's later work counts, because it comes back that likely while those
        still wait that it is compared with.
        """
        left = self._look(job, num_new_tokens)
        work = share_back * self._trust(left.work) + (1 - share_back) * left.this
        return min(_round_down(left.this / left.stops), work)

    def get_trust(self) -> float:
        """Correlation between predicted and actual remaining work, from 0 (none, or unknown) to 1."""
        return self._agreement.get_correlation()

    def get_state(self) -> dict[str, Any]:
        """What was learned of all jobs, as JSON values.

        Kinds are learned anew: prompts change with releases.
        """
        return {**self._all.get_state(), "agreement": self._agreement.sums}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        table, agreement = TurnTable.from_state(state), get_numbers(state["agreement"], 6)
        self._all, self._agreement.sums = table, agreement
        self._kinds.clear()
        self._jobs = {}

    def _look(self, job: Job, num_new_tokens: float | None) -> Left:
        known = self._jobs.get(job.job_id)
        left = self._all.look(known.past if known is not None else None, num_new_tokens)
        table = self._kinds.get((job.tenant, job.kind))
        if table is None or not self._by_kind:
            return left
        past = known.past_of_kind if known is not None and table.has(known.past_of_kind) else None
        own = table.look(past, num_new_tokens)
        return left.blend(own, table.num_jobs / (table.num_jobs + KIND_PRIOR))

    def _trust(self, work: float) -> float:
        trust = self.get_trust()
        return (1 - trust) * self._all.work + trust * work

    def _get_table(self, job: _Job) -> TurnTable:
        table = self._kinds.get(job.kind)
        if table is None:
            table = self._kinds[job.kind] = TurnTable()
            if len(self._kinds) > MAX_KINDS:
                self._forget_one()
        if not table.has(job.past_of_kind):
            # The table is new, or was forgotten and made anew: it has not seen the job's earlier turns.
            job.past_of_kind = Past()
        self._kinds.move_to_end(job.kind)
        return table

    def _forget_one(self) -> None:
        oldest = list(islice(self._kinds, NUM_LOOKED_AT))
        del self._kinds[min(oldest, key=lambda kind: self._kinds[kind].num_jobs)]

    def __repr__(self) -> str:
        return f"RemainingWork({self._jobs!r}, {self._all!r}, {dict(self._kinds)!r}, {self._agreement!r})"


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


def _round_down(work: float) -> float:
    """The next power of four below: of requests of about one size, the first goes first."""
    return 4.0 ** math.floor(math.log(max(1.0, work), 4))


def get_mean_left_s(sorted_s: Sequence[float], elapsed_s: float) -> float | None:
    """Mean time left of those samples that took longer than `elapsed_s`; None if none did."""
    longer = sorted_s[bisect_right(sorted_s, elapsed_s) :]
    return sum(longer) / len(longer) - elapsed_s if longer else None
