"""Whether a fit describes the steps that were observed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from tenuto.sim.cost.fitted import FittedStepCost
from tenuto.sim.cost.least_squares import Line
from tenuto.sim.cost.observed import ObservedStep, ObservedTransfer

MAX_ERROR = 0.15
"""Mean relative error above which a fit is poor."""
MIN_R_SQUARED = 0.9
"""A fit that explains less of the variance is poor, unless its errors are small."""
SMALL_ERROR = 0.05
"""If all times are about equal, there is no variance to explain: then this mean relative error is enough."""


def get_errors(cost: FittedStepCost, steps: Iterable[ObservedStep]) -> dict[str, float]:
    """The mean relative error of steps that only prefill, of those that only decode, and of mixed ones."""
    found: dict[str, list[float]] = {"prefill": [], "decode": [], "mixed": []}
    for step in steps:
        batch = step.batch
        kind = "prefill" if not batch.num_decodes else "mixed" if batch.num_prefills else "decode"
        found[kind].append(abs(cost.seconds(batch) / step.seconds - 1))
    return {kind: fmean(errors) for kind, errors in found.items() if errors}


def find_poor(
    cost: FittedStepCost, steps: Sequence[ObservedStep], transfers: Sequence[ObservedTransfer] = ()
) -> tuple[str, ...]:
    """Return a sentence for each part of the fit that does not describe what was observed."""
    errors = get_errors(cost, steps)
    parts: list[tuple[str, Line, float]] = [
        ("prefill", cost.prefill, errors["prefill"]),
        ("decode", cost.decode, errors["decode"]),
    ]
    if cost.link is not None:
        link_errors = [abs(cost.link.at(each.num_bytes) / each.seconds - 1) for each in transfers]
        parts.append(("link", cost.link, fmean(link_errors)))
    return tuple(
        f"the {name} fit is poor: R2 {line.r_squared:.2f}, and it is {error:.0%} off in the mean (good: R2 "
        f"of {MIN_R_SQUARED:g} or more, {MAX_ERROR:.0%} or less)"
        for name, line, error in parts
        if error > MAX_ERROR or (line.r_squared < MIN_R_SQUARED and error > SMALL_ERROR)
    )
