"""The verdict: comparisons of each arm with the first one, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from tenuto.client.ab.estimate import MIN_PAIRS, PLANNED_CHANGE, Estimate, estimate_ratio
from tenuto.client.ab.measures import MEASURES, Measure, Values

SAME = 0.0005
"""A ratio that is nearer to 1 prints as 0.0 %."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of one arm, compared with the same measure of the baseline."""

    arm: str
    baseline: str
    measure: Measure
    values: tuple[float, ...]
    """The arm's values, one per pair."""
    baseline_values: tuple[float, ...]
    estimate: Estimate
    """The ratio of the arm's value to the baseline's."""
    threshold: float
    is_valid: bool = True
    """No run's figures are INVALID."""

    @property
    def differs(self) -> bool:
        """Whether the data show a real difference."""
        return self.is_valid and self.estimate.differs(self.threshold)

    def describe(self) -> str:
        """The comparison as text, without the names of the arms and the measure."""
        estimate, is_time = self.estimate, self.measure.is_time
        change = describe_change(estimate.ratio, is_time=is_time)
        if estimate.low is None or estimate.high is None:
            return f"{change} in the only pair, which proves nothing"
        span = describe_span(estimate.low, estimate.high, is_time=is_time)
        if not self.is_valid:
            return f"{change} by figures that are INVALID (95 % interval: {span})"
        if not estimate.is_trusted:
            return f"{change} in {estimate.num_pairs} pairs, too few to trust (95 % interval: {span})"
        if self.differs:
            return f"{change} (95 % interval: {span}; {estimate.num_pairs} pairs)"
        if not estimate.low <= 1 <= estimate.high:
            return f"no difference that matters: {change}, below the threshold (95 % interval: {span})"
        return f"no difference seen (95 % interval: {span}; {estimate.num_pairs} pairs)"

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "arm": self.arm,
            "baseline": self.baseline,
            "measure": self.measure.name,
            **asdict(self.estimate),
            "differs": self.differs,
            "is_valid": self.is_valid,
            "values": list(self.values),
            "baseline_values": list(self.baseline_values),
            "words": self.describe(),
        }


def compare(
    pairs: Sequence[Mapping[str, Values]], threshold: float, *, is_valid: bool = True
) -> list[Comparison]:
    """Make all comparisons. Each pair contains the values of all arms, with the baseline first.

    `is_valid`: no run's figures are INVALID. Otherwise nothing is proved.
    """
    if not pairs:
        return []
    baseline, *others = pairs[0]
    return [
        replace(_compare(pairs, (baseline, arm), measure, threshold), is_valid=is_valid)
        for arm in others
        for measure in MEASURES
        if all(pair[each][measure.name] > 0 for pair in pairs for each in (baseline, arm))
    ]


def _compare(
    pairs: Sequence[Mapping[str, Values]], arms: tuple[str, str], measure: Measure, threshold: float
) -> Comparison:
    baseline, arm = arms
    values = tuple(pair[arm][measure.name] for pair in pairs)
    baseline_values = tuple(pair[baseline][measure.name] for pair in pairs)
    ratios = [value / other for value, other in zip(values, baseline_values, strict=True)]
    return Comparison(arm, baseline, measure, values, baseline_values, estimate_ratio(ratios), threshold)


def describe_change(ratio: float, *, is_time: bool) -> str:
    """A ratio as text, for example `26 % shorter`."""
    if abs(ratio - 1) < SAME:
        return "the same"
    return f"{_format_percent(ratio)} {_get_word(ratio, is_time=is_time)}"


def describe_span(low: float, high: float, *, is_time: bool) -> str:
    """An interval of ratios as text. If both changes have the same direction, the smaller one comes first."""
    if max(abs(low - 1), abs(high - 1)) < SAME:
        return "0.0 %"
    ends = sorted((low, high), key=lambda ratio: abs(ratio - 1)) if (low < 1) == (high < 1) else [low, high]
    words = [_get_word(ratio, is_time=is_time) for ratio in ends]
    first = _format_percent(ends[0]) + (f" {words[0]}" if words[0] != words[1] else "")
    return f"{first} to {_format_percent(ends[1])} {words[1]}"


def format_verdict(
    comparisons: Sequence[Comparison], num_pairs: int, num_planned: int, notes: Sequence[str]
) -> str:
    """Write a table and sentences. The most important sentence says the first row of the table in words."""
    lines = [f"{num_pairs} of {num_planned} pairs of runs"]
    if not num_pairs:
        lines[0] += ": no verdict, as that takes a run on every arm"
    for arm in dict.fromkeys(each.arm for each in comparisons):
        these = [each for each in comparisons if each.arm == arm]
        lines += ["", *_format_table(these), "", *_format_sentences(these)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _format_table(comparisons: Sequence[Comparison]) -> list[str]:
    arm, baseline = comparisons[0].arm, comparisons[0].baseline
    width = max(len(arm), len(baseline), 12) + 2
    header = f"{'':<16}{baseline:>{width}}{arm:>{width}}{'ratio':>9}   95 % interval"
    return [header, *(_format_row(each, width) for each in comparisons)]


def _format_row(comparison: Comparison, width: int) -> str:
    estimate, unit = comparison.estimate, comparison.measure.unit
    cells = [
        f"{_format_value(fmean(values), unit):>{width}}"
        for values in (comparison.baseline_values, comparison.values)
    ]
    interval = "–" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"
    return f"{comparison.measure.title:<16}{''.join(cells)}{estimate.ratio:>9.3f}   {interval}"


def _format_sentences(comparisons: Sequence[Comparison]) -> list[str]:
    first = comparisons[0]
    lines = [f"{first.arm} against {first.baseline}: {_conclude(first)}"]
    lines += [f"  {each.measure.title}: {each.describe()}" for each in comparisons]
    needed = first.estimate.num_pairs_needed
    if needed is not None and not first.differs and needed > first.estimate.num_pairs:
        percent = f"{100 * PLANNED_CHANGE:.0f} %"
        lines.append(
            f"  To see a difference of {percent} in {first.measure.title} takes about {needed} pairs like "
            f"these (--repeats {needed}); fewer than {MIN_PAIRS} never prove one."
        )
    return lines


def _conclude(first: Comparison) -> str:
    if not first.is_valid:
        return "nothing is proved, because figures are INVALID."
    if not first.estimate.is_trusted:
        return "nothing is proved yet."
    if not first.differs:
        return "no difference in job time was seen."
    faster, slower = (first.arm, first.baseline)
    if (first.estimate.ratio > 1) == first.measure.is_time:
        faster, slower = slower, faster
    return f"{faster} is faster than {slower}."


def _get_word(ratio: float, *, is_time: bool) -> str:
    if is_time:
        return "shorter" if ratio < 1 else "longer"
    return "lower" if ratio < 1 else "higher"


def _format_percent(ratio: float) -> str:
    percent = abs(ratio - 1) * 100
    return f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def _format_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
    return f"{value:.2f}/s"
