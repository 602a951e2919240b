"""The chart of speed-ups over the baseline, with what is proved and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tenuto.report.html.axes import (
    Looks,
    add_legend,
    get_whiskers,
    label_bars,
    place_load,
    plot,
    set_load_axis,
    set_value_axis,
)
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.colors import LIGHT
from tenuto.report.html.compare import Group, Load, Spread, sort_loads
from tenuto.report.html.pairs import Contrast
from tenuto.report.html.records import shorten
from tenuto.report.html.style import Look, make_panels
from tenuto.report.html.words import describe_load, format_load, format_ratio


class SpeedUp(NamedTuple):
    """One policy against the baseline at one load."""

    policy: str
    load: Load
    speed_up: Spread
    contrast: Contrast


def make_speed_up_chart(group: Group, looks: Looks, name: str) -> Chart | None:
    """Speed-up over the baseline against load."""
    found = [
        SpeedUp(policy, load, speed_up, contrast)
        for policy in group.policies
        if policy != group.baseline
        for load in group.loads
        if (speed_up := group.try_speed_up(policy, load))
        and (contrast := group.contrast(policy, group.baseline, load))
    ]
    if not found:
        return None
    baseline = shorten(group.baseline)
    one_load = len({each.load for each in found}) == 1
    draw = _draw_rows if one_load else _draw_lines
    rows = [
        (
            looks[each.policy].label,
            describe_load(group, each.load),
            *map(format_ratio, each.speed_up),
            _format_interval(each.contrast),
            "yes" if each.contrast.differs else "no",
        )
        for each in found
    ]
    columns = ("Policy", "Load", "Mean", "Lowest seed", "Highest seed", "95 % interval", "Differs")
    return Chart(
        name,
        f"How many times faster than {baseline}" + (f", {format_load(found[0].load)}" if one_load else ""),
        f"Mean job completion time of {baseline} over the policy's, seed by seed: marker at the geometric "
        "mean, whiskers to the lowest and highest seed. Above 1× the policy is faster. A marker with a light "
        "centre is no proof: its 95 % interval holds 1×, or it has too few pairs for one.",
        Table(columns, tuple(rows)),
        partial(draw, found, baseline, looks),
    )


def _format_interval(contrast: Contrast) -> str:
    low, high = contrast.mean.low, contrast.mean.high
    return "–" if low is None or high is None else f"{format_ratio(1 / high)} – {format_ratio(1 / low)}"


def _draw_lines(found: Sequence[SpeedUp], baseline: str, looks: Looks, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 3.0, is_narrow=is_narrow)
    loads = sort_loads(each.load for each in found)
    for policy in dict.fromkeys(each.policy for each in found):
        points = [each for each in found if each.policy == policy]
        look = looks[policy]
        xs = [place_load(each.load, loads) for each in points]
        middles = [each.speed_up.middle for each in points]
        axes.errorbar(
            xs, middles, get_whiskers([each.speed_up for each in points]),
            color=look.color, linestyle="none", capsize=3, elinewidth=1, gid=f"whiskers-{look.key}",
        )  # fmt: skip
        plot(axes, xs, middles, look)
        unproved = [i for i, each in enumerate(points) if not each.contrast.differs]
        _hollow(axes, [xs[i] for i in unproved], [middles[i] for i in unproved], look)
    axes.axhline(1, color=LIGHT["p0"], linewidth=1.2)
    axes.annotate(
        shorten(baseline, 10), (1, 1), xycoords=("axes fraction", "data"),
        textcoords="offset points", xytext=(4, 0), ha="left", va="center",
    )  # fmt: skip  # Beside the axes: inside, policies as fast as the baseline lie under it.
    set_load_axis(axes, loads)
    set_value_axis(axes, [end for each in found for end in each.speed_up] + [1.0], "{:g}×".format)
    axes.set_ylabel(f"mean JCT of {shorten(baseline, 16)} / policy")
    add_legend(figure, looks, is_narrow)
    return figure


def _draw_rows(found: Sequence[SpeedUp], baseline: str, looks: Looks, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 0.6 + 0.36 * len(found), is_narrow=is_narrow)
    for row, each in enumerate(found):
        look = looks[each.policy]
        axes.errorbar(
            each.speed_up.middle, row, xerr=get_whiskers([each.speed_up]), color=look.color, capsize=3,
            elinewidth=1, gid=f"whiskers-{look.key}",
        )  # fmt: skip
        plot(axes, [each.speed_up.middle], [row], look)
        if not each.contrast.differs:
            _hollow(axes, [each.speed_up.middle], [row], look)
    axes.axvline(1, color=LIGHT["p0"], linewidth=1.2)
    label_bars(axes, [looks[each.policy].label for each in found], is_narrow)
    ends = [1.0, *(end for each in found for end in each.speed_up)]
    margin = 0.06 * (max(ends) - min(ends)) or 0.05
    axes.set_xlim(min(ends) - margin, max(ends) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(4 if is_narrow else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel(f"mean JCT of {shorten(baseline, 16)} / policy")
    return figure


def _hollow(axes: Axes, xs: Sequence[float], ys: Sequence[float], look: Look) -> None:
    """Give markers a light centre."""
    axes.plot(xs, ys, "o", color=LIGHT["bg"], markersize=2.6, gid=f"unproved-{look.key}")
