"""tenuto: a job begins where it will be done soonest, and stays with its KV unless moving it pays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.routing.router import Router, RouterNeeds
from tenuto.core.routing.types import (
    AnsweredTurn,
    EngineSeen,
    FleetView,
    Hold,
    Route,
    RoutedTurn,
    Send,
)
from tenuto.core.settings import setting
from tenuto.core.types import Job
from tenuto.estimators.remaining_work import RemainingWork
from tenuto.routers._prefixes import Prefixes

PEAK_DECAY = 0.02
"""Weight of the latest job in the moving average of how long contexts become."""


MIN_PREFILL = 256
"""Shorter prefill says little of how long a token takes."""


@dataclass(slots=True)
class _Placed:
    """A job on an engine: the work that it is expected to still need, and the KV that it will need at most.

    Both are in tokens; work counts a generated token as `decode_tokens`.
    """

    engine: str
    work: float = 0.0
    peak: float = 0.0
    context: int = 0


@dataclass
class Tenuto(Router):
    """Least work left, counted over whole jobs.

    - *A new job* goes where its whole remaining work will be done soonest: the expected work of all jobs on
      that engine and its own, over the engine's speed. A prefix that the engine was sent before is no work
      there, so sub-agents go near the prompt that they share, unless others are idle.
    - *A job stays with its KV.* When it comes back from a tool call, it moves only if another engine would
      begin to answer sooner by more than it costs to compute the context again there, or to copy it.
    - *Admission*: a new job is held back while no engine has room for the contexts that its jobs will have
      at their longest. So no engine holds more jobs than it can finish without recomputing, and the job goes
      to whichever engine has room first.

    Lengths of jobs are learned from earlier jobs. Weakness: it counts its own turns only, so two routers side
    by side do not see each other's.
    """

    needs: ClassVar[RouterNeeds] = RouterNeeds(prompts=True)

    decode_tokens: float = setting(
        10.0, "prefill tokens that take as long as generating one token", minimum=0
    )
    move_cost: float = setting(2.0, "how many times the cost of moving a job must be gained by it", minimum=0)
    fill: float = setting(
        1.0, "share of an engine's KV cache that its jobs may need at their longest", minimum=0.01
    )
    max_prefix_tokens: int = setting(2**22, "tokens of prompts that are remembered of each engine", minimum=1)
    _work: RemainingWork = field(init=False, default_factory=RemainingWork)
    _jobs: dict[str, _Placed] = field(init=False, default_factory=dict)
    _engine_work: dict[str, float] = field(init=False, default_factory=dict)
    _engine_peak: dict[str, float] = field(init=False, default_factory=dict)
    _pending: dict[str, float] = field(init=False, default_factory=dict)
    """By engine, the prompt tokens that the turns without a first token have it compute."""
    _unstarted: dict[str, tuple[int, bool, float]] = field(init=False, default_factory=dict)
    """Of each of those turns: these tokens, whether there were no others then, and when it was sent."""
    _token_s: float = field(init=False, default=0.0)
    """Seconds to compute a prompt token, for all engines; 0 until it was seen."""
    _mean_peak: float = field(init=False, default=0.0)
    _prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        """Begin without memory."""
        self._prefixes = Prefixes(self.max_prefix_tokens)

    # Asked.

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The job's engine, a better one, or none yet."""
        if turn.engine is None:
            return self._place(turn, fleet)
        if turn.num_open:
            return Send(turn.engine)
        return self._stay_or_move(turn, fleet)

    def _place(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        engines: Iterable[EngineSeen] = fleet.engines.values()
        peak = self._get_peak(turn)
        with_room = [engine for engine in engines if self._has_room(engine, peak)]
        if not with_room and not turn.must_go:
            return Hold()
        work = self._work.get_work_left(_get_job(turn.job_id))
        found = self._prefixes.find(turn.parts)

        def get_end(engine: EngineSeen) -> tuple[float, int]:
            new = max(0.0, work - found.get(engine.name, 0))
            return (self._engine_work.get(engine.name, 0.0) + new) / engine.info.speed, engine.num_open

        return Send(min(with_room or engines, key=get_end).name)

    def _stay_or_move(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Where all open turns together get their first tokens soonest: this one, and those it delays."""
        assert turn.engine is not None
        home = fleet.engines[turn.engine]
        own = self._count_new(turn, home.name, {})
        stay = self._get_delay(home, own)
        if self._pending.get(home.name, 0.0) <= 0 and home.num_open == 0:
            return Send(home.name)
        peak, found = self._get_peak(turn), self._prefixes.find(turn.parts)
        best, best_gain, is_copied = home, 0.0, False
        for engine in fleet.engines.values():
            if engine is home or not self._has_room(engine, peak):
                continue
            missing = self._count_new(turn, engine.name, found) - own
            cost, copies = missing / engine.info.speed, False
            there = self._get_delay(engine, own + missing)
            copy = self._get_copy_work(missing, fleet)
            if copy is not None and copy < cost:
                cost, copies, there = copy, True, self._get_delay(engine, own) + copy
            gain = stay - there
            if gain > max(best_gain, self.move_cost * cost):
                best, best_gain, is_copied = engine, gain, copies
        return Send(best.name, home.name if is_copied else None)

    def _get_delay(self, engine: EngineSeen, num_new_tokens: float) -> float:
        """Work that a turn waits for there, and that the turns there wait for because of it."""
        own = self._pending.get(engine.name, 0.0) + num_new_tokens
        return (own + num_new_tokens * engine.num_open) / engine.info.speed

    def _count_new(self, turn: RoutedTurn, engine: str, found: Mapping[str, int]) -> int:
        """Prompt tokens that an engine would have to compute."""
        cached = turn.num_context_tokens if engine == turn.engine else found.get(engine, 0)
        return max(1, turn.num_prompt_tokens - cached)

    def _get_copy_work(self, num_tokens: float, fleet: FleetView) -> float | None:
        """The prefill that would take as long as copying KV; None if that cannot be said."""
        if fleet.copy_token_s is None or self._token_s == 0:
            return None
        return num_tokens * fleet.copy_token_s / self._token_s

    def _get_peak(self, turn: RoutedTurn) -> float:
        """The KV that a job will need at its longest, in tokens."""
        return max(turn.num_prompt_tokens, self._mean_peak)

    def _has_room(self, engine: EngineSeen, peak: float) -> bool:
        size = engine.info.num_kv_tokens
        used = self._engine_peak.get(engine.name, 0.0)
        return size is None or used == 0 or used + peak <= self.fill * size

    # Told.

    def on_turn_sent(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Its job is there now."""
        self._put(turn.job_id, engine, self._work.get_work_left(_get_job(turn.job_id)), self._get_peak(turn))
        new_tokens = self._count_new(turn, engine, self._prefixes.find(turn.parts))
        self._unstarted[turn.turn_id] = (new_tokens, self._pending.get(engine, 0.0) <= 0, now_s)
        self._pending[engine] = self._pending.get(engine, 0.0) + new_tokens
        self._prefixes.add(engine, turn.parts)

    def on_first_token(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """Its prefill is done. If it had the engine's prefill for itself, learn how long a token takes."""
        new_tokens, was_first, sent_s = self._start(turn, engine)
        if was_first and new_tokens >= MIN_PREFILL and now_s > sent_s:
            token_s = (now_s - sent_s) / new_tokens
            weight = PEAK_DECAY if self._token_s else 1.0
            self._token_s += weight * (token_s - self._token_s)

    def on_turn_failed(self, turn: RoutedTurn, engine: str, now_s: float) -> None:
        """It is computed there no more."""
        self._start(turn, engine)

    def on_turn_answered(self, answered: AnsweredTurn, now_s: float) -> None:
        """Learn the work of a turn."""
        turn = answered.turn
        placed = self._jobs.get(turn.job_id)
        if placed is None:
            return
        new_tokens = max(1, turn.num_prompt_tokens - placed.context)
        placed.context = turn.num_prompt_tokens + answered.num_output_tokens
        work = new_tokens + self.decode_tokens * answered.num_output_tokens
        self._work.observe_turn(_get_job(turn.job_id), new_tokens, work, stops=False)
        peak = max(placed.peak, placed.context)
        self._put(turn.job_id, placed.engine, self._work.get_work_left(_get_job(turn.job_id)), peak)

    def on_job_ended(self, job_id: str, now_s: float) -> None:
        """Learn how long jobs are."""
        placed = self._jobs.pop(job_id, None)
        if placed is None:
            return
        self._take_off(placed)
        self._work.end_job(job_id)
        if placed.context:
            weight = PEAK_DECAY if self._mean_peak else 1.0
            self._mean_peak += weight * (placed.context - self._mean_peak)

    def on_engine_joined(self, engine: EngineSeen, now_s: float) -> None:
        """It begins with an empty cache."""
        self._prefixes.forget(engine.name)

    def on_engine_left(self, name: str, now_s: float) -> None:
        """Its cache is of no use any more, and its jobs go elsewhere."""
        self._prefixes.forget(name)

    def _start(self, turn: RoutedTurn, engine: str) -> tuple[int, bool, float]:
        known = self._unstarted.pop(turn.turn_id, (0, False, 0.0))
        self._pending[engine] = max(0.0, self._pending.get(engine, 0.0) - known[0])
        return known

    def _put(self, job_id: str, engine: str, work: float, peak: float) -> None:
        placed = self._jobs.get(job_id)
        if placed is None:
            placed = self._jobs[job_id] = _Placed(engine)
        else:
            self._take_off(placed)
        placed.engine, placed.work, placed.peak = engine, work, peak
        self._engine_work[engine] = self._engine_work.get(engine, 0.0) + work
        self._engine_peak[engine] = self._engine_peak.get(engine, 0.0) + peak

    def _take_off(self, placed: _Placed) -> None:
        self._engine_work[placed.engine] -= placed.work
        self._engine_peak[placed.engine] -= placed.peak


def _get_job(job_id: str) -> Job:
    """The job as `RemainingWork` knows it; of what kind it is, the router cannot tell."""
    return Job(job_id, 0.0, 1)
