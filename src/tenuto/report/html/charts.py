"""Every chart of a report, made from the runs' numbers. To add one, write its spec here and list it below.

A chart of one setting is a function in `OF_A_SETTING`. A picture that is not of one setting joins
`make_sections`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from tenuto.core.console import count
from tenuto.core.errors import clean
from tenuto.core.types import LeaseEnd
from tenuto.records.codec import is_number
from tenuto.records.metrics import FIGURES, get_known_mean, get_percentile, group_by
from tenuto.records.schema import Sample, ValidationRecord
from tenuto.records.text import name_arm, name_machine
from tenuto.report.html.compare import Group, Load, PolicyCell, Spread, Winner, sort_loads, sort_policies
from tenuto.report.html.sources import AbVerdict, Detail, Run, Sources
from tenuto.report.html.spec import (
    SOLID,
    TIME,
    Area,
    Axis,
    Bars,
    Chart,
    Fill,
    Grid,
    Look,
    Looks,
    Mark,
    Panel,
    Reference,
    Series,
    Signs,
    Table,
    Tile,
    Trace,
    format_load,
    format_ratio,
    format_seconds,
    format_share,
    shorten,
    stretch,
)
from tenuto.report.html.timeline import HEIGHTS, LABELS, CacheVerdict, Life, State, follow_jobs

T = TypeVar("T")

MAX_PICTURES = 12
"""Maximum number of pictures of one kind, and of settings with their own charts, which take about 300 kB."""
MAX_ENGINES = 64
"""Maximum number of engines that are drawn per run. The table has all."""
MAX_BANDS = 6
"""Maximum number of policies with bands up to P95. More bands would cover each other."""
MAX_POINTS = 300
"""Maximum number of points of a curve. More samples are averaged over equal stretches of time."""
MAX_ROWS = 500
"""Maximum number of rows in a table."""
MAX_LIVES = 8
"""Maximum number of jobs drawn per run. The timeline has all of them, and can be zoomed."""
MAX_RIVALS = 3
"""Names in the caption of the policies that winners are compared with."""


@dataclass(frozen=True)
class Section:
    """A heading and the charts under it."""

    name: str
    title: str
    charts: tuple[Chart, ...]


def make_sections(sources: Sources, groups: Sequence[Group], looks: Looks) -> tuple[list[Section], list[str]]:
    """All charts under their headings, and notes about what is left out."""
    sections, notes = [], []

    def add(name: str, title: str, charts: Iterable[Chart | None], number: int = 0) -> None:
        """Add a section. Charts of one kind are numbered; those of one setting have its number."""
        found = [
            replace(chart, name=f"{chart.name}-{number or index}")
            for index, chart in enumerate(filter(None, charts), 1)
        ]
        if found:
            sections.append(Section(name, title, tuple(found)))

    def cut(found: Sequence[T], what: str, noun: str) -> Sequence[T]:
        """The first ones, with a note about the others."""
        if len(found) > MAX_PICTURES:
            drawn = f"{what}: {MAX_PICTURES} of {count(len(found), noun)} are drawn"
            notes.append(f"{drawn}; give fewer records to see the others.")
        return found[:MAX_PICTURES]

    title = "Measured and simulated"
    add("validation", title, map(plot_validation, cut(sources.validations, title, "validation")))
    # A map for each workload, model and origin; GPUs side by side.
    by_place = group_by(groups, lambda group: (*group.setting[:2], *group.setting[3:]))
    maps = cut(list(by_place.values()), "Winners", "map")
    add("winners", "Winners", (map_winners(each, looks) for each in maps))
    marks = {run.setting.mark for run in sources.runs if run.ab}
    mark = marks.pop() if len(marks) == 1 else ""  # All runs of a comparison have one origin.
    verdicts = cut(sources.verdicts, "A/B comparison", "verdict")
    add("ab", "A/B comparison", (plot_ab(each, looks, mark) for each in verdicts))
    for number, group in enumerate(cut(groups, "Charts of a setting", "setting"), 1):
        charts = (make(group, looks) for make in OF_A_SETTING)
        marked = (chart and replace(chart, mark=group.setting.mark) for chart in charts)
        add(f"setting-{number}", group.setting.words, marked, number)
    add("fleet", "Several engines", cut(plot_fleets(sources.runs), "Several engines", "run"))
    seen = [detail for detail in sources.details if detail.samples]
    title = "KV cache over time"
    add("kv", title, map(plot_occupancy, cut(seen, title, "run")))
    lived = [detail for detail in sources.details if detail.turns]
    add("lives", "A few jobs", map(plot_lives, cut(lived, "A few jobs", "run")))
    return sections, notes


# Charts of one setting: against load, or at one load with a row for each policy.


def plot_jct(group: Group, looks: Looks) -> Chart | None:
    """JCT against load: the mean, the band up to P95, whiskers over seeds."""
    cells = group.get_cells()
    if not cells:
        return None
    at = _describe_loads(group, (cell.load for cell in cells))
    has_bands = at.is_one or len({cell.policy for cell in cells}) <= MAX_BANDS
    points = []
    for cell in cells:
        mean, p95 = cell.get("job_s", "mean"), cell.get("job_s", "p95")
        assert mean is not None  # cells with a JCT were chosen
        band = (mean.middle, p95.middle if p95 else mean.middle) if has_bands else None
        points.append(_Point(cell.policy, cell.load, mean, band))
    return Chart(
        name="jct",
        title=f"Job completion time{at.words}",
        caption="Markers: mean over jobs and seeds, whiskers: lowest and highest seed. "
        + (f"{'Bars reach' if at.is_one else 'The band reaches'} from the mean to P95. " if has_bands else "")
        + "Lower is better.",
        panels=[_against_load(points, looks, replace(TIME, label="job completion time"), height=3.6)],
        table=Table(
            ("Policy", "Load", "Seeds", "Jobs", "Mean", "Seeds from – to", "P50", "P95", "P99", "Speed-up",
             "TTFT P95", "Prompt tokens hit", "Loaded", *(each.title for each in FIGURES), "Preemptions"),
            tuple(_make_jct_row(group, cell, looks) for cell in cells),
        ),
    )  # fmt: skip


def _make_jct_row(group: Group, cell: PolicyCell, looks: Looks) -> tuple[str, ...]:
    mean, speed_up = cell.get("job_s", "mean"), group.try_speed_up(cell.policy, cell.load)
    records = [run.record.to_json() for run in cell.runs]

    def write(field: str, stat: str) -> str:
        spread = cell.get(field, stat)
        return format_seconds(spread.middle if spread else None)

    def write_share(field: str) -> str:
        part, whole = cell.get(field), cell.get("prompt_tokens")
        return f"{part.middle / whole.middle:.1%}" if part and whole and whole.middle else "–"

    return (
        looks[cell.policy].label,
        group.describe_load(cell.load),
        str(len(cell.mean_s_by_seed)),
        f"{sum(run.record.jobs or 0 for run in cell.runs):,}",
        write("job_s", "mean"),
        f"{format_seconds(mean.low)} – {format_seconds(mean.high)}" if mean else "–",
        *(write("job_s", stat) for stat in ("p50", "p95", "p99")),
        format_ratio(speed_up.middle) if speed_up else "–",
        write("ttft_s", "p95"),
        *map(write_share, ("hit_tokens", "loaded_tokens")),
        *(figure.write(figure.get(records)) or "–" for figure in FIGURES),
        f"{preemptions.middle:,.0f}" if (preemptions := cell.get("preemptions")) else "–",
    )


def plot_speed_ups(group: Group, looks: Looks) -> Chart | None:
    """How many times faster than the baseline each policy is, and whether that is proved."""
    points, rows = [], []
    for policy in group.policies:
        baseline = group.get_baseline(policy)
        for load in group.loads:
            speed_up = group.try_speed_up(policy, load)
            contrast = group.contrast(policy, baseline, load)
            if policy == baseline or speed_up is None or contrast is None:
                continue
            points.append(_Point(policy, load, speed_up, is_proved=contrast.differs))
            low, high = contrast.mean.low, contrast.mean.high
            interval = (
                "–" if low is None or high is None else f"{format_ratio(1 / high)} – {format_ratio(1 / low)}"
            )
            place, differs = (looks[policy].label, group.describe_load(load)), contrast.differs
            rows.append((*place, *map(format_ratio, speed_up), interval, "yes" if differs else "no"))
    if not points:
        return None
    at, baseline = _describe_loads(group, (point.load for point in points)), shorten(group.baseline)
    which = baseline if group.baseline in group.policies else f"{baseline} behind the same router"
    label = f"mean JCT of {shorten(baseline, 16)} / policy"
    ends = stretch([1.0, *(end for point in points for end in point.value)], 0.05) if at.is_one else None
    return Chart(
        name="speed-up",
        title=f"How many times faster than {which}" + (at.words if at.is_one else ""),
        caption=f"Mean job completion time of {which} over the policy's, seed by seed: marker at the "
        "geometric mean, whiskers to the lowest and highest seed. Above 1× the policy is faster. A marker "
        "with a light centre is no proof: its 95 % interval holds 1×, or it has too few pairs for one.",
        panels=[
            _against_load(
                points, looks, Axis(label=label, write="{:g}×".format, ends=ends), height=3.0,
                reference=Reference(1, "" if at.is_one else shorten(baseline, 10)),
            )
        ],
        table=Table(
            ("Policy", "Load", "Mean", "Lowest seed", "Highest seed", "95 % interval", "Differs"), tuple(rows)
        ),
    )  # fmt: skip


def plot_hits(group: Group, looks: Looks) -> Chart | None:
    """Hits as a share of the reusable tokens; of all prompt tokens if a run does not count those."""
    cells = [
        cell for policy in group.policies for load in group.loads if (cell := group.try_cell(policy, load))
    ]
    records = [run.record for cell in cells for run in cell.runs]
    of_reusable = any(each.reused_tokens is not None and each.reusable_tokens for each in records) and all(
        each.reusable_tokens is not None for each in records if each.hit_tokens is not None
    )
    part, whole = ("reused_tokens", "reusable_tokens") if of_reusable else ("hit_tokens", "prompt_tokens")
    points = []
    for cell in cells:
        counts = [(getattr(run.record, part), getattr(run.record, whole)) for run in cell.runs]
        if shares := [one / all_ for one, all_ in counts if one is not None and all_]:
            points.append(_Point(cell.policy, cell.load, Spread.of(shares)))
    if not any(point.value.high for point in points):
        return None
    at = _describe_loads(group, (point.load for point in points))
    what = "reusable" if of_reusable else "prompt"
    if at.is_one:
        points = [point._replace(band=(0, point.value.middle)) for point in points]
    return Chart(
        name="hits",
        title=f"Cache hits{at.words}",
        caption=f"Share of the {what} tokens that were found in the cache when a turn started; whiskers: "
        "lowest and highest run. "
        + (
            "Reusable are the tokens that the job's previous turn left: 100% is the best a policy can do."
            if of_reusable
            else "First turns and new text cannot be hit, so 100% is out of reach."
        ),
        panels=[
            _against_load(points, looks, replace(_SHARE, label=f"share of {what} tokens hit"), height=2.6)
        ],
        table=Table(
            ("Policy", "Load", "Mean", "Lowest", "Highest"),
            tuple(
                (looks[each.policy].label, group.describe_load(each.load), *map(format_share, each.value))
                for each in points
            ),
        ),
    )


class _Point(NamedTuple):
    policy: str
    load: Load
    value: Spread
    band: tuple[float, float] | None = None
    is_proved: bool = True


class _Loads(NamedTuple):
    is_one: bool
    words: str
    """The end of a title."""


_SHARE = Axis(write="{:.0%}".format, ends=(0, 1.04))


def _describe_loads(group: Group, loads: Iterable[Load]) -> _Loads:
    first, *others = sort_loads(loads)
    return _Loads(False, " against load") if others else _Loads(True, f", {group.describe_load(first)}")


def _against_load(
    points: Sequence[_Point], looks: Looks, values: Axis, *, height: float, reference: Reference | None = None
) -> Panel:
    """A curve for each policy; with a single load, a row for each."""
    loads = sort_loads(point.load for point in points)
    if len(loads) == 1:
        rows = [_make_series(looks[point.policy], [row], [point]) for row, point in enumerate(points)]
        labels = [series.look.label for series in rows]
        return _make_rows(labels, rows, values, reference=reference)
    numbers = [load for load in loads if load is not None]
    low, high = numbers[0], numbers[-1]
    # Runs without a load are left of all others.
    places = {load: low - max(1.0, (high - low) / 4) if load is None else load for load in loads}
    names = {place: "as\nrecorded" if load is None else f"{load:g}" for load, place in places.items()}
    x = Axis(label="load, jobs/s", ends=stretch(list(places.values()), 0.5))
    curves = []
    for policy in dict.fromkeys(point.policy for point in points):
        same = [point for point in points if point.policy == policy]
        curves.append(_make_series(looks[policy], [places[point.load] for point in same], same))
    x = replace(x, places=names) if None in loads else x
    return Panel(marks=curves, x=x, y=values, height=height, reference=reference)


def _make_series(look: Look, at: Sequence[float], points: Sequence[_Point]) -> Series:
    return Series(
        look=look,
        at=at,
        values=[point.value.middle for point in points],
        ranges=[point.value[1:] for point in points],
        bands=[point.band for point in points if point.band],
        unproved=[not point.is_proved for point in points],
    )


def _make_rows(
    labels: Sequence[str],
    marks: Sequence[Mark],
    values: Axis,
    *,
    inches: float = 0.36,
    reference: Reference | None = None,
) -> Panel:
    return Panel(
        marks=marks,
        x=values,
        y=Axis(places=dict(enumerate(labels))),
        height=0.6 + inches * len(labels),
        has_rows=True,
        reference=reference,
    )


# Charts of one setting, with a panel for each of a few loads.


def plot_turns(group: Group, looks: Looks) -> Chart | None:
    """Mean latency of first turns, second turns and so on, at up to three loads."""
    # Single turns have no curve.
    loads = _choose_loads(group, lambda cell: len(_average_turns(cell)) > 1)
    if not loads:
        return None
    rows, panels = [], []
    for load in loads:
        curves = []
        for policy in group.policies:
            means = _average_turns(group.try_cell(policy, load))
            if means:
                curves.append(Series(look=looks[policy], at=list(means), values=list(means.values())))
            rows += [
                (looks[policy].label, group.describe_load(load), str(turn), format_seconds(latency))
                for turn, latency in means.items()
            ]
        turns = [turn for curve in curves for turn in curve.at]
        x = Axis(label="turn", is_whole=True, ends=stretch(turns, 0.5))
        y = replace(TIME, label="mean turn latency")
        panels.append(Panel(marks=curves, x=x, y=y, title=group.describe_load(load), height=2.6))
    return Chart(
        name="turns",
        title="Latency turn by turn",
        caption="Mean time from when a turn was due to its last token, over all jobs' first turns, second "
        "turns and so on. A policy that keeps the cache has flat later turns."
        + (f" The table has {MAX_ROWS} of {len(rows):,} rows." if len(rows) > MAX_ROWS else ""),
        panels=panels,
        table=Table(("Policy", "Load", "Turn", "Mean latency"), tuple(rows[:MAX_ROWS])),
    )


def plot_cdf(group: Group, looks: Looks) -> Chart | None:
    """Distribution of JCT over all jobs of all seeds, at up to three loads."""
    loads = _choose_loads(group, lambda cell: len(cell.job_times_s) > 1)
    if not loads:
        return None
    rows, panels = [], []
    for load in loads:
        curves = []
        for policy in group.policies:
            cell = group.try_cell(policy, load)
            times_s = cell.job_times_s if cell else []
            if not times_s:
                continue
            # Thinned to what a line can show.
            stride = max(1, len(times_s) // MAX_POINTS)
            shown = sorted({*range(0, len(times_s), stride), len(times_s) - 1})
            curves.append(
                Series(
                    look=looks[policy],
                    at=[times_s[index] for index in shown],
                    values=[(index + 1) / len(times_s) for index in shown],
                    every=max(1, len(shown) // 6),
                )
            )
            quantiles = (format_seconds(get_percentile(times_s, percent)) for percent in (10, 50, 90, 99))
            rows.append((looks[policy].label, group.describe_load(load), f"{len(times_s):,}", *quantiles))
        x, y = replace(TIME, label="job completion time"), replace(_SHARE, label="share of jobs done")
        panels.append(Panel(marks=curves, x=x, y=y, title=group.describe_load(load), height=2.6))
    return Chart(
        name="cdf",
        title="Distribution of job completion times",
        caption="For each time, the share of all jobs of all seeds that took no longer. A curve further left "
        "is better; a long flat top is a slow tail.",
        panels=panels,
        table=Table(("Policy", "Load", "Jobs", "10% within", "50%", "90%", "99%"), tuple(rows)),
    )


def _choose_loads(group: Group, has_data: Callable[[PolicyCell], bool]) -> list[Load]:
    """The lowest, the middle and the highest load with data."""
    loads = sort_loads(cell.load for cell in group.cells if has_data(cell))
    return loads if len(loads) <= 3 else [loads[0], loads[len(loads) // 2], loads[-1]]


def _average_turns(cell: PolicyCell | None) -> dict[int, float]:
    """Mean latency per turn; every run counts the same."""
    every = (run.record.get_turn_latencies().items() for run in (cell.runs if cell else ()))
    found = group_by(chain.from_iterable(every), lambda item: item[0])
    return {turn: statistics.fmean(latency_s for _, latency_s in found[turn]) for turn in sorted(found)}


OF_A_SETTING: tuple[Callable[[Group, Looks], Chart | None], ...] = (
    plot_jct,
    plot_speed_ups,
    plot_hits,
    plot_turns,
    plot_cdf,
)
"""The charts of each setting, in their order on the page. None where a setting has no data for one."""


# Charts over all settings, of comparisons, fleets and single runs.


def map_winners(groups: Sequence[Group], looks: Looks) -> Chart | None:
    """The winner per GPU and load, and by how much it wins; for one workload and model."""
    winners = {
        (index, load): winner
        for index, group in enumerate(groups)
        for load in group.loads
        if (winner := group.try_winner(load))
    }
    if not winners:
        return None
    loads = sort_loads(load for _, load in winners)
    gpus = [shorten(group.setting.gpu, 20) for group in groups]
    rivals = sorted({shorten(winner.against.other) for winner in winners.values()})[:MAX_RIVALS]
    overloaded = {at for at in winners if "overloaded" in groups[at[0]].get_doubts(at[1])}
    is_open = any(winner.is_open for winner in winners.values())
    dotted = " Dotted, with a ?: nothing is proved, and the name is only that of the shortest mean."
    named = [looks[each] for each in sort_policies(p for winner in winners.values() for p in winner.policies)]
    return Chart(
        name="map",
        title="Which policy wins where",
        caption="In each square the policy that wins, and how many times faster than "
        f"{' or '.join(rivals)} it is: the larger the ratio, the deeper the shade. Dashed: nobody wins, "
        f"as the best are inside the 95 % interval of each other.{dotted if is_open else ''}"
        + (" Overloaded (o): the ratio depends on how long the runs were." if overloaded else ""),
        panels=[
            Grid(
                rows=gpus,
                columns=["rec." if load is None else f"{load:g}" for load in loads],
                label="load, jobs/s",
                tiles={
                    (at[0], loads.index(at[1])): make_tile(winner, looks, " o" if at in overloaded else "")
                    for at, winner in winners.items()
                },
                keys={look.key: look.label for look in named},
            )
        ],
        table=Table(
            ("GPU", "Load", "Best first", "Outcome", "Speed-up", "Over"),
            tuple(
                (
                    gpus[index],
                    groups[index].describe_load(load),
                    ", ".join(looks[policy].label for policy in winner.policies),
                    _OUTCOMES[winner.outcome],
                    format_ratio(winner.speed_up),
                    shorten(winner.against.other),
                )
                for (index, load), winner in winners.items()
            ),
        ),
        mark=groups[0].setting.mark,
    )


_OUTCOMES = {"open": "not proved", "tie": "nobody wins", "win": "wins"}
LIGHTEST, DARKEST = 0.12, 0.5
FULL_RATIO = 3.0
"""The ratio with the darkest square. Darker squares would make their text unreadable."""


def make_tile(winner: Winner, looks: Looks, suffix: str = "") -> Tile:
    """A square of the map: by name, or by key if there is no room. Ties also have dashed edges."""
    best = looks[winner.policies[0]]
    keys = "".join(sorted(looks[policy].key for policy in winner.policies))[:4]
    texts: tuple[str, ...] = (best.label, best.key)
    shade, edge = LIGHTEST, SOLID
    if winner.is_open:
        texts, edge = (f"{best.label}?", f"{best.key}?"), (0, (1, 2))
    elif winner.is_tie:
        texts, edge = ("tie", f"tie {keys}", keys), (0, (2, 2))
    else:
        share = min(1.0, math.log(max(1.0, winner.speed_up)) / math.log(FULL_RATIO))
        shade += share * (DARKEST - LIGHTEST)
    has_note = winner.is_open or winner.against.other not in winner.policies
    return Tile(
        texts=tuple(text + suffix for text in texts),
        note=format_ratio(winner.speed_up) if has_note else "",
        color="soft" if winner.is_tie else best.color,
        shade=shade,
        edge=edge,
    )


FURTHEST = 3.0
"""The factor up to which intervals are drawn beyond all ratios. Few pairs make wide ones."""


def plot_ab(verdict: AbVerdict, looks: Looks, mark: str) -> Chart | None:
    """The verdict of `tenuto ab`: a row for each arm and measure; None without a pair."""
    if not verdict.comparisons:
        return None
    baseline, ends = shorten(verdict.baseline), [1.0]
    marks, labels, rows = [], [], []
    has_arms = len({row.arm for row in verdict.comparisons}) > 1
    for number, row in enumerate(verdict.comparisons):
        low, high = (row.ratio if end is None else end for end in (row.low, row.high))
        ends += [low, high]
        look = looks.get(row.arm, Look(row.arm, "soft"))
        marks.append(
            Series(
                look=look, at=[number], values=[row.ratio], ranges=[(low, high)], unproved=[not row.differs]
            )
        )
        labels.append(f"{shorten(row.arm, 20)}: {row.measure}" if has_arms else row.measure)
        interval = "–" if row.low is None or row.high is None else f"{row.low:.3f} – {row.high:.3f}"
        rows.append((shorten(row.arm), row.measure, f"{row.ratio:.3f}", interval, row.words))
    ratios = [1.0, *(row.ratio for row in verdict.comparisons)]
    least, most = min(ratios) / FURTHEST, max(ratios) * FURTHEST
    is_cut = min(ends) < least or max(ends) > most
    shown = stretch([max(min(ends), least), min(max(ends), most)], 0.05)
    x = Axis(label=f"value / value of {shorten(baseline, 16)}", ends=shown)
    return Chart(
        name="ab",
        title=f"Verdict of {shorten(verdict.place)}: every measure against {baseline}",
        caption=f"An arm's value over that of {baseline}, with its 95 % interval, from {verdict.pairs} "
        "pairs. Times are better left of the line, throughput is better right of it. A marker with a light "
        "centre is no difference."
        + (" Ends of intervals beyond the picture are in the table." if is_cut else ""),
        panels=[_make_rows(labels, marks, x, inches=0.3, reference=Reference(1))],
        table=Table(("Arm", "Measure", "Ratio", "95 % interval", "In words"), tuple(rows)),
        mark=mark,
    )


def plot_validation(record: ValidationRecord) -> Chart | None:
    """What `tenuto validate` measured on each arm, and the simulator's prediction; None without a pair."""
    arms = [arm for arm in record.arms if arm.mean_job_s]
    if not arms:
        return None
    marks: list[Mark] = []
    labels: list[str] = []
    rows = []
    for arm in arms:
        name = name_arm(arm.name)
        for what, color, marker, values in (
            ("measured", "p1", "o", arm.mean_job_s),
            ("simulated", "p2", "X", arm.simulated_job_s),
        ):
            if values:
                look, span = Look(what, color, marker), Spread.of(values)
                marks.append(Series(look=look, at=[len(labels)], values=[span.middle], ranges=[span[1:]]))
                labels.append(f"{name}, {what}")
        times_s = (arm.mean_job_s, arm.simulated_job_s, arm.p95_job_s, arm.mean_ttft_s, arm.p95_ttft_s)
        times = [format_seconds(statistics.fmean(each)) if each else "–" for each in times_s]
        reused = (arm.reused_share, arm.simulated_reused_share)
        shares = ["–" if share is None else format_share(share) for share in reused]
        steps = "own" if arm.step_tokens is None else f"{arm.step_tokens:,}"
        error = "–" if arm.error is None else f"{arm.error:+.1%}"
        rows.append((name, steps, *times[:2], error, *times[2:], *shares))
    where, load = record.server, record.load
    jobs = "" if load is None else f" Load: {load.workload}, {format_load(load.jps)} for {load.window_s:g} s."
    return Chart(
        name="validation",
        title=f"Mean job time on {name_machine(record)}",
        caption="Mean over the pairs of runs; whiskers: lowest and highest run. The simulator ran the same "
        f"jobs, by step times measured on the same server.{jobs} KV cache: {where.kv_tokens:,} tokens.",
        panels=[_make_rows(labels, marks, replace(TIME, label="mean job time"))],
        table=Table(
            ("Arm", "Step size", "Mean job time", "Simulated", "Error", "P95 job time", "Mean TTFT",
             "P95 TTFT", "Reusable tokens hit", "Simulated hits"),
            tuple(rows),
        ),
        mark="simulated server" if where.engine == "sim" else "",
    )  # fmt: skip


_ENGINE_MEASURES = {"busy_s": "busy time", "computed_tokens": "computed tokens", "turns": "turns"}
"""The measures for bars of engines. The first one that the record has for every engine is used."""


def plot_fleets(runs: Sequence[Run]) -> list[Chart]:
    """What each of several engines did, and what moving jobs cost, for each such run."""
    return [_plot_fleet(run, engines) for run in runs if len(engines := _get_engines(run)) > 1]


def _get_engines(run: Run) -> list[Mapping[str, Any]]:
    engines = (run.record.fleet or {}).get("engines")
    return [each for each in engines if isinstance(each, dict)] if isinstance(engines, list) else []


def _plot_fleet(run: Run, engines: Sequence[Mapping[str, Any]]) -> Chart:
    known = (each for each in _ENGINE_MEASURES if all(is_number(engine.get(each)) for engine in engines))
    measure = next(known, "")
    values = [float(engine[measure]) if measure else 0.0 for engine in engines]
    mean = sum(values) / len(values) or 1.0
    shares = [value / mean for value in values[:MAX_ENGINES]]
    spans = [(row, 0.0, share) for row, share in enumerate(shares)]
    x = Axis(label="multiple of the mean", ends=(0, 1.05 * max(1.05, *shares)))
    return Chart(
        name="fleet",
        title=count(len(engines), "engine")
        + (f": the busiest did {max(values) / mean:.2f} times the mean" if any(values) else ""),
        caption=f"{', '.join((shorten(run.policy), format_load(run.jps), *run.doubts))}. "
        f"Each bar is an engine's {_ENGINE_MEASURES.get(measure, 'nothing known')}, as a multiple of the "
        f"mean. {_describe_router(run.record.fleet or {})}",
        panels=[
            _make_rows(
                [_name_engine(engine, 24) for engine in engines[:MAX_ENGINES]],
                [Bars("p1", "", spans, 0.7)], x, inches=0.28, reference=Reference(1, color="fg"),
            )
        ],
        table=Table(
            ("Engine", "Jobs", "Turns", "Computed tokens", "Generated tokens", "Busy, s", "Died"),
            tuple(_make_engine_row(engine) for engine in engines),
        ),
        mark=run.setting.mark,
    )  # fmt: skip


def _describe_router(fleet: Mapping[str, Any]) -> str:
    numbers = {key: int(number) for key, number in fleet.items() if is_number(number)}
    parts = []
    if "moves" in numbers:
        moves, tokens = count(numbers["moves"], "move"), numbers.get("moved_tokens", 0)
        words = f"{moves} of jobs, with {tokens:,} tokens of context"
        if "copied_tokens" in numbers:  # a client does not know it
            words += f", {numbers['copied_tokens']:,} of them copied and the others computed again"
        parts.append(words)
    for key, words in (("held", "held back at first"), ("resent", "sent again because an engine failed")):
        if key in numbers:
            parts.append(f"{count(numbers[key], 'turn')} {words}")
    return f"{'; '.join(parts)}." if parts else "The record does not say what the router did."


def _make_engine_row(engine: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (engine.get(key) for key in ("jobs", "turns", "computed_tokens", "output_tokens", "busy_s"))
    shown = (f"{number:,.0f}" if is_number(number) else "–" for number in numbers)
    return (_name_engine(engine, 48), *shown, "yes" if engine.get("died") else "")


def _name_engine(engine: Mapping[str, Any], most: int) -> str:
    return shorten(clean(str(engine.get("name"))), most)


def plot_occupancy(detail: Detail) -> Chart | None:
    """Blocks by state over time; tiers below the GPU in a panel of their own."""
    if len({sample.now_s for sample in detail.samples}) < 2:
        return None
    samples, thinned = average_samples(detail.samples)

    def get(state: str, of: Sequence[Sample]) -> list[float]:
        return [getattr(sample, f"{state}_blocks") or 0 for sample in of]

    has_cached = samples[0].cached_blocks is not None
    states = ["running", "leased", *(["cached"] if has_cached else []), "free"]
    tiers = [
        tier
        for tier in ("host", "disk")
        if any(getattr(sample, f"{tier}_blocks") is not None for sample in samples)
    ]
    times_s, size = [sample.now_s for sample in samples], max(sample.num_blocks for sample in detail.samples)
    areas, bottom = [], [0.0] * len(times_s)
    for state in states:
        top = [below + blocks for below, blocks in zip(bottom, get(state, samples), strict=True)]
        areas.append(Area(state, times_s, bottom, top))
        bottom = top
    x = _make_time_axis(times_s[0], times_s[-1])

    def make_panel(label: str, marks: Sequence[Mark], most: float) -> Panel:
        y = Axis(label=label, write="{:,.0f}".format, ends=(0, 1.05 * most or 1))
        return Panel(marks=marks, x=x, y=y)

    panels = [make_panel("blocks", areas, max(bottom))]
    if tiers:
        traces = [Trace(tier, times_s, get(tier, samples)) for tier in tiers]
        most = max(blocks for trace in traces for blocks in trace.values)
        panels.append(make_panel("blocks below the GPU", traces, most))
    sizes = {
        state: (statistics.fmean(get(state, samples)), max(get(state, detail.samples)))
        for state in (*states, *tiers)
    }
    return Chart(
        name="kv",
        title=f"KV cache over time: {detail.label}",
        caption="Blocks of the GPU's KV cache by state: running turns, leased for jobs in a tool call, "
        + ("cached (free, but can still be hit), free" if has_cached else "free (empty, or can still be hit)")
        + f". {size:,} blocks in all. {detail.note}".rstrip()
        + (" Below: what the host and disk tiers hold." if tiers else "")
        + (f" {count(len(detail.samples), 'sample')}, averaged to {len(samples)}." if thinned else ""),
        panels=panels,
        columns=1,
        table=Table(
            ("State", "Mean blocks", "Most blocks", "Mean share"),
            tuple(
                (state, f"{mean:,.0f}", f"{most:,.0f}", f"{mean / size:.0%}" if size else "–")
                for state, (mean, most) in sizes.items()
            ),
        ),
        mark=detail.mark,
    )


def average_samples(samples: Sequence[Sample]) -> tuple[list[Sample], bool]:
    """The samples in order of time, averaged over equal stretches if too many; and whether they were."""
    ordered = sorted(samples, key=lambda sample: sample.now_s)
    if len(ordered) <= MAX_POINTS:
        return ordered, False
    start_s, end_s = ordered[0].now_s, ordered[-1].now_s
    stretches: dict[int, list[Sample]] = {}
    for sample in ordered:
        share = (sample.now_s - start_s) / ((end_s - start_s) or 1)
        stretches.setdefault(min(MAX_POINTS - 1, int(share * MAX_POINTS)), []).append(sample)
    return [_average(each) for each in stretches.values()], True


def _average(samples: Sequence[Sample]) -> Sample:
    names = Sample.__slots__
    values: Any = {name: get_known_mean(getattr(sample, name) for sample in samples) for name in names}
    return Sample(**values)


_FILLS: Mapping[CacheVerdict, tuple[str, Fill]] = {
    "hit": ("found in the cache", "full"),
    "part": ("partly found", "left"),
    "miss": ("not found", "none"),
}
_TAKEN_BACK = (LeaseEnd.REVOKED.value, LeaseEnd.PRICE.value)
_BESIDE = 0.42
"""Height of the signs that are not about hits, above the middle of a row, as a share of the row."""


def plot_lives(detail: Detail) -> Chart | None:
    """A few jobs turn by turn, on one time axis: their states, hits, loads and the leases they lost.

    The jobs are consecutive by arrival, from the middle of the run, when memory is full. None without turns.
    """
    jobs = list(follow_jobs(detail).items())
    first = (len(jobs) - MAX_LIVES) // 2 if len(jobs) > MAX_LIVES else 0
    shown = jobs[first : first + MAX_LIVES]
    if not shown:
        return None
    spans: dict[State, list[tuple[int, float, float]]] = {}
    hits: dict[CacheVerdict, list[tuple[float, float]]] = {}
    loads: list[tuple[float, float]] = []
    taken: list[tuple[float, float]] = []
    for row, (_, lives) in enumerate(shown):
        for life in lives:
            for state, start_s, end_s in life.slices:
                spans.setdefault(state, []).append((row, start_s, end_s))
            at_s = life.first_token_s if life.turn.start_s is None else life.turn.start_s
            if at_s is not None:
                hits.setdefault(life.verdict, []).append((at_s, row))
                loads += [(at_s, row - _BESIDE)] if life.turn.loaded_tokens else []
            lease = life.lease
            if lease and lease.ended_s is not None and lease.reason in _TAKEN_BACK:
                taken.append((lease.ended_s, row - _BESIDE))
    labels = LABELS | ({"tool": "tool, cache not held"} if "held" in spans else {})
    bars = [Bars(state, labels[state], spans[state], HEIGHTS[state]) for state in HEIGHTS if state in spans]
    signs = [
        Signs(words, hits[verdict], fill) for verdict, (words, fill) in _FILLS.items() if verdict in hits
    ]
    signs += [Signs("loaded from host memory or disk", loads, marker="v")] if loads else []
    signs += [Signs("held cache taken back for other turns", taken, marker="X")] if taken else []
    slices = [each for _, lives in shown for life in lives for each in life.slices]
    rows = [_make_life_row(job, life) for job, lives in shown for life in lives]
    return Chart(
        name="timeline",
        title=f"{count(len(shown), 'job')} of {len(jobs):,}, turn by turn: {detail.label}",
        caption="Each row is a job, in the order of arrival"
        + (", from the middle of the run. " if len(shown) < len(jobs) else ". ")
        + "Rings: how much of what the job's last turn left was in the cache when this turn started. "
        + detail.note,
        panels=[
            _make_rows(
                [shorten(clean(job), 18) for job, _ in shown], [*bars, *signs],
                _make_time_axis(
                    min((each.start_s for each in slices), default=0.0),
                    max((each.end_s for each in slices), default=0.0),
                ),
            )
        ],
        table=Table(
            ("Job", "Turn", *(labels[state] for state in HEIGHTS), "Prompt tokens", "Hit", "Loaded"),
            tuple(rows[:MAX_ROWS]),
        ),
        mark=detail.mark,
    )  # fmt: skip


def _make_life_row(job: str, life: Life) -> tuple[str, ...]:
    lengths = {state: end_s - start_s for state, start_s, end_s in life.slices}
    tokens = (life.turn.prompt_tokens, life.turn.hit_tokens, life.turn.loaded_tokens)
    return (
        shorten(clean(job), 18),
        str(life.turn.turn),
        *(format_seconds(lengths.get(state)) for state in HEIGHTS),
        *("–" if number is None else f"{number:,}" for number in tokens),
    )


def _make_time_axis(start_s: float, end_s: float) -> Axis:
    ends = start_s, end_s if end_s > start_s else start_s + 1
    return replace(TIME, label="time since the run's start", ends=ends)
