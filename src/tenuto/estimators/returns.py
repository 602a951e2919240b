"""Which jobs come back: of the work on earlier jobs' turns, the share whose job sent another turn.

Jobs are counted in nested classes:

    turns with a tool call, turns without one, turns without one of jobs that came back
      └ tenant
          └ kind: jobs whose prompts begin alike
              └ tool, or the number of the job's turns if no call was seen

Each class has a share of its own. While the class has little evidence, its share is shrunk towards that of
its parent. No evidence counts twice: the parent's share is taken over its *other* jobs.

Evidence is weighted by what it cost: the tokens that the engine computed for the turn. A request of a few
tokens hardly counts. So a client can change a share only with at least as much work as the jobs of the class
took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tenuto.core.turn_work import MAX_NAMES, MIN_WEIGHT, Counts, KindCounts, forget_some, get_work
from tenuto.core.types import Job, ToolCall, Turn

PRIOR_TOKENS = 100_000.0
"""Weight of the parent's share in the share of a class, in prefill tokens: some seconds of a GPU. At the top,
the parent's share is 1. Of what plain requests had, 1/e is left after as much. Of the evidence of a class it
is left after `PRIOR_TOKENS` / `MIN_WEIGHT`, so that the parent's share keeps a weight of some 5 %."""

_Class = tuple[str | None, ...]
_Path = tuple[_Class, ...]


@dataclass(slots=True)
class _Counts:
    """Work of turns after which a job was idle, and the part of it whose job came back."""

    left: float = 0.0
    back: float = 0.0


class _Away(NamedTuple):
    """One job: the classes that count it as away (empty while it is not), and whether it ever came back."""

    path: _Path = ()
    work: float = 0.0
    came_back: bool = False


@dataclass(eq=False)
class Returns:
    """Shares of jobs that come back, and which jobs are away. O(1) per turn."""

    _classes: dict[_Class, _Counts] = field(default_factory=dict)
    _jobs: dict[str, _Away] = field(default_factory=dict)
    share_of_new: float = 1.0
    """The share of new jobs that come back from a tool call, over all tenants."""

    def leave(self, job: Job, tool: str | None, work: float) -> None:
        """Count a finished turn of a job that has not ended. `work`: tokens computed for the turn.

        It counts as evidence of no return until the job comes back. A job that came back before is exempt
        when it calls a tool: it is always expected back, so it is no evidence.
        """
        away = self._jobs.get(job.job_id, _NEW)
        if away.path or (away.came_back and tool is not None):
            return
        away = _Away(_get_path(job, tool, came_back=away.came_back), work, away.came_back)
        self._jobs[job.job_id] = away
        decay = math.exp(-work * MIN_WEIGHT / PRIOR_TOKENS)
        for name in away.path:
            counts = self._classes.pop(name, None) or _Counts()
            self._classes[name] = counts
            counts.left = decay * counts.left + work
            counts.back *= decay
        if len(self._classes) > MAX_NAMES:
            forget_some(self._classes, lambda counts: counts.left)
        if _NEW_TOOL in away.path:
            self.share_of_new = self._get_share((_NEW_TOOL,))

    def come_back(self, job_id: str) -> None:
        """A job that was away sent its next turn."""
        away = self._jobs.get(job_id, _NEW)
        for name in away.path:
            if name in self._classes:
                self._classes[name].back += away.work
        if _NEW_TOOL in away.path:
            self.share_of_new = self._get_share((_NEW_TOOL,))
        self._jobs[job_id] = _BACK

    def end(self, job_id: str) -> None:
        """Forget a job that ended. Its evidence stays."""
        self._jobs.pop(job_id, None)

    def get_share(self, job: Job, tool: str | None) -> float:
        """The share of similar jobs that come back after such a turn; 1 for an exempt job."""
        came_back = self._jobs.get(job.job_id, _NEW).came_back
        if came_back and tool is not None:
            return 1.0
        return self._get_share(_get_path(job, tool, came_back=came_back))

    def came_back(self, job_id: str) -> bool:
        """Whether a job ever came back."""
        return self._jobs.get(job_id, _NEW).came_back

    def get_figures(self) -> dict[str, float]:
        """The shares over all tenants: of new jobs with and without a tool call, of others without."""
        return {
            "share_back_tool": self.share_of_new,
            "share_back_no_tool": self._get_share((_NEW_NO_TOOL,)),
            "share_back_again": self._get_share((_AGAIN_NO_TOOL,)),
        }

    def _get_share(self, path: _Path) -> float:
        """The share of the last class. Each share is shrunk towards that of its parent's other jobs."""
        share = 1.0
        own = self._classes.get(path[0], _NOTHING)
        # Written without calls of functions, because each end of a turn asks for several shares.
        for name in (*path[1:], None):
            inner = _NOTHING if name is None else self._classes.get(name, _NOTHING)
            left, back = own.left - inner.left, own.back - inner.back
            share = ((back if back > 0.0 else 0.0) + PRIOR_TOKENS * share) / (
                (left if left > 0.0 else 0.0) + PRIOR_TOKENS
            )
            share = share if share < 1.0 else 1.0
            own = inner
        return share


_NEW = _Away()
_BACK = _Away(came_back=True)
"""Of all jobs that came back and are not counted as away."""
_NOTHING = _Counts()
_NEW_TOOL: _Class = ("new job, tool",)
_NEW_NO_TOOL: _Class = ("new job, no tool",)
_AGAIN_NO_TOOL: _Class = ("job that came back, no tool",)


def _get_path(job: Job, tool: str | None, *, came_back: bool) -> _Path:
    top = _NEW_TOOL if tool is not None else _AGAIN_NO_TOOL if came_back else _NEW_NO_TOOL
    tenant = (*top, job.tenant)
    kind = (*tenant, job.kind)
    return (top, tenant, kind, (*kind, tool or str(job.num_turns)))


FAIR_SHARE = 0.5
"""Most of the work that a class may have and still go first: plain requests before jobs (the policy's
`plain_share`), and new jobs that do not come back before jobs that did."""
FEW = 0.3
"""A kind is an agent's if more than this share of its turns called a tool. (Agents' last turns call none, so
agents of two turns have a share of half.) KV is not held if a smaller share of similar jobs comes back; it
may still be in vLLM's prefix cache."""
PERSON_S = 5.0
"""Seconds. Whoever is back sooner is no person, who reads an answer and writes the next message."""


@dataclass(eq=False)
class PlainKinds:
    """Which requests are plain: those of jobs that call no tool, such as a person's question.

    A first turn does not show whether its job is an agent's, but the job's kind does. Jobs of one tenant
    whose prompts begin alike are of one kind. For each kind, turns are counted, and agents' turns: those that
    ended with a tool call, or whose job was back too soon for a person. So agents are known even where their
    calls are not recognised. A new kind is judged by the first turns of all kinds. Without any evidence a
    request is plain, and is served as in stock vLLM.

    O(1) per turn.
    """

    _kinds: KindCounts = field(default_factory=KindCounts)
    """Finished turns by kind; agents' turns are marked."""
    _new_kinds: Counts = field(default_factory=Counts)
    """The first turns of all kinds."""

    def observe(self, turn: Turn) -> bool:
        """Count a finished turn. Returns whether such jobs call no tools, as `is_plain`."""
        job, has_tool = turn.job, turn.tool is not None
        counts = self._kinds.observe(job.tenant, job.kind, is_marked=has_tool)
        if counts.turns == 1:
            self._new_kinds.observe(is_marked=has_tool)
        return counts.marked <= FEW * counts.turns

    def come_back(self, job: Job) -> None:
        """A job came back as agents do: its latest turn is an agent's, although no call was recognised."""
        counts = self._kinds.get(job.tenant, job.kind)
        if counts is not None:
            counts.mark()

    def is_plain(self, job: Job) -> bool:
        """Whether such jobs call no tools."""
        counts = self._kinds.get(job.tenant, job.kind) or self._new_kinds
        return counts.marked <= FEW * counts.turns


@dataclass(eq=False)
class PlainShare:
    """The share of the engine's recent work that plain requests had."""

    most: float = FAIR_SHARE
    """The largest share that is no flood."""
    _plain: float = 0.0
    _all: float = 0.0

    def observe(self, work: float, *, is_plain: bool) -> None:
        """A turn with this work finished."""
        fade = math.exp(-work / PRIOR_TOKENS)
        self._all = fade * self._all + work
        self._plain = fade * self._plain + (work if is_plain else 0.0)

    @property
    def is_flood(self) -> bool:
        """Whether plain requests had more than their share. A few requests are never a flood."""
        return self._plain > self.most * max(self._all, PRIOR_TOKENS)


# What follows for a job.


@dataclass(eq=False)
class Standing:
    """Which jobs go before all others, and whose KV is held, regardless of their remaining work.

    Plain requests that fit into one step go first, unless they recently had over half of the engine. Then
    plain requests go after all jobs, because the jobs' KV would fill the memory while they wait: nothing
    tells such a flood from people who ask. While most new jobs do not come back, jobs that did come back go
    before new ones.
    """

    returns: Returns = field(default_factory=Returns)
    plain_share: PlainShare = field(default_factory=PlainShare)
    _kinds: PlainKinds = field(default_factory=PlainKinds)

    def is_plain(self, job: Job) -> bool:
        """See `PlainKinds`."""
        return self._kinds.is_plain(job)

    def get_lead(self, job: Job, *, goes_first: bool = False) -> float:
        """By how many classes a job goes ahead. `goes_first`: a plain request that fits into one step."""
        is_ahead = self.returns.share_of_new < FAIR_SHARE and self.returns.came_back(job.job_id)
        lead = 1.0 if goes_first else 0.5 if is_ahead else 0.0
        return lead - 2.0 if self.plain_share.is_flood and self._kinds.is_plain(job) else lead

    def is_expected_back(self, job: Job, tool: str | None, share_longer: float) -> bool:
        """Whether enough similar jobs come back after such a turn that the job's KV is worth holding.

        `share_longer`: of those that came back, the share that was away for longer than this one is.
        """
        share = self.returns.get_share(job, tool)
        back = share * share_longer
        return back >= FEW * (back + 1 - share)

    def come_back(self, turn: Turn, tool: ToolCall | None, pause_s: float) -> None:
        """A job sent its next turn. A turn that does not extend the job's last prompt counts as a new job."""
        if not turn.is_parted:
            if tool is None and pause_s < PERSON_S:
                self._kinds.come_back(turn.job)
            self.returns.come_back(turn.job.job_id)

    def observe(self, turn: Turn, *, fits_step: bool) -> None:
        """Count a finished turn. `fits_step`: one step computed its prompt."""
        job, work = turn.job, get_work(turn.num_prompt_tokens, turn.num_hit_tokens, turn.num_output_tokens)
        is_plain = self._kinds.observe(turn)
        self.plain_share.observe(work, is_plain=is_plain and fits_step)
        if turn.is_parted:
            self.returns.end(job.job_id)
        if not turn.is_last:
            self.returns.leave(job, None if turn.tool is None else turn.tool.name, work)
