"""What docs/paper_figures.md says of each figure: its table, and whether order and factor agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.decision_code import Code, check_one_code, digest_code, say_code
from experiments.figures.figures import FIGURES, IN_TIME, MEAN, P90, P95, PAPER, Claim, Figure
from experiments.figures.points import Point, make_points
from experiments.results.row import ROOT
from experiments.results.tables import format_markdown

PAGE = ROOT / "docs" / "paper_figures.md"
PICTURES = PAGE.parent / "figures"
CONTINUUM = "continuum"
ALIKE = 1.02
"""One policy is below another if it takes at most this many times as long."""
NAMES = {MEAN: "mean", P90: "P90", P95: "P95", IN_TIME: "done in time"}


def get_picture(name: str) -> str:
    """The name of the file in `PICTURES`."""
    return f"continuum_{name}.svg" if name in PAPER else f"{name}.svg"


def format_figure(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A figure's section: what the paper says, what came out, and the table."""
    figure, points = FIGURES[name], make_points(FIGURES[name], records)
    if not records:
        what = [f"*The paper:* {figure.says}", *figure.marks]
        return "\n\n".join(
            [*what, f"*Here:* not run; `python -m experiments.figures {name} --quick --write`."]
        )
    form = "--quick " if records[0]["form"] == "quick" else ""
    seeds = min(point.seeds for point in points)
    lines = [f"*The paper:* {figure.says}"] if name in PAPER else []
    if figure.claims:
        lines.append(f"*Here:* Order: {format_order(figure, points)}. Gain: {format_gain(figure, points)}.")
    lines += figure.marks
    lines.append(format_table(figure, points))
    lines.append(f"![{figure.title}, by {figure.axis}](figures/{get_picture(name)})")
    lines.append(
        f"`python -m experiments.figures {name} {form}--write`, {seeds} seed{'s' if seeds > 1 else ''}."
    )
    rows = [{**record, "row": record["panel"]} for record in records]
    check_one_code(rows)
    lines.append(say_code(rows, lambda record: get_present_code(figure, record)))
    return "\n\n".join(lines)


def get_present_code(figure: Figure, record: Mapping[str, Any]) -> Code:
    """The code that would decide in a record's run today."""
    [panel] = [panel for panel in figure.panels if panel.title == record["panel"]]
    return digest_code(*panel.place(record["policy"], record["value"], record["seed"]))


def format_overview(by_name: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A line for each figure of the paper."""
    lines = []
    for name, records in by_name.items():
        figure = FIGURES[name]
        points = make_points(figure, records)
        if not points:
            lines.append([name, figure.title, "not run", "", ""])
            continue
        runs = f"{records[0]['form']}, {min(point.seeds for point in points)}"
        lines.append([name, figure.title, format_order(figure, points), format_gain(figure, points), runs])
    return format_markdown(["figure", "of", "order", "vLLM over Continuum", "form, seeds"], lines)


def format_order(figure: Figure, points: Sequence[Point]) -> str:
    """At how many points that matter each claim of the paper holds."""
    held = [(claim, *_count(figure, points, claim)) for claim in figure.claims]
    if not any(num for *_, num in held):
        return "the policies do not differ at these loads"
    parts = [
        f"{figure.policies[claim.better]} below {figure.policies[claim.worse]} at {num_held} of {num}"
        for claim, num_held, num in held
        if num
    ]
    agrees = all(num_held == num for _, num_held, num in held)
    return f"{'agrees' if agrees else 'differs'} ({'; '.join(parts)})"


def _count(figure: Figure, points: Sequence[Point], claim: Claim) -> tuple[int, int]:
    num_held = num = 0
    for point in points:
        if claim.where in point.panel and point.matters:
            for name in figure.measures:
                better, worse = (point.measures[who][name] for who in (claim.better, claim.worse))
                # Of jobs that are done in time, more are better.
                better, worse = (worse, better) if name == IN_TIME else (better, worse)
                num += 1
                num_held += better <= ALIKE * worse
    return num_held, num


def get_gains(figure: Figure, points: Sequence[Point]) -> list[float]:
    """The first policy's mean job time over Continuum's, where policies matter."""
    first = next(iter(figure.policies))
    [ours] = [policy for policy in figure.policies if policy.startswith(CONTINUUM) and "?" not in policy]
    return [point.measures[first][MEAN] / point.measures[ours][MEAN] for point in points if point.matters]


def format_gain(figure: Figure, points: Sequence[Point]) -> str:
    """Whether the gains lie within those that were published."""
    gains = get_gains(figure, points)
    if not gains:
        return "none to compare"
    ends = dict.fromkeys(f"{gain:.2f}" for gain in (min(gains), max(gains)))
    found = f"{' to '.join(ends)} times"
    if figure.gain is None:
        return f"{found}; none published"
    least, most = figure.gain
    inside = sum(least <= gain <= most for gain in gains)
    verdict = (
        "agrees" if inside == len(gains) else f"{inside} of {len(gains)} within" if inside else "differs"
    )
    return f"{verdict}: {found}, published {least:g} to {most:g}"


def format_table(figure: Figure, points: Sequence[Point]) -> str:
    """Each panel's points: seconds, or the share that was done in time."""
    heads = [
        "panel",
        figure.axis,
        *(["measure"] if len(figure.measures) > 1 else []),
        *figure.policies.values(),
    ]
    lines = []
    for point in points:
        for name in figure.measures:
            form = "{:.0%}" if name == IN_TIME else "{:.1f}"
            cells = [form.format(each[name]) for each in point.measures.values()]
            measure = [NAMES[name]] if len(figure.measures) > 1 else []
            lines.append([point.panel, f"{point.value:g}", *measure, *cells])
    return format_markdown(heads, lines)
