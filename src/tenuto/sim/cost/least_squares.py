"""Linear least squares with coefficients that are not negative, for a handful of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.core.errors import DataError

# The features are dependent if their smallest singular value is at most this share of the largest.
_SINGULAR = 1e-6


@dataclass(frozen=True)
class Line:
    """A linear fit and how well it fits.

    Attributes:
        coefficients: the constant in seconds, then seconds per unit of each feature.
        num_observations: how many observations it was fitted to.
        r_squared: share of the variance explained; 1.0 where the observations do not vary.
        worst_residual_s: the largest distance of an observation from the fit.
    """

    coefficients: tuple[float, ...]
    num_observations: int
    r_squared: float
    worst_residual_s: float

    def at(self, *features: float) -> float:
        """The fitted seconds."""
        constant, *slopes = self.coefficients
        return constant + sum(slope * x for slope, x in zip(slopes, features, strict=True))


def fit_line(what: str, features: Sequence[Sequence[float]], seconds: Sequence[float]) -> Line:
    """Seconds as a constant plus a slope per feature, none of them negative.

    Args:
        what: names the observations in errors.
        features: one row per observation.
        seconds: one per observation.

    Raises:
        DataError: there are fewer observations than coefficients, or the features do not vary independently.
    """
    # Only a fit needs them; a simulation that uses one does not.
    import numpy as np
    from scipy.optimize import nnls

    num_coefficients = len(features[0]) + 1 if features else 1
    if len(features) < num_coefficients or len(features) < 2:
        raise DataError(
            f"{what}: {len(features)} observations are too few for {num_coefficients} coefficients"
        )
    matrix = np.column_stack([np.ones(len(features)), np.asarray(features, dtype=float)])
    # Tokens and pairs of tokens differ by orders of magnitude: each column is brought to at most 1.
    scales = np.abs(matrix).max(axis=0)
    scales[scales == 0] = 1.0
    matrix /= scales
    singular_values = np.linalg.svd(matrix, compute_uv=False)
    if singular_values[-1] <= _SINGULAR * singular_values[0]:
        raise DataError(f"{what}: the observations vary too little to tell the coefficients apart")
    measured = np.asarray(seconds, dtype=float)
    coefficients, _ = nnls(matrix, measured)
    residuals = measured - matrix @ coefficients
    variation = float(((measured - measured.mean()) ** 2).sum())
    return Line(
        coefficients=tuple(map(float, coefficients / scales)),
        num_observations=len(seconds),
        r_squared=1 - float(residuals @ residuals) / variation if variation else 1.0,
        worst_residual_s=float(np.abs(residuals).max()),
    )
