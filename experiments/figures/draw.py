"""Draws a figure with the report's charts: a panel for each measure, a row of panels for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.figures.figures import Figure
from experiments.figures.points import Point
from tenuto.report.html.axes import add_legend, plot, set_value_axis
from tenuto.report.html.style import make_looks, make_panels, styled

MEASURES = (
    ("mean_job_s", "mean job time", "{:g} s"),
    ("p95_job_s", "P95 job time", "{:g} s"),
    ("throughput_jps", "jobs finished per second", "{:g}"),
    ("timed_out_share", "jobs over the time-out", "{:.0%}"),
)
"""Field of `Point`, title of its panel, and how a value is written."""


def draw(figure: Figure, points: Sequence[Point], path: Path) -> None:
    """Write an SVG or a PNG, as the name ends."""
    workloads = list(dict.fromkeys(point.workload for point in points))
    policies = list(dict.fromkeys(point.policy for point in points))
    looks = make_looks(policies)
    with styled():
        drawing, panels = make_panels(len(MEASURES) * len(workloads), 2.9, is_narrow=False, columns=2)
        for number, axes in enumerate(panels):
            workload = workloads[number // len(MEASURES)]
            name, title, form = MEASURES[number % len(MEASURES)]
            drawn = [point for point in points if point.workload == workload]
            for policy in policies:
                line = sorted((p for p in drawn if p.policy == policy), key=lambda p: p.value)
                plot(axes, [p.value for p in line], [getattr(p, name) for p in line], looks[policy])
            axes.set_title(f"{workload}: {title}" if len(workloads) > 1 else title)
            axes.set_xlabel(figure.axis)
            set_value_axis(axes, [getattr(p, name) for p in drawn], form.format)
        add_legend(drawing, looks, is_narrow=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
