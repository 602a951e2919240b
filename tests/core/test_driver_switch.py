"""An operator changes what the driver does under load; a client says that its job is complete."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tenuto.core.driver import Driver
from tenuto.core.limits import Canary, Limits
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.policy import Needs, Policy
from tenuto.core.requests import Hints
from tenuto.core.types import EngineView, LeaseEnd, LeaseRefusal, ToolCall, Turn
from tests.support.checks import check_integrity
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

LS = ToolCall("ls")


def prompt_of(number: int, length: int = 18) -> list[int]:
    return make_tokens(10_000 * (number + 1), length)


def run(engine: ToyEngine, number: int, now_s: float = 0.0, **hints: Any) -> None:
    engine.arrive(
        f"t{number}", now_s, prompt_of(number), make_tokens(500, 3), Hints(job_id=f"j{number}", **hints)
    )
    assert engine.start_first(now_s) == f"t{number}"
    engine.finish(f"t{number}", now_s, tool=LS)


def switch(
    engine: ToyEngine, policy: Policy, now_s: float, *, keeps_leases: bool = False, **settings: Any
) -> None:
    new = Driver(policy, engine, stats=engine.driver.stats, **settings)
    new.take_over(engine.driver, now_s, keeps_leases=keeps_leases)
    engine.driver = new
    for turn_id in list(engine.waiting):
        engine.waiting.push(turn_id, engine.driver.get_queue_key(turn_id, now_s))


# Release.


def test_a_completed_job_gives_its_lease_back_and_is_forgotten() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    assert len(engine.driver.leases) == 1
    assert engine.driver.release("j0", 1.0)
    assert engine.pool.num_free_blocks == 20
    assert engine.driver.stats.num_leases_ended[LeaseEnd.JOB_ENDED] == 1
    assert not engine.driver.release("j0", 1.0), "once is enough, and twice does no harm"
    assert not engine.driver.release("nobody", 1.0)


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_turns_of_a_completed_job_get_no_lease(how: str) -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    engine.arrive("more", 1.0, prompt_of(0, 30), [1, 2], Hints(job_id="j0"))
    assert engine.driver.release("j0", 1.0)
    assert engine.start_first(1.0) == "more"
    if how == "finish":
        engine.finish("more", 2.0, tool=LS)
    else:
        engine.abort("more", 2.0)
    assert len(engine.driver.leases) == 0
    assert engine.pool.num_free_blocks == 20
    assert not engine.driver.release("j0", 3.0), "the job ended with its last turn"


def test_an_id_that_comes_back_after_its_release_is_a_job_again() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    engine.driver.release("j0", 1.0)
    run(engine, 0, 2.0)
    assert len(engine.driver.leases) == 1


# Switch.


def test_a_switch_drops_leases_and_keeps_jobs_and_turns() -> None:
    engine = ToyEngine(KeepFor(), 30)
    run(engine, 0)
    engine.arrive("waits", 1.0, prompt_of(1), [1], Hints(job_id="j1"))
    switch(engine, Policy(), 2.0)
    assert engine.driver.stats.num_leases_ended[LeaseEnd.SWITCHED] == 1
    assert engine.pool.num_free_blocks == 30
    assert engine.start_first(2.0) == "waits"
    engine.finish("waits", 2.0, tool=LS)
    assert len(engine.driver.leases) == 0
    # What the job can reuse is still known.
    engine.arrive("again", 3.0, prompt_of(0) + make_tokens(500, 3) + [9] * 8, [1], Hints(job_id="j0"))
    assert engine.start_first(3.0) == "again"
    assert engine.driver.stats.num_reusable_tokens == 20
    switch(engine, KeepFor(), 4.0)
    engine.finish("again", 5.0, tool=LS)
    assert len(engine.driver.leases) == 1
    check_integrity(engine.pool, engine.driver.leases)


def test_leases_go_on_where_only_the_limits_change() -> None:
    engine = ToyEngine(KeepFor(), 30)
    run(engine, 0)
    run(engine, 1, 1.0)
    engine.arrive("more", 1.0, prompt_of(0, 30), [1], Hints(job_id="j0"))
    switch(engine, KeepFor(), 2.0, keeps_leases=True, limits=Limits(max_lease_s=5.0))
    stats, leases = engine.driver.stats, engine.driver.leases
    assert [lease.job_id for lease in leases] == ["j0", "j1"]
    assert (stats.num_leases_granted, sum(stats.num_leases_ended.values())) == (2, 0)
    assert leases.get_next_deadline_s() == 5.0, "the new limit holds from when the lease was granted"
    check_integrity(engine.pool, leases)
    assert engine.start_first(2.0) == "more"
    assert stats.num_hit_tokens == 16
    assert stats.num_leases_ended[LeaseEnd.HIT] == 1
    assert engine.driver.expire(7.0) == 1
    engine.finish("more", 7.0, is_last=True)
    assert engine.pool.num_free_blocks == 30


class OneAtATime(KeepFor):
    """Admits a turn while no other runs; notes what it is told."""

    needs = Needs(admit="turns")

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.asked: list[str] = []

    def admit(self, turn: Turn, view: EngineView) -> bool:
        self.asked.append(turn.turn_id)
        return not any("admitted" in each for each in self.told)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        self.told.append(f"{turn.turn_id} arrived")

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        self.told.append(f"{turn.turn_id} admitted")

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        self.told.append(f"{turn.turn_id} started")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_policy_that_goes_on_is_told_nothing_twice_and_another_is_told_all(goes_on: bool) -> None:
    policy = OneAtATime()
    engine = ToyEngine(policy, 30)
    for number in range(3):
        engine.arrive(f"t{number}", 0.0, prompt_of(number), [1], Hints(job_id=f"j{number}"))
    assert engine.driver.may_start("t0", 0.0, idle=False)
    told = ["t0 arrived", "t1 arrived", "t2 arrived", "t0 admitted"]
    assert policy.told == told
    new = policy if goes_on else OneAtATime()
    switch(engine, new, 1.0, limits=Limits(max_lease_s=5.0), strict=True)
    assert new.told == (told if goes_on else told[:3])
    assert engine.driver.needs_admission("t0") is not goes_on
    assert engine.driver.needs_admission("t1")
    assert engine.driver.may_start("t0", 1.0, idle=False)
    assert not engine.driver.may_start("t1", 1.0, idle=False)
    assert policy.asked.count("t0") == 1


def test_a_policy_that_goes_on_forgets_the_jobs_that_a_new_limit_forgets() -> None:
    policy = KeepFor()
    engine = ToyEngine(policy, 40)
    for number in range(4):
        run(engine, number, float(number))
    switch(engine, policy, 4.0, keeps_leases=True, limits=Limits(max_remembered_jobs=2))
    assert [each for each in policy.heard if each[0] == "job ended"] == [
        ("job ended", "j0", 1),
        ("job ended", "j1", 1),
    ]
    assert [lease.job_id for lease in engine.driver.leases] == ["j2", "j3"]
    assert engine.driver.stats.num_leases_ended[LeaseEnd.FORGOTTEN] == 2


class NotesPreemptions(KeepFor):
    """Notes which turns it is told are preempted."""

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        self.heard.append(("preempted", turn.turn_id))


def test_a_preempted_turn_waits_after_a_switch_too() -> None:
    """It holds no memory, its wait is bounded, and a new policy knows that it does not run."""
    engine = ToyEngine(KeepFor(), 30)
    for number in range(2):
        engine.arrive(f"t{number}", 0.0, prompt_of(number), [1], Hints(job_id=f"j{number}"))
        engine.start_first(0.0)
    engine.preempt("t0", 1.0)
    policy = NotesPreemptions()
    switch(engine, policy, 2.0)
    heard_of_t0, heard_of_t1 = policy.heard[:3], policy.heard[3:]
    assert heard_of_t0 == [("arrived", "t0"), ("started", "t0", 0), ("preempted", "t0")]
    assert heard_of_t1 == [("arrived", "t1"), ("started", "t1", 0)]
    assert engine.driver.quota.get_use("") == 5, "blocks of the turn that runs"
    assert engine.driver.get_next_tick_s() == 602.0
    engine.driver.tick(602.0)
    assert engine.driver.get_queue_key("t0", 602.0)[0] == -math.inf
    assert engine.start_first(603.0) == "t0"
    for turn_id in ("t0", "t1"):
        engine.finish(turn_id, 604.0, is_last=True)
    assert len(engine.driver.quota) == 0


def test_leases_that_new_limits_forbid_yield_the_oldest_first() -> None:
    engine = ToyEngine(KeepFor(), 20)
    for number in range(3):
        run(engine, number, float(number))
    engine.arrive("waits", 3.0, prompt_of(0, 30), [1], Hints(job_id="j0"))
    switch(engine, KeepFor(), 3.0, keeps_leases=True, limits=Limits(max_leased_share=0.4))
    assert [lease.job_id for lease in engine.driver.leases] == ["j1", "j2"]
    assert engine.driver.get_num_leased_blocks() <= 8
    assert engine.driver.stats.num_revoked_blocks == 6
    check_integrity(engine.pool, engine.driver.leases)
    assert engine.start_first(4.0) == "waits"


def test_new_limits_of_a_tenant_hold_while_another_one_has_only_a_turn() -> None:
    engine = ToyEngine(KeepFor(), 40)
    for number in range(3):
        run(engine, number, float(number), tenant="ann")
    engine.arrive("other", 3.0, prompt_of(9), [1], Hints(job_id="other", tenant="bob"))
    engine.start_first(3.0)
    switch(engine, KeepFor(), 3.0, keeps_leases=True, limits=Limits(max_tenant_leases=1))
    assert [lease.job_id for lease in engine.driver.leases] == ["j2"]
    switch(engine, KeepFor(), 3.0, keeps_leases=True, limits=Limits(max_tenant_share=0.05))
    assert engine.driver.get_num_leased_blocks() == 2
    check_integrity(engine.pool, engine.driver.leases)


def test_leases_of_jobs_that_leave_the_canary_end() -> None:
    engine = ToyEngine(KeepFor(), 30)
    for number, group in enumerate(("old", "new", None)):
        run(engine, number, group=group)
    switch(engine, KeepFor(), 1.0, keeps_leases=True, canary=Canary(groups=["new"]))
    assert [lease.job_id for lease in engine.driver.leases] == ["j1"]
    assert engine.driver.stats.num_leases_ended[LeaseEnd.SWITCHED] == 2
    check_integrity(engine.pool, engine.driver.leases)


@pytest.mark.parametrize("seed", range(3))
def test_any_policy_takes_over_from_any_other_under_load(seed: int) -> None:
    """No hook fails, nothing leaks, every turn ends, whatever the order of policies."""
    rng = random.Random(seed)
    names = [name for name in get_policy_names() if name != "clairvoyant"]
    rng.shuffle(names)
    engine = ToyEngine(load_policy(names[0]), 60)
    now_s, num_turns, num_ended = 0.0, 0, 0
    texts = {f"j{n}": make_tokens(10_000 * (n + 1), 10) for n in range(12)}
    for step in range(len(names) * 25):
        now_s += rng.uniform(0.05, 0.4)
        if step % 25 == 24:
            limits = Limits(max_lease_s=rng.choice([0.0, 5.0, 600.0]))
            canary = Canary(share=rng.choice([None, 0.5]))
            switch(engine, load_policy(names[step // 25]), now_s, limits=limits, canary=canary, strict=True)
            check_integrity(engine.pool, engine.driver.leases)
        elif step % 25 == 12:
            # The same policy goes on; the leases may be another's, if it begins with a new object.
            limits = Limits(max_lease_s=rng.choice([1.0, 600.0]), max_leased_share=rng.choice([0.2, 1.0]))
            canary = Canary(share=rng.choice([None, 0.5]))
            policy = load_policy(names[max(0, step // 25 - 1)])
            switch(engine, policy, now_s, keeps_leases=True, limits=limits, canary=canary, strict=True)
            check_integrity(engine.pool, engine.driver.leases)
            stats = engine.driver.stats
            num_held = stats.num_leases_granted - sum(stats.num_leases_ended.values())
            assert len(engine.driver.leases) == num_held
        if rng.random() < 0.5:
            job = rng.choice(sorted(texts))
            texts[job] = (texts[job] + [rng.randrange(1000) for _ in range(9)])[:80]
            if len(texts[job]) == 80:
                texts[job] = texts[job][:10]
            num_turns += 1
            engine.arrive(f"t{num_turns}", now_s, texts[job], [1, 2, 3], Hints(job_id=job))
        engine.driver.expire(now_s)
        engine.driver.tick(now_s)
        if len(engine.running) < 5:
            engine.start_first(now_s)
        if engine.running and rng.random() < 0.5:
            turn_id = rng.choice(sorted(engine.running))
            what = rng.random()
            if what < 0.15:
                engine.preempt(turn_id, now_s)
            else:
                num_ended += 1
                engine.abort(turn_id, now_s) if what < 0.3 else engine.finish(turn_id, now_s, tool=LS)
    while engine.turns:
        now_s += 0.1
        engine.start_first(now_s)
        for turn_id in list(engine.running):
            num_ended += 1
            engine.finish(turn_id, now_s, tool=LS)
    assert num_ended == num_turns > 100
    assert engine.driver.num_policy_faults == 0
    switch(engine, Policy(), now_s)
    assert engine.pool.num_free_blocks == 60
    check_integrity(engine.pool, engine.driver.leases, idle=True)


def test_faults_are_counted_over_a_switch() -> None:
    class Bad(KeepFor):
        def retain(self, turn: Any, view: Any) -> Any:
            raise RuntimeError

    engine = ToyEngine(Bad(), 20)
    run(engine, 0)
    switch(engine, Policy(), 1.0)
    assert engine.driver.num_policy_faults == 1


# Canary.


def test_only_jobs_of_the_canary_get_leases_and_each_part_has_its_figures() -> None:
    engine = ToyEngine(KeepFor(), 30)
    switch(engine, KeepFor(), 0.0, canary=Canary(groups=["beta"]))
    run(engine, 0, group="beta")
    run(engine, 1)
    assert [lease.job_id for lease in engine.driver.leases] == ["j0"]
    assert not any(engine.driver.stats.num_lease_refusals.values()), "the other was not refused one"
    # A job stays in its part, whatever a later turn says.
    engine.arrive("t1b", 1.0, prompt_of(1, 30), [1], Hints(job_id="j1", group="beta"))
    engine.start_first(1.0)
    engine.finish("t1b", 1.0, tool=LS)
    assert [lease.job_id for lease in engine.driver.leases] == ["j0"]
    groups = engine.driver.stats.groups
    assert (groups["policy"].num_turns, groups["stock"].num_turns) == (1, 2)
    assert groups["stock"].num_hit_tokens > 0 == groups["policy"].num_hit_tokens
    assert LeaseRefusal.POLICY not in [why for why, n in engine.driver.stats.num_lease_refusals.items() if n]
