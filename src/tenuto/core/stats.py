"""Counts and distributions of what the driver did, for an engine to export."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tenuto.core.jobs import TurnState
from tenuto.core.types import LeaseEnd, LeaseRefusal, TakenBy

TOOL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
PARTED_BUCKETS = (0, 64, 256, 1024, 4096, 16384, 65536, 262144)
"""In tokens."""
DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)


class Histogram:
    """A count per bucket and the sum of all values; the last bucket has no upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value into the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and vars(self) == vars(other)

    __hash__ = object.__hash__


@dataclass
class GroupStats:
    """Totals over the turns of some jobs, while a canary is on."""

    num_turns: int = 0
    """Turns that started."""
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_recomputed_tokens: int = 0
    queue_s: Histogram = field(default_factory=partial(Histogram, QUEUE_BUCKETS_S))
    first_token_s: Histogram = field(default_factory=partial(Histogram, QUEUE_BUCKETS_S))
    """Seconds from a turn's arrival to its first token. The engine measures them."""

    def start(self, turn: TurnState, now_s: float) -> None:
        """A turn got its first step."""
        self.num_turns += 1
        self.num_prompt_tokens += turn.arrival.num_prompt_tokens
        self.num_hit_tokens += turn.num_hit_tokens
        self.num_recomputed_tokens += turn.num_missed_tokens
        self.queue_s.observe(now_s - turn.arrival_s)


@dataclass
class ShadowStats:
    """What a policy in shadow mode would have changed, apart from leases."""

    num_gained_tokens: int = 0
    """Prompt tokens that turns would have hit with their leases, and did not hit in stock."""
    num_delayed_turns: dict[str, int] = field(default_factory=lambda: {"order": 0, "admission": 0})
    """Turns that would have waited longer, by what would have held them back."""


@dataclass
class DriverStats:
    """Totals since the start."""

    num_events: int = 0
    """Turn events: arrivals, starts, preemptions and finishes."""
    num_leases_granted: int = 0
    num_leases_ended: dict[LeaseEnd, int] = field(default_factory=lambda: dict.fromkeys(LeaseEnd, 0))
    num_lease_refusals: dict[LeaseRefusal, int] = field(
        default_factory=lambda: dict.fromkeys(LeaseRefusal, 0)
    )
    num_takes: dict[TakenBy, int] = field(default_factory=lambda: dict.fromkeys(TakenBy, 0))
    """How often a lease lost all or its last blocks before its end, by who took them."""
    num_revoked_blocks: int = 0
    num_hit_tokens: int = 0
    """Prompt tokens that started turns found in cache."""
    num_reusable_tokens: int = 0
    """Reusable tokens of started turns, as `tenuto.core.reuse` defines them."""
    num_reused_tokens: int = 0
    """Those of them that the turns hit."""
    num_recomputed_tokens: int = 0
    """Tokens computed a second time: reusable tokens that were not hit, and tokens lost by preemptions."""
    num_wishes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Cache wishes of finished turns (`tenuto.core.wishes`), by dialect and by what became of them."""
    num_malformed_wishes: Counter[str] = field(default_factory=Counter)
    """Finished turns with a malformed cache wish, by dialect."""
    num_short_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens after a hit that a layer group still had, by the group that lacked them."""
    num_prefixes_pinned: int = 0
    """Pins of prefixes that several jobs use (`tenuto.core.leases`)."""
    num_prefixes_demoted: int = 0
    """Pins that were released again."""
    num_admission_waits: int = 0
    num_overdue_turns: int = 0
    """Turns moved ahead of the policy's order, because they were overdue (`tenuto.core.stock_queue`)."""
    groups: dict[str, GroupStats] = field(
        default_factory=lambda: {"policy": GroupStats(), "stock": GroupStats()}
    )
    """Totals of jobs under the policy, and of jobs that run as in stock; counted only with a canary."""
    parted_at: Histogram = field(default_factory=partial(Histogram, PARTED_BUCKETS))
    """For turns whose prompt changes text of the job's last prompt: the first token that differs."""
    tool_s: Histogram = field(default_factory=partial(Histogram, TOOL_BUCKETS_S))
    """Seconds from a turn's finish to its job's next arrival."""
    queue_s: Histogram = field(default_factory=partial(Histogram, QUEUE_BUCKETS_S))
    """Seconds from a turn's arrival to its first step."""
    decision_s: Histogram = field(default_factory=partial(Histogram, DECISION_BUCKETS_S))
    """Seconds in the driver per turn event. The engine measures them, because the driver has no clock."""
