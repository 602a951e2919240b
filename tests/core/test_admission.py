"""Admission: who is asked about, who starts with whom, and that nobody is held back for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from tenuto.core.limits import Limits
from tenuto.core.policy import Needs, Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Lease, Turn
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

PROMPT, OUTPUT = make_tokens(0, 18), make_tokens(500, 3)


@dataclass
class Nobody(Policy):
    """Admits nobody, the latest arrival first."""

    admitted: list[str] = field(init=False, default_factory=list)

    def admit(self, turn: Turn, view) -> bool:
        return False

    def queue_key(self, turn: Turn, now_s: float):
        return (-turn.arrival_s,)

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        self.admitted.append(turn.turn_id)


@dataclass
class NoTurn(Nobody):
    needs: ClassVar[Needs] = Needs(admit="turns")


class Door:
    """A queue before an engine, as both engines have it: turns that need admission are parked."""

    def __init__(self, policy: Policy, **limits: Any) -> None:
        self.engine = ToyEngine(policy, 100, limits=Limits(**limits))
        self.driver = self.engine.driver
        self.parked: list[str] = []

    def arrive(self, turn_id: str, now_s: float, job_id: str | None = None) -> None:
        self.engine.arrive(turn_id, now_s, PROMPT, OUTPUT, Hints(job_id=job_id or turn_id))
        if self.driver.needs_admission(turn_id):
            self.parked.append(turn_id)

    def open(self, now_s: float, *, idle: bool = False) -> list[str]:
        """Let in who may start now."""
        self.driver.tick(now_s)
        let_in: list[str] = []
        while self.parked:
            order = [turn_id for turn_id in self.engine.waiting if turn_id in self.parked]
            admitted = self.driver.admit(order[0], now_s, idle=idle and not let_in)
            if not admitted:
                break
            let_in += [turn_id for turn_id in admitted if turn_id in self.parked]
            self.parked = [turn_id for turn_id in self.parked if turn_id not in admitted]
        return let_in


def test_nobody_is_parked_for_longer_than_the_limit_though_others_go_before_it_for_ever() -> None:
    door = Door(Nobody(), max_held_back_s=10, max_wait_over_stock=None)
    for number in range(30):
        door.arrive(f"t{number}", number)
        # The policy's order has the latest first; it is the longest waiting that is let in.
        assert door.open(number) == ([f"t{number - 10}"] if number >= 10 else [])
    assert door.driver.policy.admitted == [f"t{number}" for number in range(20)]


def test_without_a_limit_only_the_policy_ends_a_wait() -> None:
    door = Door(Nobody(), max_held_back_s=float("inf"))
    door.arrive("t", 0)
    assert door.open(1e9) == []
    assert door.open(1e9, idle=True) == ["t"]


def test_turns_of_a_parked_job_start_with_its_first() -> None:
    door = Door(Nobody(), max_wait_over_stock=None)
    for turn_id, job_id in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        door.arrive(turn_id, 0, job_id)
    assert sorted(door.open(1, idle=True)) == ["a1", "a2"]
    # What came with its job is not counted among those that wait any more.
    assert door.open(1000) == ["b1"]


def test_a_turn_that_comes_between_its_job_s_admission_and_its_start_is_not_parked() -> None:
    """Parked, it would stand behind whatever other job the policy refuses, while its own job runs."""
    door = Door(Nobody())
    door.arrive("a1", 0, "a")
    assert door.open(1, idle=True) == ["a1"]
    door.arrive("a2", 2, "a")
    assert not door.driver.needs_admission("a2")
    assert door.parked == []


def test_where_every_turn_is_asked_about_none_starts_with_another() -> None:
    door = Door(NoTurn(), max_held_back_s=10, max_wait_over_stock=None)
    for turn_id, now_s in (("a1", 0), ("a2", 5)):
        door.arrive(turn_id, now_s, "a")
    assert door.open(10) == ["a1"]
    assert door.open(14) == []
    assert door.open(15) == ["a2"]
    # The policy heard of both, or its own count of those that run would be wrong.
    assert door.driver.policy.admitted == ["a1", "a2"]


def test_who_went_away_is_not_waited_for() -> None:
    door = Door(Nobody(), max_held_back_s=10, max_wait_over_stock=None)
    door.arrive("gone", 0)
    door.arrive("t", 1)
    door.engine.abort("gone", 2)
    door.parked.remove("gone")
    assert door.open(10) == []
    assert door.open(11) == ["t"]
    door.arrive("last", 12)
    door.engine.abort("last", 13)
    assert not door.driver._order._held


def test_a_job_that_was_admitted_and_went_away_unstarted_is_asked_about_again() -> None:
    door = Door(Nobody())
    door.arrive("a1", 0, "a")
    assert door.open(1, idle=True) == ["a1"]
    door.engine.abort("a1", 2)
    door.arrive("a2", 3, "a")
    assert door.parked == ["a2"]


# Held back by leases.


@dataclass
class Miser(KeepFor):
    """Gives way to nobody that waits."""

    def may_reclaim(self, lease: Lease, turn: Turn, view) -> bool:
        return False


@pytest.mark.parametrize(("now_s", "starts"), [(59.9, False), (60.0, True)])
def test_leases_hold_nobody_back_for_longer_than_the_limit(now_s: float, starts: bool) -> None:
    engine = ToyEngine(Miser(ttl_s=500), 12, limits=Limits(max_held_back_s=60))
    for number in range(2):
        engine.arrive(f"t{number}", -1, make_tokens(1000 * number, 18), OUTPUT, Hints(job_id=f"j{number}"))
        engine.start_first(-1)
    # Five blocks run on, five are leased, two are free.
    engine.finish("t0", -1)
    engine.arrive("t", 0, make_tokens(9000, 18), OUTPUT)
    engine.driver.tick(now_s)
    assert engine.start_first(now_s) == ("t" if starts else None)


# The place of many turns with one id.


def test_more_turns_at_once_than_the_limit_have_the_place_of_a_new_job() -> None:
    """Who gives all requests one id must not go before everyone who came later."""
    engine = ToyEngine(Policy(), 100, limits=Limits(max_parallel_turns=2))

    def get_job_arrival_s(turn_id: str) -> float:
        return engine.driver._retention.get_turn_view(engine.driver._turns[turn_id]).job.arrival_s

    for number in range(4):
        engine.arrive(f"t{number}", 10 + number, PROMPT, OUTPUT, Hints(job_id="constant"))
    assert [get_job_arrival_s(f"t{number}") for number in range(4)] == [10, 10, 12, 13]
    # As soon as fewer are there, the job has its place again; what came meanwhile keeps its own.
    for number in (0, 1, 2):
        engine.abort(f"t{number}", 20)
    engine.arrive("t4", 21, PROMPT, OUTPUT, Hints(job_id="constant"))
    assert (get_job_arrival_s("t3"), get_job_arrival_s("t4")) == (13, 10)


@pytest.mark.parametrize("policy", [Nobody, NoTurn])
def test_a_parked_turn_that_waits_longer_than_in_stock_is_let_in(policy: type[Policy]) -> None:
    door = Door(policy(), max_wait_over_stock=0.0)
    for turn_id, now_s in (("served", -2), ("runs", 0)):
        door.arrive(turn_id, now_s)
        assert door.open(now_s, idle=True) == [turn_id]
        door.engine.start_first(now_s)
        if turn_id == "served":
            door.engine.finish("served", 0)
    for number in range(4):
        door.arrive(f"t{number}", 1 + number / 10)
    # Nothing was waiting when the first of them came: in stock it would have started at once. It waits for
    # one turn of service, which takes 2 s, or until enough work of others has begun.
    for now_s in (2.9, 3):
        door.driver.tick(now_s)
        assert door.open(now_s) == (["t0"] if now_s == 3 else [])
    door.engine.finish("runs", 3)
    for number in range(4):
        door.driver.start(f"t{number}", 3 + 3 * number, 0)
        door.driver.tick(6 + 3 * number)
        assert door.open(6 + 3 * number) == ([f"t{number + 1}"] if number < 3 else [])
