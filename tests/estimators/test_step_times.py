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
    assert times.get_pass_s() == pytest.approx(0.008, rel=0.01)
    assert times.get_token_s() == pytest.approx(4e-5, rel=0.01)
    assert times.get_decode_s(10) == pytest.approx(0.01, rel=0.01)
    assert times.get_tokens_per_decode() == pytest.approx(5, rel=0.02)  # 200 us / 40 us


def test_before_any_step_there_are_defaults() -> None:
    times = StepTimes()
    assert (times.get_token_s(), times.get_pass_s(), times.get_decode_s(5)) == (0.0, 0.0, 0.0)


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


def test_noise_makes_nothing_negative() -> None:
    times = StepTimes()
    for n in range(1, 41):
        times.observe(n, n, 0.05 - 0.001 * n)
        times.observe(100 * n, 1, 0.5 - 0.01 * n)
    assert min(times.get_token_s(), times.get_pass_s(), times.get_decode_s(100)) >= 0


def test_how_much_prefill_rides_along() -> None:
    # Before anything shows otherwise, a pass.
    assert make_times(pass_s=0.008, token_s=4e-5, decode_s=2e-4).get_ride()[1] == pytest.approx(
        0.008, rel=0.03
    )
    for ride_s in (0.0, 0.003, 0.008):
        times = StepTimes()
        for n in range(1, 41):
            times.observe(n, n, 0.008 + 2e-4 * n)
        for n in range(1, 41):
            # Ten who decode, and 500 to 20,000 tokens of prefill beside them.
            times.observe(10 + 500 * n, 10, 0.008 + 2e-3 - ride_s + 4e-5 * 500 * n)
        token_s, seen_s = times.get_ride()
        assert token_s == pytest.approx(4e-5, rel=0.01)
        assert seen_s == pytest.approx(ride_s, abs=2e-4)
