"""The verdict of `tenuto ab`: the measures, their ratios with intervals, and notes.

Values come from the jobs that finished on every arm. Each arm is compared with the first one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from tenuto.core.console import count
from tenuto.core.errors import DataError
from tenuto.records.files import RESULT, TURNS, read_first
from tenuto.records.load import load_folder
from tenuto.records.metrics import get_geometric_mean, get_ok, summarise
from tenuto.records.run_data import RunData
from tenuto.records.schema import TurnRecord
from tenuto.records.text import MIN_PAIRS, format_table, format_time_s, group_invalid, loses_jobs

VERDICT = "verdict.json"
CONFIDENCE = 0.95
POWER = 0.8
PLANNED_CHANGE = 0.05
"""The relative difference for which `num_pairs_needed` is computed."""
NUM_RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio between two arms."""

    ratio: float
    """Geometric mean over the pairs."""
    low: float | None
    """Lower end of the 95 % interval. None with fewer than two pairs."""
    high: float | None
    num_pairs: int
    num_pairs_needed: int | None
    """About how many pairs are needed to detect a difference of 5 % with a probability of 80 %, if the ratios
    vary as these do. None with fewer than two pairs."""

    @property
    def is_trusted(self) -> bool:
        """Whether there are enough pairs for a reliable interval."""
        return self.num_pairs >= MIN_PAIRS

    @property
    def excludes_one(self) -> bool:
        """Whether there is an interval, and it does not contain 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def differs(self, threshold: float) -> bool:
        """Whether the data show that the arms differ by more than the threshold (0.01 is 1 %)."""
        return self.is_trusted and self.excludes_one and abs(self.ratio - 1) >= threshold


def estimate_ratio(ratios: Sequence[float]) -> Estimate:
    """Estimate from the pairs' ratios, each above 0. The same ratios always give the same estimate.

    The interval is the bootstrap's percentile interval of the mean logarithm. It is widened by the factor
    between Student's interval and the normal interval, because it would be too narrow for few pairs. Source:
    T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 5 ("expanded percentile
    interval"). Fewer pairs than `MIN_PAIRS` have Student's interval, as a bootstrap stays within the range of
    its values. Raises ValueError if there are no ratios.
    """
    logs = [math.log(ratio) for ratio in ratios]
    ratio = get_geometric_mean(ratios)
    if len(logs) < 2:
        return Estimate(ratio, None, None, len(logs), None)
    mean, reach = fmean(logs), get_reach(logs, len(logs))
    low, high = _bootstrap(logs) if len(logs) >= MIN_PAIRS else (mean - reach, mean + reach)
    wanted = float(stats.norm.ppf((1 + CONFIDENCE) / 2) + stats.norm.ppf(POWER))
    num_needed = math.ceil((wanted * stdev(logs) / math.log1p(PLANNED_CHANGE)) ** 2)
    return Estimate(ratio, math.exp(low), math.exp(high), len(logs), max(MIN_PAIRS, num_needed))


def _bootstrap(logs: Sequence[float]) -> tuple[float, float]:
    num = len(logs)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, num - 1)) * math.sqrt(num / (num - 1))
    found = stats.bootstrap(
        (np.asarray(logs),),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        confidence_level=1 - 2 * float(stats.norm.sf(quantile)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def get_reach(logs: Sequence[float], num_pairs: int) -> float:
    """Half of Student's interval of the mean of `num_pairs` logarithms that vary as these do."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, num_pairs - 1)) * stdev(logs) / math.sqrt(num_pairs)


Values = dict[str, float]
"""The value of each measure by the measure's name."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The name of a measure, and whether higher or lower values are better."""

    name: str
    title: str
    is_time: bool = True
    """Whether a lower value is better. What is not a time is in turns per second."""


MEASURES = (
    Measure("mean_job_s", "mean job time"),
    Measure("p95_job_s", "P95 job time"),
    Measure("mean_ttft_s", "mean TTFT"),
    Measure("p95_ttft_s", "P95 TTFT"),
    Measure("mean_turn_s", "mean turn time"),
    Measure("p95_turn_s", "P95 turn time"),
    Measure("turns_per_s", "throughput", is_time=False),
)
"""The first measure is the main one of a comparison."""


def read_run(folder: Path) -> RunData:
    """A complete run. Raises DataError with advice what to do."""
    try:
        fields = read_first(folder / RESULT)
        fields.part("client")
        fields.part("job_times_s")
        return load_folder(folder)
    except DataError as error:
        raise DataError(f"{error}; remove its folder to run it again") from error


def make_pair(runs: Mapping[str, RunData]) -> dict[str, Values] | None:
    """By arm, the values of one repeat. None if no job finished on all arms.

    A job that failed on one arm is left out on all arms, with the jobs that it started. Its time on that arm
    is unknown, and leaving it out on one arm only would bias the result, because long jobs fail more often.
    So is a turn that failed on one arm, of a sub-agent for which its job does not wait. Throughput counts all
    answered turns. Raises DataError if a run lacks turns.
    """
    finished = (frozenset(run.record.job_times_s) for run in runs.values() if run.record)
    common = frozenset.intersection(*finished)
    if not common:
        return None
    counted = {
        arm: {(turn.job, turn.turn): turn for turn in get_ok(run.turns) if (turn.root or turn.job) in common}
        for arm, run in runs.items()
    }
    shared = frozenset.intersection(*map(frozenset, counted.values()))
    return {
        # If none is shared, a file lacks its turns, which `_measure` says.
        arm: _measure(run, [turn for at, turn in counted[arm].items() if not shared or at in shared], common)
        for arm, run in runs.items()
    }


def _measure(run: RunData, turns: Sequence[TurnRecord], jobs: Iterable[str]) -> Values:
    record = run.record
    assert record is not None  # of a complete run
    stats = {
        "job": summarise(record.job_times_s[job] for job in jobs),
        "ttft": summarise(turn.ttft_s for turn in turns),
        "turn": summarise(turn.latency_s for turn in turns),
    }
    if None in stats.values() or not record.makespan_s:
        raise DataError(
            f"{run.source}/{TURNS}: lacks turns that {RESULT} counts; remove its folder to run it again"
        )
    values = {
        f"{which}_{name}_s": getattr(each, which) for name, each in stats.items() for which in ("mean", "p95")
    }
    return {**values, "turns_per_s": record.turns.ok / record.makespan_s}


MAX_CLIENT_LAG_S = 0.05
"""Limit in seconds for the P99 of a run's sending lag. Above it, client delays distort the measured times."""
_LOST = ("failed", "cancelled", "not_sent")


def make_notes(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Notes that a reader of the ratios must know. `results`: the runs' results by arm."""
    return [
        *_describe_simulated(results),
        *_describe_versions(results),
        *find_invalid(results),
        *describe_errors(results),
        *describe_faults(results),
        *describe_complaints(results),
        *describe_lag(results),
        *describe_caches(results),
    ]


def _describe_simulated(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    arms = [
        arm for arm, runs in results.items() if any(run["client"].get("simulated_server") for run in runs)
    ]
    which = "" if len(arms) == len(results) else f" of {', '.join(arms)}"
    return [f"Simulated: the servers{which} computed nothing; their times are a simulator's."] if arms else []


def _describe_versions(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """A sentence for each program of which not all runs had the same version."""
    for program in ("tenuto", "server"):
        found = {
            arm: sorted({str(run.get("versions", {}).get(program)) for run in runs})
            for arm, runs in results.items()
            if runs
        }
        if len({version for versions in found.values() for version in versions}) > 1:
            where = ", ".join(f"{' and '.join(versions)} on {arm}" for arm, versions in found.items())
            yield f"Versions differ: {program} {where}."


def describe_errors(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One sentence for each arm that lost turns, and one for the arms without errors."""
    lines = []
    for arm, runs in results.items():
        planned = sum(run["turns"]["planned"] for run in runs)
        lost = sum(run["turns"][kind] for run in runs for kind in _LOST)
        if lost:
            kinds = {kind: each for run in runs for kind, each in run["client"]["failed_attempts"].items()}
            first = next((f" (first: {kind}: {each['first']})" for kind, each in kinds.items()), "")
            lines.append(
                f"Errors: {arm} lost {lost} of {count(planned, 'turn')}{first}; "
                "jobs that failed on one arm are left "
                "out on all."
            )
    idle = [arm for arm, runs in results.items() if not runs]
    if idle and not lines:
        return [f"Errors: none in the runs that ended; {', '.join(idle)} had none."]
    return lines or ["Errors: none."]


def describe_complaints(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Describe where an arm's answers or counts differ from what was requested."""
    lines = []
    for arm, runs in results.items():
        for kind in dict.fromkeys(kind for run in runs for kind in run["client"]["complaints"]):
            these = [run["client"]["complaints"][kind] for run in runs if kind in run["client"]["complaints"]]
            lines.append(
                f"Complaint: {arm}: {sum(each['count'] for each in these)} × {kind}: {these[0]['first']}"
            )
    return lines


def describe_faults(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One sentence for each arm on which hooks of the policy failed."""
    lines = []
    for arm, runs in results.items():
        counts = [run.get("policy_faults") or 0 for run in runs]
        if any(counts):
            lines.append(
                f"Policy faults: on {arm}, hooks of the policy failed {count(sum(counts), 'time')} in "
                f"{sum(map(bool, counts))} of {count(len(runs), 'run')}; "
                "the engine's default was used instead. The "
                "verdict is not about the policy alone."
            )
    return lines


def describe_lag(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A note if the client's delays were so large that its times do not describe the servers."""
    lags = [run["client"]["send_lag_s"] for runs in results.values() for run in runs]
    worst_s = max((lag["p99"] for lag in lags if lag), default=0.0)
    if worst_s <= MAX_CLIENT_LAG_S:
        return []
    worst = format_time_s(worst_s, digits=1)
    return [
        f"The client itself was late: P99 of its sending lag was up to {worst}. Its machine is too busy, "
        "with the servers or with others."
    ]


def find_invalid(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One sentence for each reason why figures do not describe the servers: which runs are INVALID."""
    runs = ((arm, run) for arm, these in results.items() for run in these)
    lines = []
    for arms, why in group_invalid(runs):
        where = ", ".join(
            f"{num} of {count(len(results[arm]), 'run')} of {arm}" for arm, num in Counter(arms).items()
        )
        lines.append(
            f"INVALID: {where}: {why}. To run them again, remove their folders and give the same command."
        )
    for arm, these in results.items():
        done, planned = (sum(run.get(name) or 0 for run in these) for name in ("jobs", "jobs_planned"))
        if loses_jobs(done, planned):
            words = f"{arm} finished {done} of {count(planned, 'job')}"
            lines.append(f"INVALID: {words}, so these had less traffic beside them.")
    return lines


def describe_caches(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Name the arms whose caches were not emptied before a run."""
    not_emptied = [
        arm
        for arm, runs in results.items()
        if not all(run["client"].get("cache_emptied", True) for run in runs)
    ]
    if not not_emptied:
        return []
    return [
        f"The prefix cache of {', '.join(not_emptied)} could not be emptied between runs. Runs share no "
        "content, so no run hits another's, but it starts with a full cache. For vLLM, start the server "
        "with VLLM_SERVER_DEV_MODE=1."
    ]


SAME = 0.0005
"""A ratio that is closer to 1 than this is printed as 0.0 %."""


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
    """Whether no run's figures are INVALID."""

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
            return (
                f"{change} in {count(estimate.num_pairs, 'pair')}, too few to trust (95 % interval: {span})"
            )
        if self.differs:
            return f"{change} (95 % interval: {span}; {count(estimate.num_pairs, 'pair')})"
        if estimate.excludes_one:
            return f"no difference that matters: {change}, below the threshold (95 % interval: {span})"
        return f"no difference seen (95 % interval: {span}; {count(estimate.num_pairs, 'pair')})"

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

    `is_valid`: whether no run's figures are INVALID. Otherwise nothing is proved.
    """
    if not pairs:
        return []
    baseline, *others = pairs[0]
    return [
        replace(compare_one(pairs, (baseline, arm), measure, threshold), is_valid=is_valid)
        for arm in others
        for measure in MEASURES
        if all(pair[each][measure.name] > 0 for pair in pairs for each in (baseline, arm))
    ]


def compare_one(
    pairs: Sequence[Mapping[str, Values]], arms: tuple[str, str], measure: Measure, threshold: float
) -> Comparison:
    """Compare one measure of the second arm with the first. Needs one pair or more, with values above 0."""
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
    """Write a table and sentences. The first sentence states the first row of the table in words."""
    lines = [f"{num_pairs} of {count(num_planned, 'pair')} of runs"]
    if not num_pairs:
        lines[0] += ": no verdict, because it needs a run on every arm"
    for arm in dict.fromkeys(each.arm for each in comparisons):
        these = [each for each in comparisons if each.arm == arm]
        lines += ["", *_format_table(these), "", *_format_sentences(these)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _format_table(comparisons: Sequence[Comparison]) -> list[str]:
    head = ("", comparisons[0].baseline, comparisons[0].arm, "ratio", "95 % interval")
    rows = []
    for each in comparisons:
        means, estimate = map(fmean, (each.baseline_values, each.values)), each.estimate
        texts = (format_time_s(mean) if each.measure.is_time else f"{mean:.2f}/s" for mean in means)
        interval = "–" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"
        rows.append((each.measure.title, *texts, f"{estimate.ratio:.3f}", interval))
    return format_table(head, rows, left=(0, 4))


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
