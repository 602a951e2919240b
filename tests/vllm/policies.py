"""Policies that the tests load by path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.policy import EngineSettings, Key, Needs, Policy, setting
from tenuto.core.types import Decision, EngineView, Keep, Lease, LoadOffer, Offload, Release, StepView, Turn


@dataclass
class KeepAll(Policy):
    """Leases every turn's blocks, whatever tool follows."""

    ttl_s: float = setting(100.0, "seconds", minimum=0)

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Keep(view.now_s + self.ttl_s)


@dataclass
class LeasedLast(KeepAll):
    """Orders turns with a lease behind the others: the opposite of what any policy would want."""

    def queue_key(self, turn: Turn, now_s: float) -> tuple[float, ...]:
        return (1 if turn.has_lease else 0, turn.arrival_s)

    def preempt_key(self, turn: Turn, view: EngineView) -> tuple[float, ...]:
        return (turn.arrival_s,)


@dataclass
class OneJobAtATime(Policy):
    """Admits a job only while no other is on, and gives each step a few tokens."""

    step_tokens: int = setting(4, "tokens a step", minimum=1)

    def admit(self, turn: Turn, view: EngineView) -> bool:
        return view.num_running + view.num_waiting == 0

    def step_budget(self, view: EngineView) -> int | None:
        return self.step_tokens


@dataclass
class Faulty(Policy):
    """Raises wherever it is asked."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        raise RuntimeError("retain")

    def queue_key(self, turn: Turn, now_s: float) -> tuple[float, ...]:
        raise RuntimeError("queue_key")


@dataclass
class WrongTerms(Policy):
    """Says when its leases yield as a word, as a configuration file would."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Keep(view.now_s + 1, yields="always")  # type: ignore[arg-type]


@dataclass
class Watching(Policy):
    """Writes down the steps and ticks it is told of, and orders by arrival until 1,010 s, then backwards."""

    needs: ClassVar[Needs] = Needs(reorder_s=5.0)
    steps: list[StepView] = field(init=False, default_factory=list)
    ticks_s: list[float] = field(init=False, default_factory=list)
    free_blocks: list[int] = field(init=False, default_factory=list)
    """At each tick."""

    def on_step(self, step: StepView) -> None:
        self.steps.append(step)

    def on_tick(self, view: EngineView) -> None:
        self.ticks_s.append(view.now_s)
        self.free_blocks.append(view.num_free_blocks)

    def queue_key(self, turn: Turn, now_s: float) -> tuple[float, ...]:
        return (turn.arrival_s if now_s < 1010 else -turn.arrival_s,)


@dataclass
class CachedFirst(Policy):
    """The most cached tokens first."""

    needs: ClassVar[Needs] = Needs(max_waiting_with_hits=1000)

    def queue_key(self, turn: Turn, now_s: float) -> tuple[float, ...]:
        assert turn.num_cached_tokens is not None
        return (-turn.num_cached_tokens, turn.arrival_s)


@dataclass
class Renewing(KeepAll):
    """Keeps everything, and keeps it again at each look; counts the looks."""

    ttl_s: float = setting(1.0, "seconds", minimum=0)
    num_looks: int = field(init=False, default=0)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        self.num_looks += 1  # no policy may do that: a test's way to look on
        return Keep(view.now_s + 100.0)


@dataclass
class Preempting(Policy):
    """Preempts by name; counts how often it was asked."""

    num_asked: int = field(init=False, default=0)

    def preempt_key(self, turn: Turn, view: EngineView) -> tuple[str, ...]:
        self.num_asked += 1  # as above
        return (turn.turn_id,)


@dataclass
class ShortestFirst(Policy):
    """The shortest prompt first."""

    def queue_key(self, turn: Turn, now_s: float) -> tuple[float, ...]:
        return (turn.num_prompt_tokens,)


@dataclass
class InOrder(Policy):
    """Host memory in the order in which jobs arrived."""

    needs: ClassVar[Needs] = Needs(engine=EngineSettings(offload="async"))

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        return (-turn.job.arrival_s,)


@dataclass
class LoadsNothing(Policy):
    """Computes what host memory has."""

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        return False


@dataclass
class LoadsHalf(Policy):
    """Loads the first half of what host memory has, and computes the rest."""

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> int:
        return offer.num_tokens // 2


@dataclass
class StoresAtTheEnd(Policy):
    """Stores what it is asked about, and holds nothing."""

    needs: ClassVar[Needs] = Needs(engine=EngineSettings(offload="asked"))

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Offload() if turn.tool is not None and turn.tool.name == "slow" else Release()


@dataclass
class KeepNone(Policy):
    """Keeps nothing, though it is asked."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Release()
