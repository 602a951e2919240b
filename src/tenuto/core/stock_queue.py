"""An estimate of how long each waiting turn would wait in stock vLLM, which starts turns in arrival order.

This virtual queue runs in parallel with the policy's own queue. In stock vLLM a turn waits until the turns
before it, the *backlog*, have started. The queue measures time as the work that the engine has begun. It
therefore needs no step times, and it advances exactly as fast as the engine:

    began     work of all turns that have started so far, in prefill tokens
    reached   how far stock vLLM would be: `began`, and the work of turns that left before it came to them
    backlog   work that stock vLLM would have to do for the turns that wait now
    saved     further work of stock vLLM, which the policy's leases saved here by hits
    place     where stock would start the turn, fixed on arrival: reached + backlog
    extra     1.1 × turns to come × (backlog + saved) − backlog + one turn of service, fixed on arrival
    due       `began` when stock would reach the place + extra

So a turn that leaves without starting brings forward only those that arrived after it.

In stock vLLM, every turn of a job waits. A policy that completes jobs one after the other makes a job wait
only once, before its first turn. So a turn may wait as long as all the turns together that its job is
expected to send (`TurnsToCome`). A single request may wait as long as in stock. The more of the engine such
one-shot jobs get, the less do turns to come count, because their time is meant for jobs that come back. From
half of its work on, each turn is bounded alone.

A turn with a short prompt delays others little if it starts on time. So the shorter its prompt, the smaller
the share of the extra time that it may wait. A prompt is short in comparison with the latest turns that
started, so neither a flood of short turns nor one of cancelled turns gets an advantage.

A turn that still waits when `began` reaches its `due` is *overdue*: the turns that went before it took more
work than their prefix hits saved. In stock, a preempted turn goes before all others, so its backlog is empty.
If no turn starts for the time of one turn of service, `began` does not advance; then the turn that has waited
longest is overdue too. So is a turn that still waits `limits.max_held_back_s` after stock would have started
it.

An overdue turn starts first, in memory that leases give up. Their KV is computed again, so in the end all
wait longer. So agents' turns become overdue only while such starts took at most `FORCED_SHARE` of the begun
work, or once they have waited twice as long (`AGENTS_LIMIT`). Single requests and preempted turns wait for
neither.

Every event takes O(log n) time in the number of waiting turns.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import JobState, TurnState
from tenuto.core.limits import Limits
from tenuto.core.turn_work import MIN_WEIGHT, Counts, KindCounts, get_work

SHORT = 0.25
"""A turn whose prompt is shorter than this share of the mean gets less extra time."""
LEAST_TURNS = 2.5
"""Jobs that are expected to send fewer turns count as single requests, others as agents. A client that sends
each id twice gains nothing."""
FORCED_SHARE = 0.05
"""Most that agents' overdue turns take of the begun work. Some is needed: without any, a flood of new ids
keeps new agents waiting for seven times as long as in stock."""
AGENTS_LIMIT = 2.0
"""An agents' turn that has waited for this multiple of what it may is overdue in any case. Otherwise, while
jobs that overload the engine go before it, it would wait for the share."""

PRIOR_ENDS = 0.5
"""A kind starts with this many assumed turns after which the job ended (Jeffreys' prior has half a case). So
one job that came back counts as one of three turns."""
MAX_TURNS = 32.0
"""Most turns that a job is expected to send. It bounds the cost of a wrong estimate."""


@dataclass(slots=True, eq=False)
class MovingMean:
    """The mean of the latest values; 0 before the first."""

    value: float = 0.0
    num_values: int = 0

    def observe(self, value: float) -> None:
        """Add a value."""
        self.num_values += 1
        self.value += max(MIN_WEIGHT, 1 / self.num_values) * (value - self.value)


@dataclass(slots=True)
class _Wait:
    """What the queue knows of one turn in the engine."""

    turn: TurnState
    since_s: float
    """When it arrived, or when it was last preempted."""
    held_s: float = math.inf
    """When stock vLLM would have started it."""
    work: float = 0.0
    """The work that stock vLLM would do for this turn, in prefill tokens."""
    place: float = math.inf
    """The value of `reached` at which stock vLLM would start it."""
    extra: float = 0.0
    """Work that may begin after that before the turn has waited too long."""
    is_agents: bool = False
    """Whether its job is expected to send `LEAST_TURNS` turns, and the turn was not preempted."""
    began_before: float = 0.0
    """Work that the engine had begun before this turn arrived."""
    began_at_start: float = 0.0
    """Work that it had begun before this turn first started."""
    start_s: float = 0.0
    """When it got its first step, in seconds."""
    started_overdue: bool = False


class StockQueue:
    """Finds the turns that have waited longer than in stock vLLM by more than the operator allows."""

    def __init__(self, limits: Limits, num_cache_tokens: int, *, is_bounded: bool = True) -> None:
        """`num_cache_tokens`: size of the KV cache, which determines what stock vLLM would hit.

        `is_bounded`: whether turns become overdue. They need not where no policy makes them wait.
        """
        self._is_bounded = is_bounded
        self._over = limits.max_wait_over_stock if is_bounded else None
        """None: stock is not followed, and would start each turn when it arrives."""
        self._max_held_s = limits.max_held_back_s
        self._num_cache_tokens = num_cache_tokens
        self._num_arrived = 0
        self._num_live_tokens = 0
        """Prompt tokens of all waiting and running turns."""
        self._max_running = 0
        """Largest number of turns seen running at once; an estimate of the engine's limit."""
        self._began = 0.0
        self._skipped = 0.0
        """`reached` less `began`."""
        self._gone: list[tuple[float, float]] = []
        """A heap of turns that left before stock came to them: `place`, and the work to skip there."""
        self._gone_work = 0.0
        self._backlog = 0.0
        self._saved = 0.0
        """Sum of the work that the latest turn of each job saved, since the queue was last empty."""
        self._saved_by_job: dict[str, float] = {}
        """This work: what stock vLLM would not have hit."""
        self._num_allocated = 0.0
        """Tokens that stock vLLM would have allocated for all turns that have arrived so far."""
        self._tokens_per_work = 1.0
        self._prompt = MovingMean()
        """Mean prompt tokens of a turn that started."""
        self._output = MovingMean()
        """Mean output tokens of a turn; used for turns whose output is not known yet."""
        self._service = MovingMean()
        """Mean work that the engine begins from a turn's start, including this turn, to its end."""
        self._service_s = MovingMean()
        """Mean time from a turn's start to its end, in seconds."""
        self._last_start_s = 0.0
        self._live: dict[str, _Wait] = {}
        """The turns in the engine."""
        self._evicted_at: dict[str, float] = {}
        """By job: the `_num_allocated` at which stock vLLM evicts its last finished turn's blocks."""
        self._places: IndexedHeap[str] = IndexedHeap()
        """Turns that wait in stock too, by `place`."""
        self._due: dict[bool, IndexedHeap[str]] = {False: IndexedHeap(), True: IndexedHeap()}
        """Turns that stock would have started, by `due`: those that are overdue from then on, and agents'
        turns, if they are within the share."""
        self._credit = 0.0
        """Below 0 while agents' overdue turns took more than `FORCED_SHARE` of the begun work."""
        self._waiting: dict[str, _Wait] = {}
        """Turns that wait and are not overdue, in the order in which they began to wait."""
        self._held: dict[str, _Wait] = {}
        """Those of them that stock would have started, in that order."""
        self._overdue: dict[str, _Wait] = {}
        self._to_come = TurnsToCome()
        self._work = MovingMean()
        """Mean work of the turns that started."""
        self._work_of_jobs = MovingMean()
        """The part of that mean that comes from jobs expected to send more turns."""

    def arrive(self, turn: TurnState, num_leased_tokens: int = 0) -> None:
        """A turn arrived. `num_leased_tokens`: tokens that leases keep now, an upper bound of the savings."""
        self._num_arrived += 1
        num_prompt_tokens = turn.arrival.num_prompt_tokens
        self._num_live_tokens += num_prompt_tokens
        turn.number = self._num_arrived
        wait = _Wait(turn, turn.arrival_s, began_before=self._began)
        self._live[turn.turn_id] = self._waiting[turn.turn_id] = wait
        if self._over is None:
            self._hold(wait)
            return
        num_hit_tokens = self._count_hits(turn)
        wait.work = work = self._get_work(turn, num_hit_tokens)
        if turn.job.num_turns > 1:
            self._to_come.follow(turn.job)
        wait.is_agents = self._to_come.get(turn.job) >= LEAST_TURNS
        extra = self._get_extra(wait, self._over, num_leased_tokens)
        self._place(wait, self._backlog + self._gone_work, extra)
        self._backlog += work
        num_tokens = num_prompt_tokens - num_hit_tokens + self._output.value
        self._num_allocated += num_tokens
        self._tokens_per_work += MIN_WEIGHT * (num_tokens / work - self._tokens_per_work)
        self._follow_stock()

    def start(self, turn: TurnState, num_hit_tokens: int, now_s: float) -> None:
        """A turn got its first step."""
        wait = self._live[turn.turn_id]
        self._prompt.observe(turn.arrival.num_prompt_tokens)
        wait.began_at_start, wait.start_s = self._began, now_s
        self._began += (work := self._get_work(turn, num_hit_tokens))
        self._work.observe(work)
        job = turn.job
        self._work_of_jobs.observe(work if self._to_come.get(job) >= LEAST_TURNS else 0.0)
        if turn.num_reusable_tokens:
            self._save(wait, num_hit_tokens)
        self._stop_waiting(wait)
        self._count_running(now_s)
        self._credit = min(0.0, self._credit + FORCED_SHARE * work)
        self._follow_stock()

    def preempt(self, turn: TurnState, now_s: float) -> None:
        """A running turn lost its blocks and waits again. In stock it would now be first in the queue."""
        wait = self._waiting[turn.turn_id] = self._live[turn.turn_id]
        wait.work, wait.since_s, wait.is_agents = 0.0, now_s, False
        if self._over is None:
            self._hold(wait)
        else:  # In stock it would go first.
            self._place(wait, 0.0, self._get_share(turn) * self._get_service(wait))
            self._follow_stock()

    def resume(self, turn: TurnState, now_s: float) -> None:
        """A preempted turn runs again."""
        if self._stop_waiting(self._live[turn.turn_id]):
            self._count_running(now_s)

    def leave(self, turn: TurnState, num_output_tokens: int, now_s: float) -> None:
        """A turn ended, or left before it started."""
        wait = self._live.pop(turn.turn_id)
        self._num_live_tokens -= turn.arrival.num_prompt_tokens
        if not turn.started:
            if self._over is not None and wait.place > self._began + self._skipped:
                # With its part in the extra time of those behind it.
                work = (1 + self._over) * wait.work
                heapq.heappush(self._gone, (wait.place, work))
                self._gone_work += work
            self._stop_waiting(wait)
            return
        self._stop_waiting(wait)
        self._output.observe(num_output_tokens)
        self._service.observe(self._began - wait.began_at_start)
        self._service_s.observe(now_s - wait.start_s)
        self._to_come.finish(turn.job)
        # Stock vLLM would allocate blocks for the turns that wait before it allocates for later arrivals.
        num_allocated = self._num_allocated - self._tokens_per_work * self._backlog
        # Stock vLLM would run as many turns now as have ever run at once.
        num_live = len(self._live)
        num_running = min(num_live, self._max_running)
        num_held = self._num_live_tokens / num_live * num_running if num_running else 0.0
        self._evicted_at[turn.job.job_id] = num_allocated + self._num_cache_tokens - num_held

    def forget_job(self, job_id: str) -> None:
        """A job was forgotten."""
        self._evicted_at.pop(job_id, None)
        self._saved_by_job.pop(job_id, None)

    def pop_overdue(self, now_s: float) -> Iterator[TurnState]:
        """Turns that became overdue since the last call, by begun work or by the longest allowed wait."""
        while self._waiting and self._is_bounded:
            wait = self._find_due()
            if wait is None:
                latest_s, wait = self._get_latest()
                if wait is None or now_s < latest_s:
                    return
            self._discard(wait.turn.turn_id)
            self._overdue[wait.turn.turn_id] = wait
            if wait.is_agents:
                self._credit -= wait.work
            yield wait.turn

    def is_overdue(self, turn_id: str) -> bool:
        """Whether a turn has waited too long, so that it goes before turns that are not overdue."""
        return turn_id in self._overdue

    def is_held_too_long(self, turn_id: str, now_s: float) -> bool:
        """Whether stock would have started this turn `limits.max_held_back_s` ago or before."""
        return now_s - self._live[turn_id].held_s >= self._max_held_s

    def started_overdue(self, turn_id: str) -> bool:
        """Whether a running turn started because it was overdue."""
        return self._live[turn_id].started_overdue

    def get_next_s(self) -> float:
        """When the next turn becomes overdue if nothing starts before; infinity if none will."""
        return self._get_latest()[0] if self._is_bounded else math.inf

    def _get_latest(self) -> tuple[float, _Wait | None]:
        """The time at which the next turn becomes overdue if nothing starts before, in seconds, and the turn.

        If nothing starts for the time of one turn of service, the policy is keeping all turns waiting, and
        `began` does not advance.
        """
        held = next(iter(self._held.values()), None)
        latest = (math.inf if held is None else held.held_s + self._max_held_s, held)
        wait = next(iter(self._waiting.values()), None)
        if wait is None or self._over is None or self._overdue:
            return latest
        service_s = self._service_s.value or self._max_held_s
        return min(latest, (max(wait.since_s, self._last_start_s) + service_s, wait), key=itemgetter(0))

    # The bound. Another bound needs another version of only the next method.

    def _get_extra(self, wait: _Wait, over: float, num_leased_tokens: int) -> float:
        """`extra` of a turn that arrives now."""
        turn = wait.turn
        # A turn with a lease gets no extra time: while it waits, its leased memory is idle.
        saved = 0.0 if turn.num_reusable_tokens else min(self._saved, num_leased_tokens)
        # In stock, every turn of a job waits. Here a job may wait for all of them at once, before its first.
        num_waits = 1 + self._get_trust() * (self._to_come.get(turn.job) - 1)
        most = (1 + over) * num_waits * (self._backlog + saved)
        return self._get_share(turn) * (most - self._backlog + self._get_service(wait))

    def _get_service(self, wait: _Wait) -> float:
        """The work of one turn of service. Until a turn has ended, the turn itself is the best guess."""
        return self._service.value if self._service.num_values else wait.work

    def _get_share(self, turn: TurnState) -> float:
        """The share of the extra time that a turn may wait; smaller if its prompt is short.

        A short prompt delays others little, and its client suffers more from a late start.
        """
        num_tokens, mean = turn.arrival.num_prompt_tokens, self._prompt.value
        return min(1.0, num_tokens / (SHORT * mean)) if mean > 0 else 1.0

    def _get_trust(self) -> float:
        """From 1, if one-shot jobs get none of the engine's recent work, to 0, if they get half or more."""
        work = self._work.value
        return max(0.0, 2 * self._work_of_jobs.value / work - 1) if work > 0 else 0.0

    def _hold(self, wait: _Wait) -> None:
        """Stock vLLM would have started a waiting turn at the last start, or when it began to wait."""
        wait.held_s = max(wait.since_s, self._last_start_s)
        self._held[wait.turn.turn_id] = wait

    def _place(self, wait: _Wait, before: float, extra: float) -> None:
        """A turn begins to wait, behind so much work of stock vLLM's."""
        wait.place, wait.extra, wait.held_s = self._began + self._skipped + before, extra, math.inf
        self._places.push(wait.turn.turn_id, (wait.place, wait.turn.number))

    def _follow_stock(self) -> None:
        """Fix `due` of the turns that stock vLLM would have started by now."""
        while True:
            gone = self._gone[0][0] if self._gone else math.inf
            first = self._places.get_first()
            wait = None if first is None else self._waiting[first]
            place = math.inf if wait is None else wait.place
            if min(gone, place) > self._began + self._skipped:
                return
            if wait is None or gone <= place:
                _, work = heapq.heappop(self._gone)
                self._skipped += work
                self._gone_work -= work
                continue
            self._hold(wait)
            due, before = place - self._skipped + wait.extra, wait.began_before
            self._due[wait.is_agents].push(self._places.pop(), (due, wait.turn.number))
            if wait.is_agents:
                due = before + AGENTS_LIMIT * (due - before)
                self._due[False].push(wait.turn.turn_id, (due, wait.turn.number))

    def _find_due(self) -> _Wait | None:
        """A waiting turn that is overdue now, and was not before; None if there is none."""
        for is_agents, order in self._due.items():
            key = order.get_first_key()
            if key is not None and float(key[0]) <= self._began and not (is_agents and self._credit < 0.0):
                return self._waiting[order.pop()]
        return None

    def _discard(self, turn_id: str) -> None:
        """A turn no longer waits, or is overdue."""
        self._waiting.pop(turn_id, None)
        self._held.pop(turn_id, None)
        for order in (self._places, *self._due.values()):
            order.discard(turn_id)

    def _count_hits(self, turn: TurnState) -> int:
        """Tokens that stock vLLM would hit: all reusable ones, until it evicts the earlier turn's blocks."""
        is_cached = self._num_allocated < self._evicted_at.get(turn.job.job_id, -math.inf)
        return turn.num_reusable_tokens if is_cached else 0

    def _count_running(self, now_s: float) -> None:
        self._last_start_s = now_s
        num_running = len(self._live) - len(self._waiting) - len(self._overdue)
        self._max_running = max(self._max_running, num_running)

    def _get_work(self, turn: TurnState, num_hit_tokens: int) -> float:
        return get_work(turn.arrival.num_prompt_tokens, num_hit_tokens, self._output.value)

    def _save(self, wait: _Wait, num_hit_tokens: int) -> None:
        """Count the work that a turn saved by hits that stock would not have had."""
        turn = wait.turn
        num_hit_tokens = min(num_hit_tokens, turn.num_reusable_tokens)
        saved = max(0.0, wait.work - self._get_work(turn, num_hit_tokens))
        self._saved -= self._saved_by_job.get(turn.job.job_id, 0.0)
        self._saved += saved
        self._saved_by_job[turn.job.job_id] = saved

    def _stop_waiting(self, wait: _Wait) -> bool:
        """A turn no longer waits. Return whether it did. Without waiting turns, stock has no backlog."""
        turn_id = wait.turn.turn_id
        was_overdue = self._overdue.pop(turn_id, None) is not None
        if turn_id not in self._waiting and not was_overdue:
            return False
        self._discard(turn_id)
        wait.started_overdue = was_overdue
        self._backlog -= wait.work
        if not self._waiting and not self._overdue:
            self._backlog = self._saved = 0.0
            self._saved_by_job.clear()
            self._gone.clear()
            self._gone_work = self._skipped = 0.0
        return True


class TurnsToCome:
    """Estimates how many more turns a job sends, by tenant and kind, in O(1) time per turn.

    Jobs of one tenant whose prompts begin alike are of one kind. For each kind, it counts the finished turns,
    and those of them after which the job came back. If the share of the latter is p, a job still sends 1 / (1
    - p) turns, including the current one. A job's first turn may be its only one, so it gets no more than the
    same estimate by jobs: p is then the share of the kind's jobs that came back at all. So a few ids with
    very many turns do not make other clients' single requests wait.

    A job of a kind that was never seen counts as a single request, or, if its client gave it an id, as if one
    job of its kind had come back. It never depends on other kinds, because anybody can send these.
    """

    def __init__(self) -> None:
        self._turns = KindCounts()
        """Finished turns. Those after which the job came back are marked."""
        self._jobs = KindCounts()
        """Jobs that finished their first turn. Those that came back are marked."""

    def finish(self, job: JobState) -> None:
        """A turn of this job finished."""
        self._turns.observe(job.tenant, job.kind)
        if job.num_turns == 1:
            self._jobs.observe(job.tenant, job.kind)

    def follow(self, job: JobState) -> None:
        """The job came back after a finished turn."""
        for kinds in (self._turns, self._jobs) if job.num_turns == 2 else (self._turns,):
            counts = kinds.get(job.tenant, job.kind)
            if counts is not None:
                counts.mark()

    def get(self, job: JobState) -> float:
        """Turns that the job will probably send, including the current one; 1 if nothing is known."""
        counts = self._turns.get(job.tenant, job.kind)
        if counts is None and job.is_named:
            return _get_mean(Counts(1.0, 1.0))
        num_turns = _get_mean(counts)
        if job.num_turns > 1:
            return num_turns
        return min(num_turns, _get_mean(self._jobs.get(job.tenant, job.kind)))


def _get_mean(counts: Counts | None) -> float:
    """Turns until a job ends, if after each it comes back with the share of marked turns."""
    if counts is None:
        return 1.0
    num_ended = counts.turns - counts.marked + PRIOR_ENDS
    return min(MAX_TURNS, (counts.turns + PRIOR_ENDS) / num_ended)
