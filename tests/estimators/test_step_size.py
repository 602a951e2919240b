"""Step sizes by hand, on engines whose step times are known."""

from __future__ import annotations

import dataclasses

import pytest

from tenuto.core.engine import StepSize
from tenuto.core.types import EngineView, Job, StepView, ToolCall, Turn
from tenuto.estimators.step_size import (
    FIRST_STEP_TOKENS,
    LOOK_EVERY,
    SIZES,
    AdaptiveSteps,
    FullShares,
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
    for n in range(80):
        # Beside ten who decode in 10 ms: the pass rides along.
        size = 2000 if n % 4 else 1000
        times.observe(10 + size, 10, 0.010 - 0.008 + 4e-5 * size)
    return times


def make_finished(num_computed: int, num_generated: int, *, num_hit: int = 0) -> Turn:
    """A turn that computed so many of its prompt's tokens, hit the others, and generated so many."""
    prompt = {"num_prompt_tokens": num_hit + num_computed, "num_hit_tokens": num_hit}
    return Turn("a/1", Job("a", 0.0, 1), 0.0, **prompt, num_output_tokens=num_generated)


def make_sizes(num_computed: int, num_generated: int, *, num_hit: int = 0) -> TurnSizes:
    sizes = TurnSizes()
    for _ in range(500):
        sizes.observe(make_finished(num_computed, num_generated, num_hit=num_hit))
    return sizes


def make_shares(share: float) -> FullShares:
    """Every size fills this share of the steps."""
    shares = FullShares(SIZES)
    most = SIZES[-1]
    while shares.get(most) < share:
        shares.observe_arrival(most)
        shares.observe_step(most, 0, is_full=True)
    while shares.get(most) > share:
        shares.observe_step(1, 1, is_full=False)
    return shares


FULL = make_shares(0.999)
HALF = make_shares(0.5)
EMPTY = FullShares(SIZES)


def test_before_anything_is_known_steps_are_of_a_middle_size() -> None:
    assert choose_step_tokens(StepTimes(), make_sizes(1000, 100), 10, 1, FULL, MOST) == FIRST_STEP_TOKENS
    assert choose_step_tokens(StepTimes(), TurnSizes(), 10, 1, FULL, 700) == 700


def test_the_choice_has_the_least_loss() -> None:
    # 10 decode in 10 ms; 200 wait; turns compute 1,600 tokens and generate 20.
    def get_loss(num_tokens: int) -> float:
        step_s = 0.010 - 0.008 + (num_tokens - 10) * 4e-5
        lost = 200 * step_s / (num_tokens - 10) + 20 / 1600 * (step_s - 0.010)
        # A turn in 1,600 tokens waits for half a step when its last tokens are computed.
        return lost + step_s / 1600 / 2

    best = min((512, 1024, 2048, 4096, 8192), key=get_loss)
    assert best == 1024
    assert choose_step_tokens(make_times(), make_sizes(1600, 20), 10, 200, FULL, MOST) == best


def test_long_outputs_want_small_steps_and_long_queues_large_ones() -> None:
    times = make_times()
    by_output = [choose_step_tokens(times, make_sizes(2000, n), 10, 50, FULL, MOST) for n in (1, 20, 500)]
    assert by_output == sorted(by_output, reverse=True) and by_output[0] > by_output[-1] == 512
    by_queue = [choose_step_tokens(times, make_sizes(2000, 20), 10, n, FULL, MOST) for n in (1, 50, 5000)]
    assert by_queue == sorted(by_queue) and by_queue[0] < by_queue[-1]


@pytest.mark.parametrize("most", [64, 300, 512, 700, 2048])
def test_it_stays_within_the_engines_own_limit(most: int) -> None:
    chosen = choose_step_tokens(make_times(), make_sizes(2000, 100), 10, 3, HALF, most)
    assert chosen is not None and min(256, most) <= chosen <= most


def test_more_who_decode_than_the_smallest_step_has_tokens_for() -> None:
    chosen = choose_step_tokens(make_times(), make_sizes(2000, 100), 600, 3, HALF, MOST)
    assert chosen is not None and chosen > 600


@pytest.mark.parametrize(
    ("decode_s", "num_decoding", "chosen"), [(0.05, 4, 256), (0.05, 200, 512), (2.0, 4, 1024)]
)
def test_small_steps_are_taken_where_they_are_as_fast(
    decode_s: float, num_decoding: int, chosen: int
) -> None:
    """A prefill token takes 3 ms, as on a CPU: what decoding takes beside hardly counts, or it does."""
    times = StepTimes()
    for n in range(80):
        size = 2000 if n % 4 else 1000
        times.observe(num_decoding, num_decoding, decode_s)
        times.observe(num_decoding + size, num_decoding, decode_s + 3e-3 * size)
    assert choose_step_tokens(times, make_sizes(1000, 2), num_decoding, 20, FULL, 1024) == chosen


@pytest.mark.parametrize(("small_token_s", "chosen"), [(4e-5, 512), (3.2e-5, 512), (2.8e-5, 256)])
def test_small_steps_are_taken_where_prefill_is_cheap_in_them(small_token_s: float, chosen: int) -> None:
    """Beside 14 who decode in 30 ms, a token takes 40 us in larger steps."""
    times = StepTimes()
    for n in range(80):
        times.observe(14, 14, 0.03)
        size = 1000 if n % 4 else 500
        times.observe(14 + size, 14, 0.03 + 4e-5 * size)
    turns = make_sizes(1000, 200)
    assert choose_step_tokens(times, turns, 14, 1, HALF, MOST) == 512
    for _ in range(10):
        times.observe(14 + 200, 14, 0.03 + small_token_s * 200)
    assert choose_step_tokens(times, turns, 14, 1, HALF, MOST) == chosen


def test_sizes_follow_the_latest_turns() -> None:
    sizes = make_sizes(1000, 10)
    for _ in range(2000):
        sizes.observe(make_finished(100, 50, num_hit=850))
    assert sizes.computed / sizes.weight == pytest.approx(100, rel=0.01)
    assert sizes.generated / sizes.weight == pytest.approx(50, rel=0.01)
    assert sizes.held / sizes.weight == pytest.approx(1000, rel=0.01)


def test_who_waits_for_memory_is_not_helped_by_larger_steps() -> None:
    sizes = make_sizes(700, 20, num_hit=1180)
    # Steps have room for more: whoever waits does not wait for prefill.
    assert count_prefilling(sizes, 50, 10**6, 0.0, 0.0) == 1.0
    # Half of the steps are full: half of those that wait.
    assert count_prefilling(sizes, 50, 10**6, 0.5, 0.0) == 1 + 25
    # There is room for what four of them compute, and a quarter of what they hit and generate.
    assert count_prefilling(sizes, 50, 4000, 0.5, 0.0) == pytest.approx(1 + 2, rel=0.02)
    # While the engine is busy for half of the time, (2 - 0.5) * 0.5 / (2 * 0.5^2) more are to come.
    assert count_prefilling(sizes, 0, 10**6, 0.5, 0.5) == pytest.approx(1 + 1.5)
    assert count_prefilling(sizes, 0, 10**6, 1.0, 1.0) == pytest.approx(1 + 12)


def test_steps_have_room_for_prefill_beside_many_who_decode() -> None:
    times, sizes = make_times(), make_sizes(150, 1500)
    for num_decoding in (200, 400, 900):
        chosen = choose_step_tokens(times, sizes, num_decoding, 1, HALF, MOST)
        assert chosen is not None and chosen >= 2 * num_decoding


def test_who_comes_now_and_then_is_not_made_to_wait_for_a_long_step() -> None:
    """Nobody decodes. Alone, a prompt is computed soonest in long steps; who may come would wait for their
    end."""
    times, rare, often = make_times(), TurnSizes(), TurnSizes()
    for sizes, gap_s in ((rare, 100.0), (often, 0.05)):
        for n in range(200):
            sizes.observe_time(gap_s * n)
            sizes.observe(make_finished(20_000, 1))
    assert often.get_rate() == pytest.approx(20, rel=0.1) and rare.get_rate() < 0.1
    by_rate = [choose_step_tokens(times, sizes, 0, 1, EMPTY, MOST) for sizes in (rare, often)]
    assert by_rate[0] is not None and by_rate[1] is not None and by_rate[0] > by_rate[1]


def test_few_who_decode_are_held_up_little_while_prefill_is_rare() -> None:
    # Outputs are long, but only one turn decodes now; it counts in full once prefill never ends.
    times, sizes = make_times(), make_sizes(2000, 500)
    for _ in range(40):
        # A step that mixes both has a cost of its own here.
        for size in (1000, 2000):
            times.observe(1 + size, 1, 0.0082 + 0.004 + 4e-5 * size)
    rare, steady = (choose_step_tokens(times, sizes, 1, 30, shares, MOST) for shares in (EMPTY, FULL))
    assert rare is not None and steady is not None and rare > steady


def test_prompts_that_fill_small_steps_only_do_not_call_for_small_steps() -> None:
    """Prompts of 700 tokens fill every step of 512, and their turns decode for long. If a step that mixes
    both has a cost of its own, each prompt should have one step."""
    times = StepTimes()
    for n in range(1, 41):
        times.observe(n, n, 0.008 + 2e-4 * n)
    for n in range(80):
        size = 500 if n % 4 else 1000
        times.observe(40 + size, 40, 0.016 + 0.004 + 3e-5 * size)
    shares = FullShares(SIZES)
    for _ in range(300):
        shares.observe_arrival(700)
        shares.observe_step(512, 40, is_full=True)
        shares.observe_step(40 + 228, 40, is_full=False)
    chosen = choose_step_tokens(times, make_sizes(700, 100), 40, 2, shares, MOST)
    always = choose_step_tokens(times, make_sizes(700, 100), 40, 2, FULL, MOST)
    assert chosen is not None and always is not None and chosen >= 1024 > always


def test_the_chooser_learns_from_steps_and_turns() -> None:
    chooser = AdaptiveSteps()
    for count in range(1, 21):
        chooser.observe_step(StepView(0.0, 0.01 + 1e-3 * count, count, count))
        chooser.observe_step(StepView(0.0, 1e-4 * 100 * count, 100 * count, 1))
    few = EngineView(100.0, 16, 1000, 900, 10, 0, 8192)
    for n in range(20):
        chooser.observe_turn(Turn(f"t{n}", Job("a", 0.0, 1), 0.0, 1000, num_output_tokens=10))
    assert chooser.choose(dataclasses.replace(few, num_running=0)) is None
    many = dataclasses.replace(few, num_waiting=4000, num_free_blocks=100_000)
    # Steps have room: those who wait, wait for memory.
    assert chooser.choose(many) == chooser.choose(few)
    for _ in range(500):
        chooser.observe_step(StepView(0.0, 0.1, 1000, 1, is_full=True))
    assert chooser.choose(few) < chooser.choose(many)


@pytest.mark.parametrize(("mixing_s", "num_alike"), [(0.004, 2), (-0.004, 1)])
def test_where_mixing_costs_something_who_waits_counts_twice(
    mixing_s: float, num_alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = AdaptiveSteps()
    for n in range(1, 401):
        chooser.observe_arrival(Turn(f"t{n}", Job("a", 0.0, 1, kind="agent"), 0.0, 1000), 1000)
        size = 500 if n % 4 else 1000
        seconds = 0.010 + mixing_s + 3e-5 * size
        chooser.observe_step(StepView(0.05 * n, seconds, size + 10, 10, is_full=True))
        if n < 41:
            chooser.observe_step(StepView(0.05 * n, 0.008 + 2e-4 * n, n, n, is_full=True))
        chooser.observe_turn(Turn(f"t{n}", Job("a", 0.0, 1), 0.0, 1000, num_output_tokens=50))
    view = EngineView(20.0, 16, 100_000, 100_000, 11, 0, 8192)
    chosen = [chooser.choose(dataclasses.replace(view, num_waiting=n)) for n in range(0, 200, num_alike)]
    assert len(set(chosen)) > 1
    monkeypatch.setattr("tenuto.estimators.step_size.FOLLOWERS", 1)
    for n, size in zip(range(0, 200, num_alike), chosen, strict=True):
        assert chooser.choose(dataclasses.replace(view, num_waiting=num_alike * n)) == size


def test_a_step_in_many_is_larger_to_see_what_tokens_cost() -> None:
    chooser = AdaptiveSteps()
    view = EngineView(100.0, 16, 1000, 900, 10, 0, 8192)
    chosen = []
    for n in range(4 * LOOK_EVERY):
        chooser.observe_step(StepView(0.05 * n, 0.05, 522, 10, is_full=True))
        chosen.append(chooser.choose(view))
    usual = min(each for each in chosen if each is not None)
    larger = [n for n, each in enumerate(chosen[8:], 8) if each != usual]
    assert len(larger) <= 5


def test_only_adaptive_steps_need_a_chooser() -> None:
    assert isinstance(make_step_chooser("adaptive"), AdaptiveSteps)
    assert make_step_chooser(512) is None and make_step_chooser(None) is None


def make_busy() -> tuple[AdaptiveSteps, EngineView, StepSize]:
    """A chooser that has learned, the engine's state, and what it chooses while no plain request waits."""
    chooser = AdaptiveSteps()
    for n in range(1, 101):
        chooser.observe_step(StepView(0.05 * n, 0.05, 522, 10, is_full=True))
    view = EngineView(100.0, 16, 1000, 900, 10, 3, 8192)
    usual = chooser.choose(view)
    assert usual is not None and usual.num_tokens < 4096 and not usual.per_prompt
    return chooser, view, usual


def arrive(chooser: AdaptiveSteps, turn_id: str, num_new_tokens: int, kind: str = "chat") -> None:
    chooser.observe_arrival(Turn(turn_id, Job(turn_id, 0.0, 1, kind=kind), 0.0, 5000), num_new_tokens)


def test_a_plain_request_is_computed_in_one_step_beside_what_the_step_has() -> None:
    chooser, view, usual = make_busy()
    arrive(chooser, "short", 100)
    assert chooser.choose(view) == (usual.num_tokens + 100, usual.num_tokens)
    arrive(chooser, "longer", 3000)
    # No prompt may take the room of another, so the bound of one prompt is the longest of them.
    assert chooser.choose(view) == (3000 + 3100, 3000)
    for turn_id in ("short", "longer"):
        chooser.observe_start(turn_id)
    assert chooser.choose(view) == usual


def test_what_stock_would_not_compute_in_one_step_gets_none_of_its_own() -> None:
    chooser, view, usual = make_busy()
    arrive(chooser, "huge", 8192)
    assert chooser.choose(view) == usual
    for n in range(100):
        arrive(chooser, f"t{n}", 1000)
    assert chooser.choose(view) == (8192, 1000)


def test_turns_of_agents_are_not_plain() -> None:
    chooser, view, usual = make_busy()
    agent = Turn("a", Job("a", 0.0, 1, kind="agent"), 0.0, 100, tool=ToolCall("ls"))
    chooser.observe_turn(agent)
    arrive(chooser, "next", 100, kind="agent")
    assert chooser.choose(view) == usual


def test_a_step_has_room_for_a_block_of_a_prompt_beside_those_who_decode() -> None:
    """Where layers have states a prompt is computed in whole blocks, and these may be larger than a step."""
    chooser, view, usual = make_busy()
    block_size = usual.num_tokens + 100
    assert chooser.choose(dataclasses.replace(view, block_size=block_size)) == StepSize(block_size + 9)
    assert chooser.choose(dataclasses.replace(view, block_size=10_000)) == StepSize(8192)
