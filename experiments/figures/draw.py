"""Draws a figure with the report's charts: a panel for each of its own, and for each measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.figures.figures import IN_TIME, MEAN, P90, P95, Figure
from experiments.figures.points import Point
from tenuto.report.html.draw import draw as draw_chart
from tenuto.report.html.draw import styled
from tenuto.report.html.spec import Axis, Chart, Panel, Series, make_looks, stretch

MEASURES = {
    MEAN: ("mean job time", "{:g} s"),
    P90: ("P90 job time", "{:g} s"),
    P95: ("P95 job time", "{:g} s"),
    IN_TIME: ("jobs done within 15 minutes", "{:.0%}"),
}
"""The title of a measure's panel, and how a value is written."""


def draw(figure: Figure, points: Sequence[Point], path: Path) -> None:
    """Write an SVG or a PNG, as the name ends."""
    looks = dict(zip(figure.policies, make_looks(list(figure.policies.values())).values(), strict=True))
    panels = []
    for title in dict.fromkeys(point.panel for point in points):
        drawn = [point for point in points if point.panel == title]
        x = Axis(label=figure.axis, ends=stretch([point.value for point in drawn], 0.5))
        for name in figure.measures:
            about, form = MEASURES[name]
            curves = [
                Series(
                    look=look,
                    at=[point.value for point in drawn],
                    values=[point.measures[policy][name] for point in drawn],
                )
                for policy, look in looks.items()
            ]
            panels.append(
                Panel(marks=curves, x=x, y=Axis(write=form.format), title=f"{title}: {about}", height=2.9)
            )
    with styled():
        drawing = draw_chart(Chart(name=path.stem, title=path.stem, panels=panels, columns=2))
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
