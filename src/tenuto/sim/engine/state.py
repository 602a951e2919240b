"""The scheduler's data: the requests of one engine, by state, and a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tenuto.core.fairness import FairOrder
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.policy import Key
from tenuto.core.waiting import GetKey, WaitingTurns
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.kv.request import Request


class WaitingQueue(WaitingTurns[Request]):
    """The simulated engine's queue.

    Without `get_key` the order is vLLM's "fcfs": by arrival, with preempted requests at the front.
    Source: vllm/v1/core/sched/request_queue.py@0.32.
    """

    def __init__(
        self, get_key: GetKey | None, make_order: Callable[[], IndexedHeap[str] | FairOrder] = IndexedHeap
    ) -> None:
        super().__init__(get_key or (lambda turn_id: ()), make_order)
        self._is_fcfs = get_key is None
        self._skipped: list[tuple[Request, Key]] = []
        self._deferred: set[str] = set()
        self._num_pushed = 0

    def add(self, request: Request, *, is_parked: bool = False, is_back: bool = False) -> None:
        """Add a request that came in, or `is_back` because it was preempted."""
        turn_id = request.turn_id
        self._num_pushed += 1
        number = -self._num_pushed if is_back else self._num_pushed
        # Before its key is asked for, because a key may depend on how many turns wait, this one included.
        self._requests[turn_id] = request
        key = (number,) if self._is_fcfs else self._get_key(turn_id)
        (self._parked if is_parked else self._ready).push(turn_id, key)

    def get_first(self) -> Request | None:
        """The request that goes first, or None if none may go."""
        first = self._ready.get_first()
        return None if first is None else self._requests[first]

    def skip_first(self) -> None:
        """Take the first request out of the order until `restore_skipped`."""
        key = self._ready.get_first_key()
        assert key is not None
        request = self._requests.pop(self._ready.pop())
        self._skipped.append((request, key))
        self._deferred.add(request.turn_id)

    @property
    def num_eligible(self) -> int:
        """Number of requests that were never skipped. As in vLLM, a skipped request counts as deferred."""
        return len(self._requests) - len(self._deferred)

    def restore_skipped(self) -> None:
        """Put the skipped requests back where they were."""
        for request, key in self._skipped:
            self._requests[request.turn_id] = request
            self._ready.push(request.turn_id, key)
        self._skipped.clear()

    def reorder(self, turn_id: str) -> None:
        """Ask for a turn's key again, if keys are asked for."""
        if not self._is_fcfs:
            super().reorder(turn_id)

    def discard(self, turn_id: str) -> None:
        """Remove a request, if it is in the queue."""
        self._deferred.discard(turn_id)
        super().discard(turn_id)


class Load(NamedTuple):
    """A request whose KV is on its way from a tier."""

    done_s: float
    request: Request


@dataclass(slots=True)
class EngineState:
    """All state that changes from step to step. The parts of the scheduler share it.

    A request is in exactly one of four places until it finishes:

        arrival ──► waiting ───────────────────────► running ──► finished
                     │   ▲ └─► loading ──► loaded ──►┘  │
                     │   └───────── preempted ──────────┘
                     └─► finished, if its client disconnects
    """

    waiting: WaitingQueue
    requests: dict[str, Request] = field(default_factory=dict)
    """All of them, by turn id."""
    running: list[Request] = field(default_factory=list)
    """In the order in which they started; the last is preempted first, unless the policy chooses."""
    loading: list[Load] = field(default_factory=list)
    """The load that ends next is first. Loads that end together are in the order of their starts."""
    loaded: deque[Request] = field(default_factory=deque)
    """Requests whose KV has come from a tier. They start in the next step that has room, in this order."""
    now_s: float = 0.0
    """Time of the engine's last call."""
    num_executed_steps: int = 0
    """Steps that had tokens."""
    last_prefill_step: int | None = None
    """The last of these steps that computed a part of a prompt."""
    is_capacity_bound: bool = False
    """Whether requests that may start were left waiting by the last step that started requests."""

    @property
    def num_loading(self) -> int:
        """Number of requests that wait for a load, or whose load has ended but that have not started."""
        return len(self.loading) + len(self.loaded)

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not started, including loading ones."""
        return len(self.waiting) + len(self.loading) + len(self.loaded)


EMPTY_BATCH = StepBatch.of()


@dataclass(slots=True)
class Step:
    """A scheduled step. Its dicts are in scheduling order: running requests first, then those it starts."""

    budget: int
    """Tokens that are left to give to requests."""
    long_prefill_threshold: int
    """Most tokens for one request; 0 for no bound."""
    num_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens computed, per request."""
    num_drafts: dict[str, int] = field(default_factory=dict)
    """Draft tokens among them."""
    new: dict[str, int] = field(default_factory=dict)
    """Requests that start, and their hit in tokens."""
    resumed: dict[str, int] = field(default_factory=dict)
    """Requests that start again after a preemption, and their hit in tokens."""
    preempted: dict[str, int] = field(default_factory=dict)
    """Requests that lost their blocks, and their computed tokens."""
    chunks: set[str] = field(default_factory=set)
    """Requests that sample no token in this step, because some of their known tokens are left to compute."""
    has_running: bool = False
    """Whether a request that was running before this step has tokens in it."""
    has_prefill: bool = False
    """Whether a request that was running before this step is in its prefill."""
    starts_prefill: bool = False
    """Whether a request starts with more than one token to compute."""
    defers_prefill: bool = False
    """Whether this step computes no prompts: see `prefill_schedule_interval`."""
    batch: StepBatch = EMPTY_BATCH
    """What its duration depends on."""
    size: int = field(init=False)
    """Its whole budget."""
    copies_done_s: float = 0.0
    """When the copies end that the step waits for."""
    copies_s: float = 0.0
    """Seconds of copies that add to its computation because they do not run beside it."""

    def __post_init__(self) -> None:
        self.size = self.budget

    @property
    def is_decode_only(self) -> bool:
        """Whether it only computes one token for each of some running requests."""
        others = self.batch.num_prefills or self.new or self.resumed or self.preempted
        return self.batch.num_decodes > 0 and not others

    def give(self, request: Request, num_tokens: int) -> None:
        """Spend tokens of the budget on a request."""
        self.num_tokens[request.turn_id] = num_tokens
        self.budget -= num_tokens

    def take_out(self, request: Request, *, gives_back: bool = True) -> None:
        """Undo `give`, if the request is in this step. `gives_back`: its tokens go back to the budget."""
        num_tokens = self.num_tokens.pop(request.turn_id, 0)
        self.budget += num_tokens if gives_back else 0
        self.num_drafts.pop(request.turn_id, None)

    def bound(self, num_tokens: int) -> int:
        """The number of these tokens that one request may have."""
        if 0 < self.long_prefill_threshold < num_tokens:
            num_tokens = self.long_prefill_threshold
        return min(num_tokens, self.budget)


@dataclass(slots=True)
class ChunkSteps:
    """Steps in which one request computes chunks of its prompt, and all others that run decode."""

    request: Request
    decoding: list[Request]
    most: int
    """Largest number of these steps."""
    num_blocks: int
    """Free blocks that the prompt may take."""
    decode_context: int
    """Tokens with KV of those that decode, before the next step."""
    decodes: dict[str, int] = field(init=False)
    """One token for each of them."""
    num_scheduled: int = 0
    """Steps so far."""
    num_tokens: int = 0
    """Tokens of the prompt that these steps compute."""

    def __post_init__(self) -> None:
        self.decodes = dict.fromkeys([each.turn_id for each in self.decoding], 1)
