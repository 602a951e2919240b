"""Step sizes by hand, on engines whose step times are known."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tenuto.core.types import EngineView, Job, StepView, Turn
from tenuto.estimators.step_size import (
    AdaptiveSteps,
    TurnSizes,
    choose_step_tokens,
    count_prefilling,
    make_step_chooser,
)
from tenuto.estimators.step_times import StepTimes

MOST = 8192


def make_times() -> StepTimes:
    """A pass over the weights takes 8 ms, a prefill token 40 us, one who decodes 0.2 ms."""
    times = StepTimes()
    for n in range(1, 41):
        times.observe(n, n, 0.008 + 2e-4 * n)
        times.observe(100 * n, 1, 4e-3 * n)
    return times


def make_sizes(num_computed: int, num_generated: int) -> TurnSizes:
    sizes = TurnSizes()
    sizes.observe(num_computed, num_generated)
    return sizes


def test_before_anything_is_known_the_engine_decides() -> None:
    assert choose_step_tokens(StepTimes(), make_sizes(1000, 100), 10, 1, 1.0, MOST) is None
    assert choose_step_tokens(make_times(), TurnSizes(), 10, 1, 1.0, MOST) is None


def test_the_choice_has_the_least_loss() -> None:
    # 10 decode in 10 ms; 200 wait; turns compute 1,600 tokens and generate 20.
    def get_loss(num_tokens: int) -> float:
        step_s = 0.010 - 0.008 + math.hypot(0.008, (num_tokens - 10) * 4e-5)
        return 200 * step_s / (num_tokens - 10) + 20 / 1600 * (step_s - 0.010)

    best = min((512, 1024, 2048, 4096, 8192), key=get_loss)
    assert best == 1024
    assert choose_step_tokens(make_times(), make_sizes(1600, 20), 10, 200, 1.0, MOST) == best


def test_long_outputs_want_small_steps_and_long_queues_large_ones() -> None:
    times = make_times()
    by_output = [choose_step_tokens(times, make_sizes(2000, n), 10, 50, 1.0, MOST) for n in (1, 20, 500)]
    assert by_output == sorted(by_output, reverse=True) and by_output[0] > by_output[-1] == 512
    by_queue = [choose_step_tokens(times, make_sizes(2000, 20), 10, n, 1.0, MOST) for n in (1, 50, 5000)]
    assert by_queue == sorted(by_queue) and by_queue[0] < by_queue[-1]


@pytest.mark.parametrize("most", [64, 300, 512, 700, 2048])
def test_it_stays_within_the_engines_own_limit(most: int) -> None:
    chosen = choose_step_tokens(make_times(), make_sizes(2000, 100), 10, 3, 0.5, most)
    assert chosen is not None and min(512, most) <= chosen <= most


def test_more_who_decode_than_the_smallest_step_has_tokens_for() -> None:
    chosen = choose_step_tokens(make_times(), make_sizes(2000, 100), 600, 3, 0.5, MOST)
    assert chosen is not None and chosen > 600


def test_sizes_follow_the_latest_turns() -> None:
    sizes = make_sizes(1000, 10)
    for _ in range(2000):
        sizes.observe(100, 50)
    assert sizes.computed / sizes.weight == pytest.approx(100, rel=0.01)
    assert sizes.generated / sizes.weight == pytest.approx(50, rel=0.01)


def test_who_waits_for_memory_is_not_helped_by_larger_steps() -> None:
    sizes = make_sizes(1000, 20)
    assert count_prefilling(TurnSizes(), 50, 10**6, 0.5) == 1.0
    # Steps have room for more: whoever waits does not wait for prefill.
    assert count_prefilling(sizes, 50, 10**6, 0.0) == 1.0
    # Half of the steps are full: half of those that wait, and 0.5 / 0.5^2 to come.
    assert count_prefilling(sizes, 50, 10**6, 0.5) == 1 + 25 + 2
    # There is room for four of them.
    assert count_prefilling(sizes, 50, 4000, 0.5) == 1 + 2 + 2
    assert count_prefilling(sizes, 0, 10**6, 1.0) == pytest.approx(1 + 0.8 / 0.04)


def test_few_who_decode_are_held_up_little_while_prefill_is_rare() -> None:
    # Outputs are long, but only one turn decodes now; it counts in full once prefill never ends.
    times, sizes = make_times(), make_sizes(2000, 500)
    rare, steady = (choose_step_tokens(times, sizes, 1, 3, share, MOST) for share in (0.0, 1.0))
    assert rare is not None and steady is not None and rare > steady


def test_the_chooser_learns_from_steps_and_turns() -> None:
    chooser = AdaptiveSteps()
    for count in range(1, 21):
        chooser.observe_step(StepView(0.0, 0.01 + 1e-3 * count, count, count))
        chooser.observe_step(StepView(0.0, 1e-4 * 100 * count, 100 * count, 1))
    few = EngineView(100.0, 16, 1000, 900, 10, 0, 8192)
    assert chooser.choose(few) is None  # no turn is known yet
    for n in range(20):
        chooser.observe_turn(Turn(f"t{n}", Job("a", 0.0, 1), 0.0, 1000, num_output_tokens=10))
    assert chooser.choose(dataclasses.replace(few, num_running=1)) is None
    many = dataclasses.replace(few, num_waiting=4000, num_free_blocks=100_000)
    # Steps have room: those who wait, wait for memory.
    assert chooser.choose(many) == chooser.choose(few)
    for _ in range(500):
        chooser.observe_step(StepView(0.0, 0.1, 1000, 1, is_full=True))
    assert chooser.choose(few) < chooser.choose(many)
    assert chooser.choose(few) == chooser.choose(dataclasses.replace(many, num_free_blocks=0))


def test_only_adaptive_steps_need_a_chooser() -> None:
    assert isinstance(make_step_chooser("adaptive"), AdaptiveSteps)
    assert make_step_chooser(512) is None and make_step_chooser(None) is None
