"""An estimate of how long each waiting turn would wait in stock vLLM, which starts turns in arrival order.

This queue runs beside the policy's own queue. In stock vLLM a turn waits until the turns before it, the
*backlog*, have started. The queue measures time as the work that the engine has begun. It therefore needs
no step times, and it moves exactly as fast as the engine:

    began     work of all turns that have started so far, in prefill tokens
    backlog   work that stock vLLM would have to do for the turns that wait now
    due       began + 1.1 × backlog + one turn of service, fixed when the turn arrives

A turn that still waits when `began` reaches its `due` is *overdue*: other turns went before it, and their
prefix hits saved less work than that took. Every event takes O(log n) time in the number of waiting turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import TurnState
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy

DECODE_TOKENS = 8.0
"""Prefill tokens that cost as much as one decoded token. `tenuto.sim.cost` gives 5 to 15 on GPUs. The value
is on both sides of each comparison, so it need not be exact."""
DECAY = 0.05
"""Weight of the latest turn in the moving averages."""


def make_stock_queue(policy: Policy, limits: Limits, num_cache_tokens: int) -> StockQueue | None:
    """A queue for a policy that can make turns wait; None for other policies, or if no limit bounds waits."""
    delays = any(policy.overrides(hook) for hook in ("queue_key", "admit", "may_reclaim"))
    is_bounded = limits.max_wait_over_stock is not None or limits.max_held_back_s < float("inf")
    return StockQueue(limits, num_cache_tokens) if delays and is_bounded else None


class StockQueue:
    """Finds the turns that have waited longer than in stock vLLM by more than the operator allows."""

    def __init__(self, limits: Limits, num_cache_tokens: int) -> None:
        """`num_cache_tokens`: size of the KV cache; it determines what stock vLLM would hit."""
        self._over = limits.max_wait_over_stock
        self._max_wait_s = limits.max_held_back_s
        self._num_cache_tokens = num_cache_tokens
        self._num_arrived = 0
        self._num_live_tokens = 0
        """Prompt tokens of all turns that wait or run."""
        self._num_live = 0
        self._num_running = 0
        self._max_running = 0
        """Largest number of turns seen running at once; an estimate of the engine's limit."""
        self._began = 0.0
        self._backlog = 0.0
        self._num_allocated = 0.0
        """Tokens that stock vLLM would have allocated for all turns that have arrived so far."""
        self._tokens_per_work = 1.0
        self._mean_output = 0.0
        """Mean number of output tokens; used for turns whose output is not known yet."""
        self._mean_service = 0.0
        """Mean amount of work that the engine begins while it serves one turn."""
        self._due = IndexedHeap()
        self._waiting: dict[str, TurnState] = {}
        """Turns that wait and are not overdue, in order of arrival."""
        self._overdue: dict[str, TurnState] = {}

    def arrive(self, turn: TurnState) -> None:
        """A turn arrived."""
        self._num_arrived += 1
        self._num_live += 1
        self._num_live_tokens += turn.arrival.num_prompt_tokens
        turn.number = self._num_arrived
        self._waiting[turn.turn_id] = turn
        if self._over is None:
            return
        num_hit_tokens = self._count_hits(turn)
        turn.stock_work = self._get_work(turn, num_hit_tokens)
        due = self._began + (1 + self._over) * self._backlog + self._mean_service
        self._due.push(turn.turn_id, (due,))
        self._backlog += turn.stock_work
        num_tokens = turn.arrival.num_prompt_tokens - num_hit_tokens + self._mean_output
        self._num_allocated += num_tokens
        self._tokens_per_work += DECAY * (num_tokens / turn.stock_work - self._tokens_per_work)

    def start(self, turn: TurnState, num_hit_tokens: int) -> None:
        """A turn got its first step."""
        self._num_running += 1
        self._max_running = max(self._max_running, self._num_running)
        self._began += self._get_work(turn, num_hit_tokens)
        turn.stock_start = self._began
        self._forget(turn)

    def leave(self, turn: TurnState, num_output_tokens: int) -> None:
        """A turn ended, or left before it started."""
        self._num_live -= 1
        self._num_live_tokens -= turn.arrival.num_prompt_tokens
        if not turn.started:
            # In stock vLLM, the turns behind this one would now start sooner by this turn's work.
            self._began += (1 + (self._over or 0.0)) * turn.stock_work
            self._forget(turn)
            return
        self._num_running -= 1
        self._mean_output += DECAY * (num_output_tokens - self._mean_output)
        self._mean_service += DECAY * (self._began - turn.stock_start - self._mean_service)
        # Stock vLLM would allocate blocks for the turns that wait before it allocates for later arrivals.
        num_allocated = self._num_allocated - self._tokens_per_work * self._backlog
        turn.job.stock_mark = num_allocated + self._num_cache_tokens - self._count_running_tokens()

    def pop_overdue(self, now_s: float) -> Iterator[TurnState]:
        """Turns that became overdue since the last call, by begun work or by the longest allowed wait."""
        while self._waiting:
            turn_id = next(iter(self._waiting))
            key = self._due.get_first_key()
            if key is not None and float(key[0]) <= self._began:
                turn_id = self._due.pop()
            elif now_s < self._waiting[turn_id].arrival_s + self._max_wait_s:
                return
            turn = self._overdue[turn_id] = self._waiting.pop(turn_id)
            self._due.discard(turn_id)
            turn.is_overdue = True
            yield turn

    def get_next_s(self) -> float:
        """When the next turn reaches the longest allowed wait; infinity if no turn waits."""
        turn = next(iter(self._waiting.values()), None)
        return float("inf") if turn is None else turn.arrival_s + self._max_wait_s

    def _count_hits(self, turn: TurnState) -> int:
        """Tokens that stock vLLM would hit: all reusable ones until it evicts the earlier turn's blocks."""
        mark = turn.job.stock_mark
        return turn.num_reusable_tokens if mark is not None and self._num_allocated < mark else 0

    def _count_running_tokens(self) -> float:
        """Prompt tokens of the turns that stock vLLM would run now: as many turns as have run at once."""
        num_running = min(self._num_live, self._max_running)
        return self._num_live_tokens / self._num_live * num_running if num_running else 0.0

    def _get_work(self, turn: TurnState, num_hit_tokens: int) -> float:
        return max(1.0, turn.arrival.num_prompt_tokens - num_hit_tokens + DECODE_TOKENS * self._mean_output)

    def _forget(self, turn: TurnState) -> None:
        """A turn no longer waits. If no turn waits at all, the backlog of stock vLLM is empty too."""
        self._waiting.pop(turn.turn_id, None)
        self._overdue.pop(turn.turn_id, None)
        self._due.discard(turn.turn_id)
        turn.is_overdue = False
        self._backlog -= turn.stock_work
        if not self._waiting and not self._overdue:
            self._backlog = 0.0
