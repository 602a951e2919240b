"""Step sizes by hand, on engines whose step times are known."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest

from tenuto.core.engine import PROMPT_WEIGHT, StepSize, get_prompt_weight
from tenuto.core.types import DecodeSteps, Job, StepView, ToolCall, Turn
from tenuto.estimators import step_size
from tenuto.estimators.step_size import (
    AGAIN,
    LOOK_EVERY,
    MIN_STEP_TOKENS,
    PATIENCE,
    SLACK,
    AdaptiveSteps,
    Work,
    choose_step_tokens,
)
from tenuto.estimators.step_times import StepTimes

BUDGET = 8192


def make_times(*, pass_s: float = 0.01, token_s: float = 4e-5) -> StepTimes:
    """A pass over the weights takes 10 ms, one who decodes 0.1 ms, and each prompt token 40 us more."""
    times = StepTimes()
    for n in range(1, 81):
        times.observe(n % 40 + 1, n % 40 + 1, pass_s + 1e-4 * (n % 40 + 1))
    for n in range(80):
        size = 2000 if n % 4 else 1000
        times.observe(10 + size, 10, pass_s + 1e-3 + token_s * size)
    return times


def make_work(prompt_rate: float, answer_share: float = 0.0, busy: float = 1.0) -> Work:
    return Work(prompt_rate, answer_share, busy)


def test_before_anything_is_known_steps_are_of_a_middle_size() -> None:
    assert choose_step_tokens(StepTimes(), 10, make_work(0.0), 1.0, BUDGET) == 4 * MIN_STEP_TOKENS
    assert choose_step_tokens(StepTimes(), 10, make_work(0.0), 1.0, 700) == 700


def get_speed(num_tokens: int, num_decoding: int = 10) -> float:
    """Prompt tokens a second in steps of this size, by `make_times`."""
    num_prompt_tokens = num_tokens - num_decoding
    return num_prompt_tokens / (0.01 + 1e-4 * num_decoding + 4e-5 * num_prompt_tokens)


SIZES = (512, 1024, 2048, 4096, BUDGET)


@pytest.mark.parametrize("rate", [0.0, 5_000.0, 12_000.0])
def test_while_prompts_take_less_than_half_they_are_a_tenth_slower_at_most(rate: float) -> None:
    """Prompt tokens take 40 us each, so 12,500 a second take half."""
    wanted = next(size for size in SIZES if get_speed(size) >= get_speed(BUDGET) / SLACK)
    assert choose_step_tokens(make_times(), 10, make_work(rate), 1.0, BUDGET) == wanted == 2048


def make_riding_times(pass_s: float = 0.02) -> StepTimes:
    """A pass over the weights takes 20 ms. 250 prompt tokens ride along; each further one takes 40 us."""
    times = StepTimes()
    for n in range(1, 401):
        times.observe(n % 80 + 1, n % 80 + 1, pass_s + 1e-4 * (n % 80 + 1))
    for n in range(400):
        size = 2000 if n % 4 else 1000
        times.observe(40 + size, 40, pass_s + 4e-3 + 4e-5 * (size - 250))
    return times


def get_riding_wait(num_tokens: int, num_decoding: int, rate: float, pass_s: float = 0.02) -> float:
    """Seconds that others wait for one more prompt token, by `make_riding_times`."""
    left = get_riding_speed(num_tokens, num_decoding, pass_s) - rate
    if left < (get_riding_speed(BUDGET, num_decoding, pass_s) - rate) / PATIENCE:
        return math.inf
    num_prompt_tokens = num_tokens - num_decoding
    return 1 / left + num_decoding * 4e-5 * max(0, num_prompt_tokens - 250) / num_prompt_tokens


def get_riding_speed(num_tokens: int, num_decoding: int, pass_s: float = 0.02) -> float:
    """Prompt tokens a second, by `make_riding_times`."""
    num_prompt_tokens = num_tokens - num_decoding
    return num_prompt_tokens / (pass_s + 1e-4 * num_decoding + 4e-5 * max(0, num_prompt_tokens - 250))


@pytest.mark.parametrize("num_decoding", [5, 20, 40, 60, 100])
@pytest.mark.parametrize("rate", [100.0, 4_000.0, 8_000.0, 11_000.0])
def test_prompts_ride_along_with_decoding_as_far_as_it_spares_waiting(num_decoding: int, rate: float) -> None:
    """Of sizes that are as good, a tenth aside, the largest; but a step that is fast is large enough."""
    waits = {size: get_riding_wait(size, num_decoding, rate) for size in SIZES}
    best = max(size for size in SIZES if waits[size] <= SLACK * min(waits.values()))
    full = get_riding_speed(BUDGET, num_decoding)
    fast = next(size for size in SIZES if get_riding_speed(size, num_decoding) >= full / SLACK)
    chosen = choose_step_tokens(make_riding_times(), num_decoding, make_work(rate), 1.0, BUDGET)
    assert chosen == min(best, fast) < BUDGET


def test_beside_many_that_decode_steps_are_small() -> None:
    """If all of a step rides along, decoding loses nothing."""
    assert choose_step_tokens(make_riding_times(), 60, make_work(4_000.0), 1.0, BUDGET) == 1024
    assert get_riding_speed(1024, 60) < get_riding_speed(BUDGET, 60) / SLACK


def test_beside_few_that_decode_prompts_go_as_fast_as_they_can() -> None:
    """One who decodes loses less than the prompt would: the smallest step that is fast, a tenth aside."""
    assert choose_step_tokens(make_riding_times(), 1, make_work(100.0), 1.0, BUDGET) == 2048
    assert choose_step_tokens(make_riding_times(pass_s=0.05), 1, make_work(100.0), 1.0, BUDGET) == BUDGET


def test_nobody_waits_over_half_longer_for_a_first_token_than_with_full_steps(monkeypatch) -> None:
    """At 50 ms a pass, steps of 512 or 1,024 tokens would let prompts wait longer than that."""
    wait = partial(get_riding_wait, num_decoding=60, rate=4_000.0, pass_s=0.05)
    assert wait(512) == wait(1024) == wait(2048) == math.inf
    state = make_riding_times(pass_s=0.05), 60, make_work(4_000.0), 1.0, BUDGET
    assert choose_step_tokens(*state) >= 4096
    monkeypatch.setattr(step_size, "PATIENCE", math.inf)
    assert choose_step_tokens(*state) < 4096


@pytest.mark.parametrize("answer_share", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("rate", [13_000.0, 14_000.0, 16_000.0])
def test_when_they_take_more_steps_are_as_small_as_keeps_up_with_them(
    rate: float, answer_share: float
) -> None:
    """Beside the turns that decode once as many answers end as prompts."""
    wanted = next(size for size in SIZES if get_speed(size, size * answer_share) >= SLACK * rate)
    assert choose_step_tokens(make_times(), 10, make_work(rate, answer_share), 1.0, BUDGET) == wanted


def test_an_idle_engine_does_not_count_as_one_that_answers() -> None:
    """8,000 tokens a second take 0.32 of the time: more than half of 0.6, and less than half of 0.7."""
    chosen = [
        choose_step_tokens(make_times(), 10, make_work(8_000.0, 0.0, busy), 1.0, BUDGET)
        for busy in (0.6, 0.7)
    ]
    assert chosen == [512, 2048] and get_speed(512) >= SLACK * 8_000


@pytest.mark.parametrize(("weight", "size"), [(0.0, 512), (0.4, 512), (0.6, 2048), (3.0, 2048)])
def test_a_weight_says_from_which_share_on_decoding_goes_first(weight: float, size: int) -> None:
    """At 8,500 tokens a second prompts take a third."""
    assert choose_step_tokens(make_times(), 10, make_work(8_500.0), weight, BUDGET) == size


@pytest.mark.parametrize(("answer_share", "size"), [(0.0, 1024), (0.8, 512)])
def test_if_prompts_come_faster_than_any_step_computes_them_steps_are_fast_and_no_larger(
    answer_share: float, size: int
) -> None:
    """The more a turn answers, the more turns decode beside a large step, and the less it gains."""
    speeds = {size: get_speed(size, size * answer_share) for size in SIZES}
    assert size == next(size for size in SIZES if speeds[size] >= max(speeds.values()) / SLACK**2)
    assert choose_step_tokens(make_times(), 10, make_work(1e6, answer_share), 1.0, BUDGET) == size


@pytest.mark.parametrize("budget", [64, 300, 512, 700, 2048])
def test_it_stays_within_the_engines_own_limit(budget: int) -> None:
    assert min(512, budget) <= choose_step_tokens(make_times(), 10, make_work(0.0), 0.0, budget) <= budget


@pytest.mark.parametrize("num_decoding", [200, 400, 900])
def test_half_of_a_step_is_for_prompts(num_decoding: int) -> None:
    assert choose_step_tokens(make_times(), num_decoding, make_work(0.0), 0.0, BUDGET) >= 2 * num_decoding


STATE = 11, BUDGET, 16
"""The number of running turns, the engine's budget, and the size of its blocks."""


def make_chooser(prompt_weight: float = 1.0) -> AdaptiveSteps:
    """One that has seen the steps of `make_times`."""
    chooser = AdaptiveSteps(prompt_weight)
    for n in range(80):
        count = n % 40 + 1
        chooser.observe_step(StepView(0.05 * n, 0.01 + 1e-4 * count, count, count))
        size = 2000 if n % 4 else 1000
        chooser.observe_step(StepView(0.05 * n, 0.011 + 4e-5 * size, 10 + size, 10))
    chooser.observe_step(StepView(4.1, 0.0, 1, 1))
    return chooser


def test_the_rate_is_that_of_the_turns_that_finished_of_late() -> None:
    chooser = make_chooser(prompt_weight=0.0)
    assert chooser.choose(*STATE) == StepSize(512)
    for n in range(80):
        chooser.observe_turn(make_turn(f"t{n}", 1000, kind="agent", tool=ToolCall("ls")), 0, None)
    # 80,000 tokens in four seconds: about 20,000 a second, which leaves little of what a step can compute.
    work = chooser._get_work()
    assert work.prompt_rate == pytest.approx(20_000, rel=0.1)
    assert work.answer_share == pytest.approx(1 / 11)
    assert work.busy == 1.0
    assert chooser.choose(*STATE) == StepSize(1024)
    chooser.observe_step(StepView(400.0, 0.01, 1, 1))
    assert chooser.choose(*STATE) == StepSize(512)
    assert chooser._get_work().busy < 0.01


def test_while_memory_is_short_decoding_weighs_more() -> None:
    """Each turn that decodes holds memory, for which idle jobs' KV gives way and is computed again."""
    times = make_times()
    # Prompts take a third of the time, so they go first, in large steps.
    usual = Work(8_000.0, 0.2, 0.96)
    assert choose_step_tokens(times, 10, usual, 1.0, BUDGET) == 2048
    assert choose_step_tokens(times, 10, usual._replace(again=AGAIN), 1.0, BUDGET) == 512
    # Nearly full: what is computed again does not count as arriving.
    full = Work(20_000.0, 0.1, 1.0)
    assert choose_step_tokens(times, 10, full, 1.0, BUDGET) == 1024
    assert choose_step_tokens(times, 10, full._replace(again=0.5), 1.0, BUDGET) == 512


def test_while_memory_is_short_steps_are_not_so_slow_that_they_make_a_queue() -> None:
    """Where the host launches each kernel, a step of 512 tokens takes half as long as one of 8,192."""
    times = StepTimes()
    for n in range(160):
        size = (0, 512, 2000, 8000)[n % 4]
        times.observe(10 + size, 10, 0.02 + 2e-6 * size)
    work = Work(24_000.0, 0.011, 0.997, again=0.64)
    assert choose_step_tokens(times, 10, work, 1.0, BUDGET) == 4096
    assert choose_step_tokens(times, 10, work._replace(again=0.0), 1.0, BUDGET) >= 4096


@pytest.mark.parametrize(("pass_s", "wanted"), [(0.002, 256), (0.01, 512)])
def test_while_memory_is_short_steps_may_be_shorter_where_they_are_fast(pass_s: float, wanted: int) -> None:
    """Beside few who decode, a pass of 2 ms is little more than a tenth of what 256 tokens take."""
    times = make_times(pass_s=pass_s)
    assert choose_step_tokens(times, 2, Work(4_000.0, 0.2, 0.5, again=10 * AGAIN), 1.0, BUDGET) == wanted
    assert choose_step_tokens(times, 2, Work(4_000.0, 0.2, 0.5, again=AGAIN / 2), 0.0, BUDGET) == 512


def test_steps_are_not_so_small_that_they_delay_decoding_more() -> None:
    """Of a mixture of experts, a few prompt tokens use more experts than decoding does."""
    times = StepTimes()
    for n in range(1, 81):
        times.observe(n % 40 + 1, n % 40 + 1, 0.01 + 1e-4 * (n % 40 + 1))
    for n in range(80):
        size = 2000 if n % 4 else 1000
        times.observe(10 + size, 10, 0.01 + 1e-3 + 0.02 + 4e-5 * size)
    work = Work(5_000.0, 0.1, 0.5, again=0.1)
    assert choose_step_tokens(make_times(), 10, work, 1.0, BUDGET) == 512
    # 0.02 s over 4,086 tokens are within a tenth of what a token costs in the largest steps.
    assert choose_step_tokens(times, 10, work, 1.0, BUDGET) == 4096


def test_what_is_computed_again_after_a_long_pause_says_little_about_memory() -> None:
    chooser = make_chooser()
    chooser.observe_turn(make_turn("soon", 1000), 300, 0.0)
    assert chooser._get_work().again == pytest.approx(0.3)
    chooser.observe_turn(make_turn("late", 1000), 300, 1000.0)
    assert chooser._get_work().again == pytest.approx(0.15)
    # Without a pause, the job's other turn ran beside it.
    chooser.observe_turn(make_turn("beside", 1000), 300, None)
    assert chooser._get_work().again == pytest.approx(0.1)


def test_an_engine_is_busy_while_it_computes() -> None:
    chooser = AdaptiveSteps()
    assert chooser._get_work() == Work(0.0, 0.0, 1.0)
    for n in range(2000):
        chooser.observe_step(StepView(0.1 * n, 0.04, 10, 10))
    assert chooser._get_work().busy == pytest.approx(0.4, rel=0.01)


def test_a_first_step_that_took_next_to_no_time_says_nothing() -> None:
    chooser = AdaptiveSteps()
    chooser.observe_step(StepView(1e-15, 1e-15, 600, 2))
    assert chooser._get_work() == Work(0.0, 0.0, 1.0)


def make_turn(turn_id: str, num_tokens: int, *, kind: str = "agent", tool: ToolCall | None = None) -> Turn:
    return Turn(
        turn_id,
        Job(turn_id, 0.0, 1, kind=kind),
        0.0,
        num_tokens,
        num_output_tokens=num_tokens // 10,
        tool=tool,
    )


def test_if_nobody_else_runs_nobody_is_delayed() -> None:
    assert make_chooser().choose(0, *STATE[1:]) is None


def test_a_step_in_many_is_larger_to_see_what_tokens_cost() -> None:
    chooser = make_chooser(prompt_weight=0.0)
    chosen = []
    for n in range(4 * LOOK_EVERY):
        chooser.observe_step(StepView(5 + 0.05 * n, 0.051, 1010, 10))
        chosen.append(chooser.choose(*STATE))
    assert chosen.count(StepSize(1024)) == 4 and chosen.count(StepSize(512)) == 4 * LOOK_EVERY - 4


def test_only_adaptive_steps_have_a_weight_which_the_operator_may_choose() -> None:
    assert get_prompt_weight("adaptive") == PROMPT_WEIGHT and get_prompt_weight("adaptive:3") == 3.0
    assert get_prompt_weight(512) is None and get_prompt_weight(None) is None
    for text in ("adaptive:", "adaptive:-1", "adaptive:nan", "adaptive:inf", "adaptive:x", "fast"):
        with pytest.raises(ValueError):
            get_prompt_weight(text)


BUSY = 10, 8192, 16


def make_busy() -> tuple[AdaptiveSteps, StepSize]:
    """A chooser that has learned, and what it chooses while no plain request waits."""
    chooser = AdaptiveSteps()
    for n in range(1, 101):
        chooser.observe_step(StepView(0.05 * n, 0.05, 522, 10, is_full=True))
    usual = chooser.choose(*BUSY)
    assert usual is not None and usual.num_tokens < 4096 and not usual.per_prompt
    return chooser, usual


def arrive(chooser: AdaptiveSteps, turn_id: str, num_new_tokens: int, kind: str = "chat") -> None:
    chooser.observe_arrival(Turn(turn_id, Job(turn_id, 0.0, 1, kind=kind), 0.0, 5000), num_new_tokens)


def test_a_plain_request_is_computed_in_one_step_beside_what_the_step_has() -> None:
    """A token for each of the ten that decode, another prompt's part, and the request."""
    chooser, usual = make_busy()
    arrive(chooser, "short", 100)
    assert chooser.choose(*BUSY) == (usual.num_tokens + 100 + 10, usual.num_tokens)
    arrive(chooser, "longer", 3000)
    # No prompt may take the room of another, so the bound of one prompt is the longest of them.
    assert chooser.choose(*BUSY) == (3000 + 3100 + 10, 3000)
    assert [chooser.observe_start(turn_id) for turn_id in ("short", "longer", "longer")] == [
        True,
        True,
        False,
    ]
    assert chooser.choose(*BUSY) == usual


def test_what_stock_would_not_compute_in_one_step_gets_none_of_its_own() -> None:
    chooser, usual = make_busy()
    arrive(chooser, "huge", 8192)
    assert chooser.choose(*BUSY) == usual
    for n in range(100):
        arrive(chooser, f"t{n}", 1000)
    assert chooser.choose(*BUSY) == (8192, 1000)


def test_turns_of_agents_are_not_plain() -> None:
    chooser, usual = make_busy()
    agent = Turn("a", Job("a", 0.0, 1, kind="agent"), 0.0, 100, tool=ToolCall("ls"))
    chooser.observe_turn(agent, 0, None)
    arrive(chooser, "next", 100, kind="agent")
    assert chooser.choose(*BUSY) == usual


def test_a_step_has_room_for_a_block_of_a_prompt_beside_those_who_decode() -> None:
    """Where layers have states a prompt is computed in whole blocks, and these may be larger than a step."""
    chooser, usual = make_busy()
    block_size = usual.num_tokens + 100
    assert chooser.choose(*BUSY[:2], block_size) == StepSize(block_size + 9)
    assert chooser.choose(*BUSY[:2], 10_000) == StepSize(8192)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_stretch_of_decodes_teaches_what_its_steps_do(is_full: bool) -> None:
    stepped, told = make_chooser(), make_chooser()
    stepped_times, told_times = make_times(), make_times()
    for chooser in (stepped, told):
        chooser.observe_turn(make_turn("t", 1000), 300, 3.0)
    # A step of no time, as a clock that stands still gives it, teaches nothing.
    ends_s = [5.0, 5.0, *(5.0 + 0.1 * n / 3 for n in range(1, 200))]
    durations_s = [0.5, *(end_s - before_s for before_s, end_s in itertools.pairwise(ends_s))]
    steps = DecodeSteps(ends_s, durations_s, 12, is_full)
    for step in steps:
        stepped.observe_step(step)
        stepped_times.observe(step.num_tokens, step.num_requests, step.duration_s, is_full=is_full)
    told.observe_decodes(steps)
    told_times.observe_decodes(durations_s, 12, is_full=is_full)
    assert repr(told) == repr(stepped)
    assert repr(told_times) == repr(stepped_times)


@pytest.mark.parametrize(
    ("num_again", "kind", "has_room"), [(500, "chat", False), (0, "chat", True), (500, "agent", True)]
)
def test_while_memory_is_short_a_flood_gets_no_extra_room(num_again: int, kind: str, has_room: bool) -> None:
    """Of 60 turns, those of `kind` had 500 of 1,000 prompt tokens computed again, or none."""
    chooser, _ = make_busy()
    chooser.observe_turn(make_turn("first", 1000, kind="chat"), 0, None)
    tool = ToolCall("ls") if kind == "agent" else None
    for n in range(60):
        chooser.observe_turn(make_turn(f"t{n}", 1000, kind=kind, tool=tool), num_again, 0.0)
    without = chooser.choose(*BUSY)
    arrive(chooser, "plain", 3000)
    assert without is not None and (chooser.choose(*BUSY) != without) == has_room
