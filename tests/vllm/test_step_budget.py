"""A policy's step budget, where vLLM can bear one, and steps with drafts as a policy is told of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import DraftTokenIds

import tenuto.vllm
from tenuto.core.engine import StepSize
from tenuto.core.errors import ConfigError
from tenuto.vllm.compat.scheduler import (
    get_reason_for_full_steps,
    get_tokens_per_prompt,
    set_tokens_per_prompt,
)
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

SHORT_STEPS = {"policy": "tests.vllm.policies:OneJobAtATime", "options": {"step_tokens": 16}}


def start(config: Any, *, depth: int = 1) -> Engine:
    return Engine(make_scheduler(tenuto.vllm.Scheduler, config), depth=depth)


def get_first_step_tokens(engine: Engine) -> int:
    engine.scheduler.add_request(make_request("r", [5] * 100, max_tokens=3))
    return int(engine.step().total_num_scheduled_tokens)


def test_a_policy_s_budget_bounds_the_step() -> None:
    assert get_first_step_tokens(start(make_config(tenuto=SHORT_STEPS))) == 16


@pytest.mark.parametrize("policy", ["stock", "continuum", "tenuto"])
def test_the_operator_bounds_the_steps_of_every_policy(policy: str) -> None:
    settings = {"policy": policy, "step_tokens": 32}
    engine = start(make_config(tenuto=settings))
    assert get_first_step_tokens(engine) == 32
    assert not engine.scheduler.driver.bounds_steps  # a fixed size costs nothing per step
    engine.run()


def test_a_fixed_size_above_vllm_s_budget_changes_nothing() -> None:
    assert get_first_step_tokens(start(make_config(tenuto={"policy": "stock", "step_tokens": 10**6}))) == 100


def test_adaptive_steps_learn_beside_a_policy_that_hears_no_steps(clock: Clock) -> None:
    engine = start(make_config(tenuto={"policy": "stock", "step_tokens": "adaptive"}))
    driver = engine.scheduler.driver
    assert driver.bounds_steps and not driver.policy.overrides("on_step")
    get_first_step_tokens(engine)
    engine.run()
    assert driver._step_chooser._num_prompt_tokens > 0
    assert not start(make_config(tenuto={"policy": "stock"})).scheduler.driver.bounds_steps


@pytest.mark.parametrize(("given", "expected"), [(0, 20), (7, 7)])
def test_a_step_may_bound_each_prompt_and_what_the_operator_set_comes_first(
    given: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(make_config(tenuto={"policy": "stock", "step_tokens": "adaptive"}))
    set_tokens_per_prompt(engine.scheduler, given)
    monkeypatch.setattr(engine.scheduler.driver, "get_step_size", lambda *_, **__: StepSize(50, 20))
    for name in ("a", "b"):
        engine.scheduler.add_request(make_request(name, [5] * 100, max_tokens=3))
    assert engine.step().num_scheduled_tokens == {"a": expected, "b": expected}
    assert get_tokens_per_prompt(engine.scheduler) == given
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_left_of_a_plain_request_goes_before_other_prompts(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(make_config(tenuto={"policy": "stock", "step_tokens": "adaptive"}, is_async=depth > 1))
    monkeypatch.setattr(engine.scheduler.driver, "get_step_size", lambda *_, **__: StepSize(60, 40))
    engine.scheduler.add_request(make_request("long", [5] * 200, max_tokens=3))
    engine.step()
    engine.scheduler.add_request(make_request("asks", [6] * 50, max_tokens=3))
    assert engine.step().num_scheduled_tokens == {"long": 40, "asks": 20}
    assert engine.step().num_scheduled_tokens == {"asks": 30, "long": 30}
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_turns_that_decode_have_a_token_in_every_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a prompt that is computed in parts, and while the rest of a plain request goes first."""
    engine = start(make_config(tenuto={"policy": "stock", "step_tokens": "adaptive"}, is_async=depth > 1))
    size = StepSize(60, 40)
    monkeypatch.setattr(engine.scheduler.driver, "get_step_size", lambda *_, **__: size)
    engine.scheduler.add_request(make_request("decodes", [4] * 8, max_tokens=30))
    engine.step()
    engine.scheduler.add_request(make_request("long", [5] * 300, max_tokens=3))
    engine.scheduler.add_request(make_request("short", [6] * 9, max_tokens=30))
    assert engine.step().num_scheduled_tokens == {"decodes": 1, "long": 40, "short": 9}
    engine.scheduler.add_request(make_request("asks", [7] * 50, max_tokens=30))
    assert engine.step().num_scheduled_tokens == {"decodes": 1, "short": 1, "long": 40, "asks": 18}
    size = StepSize(20)
    assert engine.step().num_scheduled_tokens == {"decodes": 1, "short": 1, "asks": 18}
    assert engine.step().num_scheduled_tokens == {"decodes": 1, "short": 1, "asks": 14, "long": 4}
    assert engine.step().num_scheduled_tokens == {"decodes": 1, "short": 1, "asks": 1, "long": 17}
    engine.run()


def test_only_steps_that_may_have_prefill_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(make_config(tenuto={"policy": "stock", "step_tokens": "adaptive"}))
    only_decodes = []

    def get_step_size(now_s: float, most: int, **facts: bool) -> StepSize:
        only_decodes.append(facts["only_decodes"])
        return StepSize(min(most, 40))

    monkeypatch.setattr(engine.scheduler.driver, "get_step_size", get_step_size)
    engine.scheduler.add_request(make_request("first", [5] * 100, max_tokens=9))
    for step in range(7):
        if step == 5:
            engine.scheduler.add_request(make_request("second", [6] * 8, max_tokens=3))
        engine.step()
    # Its prompt takes 40, 40 and 20 tokens; the last of these steps is not full. Then the second one comes.
    assert only_decodes == [False, False, False, False]
    engine.run()


@pytest.mark.parametrize("wrong", ["fast", 0, -1, 1.5, True])
def test_a_wrong_size_is_refused_at_start(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="step_tokens"):
        start(make_config(tenuto={"policy": "stock", "step_tokens": wrong}))


def make_unchunked(settings: Any) -> Any:
    return make_config(tenuto=settings, enable_chunked_prefill=False, max_num_batched_tokens=8192)


def make_speculative(settings: Any) -> Any:
    return make_config(tenuto=settings, num_drafts=3)


def make_whole_items(settings: Any) -> Any:
    return make_config(tenuto=settings, disable_chunked_mm_input=True)


SIZES = [SHORT_STEPS, {"policy": "stock", "step_tokens": 16}, {"policy": "stock", "step_tokens": "adaptive"}]


@pytest.mark.parametrize("settings", SIZES)
@pytest.mark.parametrize("make", [make_unchunked, make_speculative, make_whole_items])
def test_the_budget_is_vllm_s_own_where_a_step_must_take_something_whole(make: Any, settings: Any) -> None:
    engine = start(make(settings))
    assert get_first_step_tokens(engine) == 100
    engine.run()


@pytest.mark.parametrize("attribute", ["need_mamba_block_aligned_split", "is_encoder_decoder"])
def test_the_budget_is_vllm_s_own_for_models_that_need_whole_chunks(
    monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    """Their layers do not run here: vLLM's own word for them is planted."""
    scheduler = make_scheduler(tenuto.vllm.Scheduler, make_config(tenuto=SHORT_STEPS))
    assert get_reason_for_full_steps(scheduler) is None
    assert hasattr(scheduler, attribute)
    monkeypatch.setattr(scheduler, attribute, True)
    assert get_reason_for_full_steps(scheduler) is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_no_prefill(clock: Clock, depth: int) -> None:
    """With three drafts a request takes four tokens of a step, and decodes one all the same."""
    settings = {"policy": "tests.vllm.policies:Watching"}
    config = make_config(is_async=depth > 1, tenuto=settings, num_drafts=3)
    engine = start(config, depth=depth)
    for name in ("a", "b"):
        engine.scheduler.add_request(make_request(name, [ord(name)] * 40, max_tokens=20))
    taken = []
    for _ in range(8):
        output = engine.step()
        taken.append(output.total_num_scheduled_tokens)
        if depth == 1:
            drafts = DraftTokenIds(["a", "b"], [[7, 7, 7], [7, 7, 7]])
            engine.scheduler.update_draft_token_ids(drafts)
    assert 2 * (1 + 3) in taken
    steps = engine.scheduler.driver.policy.steps
    # 2 × 40 prompt tokens in the first step, then a token for each.
    assert [(step.num_tokens, step.num_requests) for step in steps] == [(80, 2)] + [(2, 2)] * (len(steps) - 1)
    assert len(steps) > 4


def test_a_tick_sees_the_engine_before_the_step_whether_turns_wait_or_not(clock: Clock) -> None:
    """In the simulator too. A policy may compare the memory in use with a bound."""
    engine = start(make_config(tenuto={"policy": "tests.vllm.policies:Watching"}))
    pool, policy = engine.scheduler.kv_cache_manager.block_pool, engine.scheduler.driver.policy
    engine.scheduler.add_request(make_request("a", [7] * 40, max_tokens=80))
    engine.step()
    before = []
    for _ in range(4):
        while engine.scheduler.requests["a"].num_computed_tokens % 16:
            engine.step()
        clock.now_s += 6.0
        # The next step takes a block.
        before.append(pool.get_num_free_blocks())
        engine.step()
    assert policy.free_blocks[1:] == before
