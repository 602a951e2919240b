"""The data of one run, independent of the kind of file it came from."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from tenuto.records.codec import LeftOut
from tenuto.records.metrics import group_by
from tenuto.records.schema import RunRecord, Sample, TurnRecord

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block: vLLM's default on GPUs. Used if a run's files do not give the block size."""
_MAX_BLOCK_SIZE = 256
_MIN_HITS = 4
"""With at least this many different hit lengths, their greatest common divisor is the block size."""


@dataclass(slots=True)
class LeaseRecord:
    """One lease on the blocks of a finished turn, from its grant to its end."""

    job: str
    turn: int
    """The turn whose blocks it holds."""
    granted_s: float
    num_blocks: int | None
    until_s: float | None = None
    ended_s: float | None = None
    """None while the lease is active."""
    reason: str | None = None
    """Why it ended: a value of `tenuto.core.types.LeaseEnd`."""
    num_blocks_left: int | None = None
    """Number of blocks that it still held when it ended."""
    taken_by: str | None = None
    """Who took blocks back last: a value of `tenuto.core.types.TakenBy`; None if unknown."""
    was_pressed: bool = True
    """Whether free blocks were scarce during the lease, so that some of its own may have been reclaimed."""


@dataclass(slots=True)
class Preemption:
    """A running turn was preempted, and resumed or not."""

    job: str
    turn: int
    preempted_s: float
    resumed_s: float | None = None
    hit_tokens: int | None = None
    """Tokens that it hit when it resumed."""


@dataclass(slots=True)
class Gauge:
    """A value that is sampled many times: keeps the mean, lowest and highest value."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def to_json(self) -> dict[str, float]:
        """Return the mean, lowest and highest value."""
        return {"mean": self.total / self.count, "min": self.low, "max": self.high}


@dataclass(slots=True)
class TurnFacts:
    """What a trace says about a turn beside its record."""

    offloaded: bool = False
    """Whether blocks of it were copied to a tier below the GPU."""
    declined_load: bool = False
    """Whether the policy chose to compute KV that a tier had."""
    parted_at: Annotated[int | None, LeftOut] = None
    """Tokens before its prompt's first difference to the job's last prompt, if any."""
    short_group: Annotated[str | None, LeftOut] = None
    """The layer group that ended its hit early."""


@dataclass(slots=True)
class RunData:
    """All known data of one run. Times are seconds on the run's own clock."""

    source: str
    kind: str = "turns"
    """turns, trace, recording or prototype."""
    record: RunRecord | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    leases: list[LeaseRecord] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    """In the order of their times; empty where a file only counts them."""
    facts: defaultdict[tuple[str, int], TurnFacts] = field(default_factory=lambda: defaultdict(TurnFacts))
    """By job and turn number."""
    short_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens after short hits that another group still had, by the group that ended the hit."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Finished turns that got no lease, by reason: values of `tenuto.core.types.LeaseRefusal`."""
    takes: Counter[str] = field(default_factory=Counter)
    """How often blocks were reclaimed from a lease before its end, by the kind of turn that got them."""
    gauges: defaultdict[str, Gauge] = field(default_factory=lambda: defaultdict(Gauge))
    """Values of the engine's state, by their names in the file."""
    step_s: array[float] = field(default_factory=lambda: array("d"))
    """Seconds between consecutive steps of a busy engine."""
    policy: str | None = None
    """The policy as named in a trace, several with commas; used if there is no result record."""
    tells_leases: bool = False
    """Whether leases were recorded. If so, a turn without a lease record really had no lease."""
    notes: list[str] = field(default_factory=list)
    known_block_size: int | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block: from the files, else the greatest common divisor of hits, else vLLM's default."""
        known = self.known_block_size or (self.record.block_size if self.record else None)
        if known:
            return known
        hits = {turn.hit_tokens for turn in self.turns if turn.hit_tokens}
        common = math.gcd(*hits) if len(hits) >= _MIN_HITS else 0
        return common if 1 < common <= _MAX_BLOCK_SIZE else DEFAULT_BLOCK_SIZE

    @property
    def jobs(self) -> dict[str, list[TurnRecord]]:
        """Each job's turns by turn number; jobs in the order in which they were read."""
        jobs = group_by(self.turns, lambda turn: turn.job)
        return {job: sorted(turns, key=lambda turn: turn.turn) for job, turns in jobs.items()}

    def shift_to_zero(self) -> None:
        """Shift all times so that 0 is the first due time or the first sample."""
        times = [turn.due_s for turn in self.turns] + [sample.now_s for sample in self.samples]
        origin_s = min(times, default=0.0)
        self.turns = [_shift(turn, origin_s) for turn in self.turns]
        self.samples = [_shift(sample, origin_s) for sample in self.samples]
        self.leases = [_shift(lease, origin_s) for lease in self.leases]
        self.preemptions = [_shift(preemption, origin_s) for preemption in self.preemptions]


_TIMES = (
    *("due_s", "sent_s", "start_s", "first_token_s", "last_token_s", "now_s"),
    *("granted_s", "until_s", "ended_s", "preempted_s", "resumed_s"),
)
"""Fields of the records above that are times of the run's clock; other seconds are lengths."""


_Record = TypeVar("_Record", TurnRecord, Sample, LeaseRecord, Preemption)


def _shift(record: _Record, origin_s: float) -> _Record:
    times_s = {name: value for name in _TIMES if (value := getattr(record, name, None)) is not None}
    return replace(record, **{name: value - origin_s for name, value in times_s.items()})
