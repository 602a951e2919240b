"""contextserve: its three ways by hand, layer by layer; what it learns and keeps; its known weaknesses.

`MODEL` knows the program `tool` and says ln seconds = 0.1 · the number of the command's options, with a
standard deviation of 0.5. The prior is then kappa 2, alpha 2, beta 0.25: Student's t with 4 degrees, scale
√(0.25 · 3 / (2 · 2)) = 0.433. Without draws the margin is 0.941 · 0.433 = 0.407 (80 % of t): fast up to
ln 3 − 0.407 = 0.691, slow from ln 6 + 0.407 = 2.199 on.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.types import (
    Decision,
    EngineView,
    Job,
    Keep,
    Lease,
    Offload,
    Release,
    TierView,
    ToolCall,
    Turn,
    Yields,
)
from tenuto.policies.published.contextserve import ContextServe, Speed
from tenuto_predict import FEATURES, FORMAT
from tests.policies.toy_turns import OUTPUT, pinned, prompt_of, run
from tests.support.toy_engine import ToyEngine, make_tokens

VIEW = EngineView(10.0, 16, 100, 90, 1, 2, 2048)
TIERS = (TierView("host", 1000, 0, 1e-4, 0.0),)
PIN = Keep(13.0, yields=Yields.ON_DEADLOCK)  # finished at 10 s + 3 s
OPTIONS = list(FEATURES).index("num_options")
MODEL = {
    "format": FORMAT,
    "features": list(FEATURES),
    "programs": {"tool": 0.0},
    "default_program": 0.0,
    "base": 0.0,
    "residual_sd": [0.5, 0.0],
    "trees": [[OPTIONS, n - 0.5, 0.0, 0.1] for n in range(1, 40)],
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(MODEL))
    return str(file)


def make_turn(command: str | None = "ls", **facts) -> Turn:
    facts = {"turn_id": "t", "job": Job("j", 0.0, 1), "arrival_s": 0.0, "num_prompt_tokens": 100, **facts}
    return Turn(**facts, tool=make_call(command) if command else None)


def make_call(command: str) -> ToolCall:
    return ToolCall(command.split()[0], command)


def teach(policy: ContextServe, command: str, *times_s: float) -> None:
    for tool_s in times_s:
        policy.on_tool_returned(make_turn(), make_call(command), tool_s)


def make_delay(policy: ContextServe, delay_s: float) -> None:
    """A job comes back to find nothing pinned, and waits."""
    turn = make_turn(turn_id="late", job=Job("late", 0.0, 2), arrival_s=5.0)
    policy.on_turn_arrived(turn, 5.0)
    policy.on_turn_started(turn, 5.0 + delay_s)


def tool(num_options: int) -> str:
    return " ".join(["tool", *["-x"] * num_options])


# The rules.


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ls -la", PIN),
        ("cd /src && git status && git diff | head -50", PIN),
        ("sed -n '1,40p' a.py", PIN),
        ("make", Offload()),
        ("cd /src && pip install -e . | tail -1", Offload()),
        ("python -m pytest -x tests", Offload()),
        ("grep x y; docker build .", Offload()),
    ],
)
def test_rules_decide_about_well_known_programs(command: str, expected: Decision) -> None:
    assert ContextServe().retain(make_turn(command), VIEW) == expected


def test_a_hint_names_a_program_without_its_command() -> None:
    assert ContextServe().retain(Turn("t", Job("j", 0, 1), 0, 100, tool=ToolCall("ls")), VIEW) == PIN


@pytest.mark.parametrize(
    "command", ["ls -R /", "cat x | xargs cat", "for f in *; do cat $f; done", "make -n"]
)
def test_rules_are_silent_where_a_quick_program_may_take_long_or_a_slow_one_only_asks(
    command: str, model: str
) -> None:
    # The model knows none of these programs.
    policy = ContextServe(model=model, explore=False)
    assert policy._predict(make_call(command), "t").speed is Speed.UNCERTAIN


def test_without_a_tool_the_cache_is_released() -> None:
    assert ContextServe().retain(make_turn(None), VIEW) == Release()


# The trees.


@pytest.mark.parametrize(
    ("num_options", "speed"),
    [(0, Speed.FAST), (6, Speed.FAST), (7, Speed.UNCERTAIN), (21, Speed.UNCERTAIN), (22, Speed.SLOW)],
)
def test_what_the_text_lets_expect_decides_with_a_margin(model: str, num_options: int, speed: Speed) -> None:
    policy = ContextServe(model=model, explore=False)
    assert policy._predict(make_call(tool(num_options)), "t").speed is speed


def test_a_fast_tool_is_pinned_for_what_covers_most_of_its_calls_and_at_most_3_s(model: str) -> None:
    policy = ContextServe(model=model, explore=False, quantile=0.75)
    # 75 % of Student's t with 4 degrees are below 0.7407.
    keep = policy.retain(make_turn(tool(0)), VIEW)
    assert isinstance(keep, Keep)
    assert keep.until_s - 10.0 == pytest.approx(math.exp(0.7407 * 0.4330), rel=1e-3)
    assert ContextServe(model=model, explore=False).retain(make_turn(tool(6)), VIEW) == PIN


def test_bounds_are_settings(model: str) -> None:
    call = make_call(tool(15))  # ln 1.5 = 4.5 s
    prediction = ContextServe(model=model, explore=False, pin_s=8.0)._predict(call, "t")
    assert (prediction.speed, prediction.pin_s) == (Speed.FAST, 8.0)
    assert ContextServe(model=model, explore=False, slow_s=2.9)._predict(call, "t").speed is Speed.SLOW
    assert (
        ContextServe(model=model, explore=False, confidence=0.999)._predict(make_call(tool(0)), "t").speed
        is Speed.UNCERTAIN
    )


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        ContextServe(model=str(tmp_path / "nowhere.json"))


# What is unknown.


def test_an_unknown_tool_is_uncertain_and_held_for_continuum_s_ttl() -> None:
    policy = ContextServe()
    turn = make_turn("frobnicate --all")
    assert policy.retain(turn, VIEW) == Offload()  # nothing waits: B < 1 s
    make_delay(policy, 20.0)
    keep = policy.retain(turn, VIEW)
    assert isinstance(keep, Keep) and keep.yields is Yields.ON_DEADLOCK
    # ln B, B = 20 s + the prefill of 100 tokens (milliseconds).
    assert keep.until_s - 10.0 == pytest.approx(math.log(20.0), abs=0.01)


def test_a_turn_that_was_pinned_or_gave_up_says_nothing_of_the_delay() -> None:
    policy = ContextServe()
    pinned = make_turn(turn_id="p", job=Job("p", 0.0, 2), has_lease=True)
    first = make_turn(turn_id="f")
    gone = make_turn(turn_id="g", job=Job("g", 0.0, 2))
    for turn in (pinned, first, gone):
        policy.on_turn_arrived(turn, 0.0)
    policy.on_turn_finished(gone, 1.0)
    for turn in (pinned, first, gone):
        policy.on_turn_started(turn, 50.0)
    assert policy.retain(make_turn("frobnicate"), VIEW) == Offload()


def test_a_tool_that_is_no_shell_is_known_by_its_name() -> None:
    policy = ContextServe(explore=False)
    for _ in range(30):
        policy.on_tool_returned(make_turn(), ToolCall("web_search", '{"query": "ls; make"}'), 1.0)
    turn = Turn("t", Job("j", 0, 1), 0, 100, tool=ToolCall("web_search", '{"query": "pytest"}'))
    assert isinstance(policy.retain(turn, VIEW), Keep)
    assert list(policy._beliefs) == ["web_search"]


# What is learned.


def test_what_a_program_takes_is_learned_in_both_directions() -> None:
    policy = ContextServe()
    for tool_s, speed in ((0.2, Speed.FAST), (60.0, Speed.SLOW)):
        teach(policy, f"tool-of-{tool_s}", *[tool_s] * 30)
        assert policy._predict(make_call(f"tool-of-{tool_s} --new-argument"), "t").speed is speed
    assert 0.2 < policy._predict(make_call("tool-of-0.2"), "t").pin_s < 3.0


def test_learning_by_hand(model: str) -> None:
    policy = ContextServe(model=model, explore=False)
    teach(policy, tool(10), math.exp(2.0))  # expected 1.0 in ln seconds: 1.0 more
    belief = policy._beliefs["tool"]
    assert belief.mean == pytest.approx(1 / 3)  # (2 · 0 + 1) / 3
    assert belief.beta == pytest.approx(0.25 + 2 * 1.0 / (2 * 3))


def test_experience_overrules_a_rule_after_so_many_calls() -> None:
    policy = ContextServe(explore=False)
    teach(policy, "ls", *[60.0] * 19)
    assert policy.retain(make_turn("ls"), VIEW) == PIN
    teach(policy, "ls", 60.0)
    assert policy.retain(make_turn("ls"), VIEW) == Offload()


def test_the_draw_is_the_turn_s_own_and_spreads_as_the_belief_does(model: str) -> None:
    policy = ContextServe(model=model)
    call = make_call(tool(7))  # 0.7, just above the 0.691 that is fast without draws
    found = [policy._predict(call, f"turn-{n}").speed for n in range(400)]
    assert found == [policy._predict(call, f"turn-{n}").speed for n in range(400)]
    assert found == [ContextServe(model=model)._predict(call, f"turn-{n}").speed for n in range(400)]
    assert found != [ContextServe(model=model, seed=1)._predict(call, f"turn-{n}").speed for n in range(400)]
    assert 100 < found.count(Speed.FAST) < 300


# The pin's end, and order.


def test_an_expired_pin_is_stored_and_freed_unless_the_job_already_waits() -> None:
    policy = ContextServe()
    lease = Lease(make_turn(), 7.0, 10.0, 0.0, 5, next_turn_waiting=False)
    assert policy.reconsider(lease, VIEW) == Offload()
    waiting = Lease(make_turn(), 7.0, 10.0, 0.0, 5, next_turn_waiting=True)
    assert isinstance(policy.reconsider(waiting, VIEW), Keep)


def test_turns_of_pinned_jobs_go_first_and_the_newest_job_gives_way() -> None:
    policy = ContextServe()
    turns = {
        "new": make_turn(job=Job("c", 7.0, 1), arrival_s=7.0),
        "old": make_turn(job=Job("a", 1.0, 5), arrival_s=9.0),
        "pinned": make_turn(job=Job("b", 6.0, 2), arrival_s=9.5, has_lease=True),
        "preempted": make_turn(job=Job("e", 8.0, 1), arrival_s=8.0, num_preemptions=1),
    }
    order = sorted(turns, key=lambda name: policy.queue_key(turns[name], 10.0))
    assert order == ["preempted", "pinned", "old", "new"]
    assert min(turns, key=lambda name: policy.preempt_key(turns[name], VIEW)) == "preempted"


# Kept across restarts.


def test_a_restart_keeps_what_was_learned() -> None:
    policy = ContextServe()
    teach(policy, "frobnicate", *[60.0] * 30)
    teach(policy, "quick-thing", *[0.1] * 80)
    make_delay(policy, 20.0)
    policy.on_job_ended(Job("j", 0.0, 8), 1.0)
    again = ContextServe()
    again.set_state(json.loads(json.dumps(policy.get_state(), allow_nan=False)))
    assert again.get_state() == policy.get_state()
    for command in ("frobnicate", "quick-thing", "never seen", "ls"):
        assert again.retain(make_turn(command), VIEW) == policy.retain(make_turn(command), VIEW)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("beliefs"),
        lambda state: state.pop("ttl"),
        lambda state: state["beliefs"].update(x=[0, 0, 0, 0]),
        lambda state: state["beliefs"].update(x=[0, 5e-324, 5e-324, 1]),
        lambda state: state["beliefs"].update(x=[0, 1, 1]),
        lambda state: state["beliefs"].update(x=["a", 1, 1, 1]),
        lambda state: state["ttl"].update(job_lengths=[0]),
        lambda state: state["ttl"].update(queue_delay="abc"),
        lambda state: state["ttl"].update(queue_delay=[1.7e308]),
        lambda state: state["ttl"]["tool_times"].update(all=[-1]),
        lambda state: state["ttl"].update(prefill={}),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage) -> None:
    policy = ContextServe()
    teach(policy, "frobnicate", *[60.0] * 5)
    state = json.loads(json.dumps(policy.get_state()))
    damage(state)
    before = repr(vars(policy))
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        policy.set_state(state)
    assert repr(vars(policy)) == before


# On an engine.


def test_fast_is_pinned_slow_is_stored_and_freed_and_so_is_a_pin_that_ran_out() -> None:
    engine = ToyEngine(ContextServe(), 40)
    run(engine, 0, 0.0, tool=make_call("ls"))
    run(engine, 1, 0.5, tool=make_call("make"))
    assert pinned(engine) == ["j0"]
    assert len(engine.stored) == 1
    assert engine.driver.expire(2.9) == 0
    assert engine.driver.expire(3.0) == 1
    assert pinned(engine) == []
    assert len(engine.stored) == 2


def test_its_known_weakness_a_rule_that_is_wrong_here_costs_the_cache_for_20_calls() -> None:
    # 16 blocks; a suite that takes half a second, and another job that needs 12 blocks meanwhile.
    engine = ToyEngine(ContextServe(explore=False), 16, limits=Limits(always_yield=False))
    # Something always runs, in one block: nothing ever stalls.
    engine.arrive("long", 0.0, make_tokens(800_000, 4), (), Hints(job_id="long"))
    assert engine.start_first(0.0) == "long"
    hits = []
    for number in range(30):
        now_s = 10.0 * number
        run(engine, number, now_s, tool=make_call("pytest -q tests/quick"))
        engine.arrive("other", now_s, make_tokens(900_000 + number, 48), (), Hints(job_id=f"o{number}"))
        if engine.start_first(now_s) == "other":
            engine.finish("other", now_s + 0.2, is_last=True)
        prompt = prompt_of(number) + OUTPUT + make_tokens(600, 7)
        engine.arrive("back", now_s + 0.5, prompt, OUTPUT, Hints(job_id=f"j{number}"))
        assert engine.start_first(now_s + 0.5) == "back"
        hits.append(engine.turns["back"].num_hit_blocks)
        engine.finish("back", now_s + 0.6, is_last=True)
        if engine.start_first(now_s + 0.6) == "other":
            engine.finish("other", now_s + 0.8, is_last=True)
    assert max(hits[:20]) < 5
    assert hits[20:] == [5] * 10


def test_its_known_weakness_pins_starve_a_new_job() -> None:
    for always_yield, expected in ((False, None), (True, "new")):
        engine = ToyEngine(ContextServe(), 15, limits=Limits(always_yield=always_yield))
        run(engine, 0, 0.0, tool=make_call("ls"))
        run(engine, 1, 0.5, tool=make_call("cat x"))
        engine.arrive("long", 1.0, make_tokens(90_000, 20), (), Hints(job_id="long"))
        assert engine.start_first(1.0) == "long"
        engine.arrive("new", 1.0, prompt_of(7), OUTPUT, Hints(job_id="new"))
        assert engine.start_first(1.0) == expected


# Without the extra `predict`.


def test_without_the_extra_it_decides_as_for_programs_that_the_trees_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = ToolCall("frobnicate", "frobnicate --all")
    with_trees = ContextServe(explore=False)
    monkeypatch.setitem(sys.modules, "tenuto_predict", None)
    without = ContextServe(explore=False)
    assert with_trees._read("gzip -9 log").log_s is not None
    assert without._read("gzip -9 log").log_s is None
    for tool in (unknown, ToolCall("ls", "ls -l"), ToolCall("make", "make")):
        assert without._predict(tool, "t").speed is with_trees._predict(tool, "t").speed
    for policy in (with_trees, without):
        for _ in range(5):
            policy.on_tool_returned(make_turn(), unknown, 0.5)
    assert without._predict(unknown, "t") == with_trees._predict(unknown, "t")


def test_a_model_without_the_extra_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tenuto_predict", None)
    with pytest.raises(ConfigError, match=r"tenuto\[predict\]"):
        ContextServe(model=str(tmp_path / "mine.json"))
