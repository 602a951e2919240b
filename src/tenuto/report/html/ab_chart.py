"""The verdict of `tenuto ab` as a picture: the ratio of every measure with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tenuto.client.ab_verdict import MEASURES
from tenuto.core.errors import clean
from tenuto.records.codec import Fields
from tenuto.records.files import read_first
from tenuto.report.html.axes import Looks, label_bars
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.colors import LIGHT
from tenuto.report.html.records import shorten
from tenuto.report.html.style import make_panels

TITLES = {measure.name: measure.title for measure in MEASURES}


@dataclass(frozen=True)
class AbRow:
    """One measure of one arm, compared with the baseline's."""

    arm: str
    measure: str
    ratio: float
    """The arm's value over the baseline's."""
    low: float | None
    """Lower end of the 95 % interval; None with one pair."""
    high: float | None
    differs: bool
    words: str


@dataclass(frozen=True)
class AbVerdict:
    """What a verdict.json says."""

    place: str
    baseline: str
    num_pairs: int
    rows: tuple[AbRow, ...]


def read_verdict(path: Path) -> AbVerdict:
    """Read verdict.json. Raises DataError."""
    fields = read_first(path)
    return AbVerdict(
        clean(path.parent.resolve().name),
        clean(fields.text("baseline")),
        fields.integer("pairs"),
        tuple(map(_read_row, fields.records("comparisons"))),
    )


def _read_row(fields: Fields) -> AbRow:
    measure = fields.text("measure")
    return AbRow(
        arm=clean(fields.text("arm")),
        measure=TITLES.get(measure, clean(measure)),
        ratio=fields.number("ratio"),
        low=fields.optional(fields.number, "low"),
        high=fields.optional(fields.number, "high"),
        differs=fields.values.get("differs") is True,
        words=clean(fields.text("words")),
    )


def make_ab_chart(verdict: AbVerdict, looks: Looks, name: str) -> Chart | None:
    """A row for each arm and measure; None before there is a pair."""
    if not verdict.rows:
        return None
    baseline = shorten(verdict.baseline)
    return Chart(
        name,
        f"Verdict of {shorten(verdict.place)}: every measure against {baseline}",
        f"An arm's value over that of {baseline}, with its 95 % interval, from {verdict.num_pairs} pairs. "
        "Times are better left of the line, throughput is better right of it. Filled: a difference.",
        Table(
            ("Arm", "Measure", "Ratio", "95 % interval", "In words"),
            tuple(
                (shorten(row.arm), row.measure, f"{row.ratio:.3f}", _format_interval(row), row.words)
                for row in verdict.rows
            ),
        ),
        partial(_draw, verdict.rows, baseline, looks),
    )


def _format_interval(row: AbRow) -> str:
    return "–" if row.low is None or row.high is None else f"{row.low:.3f} – {row.high:.3f}"


def _draw(rows: Sequence[AbRow], baseline: str, looks: Looks, is_narrow: bool) -> Figure:
    figure, (axes,) = make_panels(1, 0.6 + 0.3 * len(rows), is_narrow=is_narrow)
    ends = [1.0]
    has_arms = len({row.arm for row in rows}) > 1
    for number, row in enumerate(rows):
        low, high = (row.ratio if end is None else end for end in (row.low, row.high))
        color = looks[row.arm].color if row.arm in looks else LIGHT["soft"]
        axes.errorbar(
            row.ratio, number, xerr=[[max(0.0, row.ratio - low)], [max(0.0, high - row.ratio)]], fmt="o",
            color=color, markerfacecolor=color if row.differs else LIGHT["bg"], capsize=3, elinewidth=1,
            gid=f"interval-{number}",
        )  # fmt: skip
        ends += [low, high]
    axes.axvline(1, color=LIGHT["p0"], linewidth=1.2)
    labels = [f"{shorten(row.arm, 20)}: {row.measure}" if has_arms else row.measure for row in rows]
    label_bars(axes, labels, is_narrow)
    margin = 0.05 * (max(ends) - min(ends)) or 0.05
    axes.set_xlim(min(ends) - margin, max(ends) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(4 if is_narrow else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"value / value of {shorten(baseline, 16)}")
    return figure
