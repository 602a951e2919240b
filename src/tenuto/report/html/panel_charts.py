"""Charts with a panel for each of a few loads: latency turn by turn, distribution of job completion times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tenuto.records.metrics import get_percentile
from tenuto.report.html.axes import Looks, add_legend, label_rows, plot, set_value_axis
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.compare import Group, Load, PolicyCell
from tenuto.report.html.style import make_panels
from tenuto.report.html.words import format_load, format_seconds

MAX_CURVE_POINTS = 300
MAX_ROWS = 500
"""Maximum number of rows in a table."""

Turns = Mapping[tuple[Load, str], Mapping[int, float]]
"""Mean latency in seconds by turn, by load and policy."""
Durations = Mapping[tuple[Load, str], Sequence[float]]
"""Every job's completion time in seconds, ascending, by load and policy."""


def make_turn_chart(group: Group, looks: Looks, name: str) -> Chart | None:
    """Mean latency of first turns, second turns and so on, at up to three loads."""
    # Of single turns there is no curve.
    loads = _choose_loads(group, lambda cell: any(len(run.turn_latency_s) > 1 for run in cell.runs))
    if not loads:
        return None
    curves = {
        (load, policy): latencies
        for load in loads
        for policy in group.policies
        if (latencies := _average_turns(group.try_cell(policy, load)))
    }
    rows = [
        (looks[policy].label, format_load(load), str(turn), format_seconds(latency))
        for (load, policy), curve in curves.items()
        for turn, latency in curve.items()
    ]
    return Chart(
        name,
        "Latency turn by turn",
        "Mean time from when a turn was due to its last token, over all jobs' first turns, second turns and "
        "so on. A policy that keeps the cache has flat later turns."
        + (f" The table has {MAX_ROWS} of {len(rows):,} rows." if len(rows) > MAX_ROWS else ""),
        Table(("Policy", "Load", "Turn", "Mean latency"), tuple(rows[:MAX_ROWS])),
        partial(_draw_turns, loads, curves, looks),
    )


def make_cdf_chart(group: Group, looks: Looks, name: str) -> Chart | None:
    """Distribution of JCT over all jobs of all seeds, at up to three loads."""
    loads = _choose_loads(group, lambda cell: len(cell.job_times_s) > 1)
    if not loads:
        return None
    found = {
        (load, policy): cell.job_times_s
        for load in loads
        for policy in group.policies
        if (cell := group.try_cell(policy, load)) and cell.job_times_s
    }
    rows = [
        (looks[policy].label, format_load(load), f"{len(seconds):,}", *_get_quantiles(seconds))
        for (load, policy), seconds in found.items()
    ]
    return Chart(
        name,
        "Distribution of job completion times",
        "For each time, the share of all jobs of all seeds that took no longer. A curve further left is "
        "better; a long flat top is a slow tail.",
        Table(("Policy", "Load", "Jobs", "10% within", "50%", "90%", "99%"), tuple(rows)),
        partial(_draw_cdfs, loads, found, looks),
    )


def _draw_turns(loads: Sequence[Load], curves: Turns, looks: Looks, is_narrow: bool) -> Figure:
    figure, panels = make_panels(len(loads), 2.6, is_narrow=is_narrow)
    for axes, load in zip(panels, loads, strict=True):
        drawn = {policy: curve for (each, policy), curve in curves.items() if each == load}
        for policy, curve in drawn.items():
            plot(axes, list(curve), list(curve.values()), looks[policy])
        axes.set_title(format_load(load))
        axes.set_xlabel("turn")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
        set_value_axis(axes, [value for curve in drawn.values() for value in curve.values()])
    label_rows(panels, "mean turn latency", is_narrow)
    add_legend(figure, looks, is_narrow)
    return figure


def _draw_cdfs(loads: Sequence[Load], found: Durations, looks: Looks, is_narrow: bool) -> Figure:
    figure, panels = make_panels(len(loads), 2.6, is_narrow=is_narrow)
    for axes, load in zip(panels, loads, strict=True):
        drawn = {policy: seconds for (each, policy), seconds in found.items() if each == load}
        for policy, seconds in drawn.items():
            xs, ys = _make_cdf(seconds)
            plot(axes, xs, ys, looks[policy], every=max(1, len(xs) // 6))
        axes.set_title(format_load(load))
        axes.set_xlabel("job completion time")
        axes.set_ylim(0, 103)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
        set_value_axis(axes, [value for seconds in drawn.values() for value in seconds], axis="x")
    label_rows(panels, "share of jobs done", is_narrow)
    add_legend(figure, looks, is_narrow)
    return figure


def _choose_loads(group: Group, has_data: Callable[[PolicyCell], bool]) -> list[Load]:
    """The lowest, the middle and the highest load there is data for."""
    loads = [
        load for load in group.loads if any(cell.load == load and has_data(cell) for cell in group.cells)
    ]
    if len(loads) <= 3:
        return loads
    return [loads[0], loads[len(loads) // 2], loads[-1]]


def _average_turns(cell: PolicyCell | None) -> dict[int, float]:
    """Mean latency per turn; every run counts the same."""
    found: dict[int, list[float]] = {}
    for run in cell.runs if cell else ():
        for turn, latency_s in run.turn_latency_s.items():
            found.setdefault(turn, []).append(latency_s)
    return {turn: sum(found[turn]) / len(found[turn]) for turn in sorted(found)}


def _make_cdf(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Times and the per cent of jobs done by then, thinned to what a line can show."""
    stride = max(1, len(seconds) // MAX_CURVE_POINTS)
    chosen = sorted({*range(0, len(seconds), stride), len(seconds) - 1})
    return [seconds[index] for index in chosen], [100 * (index + 1) / len(seconds) for index in chosen]


def _get_quantiles(seconds: Sequence[float]) -> list[str]:
    return [format_seconds(get_percentile(seconds, percent)) for percent in (10, 50, 90, 99)]
