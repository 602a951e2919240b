"""What a chart is: a picture, the words around it, and its numbers."""

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
    """What to see."""
    caption: str
    """How to read it; also its text alternative."""
    table: Table
    draw: Callable[[bool], Figure]
    """Draws it; the argument says whether for a narrow screen."""
