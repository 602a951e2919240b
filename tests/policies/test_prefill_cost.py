"""What prefill costs: the formula by hand, what is learned of a made-up engine, and what is not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tenuto.core.errors import ConfigError, DataError
from tenuto.core.loader import load_policy
from tenuto.core.types import EngineView, Job, StepView, TierView, Turn
from tenuto.policies.published._prefill import (
    MIN_STEPS,
    PrefillCost,
    PrefillProfile,
    get_reload_s,
    read_prefill_profile,
)
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.fitted import FittedStepCost, Line

TRUE = PrefillProfile(fixed_s=0.02, token_s=1e-4, token_pair_s=3e-9)
"""A GPU three times as slow as the one that is assumed, at attention six times."""
REQUEST_S = 0.0005


def make_turn(turn_id: str, num_prompt_tokens: int, num_hit_tokens: int = 0) -> Turn:
    return Turn(turn_id, Job(turn_id, 0.0, 1), 0.0, num_prompt_tokens, num_hit_tokens=num_hit_tokens)


def make_view(*tiers: TierView) -> EngineView:
    return EngineView(10.0, 16, 1000, 500, 4, 2, 8192, tiers=tiers)


def get_step_s(profile: PrefillProfile, num_tokens: int, num_done: int) -> float:
    """The time of a part of a prompt, behind tokens that are computed already."""
    return profile.fixed_s + profile.get_s(num_done + num_tokens) - profile.get_s(num_done)


def run_turns(cost: PrefillCost, true: PrefillProfile, num_turns: int, *, max_tokens: int = 4096) -> None:
    """An engine with a few decodes; every turn's prompt goes through in steps of at most `max_tokens`."""
    rng = random.Random(7)
    for number in range(num_turns):
        num_hit_tokens = rng.choice((0, 2000, 8000, 16000))
        turn = make_turn(f"t{number}", num_hit_tokens + rng.randint(300, 9000), num_hit_tokens)
        cost.on_started(turn)
        done = num_hit_tokens
        while done < turn.num_prompt_tokens:
            num_tokens = min(max_tokens, turn.num_prompt_tokens - done)
            num_decodes = rng.randint(0, 40)
            duration_s = get_step_s(true, num_tokens, done) + REQUEST_S * (num_decodes + 1)
            cost.observe(StepView(0.0, duration_s, num_tokens + num_decodes, num_decodes + 1))
            done += num_tokens
        # Then it decodes: steps that say nothing of prefill.
        cost.observe(StepView(0.0, 5.0, 12, 12))
        cost.on_stopped(turn)


def test_a_profile_by_hand() -> None:
    profile = PrefillProfile(1.0, 1e-3, 1e-6)
    assert profile.get_s(100) == pytest.approx(1 + 0.1 + 0.01)
    # Behind 200 others: 300² − 200² = 50,000 pairs.
    assert get_step_s(profile, 100, 200) == pytest.approx(1 + 0.1 + 0.05)


def test_what_is_assumed_before_anything_was_seen() -> None:
    # 3.2e-5 · 1,000 + 5.3e-10 · 1,000,000
    assert PrefillCost().profile.get_s(1000) == pytest.approx(0.03253)


@pytest.mark.parametrize("max_tokens", [4096, 100_000])
def test_it_learns_an_engine_it_never_saw(max_tokens: int) -> None:
    cost = PrefillCost()
    run_turns(cost, TRUE, 60, max_tokens=max_tokens)
    for num_tokens, context in ((1000, 0), (4000, 0), (4000, 12_000), (500, 16_000)):
        expected_s = get_step_s(TRUE, num_tokens, context) + REQUEST_S
        assert get_step_s(cost.profile, num_tokens, context) == pytest.approx(expected_s, rel=0.05)


def test_it_forgets_an_engine_that_has_become_slower() -> None:
    cost = PrefillCost()
    run_turns(cost, TRUE, 60)
    slower = PrefillProfile(2 * TRUE.fixed_s, 2 * TRUE.token_s, 2 * TRUE.token_pair_s)
    run_turns(cost, slower, 400)
    assert cost.profile.get_s(4000) == pytest.approx(slower.get_s(4000), rel=0.05)


def test_prompts_of_one_length_leave_the_assumed_ratio_of_attention() -> None:
    cost = PrefillCost()
    for number in range(40):
        turn = make_turn(f"t{number}", 2000)
        cost.on_started(turn)
        cost.observe(StepView(0.0, 0.2, 2000, 1))
        cost.on_stopped(turn)
    assert cost.profile.get_s(2000) == pytest.approx(0.2, rel=0.01)
    # All seconds per token would be 1.0 for 10,000; with the assumed ratio there is some attention in it.
    assert 1.0 < cost.profile.get_s(10_000) < 1.3


def test_too_few_steps_change_nothing() -> None:
    cost = PrefillCost()
    for number in range(MIN_STEPS):
        assert cost.profile == PrefillProfile()
        cost.on_started(make_turn(f"t{number}", 1000))
        cost.observe(StepView(0.0, 1.0, 1000, 1))
    assert cost.profile == PrefillProfile()  # their weights have decayed to just below so many
    cost.on_started(make_turn("last", 1000))
    cost.observe(StepView(0.0, 1.0, 1000, 1))
    assert cost.profile.get_s(1000) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "step"),
    [
        (1000, StepView(0.0, 1.0, 2000, 1)),  # 1,000 of its tokens are of nobody who is known
        (100, StepView(0.0, 1.0, 100, 1)),  # as long as a pass over the weights, whatever its tokens
        (1000, StepView(0.0, 0.0, 1000, 1)),  # took no time
        (1000, StepView(0.0, 1.0, 30, 30)),  # only decodes
    ],
)
def test_steps_that_teach_nothing(num_prompt_tokens: int, step: StepView) -> None:
    cost = PrefillCost()
    for number in range(4 * MIN_STEPS):
        turn = make_turn(f"t{number}", num_prompt_tokens)
        cost.on_started(turn)
        cost.observe(step)
        cost.on_stopped(turn)
    assert cost.profile == PrefillProfile()


def test_a_turn_that_was_cut_off_does_not_count_as_the_next_one_s_prefill() -> None:
    cost = PrefillCost()
    cost.on_started(make_turn("gone", 50_000))
    cost.on_stopped(make_turn("gone", 50_000))
    run_turns(cost, TRUE, 60)
    assert cost.profile.get_s(4000) == pytest.approx(TRUE.get_s(4000) + REQUEST_S, rel=0.05)
    assert "gone" not in repr(cost)


def test_no_coefficient_is_negative_whatever_is_seen() -> None:
    cost = PrefillCost()
    for number in range(50):
        num_tokens = 500 + 100 * number
        cost.on_started(make_turn(f"t{number}", num_tokens))
        cost.observe(StepView(0.0, 1.0 - number / 60, num_tokens, 1))  # more tokens, less time
        profile = cost.profile
        assert min(profile.fixed_s, profile.token_s, profile.token_pair_s) >= 0


def test_a_step_may_have_many_whole_prompts() -> None:
    cost = PrefillCost()
    for number in range(40):
        cost.on_started(make_turn(f"t{number}", 100))
    cost.on_started(make_turn("next", 500))
    cost.observe(StepView(0.0, 0.4, 40 * 100 + 7, 40 + 7))  # and seven decodes
    assert cost._pending == {"next": (500, 0)}


def test_a_given_profile_is_kept() -> None:
    cost = PrefillCost(PrefillProfile(0.0, 0.01, 0.0))
    run_turns(cost, TRUE, 40)
    assert cost.profile.get_s(100) == pytest.approx(1.0)


def test_reload_by_hand() -> None:
    cost = PrefillCost(PrefillProfile(0.0, 0.01, 0.0))
    assert get_reload_s(160, cost, make_view()) == pytest.approx(1.6)
    # 10 blocks of 0.02 s behind a queue of 0.5 s.
    tier = TierView("host", 5000, 4000, 0.02, 0.5)
    assert get_reload_s(160, cost, make_view(tier)) == pytest.approx(0.7)
    # A link with a long queue: computing is sooner.
    assert get_reload_s(160, cost, make_view(TierView("host", 5000, 4000, 0.02, 9.0))) == pytest.approx(1.6)


def test_what_it_learned_survives_a_restart() -> None:
    before, after = PrefillCost(), PrefillCost()
    run_turns(before, TRUE, 30)
    after.set_state(json.loads(json.dumps(before.get_state())))
    assert after.profile == before.profile


def test_steps_too_few_to_learn_from_are_kept_too() -> None:
    before, after = PrefillCost(), PrefillCost()
    run_turns(before, PrefillProfile(0.01, 1e-4, 1e-9), 2)
    assert before.profile == PrefillProfile()
    after.set_state(json.loads(json.dumps(before.get_state())))
    assert after.get_state() == before.get_state() != PrefillCost().get_state()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"weight": 20, "moments": [[1.0]]},
        {"weight": "x", "moments": []},
        {"weight": 9, "moments": [[float("nan")] * 5] * 4},
        {"weight": -1, "moments": [[1.0] * 5] * 4},
        {"weight": 9, "moments": [[1.7e308] * 5] * 4},
        {"weight": 9, "moments": [[5e-324, 0, 0, 0, 1.0], [0, 5e-324, 0, 0, 1.0], *[[0.0] * 5] * 2]},
    ],
)
def test_a_state_that_is_none_changes_nothing(state: dict) -> None:
    cost = PrefillCost()
    run_turns(cost, TRUE, 30)
    before = repr(cost)
    with pytest.raises((KeyError, ValueError)):
        cost.set_state(state)
    assert repr(cost) == before


def test_the_fit_of_a_profile_is_a_prefill_curve(tmp_path: Path) -> None:
    """A prompt costs what the fitted step cost says of it."""
    line = Line((0.02, 1e-4, 6e-9), 10, 1.0, 0.0)
    fit = FittedStepCost(prefill=line, decode=line)
    fit.save(tmp_path / "costs.json")
    profile = read_prefill_profile(tmp_path / "costs.json")
    for prefill in ((3000, 0), (500, 8000)):
        assert get_step_s(profile, *prefill) == pytest.approx(fit.seconds(StepBatch.of(prefills=[prefill])))
    given = load_policy("continuum", {"prefill_profile": str(tmp_path / "costs.json")})
    assert given._try_get_profile() == profile  # type: ignore[attr-defined]
    both = {"prefill_profile": str(tmp_path / "costs.json"), "prefill_token_s": 1e-4}
    with pytest.raises(ConfigError, match="not both"):
        load_policy("continuum", both)
    with pytest.raises(ConfigError, match="no such file"):
        load_policy("continuum", {"prefill_profile": str(tmp_path / "none.json")})
    (tmp_path / "other.json").write_text('{"prefill": {"coefficients": [1.0]}}')
    with pytest.raises(DataError, match="must be 3 numbers"):
        read_prefill_profile(tmp_path / "other.json")
