"""Charts over a run's time: the KV cache by state, and the jobs' timeline as a still picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tenuto.core.errors import clean
from tenuto.records.schema import Sample, TurnRecord
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.colors import LIGHT
from tenuto.report.html.records import shorten
from tenuto.report.html.sources import Detail
from tenuto.report.html.style import HATCHES, NARROW_INCHES, WIDE_INCHES, make_panels
from tenuto.report.html.turns import (
    State,
    get_cache_verdicts,
    get_slices,
    get_tool_end_s,
    group_by_job,
)
from tenuto.report.html.words import count, format_seconds

MAX_SAMPLES = 300
"""Samples drawn of a run; more are averaged over equal stretches of time."""
MAX_STILL_JOBS = 24
STATES = ("running", "leased", "cached", "free")
HEIGHTS: dict[State, float] = {
    "queue": 0.18,
    "wait": 0.32,
    "prefill": 0.8,
    "decode": 0.5,
    "tool": 0.08,
    "failed": 0.5,
}
"""How tall a state's bar is, of a row: states differ in more than colour."""
NAMES = {"queue": "queue", "wait": "waiting for the first token", "failed": "failed turn"}


def make_occupancy_chart(detail: Detail, name: str) -> Chart | None:
    """Blocks by state over time; tiers below the GPU in a panel of their own."""
    if len({sample.now_s for sample in detail.samples}) < 2:
        return None
    samples, thinned = average_samples(detail.samples)
    states = [state for state in STATES if state != "cached" or samples[0].cached_blocks is not None]
    tiers = [
        tier
        for tier in ("host", "disk")
        if any(getattr(sample, f"{tier}_blocks") is not None for sample in samples)
    ]
    means = {
        state: statistics.fmean(getattr(sample, f"{state}_blocks") or 0 for sample in samples)
        for state in (*states, *tiers)
    }
    peaks = {
        state: max(getattr(sample, f"{state}_blocks") or 0 for sample in detail.samples)
        for state in (*states, *tiers)
    }
    size = max(sample.num_blocks for sample in detail.samples)
    rows = tuple(
        (
            state,
            f"{means[state]:,.0f}",
            f"{peaks[state]:,.0f}",
            _share(means[state], size),
        )
        for state in (*states, *tiers)
    )
    return Chart(
        name,
        f"KV cache over time: {detail.label}",
        "Blocks of the GPU's KV cache by state: running turns, leased for jobs in a tool call, "
        + (
            "cached (free, but can still be hit), free. "
            if "cached" in states
            else "free (empty, or can still be hit). "
        )
        + f"{size:,} blocks in all. {detail.note}".rstrip()
        + (" Below: what the host and disk tiers hold." if tiers else "")
        + (f" {count(len(detail.samples), 'sample')}, averaged to {len(samples)}." if thinned else ""),
        Table(("State", "Mean blocks", "Most blocks", "Mean share"), rows),
        partial(_draw_occupancy, samples, states, tiers),
    )


def average_samples(samples: Sequence[Sample]) -> tuple[list[Sample], bool]:
    """The samples in order of time, averaged over equal stretches if too many; and whether they were."""
    ordered = sorted(samples, key=lambda sample: sample.now_s)
    if len(ordered) <= MAX_SAMPLES:
        return ordered, False
    start_s, end_s = ordered[0].now_s, ordered[-1].now_s
    stretches: dict[int, list[Sample]] = {}
    for sample in ordered:
        share = (sample.now_s - start_s) / ((end_s - start_s) or 1)
        stretches.setdefault(min(MAX_SAMPLES - 1, int(share * MAX_SAMPLES)), []).append(sample)
    return [_average(each) for each in stretches.values()], True


def _average(samples: Sequence[Sample]) -> Sample:
    values: dict[str, Any] = {}
    for name in Sample.__slots__:
        known = [value for sample in samples if (value := getattr(sample, name)) is not None]
        values[name] = statistics.fmean(known) if known else None
    return Sample(**values)


def _draw_occupancy(
    samples: Sequence[Sample], states: Sequence[str], tiers: Sequence[str], is_narrow: bool
) -> Figure:
    figure, panels = make_panels(2 if tiers else 1, 2.8, is_narrow=is_narrow, columns=1)
    times = [sample.now_s for sample in samples]
    bottom = [0.0] * len(times)
    for state in states:
        top = [
            below + (getattr(sample, f"{state}_blocks") or 0)
            for below, sample in zip(bottom, samples, strict=True)
        ]
        panels[0].fill_between(
            times, bottom, top, facecolor=LIGHT[state], edgecolor=LIGHT["bg"], hatch=HATCHES[state] or None,
            linewidth=0, gid=f"area-{state}",
        )  # fmt: skip
        bottom = top
    handles = [
        Patch(facecolor=LIGHT[state], edgecolor=LIGHT["bg"], hatch=HATCHES[state] * 2, label=state)
        for state in states
    ]
    # The host's line shows behind the disk's where both hold the same.
    for tier, dashes, width in (("host", "solid", 3.2), ("disk", "dashed", 1.5)):
        if tier in tiers:
            (line,) = panels[1].plot(
                times, [getattr(sample, f"{tier}_blocks") or 0 for sample in samples],
                color=LIGHT[tier], linestyle=dashes, linewidth=width, label=tier, gid=f"line-{tier}",
            )  # fmt: skip
            handles.append(line)  # type: ignore[arg-type]
    for axes in panels:
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        _set_time_axis(axes, times[0], times[-1], is_narrow)
        axes.set_ylabel("blocks")
    if tiers:
        panels[1].set_ylabel("blocks below the GPU")
    figure.legend(handles=handles, loc="outside upper left", ncols=2 if is_narrow else len(handles))
    return figure


def make_still_timeline(detail: Detail, name: str) -> Chart | None:
    """The first jobs' turns over time; the page has all of them, to zoom."""
    jobs = list(group_by_job(detail.turns).items())[:MAX_STILL_JOBS]
    if not jobs:
        return None
    return Chart(
        name,
        f"Timeline: {detail.label}",
        f"The first {count(len(jobs), 'job')}: queue, prefill, decode, tool calls.",
        Table((), ()),
        partial(_draw_timeline, jobs, detail.block_size),
    )


def _draw_timeline(jobs: Sequence[tuple[str, list[TurnRecord]]], block_size: int, is_narrow: bool) -> Figure:
    width = NARROW_INCHES if is_narrow else WIDE_INCHES
    figure = Figure(figsize=(width, 0.2 * len(jobs) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    bars: dict[State, list[tuple[int, float, float]]] = {}
    for row, (_, turns) in enumerate(jobs):
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            for each, start_s, end_s in get_slices(turn, get_tool_end_s(turn, following)):
                bars.setdefault(each, []).append((row, start_s, end_s))
    for state, height in HEIGHTS.items():
        if state in bars:
            rows, starts, ends = zip(*bars[state], strict=True)
            widths = [end_s - start_s for start_s, end_s in zip(starts, ends, strict=True)]
            label = NAMES.get(state, state)
            axes.barh(
                rows,
                widths,
                height,
                left=starts,
                color=LIGHT[state],
                label=label,
                gid=f"bars-{state}",
            )
    _draw_marks(axes, jobs, block_size)
    axes.set_yticks(range(len(jobs)), [shorten(clean(job))[:18] for job, _ in jobs], fontsize=7)
    axes.set_ylim(len(jobs) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    starts_s = [turn.due_s for _, turns in jobs for turn in turns]
    ends_s = [turn.last_token_s or turn.due_s for _, turns in jobs for turn in turns]
    _set_time_axis(axes, min(starts_s), max(ends_s), is_narrow)
    figure.legend(loc="outside upper left", ncols=3 if is_narrow else 8)
    return figure


def _draw_marks(axes: Axes, jobs: Sequence[tuple[str, list[TurnRecord]]], block_size: int) -> None:
    """Rings for what was hit, filled, partly or not at all."""
    marks: dict[str, list[tuple[float, int]]] = {}
    for row, (_, turns) in enumerate(jobs):
        for turn, verdict in zip(turns, get_cache_verdicts(turns, block_size), strict=True):
            at_s = turn.first_token_s if turn.start_s is None else turn.start_s
            if at_s is not None:
                marks.setdefault(verdict, []).append((at_s, row))
    for verdict, label, fill in (
        ("hit", "hit", "full"),
        ("part", "partly hit", "left"),
        ("miss", "miss", "none"),
    ):
        if verdict in marks:
            xs, ys = zip(*marks[verdict], strict=True)
            axes.plot(
                xs, ys, "o", color=LIGHT["fg"], markerfacecoloralt=LIGHT["bg"], fillstyle=fill,
                markersize=4.5, markeredgewidth=0.8, label=label, gid=f"marks-{verdict}",
            )  # fmt: skip


def _set_time_axis(axes: Axes, start_s: float, end_s: float, is_narrow: bool) -> None:
    axes.set_xlim(start_s, end_s if end_s > start_s else start_s + 1)
    axes.xaxis.set_major_locator(MaxNLocator(4 if is_narrow else 9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.set_xlabel("time since the run's start")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"
