"""A normal distribution with unknown mean and variance, learned from samples: Normal-Inverse-Gamma.

σ² ~ Inverse-Gamma(alpha, beta), mean ~ Normal(mean, σ²/kappa). Source of the conjugate updates: Murphy,
Conjugate Bayesian analysis of the Gaussian distribution (2007), section 6.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

MAX_KAPPA = 200.0
"""Maximum weight in samples. Beyond it old samples fade, so that a change of a tool is learned."""


_MAX_WEIGHT = 1e6
_MAX_SIZE = 1e18
"""No samples of seconds lead here; beyond it, drawing a number overflows or never ends."""


@dataclass(frozen=True, slots=True)
class NormalInverseGamma:
    """The belief; `kappa` and 2·`alpha` count how many samples it is worth."""

    mean: float
    kappa: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        """Refuse parameters that are no distribution (from a damaged file or a bad setting)."""
        are_weights = all(0 < weight <= _MAX_WEIGHT for weight in (self.kappa, self.alpha))
        if not (are_weights and 0 < self.beta <= _MAX_SIZE and abs(self.mean) <= _MAX_SIZE):
            raise ValueError(f"not a Normal-Inverse-Gamma distribution: {self}")

    def observe(self, x: float) -> NormalInverseGamma:
        """The belief after one more sample."""
        fade = min(1.0, MAX_KAPPA / (self.kappa + 1))
        kappa = (self.kappa + 1) * fade
        mean = (self.kappa * self.mean + x) / (self.kappa + 1)
        beta = self.beta + self.kappa * (x - self.mean) ** 2 / (2 * (self.kappa + 1))
        return NormalInverseGamma(mean, kappa, (self.alpha + 0.5) * fade, beta * fade)

    def draw(self, rng: random.Random) -> tuple[float, float]:
        """A mean and a standard deviation drawn from the belief (Thompson sampling)."""
        variance = self.beta / max(rng.gammavariate(self.alpha, 1.0), 1e-12)
        return rng.gauss(self.mean, math.sqrt(variance / self.kappa)), math.sqrt(variance)

    def get_quantile(self, share: float) -> float:
        """Quantile `share` of the next sample: Student's t with 2·alpha degrees of freedom."""
        scale = math.sqrt(self.beta * (self.kappa + 1) / (self.alpha * self.kappa))
        return self.mean + scale * get_t_quantile(share, 2 * self.alpha)


@lru_cache(64)
def get_z(share: float) -> float:
    """Quantile of the standard normal distribution; remembers those asked for."""
    return NormalDist().inv_cdf(share)


def get_t_quantile(share: float, degrees: float) -> float:
    """Quantile of Student's t by its expansion around the normal's (Abramowitz and Stegun 26.7.5).

    Within 1 % for at least 4 degrees of freedom and shares from 0.05 to 0.95.
    """
    z = get_z(share)
    z2 = z * z
    terms = (
        (z2 + 1) / 4,
        ((5 * z2 + 16) * z2 + 3) / 96,
        (((3 * z2 + 19) * z2 + 17) * z2 - 15) / 384,
        ((((79 * z2 + 776) * z2 + 1482) * z2 - 1920) * z2 - 945) / 92160,
    )
    return z + z * sum(term / degrees**power for power, term in enumerate(terms, 1))
