"""The first screen of docs/lab.md: what is won against whom, what is lost, who is harmed, the bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.decision_code import CODE
from experiments.json_lines import read_lines
from experiments.results.race_tables import describe_harm, describe_losses, format_one_setting, judge_rows
from experiments.results.row import ROOT
from experiments.results.rows import TABLES
from experiments.results.runs import say_code_of
from experiments.results.settings import Runs, Setting, get_settings, group
from experiments.results.tables import format_markdown, write_section
from experiments.results.verdicts import Ratio, Seeds, Verdict
from tenuto.records.metrics import get_geometric_mean

RECORDS = ROOT / "experiments" / "records"


def read_records(name: str) -> Runs:
    """The kept records of a table."""
    return group(read_lines(RECORDS / f"{name}.jsonl"))


def format_screen() -> str:
    """The screen, from the kept records of all races."""
    by_table: dict[str, dict[str, Verdict]] = {}
    all_runs: dict[str, Runs] = {}
    num_rows = 0
    for name, table in TABLES.items():
        if table.is_race and table.on_screen:
            runs = read_records(name)
            titles = [row.title for row in table.make_rows()]
            num_rows += len(titles)
            judged = judge_rows(titles, runs)
            if judged:
                by_table[name], all_runs[name] = judged, runs
    verdicts = [verdict for each in by_table.values() for verdict in each.values()]
    if not verdicts:
        return "No race has run yet."
    lines = [_make_line(f"`{name}`", list(each.values())) for name, each in by_table.items()]
    return "\n\n".join(
        [
            _say_in_short(verdicts, num_rows),
            format_markdown(HEADS, [*lines, _make_line("**all**", verdicts)]),
            _say_codes(all_runs),
            *_list_losses(by_table),
            *_list_harms(by_table, all_runs),
            _format_one_for_all(by_table, all_runs),
        ]
    )


def _say_codes(all_runs: dict[str, Runs]) -> str:
    """Which code made which table, in one line: the sum over all tables may mix several."""
    by_code: dict[str, list[str]] = {}
    for name, runs in all_runs.items():
        code = say_code_of(name, runs).removeprefix(f"{CODE} ")
        by_code.setdefault(code, []).append(f"`{name}`")
    said = " ".join(f"{', '.join(names)}: {code}" for code, names in by_code.items())
    return f"{CODE} {said}" + (" The sums over all tables mix these." if len(by_code) > 1 else "")


HEADS = (
    *("`tenuto` against the best other at its best step size", "rows", "won", "tied", "behind", "lost"),
    *("harmed", "mean job time, geometric mean", "worst row", "over clairvoyant's"),
)


def _make_line(title: str, verdicts: Sequence[Verdict]) -> list[str]:
    counts = Counter(verdict.outcome for verdict in verdicts)
    worst = max(verdicts, key=lambda verdict: verdict.ratio.mean)
    plain = [verdict for verdict in verdicts if verdict.harm is not None]
    bound = _get_geomean(verdict.bound for verdict in verdicts)
    harmed = f"{sum(verdict.is_harmed for verdict in plain)} of {len(plain)}" if plain else "–"
    return [
        title,
        str(len(verdicts)),
        *(str(counts[outcome]) for outcome in ("won", "tied", "behind", "lost")),
        harmed,
        f"{_get_geomean(verdict.ratio for verdict in verdicts):.2f}",
        f"{worst.ratio.mean:.2f} ({worst.row}; {worst.rival.label})",
        "–" if math.isnan(bound) else f"{bound:.2f}",
    ]


def _get_geomean(ratios: Iterable[Ratio | None]) -> float:
    means = [ratio.mean for ratio in ratios if ratio is not None]
    return get_geometric_mean(means) if means else math.nan


def _say_in_short(verdicts: Sequence[Verdict], num_rows: int) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    rivals = Counter(verdict.rival.policy.partition("/")[0] for verdict in verdicts)
    strongest = ", ".join(f"`{policy}` {count}" for policy, count in rivals.most_common(5))
    plain = [verdict for verdict in verdicts if verdict.harm is not None]
    where = f"{len(verdicts)} rows"
    if len(verdicts) < num_rows:
        where = f"the {len(verdicts)} rows that have run, of {num_rows}"
    return (
        f"In {where}, `tenuto` with its defaults is compared with {OPPONENTS}. It wins "
        f"{counts['won']}, ties {counts['tied']} (within 2 % in mean job time), is behind in "
        f"{counts['behind']} (a rival has the better mean, but a worse P95 or TTFT), and loses "
        f"{counts['lost']}. Plain requests are harmed in {sum(each.is_harmed for each in plain)} of the "
        f"{len(plain)} rows that have some. The best other is most often: {strongest}."
    )


OPPONENTS = (
    "every other policy at its own best step size in hindsight (512, 1,024, 2,048 or the default), with "
    "the same host tier, seats and asynchronous scheduling"
)


def _list_losses(by_table: dict[str, dict[str, Verdict]]) -> list[str]:
    lines = [
        f"- {name}, {describe_losses(verdict)}"
        for name, verdicts in by_table.items()
        for verdict in verdicts.values()
        if verdict.losses
    ]
    head = (
        "**Lost**: a rival is better by more than 2 % in the mean, and no worse in P95 and P95 TTFT (our "
        "mean over theirs):"
    )
    return [head + "\n\n" + "\n".join(lines)] if lines else []


def _list_harms(by_table: dict[str, dict[str, Verdict]], all_runs: dict[str, Runs]) -> list[str]:
    lines = [
        f"- {name}, {describe_harm(verdict, get_settings(all_runs[name], verdict.row))}"
        for name, verdicts in by_table.items()
        for verdict in verdicts.values()
        if verdict.is_harmed
    ]
    head = (
        "**Harmed**: P95 TTFT of jobs that call no tool, over stock's at the step size that is best for "
        "it; in brackets both, and the mean job time over that stock's:"
    )
    return [head + "\n\n" + "\n".join(lines)] if lines else []


def _format_one_for_all(by_table: dict[str, dict[str, Verdict]], all_runs: dict[str, Runs]) -> str:
    by_row: dict[str, dict[Setting, Seeds]] = {}
    for name, verdicts in by_table.items():
        for row in verdicts:
            by_row[f"{name}, {row}"] = dict(get_settings(all_runs[name], row))
    head = (
        "**Without tuning**: one setting for all rows; mean job time over that of each row's best setting. "
        "Where a policy was left out at a size because it was far behind, its best known figure is used, "
        "which is too good for it:"
    )
    return head + "\n\n" + format_one_setting(by_row, ["", "geometric mean", "worst", ""], 12)


def write_screen(page: Path) -> None:
    """Put the screen into the page."""
    write_section(page, "screen", format_screen())
