"""States the results as text, for the top of the page and the command's output."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenuto.report.html.compare import (
    BASELINE,
    TIE,
    Group,
    Load,
    PolicyCell,
    Spread,
    Winner,
    get_seed_spread,
    sort_policies,
)
from tenuto.report.html.records import FAULT_MARK, Run, shorten

MAX_NAMED = 3
"""Winners whose names are in the headline; the others are in the map."""


@dataclass(frozen=True)
class ReportVerdict:
    """Sentences."""

    headline: str
    """Which policies win, and how often."""
    places: tuple[str, ...] = ()
    """One sentence per setting: which policy wins at which loads."""
    speed_ups: tuple[str, ...] = ()
    """How much faster than stock: one for each policy, the fastest first."""
    caveats: tuple[str, ...] = ()
    """How sure that is, and what was measured."""

    @property
    def sentences(self) -> list[str]:
        """All of them."""
        return [self.headline, *self.places, *self.speed_ups, *self.caveats]


def describe(runs: Sequence[Run], groups: Sequence[Group]) -> ReportVerdict:
    """What came out of runs."""
    if not runs:
        return ReportVerdict("There are no result records here, only what happened turn by turn.")
    policies = sort_policies(run.policy for run in runs if run.policy != BASELINE)
    speed_ups = sorted(
        filter(None, (_describe_speed_up(policy, groups) for policy in policies)), reverse=True
    )
    return ReportVerdict(
        _describe_winners(groups),
        tuple(_describe_where(group) for group in groups if _has_winner(group)),
        tuple(sentence for _, sentence in speed_ups),
        (*_describe_faults(runs), _describe_spread(runs, groups), _describe_origin(runs, groups)),
    )


def format_load(load: Load) -> str:
    """A load in words."""
    return "arrivals as recorded" if load is None else f"{load:g} {'job' if load == 1 else 'jobs'}/s"


def format_ratio(ratio: float) -> str:
    """A speed-up: 1.84×."""
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def format_seconds(seconds: float | None) -> str:
    """A time with three digits."""
    if seconds is None:
        return "–"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 run, 2 runs."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _describe_winners(groups: Sequence[Group]) -> str:
    winners = [winner for group in groups for load in group.loads if (winner := group.try_winner(load))]
    if not winners:
        return _describe_no_winner(groups)
    alone: dict[str, int] = {}
    for winner in winners:
        if not winner.is_tie:
            alone[winner.policies[0]] = alone.get(winner.policies[0], 0) + 1
    num_ties = sum(winner.is_tie for winner in winners)
    if len(winners) == 1:
        best = shorten(winners[0].policies[0])
        return f"{best} has the shortest mean job completion time{_note_tie(winners[0])}."
    total = count(len(winners), "comparison")
    ranked = sorted(alone.items(), key=lambda item: (-item[1], item[0]))
    wins = [f"{shorten(policy)} in {number}" for policy, number in ranked[1:MAX_NAMED]]
    if others := ranked[MAX_NAMED:]:
        wins.append(f"{count(len(others), 'other')} in {sum(number for _, number in others)}")
    parts = []
    if ranked:
        best, number = ranked[0]
        first = f"{shorten(best)} has the shortest mean job completion time in {number} of {total}"
        parts.append(", ".join([first, *wins]))
    if num_ties:
        share = f"{num_ties}" if parts else f"{num_ties} of {total}"
        parts.append(f"{share} {'ends' if num_ties == 1 else 'end'} in a tie (within {TIE:.0%})")
    return f"{'; '.join(parts)}."


def _note_tie(winner: Winner) -> str:
    if not winner.is_tie:
        return ""
    return f", in a tie (within {TIE:.0%}) with {' and '.join(map(shorten, winner.policies[1:]))}"


def _describe_no_winner(groups: Sequence[Group]) -> str:
    policies = sort_policies(cell.policy for group in groups for cell in group.cells)
    if not any(cell.mean_s_by_seed for group in groups for cell in group.cells):
        return "No record has a job completion time: no job finished, or none was measured."
    if len(policies) > 1:
        return "No two policies ran in the same setting at the same load, so there is nothing to compare."
    cells = [(group, cell) for group in groups for cell in group.cells if cell.mean_s_by_seed]
    if len(cells) == 1:
        return _describe_alone(cells[0][1])
    by_mean = sorted(cells, key=lambda each: statistics.fmean(each[1].mean_s_by_seed.values()))
    ends = [
        f"{format_seconds(statistics.fmean(cell.mean_s_by_seed.values()))} ({_place(group, cell.load)})"
        for group, cell in (by_mean[0], by_mean[-1])
    ]
    return (
        f"{shorten(policies[0])} ran alone: mean job completion time from {' to '.join(ends)}. "
        "There is nothing to compare it with."
    )


def _describe_alone(cell: PolicyCell) -> str:
    mean, p95 = cell.get("mean_s"), cell.get("p95_s")
    return (
        f"{shorten(cell.policy)} ran alone: mean job completion time {format_seconds(mean and mean.middle)}"
        + (f", P95 {format_seconds(p95.middle)}" if p95 else "")
        + f", {format_load(cell.load)}."
    )


def _has_winner(group: Group) -> bool:
    return any(group.try_winner(load) for load in group.loads)


def _describe_where(group: Group) -> str:
    """One sentence: who wins at which loads of one setting; neighbours with one outcome are one part."""
    stretches: list[tuple[str, list[Load]]] = []
    for load in group.loads:
        winner = group.try_winner(load)
        if winner is None:
            continue
        outcome = _name_outcome(winner, group)
        if stretches and stretches[-1][0] == outcome:
            stretches[-1][1].append(load)
        else:
            stretches.append((outcome, [load]))
    parts = [f"{outcome} {_format_loads(loads)}" for outcome, loads in stretches]
    return f"{describe_setting(group)}: {'; '.join(parts)}."


def _name_outcome(winner: Winner, group: Group) -> str:
    if not winner.is_tie:
        return shorten(winner.policies[0])
    if set(winner.policies) == set(group.policies):
        return "a tie of all" if len(winner.policies) > 2 else "a tie"
    return "a tie of " + " and ".join(map(shorten, sort_policies(winner.policies)))


def describe_setting(group: Group) -> str:
    """A setting in a line."""
    each = group.setting
    names = ", ".join(map(shorten, (each.gpu, each.model, each.workload)))
    return f"{names} ({each.kind}{f'; {each.variant}' if each.variant else ''})"


def _format_loads(loads: Sequence[Load]) -> str:
    numbers = [load for load in loads if load is not None]
    parts = ["with arrivals as recorded"] if len(numbers) < len(loads) else []
    if len(numbers) == 1:
        parts.append(f"at {format_load(numbers[0])}")
    elif numbers:
        parts.append(f"from {numbers[0]:g} to {numbers[-1]:g} jobs/s")
    return " and ".join(parts)


def _describe_speed_up(policy: str, groups: Sequence[Group]) -> tuple[float, str] | None:
    """The median ratio, and the sentence about it."""
    found = [
        (speed_up.middle, group, load)
        for group in groups
        for load in group.loads
        if (speed_up := group.try_speed_up(policy, load))
    ]
    if not found:
        return None
    middle = statistics.median(ratio for ratio, _, _ in found)
    if len(found) == 1:
        return middle, f"Over {BASELINE}, {shorten(policy)} is {format_ratio(middle)} as fast."
    low, high = min(found, key=lambda each: each[0]), max(found, key=lambda each: each[0])
    return middle, (
        f"Over {BASELINE}, {shorten(policy)} is {format_ratio(middle)} as fast in the median of "
        f"{count(len(found), 'comparison')}: from {format_ratio(low[0])} ({_place(low[1], low[2])}) "
        f"to {format_ratio(high[0])} ({_place(high[1], high[2])})."
    )


def _place(group: Group, load: Load) -> str:
    return f"{shorten(group.setting.gpu)}, {format_load(load)}"


def _describe_faults(runs: Sequence[Run]) -> list[str]:
    """A sentence for each policy whose hooks failed."""
    sentences = []
    for policy in sort_policies(run.policy for run in runs if run.policy_faults):
        these = [run for run in runs if run.policy == policy]
        num_faults = sum(run.policy_faults or 0 for run in these)
        num_faulty = sum(bool(run.policy_faults) for run in these)
        sentences.append(
            f"Hooks of {shorten(policy)} failed {count(num_faults, 'time')} in {num_faulty} of "
            f"{count(len(these), 'run')}; the engine's default was used instead. Its label ends in"
            f"{FAULT_MARK}."
        )
    return sentences


def _describe_spread(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    seeds = {run.seed for run in runs if run.seed is not None}
    spread: Spread | None = get_seed_spread(groups)
    if spread is None:
        return "One seed for each setting: how much another would change is not known."
    return (
        f"{count(len(seeds), 'seed')}: between seeds a policy's mean job completion time in one setting "
        f"differs by {spread.middle:.0%} in the median, {spread.high:.0%} at most. Ratios are taken seed by "
        "seed."
    )


def _describe_origin(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    kinds: dict[str, int] = {}
    for run in runs:
        kinds[run.setting.kind] = kinds.get(run.setting.kind, 0) + 1
    words = {
        "simulated": "simulated",
        "measured": "measured on a live server",
        "origin unknown": "of unknown origin",
    }
    total = f"{count(len(runs), 'run')}, {_count_all(groups)}: "
    if len(kinds) == 1:
        (kind,) = kinds
        return total + ("all " if len(runs) > 1 else "") + f"{words[kind]}."
    return total + ", ".join(f"{number} {words[kind]}" for kind, number in sorted(kinds.items())) + "."


def _count_all(groups: Sequence[Group]) -> str:
    def distinct(values: Iterable[object]) -> int:
        return len(set(values))

    cells = [cell for group in groups for cell in group.cells]
    return ", ".join(
        [
            count(distinct(cell.policy for cell in cells), "policy"),
            count(distinct(group.setting.gpu for group in groups), "GPU"),
            count(distinct(group.setting.workload for group in groups), "workload"),
            count(distinct(cell.load for cell in cells), "load"),
        ]
    )
