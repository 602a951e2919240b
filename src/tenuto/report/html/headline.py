"""The first sentence of the page: who wins, by how much, at which load, against whom."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tenuto.client.ab_verdict import MIN_PAIRS, Estimate, describe_change, describe_span
from tenuto.report.html.compare import BEST_STOCK, Group, Load, PolicyCell, Winner, sort_policies
from tenuto.report.html.pairs import Contrast
from tenuto.report.html.records import NO_GPU, Setting, shorten
from tenuto.report.html.words import count, describe_place, format_load, format_seconds

MAX_NAMED = 3
"""Winners whose names are in the headline; the others are in the map."""


class Place(NamedTuple):
    """Where policies were compared, and what came out."""

    group: Group
    load: Load
    winner: Winner

    @property
    def words(self) -> str:
        """Load and GPU."""
        gpu = self.group.setting.gpu
        on = "" if gpu == NO_GPU else f" on {shorten(gpu)}"
        at = "with arrivals as recorded" if self.load is None else f"at {format_load(self.load)}"
        doubts = self.group.get_doubts(self.load)
        return f"{at}{on}" + (f" ({', '.join(doubts)})" if doubts else "")


def write_headline(groups: Sequence[Group]) -> str:
    """Who wins, by how much, at which load, against whom; and whether it is simulated."""
    places = [
        Place(group, load, winner)
        for group in groups
        for load in group.loads
        if (winner := group.try_winner(load))
    ]
    if not places:
        text = _describe_no_comparison(groups)
    elif len(places) == 1:
        text = _describe_one(places[0])
    else:
        text = _describe_several(places)
    if any(run.invalid for group in groups for cell in group.cells for run in cell.runs):
        text = f"INVALID figures: {text}"
    return _mark(text, [group.setting for group in groups])


def _mark(text: str, settings: Sequence[Setting]) -> str:
    """Say first that numbers are simulated."""
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
        return f"nothing is proved {place.words}: {describe_reason(against)}. {describe_difference(against)}."
    if len(winner.policies) == len(place.group.policies) == 2:
        small = "that matters " if _is_sure_but_small(against) else ""
        return (
            f"no difference {small}between {best} and {shorten(winner.policies[1])} was seen {place.words}: "
            f"{_describe_values(against)}."
        )
    if winner.is_tie:
        others = " and ".join(map(shorten, winner.policies[1:4]))
        more = f" and {count(len(winner.policies) - 4, 'other')}" if len(winner.policies) > 4 else ""
        return (
            f"nobody wins {place.words}: {best} and {others}{more} are not told apart. "
            f"{describe_difference(against)}."
        )
    num_others = len([cell for cell in place.group.cells if cell.load == place.load]) - 1
    rivals = f"than all {num_others} others" if num_others > 1 else f"than {shorten(against.other)}"
    to = f" than {shorten(against.other)}'s" if num_others > 1 else ""
    return f"{best} is faster {rivals} {place.words}: {_describe_values(against, to)}."


def _is_sure_but_small(each: Contrast) -> bool:
    low, high = each.mean.low, each.mean.high
    return low is not None and high is not None and not low <= 1 <= high


def describe_reason(each: Contrast) -> str:
    """Why runs show nothing."""
    if not each.is_valid:
        return "figures of these runs are INVALID"
    if not each.is_paired:
        return "no two policies ran with the same seed"
    if each.is_simulated:
        return "one seed shows no interval, it takes two or more (--seeds 1,2,3)"
    pairs = count(each.mean.num_pairs, "measured pair")
    return f"{pairs} {'is' if each.mean.num_pairs == 1 else 'are'} too few, it takes {MIN_PAIRS}"


def describe_difference(each: Contrast) -> str:
    """One policy against another, without saying who wins."""
    return f"{shorten(each.policy)} against {shorten(each.other)}: {_describe_values(each)}"


def _describe_values(each: Contrast, than: str = "") -> str:
    """Mean and P95, how they differ, and how sure that is."""
    mean = (
        f"mean job time {format_seconds(each.values.mean_s)} against "
        f"{format_seconds(each.other_values.mean_s)} ({describe_estimate(each.mean)}{than})"
    )
    if each.p95 is None or each.values.p95_s is None:
        return mean
    return (
        f"{mean}, P95 {format_seconds(each.values.p95_s)} against {format_seconds(each.other_values.p95_s)} "
        f"({describe_change(each.p95.ratio, is_time=True)})"
    )


def describe_estimate(estimate: Estimate) -> str:
    """A ratio of times with its interval."""
    change = describe_change(estimate.ratio, is_time=True)
    if estimate.low is None or estimate.high is None:
        return f"{change}; one pair"
    span = describe_span(estimate.low, estimate.high, is_time=True)
    return f"{change}; 95 % interval: {span}; {count(estimate.num_pairs, 'pair')}"


def _describe_several(places: Sequence[Place]) -> str:
    total = count(len(places), "comparison")
    wins: dict[str, int] = {}
    for place in places:
        if not place.winner.is_tie:
            wins[place.winner.policies[0]] = wins.get(place.winner.policies[0], 0) + 1
    num_open = sum(place.winner.is_open for place in places)
    num_ties = sum(place.winner.is_tie for place in places) - num_open
    ranked = sorted(wins.items(), key=lambda item: (-item[1], item[0]))
    rest = [f"{shorten(policy)} in {number}" for policy, number in ranked[1:MAX_NAMED]]
    if others := ranked[MAX_NAMED:]:
        rest.append(f"{count(len(others), 'other')} in {sum(number for _, number in others)}")
    if num_ties:
        rest.append(f"nobody in {num_ties}")
    if num_open:
        rest.append(f"not proved in {num_open}")
    if num_open == len(places):
        most = _get_most_named(places)
        return f"nothing is proved in {total}. {_describe_range(most, places)}"
    if not ranked:
        most = _get_most_named(places)
        open_ones = f" ({num_open} not proved)" if num_open else ""
        return f"nobody wins in any of {total}{open_ones}. {_describe_range(most, places)}"
    best, number = ranked[0]
    first = f"{shorten(best)} is the fastest in {number} of {total}"
    return f"{', '.join([first, *rest])}. {_describe_range(best, places)}"


def _get_most_named(places: Sequence[Place]) -> str:
    """The policy that most often has the shortest mean."""
    every = [place.winner.policies[0] for place in places]
    first = [policy for policy in every if policy != BEST_STOCK] or every
    return max(sort_policies(first), key=first.count)


def _describe_range(policy: str, places: Sequence[Place]) -> str:
    """How much faster or slower a policy is than the baseline, over all comparisons with it."""
    found: list[tuple[Place, Contrast]] = []
    for place in places:
        baseline = place.group.baseline
        each = place.group.contrast(policy, baseline, place.load) if policy != baseline else None
        if each is None and place.winner.policies[0] == policy:
            each = place.winner.against
        if each is not None:
            found.append((place, each))
    rivals = {each.other for _, each in found}
    if not found:
        return ""
    rival = shorten(rivals.pop()) if len(rivals) == 1 else "the next best"
    parts = [f"mean job time {_describe_ends([(each.mean.ratio, place) for place, each in found])}"]
    if all(each.p95 for _, each in found):
        p95s = [(each.p95.ratio, None) for _, each in found if each.p95]
        parts.append(f"P95 {_describe_ends(p95s)}")
    return f"{shorten(policy)} against {rival}: {', '.join(parts)}."


def _describe_ends(ratios: Sequence[tuple[float, Place | None]]) -> str:
    """From the smallest to the largest change, with their places."""
    by_ratio = sorted(ratios, key=lambda item: item[0])
    first, last = by_ratio[0], by_ratio[-1]
    if last[0] < 1.0005:  # all are shorter
        first, last = last, first
    changes = [describe_change(ratio, is_time=True) for ratio, _ in (first, last)]
    if changes[0] == changes[1]:
        return f"{changes[0]} everywhere"
    return " to ".join(
        change + (f" ({describe_place(place.group, place.load)})" if place else "")
        for change, (_, place) in zip(changes, (first, last), strict=True)
    )


def _describe_no_comparison(groups: Sequence[Group]) -> str:
    policies = sort_policies(cell.policy for group in groups for cell in group.cells)
    if not any(cell.mean_s_by_seed for group in groups for cell in group.cells):
        return "no record has a job completion time: no job finished, or none was measured."
    if len(policies) > 1:
        return "no two policies ran in the same setting at the same load, so there is nothing to compare."
    cells = [(group, cell) for group in groups for cell in group.cells if cell.mean_s_by_seed]
    if len(cells) == 1:
        return _describe_alone(cells[0][1])
    by_mean = sorted(cells, key=lambda each: statistics.fmean(each[1].mean_s_by_seed.values()))
    ends = []
    for group, cell in (by_mean[0], by_mean[-1]):
        p95 = cell.get("p95_s")
        tail = f", P95 {format_seconds(p95.middle)}" if p95 else ""
        mean_s = statistics.fmean(cell.mean_s_by_seed.values())
        ends.append(f"{format_seconds(mean_s)}{tail} ({describe_place(group, cell.load)})")
    return (
        f"{shorten(policies[0])} ran alone: mean job time from {' to '.join(ends)}. "
        "There is nothing to compare it with."
    )


def _describe_alone(cell: PolicyCell) -> str:
    mean, p95 = cell.get("mean_s"), cell.get("p95_s")
    return (
        f"{shorten(cell.policy)} ran alone: mean job time {format_seconds(mean and mean.middle)}"
        + (f", P95 {format_seconds(p95.middle)}" if p95 else "")
        + f", {format_load(cell.load)}."
    )
