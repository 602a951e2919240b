"""break-even: hold times computed by hand, the paper's own among them, and what it does not know."""

from __future__ import annotations

import dataclasses

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.requests import Hints
from tenuto.core.types import (
    EngineView,
    Job,
    Keep,
    Lease,
    Offload,
    TierView,
    ToolCall,
    Turn,
    Yields,
)
from tenuto.policies.published.break_even import BreakEven
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.workload import load_workload
from tests.policies.simulated import get_ends_s, simulate
from tests.support.toy_engine import ToyEngine, make_tokens

VIEW = EngineView(10.0, 16, 100, 90, 1, 2, 2048)
HOST = (TierView("host", 5000, 0, 0.001, 0.0),)


def make_turn(num_prompt_tokens: int = 100, **facts) -> Turn:
    return Turn("t", Job("j", 0.0, 1), 0.0, num_prompt_tokens, 20, tool=ToolCall("ls"), **facts)


def test_it_holds_until_the_memory_has_cost_as_much_as_the_prefill() -> None:
    # 120 tokens take 0.12 s to compute and are 120 / 1,600 of the cache: 1.6 s.
    assert BreakEven(prefill_token_s=0.001).retain(make_turn(), VIEW) == Keep(11.6, yields=Yields.ALWAYS)


@pytest.mark.parametrize("num_prompt_tokens", [20, 100, 800])
def test_while_prefill_is_linear_all_contexts_break_even_at_the_same_time(num_prompt_tokens: int) -> None:
    answer = BreakEven(prefill_token_s=0.001).retain(make_turn(num_prompt_tokens), VIEW)
    assert isinstance(answer, Keep)
    assert answer.until_s == pytest.approx(11.6)


def test_attention_makes_long_contexts_worth_more() -> None:
    policy = BreakEven(prefill_token_s=0.001, prefill_token_pair_s=1e-5)
    # (0.12 + 0.144) · 1,600 / 120
    assert policy._get_hold_s(120, VIEW) == pytest.approx(3.52)


def test_the_published_break_even_times() -> None:
    # arXiv 2608.30830: 3,000 tokens in a cache of 680,768, 0.479 s of prefill: about 109 s against having it
    # computed again and 1.13 s against having it in host memory.
    policy = BreakEven(prefill_token_s=0.479 / 3000)
    pool = dataclasses.replace(VIEW, num_blocks=680_768 // 16)
    assert policy._get_hold_s(3000, pool) == pytest.approx(109, rel=0.01)
    assert policy._get_hold_s(3000, dataclasses.replace(pool, tiers=HOST)) == pytest.approx(1.13, rel=0.01)


def test_with_a_tier_the_hold_is_short_and_firm() -> None:
    policy = BreakEven(prefill_token_s=0.001, load_cost_s=0.03)
    answer = policy.retain(make_turn(), dataclasses.replace(VIEW, tiers=HOST))
    assert answer == Keep(10.4, yields=Yields.ON_DEADLOCK)  # 0.03 · 1,600 / 120


def test_a_short_context_is_not_worth_a_load() -> None:
    policy = BreakEven(prefill_token_s=1e-5, load_cost_s=0.03)
    view = dataclasses.replace(VIEW, tiers=HOST)
    assert policy._get_hold_s(120, view) == policy._get_hold_s(120, VIEW) == pytest.approx(0.016)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_then_it_stores_what_nobody_waits_for(is_waiting: bool) -> None:
    lease = Lease(make_turn(), 8.0, 10.0, 0.0, 5, next_turn_waiting=is_waiting)
    assert isinstance(BreakEven().reconsider(lease, VIEW), Keep if is_waiting else Offload)


def test_on_an_engine_the_blocks_are_stored_when_it_breaks_even() -> None:
    engine = ToyEngine(BreakEven(prefill_token_s=0.01), 40)
    engine.arrive("t", 0.0, make_tokens(0, 18), make_tokens(500, 3), Hints(job_id="j"))
    engine.start_first(0.0)
    engine.finish("t", 0.0, tool=ToolCall("ls"))
    # 0.01 s · 160 tokens of cache, whatever the context.
    assert engine.driver.get_next_deadline_s() == pytest.approx(1.6)
    assert engine.driver.expire(1.59) == 0
    assert engine.driver.expire(1.61) == 1
    assert [len(blocks) for blocks in engine.stored] == [5]


class A100Steps(StepCost):
    """About an 8B model on an A100."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.02 + 6e-5 * batch.num_prefill_tokens + 1e-4 * batch.num_decodes


def test_its_known_weakness_it_holds_as_long_on_an_idle_server_as_on_one_with_a_queue() -> None:
    policy = BreakEven(prefill_token_s=0.001)
    crowded = dataclasses.replace(VIEW, num_free_blocks=0, num_running=64, num_waiting=500)
    assert policy.retain(make_turn(), crowded) == policy.retain(make_turn(), VIEW)


@pytest.mark.slow
def test_its_known_weakness_overloaded_it_is_little_better_than_stock() -> None:
    """Everyone holds for as long, so nobody has enough: the order of turns decides, and that is stock's."""
    jobs = load_workload("ab8", jps=3, window_s=12, seed=1).jobs
    mean_s = {}
    for name in ("stock", "break-even", "continuum"):
        records = simulate(name, jobs, num_blocks=16_000, max_num_batched_tokens=8192, cost=A100Steps())
        ends_s = get_ends_s(records)
        mean_s[name] = sum(ends_s[job.job_id] - job.arrival_s for job in jobs) / len(jobs)
    assert mean_s["break-even"] < 1.02 * mean_s["stock"]
    assert mean_s["break-even"] > 1.4 * mean_s["continuum"]


def test_a_profile_in_the_settings_needs_its_main_part() -> None:
    assert BreakEven(prefill_token_s=0.5)._prefill.profile.get_s(2) == 1.0
    with pytest.raises(ConfigError, match="need prefill_token_s"):
        BreakEven(prefill_fixed_s=0.5)
