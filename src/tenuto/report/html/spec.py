"""The contents of a chart: panels of marks, their axes, and the text around them. `draw.py` draws it.

Policies and states have a palette each. Within a palette any two colours differ by 25 or more (CIELAB) for
usual and for colour-blind eyes, by the model of G. Machado and others, "A Physiologically-based Model for
Simulation of Color Vision Deficiency" (2009). Each has a contrast of 3 to 1 with its background, except
`free`, which is pale on purpose. No colour is in both palettes. The tests check all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

MAX_NAME = 48
"""Longest name shown, in characters."""


def shorten(name: str, most: int = MAX_NAME) -> str:
    """A name short enough to show, in characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def format_load(load: float | None) -> str:
    """A load in words."""
    return "the workload's own arrivals" if load is None else f"{load:g} {'job' if load == 1 else 'jobs'}/s"


def format_ratio(ratio: float) -> str:
    """A speed-up: 1.84×."""
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def format_seconds(seconds: float | None) -> str:
    """A time with three digits."""
    if seconds is None:
        return "–"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def format_share(share: float) -> str:
    """A share of a whole in per cent."""
    return f"{share:.1%}" if share < 0.9995 else "100%"


POLICIES_LIGHT = {
    "p0": "#888f97", "p1": "#2095df", "p2": "#d47a1c", "p3": "#005540",
    "p4": "#780174", "p5": "#8f642d", "p6": "#5e00c3",
}  # fmt: skip
POLICIES_DARK = {
    "p0": "#7c7c7c", "p1": "#79d4fa", "p2": "#f84b00", "p3": "#98c699",
    "p4": "#b740b1", "p5": "#f1e079", "p6": "#a446ee",
}  # fmt: skip

BLOCK_STATES = ("running", "leased", "cached", "free", "host", "disk")
"""States of blocks. The others below are states of turns, and are never in one picture with these."""
STATES_LIGHT = {
    "queue": "#a98c07", "wait": "#850ea9", "prefill": "#7a2b00", "decode": "#199dba", "held": "#3333ff",
    "tool": "#464658", "failed": "#e0666b", "running": "#316077", "leased": "#f45b17", "cached": "#4d4920",
    "free": "#c3c9d0", "host": "#8e5cf7", "disk": "#a48b6f",
}  # fmt: skip
STATES_DARK = {
    "queue": "#f3da9f", "wait": "#bb73fc", "prefill": "#d75e67", "decode": "#3189a8", "held": "#7033ff",
    "tool": "#bed4e1", "failed": "#df2220", "running": "#3ff7fa", "leased": "#c84d1a", "cached": "#d3e99d",
    "free": "#4a535d", "host": "#0485ff", "disk": "#a5866c",
}  # fmt: skip

LIGHT = {
    "fg": "#1b1f24", "soft": "#59626c", "grid": "#d5d9de", "bg": "#fefefe", "link": "#0062a3",
    **POLICIES_LIGHT, **STATES_LIGHT,
}  # fmt: skip
DARK = {
    "fg": "#e8ebee", "soft": "#a9b2bc", "grid": "#3a424b", "bg": "#14181d", "link": "#7cc0f5",
    **POLICIES_DARK, **STATES_DARK,
}  # fmt: skip
"""The same names. All colours of LIGHT are different, because the page replaces each by its value."""

BASELINE = "stock"
"""The baseline of everything but `tenuto ab`, which names its own."""
FAULT_MARK = " !"
"""Added to a policy's label if some of its hooks failed in a run."""
Dashes = tuple[float, Sequence[float]]
"""A line's dashes: offset, and lengths of dashes and gaps."""
SOLID: Dashes = (0, ())
_MARKERS = "oXs^DPv*<>h"
_DASHES: tuple[Dashes, ...] = (SOLID, (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1, 1.5)))


class Look(NamedTuple):
    """How one policy is drawn in all charts; it never differs by colour alone."""

    label: str
    color: str
    """As in LIGHT."""
    marker: str = "o"
    dashes: Dashes = SOLID
    key: str = "A"
    """A letter for places where the label does not fit."""
    is_baseline: bool = False


Looks = Mapping[str, Look]
"""By policy."""


def make_looks(policies: Sequence[str], faulty: Collection[str] = ()) -> dict[str, Look]:
    """Make a look for each policy, in order, with distinct labels.

    The label of a policy in `faulty`, whose hooks failed, ends in `FAULT_MARK`.
    """
    looks: dict[str, Look] = {}
    labels: set[str] = set()
    # The first look is reserved for the baseline, even if it did not run.
    first = 0 if BASELINE in policies else 1
    for index, policy in enumerate(policies, first):
        mark = FAULT_MARK if policy in faulty else ""
        label, number = shorten(policy, MAX_NAME - len(mark)), 2
        while label in labels:
            label, number = f"{shorten(policy)} ({number})", number + 1
        labels.add(label)
        round_, letter = divmod(index - first, 26)
        looks[policy] = Look(
            label=label + mark,
            color=f"p{index % len(POLICIES_LIGHT)}",
            marker=_MARKERS[index % len(_MARKERS)],
            dashes=_DASHES[index % len(_DASHES)],
            key=chr(ord("A") + letter) + (str(round_ + 1) if round_ else ""),
            is_baseline=policy == BASELINE,
        )
    return looks


@dataclass(frozen=True, kw_only=True)
class Series:
    """A policy's values: a curve, or one row of a panel of rows."""

    look: Look
    at: Sequence[float]
    """The place of each value on the other axis."""
    values: Sequence[float]
    ranges: Sequence[tuple[float, float]] = ()
    """Whiskers: from where to where, for each value."""
    bands: Sequence[tuple[float, float]] = ()
    """A shade beside the curve, or a bar in the row."""
    unproved: Sequence[bool] = ()
    """Which values get a light centre."""
    every: int = 1
    """A marker at every n-th value."""


class Area(NamedTuple):
    """The share of a state in a stack."""

    state: str
    at: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


class Trace(NamedTuple):
    """A state's amount over time."""

    state: str
    at: Sequence[float]
    values: Sequence[float]


class Bars(NamedTuple):
    """Bars of one kind, each from one value to another in a row."""

    color: str
    label: str
    """In the legend; none if empty."""
    spans: Sequence[tuple[int, float, float]]
    """Row, start and end."""
    height: float
    """Of a row."""


Fill = Literal["full", "left", "none"]


class Signs(NamedTuple):
    """Small signs in rows."""

    label: str
    points: Sequence[tuple[float, float]]
    """Value and row; a part of a row is beside its middle."""
    fill: Fill = "full"
    marker: str = "o"


Mark = Series | Area | Trace | Bars | Signs


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis. Without ends it reaches from 0 over all values, or is logarithmic where they differ widely."""

    label: str = ""
    write: Callable[[float], str] = "{:g}".format
    ends: tuple[float, float] | None = None
    places: Mapping[float, str] = field(default_factory=dict)
    """Names that are written instead of numbers."""
    is_whole: bool = False


TIME = Axis(write=format_seconds)


def stretch(values: Sequence[float], least: float) -> tuple[float, float]:
    """Both ends of an axis that shows all values, with some room beside them."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or least
    return low - margin, high + margin


class Reference(NamedTuple):
    """A line at a value with which the others are compared."""

    value: float
    label: str = ""
    """Written beside the panel."""
    color: str = "p0"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Marks between two axes."""

    marks: Sequence[Mark]
    x: Axis
    y: Axis
    title: str = ""
    height: float = 2.8
    """In inches."""
    has_rows: bool = False
    """Whether `y` has rows, the first one on top, and the values of series are along `x`."""
    reference: Reference | None = None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A square of a map."""

    texts: tuple[str, ...]
    """The same from long to short; the first that has room is written."""
    note: str
    """A second line."""
    color: str
    shade: float
    """How opaque it is, from 0 to 1."""
    edge: Dashes = SOLID


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A map of tiles, rows by columns. On a narrow screen, the longer side goes down the page."""

    rows: Sequence[str]
    columns: Sequence[str]
    label: str
    """What the columns are."""
    tiles: Mapping[tuple[int, int], Tile]
    """By row and column."""
    keys: Mapping[str, str]
    """The long text of each short one; shown unless all long texts have room."""


@dataclass(frozen=True)
class Table:
    """Numbers as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture with its title, caption and notes."""

    name: str
    """For files and ids; unique in a report."""
    title: str
    """The main message of the chart."""
    caption: str = ""
    """How to read the chart; also used as its text alternative."""
    panels: Sequence[Panel | Grid]
    table: Table = Table((), ())
    columns: int = 3
    """Number of panels side by side on a wide screen."""
    mark: str = ""
    """Written into the picture: the source of its numbers, if it is not a real machine."""
