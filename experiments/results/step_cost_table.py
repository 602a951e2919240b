"""The table of step costs as Markdown: how our lead changes with what mixed steps cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from experiments.decision_code import Code
from experiments.results.row import Row, Table
from experiments.results.runs import list_records
from experiments.results.screen import read_records
from experiments.results.settings import OURS, Runs, Setting, get_settings
from experiments.results.step_costs import COSTS, RIVALS, Races, choose, get_title
from experiments.results.tables import format_markdown
from experiments.results.verdicts import Seeds, compare, judge
from tenuto.records.metrics import get_geometric_mean

SEED = 42
DEFAULT = "(default)"
COLUMNS = (COSTS[0], DEFAULT, COSTS[1])
"""From the cheapest mixed steps to the dearest."""
OTHER_CODE = "†"
Settings = Mapping[Setting, Seeds]


def format_step_costs(table: Table, races: Races, runs: Runs) -> str:
    """One line for each race and cost. A row counts only where it has run under all three costs."""
    lines = []
    for name, make_rows in races.items():
        defaults = read_records(name)
        by_row = {}
        for row in choose(name, make_rows()):
            settings = {cost: _keep(_find(name, row, cost, runs, defaults)) for cost in COLUMNS}
            if all(settings.values()):
                by_row[row.title] = settings
        other = OTHER_CODE if _get_engines(defaults) != _get_engines(runs) else ""
        for cost in COLUMNS if by_row else ():
            line = format_line(name, cost, {row: each[cost] for row, each in by_row.items()})
            lines.append([line[0], line[1] + (other if cost == DEFAULT else ""), *line[2:]])
    heads = ["race", "`--step-cost`", "rows", "won / tied / behind / lost", "best other", "worst row"]
    heads += [rival.partition("/")[0] for rival in RIVALS]
    about = f"{table.about} Seed: {SEED}."
    if any(line[1].endswith(OTHER_CODE) for line in lines):
        about += f" {OTHER_CODE}: made by another code than the lines beside it."
    return "\n\n".join([f"### {table.title}", about, format_markdown(heads, lines)])


def _get_engines(runs: Runs) -> set[str]:
    return {Code.of(record).engine for record in list_records(runs)}


def _find(race: str, row: Row, cost: str, runs: Runs, defaults: Runs) -> Settings:
    """The records of a row under one cost."""
    if cost == DEFAULT:
        return get_settings(defaults, row.title)
    return get_settings(runs, get_title(race, cost, row.title))


def _keep(settings: Settings) -> Settings:
    """The first seed of ours and of this table's rivals; empty while one of them has not run."""
    competitors = {*RIVALS, OURS.policy}
    kept = {
        setting: {SEED: seeds[SEED]}
        for setting, seeds in settings.items()
        if SEED in seeds and setting.policy in competitors
    }
    return kept if {setting.policy for setting in kept} == competitors else {}


def format_line(name: str, cost: str, by_row: Mapping[str, Settings]) -> list[str]:
    """One race under one cost: verdicts, ours over the best other, and over each rival at its best size."""
    verdicts = {row: verdict for row, each in by_row.items() if (verdict := judge(row, each))}
    counts = Counter(verdict.outcome for verdict in verdicts.values())
    worst = max(verdicts.values(), key=lambda verdict: verdict.ratio.mean)
    cells = [f"`{name}`", cost, str(len(verdicts))]
    cells.append(" / ".join(str(counts[outcome]) for outcome in ("won", "tied", "behind", "lost")))
    cells.append(_format_ratios([verdict.ratio.mean for verdict in verdicts.values()]))
    cells.append(f"{worst.row}; {worst.rival.label}")
    for rival in RIVALS:
        ratios = []
        for row, verdict in verdicts.items():
            ratio = compare(by_row[row][OURS], by_row[row][verdict.best[rival]])
            assert ratio is not None
            ratios.append(ratio.mean)
        cells.append(_format_ratios(ratios))
    return cells


def _format_ratios(ratios: Sequence[float]) -> str:
    """The geometric mean, and the worst in brackets."""
    return f"{get_geometric_mean(ratios):.2f} ({max(ratios):.2f})"
