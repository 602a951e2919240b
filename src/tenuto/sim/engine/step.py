"""One step: what it computes, and which requests it started and preempted."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.kv.request import Request

EMPTY_BATCH = StepBatch.of()


@dataclass(slots=True)
class Step:
    """A scheduled step. Its dicts are in scheduling order: running requests first, then those it starts."""

    budget: int
    """Tokens that are left to hand out."""
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
    has_prefill: bool = False
    """Whether a request that was running before this step is in its prefill."""
    batch: StepBatch = EMPTY_BATCH
    """What its duration depends on."""
    size: int = field(init=False)
    """Its whole budget."""
    copies_done_s: float = 0.0
    """When the copies end that it waits for."""
    copies_s: float = 0.0
    """Seconds of copies that are added to its computation, where they do not run beside it."""

    def __post_init__(self) -> None:
        """Nothing is handed out yet."""
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
        """Undo `give`, if the request is in this step.

        Its tokens go back to the budget, unless `gives_back` is False.
        """
        num_tokens = self.num_tokens.pop(request.turn_id, 0)
        self.budget += num_tokens if gives_back else 0
        self.num_drafts.pop(request.turn_id, None)

    def bound(self, num_tokens: int) -> int:
        """How many of these tokens one request may have."""
        if 0 < self.long_prefill_threshold < num_tokens:
            num_tokens = self.long_prefill_threshold
        return min(num_tokens, self.budget)


def get_decode_batch(num_decodes: int, num_context_tokens: int) -> StepBatch:
    """A step that computes one token for each of so many requests, with so many tokens of context in all."""
    return StepBatch(0, 0, 0, 0.0, num_decodes, num_context_tokens)
