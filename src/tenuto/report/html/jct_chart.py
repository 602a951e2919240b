"""The chart of job completion times against load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
from tenuto.report.html.compare import Group, PolicyCell, sort_loads
from tenuto.report.html.style import make_panels
from tenuto.report.html.words import describe_load, format_load, format_ratio, format_seconds

MAX_BANDS = 6
"""With more policies the bands up to P95 would cover each other."""
JCT_COLUMNS = (
    "Policy", "Load", "Seeds", "Jobs", "Mean", "Seeds from – to", "P50", "P95", "P99", "Speed-up",
    "TTFT P95", "Prompt tokens hit", "Recomputed", "Loaded", "Preemptions",
)  # fmt: skip


def make_jct_chart(group: Group, looks: Looks, name: str) -> Chart | None:
    """JCT against load: the mean, the band up to P95, whiskers over seeds."""
    cells = [cell for policy in group.policies for cell in group.get_cells(policy)]
    if not cells:
        return None
    one_load = len({cell.load for cell in cells}) == 1
    draw = _draw_jct_bars if one_load else _draw_jct_lines
    where = f", {format_load(cells[0].load)}" if one_load else " against load"
    return Chart(
        name,
        f"Job completion time{where}",
        "Markers: mean over jobs and seeds, whiskers: lowest and highest seed. "
        + ("Bars reach from the mean to P95. " if one_load else "")
        + ("The band reaches from the mean to P95. " if not one_load and _has_bands(cells) else "")
        + "Lower is better.",
        Table(
            JCT_COLUMNS,
            tuple(_make_jct_row(group, cell, looks) for cell in cells),
        ),
        partial(draw, cells, looks),
    )


def _has_bands(cells: Sequence[PolicyCell]) -> bool:
    return len({cell.policy for cell in cells}) <= MAX_BANDS


def _draw_jct_lines(cells: Sequence[PolicyCell], looks: Looks, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 3.6, is_narrow=is_narrow)
    loads = sort_loads(cell.load for cell in cells)
    values = []
    for policy in dict.fromkeys(cell.policy for cell in cells):
        points = [(cell, mean) for cell in cells if cell.policy == policy and (mean := cell.get("mean_s"))]
        look = looks[policy]
        xs = [place_load(cell.load, loads) for cell, _ in points]
        means = [mean.middle for _, mean in points]
        tops = [p95.middle if (p95 := cell.get("p95_s")) else mean.middle for cell, mean in points]
        if _has_bands(cells):
            axes.fill_between(
                xs, means, tops, color=look.color, alpha=0.14, linewidth=0, gid=f"band-{look.key}"
            )
            axes.plot(xs, tops, color=look.color, linewidth=0.8, linestyle=look.dashes, alpha=0.8)
        else:
            tops = means
        axes.errorbar(
            xs, means, get_whiskers([mean for _, mean in points]),
            color=look.color, linestyle="none", capsize=3, elinewidth=1, gid=f"whiskers-{look.key}",
        )  # fmt: skip
        plot(axes, xs, means, look)
        values += means + tops + [end for _, mean in points for end in (mean.low, mean.high)]
    set_load_axis(axes, loads)
    set_value_axis(axes, values)
    axes.set_ylabel("job completion time")
    add_legend(figure, looks, is_narrow)
    return figure


def _draw_jct_bars(cells: Sequence[PolicyCell], looks: Looks, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 0.6 + 0.42 * len(cells), is_narrow=is_narrow)
    tops = []
    for row, cell in enumerate(cells):
        look, mean, p95 = looks[cell.policy], cell.get("mean_s"), cell.get("p95_s")
        assert mean is not None
        top = p95.middle if p95 else mean.middle
        axes.barh(row, top - mean.middle, 0.5, left=mean.middle, color=look.color, alpha=0.25)
        axes.errorbar(mean.middle, row, xerr=get_whiskers([mean]), color=look.color, capsize=3, elinewidth=1)
        plot(axes, [mean.middle], [row], look)
        tops += [top, mean.high]
    label_bars(axes, [looks[cell.policy].label for cell in cells], is_narrow)
    axes.set_xlim(0, max(tops) * 1.06 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(4 if is_narrow else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.set_xlabel("job completion time: mean, bar to P95")
    return figure


def _make_jct_row(group: Group, cell: PolicyCell, looks: Looks) -> tuple[str, ...]:
    mean, speed_up = cell.get("mean_s"), group.try_speed_up(cell.policy, cell.load)
    jobs = sum(run.num_jobs or 0 for run in cell.runs)
    times = [spread.middle if (spread := cell.get(name)) else None for name in ("p50_s", "p95_s", "p99_s")]
    return (
        looks[cell.policy].label,
        describe_load(group, cell.load),
        str(len(cell.mean_s_by_seed)),
        f"{jobs:,}",
        format_seconds(mean.middle if mean else None),
        f"{format_seconds(mean.low)} – {format_seconds(mean.high)}" if mean else "–",
        *map(format_seconds, times),
        format_ratio(speed_up.middle) if speed_up else "–",
        format_seconds(ttft.middle if (ttft := cell.get("ttft_p95_s")) else None),
        *(_get_share(cell, name) for name in ("hit_tokens", "recomputed_tokens", "loaded_tokens")),
        f"{preemptions.middle:,.0f}" if (preemptions := cell.get("preemptions")) else "–",
    )


def _get_share(cell: PolicyCell, field: str) -> str:
    """Tokens of the cell's runs as a share of their prompts'."""
    part, whole = cell.get(field), cell.get("prompt_tokens")
    return f"{part.middle / whole.middle:.1%}" if part and whole and whole.middle else "–"
