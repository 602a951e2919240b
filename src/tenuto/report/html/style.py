"""How figures look: colours that colour-blind readers tell apart, and never colour alone.

In the page colours are CSS variables, so one drawing serves the light and the dark scheme; in files they are
the light ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tenuto.report.html.colors import LIGHT, POLICIES_LIGHT
from tenuto.report.html.compare import BASELINE
from tenuto.report.html.records import FAULT_MARK, MAX_NAME, shorten

Dashes = tuple[float, Sequence[float]]
"""A line's dashes, as matplotlib has them: offset, and lengths of dashes and gaps."""
_MARKERS = "oXs^DPv*<>h"
_DASHES: tuple[Dashes, ...] = (
    (0, ()),
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
)
HATCHES = {"running": "", "leased": "////", "cached": "---", "free": ""}

WIDE_INCHES, NARROW_INCHES = 9.6, 3.8
"""In the page an inch is 96 px: up to 920 px wide, and from 360 px."""


class Look(NamedTuple):
    """How one policy is drawn, everywhere."""

    label: str
    color: str
    marker: str
    dashes: Dashes
    key: str
    """A letter for places where the label does not fit."""
    is_baseline: bool

    @property
    def width(self) -> float:
        """Width of its line in points. The baseline's line is wider, so it stays visible behind others."""
        return 3.0 if self.is_baseline else 1.6

    def get_marker(self) -> dict[str, Any]:
        """How its points are drawn; the baseline's are rings that show around others on the same place."""
        if self.is_baseline:
            return {
                "marker": self.marker,
                "markersize": 9.5,
                "markerfacecolor": "none",
                "markeredgewidth": 1.6,
            }
        return {"marker": self.marker, "markersize": 6}


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
        looks[policy] = Look(
            label=label + mark,
            color=LIGHT[f"p{index % len(POLICIES_LIGHT)}"],
            marker=_MARKERS[index % len(_MARKERS)],
            dashes=_DASHES[index % len(_DASHES)],
            key=_make_key(index - first),
            is_baseline=policy == BASELINE,
        )
    return looks


def _make_key(index: int) -> str:
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26 + 1}"


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib as all our figures want it; names from outside are never read as formulas."""
    settings: dict[Any, Any] = {
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "text.parse_math": False,
        "axes.unicode_minus": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": LIGHT["soft"],
        "axes.labelcolor": LIGHT["fg"],
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": LIGHT["fg"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.7,
        "xtick.color": LIGHT["soft"],
        "ytick.color": LIGHT["soft"],
        "xtick.labelcolor": LIGHT["fg"],
        "ytick.labelcolor": LIGHT["fg"],
        "text.color": LIGHT["fg"],
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": LIGHT["bg"],
        "hatch.linewidth": 0.6,
        "svg.hashsalt": "tenuto",
        "figure.constrained_layout.use": True,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A name in a script the font lacks is drawn as boxes in a PNG; the page uses the reader's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def make_panels(
    num_panels: int, height_inches: float, *, is_narrow: bool, columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels: side by side where it is wide, one below the other where it is narrow."""
    columns = 1 if is_narrow else min(columns, num_panels)
    rows = -(-num_panels // columns)
    width = NARROW_INCHES if is_narrow else WIDE_INCHES
    # Without pyplot: no window system, no global list of figures.
    figure = Figure(figsize=(width, height_inches * rows + 0.5), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(num_panels)]
    return figure, axes
