"""What the records of a run say about its jobs, turns and leases, whatever file they came from.

Kept: less than 1 KB a turn, its lease included. Lines are never kept, so a long trace of a busy engine needs
little memory. Times are seconds on the run's own clock.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum

DEFAULT_BLOCK_SIZE = 16
"""Tokens; vLLM's default on GPUs. Taken where a run's records do not tell."""
_MAX_BLOCK_SIZE = 256
_MIN_HITS = 4
"""Different hit lengths from which on their greatest common divisor is taken for the block size."""


class Fate(Enum):
    """What was done with a turn's blocks when it finished, as far as the records tell."""

    UNTOLD = "untold"
    RELEASED = "released"
    LEASED = "leased"
    OFFLOADED = "offloaded"
    RUNNING = "running"
    """It had not finished when the job's next turn started."""


@dataclass(slots=True)
class Lease:
    """One lease, from its grant to its end."""

    granted_s: float
    num_blocks: int | None
    until_s: float | None = None
    ended_s: float | None = None
    why: str | None = None
    """As in `tenuto.core.types.LeaseEnd`; None while it lasts."""
    num_blocks_left: int | None = None
    """When it ended."""
    was_pressed: bool = True
    """Whether blocks were scarce while it lasted, so that some may have been taken back."""


@dataclass(slots=True)
class Turn:
    """One turn of a job. None: not known, or it did not come that far."""

    number: int
    """From 1."""
    arrival_s: float
    num_prompt_tokens: int | None = None
    start_s: float | None = None
    """Its first step."""
    first_token_s: float | None = None
    finish_s: float | None = None
    num_output_tokens: int | None = None
    num_hit_tokens: int | None = None
    """Prompt tokens found in cache when it first started, loaded ones included."""
    num_loaded_tokens: int = 0
    """Those of them that came from a tier below the GPU."""
    num_preemptions: int = 0
    tool_s: float | None = None
    """From the end of the job's turn before to this one's arrival."""
    is_aborted: bool = False
    num_before_tokens: int | None = None
    """Prompt and output of the job's turn before; None for a first turn."""
    num_before_output_tokens: int = 0
    """The output's part of them."""
    fate: Fate = Fate.UNTOLD
    """Of the turn before."""
    lease: Lease | None = None
    """On the blocks of the turn before."""

    @property
    def latency_s(self) -> float | None:
        """Arrival to last token."""
        return None if self.finish_s is None or self.is_aborted else self.finish_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        """Arrival to first step."""
        return None if self.start_s is None else self.start_s - self.arrival_s

    @property
    def num_best_tokens(self) -> int | None:
        """The most that the turn before could have saved: its prompt and output, of this prompt."""
        if self.num_before_tokens is None or self.num_prompt_tokens is None:
            return None
        return min(self.num_before_tokens, self.num_prompt_tokens)


@dataclass(slots=True)
class Job:
    """One job's turns in the order of their arrival."""

    job_id: str
    turns: list[Turn] = field(default_factory=list)

    @property
    def duration_s(self) -> float | None:
        """First arrival to last token, tools included; None if a turn failed or has no end."""
        ends = [turn.finish_s for turn in self.turns if turn.finish_s is not None and not turn.is_aborted]
        if not ends or len(ends) < len(self.turns):
            return None
        return max(ends) - min(turn.arrival_s for turn in self.turns)


@dataclass(slots=True)
class Gauge:
    """A number seen again and again: its mean, lowest and highest."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def see(self, value: float) -> None:
        """One more value."""
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def to_json(self) -> dict[str, float | None]:
        """Mean, lowest, highest; None each if nothing was seen."""
        if not self.count:
            return {"mean": None, "min": None, "max": None}
        return {"mean": self.total / self.count, "min": self.low, "max": self.high}


@dataclass(slots=True)
class History:
    """All that is known of one run."""

    source: str
    kind: str
    """trace, turns or prototype."""
    jobs: list[Job] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    labels: dict[str, object] = field(default_factory=dict)
    """What was run, where something says so: policy, gpu, model, workload, jps."""
    engine: dict[str, Gauge] = field(default_factory=dict)
    """What the engine looked like, step by step."""
    step_s: array[float] = field(default_factory=lambda: array("d"))
    """From each step of a busy engine to the next."""
    has_tiers: bool = False
    """Tokens came from a tier below the GPU."""
    num_moved_tokens: int | None = None
    """Loaded from tiers below the GPU and stored there, where something counted them."""
    notes: list[str] = field(default_factory=list)
    """What was odd about the file."""
    _block_size: int | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block: as told, else the greatest that divides all hits, else vLLM's default."""
        if self._block_size is not None:
            return self._block_size
        hits = {turn.num_hit_tokens for job in self.jobs for turn in job.turns if turn.num_hit_tokens}
        common = math.gcd(*hits) if len(hits) >= _MIN_HITS else 0
        return common if 1 < common <= _MAX_BLOCK_SIZE else DEFAULT_BLOCK_SIZE

    @block_size.setter
    def block_size(self, value: int) -> None:
        self._block_size = value

    def see(self, name: str, value: float) -> None:
        """One more value of an engine's gauge."""
        self.engine.setdefault(name, Gauge()).see(value)
