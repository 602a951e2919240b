"""The Normal-Inverse-Gamma belief: updates by hand, draws and quantiles against what they stand for."""

from __future__ import annotations

import random
import statistics

import pytest

from tenuto.policies.published.contextserve import MAX_KAPPA, NormalInverseGamma, get_t_quantile


def test_updates_by_hand() -> None:
    belief = NormalInverseGamma(0.0, 1.0, 2.0, 1.0).observe(2.0)
    # mean (1·0 + 2)/2, beta 1 + 1·(2 − 0)²/(2·2)
    assert belief == NormalInverseGamma(1.0, 2.0, 2.5, 2.0)
    belief = belief.observe(4.0)
    # mean (2·1 + 4)/3, beta 2 + 2·(4 − 1)²/(2·3)
    assert belief == NormalInverseGamma(2.0, 3.0, 3.0, 5.0)


def test_many_samples_outweigh_the_prior() -> None:
    rng = random.Random(1)
    belief = NormalInverseGamma(10.0, 1.0, 2.0, 1.0)
    for _ in range(2000):
        belief = belief.observe(rng.gauss(3.0, 0.5))
    assert belief.mean == pytest.approx(3.0, abs=0.15)
    assert (belief.beta / belief.alpha) ** 0.5 == pytest.approx(0.5, abs=0.1)
    assert belief.get_quantile(0.95) == pytest.approx(3.0 + 1.645 * 0.5, abs=0.25)


def test_a_tool_that_has_changed_is_learned_anew() -> None:
    belief = NormalInverseGamma(0.0, 1.0, 2.0, 1.0)
    for _ in range(5000):
        belief = belief.observe(0.0)
    assert belief.kappa == MAX_KAPPA
    for _ in range(1000):
        belief = belief.observe(5.0)
    assert belief.mean == pytest.approx(5.0, abs=0.05)  # a running mean would be at 0.83


def test_draws_spread_as_the_belief_does() -> None:
    belief = NormalInverseGamma(1.0, 4.0, 5.0, 8.0)
    rng = random.Random(2)
    means, sds = zip(*(belief.draw(rng) for _ in range(20_000)), strict=True)
    assert statistics.fmean(means) == pytest.approx(1.0, abs=0.02)
    assert statistics.variance(means) == pytest.approx(8 / (5 - 1) / 4, rel=0.05)  # E[σ²] / kappa
    assert statistics.fmean(sd * sd for sd in sds) == pytest.approx(8 / (5 - 1), rel=0.05)


@pytest.mark.parametrize(
    ("degrees", "share", "expected"),
    # From the usual table of Student's t.
    [
        (4, 0.95, 2.132),
        (4, 0.9, 1.533),
        (6, 0.975, 2.447),
        (10, 0.95, 1.812),
        (30, 0.75, 0.683),
        (8, 0.05, -1.860),
    ],
)
def test_quantiles_of_students_t(degrees: float, share: float, expected: float) -> None:
    assert get_t_quantile(share, degrees) == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(
    "change",
    [
        {"mean": float("nan")}, {"kappa": 0.0}, {"alpha": -1.0}, {"beta": float("inf")},
        {"alpha": 1e308}, {"kappa": 1e308}, {"beta": 1e308}, {"mean": -1e308},
    ],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="not a Normal-Inverse-Gamma"):
        NormalInverseGamma(**{"mean": 0.0, "kappa": 1.0, "alpha": 1.0, "beta": 1.0, **change})
