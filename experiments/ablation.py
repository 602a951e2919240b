"""The `tenuto` policy with one part taken out at a time, for the ablation in docs/lab.md."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from tenuto.core.engine import ADAPTIVE
from tenuto.core.limits import Limits
from tenuto.core.policy import EngineSettings, Key, Needs
from tenuto.core.types import Decision, EngineView, Job, Keep, Lease, LoadOffer, Release, Turn
from tenuto.estimators.remaining_work import RemainingWork
from tenuto.estimators.returns import Standing
from tenuto.policies.tenuto import Tenuto


@dataclass
class FirstJobFirst(Tenuto):
    """Jobs in the order of their arrival, whatever work they still need."""

    stretch: float = 0.0


@dataclass
class NoPauses(Tenuto):
    """Only the work of all remaining turns counts, however short the next turn is."""

    def __post_init__(self) -> None:
        self._work = _WholeJobs()


class _WholeJobs(RemainingWork):
    def get_rank(self, turn: Turn, num_new_tokens: int) -> float:
        return self._look(turn.job, float(num_new_tokens)).work


@dataclass
class NoPlainFirst(Tenuto):
    """Plain requests are ordered by their work, like all jobs."""

    def __post_init__(self) -> None:
        self._standing = _NobodyIsPlain()


class _NobodyIsPlain(Standing):
    def is_plain(self, job: Job) -> bool:
        return False


@dataclass
class NoStanding(Tenuto):
    """Only work orders jobs: floods and crowds of one-shot jobs are ignored, and every job's KV is held."""

    def __post_init__(self) -> None:
        self._standing = _AllAreAlike()


class _AllAreAlike(Standing):
    def get_lead(self, job: Job, *, goes_first: bool = False) -> float:
        return 1.0 if goes_first else 0.0

    def is_expected_back(self, job: Job, tool: str | None, share_longer: float) -> bool:
        return True


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
    """A lease is always worth its memory."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        answer = super().retain(turn, view)
        if not isinstance(answer, Keep):
            return answer
        # Never looked at again.
        until_s = view.now_s + Limits().max_lease_s
        return Keep(until_s, value=-self._get_place_of(turn.job, self._work.get_work_left(turn.job)))


@dataclass
class AnyoneTakes(Tenuto):
    """Any turn may reclaim any lease, even a turn later in the order than the lease's job."""

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        return True


@dataclass
class OrderedTier(Tenuto):
    """Host memory evicts the KV of the last job in the order first."""

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        return (-self._get_place_of(turn.job, self._work.get_work_left(turn.job)),)


@dataclass
class NoTier(Tenuto):
    """Host memory is not used."""

    needs: ClassVar[Needs] = dataclasses.replace(Tenuto.needs, engine=EngineSettings(step_tokens=ADAPTIVE))


@dataclass
class AlwaysLoads(Tenuto):
    """A turn loads all KV that a tier has of it."""

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        return True
