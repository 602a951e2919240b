"""Draws a figure with the report's charts: a panel for each measure, a row of panels for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.figures.figures import Figure
from experiments.figures.points import Point
from tenuto.report.html.draw import draw as draw_chart
from tenuto.report.html.draw import styled
from tenuto.report.html.spec import Axis, Chart, Panel, Series, make_looks, stretch

MEASURES = (
    ("mean_job_s", "mean job time", "{:g} s"),
    ("p95_job_s", "P95 job time", "{:g} s"),
    ("throughput_jps", "jobs finished per second", "{:g}"),
    ("timed_out_share", "jobs over the time-out", "{:.0%}"),
)
"""Field of `Point`, title of its panel, and how a value is written."""


def draw(figure: Figure, points: Sequence[Point], path: Path) -> None:
    """Write an SVG or a PNG, as the name ends."""
    looks = make_looks(list(dict.fromkeys(point.policy for point in points)))
    workloads = list(dict.fromkeys(point.workload for point in points))
    panels = []
    for workload in workloads:
        drawn = sorted((p for p in points if p.workload == workload), key=lambda p: p.value)
        x = Axis(label=figure.axis, ends=stretch([p.value for p in drawn], 0.5))
        for name, title, form in MEASURES:
            curves = []
            for policy, look in looks.items():
                line = [p for p in drawn if p.policy == policy]
                values = [getattr(p, name) for p in line]
                curves.append(Series(look=look, at=[p.value for p in line], values=values))
            title = f"{workload}: {title}" if len(workloads) > 1 else title
            panels.append(Panel(marks=curves, x=x, y=Axis(write=form.format), title=title, height=2.9))
    with styled():
        drawing = draw_chart(Chart(name=path.stem, title=path.stem, panels=panels, columns=2))
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
