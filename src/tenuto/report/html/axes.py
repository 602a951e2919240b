"""Parts that the charts share: curves, legends and axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tenuto.report.html.compare import Load, Spread
from tenuto.report.html.records import shorten
from tenuto.report.html.style import Look
from tenuto.report.html.words import format_seconds

Looks = Mapping[str, Look]
WIDE_RANGE = 20
"""An axis is logarithmic if its largest value exceeds the smallest by more than this factor."""

LEGEND_ROW_INCHES = 0.2


def plot(axes: Axes, xs: Sequence[float], ys: Sequence[float], look: Look, every: int = 1) -> None:
    """A policy's curve, with a marker at every so many of its points."""
    axes.plot(xs, ys, color=look.color, linestyle=look.dashes, linewidth=look.width, gid=f"line-{look.key}")
    axes.plot(
        xs[::every],
        ys[::every],
        color=look.color,
        linestyle="none",
        gid=f"marks-{look.key}",
        **look.get_marker(),
    )


def add_legend(figure: Figure, looks: Looks, is_narrow: bool) -> None:
    """Add one legend above all panels for all drawn policies, with one column each if there is room."""
    drawn = {line.get_gid() for each in figure.axes for line in each.get_lines()}
    shown = [look for look in looks.values() if f"marks-{look.key}" in drawn]
    handles = [
        Line2D([], [], color=look.color, linestyle=look.dashes, linewidth=look.width, **look.get_marker())
        for look in shown
    ]
    labels = [shorten(look.label, 32 if is_narrow else 48) for look in shown]
    columns = max(1, int((44 if is_narrow else 115) / (max(map(len, labels)) + 7)))
    # A label that begins with "_" would be left out.
    labels = [f"\u2060{label}" if label.startswith("_") else label for label in labels]
    figure.legend(handles, labels, loc="outside upper left", ncols=min(columns, len(shown)), handlelength=3.2)
    further_rows = -(-len(shown) // columns) - 1
    figure.set_figheight(figure.get_figheight() + further_rows * LEGEND_ROW_INCHES)


def label_rows(panels: Sequence[Axes], label: str, is_narrow: bool) -> None:
    """Name the vertical axis once per row."""
    for axes in panels if is_narrow else panels[:1]:
        axes.set_ylabel(label)


def set_load_axis(axes: Axes, loads: Sequence[Load]) -> None:
    """The horizontal axis of charts against load; `loads` ascend."""
    axes.set_xlabel("load, jobs/s")
    if None in loads:
        axes.set_xticks(
            [place_load(load, loads) for load in loads],
            ["as\nrecorded" if load is None else f"{load:g}" for load in loads],
        )
    elif len(loads) == 1:
        axes.set_xticks([place_load(loads[0], loads)])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
        low, high = place_load(loads[0], loads), place_load(loads[-1], loads)
        margin = 0.04 * (high - low) or 0.5
        axes.set_xlim(low - margin, high + margin)


def place_load(load: Load, loads: Sequence[Load]) -> float:
    """Return a load's position on the axis. Runs without a load are left of all others."""
    if load is not None:
        return load
    numbers = [each for each in loads if each is not None]
    return min(numbers, default=0.0) - max(1.0, (max(numbers, default=0.0) - min(numbers, default=0.0)) / 4)


def set_value_axis(
    axes: Axes,
    values: Sequence[float],
    show: Callable[[float], str] = format_seconds,
    *,
    axis: Literal["x", "y"] = "y",
) -> None:
    """A linear axis from 0, or a logarithmic one for a wide range."""
    positive = [value for value in values if value > 0]
    the_axis = axes.xaxis if axis == "x" else axes.yaxis
    if positive and max(positive) / min(positive) > WIDE_RANGE:
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
        decades = math.log10(max(positive) / min(positive))
        finest, finer = (2, 3) if axis == "y" else (1, 2)  # Labels side by side need more room.
        subs = (1, 2, 5) if decades < finest else (1, 3) if decades < finer else (1,)
        the_axis.set_major_locator(LogLocator(subs=subs, numticks=9))
        the_axis.set_minor_formatter(NullFormatter())
    else:
        (axes.set_xlim if axis == "x" else axes.set_ylim)(0, (max(positive, default=0) * 1.06) or 1)
        the_axis.set_major_locator(MaxNLocator(5 if axis == "x" else 6, steps=[1, 2, 2.5, 5, 10]))
    the_axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def label_bars(axes: Axes, labels: Sequence[str], is_narrow: bool) -> None:
    """Name horizontal bars, the first one on top."""
    # Names break at hyphens and spaces, or in the middle where they have none.
    width = 14 if is_narrow else 30
    axes.set_yticks(range(len(labels)), ["\n".join(textwrap.wrap(text, width)) or text for text in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def get_whiskers(spreads: Sequence[Spread]) -> list[list[float]]:
    """How far each range reaches below and above its middle, as matplotlib wants it."""
    return [
        [spread.middle - spread.low for spread in spreads],
        [spread.high - spread.middle for spread in spreads],
    ]
