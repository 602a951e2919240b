"""The parts of a chart: a picture, the text around it, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tenuto.report.html.colors import LIGHT


@dataclass(frozen=True)
class Table:
    """Numbers as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """One picture and what stands around it."""

    name: str
    """For files and ids; unique in a report."""
    title: str
    """The main message of the chart."""
    caption: str
    """How to read the chart; also used as its text alternative."""
    table: Table
    draw: Callable[[bool], Figure]
    """Draws it; the argument says whether for a narrow screen."""
    mark: str = ""
    """Written into the picture: what its numbers come from, if not from a real machine."""

    def make_figure(self, is_narrow: bool) -> Figure:
        """Draw it, with the mark in the lower right corner."""
        figure = self.draw(is_narrow)
        if self.mark:
            figure.legend(
                [Rectangle((0, 0), 0, 0, alpha=0)], [self.mark], loc="outside lower right",
                handlelength=0, handletextpad=0, borderaxespad=0, fontsize=8.5, labelcolor=LIGHT["soft"],
            )  # fmt: skip
        return figure
