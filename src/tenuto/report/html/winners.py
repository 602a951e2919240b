"""The winner map: per GPU and load who wins, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tenuto.report.html.axes import Looks
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.colors import LIGHT
from tenuto.report.html.compare import Group, Load, Winner, sort_loads, sort_policies
from tenuto.report.html.records import shorten
from tenuto.report.html.style import NARROW_INCHES, WIDE_INCHES
from tenuto.report.html.words import describe_load, format_ratio

TIE_INCHES = 0.6
"""What a tie of four needs in a cell, with the word."""

MAX_RIVALS = 3
"""Names in the caption of those whom winners are compared with."""
LIGHTEST, DARKEST = 0.12, 0.5
FULL_RATIO = 3.0
"""From this ratio on a square is as dark as it gets, so that text on it can be read."""

Cells = dict[tuple[int, Load], Winner]
"""By the number of the group (one GPU each) and the load."""


def make_winner_map(groups: Sequence[Group], looks: Looks, name: str) -> Chart | None:
    """The map of one workload and model; None where nothing can be compared."""
    cells: Cells = {
        (index, load): winner
        for index, group in enumerate(groups)
        for load in group.loads
        if (winner := group.try_winner(load))
    }
    if not cells:
        return None
    loads = sort_loads(load for _, load in cells)
    gpus = [shorten(group.setting.gpu, 20) for group in groups]

    rivals = sorted({shorten(winner.against.other) for winner in cells.values()})[:MAX_RIVALS]

    overloaded = {(index, load) for index, load in cells if "overloaded" in groups[index].get_doubts(load)}
    is_any_overloaded = bool(overloaded)

    def draw(is_narrow: bool) -> Figure:
        return _draw(cells, overloaded, loads, gpus, looks, is_narrow)

    rows = tuple(
        (
            gpus[index],
            describe_load(groups[index], load),
            ", ".join(looks[policy].label for policy in winner.policies),
            "not proved" if winner.is_open else "nobody wins" if winner.is_tie else "wins",
            format_ratio(winner.speed_up),
            shorten(winner.against.other),
        )
        for (index, load), winner in cells.items()
    )
    return Chart(
        name,
        "Which policy wins where",
        "In each square the policy that wins, and how many times faster than "
        f"{' or '.join(rivals)} it is: the larger the ratio, the deeper the shade. Dashed: nobody wins, "
        "as the best are inside the 95 % interval of each other"
        + (
            ". Dotted, with a ?: nothing is proved, and the name is only that of the shortest mean."
            if any(winner.is_open for winner in cells.values())
            else "."
        )
        + (" Overloaded (o): the ratio depends on how long the runs were." if is_any_overloaded else ""),
        Table(("GPU", "Load", "Best first", "Outcome", "Speed-up", "Over"), rows),
        draw,
    )


def _draw(
    cells: Cells,
    overloaded: Set[tuple[int, Load]],
    loads: Sequence[Load],
    gpus: Sequence[str],
    looks: Looks,
    is_narrow: bool,
) -> Figure:
    winners = sort_policies(policy for winner in cells.values() for policy in winner.policies)
    width = NARROW_INCHES if is_narrow else WIDE_INCHES
    room = width * (0.7 if is_narrow else 0.85)
    # The longer side goes down the page where the screen is narrow.
    loads_down = is_narrow and len(loads) > len(gpus)
    across = len(gpus) if loads_down else len(loads)
    down = len(loads) if loads_down else len(gpus)
    fits = max(len(looks[policy].label) for policy in winners) * 0.075 <= room / across - 0.1
    labels = [
        f"{looks[policy].key} = {shorten(looks[policy].label, 32 if is_narrow else 48)}" for policy in winners
    ]
    columns = max(1, int((44 if is_narrow else 115) / (max(map(len, labels)) + 3)))
    height = 0.46 * down + 0.7 + (0 if fits else 0.2 * -(-len(winners) // columns))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for (index, load), winner in cells.items():
        at = (index, loads.index(load)) if loads_down else (loads.index(load), index)
        name = _name_winner(winner, looks, None if fits else room / across)
        _draw_cell(axes, at, winner, looks, f"{name} o" if (index, load) in overloaded else name)
    load_ticks = ["rec." if load is None else f"{load:g}" for load in loads]
    names = gpus if loads_down else load_ticks
    is_tight = max(map(len, names)) * 0.09 > room / across
    axes.set_xticks(
        range(across), names, rotation=35 if is_tight else 0, ha="right" if is_tight else "center"
    )
    axes.set_yticks(range(down), load_ticks if loads_down else gpus)
    (axes.set_ylabel if loads_down else axes.set_xlabel)("load, jobs/s")
    axes.set_xlim(-0.5, across - 0.5)
    axes.set_ylim(down - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if not fits:
        figure.legend(
            [Rectangle((0, 0), 0, 0, alpha=0) for _ in labels],
            labels,
            loc="outside upper left",
            ncols=min(columns, len(labels)),
            handlelength=0,
            handletextpad=0,
        )
    return figure


def _name_winner(winner: Winner, looks: Looks, room: float | None) -> str:
    """The winner by name, or by key where a cell has only so many inches of room."""
    if not winner.is_tie:
        best = looks[winner.policies[0]]
        return best.label if room is None else best.key
    if winner.is_open:
        best = looks[winner.policies[0]]
        return f"{best.label if room is None else best.key}?"
    if room is None:
        return "tie"
    keys = "".join(sorted(looks[policy].key for policy in winner.policies))
    # The dashed edge says that it is a tie, too.
    return f"tie {keys[:4]}" if room > TIE_INCHES else keys[:4]


def get_shade(winner: Winner) -> float:
    """How opaque a square is: with the logarithm of the ratio."""
    if winner.is_tie:
        return LIGHTEST
    share = min(1.0, math.log(max(1.0, winner.speed_up)) / math.log(FULL_RATIO))
    return LIGHTEST + share * (DARKEST - LIGHTEST)


def _draw_cell(axes: Axes, at: tuple[int, int], winner: Winner, looks: Looks, name: str) -> None:
    x, y = at
    best = looks[winner.policies[0]]
    color = LIGHT["soft"] if winner.is_tie else best.color
    dashes = (0, (1, 2)) if winner.is_open else (0, (2, 2)) if winner.is_tie else "solid"
    axes.add_patch(
        Rectangle(
            (x - 0.47, y - 0.44), 0.94, 0.88, facecolor=color, alpha=get_shade(winner),
            gid=f"cell-{x}-{y}", linewidth=0,
        )
    )  # fmt: skip
    axes.add_patch(
        Rectangle(
            (x - 0.47, y - 0.44), 0.94, 0.88, fill=False, edgecolor=color, linewidth=1.2,
            linestyle=dashes,
        )
    )  # fmt: skip
    is_shown = winner.is_open or winner.against.other not in winner.policies
    ratio = f"\n{format_ratio(winner.speed_up)}" if is_shown else ""
    axes.text(x, y, name + ratio, ha="center", va="center", fontsize=8.5, linespacing=1.25)
