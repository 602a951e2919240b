"""What a policy is told of turns and of time, and when look-ups are worth their cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from tenuto.core.policy import Key, Needs, Policy
from tenuto.core.requests import Hints
from tenuto.core.types import EngineView, Job, Turn
from tests.support.toy_engine import ToyEngine, make_tokens

PROMPT, OUTPUT = make_tokens(0, 20), make_tokens(500, 3)
HINTS = Hints(job_id="j", is_last=True)


@dataclass
class Listener(Policy):
    """Writes down what it is told of turns; admits what it is told to."""

    needs: ClassVar[Needs] = Needs(admit="turns")
    admitted: set[str] = field(init=False, default_factory=set)
    told: list[tuple[str, str, float]] = field(init=False, default_factory=list)

    def admit(self, turn: Turn, view: EngineView) -> bool:
        return turn.turn_id in self.admitted

    def _hear(self, what: str, turn: Turn, now_s: float) -> None:
        self.told.append((what, turn.turn_id, now_s))

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        self._hear("arrived", turn, now_s)

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        self._hear("admitted", turn, now_s)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        self._hear("resumed" if turn.num_preemptions else "started", turn, now_s)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        self._hear("preempted", turn, now_s)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        self._hear("aborted" if turn.is_aborted else "finished", turn, now_s)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        self.told.append(("job ended", job.job_id, now_s))


def make_engine(policy: Policy, num_blocks: int = 100) -> ToyEngine:
    return ToyEngine(policy, num_blocks)


def test_all_that_happens_to_a_turn_is_told_in_order() -> None:
    policy = Listener()
    engine = make_engine(policy)
    engine.arrive("t", 1.0, PROMPT, OUTPUT, HINTS)
    assert not engine.driver.may_start("t", 2.0, idle=False)
    policy.admitted.add("t")
    assert engine.driver.may_start("t", 3.0, idle=False)
    engine.start_first(4.0)
    engine.preempt("t", 5.0)
    engine.start_first(6.0)
    engine.preempt("t", 7.0)
    engine.start_first(8.0)
    engine.finish("t", 9.0)
    assert policy.told == [
        ("arrived", "t", 1.0),
        ("admitted", "t", 3.0),
        ("started", "t", 4.0),
        ("preempted", "t", 5.0),
        ("resumed", "t", 6.0),
        ("preempted", "t", 7.0),
        ("resumed", "t", 8.0),
        ("finished", "t", 9.0),
        ("job ended", "j", 9.0),
    ]


def test_what_starts_because_the_engine_is_idle_is_told_too() -> None:
    policy = Listener()
    engine = make_engine(policy)
    engine.arrive("t", 1.0, PROMPT, OUTPUT, HINTS)
    assert engine.driver.may_start("t", 2.0, idle=True)
    assert policy.told[-1] == ("admitted", "t", 2.0)


def test_a_turn_that_needs_no_admission_is_not_told_of() -> None:
    @dataclass
    class PerJob(Listener):
        needs: ClassVar[Needs] = Needs(admit="jobs")

    policy = PerJob()
    engine = make_engine(policy)
    for turn_id in ("first", "second"):
        engine.arrive(turn_id, 1.0, PROMPT, OUTPUT, Hints(job_id="j"))
        assert engine.driver.may_start(turn_id, 2.0, idle=True)
        engine.start_first(2.0)
        engine.finish(turn_id, 3.0)
    assert [turn_id for what, turn_id, _ in policy.told if what == "admitted"] == ["first"]


@pytest.mark.parametrize("is_running", [False, True])
def test_an_abort_is_told_and_is_no_finish(is_running: bool) -> None:
    policy = Listener()
    engine = make_engine(policy)
    engine.arrive("t", 1.0, PROMPT, OUTPUT, HINTS)
    if is_running:
        engine.start_first(2.0)
    engine.abort("t", 3.0)
    # Nothing of the job was ever finished, so there is nothing to come back to either.
    assert policy.told[-2:] == [("aborted", "t", 3.0), ("job ended", "j", 3.0)]
    assert "finished" not in [what for what, _, _ in policy.told]


# Ticks.


@dataclass
class Ticking(Policy):
    needs: ClassVar[Needs] = Needs(reorder_s=2.0)
    views: list[EngineView] = field(init=False, default_factory=list)

    def on_tick(self, view: EngineView) -> None:
        self.views.append(view)


def test_ticks_come_with_the_first_step_and_then_not_more_often_than_asked_for() -> None:
    policy = Ticking()
    engine = make_engine(policy)
    engine.arrive("t", 99.0, PROMPT, OUTPUT, HINTS)
    times_s = [100.0, 100.5, 101.9, 102.0, 103.0, 109.0, 110.9, 111.0]
    ticks_s = [now_s for now_s in times_s if engine.driver.tick(now_s)]
    assert ticks_s == [view.now_s for view in policy.views] == [100.0, 102.0, 109.0, 111.0]
    assert policy.views[0].num_waiting == 1
    assert engine.driver.get_next_tick_s() == 113.0


def test_a_policy_whose_keys_stay_right_has_no_ticks() -> None:
    engine = make_engine(Policy())
    assert not engine.driver.tick(1e9)
    assert engine.driver.get_next_tick_s() == float("inf")


def test_keys_are_asked_again_without_a_hook_for_ticks() -> None:
    @dataclass
    class Reordered(Policy):
        needs: ClassVar[Needs] = Needs(reorder_s=0.0)

    engine = make_engine(Reordered())
    assert engine.driver.tick(1.0) and engine.driver.tick(1.0)


# Look-ups.


@dataclass
class SeesHits(Policy):
    needs: ClassVar[Needs] = Needs(max_waiting_with_hits=1000)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        return (1000 if turn.num_cached_tokens is None else turn.num_cached_tokens,)


@dataclass
class SeesFewHits(SeesHits):
    needs: ClassVar[Needs] = Needs(max_waiting_with_hits=1)


def test_a_view_with_hits_is_made_again_only_if_it_changes() -> None:
    engine = make_engine(SeesHits())
    engine.arrive("first", 0.0, PROMPT, OUTPUT)
    turn = engine.driver._turns["first"]
    view = turn.get_view(has_lease=False)
    seen = turn.get_view_with_hits(view, 16)
    assert seen == replace(view, num_cached_tokens=16)
    assert turn.get_view_with_hits(view, 16) is seen
    assert turn.get_view_with_hits(view, 0).num_cached_tokens == 0
    turn.num_preemptions = 1
    assert turn.get_view_with_hits(turn.get_view(has_lease=False), 0).num_preemptions == 1


@pytest.mark.parametrize(
    ("policy", "keys"), [(SeesHits(), [16, 16, 16]), (SeesFewHits(), [16, 16, 1000]), (Policy(), None)]
)
def test_hits_are_looked_up_while_few_turns_wait(policy: Policy, keys: list[int] | None) -> None:
    engine = make_engine(policy)
    engine.arrive("first", 0.0, PROMPT, OUTPUT)
    engine.start_first(0.0)
    engine.finish("first", 1.0)
    for number in range(3):
        # Asked when it arrives: those before it wait, it does not yet.
        engine.arrive(f"t{number}", 2.0, PROMPT)
    found = [next(iter(engine.waiting._lanes.values())).turns.get_key(f"t{number}") for number in range(3)]
    # After the policy's key, the order of arrival decides.
    assert found == [
        ((key,) if keys else (1, 2.0)) + (2 + number,) for number, key in enumerate(keys or [0] * 3)
    ]
