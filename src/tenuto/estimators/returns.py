"""Which jobs come back: the share of the work on first turns whose job sent another turn.

Jobs are counted in classes, each inside the one before:

    turns with a tool call, turns without one
      └ tenant
          └ kind: jobs whose prompts begin alike
              └ tool

A class has its own share, drawn towards that of the jobs around it while it has seen little itself. Every
piece of evidence counts once: a class is compared with the *other* jobs of its parent.

Evidence weighs what it cost: the tokens that the engine computed for the turn. A request of a few tokens
says next to nothing, so nobody can change a share for less than the work of the jobs that it is made of.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tenuto.core.turn_work import Counts, KindCounts, MovingMean
from tenuto.core.types import Job, Turn

PRIOR_TOKENS = 100_000.0
"""What the share of the jobs around a class weighs against its own; at the top, a share of 1."""
MEMORY_TOKENS = 2_000_000.0
"""Evidence falls to 1/e after so many computed tokens of its class."""
MAX_CLASSES = 4096
"""Tenants, prompts and tools are made up by clients, so they are bounded."""
NUM_LOOKED_AT = 8
"""Of so many classes that were seen longest ago, the one with the least evidence is forgotten first."""

_Class = tuple[str | None, ...]
_Path = tuple[_Class, ...]


@dataclass(slots=True)
class _Counts:
    """Work of turns after which a job was away, and of those whose job came back."""

    left: float = 0.0
    back: float = 0.0


@dataclass(slots=True)
class _Away:
    """A job: where its absence was counted, empty while it is not away, and whether it ever came back."""

    path: _Path = ()
    work: float = 0.0
    came_back: bool = False


class Returns:
    """Shares of jobs that come back, and which jobs are away. O(1) a turn."""

    def __init__(self) -> None:
        self._classes: OrderedDict[_Class, _Counts] = OrderedDict()
        self._jobs: dict[str, _Away] = {}
        self.share_of_new = 1.0
        """The share of new jobs that come back from a tool call, of all tenants."""

    def leave(self, job: Job, tool: str | None, work: float) -> None:
        """A turn ended and its job did not; `work`: the tokens that were computed for it.

        Counted at once as not coming back. A job that came back from a tool call before is exempt:
        nothing is asked about it, so it is no evidence either.
        """
        away = self._jobs.setdefault(job.job_id, _Away())
        if away.path or (away.came_back and tool is not None):
            return
        away.path, away.work = _get_path(job, tool, came_back=away.came_back), work
        decay = math.exp(-work / MEMORY_TOKENS)
        for name in away.path:
            counts = self._classes.setdefault(name, _Counts())
            counts.left = decay * counts.left + work
            counts.back *= decay
            self._classes.move_to_end(name)
        while len(self._classes) > MAX_CLASSES:
            self._forget_one()
        if _NEW_TOOL in away.path:
            self.share_of_new = self._get_share((_NEW_TOOL,))

    def come_back(self, job_id: str) -> None:
        """A job that was away sent its next turn."""
        away = self._jobs.setdefault(job_id, _Away())
        for name in away.path:
            if name in self._classes:
                self._classes[name].back += away.work
        if _NEW_TOOL in away.path:
            self.share_of_new = self._get_share((_NEW_TOOL,))
        away.path, away.came_back = (), True

    def end(self, job_id: str) -> None:
        """A job ended or was forgotten; what was counted stays."""
        self._jobs.pop(job_id, None)

    def get_share(self, job: Job, tool: str | None) -> float:
        """The share of such jobs that come back after such a turn; 1 for one that is exempt."""
        came_back = self.came_back(job.job_id)
        if came_back and tool is not None:
            return 1.0
        return self._get_share(_get_path(job, tool, came_back=came_back))

    def came_back(self, job_id: str) -> bool:
        """Whether a job ever came back."""
        away = self._jobs.get(job_id)
        return away is not None and away.came_back

    def get_figures(self) -> dict[str, float]:
        """The shares over all tenants: of new jobs with and without a tool call, of others without."""
        return {
            "share_back_tool": self.share_of_new,
            "share_back_no_tool": self._get_share((_NEW_NO_TOOL,)),
            "share_back_again": self._get_share((_AGAIN_NO_TOOL,)),
        }

    def _get_share(self, path: _Path) -> float:
        share = 1.0
        own = self._classes.get(path[0], _NOTHING)
        for name in path[1:]:
            inner = self._classes.get(name, _NOTHING)
            share = _draw(share, own.left - inner.left, own.back - inner.back)
            own = inner
        return _draw(share, own.left, own.back)

    def _forget_one(self) -> None:
        oldest = list(islice(self._iter_bounded(), NUM_LOOKED_AT))
        least = min(oldest, key=lambda name: self._classes[name].left)
        for name in oldest:
            self._classes.move_to_end(name)
        del self._classes[least]

    def _iter_bounded(self) -> Iterator[_Class]:
        return (name for name in self._classes if name not in _TOP)

    def __repr__(self) -> str:
        return f"Returns({dict(self._classes)}, {self._jobs})"


_NOTHING = _Counts()
_NEW_TOOL: _Class = ("new job, tool",)
_NEW_NO_TOOL: _Class = ("new job, no tool",)
_AGAIN_NO_TOOL: _Class = ("job that came back, no tool",)
_TOP = {_NEW_TOOL, _NEW_NO_TOOL, _AGAIN_NO_TOOL}


def _draw(share: float, left: float, back: float) -> float:
    """The share of a class, drawn towards that of the jobs around it."""
    return min(1.0, (max(0.0, back) + PRIOR_TOKENS * share) / (max(0.0, left) + PRIOR_TOKENS))


def _get_path(job: Job, tool: str | None, *, came_back: bool) -> _Path:
    top = _NEW_TOOL if tool is not None else _AGAIN_NO_TOOL if came_back else _NEW_NO_TOOL
    tenant = (*top, job.tenant)
    kind = (*tenant, job.kind)
    return (top, tenant, kind) if tool is None else (top, tenant, kind, (*kind, tool))


MAX_PLAIN_SHARE = 0.25
"""Above this share of turns with a tool call, a kind is an agent's. The last turn of an agent calls none, so
agents of two turns have half."""
FAIR_PLAIN_SHARE = 0.5
"""Plain requests and jobs that call tools are two classes; a class that had its half does not go first."""
PLAIN_MEMORY_TOKENS = 50_000.0
"""Work falls to 1/e after so much of it, in prefill tokens: some seconds of a GPU."""


class PlainKinds:
    """Which requests are plain: those of jobs that call no tool, such as a person's question.

    A job's first turn does not show whether its job is an agent. Jobs of one tenant whose prompts begin alike
    are of one kind, so a kind tells: its turns that ended with a tool call are counted beside the others. A
    kind that was not seen before goes by how the first turns of new kinds turned out. Before anything was
    seen, requests are plain: then they are served as stock vLLM does.

    O(1) a turn.
    """

    def __init__(self) -> None:
        self._kinds = KindCounts()
        """Finished turns; those with a tool call are marked."""
        self._new_kinds = Counts()
        """The first turns of all kinds."""

    def observe(self, turn: Turn) -> None:
        """A turn finished. That its client calls it not the last proves no agent: people go on, too."""
        job, has_tool = turn.job, turn.tool is not None
        if self._kinds.observe(job.tenant, job.kind, is_marked=has_tool):
            self._new_kinds.observe(is_marked=has_tool)

    def is_plain(self, job: Job) -> bool:
        """Whether such jobs call no tools."""
        counts = self._kinds.get(job.tenant, job.kind) or self._new_kinds
        return counts.marked <= MAX_PLAIN_SHARE * counts.turns

    def __repr__(self) -> str:
        return f"PlainKinds({len(self._kinds)} kinds)"


class PlainShare:
    """The share of the engine's latest work that plain requests had."""

    def __init__(self) -> None:
        self._plain = self._all = 0.0

    def observe(self, work: float, *, is_plain: bool) -> None:
        """A turn of so much work finished."""
        fade = math.exp(-work / PLAIN_MEMORY_TOKENS)
        self._all = fade * self._all + work
        self._plain = fade * self._plain + (work if is_plain else 0.0)

    @property
    def is_flood(self) -> bool:
        """Whether plain requests had more than their share; a few requests are no flood."""
        return self._plain > FAIR_PLAIN_SHARE * max(self._all, PLAIN_MEMORY_TOKENS)

    def __repr__(self) -> str:
        return f"PlainShare({self._plain}, {self._all})"


# Whether a job that comes back meets today's queue, and how long turns run.
#
# If the queue is empty before it comes back, its later turns compete with nobody who waits now. Then turns
# compete, not jobs, and the shortest turn should go first. If the queue lasts longer than tools do, whole
# jobs compete.

MIN_AWAY_S = 0.01
"""Shorter tool calls count as this long."""
WEIGHT = 0.02
"""Weight of the latest tool call in the mean."""


class Backlog:
    """The turns that wait, how long there have been some without a break, and how long tools take."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._since_s = 0.0
        """Since when turns have been waiting, if any are."""
        self._log_away_s = 0.0
        """Mean logarithm of tool times: a few people who think for minutes must not hide many fast tools."""

    def wait(self, turn_id: str, now_s: float) -> None:
        """A turn waits from now on."""
        if not self._waiting:
            self._since_s = now_s
        self._waiting.add(turn_id)

    def leave(self, turn_id: str) -> None:
        """A turn started, or ended."""
        self._waiting.discard(turn_id)

    def come_back(self, away_s: float) -> None:
        """A job sent its next turn, after so many seconds."""
        self._log_away_s += WEIGHT * (math.log(max(away_s, MIN_AWAY_S)) - self._log_away_s)

    def get_share_back(self, now_s: float) -> float:
        """The share of jobs that come back before the queue is empty, from 0 (no queue) towards 1.

        A queue that has lasted so long is expected to last as long again.
        """
        lasted_s = max(0.0, now_s - self._since_s) if self._waiting else 0.0
        return lasted_s / (lasted_s + math.exp(self._log_away_s))

    def __repr__(self) -> str:
        return f"Backlog({len(self._waiting)} since {self._since_s}, {self._log_away_s})"


class TurnTimes:
    """The turns that run, and the mean time that the latest ones took."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._mean = MovingMean()

    @property
    def mean_s(self) -> float:
        """Mean seconds of a turn; infinity before one has ended."""
        return self._mean.value if self._mean.num_values else math.inf

    def start(self, turn_id: str, now_s: float) -> None:
        """A turn started. If it was preempted and starts again, the first start counts."""
        self._started.setdefault(turn_id, now_s)

    def end(self, turn_id: str, now_s: float) -> None:
        """A turn ended, or left before it started."""
        start_s = self._started.pop(turn_id, None)
        if start_s is not None:
            self._mean.observe(now_s - start_s)

    def __repr__(self) -> str:
        return f"TurnTimes({len(self._started)} running, mean {self.mean_s} s)"
