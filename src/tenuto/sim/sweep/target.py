"""What a plan must keep: the P95 of job times, of times to first token, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tenuto.core.errors import ConfigError
from tenuto.sim.sweep.settling import Verdict


class Times(Protocol):
    """What was measured. Both are infinite where nothing was."""

    @property
    def p95_s(self) -> float:
        """P95 of the job times."""
        ...

    @property
    def p95_ttft_s(self) -> float:
        """P95 of the times to first token."""
        ...


class Judged(Times, Protocol):
    """The same, and whether the machines are steady: if not, their times mean nothing."""

    @property
    def verdict(self) -> Verdict:
        """What came of the simulation."""
        ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """What must be kept. Raises ConfigError if that is nothing."""

    p95_s: float | None = None
    p95_ttft_s: float | None = None
    margin: float = 0.0
    """Share of the targets that must be left over."""

    def __post_init__(self) -> None:
        """Check that there is a target."""
        if self.p95_s is None and self.p95_ttft_s is None:
            raise ConfigError("say what the GPUs must keep: --p95 or --p95-ttft, in seconds")

    def get_use(self, times: Times) -> float:
        """The largest share of a target that the P95s take up; 1 is just enough, without the margin."""
        uses = []
        if self.p95_s is not None:
            uses.append(times.p95_s / self.p95_s)
        if self.p95_ttft_s is not None:
            uses.append(times.p95_ttft_s / self.p95_ttft_s)
        return max(uses)

    def is_met(self, judged: Judged) -> bool:
        """Whether the targets are kept, with the margin, in a steady state."""
        return judged.verdict == "steady" and self.get_use(judged) <= 1 - self.margin

    def __str__(self) -> str:
        """The targets in words."""
        names = (("P95 job time", self.p95_s), ("P95 TTFT", self.p95_ttft_s))
        words = " and ".join(f"{name} {value:g} s" for name, value in names if value is not None)
        return f"{words}, less a margin of {self.margin:.0%}" if self.margin else words
