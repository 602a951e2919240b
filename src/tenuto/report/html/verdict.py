"""States the results as text, for the top of the page and the command's output."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tenuto.client.ab_verdict import MIN_PAIRS, describe_change
from tenuto.report.html.compare import (
    Group,
    Load,
    Spread,
    Winner,
    get_seed_spread,
    sort_policies,
)
from tenuto.report.html.headline import describe_difference, write_headline
from tenuto.report.html.pairs import Contrast
from tenuto.report.html.records import FAULT_MARK, Run, shorten
from tenuto.report.html.words import count, describe_load, describe_place, describe_setting, format_load


@dataclass(frozen=True)
class ReportVerdict:
    """Sentences."""

    headline: str
    """Who wins, by how much, at which load, against whom."""
    places: tuple[str, ...] = ()
    """One sentence per setting: which policy wins at which loads."""
    splits: tuple[str, ...] = ()
    """Where each policy's difference to stock comes from: one for each policy and setting."""
    speed_ups: tuple[str, ...] = ()
    """How much faster than the baseline: one for each policy, the fastest first."""
    caveats: tuple[str, ...] = ()
    """How sure that is, and what was measured."""

    @property
    def sentences(self) -> list[str]:
        """All of them."""
        return [self.headline, *self.splits, *self.places, *self.speed_ups, *self.caveats]


def describe(runs: Sequence[Run], groups: Sequence[Group]) -> ReportVerdict:
    """What came out of runs."""
    if not runs:
        return ReportVerdict("There are no result records here, only what happened turn by turn.")
    policies = sort_policies(run.policy for run in runs)
    speed_ups = sorted(filter(None, (_describe_speed_up(policy, groups) for policy in policies)))
    num_places = sum(group.try_winner(load) is not None for group in groups for load in group.loads)
    headline = write_headline(groups)
    return ReportVerdict(
        headline[0].upper() + headline[1:] if headline.startswith("no") else headline,
        tuple(_describe_splits(groups)),
        tuple(_describe_where(group) for group in groups if _has_winner(group)) if num_places > 1 else (),
        # With two policies at one load, the headline has said it.
        tuple(sentence for _, sentence in speed_ups) if num_places > 1 or len(speed_ups) > 1 else (),
        (
            *_describe_invalid(runs),
            *_describe_faults(runs),
            *_describe_rule(groups),
            *_describe_doubts(groups),
            _describe_spread(runs, groups),
            _describe_origin(runs, groups),
        ),
    )


def _describe_splits(groups: Sequence[Group]) -> Iterator[str]:
    """How much of each policy's difference to stock is due to steps, order and cache."""
    is_explained = False
    for group in groups:
        splits = {load: group.get_splits(load) for load in group.loads}
        for policy in sort_policies(policy for each in splits.values() for policy in each):
            parts = [
                f"{found.over_stock:.2f} = {found.steps:.2f} × {found.order:.2f} × {found.cache:.2f}, and "
                f"{found.over_best:.2f} of {found.best.name}, at {describe_load(group, load)}"
                for load, each in splits.items()
                if (found := each.get(policy))
            ]
            words = (
                ""
                if is_explained
                else " Steps: what the policy's size of steps does to stock; order: what the policy does "
                "with these steps and no KV kept; cache: what keeping KV adds. stock @N: stock with the best "
                "of a few sizes of steps, which anybody can set."
            )
            is_explained = True
            yield (
                f"{shorten(policy)} on {shorten(group.setting.gpu)}, mean job time over stock's = steps × "
                f"order × cache: {'; '.join(parts)}.{words}"
            )


def _describe_doubts(groups: Sequence[Group]) -> Iterator[str]:
    """What overloaded and roofline mean, where a place is marked so."""
    doubts = {doubt for group in groups for load in group.loads for doubt in group.get_doubts(load)}
    if "overloaded" in doubts:
        yield (
            "Overloaded: more jobs arrive than finish, so means and their ratios depend on how long the run "
            "was."
        )
    if "roofline" in doubts:
        yield "Roofline: step times are a rougher guess than measured tables."


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
    if winner.is_open:
        return "nothing proved"
    if set(winner.policies) == set(group.policies):
        return "a tie of all" if len(winner.policies) > 2 else "a tie"
    return "a tie of " + " and ".join(map(shorten, sort_policies(winner.policies)))


def _format_loads(loads: Sequence[Load]) -> str:
    numbers = [load for load in loads if load is not None]
    parts = ["with arrivals as recorded"] if len(numbers) < len(loads) else []
    if len(numbers) == 1:
        parts.append(f"at {format_load(numbers[0])}")
    elif numbers:
        parts.append(f"from {numbers[0]:g} to {numbers[-1]:g} jobs/s")
    return " and ".join(parts)


def _describe_speed_up(policy: str, groups: Sequence[Group]) -> tuple[float, str] | None:
    """The median ratio of a policy's mean JCT to the baseline's, and the sentence about it."""
    found: list[tuple[Contrast, Group, Load]] = [
        (each, group, load)
        for group in groups
        if policy != group.baseline
        for load in group.loads
        if (each := group.contrast(policy, group.baseline, load))
    ]
    if not found:
        return None
    middle = statistics.median(each.mean.ratio for each, _, _ in found)
    if len(found) == 1:
        return middle, f"{describe_difference(found[0][0])}."
    found.sort(key=lambda item: item[0].mean.ratio)
    rivals = {each.other for each, _, _ in found}
    ends = [
        f"{describe_change(each.mean.ratio, is_time=True)} ({describe_place(group, load)})"
        for each, group, load in (found[0], found[-1])
    ]
    num_shown = sum(each.differs for each, _, _ in found)
    rival = shorten(rivals.pop()) if len(rivals) == 1 else "the baseline"
    return middle, (
        f"{shorten(policy)} against {rival}: mean job time "
        f"{describe_change(middle, is_time=True)} in the median of {count(len(found), 'comparison')}, "
        f"from {ends[0]} to {ends[1]}; proved in {num_shown}."
    )


def _describe_invalid(runs: Sequence[Run]) -> list[str]:
    """Say which runs' figures do not count."""
    invalid = [run for run in runs if run.invalid]
    if not invalid:
        return []
    return [
        f"INVALID: the figures of {len(invalid)} of {count(len(runs), 'run')} do not describe the server, so "
        f"nobody wins by them. The first: {invalid[0].invalid[0]}"
    ]


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


def _describe_rule(groups: Sequence[Group]) -> list[str]:
    """When somebody wins, by the kinds of runs that are there."""
    winners = [winner for group in groups for load in group.loads if (winner := group.try_winner(load))]
    if not winners:
        return []
    if all(winner.against.is_simulated for winner in winners if winner.is_open):
        return []
    if any(winner.is_open for winner in winners):
        return [
            "A policy wins if the 95 % interval of the ratio leaves 1 out. Measured runs need "
            f"{MIN_PAIRS} pairs for this, one for each seed; tenuto ab makes such pairs."
        ]
    return []


def _describe_spread(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    seeds = {run.seed for run in runs if run.seed is not None}
    spread: Spread | None = get_seed_spread(groups)
    if spread is None:
        return "One seed for each setting: how much another would change is not known, and nothing is proved."
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
    speeds = {run.setting.sim_speed for run in runs if run.setting.sim_speed} - {1.0}
    scale = (
        " A simulated server at speed N sends everything N times as fast as the machine that it simulates "
        "would: times are real seconds, 1/N of the simulated ones, and loads are real too."
        if speeds
        else ""
    )
    if len(kinds) == 1:
        (kind,) = kinds
        return total + ("all " if len(runs) > 1 else "") + f"{words.get(kind, f'on a {kind}')}.{scale}"
    parts = (f"{number} {words.get(kind, f'on a {kind}')}" for kind, number in sorted(kinds.items()))
    return total + ", ".join(parts) + f".{scale}"


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
