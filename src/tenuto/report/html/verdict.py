"""States the results as text, for the top of the page and the command's output."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from tenuto.client.ab_verdict import Estimate, describe_change, describe_span
from tenuto.core.console import count
from tenuto.core.errors import clean
from tenuto.records.schema import ValidationRecord
from tenuto.records.text import MIN_PAIRS, format_validation, name_machine
from tenuto.report.html.compare import (
    BEST_STOCK,
    Contrast,
    Group,
    Load,
    PolicyCell,
    Winner,
    get_seed_spread,
    sort_policies,
)
from tenuto.report.html.sources import NO_GPU, Run, Setting
from tenuto.report.html.spec import FAULT_MARK, format_load, format_seconds, shorten

MAX_NAMED = 3
"""Winners whose names are in the headline; the others are in the map."""


@dataclass(frozen=True)
class ReportVerdict:
    """Sentences."""

    headline: str
    """The winner, by how much, at which load, against which policies."""
    splits: tuple[str, ...] = ()
    """Where each policy's difference to stock comes from: one for each policy and setting."""
    places: tuple[str, ...] = ()
    """One sentence per setting: which policy wins at which loads."""
    speed_ups: tuple[str, ...] = ()
    """How much faster than the baseline: one for each policy, the fastest first."""
    caveats: tuple[str, ...] = ()
    """How sure that is, and what was measured."""

    @property
    def sentences(self) -> list[str]:
        """All of them."""
        return [self.headline, *self.splits, *self.places, *self.speed_ups, *self.caveats]


class Place(NamedTuple):
    """A place where policies were compared, and the result."""

    group: Group
    load: Load
    winner: Winner

    @property
    def words(self) -> str:
        """Load and GPU."""
        gpu = self.group.setting.gpu
        on = "" if gpu == NO_GPU else f" on {shorten(gpu)}"
        at = "with the workload's own arrivals" if self.load is None else f"at {format_load(self.load)}"
        doubts = self.group.get_doubts(self.load)
        return f"{at}{on}" + (f" ({', '.join(doubts)})" if doubts else "")


def describe(
    runs: Sequence[Run], groups: Sequence[Group], validations: Sequence[ValidationRecord] = ()
) -> ReportVerdict:
    """The results of runs, in sentences. If there are validations, only these are described."""
    if validations:
        first, *rest = [line for record in validations for line in _describe_validation(record, validations)]
        return ReportVerdict(first, caveats=tuple(rest))
    if not runs:
        return ReportVerdict("There are no result records here, only what happened turn by turn.")
    places = [
        Place(group, load, winner)
        for group in groups
        for load in group.loads
        if (winner := group.try_winner(load))
    ]
    policies = sort_policies(cell.policy for group in groups for cell in group.cells)
    found = {policy: each for policy in policies if (each := _describe_policy(policy, places))}
    _, of_leader = found.pop(_get_leader(places), (1.0, "")) if places else (1.0, "")
    is_one = len(places) < 2
    return ReportVerdict(
        _write_headline(groups, places, of_leader),
        tuple(_describe_splits(groups)),
        () if is_one else tuple(_describe_where(places)),
        # With two policies at one load, the headline already says this.
        () if is_one and len(policies) < 3 else tuple(sentence for _, sentence in sorted(found.values())),
        tuple(_find_caveats(runs, groups, places)),
    )


def _describe_validation(record: ValidationRecord, every: Sequence[ValidationRecord]) -> list[str]:
    """Its sentences. If there are several records, all name it; the first sentence does in any case."""
    first, *others = format_validation(record)
    if len(every) == 1:
        return [first, *others]
    name = clean(f"{name_machine(record)}, {record.server.model}, {record.day}")
    return [first, *(f"{name}: {line}" for line in others)]


def _write_headline(groups: Sequence[Group], places: Sequence[Place], of_leader: str) -> str:
    if not places:
        text = _describe_no_comparison(groups)
    elif len(places) == 1:
        text = _describe_one(places[0])
    else:
        text = f"{_describe_several(places)} {of_leader}".rstrip()
    are_invalid = any(run.invalid for group in groups for cell in group.cells for run in cell.runs)
    if are_invalid and "INVALID" not in text:
        text = f"INVALID figures: {text}"
    text = _mark(text, [group.setting for group in groups])
    return text[0].upper() + text[1:] if text.startswith(("no ", "nobody ", "nothing ")) else text


def _mark(text: str, settings: Sequence[Setting]) -> str:
    kinds = {setting.kind for setting in settings}
    if kinds == {"simulated"}:
        return f"Simulated: {text}"
    if len(kinds) == 1 and settings[0].sim_speed is not None:
        return f"On a {kinds.pop()}: {text}"
    if any(setting.is_simulated or setting.sim_speed is not None for setting in settings):
        return f"Partly simulated: {text}"
    return text


def _describe_one(place: Place) -> str:
    winner, against = place.winner, place.winner.against
    best = shorten(winner.policies[0])
    if winner.is_open:
        reason = _describe_reason(against)
        return f"nothing is proved {place.words}: {reason}. {_describe_difference(against)}."
    if len(winner.policies) == len(place.group.policies) == 2:
        small = "that matters " if against.mean.excludes_one else ""
        return (
            f"no difference {small}between {best} and {shorten(winner.policies[1])} was seen {place.words}: "
            f"{_describe_values(against)}."
        )
    if winner.is_tie:
        others = " and ".join(map(shorten, winner.policies[1:4]))
        more = f" and {count(len(winner.policies) - 4, 'other')}" if len(winner.policies) > 4 else ""
        return (
            f"nobody wins {place.words}: {best} and {others}{more} are not told apart. "
            f"{_describe_difference(against)}."
        )
    num_others = len([cell for cell in place.group.cells if cell.load == place.load]) - 1
    rivals = f"than all {num_others} others" if num_others > 1 else f"than {shorten(against.other)}"
    to = f" than {shorten(against.other)}'s" if num_others > 1 else ""
    return f"{best} is faster {rivals} {place.words}: {_describe_values(against, to)}."


def _describe_reason(each: Contrast) -> str:
    if not each.is_valid:
        return "figures of these runs are INVALID"
    if each.lost_by is not None:
        return f"{shorten(each.lost_by)} did not finish many jobs, so the others had less traffic beside them"
    if not each.is_paired:
        return "no two policies ran with the same seed"
    if each.is_simulated:
        return "one seed shows no interval, it takes two or more (--seeds 1,2,3)"
    pairs = count(each.mean.num_pairs, "measured pair")
    return f"{pairs} {'is' if each.mean.num_pairs == 1 else 'are'} too few, it takes {MIN_PAIRS}"


def _describe_difference(each: Contrast) -> str:
    return f"{shorten(each.policy)} against {shorten(each.other)}: {_describe_values(each)}"


def _describe_values(each: Contrast, than: str = "") -> str:
    mean = (
        f"mean job time {format_seconds(each.values.mean_s)} against "
        f"{format_seconds(each.other_values.mean_s)} ({_describe_estimate(each.mean, than)})"
    )
    if each.p95 is None or each.values.p95_s is None:
        return mean
    return (
        f"{mean}, P95 {format_seconds(each.values.p95_s)} against {format_seconds(each.other_values.p95_s)} "
        f"({describe_change(each.p95.ratio, is_time=True)})"
    )


def _describe_estimate(estimate: Estimate, than: str) -> str:
    change = describe_change(estimate.ratio, is_time=True) + than
    if estimate.low is None or estimate.high is None:
        return f"{change}; one pair"
    span = describe_span(estimate.low, estimate.high, is_time=True)
    return f"{change}; 95 % interval: {span}; {count(estimate.num_pairs, 'pair')}"


def _describe_several(places: Sequence[Place]) -> str:
    total = count(len(places), "comparison")
    wins = Counter(place.winner.policies[0] for place in places if not place.winner.is_tie)
    num_open = sum(place.winner.is_open for place in places)
    if not wins:
        if num_open == len(places):
            return f"nothing is proved in {total}."
        open_ones = f" ({num_open} not proved)" if num_open else ""
        return f"nobody wins in any of {total}{open_ones}."
    (best, number), *others = sorted(wins.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{shorten(best)} is the fastest in {number} of {total}"]
    parts += [f"{shorten(policy)} in {number}" for policy, number in others[: MAX_NAMED - 1]]
    if hidden := others[MAX_NAMED - 1 :]:
        parts.append(f"{count(len(hidden), 'other')} in {sum(number for _, number in hidden)}")
    if num_ties := sum(place.winner.is_tie for place in places) - num_open:
        parts.append(f"nobody in {num_ties}")
    if num_open:
        parts.append(f"not proved in {num_open}")
    return f"{', '.join(parts)}."


def _get_leader(places: Sequence[Place]) -> str:
    """The policy that most often wins; if none does, that most often has the shortest mean."""
    every = [place.winner.policies[0] for place in places]
    wins = [place.winner.policies[0] for place in places if not place.winner.is_tie]
    first = wins or [policy for policy in every if policy != BEST_STOCK] or every
    return min(set(first), key=lambda policy: (-first.count(policy), policy))


def _describe_no_comparison(groups: Sequence[Group]) -> str:
    policies = sort_policies(cell.policy for group in groups for cell in group.cells)
    if not any(cell.mean_s_by_seed for group in groups for cell in group.cells):
        return "no record has a job completion time: no job finished, or none was measured."
    if _count_lost_seeds(groups):
        return "no job that took any time finished with all policies, so there is nothing to compare."
    if len(policies) > 1:
        return "no two policies ran in the same setting at the same load, so there is nothing to compare."
    cells = [(group, cell) for group in groups for cell in group.cells if cell.mean_s_by_seed]
    cells.sort(key=lambda each: statistics.fmean(each[1].mean_s_by_seed.values()))
    alone = f"{shorten(policies[0])} ran alone: mean job time"
    if len(cells) == 1:
        ((group, cell),) = cells
        return f"{alone} {_describe_times(cell)}, {group.describe_load(cell.load)}."
    ends = [
        f"{_describe_times(cell)} ({group.describe_place(cell.load)})"
        for group, cell in (cells[0], cells[-1])
    ]
    return f"{alone} from {' to '.join(ends)}. There is nothing to compare it with."


def _count_lost_seeds(groups: Sequence[Group]) -> int:
    return sum(group.count_lost_seeds(load) for group in groups for load in group.loads)


def _describe_times(cell: PolicyCell) -> str:
    p95 = cell.get("job_s", "p95")
    mean = format_seconds(statistics.fmean(cell.mean_s_by_seed.values()))
    return mean + (f", P95 {format_seconds(p95.middle)}" if p95 else "")


def _describe_splits(groups: Sequence[Group]) -> Iterator[str]:
    words = (
        " Steps: what the policy's step size does to stock; order: what the policy does with these steps "
        "and no KV kept; cache: what keeping KV adds. stock @N: stock with the best of a few step sizes, "
        "which anybody can set."
    )
    for group in groups:
        splits = {load: group.get_splits(load) for load in group.loads}
        for policy in sort_policies(policy for each in splits.values() for policy in each):
            parts = [
                f"{found.over_stock:.2f} = {found.steps:.2f} × {found.order:.2f} × {found.cache:.2f}, and "
                f"{found.over_best:.2f} of {found.best.name}, at {group.describe_load(load)}"
                for load, each in splits.items()
                if (found := each.get(policy))
            ]
            yield (
                f"{shorten(policy)} on {shorten(group.setting.gpu)}, mean job time over stock's = steps × "
                f"order × cache: {'; '.join(parts)}.{words}"
            )
            words = ""  # once is enough


def _describe_where(places: Sequence[Place]) -> Iterator[str]:
    """For each setting, the winner at each load; neighbouring loads with the same outcome are one part."""
    for _, same in groupby(places, key=lambda place: id(place.group)):
        here = list(same)
        parts = [
            f"{outcome} {_format_loads([place.load for place in stretch])}"
            for outcome, stretch in groupby(here, key=_name_outcome)
        ]
        yield f"{here[0].group.setting.words}: {'; '.join(parts)}."


def _name_outcome(place: Place) -> str:
    winner = place.winner
    if not winner.is_tie:
        return shorten(winner.policies[0])
    if winner.is_open:
        return "nothing proved"
    if set(winner.policies) == set(place.group.policies):
        return "a tie of all" if len(winner.policies) > 2 else "a tie"
    return "a tie of " + " and ".join(map(shorten, sort_policies(winner.policies)))


def _format_loads(loads: Sequence[Load]) -> str:
    numbers = [load for load in loads if load is not None]
    parts = ["with the workload's own arrivals"] if len(numbers) < len(loads) else []
    if len(numbers) == 1:
        parts.append(f"at {format_load(numbers[0])}")
    elif numbers:
        parts.append(f"from {numbers[0]:g} to {numbers[-1]:g} jobs/s")
    return " and ".join(parts)


def _describe_policy(policy: str, places: Sequence[Place]) -> tuple[float, str] | None:
    """The median ratio of a policy's mean JCT to the baseline's, and the sentence about it.

    Where there is no other baseline, the ratio of a winner is to the next best.
    """
    found: list[tuple[Contrast, Place]] = []
    for place in places:
        baseline = place.group.get_baseline(policy)
        each = place.group.contrast(policy, baseline, place.load) if policy != baseline else None
        if each is None and place.winner.policies[0] == policy:
            each = place.winner.against
        if each is not None:
            found.append((each, place))
    if not found:
        return None
    middle = statistics.median(each.mean.ratio for each, _ in found)
    if len(found) == 1:
        return middle, f"{_describe_difference(found[0][0])}."
    found.sort(key=lambda item: item[0].mean.ratio)
    ends = [
        f"{describe_change(each.mean.ratio, is_time=True)} ({place.group.describe_place(place.load)})"
        for each, place in (found[0], found[-1])
    ]
    p95s = sorted(each.p95.ratio for each, _ in found if each.p95)
    changes = dict.fromkeys(describe_change(ratio, is_time=True) for ratio in (*p95s[:1], *p95s[-1:]))
    rivals = {each.other for each, _ in found}
    rival = shorten(rivals.pop()) if len(rivals) == 1 else "the next best"
    return middle, (
        f"{shorten(policy)} against {rival}: mean job time {describe_change(middle, is_time=True)} in the "
        f"median of {count(len(found), 'comparison')}, from {' to '.join(ends)}; "
        + (f"P95 {' to '.join(changes)}; " if len(p95s) == len(found) else "")
        + f"proved in {sum(each.differs for each, _ in found)}."
    )


def _find_caveats(runs: Sequence[Run], groups: Sequence[Group], places: Sequence[Place]) -> Iterator[str]:
    if invalid := [run for run in runs if run.invalid]:
        yield (
            f"INVALID: the figures of {len(invalid)} of {count(len(runs), 'run')} do not describe the "
            f"server, so nobody wins by them. The first: {invalid[0].invalid[0]}"
        )
    for policy in sort_policies(run.policy for run in runs if run.record.policy_faults):
        faults = [run.record.policy_faults or 0 for run in runs if run.policy == policy]
        yield (
            f"Hooks of {shorten(policy)} failed {count(sum(faults), 'time')} in {sum(map(bool, faults))} of "
            f"{count(len(faults), 'run')}; the engine's default was used instead. Its label ends in"
            f"{FAULT_MARK}."
        )
    if lost := _count_lost_seeds(groups):
        yield f"Left out: {count(lost, 'seed')} with which no job finished with all policies."
    if any(place.winner.is_open and not place.winner.against.is_simulated for place in places):
        yield (
            "A policy wins if the 95 % interval of the ratio leaves 1 out. Measured runs need "
            f"{MIN_PAIRS} pairs for this, one for each seed; tenuto ab makes such pairs."
        )
    doubts = {doubt for group in groups for load in group.loads for doubt in group.get_doubts(load)}
    if "overloaded" in doubts:
        yield (
            "Overloaded: more jobs arrive than finish, so means and their ratios depend on how long the run "
            "was."
        )
    if "roofline" in doubts:
        yield "Roofline: step times come from a model. Errors are larger than with measured tables."
    if spread := get_seed_spread(groups):
        seeds = {run.seed for run in runs if run.seed is not None}
        yield (
            f"{count(len(seeds), 'seed')}: between seeds a policy's mean job completion time in one setting "
            f"differs by {spread.middle:.0%} in the median, {spread.high:.0%} at most. Ratios are taken seed "
            "by seed."
        )
    else:
        yield "One seed for each setting: how much another would change is not known, and nothing is proved."
    yield _describe_origin(runs, groups)


def _describe_origin(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    cells = [cell for group in groups for cell in group.cells]
    counted: dict[str, set[Any]] = {
        "policy": {cell.policy for cell in cells},
        "GPU": {group.setting.gpu for group in groups},
        "workload": {group.setting.workload for group in groups},
        "load": {cell.load for cell in cells},
    }
    total = ", ".join([count(len(runs), "run"), *(count(len(each), noun) for noun, each in counted.items())])
    origins = {
        "simulated": "simulated",
        "measured": "measured on a live server",
        "origin unknown": "of unknown origin",
    }
    words = []
    for kind, number in sorted(Counter(run.setting.kind for run in runs).items()):
        many = "all " if number == len(runs) > 1 else f"{number} " if number < len(runs) else ""
        words.append(many + origins.get(kind, f"on a {kind}"))
    scale = (
        " A simulated server at speed N sends everything N times as fast as the machine that it simulates "
        "would: times are real seconds, 1/N of the simulated ones, and loads are real too."
        if {run.setting.sim_speed for run in runs if run.setting.sim_speed} - {1.0}
        else ""
    )
    return f"{total}: {', '.join(words)}.{scale}"
