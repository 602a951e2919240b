"""Step times learned from steps, on engines whose times are known."""

from __future__ import annotations

import pytest

from tenuto.estimators.step_times import StepTimes


def make_times(*, pass_s: float, token_s: float, decode_s: float) -> StepTimes:
    times = StepTimes()
    for n in range(1, 41):
        times.observe(n, n, pass_s + decode_s * n)
        times.observe(100 * n, 1, token_s * 100 * n)
    return times


def test_what_was_put_in_comes_out() -> None:
    times = make_times(pass_s=0.008, token_s=4e-5, decode_s=2e-4)
    assert times.get_decode_s(0) == pytest.approx(0.008, rel=0.01)
    assert times.get_token_s() == pytest.approx(4e-5, rel=0.01)
    assert times.get_decode_s(10) == pytest.approx(0.01, rel=0.01)


def test_before_any_step_there_are_defaults() -> None:
    times = StepTimes()
    assert (times.get_token_s(), times.get_decode_s(0), times.get_decode_s(5)) == (0.0, 0.0, 0.0)


def test_steps_that_cannot_be_are_ignored() -> None:
    times = StepTimes()
    times.observe(100, 1, 0.0)
    times.observe(0, 0, 1.0)
    assert repr(times) == repr(StepTimes())


def test_it_forgets() -> None:
    times = make_times(pass_s=0.008, token_s=4e-5, decode_s=2e-4)
    for _ in range(60):
        for n in range(1, 41):
            times.observe(100 * n, 1, 8e-5 * 100 * n)
    assert times.get_token_s() == pytest.approx(8e-5, rel=0.02)


def test_where_larger_steps_take_no_longer_a_token_still_costs_its_mean_time() -> None:
    times = StepTimes()
    for n in range(80):
        times.observe(200 + 10 * (n % 30), 1, 0.02 - 1e-6 * (n % 30))
    assert times.get_token_s() == pytest.approx(0.02 / 345, rel=0.05)


def test_noise_makes_nothing_negative() -> None:
    times = StepTimes()
    for n in range(1, 41):
        times.observe(n, n, 0.05 - 0.001 * n)
        times.observe(100 * n, 1, 0.5 - 0.01 * n)
    assert min(times.get_token_s(), times.get_decode_s(0), times.get_decode_s(100)) >= 0


def make_mixed(fixed_s: float, token_s: float, sizes: list[int]) -> StepTimes:
    """Ten decode in 10 ms, of which a pass takes 8; prefill beside them adds a line."""
    times = StepTimes()
    for n in range(1, 41):
        times.observe(n, n, 0.008 + 2e-4 * n)
    for size in sizes:
        times.observe(10 + size, 10, 0.010 + fixed_s + token_s * size)
    return times


@pytest.mark.parametrize("fixed_s", [-0.008, -0.003, 0.0, 0.003, 0.03])
def test_what_prefill_adds_to_a_step(fixed_s: float) -> None:
    # One step in a few is twice as large.
    times = make_mixed(fixed_s, 4e-5, [500, 500, 500, 1000] * 40)
    assert times.get_added() == (pytest.approx(fixed_s, rel=0.15, abs=1e-3), pytest.approx(4e-5, rel=0.2))


def test_contexts_that_grow_do_not_look_like_a_cost_of_mixing() -> None:
    """Long prompts came late, with small steps: a fit through all of them would take that for a fixed
    cost."""
    times = make_mixed(-0.003, 3e-5, [8000] * 30 + [500] * 10)
    for n in range(300):
        # The context grows, so each step takes a little longer than the one before.
        size = 1000 if n % 10 == 0 else 500
        times.observe(10 + size, 10, 0.010 - 0.003 + 4e-5 * size + 1e-5 * (n % 40))
    fixed_s, token_s = times.get_added()
    assert fixed_s == pytest.approx(-0.003, abs=1.5e-3)
    assert token_s == pytest.approx(4e-5, rel=0.1)


def test_while_all_steps_are_alike_half_of_the_time_of_decoding_is_saved() -> None:
    times = make_mixed(0.0, 4e-5, [500] * 40)
    assert times.get_added()[0] == pytest.approx(-0.005, rel=0.01)
    # What such a step takes is right in any case.
    fixed_s, token_s = times.get_added()
    assert fixed_s + 500 * token_s == pytest.approx(0.020, rel=0.01)


def test_while_equally_many_decode_their_time_is_taken_for_a_pass() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 1, 0.008)
    assert times.get_decode_s(40) == pytest.approx(0.008)


def test_where_a_prompt_ends_the_next_step_does_not_tell_what_prefill_adds() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(1, 1, 0.001)
    for _ in range(100):
        # Two parts of a long prompt take 0.1 ms a token, the first of the next prompt, behind nothing, half.
        times.observe(2001, 1, 0.2)
        times.observe(1001, 1, 0.1)
        times.observe(4002, 2, 0.2)
    # The mean step has 2,333 tokens and takes 0.167 s, 0.067 s less than as many tokens of one prompt.
    assert times.get_added()[0] == pytest.approx(-0.067, rel=0.1)
