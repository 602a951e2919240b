"""Draws every chart of a report from its spec, for wide and for narrow screens, and makes it part of a page.

In the page colours are CSS variables, so one drawing serves the light and the dark scheme; in files they are
the light ones.
"""

from __future__ import annotations

import io
import math
import re
import sys
import textwrap
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tenuto.report.html.spec import (
    LIGHT,
    Area,
    Axis,
    Bars,
    Chart,
    Grid,
    Mark,
    Panel,
    Series,
    Signs,
    Tile,
    Trace,
    shorten,
)

WIDE_INCHES, NARROW_INCHES = 9.6, 3.8
"""In the page an inch is 96 px: up to 920 px wide, and from 360 px."""
ROW_INCHES = 0.2
"""Height of a legend's row."""
WIDE_RANGE = 20
"""An axis is logarithmic if its largest value exceeds the smallest by more than this factor."""
KEYS_INCHES = 0.6
"""Width that the longer one of two short texts needs in a tile."""
_HATCHES = {"leased": "////", "cached": "---"}
_TRACES: Mapping[str, tuple[str, float]] = {"host": ("solid", 3.2), "disk": ("dashed", 1.5)}
"""Dashes and width: the host's line is visible under the disk's where both have the same value."""
Which = Literal["x", "y"]
Legend = dict[str, Artist]
"""Drawn parts by the label that a legend shows."""


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's settings for all figures. Names from outside are never read as formulas."""
    settings: dict[Any, Any] = {
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "text.parse_math": False,
        "axes.unicode_minus": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": LIGHT["soft"],
        "axes.labelcolor": LIGHT["fg"],
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": LIGHT["fg"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.7,
        "xtick.color": LIGHT["soft"],
        "ytick.color": LIGHT["soft"],
        "xtick.labelcolor": LIGHT["fg"],
        "ytick.labelcolor": LIGHT["fg"],
        "text.color": LIGHT["fg"],
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": LIGHT["bg"],
        "hatch.linewidth": 0.6,
        "svg.hashsalt": "tenuto",
        "figure.constrained_layout.use": True,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A name in a script the font lacks is drawn as boxes in a PNG; the page uses the reader's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def draw(chart: Chart, *, is_narrow: bool = False) -> Figure:
    """The picture of a chart: its panels, one legend above them, its mark in a corner."""
    columns = 1 if is_narrow else min(chart.columns, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    # Without pyplot: no window system, no global list of figures.
    figure = Figure(figsize=(NARROW_INCHES if is_narrow else WIDE_INCHES, 1), layout="constrained")
    legend: Legend = {}
    heights = []
    for index, panel in enumerate(chart.panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        if isinstance(panel, Grid):
            heights.append(_draw_grid(axes, panel, legend, is_narrow))
            continue
        if index % columns:  # The vertical axis is named once per row.
            panel = replace(panel, y=replace(panel.y, label=""))
        _draw_panel(axes, panel, legend, is_narrow, 4 if is_narrow else 9 if columns == 1 else 5)
        heights.append(panel.height)
    figure.set_figheight(max(heights) * rows + 0.5)
    if legend:
        _add_legend(figure, legend, is_narrow)
    if chart.mark:
        figure.legend(
            [_make_nothing()], [chart.mark], loc="outside lower right", handlelength=0, handletextpad=0,
            borderaxespad=0, fontsize=8.5, labelcolor=LIGHT["soft"],
        )  # fmt: skip
    return figure


def _add_legend(figure: Figure, legend: Legend, is_narrow: bool) -> None:
    """One legend above all panels, in as few rows as there is room for."""
    labels = [shorten(label, 32 if is_narrow else 48) for label in legend]
    # A label that begins with "_" would be left out.
    labels = [f"\u2060{label}" if label.startswith("_") else label for label in labels]
    handles = list(legend.values())
    # How long the signs are, in letters: none of keys, longer ones where dashes tell curves apart.
    lines = (handle for handle in handles if isinstance(handle, Line2D))
    is_curve = any("None" not in (line.get_marker(), line.get_linestyle()) for line in lines)
    length = 0.0 if handles[0].get_alpha() == 0 else 3.2 if is_curve else 2.0
    widths, room = [len(label) + 3 + round(1.25 * length) for label in labels], 44 if is_narrow else 115
    for rows in range(1, len(labels) + 1):
        columns = -(-len(labels) // rows)
        if sum(map(max, np.array_split(widths, columns))) <= room:
            break
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, handlelength=length,
        handletextpad=0.8 if length else 0,
    )  # fmt: skip
    figure.set_figheight(figure.get_figheight() + (rows - 1) * ROW_INCHES)


def _make_nothing() -> Rectangle:
    """An empty sign, for a legend's labels that need none."""
    return Rectangle((0, 0), 0, 0, alpha=0)


def _draw_panel(axes: Axes, panel: Panel, legend: Legend, is_narrow: bool, num_ticks: int) -> None:
    for mark in panel.marks:
        _draw_mark(axes, mark, panel.has_rows, legend)
    if panel.reference:
        at, label, color = panel.reference
        line: dict[str, Any] = {"color": LIGHT[color], "linewidth": 1.2, "zorder": 1.9}
        axes.axvline(at, **line) if panel.has_rows else axes.axhline(at, **line)
        if label:  # Beside the axes: inside, policies as fast as the baseline lie under it.
            axes.annotate(
                label, (1, at), xycoords=("axes fraction", "data"), textcoords="offset points",
                xytext=(4, 0), ha="left", va="center",
            )  # fmt: skip
    axes.set_title(panel.title)
    _set_axis(axes, "x", panel.x, _get_values(panel, "x"), num_ticks)
    if not panel.has_rows:
        _set_axis(axes, "y", panel.y, _get_values(panel, "y"), 6)
        return
    # Names break at hyphens and spaces, or in the middle where they have none.
    width = 14 if is_narrow else 30
    labels = ["\n".join(textwrap.wrap(text, width)) or text for text in panel.y.places.values()]
    axes.set_yticks(list(panel.y.places), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _get_values(panel: Panel, which: Which) -> list[float]:
    is_values = (which == "x") == panel.has_rows
    found = [panel.reference.value] if panel.reference and is_values else []
    for mark in panel.marks:
        if isinstance(mark, Series):
            ends = (end for pair in (*mark.ranges, *mark.bands) for end in pair)
            found += [*mark.values, *ends] if is_values else mark.at
    return found


def _set_axis(axes: Axes, which: Which, spec: Axis, values: Sequence[float], num_ticks: int) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_ends = axes.set_xlim if which == "x" else axes.set_ylim
    axis.set_label_text(spec.label)
    if spec.places:
        axis.set_ticks(list(spec.places), list(spec.places.values()))
        return
    positive = [value for value in values if value > 0]
    if spec.ends is None and positive and max(positive) / min(positive) > WIDE_RANGE:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        decades = math.log10(max(positive)) - math.log10(min(positive))
        margin = 10 ** (0.05 * decades)
        set_ends(max(min(positive) / margin, sys.float_info.min), max(positive) * margin)
        finest, finer = (2, 3) if which == "y" else (1, 2)  # Labels side by side need more room.
        subs = (1, 2, 5) if decades < finest else (1, 3) if decades < finer else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=9))
        axis.set_minor_formatter(NullFormatter())
    else:
        set_ends(*(spec.ends or (0, max(positive, default=0) * 1.06 or 1)))
        steps = [1, 2, 2.5, 5, 10]
        axis.set_major_locator(MaxNLocator(num_ticks, steps=steps, integer=spec.is_whole, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: spec.write(value)))


def _draw_mark(axes: Axes, mark: Mark, has_rows: bool, legend: Legend) -> None:
    match mark:
        case Series():
            _draw_series(axes, mark, has_rows, legend)
        case Area(state, at, lows, highs):
            look: dict[str, Any] = {"facecolor": LIGHT[state], "edgecolor": LIGHT["bg"]}
            hatch = _HATCHES.get(state, "")
            axes.fill_between(at, lows, highs, hatch=hatch or None, linewidth=0, gid=f"area-{state}", **look)
            legend[state] = Patch(hatch=hatch * 2, **look)
        case Trace(state, at, values):
            dashes, width = _TRACES[state]
            (legend[state],) = axes.plot(
                at, values, color=LIGHT[state], linestyle=dashes, linewidth=width, gid=f"line-{state}"
            )
        case Bars(color, label, spans, height):
            rows, starts, ends = (np.array(each) for each in zip(*spans, strict=True))
            bars = axes.barh(
                rows, ends - starts, height, left=starts, color=LIGHT[color], gid=f"bars-{color}"
            )
            if label:
                legend[label] = bars[0]
        case Signs(label, points, fill, marker):
            xs, ys = zip(*points, strict=True)
            (legend[label],) = axes.plot(
                xs, ys, color=LIGHT["fg"], markerfacecoloralt=LIGHT["bg"], fillstyle=fill, marker=marker,
                linestyle="none", markersize=4.5, markeredgewidth=0.8, gid=f"signs-{label.split()[0]}",
            )  # fmt: skip


def _draw_series(axes: Axes, series: Series, has_rows: bool, legend: Legend) -> None:
    look, color, at, values = series.look, LIGHT[series.look.color], series.at, series.values
    xs, ys = (values, at) if has_rows else (at, values)
    if series.bands:
        lows, highs = zip(*series.bands, strict=True)
        if has_rows:
            widths = [high - low for low, high in series.bands]
            axes.barh(at, widths, 0.5, left=lows, color=color, alpha=0.3)
        else:
            axes.fill_between(at, lows, highs, color=color, alpha=0.14, linewidth=0, gid=f"band-{look.key}")
            axes.plot(at, highs, color=color, linewidth=0.8, linestyle=look.dashes, alpha=0.8)
    if series.ranges:
        pairs = list(zip(values, series.ranges, strict=True))
        below = [max(0.0, value - low) for value, (low, _) in pairs]
        above = [max(0.0, high - value) for value, (_, high) in pairs]
        reach: dict[str, Any] = {"xerr" if has_rows else "yerr": [below, above]}
        axes.errorbar(
            xs, ys, **reach, color=color, linestyle="none", capsize=3,
            elinewidth=1, gid=f"whiskers-{look.key}",
        )  # fmt: skip
    # The baseline's line is wider and its points are rings, so both show around others on the same place.
    line: dict[str, Any] = {
        "color": color,
        "linestyle": look.dashes,
        "linewidth": 3.0 if look.is_baseline else 1.6,
    }
    marker: dict[str, Any] = {"marker": look.marker, "markersize": 6}
    if look.is_baseline:
        marker |= {"markersize": 9.5, "markerfacecolor": "none", "markeredgewidth": 1.6}
    axes.plot(xs, ys, gid=f"line-{look.key}", **line)
    axes.plot(
        xs[:: series.every], ys[:: series.every], color=color, linestyle="none", gid=f"marks-{look.key}",
        **marker,
    )  # fmt: skip
    light = [index for index, is_unproved in enumerate(series.unproved) if is_unproved]
    if light:
        axes.plot(
            [xs[index] for index in light], [ys[index] for index in light], "o", color=LIGHT["bg"],
            markersize=2.6, gid=f"unproved-{look.key}",
        )  # fmt: skip
    if not has_rows:
        legend[look.label] = Line2D([], [], **line, **marker)


def _draw_grid(axes: Axes, grid: Grid, legend: Legend, is_narrow: bool) -> float:
    """Draw a map; returns its height in inches."""
    rows, columns, tiles = grid.rows, grid.columns, grid.tiles
    is_turned = is_narrow and len(columns) > len(rows)
    if is_turned:
        rows, columns, tiles = columns, rows, {(x, y): tile for (y, x), tile in tiles.items()}
    room = (NARROW_INCHES * 0.7 if is_narrow else WIDE_INCHES * 0.85) / len(columns)
    fits = max(len(tile.texts[0]) for tile in tiles.values()) * 0.075 <= room - 0.1
    for (y, x), tile in tiles.items():
        text = tile.texts[0 if fits else 1 if room > KEYS_INCHES else -1]
        _draw_tile(axes, x, y, tile, text)
    if not fits:
        legend |= {f"{key} = {label}": _make_nothing() for key, label in grid.keys.items()}
    is_tight = max(map(len, columns)) * 0.09 > room
    axes.set_xticks(
        range(len(columns)), columns, rotation=35 if is_tight else 0, ha="right" if is_tight else "center"
    )
    axes.set_yticks(range(len(rows)), rows)
    (axes.set_ylabel if is_turned else axes.set_xlabel)(grid.label)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return 0.46 * len(rows) + (0.2 if fits else 0.4)


def _draw_tile(axes: Axes, x: int, y: int, tile: Tile, text: str) -> None:
    corner, size, color = (x - 0.47, y - 0.44), (0.94, 0.88), LIGHT[tile.color]
    axes.add_patch(
        Rectangle(corner, *size, facecolor=color, alpha=tile.shade, gid=f"cell-{x}-{y}", linewidth=0)
    )
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=color, linewidth=1.2, linestyle=tile.edge))
    lines = f"{text}\n{tile.note}" if tile.note else text
    axes.text(x, y, lines, ha="center", va="center", fontsize=8.5, linespacing=1.25)


_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_COLORS = {color: f"var(--{name})" for name, color in LIGHT.items()}
_HEX = re.compile("#[0-9a-f]{6}")


def to_inline_svg(chart: Chart, *, is_narrow: bool) -> str:
    """A chart's picture as SVG inside a page: ids of its own, the page's colours, real text."""
    name, text = f"{chart.name}-{'narrow' if is_narrow else 'wide'}", io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(chart, is_narrow=is_narrow).savefig(
            text, format="svg", facecolor="none", metadata={"Date": None, "Creator": None}
        )
    root = ET.fromstring(text.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    counts: Counter[str] = Counter()
    for element in root.iter():
        _rename(element, name, counts)
        if style := element.get("style"):
            element.set("style", _HEX.sub(lambda match: _COLORS.get(match[0], match[0]), style))
        for attribute in ("fill", "stroke"):
            if (color := element.get(attribute)) in _COLORS:
                element.set("style", f"{element.get('style', '')};{attribute}:{_COLORS[color]}")
    for attribute in ("width", "height"):  # The page says how large it is; the view box keeps the shape.
        root.attrib.pop(attribute, None)
    # Described by the figure around it: its parts alone mean nothing to a screen reader.
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    return ET.tostring(root, encoding="unicode")


def _rename(element: ET.Element, name: str, counts: Counter[str]) -> None:
    """Put the figure's name before ids and references to them; panels repeat ids that nothing refers to."""
    for attribute, value in element.attrib.items():
        if attribute == "id":
            counts[value] += 1
            number = f"-{counts[value]}" if counts[value] > 1 else ""
            element.set(attribute, f"{name}-{value}{number}")
        elif attribute.endswith("href") and value.startswith("#"):
            element.set(attribute, f"#{name}-{value[1:]}")
        elif "url(#" in value:
            element.set(attribute, value.replace("url(#", f"url(#{name}-"))
