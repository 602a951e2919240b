"""Why a finished turn got no lease: counted, logged, and no part of the decision."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from tenuto.core.limits import Limits
from tenuto.core.policy import Policy, Reports
from tenuto.core.policy_caller import PolicyCaller, Replay
from tenuto.core.requests import Hints
from tenuto.core.types import Decision, EngineView, Keep, LeaseRefusal, Offload, Release, Turn
from tests.support.toy_engine import ToyEngine, make_tokens


@dataclass
class Answering(Policy):
    """Answers always the same."""

    answer: Decision | None = None

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        assert self.answer is not None
        return self.answer


def run(
    answer: Decision, *, limits: Limits | None = None, num_tokens: int = 18
) -> tuple[dict[str, int], list[Any]]:
    """One turn; returns the refusals by reason, and the log."""
    records: list[Any] = []
    engine = ToyEngine(Answering(answer), 20, limits=limits, log=records.append)
    engine.arrive("t", 5.0, make_tokens(0, num_tokens), [99], Hints(job_id="j", tool="ls"))
    assert engine.start_first(5.0) == "t"
    engine.finish("t", 5.0)
    refusals = engine.driver.stats.num_lease_refusals
    return {why.value: count for why, count in refusals.items() if count}, records


@pytest.mark.parametrize(
    ("answer", "limits", "num_tokens", "reason"),
    [
        (Release(), None, 18, "policy-released"),
        (Offload(), None, 18, "policy-released"),
        (Offload(LeaseRefusal.NOT_EXPECTED_BACK), None, 18, "not-expected-back"),
        (Keep(5.0), None, 18, "too-late"),
        (Keep(9.0), Limits(max_lease_s=0.0), 18, "too-late"),
        (Keep(9.0), Limits(max_leased_share=0.1), 18, "over-share"),
        (Keep(9.0), None, 2, "not-cached"),
    ],
)
def test_each_reason_is_counted_and_logged(
    answer: Decision, limits: Limits | None, num_tokens: int, reason: str
) -> None:
    refusals, records = run(answer, limits=limits, num_tokens=num_tokens)
    assert refusals == {reason: 1}
    [record] = [each for each in records if each.get("event") == "lease-refused"]
    assert (record["job"], record["turn"], record["now_s"], record["reason"]) == ("j", "t", 5.0, reason)


@pytest.mark.parametrize(
    ("hints", "is_last", "is_supported", "reason"),
    [
        (Hints(job_id="j", is_last=True), None, True, "last-turn"),
        (Hints(job_id="j", is_last=True), True, False, "unsupported"),
        (Hints(), True, True, "no-tool-call"),
        (Hints(job_id="j"), True, True, "no-tool-call"),
        (Hints(job_id="j", is_last=False), True, True, None),
        (Hints(job_id="j", tool="ls"), True, True, None),
        (Hints(), None, True, None),
    ],
)
def test_a_turn_that_counts_as_the_last_says_why(
    hints: Hints, is_last: bool | None, is_supported: bool, reason: str | None
) -> None:
    engine = ToyEngine(Answering(Keep(9.0)), 20)
    engine.arrive("t", 5.0, make_tokens(0, 18), [99], hints)
    turn = engine.driver._turns["t"]
    turn.arrival = dataclasses.replace(turn.arrival, is_supported=is_supported)
    assert engine.start_first(5.0) == "t"
    engine.finish("t", 5.0, is_last=is_last)
    stats = engine.driver.stats
    assert {why.value: n for why, n in stats.num_lease_refusals.items() if n} == (
        {reason: 1} if reason else {}
    )
    assert stats.num_leases_granted == (reason is None)


def test_a_job_that_its_client_ends_while_a_turn_runs_says_why() -> None:
    engine = ToyEngine(Answering(Keep(9.0)), 20)
    engine.arrive("t", 5.0, make_tokens(0, 18), [99], Hints(job_id="j", tool="ls"))
    engine.start_first(5.0)
    engine.driver.release("j", 5.0)
    engine.finish("t", 5.0)
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.LAST_TURN] == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_an_aborted_turn_says_why(is_last: bool) -> None:
    engine = ToyEngine(Answering(Keep(9.0)), 20)
    engine.arrive("t", 5.0, make_tokens(0, 18), [99], Hints(job_id="j", is_last=is_last))
    engine.start_first(5.0)
    engine.abort("t", 6.0)
    refusals = engine.driver.stats.num_lease_refusals
    assert {why.value: count for why, count in refusals.items() if count} == {"aborted": 1}


def test_a_policy_that_keeps_nothing_refuses_nothing() -> None:
    engine = ToyEngine(Policy(), 20)
    engine.arrive("t", 5.0, make_tokens(0, 18), [99], Hints(job_id="j", is_last=True))
    engine.start_first(5.0)
    engine.finish("t", 5.0)
    assert not any(engine.driver.stats.num_lease_refusals.values())


def test_a_lease_that_is_granted_is_no_refusal() -> None:
    refusals, records = run(Keep(9.0))
    assert refusals == {}
    assert "lease-refused" not in [each.get("event") for each in records]


def test_a_lease_that_waits_for_another_turn_stays() -> None:
    engine = ToyEngine(Answering(Keep(9.0)), 40)
    for turn_id in ("t0", "t1"):
        engine.arrive(turn_id, 5.0, make_tokens(0, 18), [99], Hints(job_id="j", tool="ls"))
        assert engine.start_first(5.0) == turn_id
    engine.finish("t0", 5.0)
    engine.arrive("t2", 6.0, make_tokens(0, 18), [99], Hints(job_id="j", tool="ls"))
    engine.finish("t1", 6.0)
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.TURN_WAITING] == 1


def test_the_reason_is_no_part_of_a_decision() -> None:
    """A log without reasons, or with another one, replays."""
    _, records = run(Offload(LeaseRefusal.NOT_EXPECTED_BACK))
    [asked] = [each for each in records if each.get("hook") == "retain"]
    assert asked["answer"]["why"] == "not-expected-back"
    assert Replay(Answering(Offload())).feed(asked) is None
    assert Replay(Answering(Release())).feed(asked) is not None
    assert Replay(Answering(Offload())).feed({**asked, "answer": {"type": "Offload"}}) is None


@dataclass
class Reporting(Policy, Reports):
    """Reports what it is given."""

    figures: Any = None

    def get_figures(self) -> dict[str, float]:
        return self.figures


def test_a_policy_s_figures_are_bounded_and_guarded() -> None:
    assert PolicyCaller(Policy()).get_figures() == {}
    assert PolicyCaller(Reporting({"a": 1})).get_figures() == {"a": 1.0}
    assert len(PolicyCaller(Reporting({str(n): n for n in range(100)})).get_figures()) == 16
    faulty = PolicyCaller(Reporting({"a": "x"}))
    assert faulty.get_figures() == {}
    assert faulty.num_faults == 1
