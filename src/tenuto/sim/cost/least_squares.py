"""Linear least squares with coefficients that are not negative, for a handful of features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from tenuto.core.errors import DataError

# A column is dependent if it differs from a combination of the others by less than this share.
_SINGULAR = 1e-9


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
    num_coefficients = len(features[0]) + 1 if features else 1
    if len(features) < num_coefficients or len(features) < 2:
        raise DataError(
            f"{what}: {len(features)} observations are too few for {num_coefficients} coefficients"
        )
    columns = [[1.0] * len(features), *(list(map(float, column)) for column in zip(*features, strict=True))]
    scales = [max(map(abs, column)) or 1.0 for column in columns]
    columns = [[x / scale for x in column] for column, scale in zip(columns, scales, strict=True)]
    if _solve(columns, seconds) is None:
        raise DataError(f"{what}: the observations vary too little to tell the coefficients apart")
    # There are few coefficients, so every choice of those that are zero is tried. The best fit without
    # negative coefficients is the answer.
    fits = [fit for fit in _subset_fits(columns, seconds) if min(fit) >= 0]
    best = min(fits, key=lambda fit: sum(r * r for r in _residuals(columns, seconds, fit)))
    residuals = _residuals(columns, seconds, best)
    mean = sum(seconds) / len(seconds)
    variation = sum((y - mean) ** 2 for y in seconds)
    return Line(
        coefficients=tuple(c / scale for c, scale in zip(best, scales, strict=True)),
        num_observations=len(seconds),
        r_squared=1 - sum(r * r for r in residuals) / variation if variation else 1.0,
        worst_residual_s=max(map(abs, residuals)),
    )


def _subset_fits(columns: list[list[float]], seconds: Sequence[float]) -> Iterator[list[float]]:
    """The least-squares coefficients of every choice of columns, 0.0 for the columns left out."""
    for size in range(len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            solution = _solve([columns[i] for i in chosen], seconds)
            if solution is not None:
                fit = [0.0] * len(columns)
                for i, coefficient in zip(chosen, solution, strict=True):
                    fit[i] = coefficient
                yield fit


def _residuals(columns: list[list[float]], seconds: Sequence[float], fit: list[float]) -> list[float]:
    rows = zip(*columns, strict=True)
    return [
        y - sum(c * x for c, x in zip(fit, row, strict=True)) for row, y in zip(rows, seconds, strict=True)
    ]


def _solve(columns: list[list[float]], seconds: Sequence[float]) -> list[float] | None:
    """Least squares by the normal equations, eliminated in place; None if the columns are dependent."""
    rows = [[_dot(a, b) for b in columns] + [_dot(a, seconds)] for a in columns]
    for i, row in enumerate(rows):
        if row[i] <= _SINGULAR * _dot(columns[i], columns[i]):
            return None
        for other in rows[:i] + rows[i + 1 :]:
            factor = other[i] / row[i]
            other[:] = [x - factor * y for x, y in zip(other, row, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
