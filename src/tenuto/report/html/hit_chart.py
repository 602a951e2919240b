"""Cache hits against load: the share of the reusable tokens that was found in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tenuto.report.html.axes import (
    Looks,
    add_legend,
    get_whiskers,
    label_bars,
    place_load,
    plot,
    set_load_axis,
)
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.compare import Group, PolicyCell, Spread, sort_loads
from tenuto.report.html.records import Run
from tenuto.report.html.style import make_panels
from tenuto.report.html.words import format_load, format_share


class Hits(NamedTuple):
    """One policy's hits at one load."""

    cell: PolicyCell
    share: Spread
    """Mean and range over its runs."""


def make_hit_chart(group: Group, looks: Looks, name: str) -> Chart | None:
    """Hits as a share of the reusable tokens; of all prompt tokens if a run does not count those."""
    cells = [
        cell for policy in group.policies for load in group.loads if (cell := group.try_cell(policy, load))
    ]
    runs = [run for cell in cells for run in cell.runs]
    of_reusable = any(_get_share(run, of_reusable=True) is not None for run in runs) and all(
        run.reusable_tokens is not None for run in runs if run.hit_tokens is not None
    )
    found = []
    for cell in cells:
        shares = [s for run in cell.runs if (s := _get_share(run, of_reusable=of_reusable)) is not None]
        if shares:
            found.append(Hits(cell, Spread(sum(shares) / len(shares), min(shares), max(shares))))
    if not any(hits.share.high for hits in found):
        return None
    what = "reusable" if of_reusable else "prompt"
    one_load = len({hits.cell.load for hits in found}) == 1
    rows = tuple(
        (looks[hits.cell.policy].label, format_load(hits.cell.load), *map(format_share, hits.share))
        for hits in found
    )
    return Chart(
        name,
        "Cache hits" + (f", {format_load(found[0].cell.load)}" if one_load else " against load"),
        f"Share of the {what} tokens that were found in the cache when a turn started; whiskers: lowest and "
        "highest run. "
        + (
            "Reusable are the tokens that the job's previous turn left: 100% is the best a policy can do."
            if of_reusable
            else "First turns and new text cannot be hit, so 100% is out of reach."
        ),
        Table(("Policy", "Load", "Mean", "Lowest", "Highest"), rows),
        partial(_draw_bars if one_load else _draw_lines, found, looks, f"share of {what} tokens hit"),
    )


def _get_share(run: Run, *, of_reusable: bool) -> float | None:
    part, whole = (
        (run.reused_tokens, run.reusable_tokens) if of_reusable else (run.hit_tokens, run.prompt_tokens)
    )
    return part / whole if part is not None and whole else None


def _draw_lines(found: Sequence[Hits], looks: Looks, label: str, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 2.6, is_narrow=is_narrow)
    loads = sort_loads(hits.cell.load for hits in found)
    for policy in dict.fromkeys(hits.cell.policy for hits in found):
        points = [hits for hits in found if hits.cell.policy == policy]
        xs = [place_load(hits.cell.load, loads) for hits in points]
        look = looks[policy]
        axes.errorbar(
            xs, [hits.share.middle for hits in points], get_whiskers([hits.share for hits in points]),
            color=look.color, linestyle="none", capsize=3, elinewidth=1, gid=f"whiskers-{look.key}",
        )  # fmt: skip
        plot(axes, xs, [hits.share.middle for hits in points], look)
    set_load_axis(axes, loads)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylabel(label)
    add_legend(figure, looks, is_narrow)
    return figure


def _draw_bars(found: Sequence[Hits], looks: Looks, label: str, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 0.6 + 0.32 * len(found), is_narrow=is_narrow)
    for row, hits in enumerate(found):
        look = looks[hits.cell.policy]
        axes.barh(row, hits.share.middle, 0.5, color=look.color, alpha=0.4)
        axes.errorbar(
            hits.share.middle, row, xerr=get_whiskers([hits.share]), color=look.color, capsize=3, elinewidth=1
        )
        plot(axes, [hits.share.middle], [row], look)
    label_bars(axes, [looks[hits.cell.policy].label for hits in found], is_narrow)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel(label)
    return figure
