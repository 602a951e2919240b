"""The scheduler by hand: small engines whose every step is worked out in the comments."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.core.engine import StepSize
from tenuto.core.limits import Limits
from tenuto.core.loader import load_policy
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.request import Request
from tests.support.sim_checks import check_integrity

STOCK = load_policy("stock")


def make_scheduler(
    policy: Policy = STOCK, *, num_blocks: int = 100, limits: Limits | None = None, **settings: Any
) -> Scheduler:
    """An engine with blocks of 4 tokens, `num_blocks` of them usable."""
    kv_names = ("windows", "retention_interval", "max_model_len", "reserve_full_sequence", "watermark")
    kv_names += ("num_lookahead_tokens",)
    kv = {name: settings.pop(name) for name in kv_names if name in settings}
    config = EngineConfig(kv=KvConfig(num_blocks=num_blocks + 1, block_size=4, **kv), **settings)
    return Scheduler(config, policy) if limits is None else Scheduler(config, policy, limits)


def make_request(name: str, num_prompt: int = 8, num_output: int = 4, **more: Any) -> Request:
    """A request whose prompt and output are its own, of a job of its own."""
    more = {"arrival_s": 0.0, "hints": Hints(job_id=name), **more}
    return Request(name, [(f"{name}-prompt", num_prompt)], (f"{name}-output", num_output), **more)


def step(scheduler: Scheduler, now_s: float = 0.0) -> dict[str, int]:
    """Run one step; the tokens it gave to each request."""
    each = scheduler.schedule(now_s)
    scheduler.finish_step(each, now_s)
    check_integrity(scheduler)
    return each.num_tokens


def run(scheduler: Scheduler) -> list[dict[str, int]]:
    """Run until no request is left; the steps."""
    steps = []
    while scheduler.state.requests:
        steps.append(step(scheduler))
        assert len(steps) < 1000, "the engine stalled"
    return steps


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 25, 3), 0.0)
    batches = []
    while scheduler.state.requests:
        each = scheduler.schedule(0.0)
        batches.append(each.batch)
        scheduler.finish_step(each, 0.0)
    assert batches == [
        # n tokens at context c visit n * (c + n / 2) pairs.
        StepBatch(1, 10, 0, 10 * 5.0, 0, 0),
        StepBatch(1, 10, 10, 10 * 15.0, 0, 0),
        StepBatch(1, 5, 20, 5 * 22.5, 0, 0),  # reaches the prompt's end and samples the first of 3 tokens
        StepBatch(0, 0, 0, 0.0, 1, 25),
        StepBatch(0, 0, 0, 0.0, 1, 26),
    ]


def test_running_requests_come_first_and_share_one_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 8, 3), 0.0)
    scheduler.add_request(make_request("b", 8, 3), 0.0)
    # a takes 8 of 10, b the other 2; then a decodes with one token and b gets the 6 it lacks.
    assert run(scheduler) == [{"a": 8, "b": 2}, {"a": 1, "b": 6}, {"a": 1, "b": 1}, {"b": 1}]


def test_the_threshold_bounds_long_prefills_unless_they_are_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=5)
    scheduler.add_request(make_request("a", 30, 1), 0.0)
    assert step(scheduler) == {"a": 20}
    scheduler.add_request(make_request("b", 12, 1), 0.0)
    assert step(scheduler) == {"a": 5, "b": 5}
    assert step(scheduler) == {"a": 5, "b": 5}
    assert step(scheduler) == {"b": 2}


def test_turns_that_decode_have_a_token_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a prompt that is computed in parts, and while the rest of a plain request goes first."""
    scheduler = make_scheduler(num_blocks=200, max_num_batched_tokens=60, step_tokens="adaptive")
    size = StepSize(60, 40)
    monkeypatch.setattr(scheduler.driver, "get_step_size", lambda *_, **__: size)
    scheduler.add_request(make_request("decodes", 8, 30), 0.0)
    assert step(scheduler) == {"decodes": 8}
    scheduler.add_request(make_request("long", 300, 3), 0.0)
    scheduler.add_request(make_request("short", 9, 30), 0.0)
    assert step(scheduler) == {"decodes": 1, "long": 40, "short": 9}
    scheduler.add_request(make_request("asks", 50, 30), 0.0)
    assert step(scheduler) == {"decodes": 1, "short": 1, "long": 40, "asks": 18}
    size = StepSize(20)
    assert step(scheduler) == {"decodes": 1, "short": 1, "asks": 18}
    assert step(scheduler) == {"decodes": 1, "short": 1, "asks": 14, "long": 4}
    assert step(scheduler) == {"decodes": 1, "short": 1, "asks": 1, "long": 17}
    run(scheduler)


def test_the_next_turn_hits_all_full_blocks_but_the_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, 4), 0.0)
    run(scheduler)
    text = [("a-prompt", 8), ("a-output", 4)]
    # 8 + 4 tokens, the last of which was sampled but not computed: 11 // 4 = 2 blocks are cached.
    scheduler.add_request(Request("b", [*text, ("new", 5)], ("b-output", 1), 0.0), 0.0)
    each = scheduler.schedule(0.0)
    assert (each.new, each.num_tokens) == ({"b": 8}, {"b": 9})
    scheduler.finish_step(each, 0.0)
    # Of the first 8 tokens alone only one block: the last token has to be computed, so its block is not hit.
    scheduler.add_request(Request("c", text[:1], ("c-output", 1), 0.0), 0.0)
    each = scheduler.schedule(0.0)
    assert (each.new, each.num_tokens) == ({"c": 4}, {"c": 4})


def test_the_tail_is_preempted_and_comes_back_from_the_cache() -> None:
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add_request(make_request("a", 11, 6), 0.0)
    scheduler.add_request(make_request("b", 11, 6), 0.0)
    # Prompts of 11 tokens fill 3 blocks each; token 13 needs a fourth, and only one is left.
    assert step(scheduler) == {"a": 11, "b": 11}
    assert step(scheduler) == {"a": 1, "b": 1}
    each = scheduler.schedule(0.0)
    assert (each.num_tokens, each.preempted) == ({"a": 1}, {"b": 12})
    scheduler.finish_step(each, 0.0)
    # b's 3 cached blocks are free, and one blank: 13 tokens fit again, and 12 of them are still there.
    each = scheduler.schedule(0.0)
    assert (each.num_tokens, each.resumed) == ({"a": 1}, {})
    assert scheduler.state.waiting.get_first() is scheduler.state.requests["b"]
    scheduler.finish_step(each, 0.0)
    steps = run(scheduler)
    # a goes on alone for two steps and ends with 6 outputs; then b computes the 13th token and 4 more.
    assert steps == [{"a": 1}, {"a": 1}, {"b": 1}, {"b": 1}, {"b": 1}, {"b": 1}]


def test_where_blocks_differ_the_policy_sees_the_first_layer_groups_size() -> None:
    """As in the plugin."""
    kv = KvConfig(num_blocks=101, block_size=4, windows=(None, 16), block_sizes=(8, 4))
    view = Scheduler(EngineConfig(kv=kv), STOCK).driver.get_view(0.0)
    assert view.block_size == 8
