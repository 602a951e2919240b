"""The `tenuto` policy with one part taken out at a time, for the ablation in docs/results.md."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from tenuto.core.engine import ADAPTIVE
from tenuto.core.policy import EngineSettings, Key, Needs
from tenuto.core.types import Decision, EngineView, Job, Keep, Lease, LoadOffer, Release, Turn
from tenuto.estimators.remaining_work import RemainingWork
from tenuto.policies.tenuto import Tenuto


@dataclass
class FirstJobFirst(Tenuto):
    """Jobs in the order of their arrival, whatever work they still need."""

    stretch: float = 0.0


@dataclass
class NoKinds(Tenuto):
    """All jobs are of one kind."""

    def __post_init__(self) -> None:
        self._work = RemainingWork(by_kind=False)


@dataclass
class NoPauses(Tenuto):
    """Only the work of all turns to come counts, however short this turn is."""

    def _get_rank(self, job: Job, new_tokens: float, share_back: float) -> float:
        return self._work.get_work_left(job, new_tokens)


@dataclass
class WholeJobs(Tenuto):
    """The work of all turns to come counts, however short the queue is."""

    def _get_rank(self, job: Job, new_tokens: float, share_back: float) -> float:
        return super()._get_rank(job, new_tokens, 1.0)


@dataclass
class NoPlainFirst(Tenuto):
    """Plain requests have a place by their work, as all jobs."""

    def _goes_first(self, job: Job, new_tokens: int) -> bool:
        return False


@dataclass
class NoLookUps(Tenuto):
    """What a first turn hits in the cache is not known before it starts."""

    needs: ClassVar[Needs] = dataclasses.replace(Tenuto.needs, max_waiting_with_hits=0)


@dataclass
class FullSteps(Tenuto):
    """Steps as large as the engine allows."""

    needs: ClassVar[Needs] = dataclasses.replace(Tenuto.needs, engine=EngineSettings(offload="async"))


@dataclass
class NoRetention(Tenuto):
    """A finished turn's KV is freed at once, as in stock."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Release()


@dataclass
class NoPrice(Tenuto):
    """A lease is worth its memory for ever."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        answer = super().retain(turn, view)
        assert isinstance(answer, Keep)
        return Keep(view.now_s + self.max_idle_s, value=-self._get_lease_place(turn.job))


@dataclass
class AnyoneTakes(Tenuto):
    """Leases give way to any turn, also to one behind them in the order."""

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        return True


@dataclass
class TakesFreely(Tenuto):
    """A turn takes from jobs behind it, whatever these then have to compute again."""

    def _get_loss_s(self, lease: Lease, turn: Turn, view: EngineView) -> float:
        return 0.0


@dataclass
class KeepsOrder(Tenuto):
    """A turn takes from jobs behind it only, however long others are away and wherever their KV is."""

    def _is_away_for_long(self, lease: Lease, view: EngineView) -> bool:
        return False


@dataclass
class OrderedTier(Tenuto):
    """Host memory gives up the last job in the order first."""

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        return (-self._get_lease_place(turn.job),)


@dataclass
class NoTier(Tenuto):
    """Host memory is not used."""

    needs: ClassVar[Needs] = dataclasses.replace(Tenuto.needs, engine=EngineSettings(step_tokens=ADAPTIVE))


@dataclass
class AlwaysLoads(Tenuto):
    """A turn waits for whatever the tier has of it."""

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        return True
