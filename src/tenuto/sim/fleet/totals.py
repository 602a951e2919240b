"""What is counted in a fleet, beside the turns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineCounts:
    """What one engine did in a run."""

    num_turns: int = 0
    num_jobs: int = 0
    """Jobs whose last turn it answered."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0


@dataclass
class FleetTotals:
    """Of a whole run."""

    by_engine: dict[str, EngineCounts] = field(default_factory=dict)
    num_copies_refused: int = 0
    """Copies of KV that found no room."""
