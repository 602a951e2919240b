"""The parts of a chart: a picture, the text around it, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure


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
