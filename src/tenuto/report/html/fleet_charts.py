"""Several engines behind a router: what each of them did, and what moving jobs cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from matplotlib.figure import Figure

from tenuto.core.errors import clean
from tenuto.records.codec import MAX_COUNT
from tenuto.report.html.chart import Chart, Table
from tenuto.report.html.colors import LIGHT
from tenuto.report.html.records import Run, shorten
from tenuto.report.html.style import NARROW_INCHES, WIDE_INCHES
from tenuto.report.html.words import count, format_load

MAX_FLEETS = 8
MAX_ENGINES = 64
"""Engines drawn of one run; the table has all."""
_MEASURES = {"busy_s": "busy time", "computed_tokens": "computed tokens", "turns": "turns"}
"""What the bars show: the first that the record knows of every engine."""


def make_fleet_charts(runs: Sequence[Run]) -> list[Chart]:
    """A chart for each run of several engines, at most eight."""
    fleets = [run for run in runs if run.fleet is not None and len(_get_engines(run)) > 1]
    return [_make_chart(run, f"fleet-{index + 1}") for index, run in enumerate(fleets[:MAX_FLEETS])]


def _get_engines(run: Run) -> list[Mapping[str, Any]]:
    engines = (run.fleet or {}).get("engines")
    return [each for each in engines if isinstance(each, dict)] if isinstance(engines, list) else []


def _make_chart(run: Run, name: str) -> Chart:
    engines = _get_engines(run)
    measure = next(
        (each for each in _MEASURES if all(_is_number(engine.get(each)) for engine in engines)), None
    )
    values = [float(engine[measure]) if measure else 0.0 for engine in engines]
    mean = sum(values) / len(values) or 1.0
    labels = [_get_name(engine, 24) for engine in engines]

    def draw(is_narrow: bool) -> Figure:
        return _draw(labels[:MAX_ENGINES], [value / mean for value in values[:MAX_ENGINES]], is_narrow)

    what = _MEASURES.get(measure or "", "nothing known")
    chart = Chart(
        name,
        f"{count(len(engines), 'engine')}: the busiest did {max(values) / mean:.2f} times the mean",
        f"{shorten(run.policy)}, {format_load(run.jps)}. Each bar is an engine's {what}, as a multiple of "
        f"the mean. {_describe_router(run.fleet or {})}",
        Table(
            ("Engine", "Jobs", "Turns", "Computed tokens", "Generated tokens", "Busy, s", "Died"),
            tuple(_make_row(engine) for engine in engines),
        ),
        draw,
    )
    return replace(chart, mark=run.setting.mark)


def _describe_router(fleet: Mapping[str, Any]) -> str:
    """What the router did, as far as the record says it."""
    said = []
    if _is_number(moves := fleet.get("moves")):
        tokens, copied = (
            number if _is_number(number := fleet.get(key)) else 0 for key in ("moved_tokens", "copied_tokens")
        )
        said.append(
            f"{count(int(moves), 'move')} of jobs, with {int(tokens):,} tokens of context, "
            f"{int(copied):,} of them copied and the others computed again"
        )
    for key, words in (("held", "held back at first"), ("resent", "sent again because an engine failed")):
        if _is_number(number := fleet.get(key)):
            said.append(f"{count(int(number), 'turn')} {words}")
    return f"{'; '.join(said)}." if said else "The record does not say what the router did."


def _make_row(engine: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (engine.get(key) for key in ("jobs", "turns", "computed_tokens", "output_tokens", "busy_s"))
    shown = (f"{number:,.0f}" if _is_number(number) else "–" for number in numbers)
    return (_get_name(engine, 48), *shown, "yes" if engine.get("died") else "")


def _draw(labels: Sequence[str], values: Sequence[float], is_narrow: bool) -> Figure:
    width = NARROW_INCHES if is_narrow else WIDE_INCHES
    figure = Figure(figsize=(width, 0.8 + 0.28 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(labels)), values, color=LIGHT["p1"], height=0.7)
    axes.axvline(1.0, color=LIGHT["fg"], linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.1, 1.05 * max(values, default=1.0)))
    axes.set_xlabel("multiple of the mean")
    return figure


def _get_name(engine: Mapping[str, Any], most: int) -> str:
    return shorten(clean(str(engine.get("name"))), most)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a count or a time. What a server of others says of itself may be anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
