"""tenuto: a job starts where it will finish soonest, and stays with its KV unless a move pays off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.router import (
    AnsweredTurn,
    EngineSeen,
    FleetView,
    Hold,
    Route,
    RoutedTurn,
    Router,
    RouterNeeds,
    Send,
)
from tenuto.core.settings import setting
from tenuto.core.types import Job
from tenuto.estimators.remaining_work import RemainingWork
from tenuto.routers._prefixes import Prefixes

# Which jobs are on which engine, the work that they still need, and the KV that they will hold together.


@dataclass(slots=True)
class Placed:
    """A job on an engine, all in tokens. Work counts a generated token as several prompt tokens."""

    engine: str
    work: float = 0.0
    """Expected work of all its remaining turns."""
    held: float = 0.0
    """Its KV now."""
    peak: float = 0.0
    """Its KV at its longest context."""
    shared: float = 0.0
    """What of it the engine had from other jobs when this one came."""


@dataclass(slots=True)
class _Engine:
    work: float = 0.0
    most: float = 0.0
    jobs: dict[str, Placed] = field(default_factory=dict)
    num_changes: int = 0
    """How often its jobs have changed since `work` and `most` were computed."""


RENEW_SHARE = 64
"""`most` is computed again once one in so many jobs has changed; with fewer jobs, each time."""
_NOTHING = _Engine()


class Placements:
    """The jobs of each engine. Changes take O(1), because many jobs may fall silent at once.

    A look takes O(n log n) if one in `RENEW_SHARE` of the engine's jobs has changed, else O(1).
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Placed] = {}
        self._engines: dict[str, _Engine] = {}

    def get(self, job_id: str) -> Placed | None:
        """The job; None if it is on no engine."""
        return self._jobs.get(job_id)

    def count_jobs(self, engine: str) -> int:
        """Jobs there, those in tool calls included."""
        return len(self._engines.get(engine, _NOTHING).jobs)

    def get_work(self, engine: str) -> float:
        """The work that all jobs there still need."""
        return self._look(engine).work

    def get_most_tokens(self, engine: str, num_new_tokens: int) -> float:
        """The most KV that the jobs there will hold at one time, if a job joins them now.

        `num_new_tokens`: of its prompt, what the engine does not have. What jobs share counts once.

        All jobs are assumed to grow at the same pace, and each to leave at its peak. When one leaves, the
        others are still below their peaks. So less is needed than the sum of all peaks.
        """
        return self._look(engine).most + num_new_tokens

    def put(self, job_id: str, placed: Placed) -> None:
        """Put a job on an engine, or update it."""
        before = self._jobs.get(job_id)
        if before is not None and before.engine != placed.engine:
            self.remove(job_id)
        self._jobs[job_id] = placed
        engine = self._engines.setdefault(placed.engine, _Engine())
        engine.work += placed.work - (0.0 if (old := engine.jobs.get(job_id)) is None else old.work)
        engine.jobs[job_id] = placed
        engine.num_changes += 1

    def remove(self, job_id: str) -> Placed | None:
        """Remove a job. Returns what was known about it; None if it was on no engine."""
        placed = self._jobs.pop(job_id, None)
        if placed is not None:
            engine = self._engines[placed.engine]
            del engine.jobs[job_id]
            engine.work -= placed.work
            engine.num_changes += 1
            if not engine.jobs:
                del self._engines[placed.engine]
        return placed

    def leave(self, engine: str) -> None:
        """Remove an engine and its jobs."""
        for job_id in self._engines.pop(engine, _NOTHING).jobs:
            del self._jobs[job_id]

    def _look(self, name: str) -> _Engine:
        engine = self._engines.get(name, _NOTHING)
        if engine.num_changes * RENEW_SHARE > len(engine.jobs):
            _renew(engine)
        return engine

    def __repr__(self) -> str:
        return f"Placements({self._jobs!r})"


def _renew(engine: _Engine) -> None:
    jobs = sorted((max(0.0, job.peak - job.held), job.held - job.shared) for job in engine.jobs.values())
    held, most = sum(each for _, each in jobs), 0.0
    for num_gone, (growth, own) in enumerate(jobs):
        # The moment before this job leaves. The joining job has grown as much as the others.
        most = max(most, held + (len(jobs) - num_gone + 1) * growth)
        held -= own
    engine.most = most
    engine.work = sum(job.work for job in engine.jobs.values())
    engine.num_changes = 0


# Jobs whose client is away, in a tool call or for good: those that are not expected back soon.

MAX_AWAY_S = 30.0
"""A job that is away for longer is not expected back soon, even if its client says that it comes back."""
PATIENCE = 3.0
"""If clients do not say whether a job continues, it has ended after this many times the mean tool call."""
DECAY = 0.02
"""Weight of the latest time away in the moving average."""


@dataclass
class AwayJobs:
    """Tracks which jobs are away. Reports each job once when it has become silent. O(log n) per change."""

    _left: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """When it left, and whether its client said that it comes back."""
    _deadlines: IndexedHeap[str] = field(default_factory=IndexedHeap, repr=False)
    mean_s: float = 0.0
    """Mean seconds away; 0 until one was seen."""

    def leave(self, job_id: str, now_s: float, *, will_return: bool) -> None:
        """A turn was answered, and no other turn of the job is open."""
        self._left[job_id] = (now_s, will_return)
        is_known = self.mean_s > 0 and not will_return
        away_s = min(MAX_AWAY_S, PATIENCE * self.mean_s) if is_known else MAX_AWAY_S
        self._deadlines.push(job_id, (now_s + away_s,))

    def come_back(self, job_id: str, now_s: float) -> None:
        """A turn of the job came."""
        if job_id in self._left:
            away_s = now_s - self._left[job_id][0]
            self.mean_s += (DECAY if self.mean_s else 1.0) * (away_s - self.mean_s)
            self.end(job_id)

    def end(self, job_id: str) -> None:
        """The job ended."""
        self._left.pop(job_id, None)
        self._deadlines.discard(job_id)

    def pop_silent(self, now_s: float) -> list[tuple[str, bool]]:
        """The jobs that have become silent, and whether each is assumed to have ended."""
        silent = []
        while (key := self._deadlines.get_first_key()) is not None and key <= (now_s,):
            job_id = self._deadlines.pop()
            silent.append((job_id, not self._left.pop(job_id)[1]))
        return silent


# The router.

PEAK_DECAY = 0.02
"""Weight of the latest job in the moving average of how long contexts become."""


MIN_PREFILL = 256
"""Shorter prefills say little about the time per token."""


@dataclass
class Tenuto(Router):
    """Least work left, counted over whole jobs.

    - *A new job* goes to the engine that will finish it soonest: the expected work of the engine's jobs and
      of the new one, divided by the engine's speed. Prompt tokens that the engine was not sent before count
      once for each turn that they delay. So sub-agents go where the prompt that they share is.
    - *A job stays with its KV.* After a tool call it moves only if the first tokens of all affected turns
      come sooner, in sum, by more than `move_cost` times what it costs to compute the context again on the
      other engine, or to copy it. An engine without open turns still has jobs in tool calls, and some of them
      come back before that prefill is done.
    - *Admission*: a new job is held back while no engine has room for its jobs' contexts at their joint peak.
      What a new job shares with earlier ones there counts once. So no engine holds more jobs than it can
      finish without recomputing. The job goes to the first engine that has room.

    Lengths of jobs are learned from earlier jobs. A job that is away for much longer than tool calls take no
    longer counts until it comes back, because most clients never say that a job has ended. Weakness: a router
    counts only its own turns, so two routers side by side do not see each other's.
    """

    needs: ClassVar[RouterNeeds] = RouterNeeds(prompts=True)

    decode_tokens: float = setting(
        10.0, "prefill tokens that take as long as generating one token", minimum=0
    )
    move_cost: float = setting(2.0, "a job moves if the gain is over this many times the cost", minimum=0)
    fill: float = setting(
        1.0, "share of an engine's KV cache that its jobs may need at their longest", minimum=0.01
    )
    max_prefix_tokens: int = setting(
        2**22, "tokens of prompts that are remembered for each engine", minimum=1
    )
    _work: RemainingWork = field(init=False, default_factory=RemainingWork)
    _away: AwayJobs = field(init=False, default_factory=AwayJobs)
    _placed: Placements = field(init=False, default_factory=Placements)
    _open: dict[str, dict[str, int]] = field(init=False, default_factory=dict)
    """By job: its turns that engines have, and the tokens of their prompts."""
    _pending: dict[str, float] = field(init=False, default_factory=dict)
    """By engine: prompt tokens to compute for its turns that have no first token yet."""
    _unstarted: dict[str, tuple[int, bool, float]] = field(init=False, default_factory=dict)
    """Each of those turns: its tokens to compute, whether the engine had no others then, and when it was
    sent."""
    _token_s: float = field(init=False, default=0.0)
    """Seconds to compute a prompt token, for all engines; 0 until it was seen."""
    _mean_peak: float = field(init=False, default=0.0)
    _prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        self._prefixes = Prefixes(self.max_prefix_tokens)

    # Decisions.

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The job's engine, a better one, or none yet."""
        if turn.engine is None:
            return self._place(turn, fleet)
        if turn.num_open:
            return Send(turn.engine)
        return self._stay_or_move(turn, fleet)

    def _place(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        engines: Iterable[EngineSeen] = fleet.engines.values()
        found = self._prefixes.find(turn.parts)
        with_room = [engine for engine in engines if self._has_room(engine, turn, found)]
        if not with_room and not turn.must_go:
            return Hold()
        work = self._work.get_work_left(_get_job(turn))

        def get_end(engine: EngineSeen) -> tuple[float, int]:
            new = self._count_new(turn, engine.name, found)
            later = max(0.0, work - turn.num_prompt_tokens)
            ends = self._placed.get_work(engine.name) + later + new * (1 + self._count_delayed(engine, new))
            return ends / engine.info.speed, engine.num_open

        return Send(min(with_room or engines, key=get_end).name)

    def _stay_or_move(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The engine with the least sum of delays, over this turn and the turns that it delays."""
        assert turn.engine is not None
        home = fleet.engines[turn.engine]
        own = self._count_new(turn, home.name, {})
        stay = self._get_delay(home, own)
        if self._pending.get(home.name, 0.0) <= 0 and home.num_open == 0:
            return Send(home.name)
        found = self._prefixes.find(turn.parts)
        best, best_gain, is_copied = home, 0.0, False
        for engine in fleet.engines.values():
            missing = self._count_new(turn, engine.name, found) - own
            cost, copies = missing / engine.info.speed, False
            copy = self._get_copy_work(missing, fleet)
            if copy is not None and copy < cost:
                cost, copies = copy, True
            wanted = max(best_gain, self.move_cost * cost)
            if engine is home or stay - cost <= wanted:  # a cheap test that leaves out most engines
                continue
            there = self._get_delay(engine, own) + cost if copies else self._get_delay(engine, own + missing)
            if stay - there > wanted and self._has_room(engine, turn, found):
                best, best_gain, is_copied = engine, stay - there, copies
        return Send(best.name, home.name if is_copied else None)

    def _get_delay(self, engine: EngineSeen, num_new_tokens: float) -> float:
        """Seconds of work that a turn waits for there, and that it makes the turns there wait for."""
        own = self._pending.get(engine.name, 0.0) + num_new_tokens
        return (own + num_new_tokens * self._count_delayed(engine, num_new_tokens)) / engine.info.speed

    def _count_delayed(self, engine: EngineSeen, num_new_tokens: float) -> float:
        """Number of turns that such a prefill delays: open turns, and those that come before its end."""
        num_away = max(0, self._placed.count_jobs(engine.name) - engine.num_open)
        if self._token_s == 0 or self._away.mean_s == 0:
            return engine.num_open + num_away
        num_tokens = self._pending.get(engine.name, 0.0) + num_new_tokens
        until_s = num_tokens * self._token_s / engine.info.speed
        return engine.num_open + num_away * min(1.0, until_s / self._away.mean_s)

    def _count_new(self, turn: RoutedTurn, engine: str, found: Mapping[str, int]) -> int:
        """Prompt tokens that an engine would have to compute."""
        cached = turn.num_context_tokens if engine == turn.engine else found.get(engine, 0)
        return max(1, turn.num_prompt_tokens - cached)

    def _get_copy_work(self, num_tokens: float, fleet: FleetView) -> float | None:
        """Prefill tokens that take as long as copying KV of `num_tokens`; None if that is not known."""
        if fleet.copy_token_s is None or self._token_s == 0:
            return None
        return num_tokens * fleet.copy_token_s / self._token_s

    def _get_peak(self, turn: RoutedTurn) -> float:
        """The KV that a job will need at its longest, in tokens."""
        return max(turn.num_prompt_tokens, self._mean_peak)

    def _has_room(self, engine: EngineSeen, turn: RoutedTurn, found: Mapping[str, int]) -> bool:
        size = engine.info.num_kv_tokens
        if size is None or not self._placed.count_jobs(engine.name):
            return True
        most = self._placed.get_most_tokens(engine.name, self._count_new(turn, engine.name, found))
        return max(most, self._get_peak(turn)) <= self.fill * size

    # Events.

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Its job is there now."""
        self._away.come_back(turn.job_id, now_s)
        self.on_tick(now_s)
        self._open.setdefault(turn.job_id, {})[turn.turn_id] = turn.num_prompt_tokens
        new_tokens = self._count_new(turn, engine, self._prefixes.find(turn.parts))
        self._put(turn, engine, shared=turn.num_prompt_tokens - new_tokens if turn.engine is None else 0)
        self._unstarted[turn.turn_id] = (new_tokens, self._pending.get(engine, 0.0) <= 0, now_s)
        self._pending[engine] = self._pending.get(engine, 0.0) + new_tokens
        self._prefixes.add(engine, turn.parts)

    def on_first_token(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Its prefill is done. If no other prefill was open there, learn how long a token takes."""
        new_tokens, was_first, sent_s = self._start(turn, engine)
        if was_first and new_tokens >= MIN_PREFILL and now_s > sent_s:
            token_s = (now_s - sent_s) / new_tokens
            weight = PEAK_DECAY if self._token_s else 1.0
            self._token_s += weight * (token_s - self._token_s)

    def on_turn_failed(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """It is no longer computed there. Without other turns, the job counts again from its next turn on."""
        self._start(turn, engine)
        if not self._close(turn):
            self._placed.remove(turn.job_id)

    def on_turn_answered(self, answered: AnsweredTurn, now_s: float) -> None:
        """Learn the work of a turn. From now on the job is away, unless it has other turns."""
        self.on_tick(now_s)
        turn = answered.turn
        self._start(turn, answered.engine)  # first tokens are not always reported
        new_tokens = max(1, turn.num_prompt_tokens - turn.num_context_tokens)
        work = new_tokens + self.decode_tokens * answered.num_output_tokens
        self._work.observe_turn(_get_job(turn), new_tokens, work, is_last=False)
        has_others = self._close(turn)
        if (placed := self._placed.get(turn.job_id)) is not None:
            self._put(turn, placed.engine, turn.num_prompt_tokens + answered.num_output_tokens)
        if not has_others:
            self._away.leave(turn.job_id, now_s, will_return=answered.is_last is False)

    def on_job_ended(self, job_id: str, now_s: float) -> None:
        """Learn how long jobs are."""
        self._away.end(job_id)
        self._end(job_id)

    def on_tick(self, now_s: float) -> None:
        """Drop jobs that have been away for too long."""
        for job_id, has_ended in self._away.pop_silent(now_s):
            self._end(job_id) if has_ended else self._placed.remove(job_id)

    def _end(self, job_id: str) -> None:
        self._work.end_job(job_id)
        placed = self._placed.remove(job_id)
        if placed is None:
            return
        weight = PEAK_DECAY if self._mean_peak else 1.0
        self._mean_peak += weight * (placed.held - self._mean_peak)

    def on_engine_left(self, name: str, now_s: float) -> None:
        """Its cache is of no use any more, and its jobs go elsewhere."""
        self._prefixes.forget(name)
        self._placed.leave(name)

    def _start(self, turn: RoutedTurn, engine: str) -> tuple[int, bool, float]:
        known = self._unstarted.pop(turn.turn_id, (0, False, 0.0))
        left = self._pending.pop(engine, 0.0) - known[0]
        if left > 0:  # else nothing is remembered of an engine that may be gone
            self._pending[engine] = left
        return known

    def _close(self, turn: RoutedTurn) -> bool:
        """A turn left its engine. Whether engines have other turns of its job."""
        turns = self._open[turn.job_id]
        del turns[turn.turn_id]
        if not turns:
            del self._open[turn.job_id]
        return bool(turns)

    def _put(self, turn: RoutedTurn, engine: str, num_answered_tokens: int = 0, shared: float = 0) -> None:
        before = self._placed.get(turn.job_id)
        if before is not None and before.engine == engine:
            shared = before.shared
        work = self._work.get_work_left(_get_job(turn))
        held = max(num_answered_tokens, *self._open.get(turn.job_id, {}).values(), 0)
        peak = max(self._get_peak(turn), held)
        self._placed.put(turn.job_id, Placed(engine, work, held, peak, shared))


def _get_job(turn: RoutedTurn) -> Job:
    """The job as `RemainingWork` knows it. Prompts that begin with the same message are of one kind."""
    return Job(turn.job_id, 0.0, 1, turn.tenant, turn.parts[0].name if turn.parts else None)
