"""The tables of a race as Markdown: everybody at its best step size, details, one size for all rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from experiments.results.row import Row, Table
from experiments.results.settings import OURS, YARDSTICKS, Runs, Setting, format_step, get_settings
from experiments.results.tables import MARKS, format_markdown, get_marks
from experiments.results.verdicts import (
    P95,
    P99,
    PLAIN_P95,
    TIE,
    TTFT_P95,
    Seeds,
    Verdict,
    compare,
    get_mean,
    get_one_setting,
    judge,
    stat,
)

SIGNS = {"won": "won", "tied": "tied", "behind": "🟠 behind", "lost": "🔴 lost"}


def judge_rows(rows: Sequence[str], runs: Runs) -> dict[str, Verdict]:
    """The verdicts of the rows that have run, in their order."""
    verdicts = {row: judge(row, get_settings(runs, row)) for row in rows}
    return {row: verdict for row, verdict in verdicts.items() if verdict is not None}


def format_race(table: Table, rows: Sequence[Row], runs: Runs) -> str:
    """Everything there is to say of one race."""
    titles = [row.title for row in rows]
    verdicts = judge_rows(titles, runs)
    by_row = {row: get_settings(runs, row) for row in verdicts}
    seeds = sorted({seed for settings in by_row.values() for each in settings.values() for seed in each})
    about = (
        f"{table.about} Seeds: {', '.join(map(str, seeds))}; settings that are far behind ran the first "
        "only. A range in brackets is that of the seeds."
    )
    missing = [row for row in titles if row not in verdicts]
    if missing:
        about += f" Not run yet: {'; '.join(missing)}."
    return "\n\n".join(
        [
            f"### {table.title}",
            about,
            "Mean job time in seconds, each policy at its best step size in hindsight (after the @; "
            "none: the default). Bold: the best, and all within 2 % of it. A policy that ran fewer seeds "
            f"than `tenuto` is shown by its ratio to `tenuto` on those that both ran. {MARKS}",
            format_best(verdicts, by_row),
            "`tenuto` with adaptive steps over the best of the others; then other figures: `tenuto`'s "
            "figure / the best other's.",
            format_details(verdicts, by_row),
            "One step size for all rows of this table: mean job time over that of the row's best.",
            format_one_setting(by_row, ["one setting", "geometric mean", "worst row", ""], 16),
            *([table.notes] if table.notes else []),
        ]
    )


def format_best(verdicts: Mapping[str, Verdict], by_row: Mapping[str, Mapping[Setting, Seeds]]) -> str:
    """Mean job times, each policy at its best size."""
    policies = sorted(
        {
            setting.policy
            for settings in by_row.values()
            for setting in settings
            if setting.policy not in (OURS.policy, *YARDSTICKS)
        },
        key=lambda policy: (not policy.startswith("stock"), policy),
    )
    lines = []
    for row, verdict in verdicts.items():
        settings = by_row[row]
        ours = settings[OURS]
        ratio = verdict.ratio.mean
        cells = [row, _mark(get_mean(ours), is_best=ratio <= TIE) + get_marks(ours.values())]
        for policy in policies:
            setting = verdict.best.get(policy)
            if setting is None:
                cells.append("–")
                continue
            # Seeds differ in their jobs: one that ran fewer of them is put on the scale of all of them.
            relative = compare(settings[setting], ours)
            assert relative is not None
            mean_s = get_mean(ours) * relative.mean
            is_best = relative.mean <= TIE * min(1, 1 / ratio)
            step = "" if setting.step is None else f" @{format_step(setting.step)}"
            marks = get_marks(settings[setting].values())
            cells.append(_mark(mean_s, is_best=is_best) + marks + step)
        lines.append(cells)
    heads = ["mean, s", "tenuto", *(policy.replace("/", " / ") for policy in policies)]
    return format_markdown(heads, lines)


def _mark(mean_s: float, *, is_best: bool) -> str:
    text = f"{mean_s:.1f}" if mean_s >= 10 else f"{mean_s:.2f}"
    return f"**{text}**" if is_best else text


def format_details(verdicts: Mapping[str, Verdict], by_row: Mapping[str, Mapping[Setting, Seeds]]) -> str:
    """Each row against its best rival: ratios, tails, waits, throughput, harm, and the bound."""
    lines = []
    for row, verdict in verdicts.items():
        ours, theirs = _share(by_row[row][OURS], by_row[row][verdict.rival])

        def both(part: str, name: str, scale: float = 1.0, ours: Seeds = ours, theirs: Seeds = theirs) -> str:
            return " / ".join(_show(get_mean(each, stat(part, name)) * scale) for each in (ours, theirs))

        rates = " / ".join(
            _show(statistics.fmean(record["finished_jps"] or 0 for record in each.values()))
            for each in (ours, theirs)
        )
        ratios = [compare(ours, theirs, get) for get in (P95, P99, TTFT_P95)]
        # A letter of either is one of the ratio.
        marks = max(get_marks(ours.values()), get_marks(theirs.values()), key=len)
        sign = SIGNS[verdict.outcome] + (" ⚠ harm" if verdict.is_harmed else "")
        lines.append(
            [
                row,
                sign,
                verdict.rival.label,
                f"{verdict.ratio}{marks}",
                *(f"{ratio.mean:.2f}" if ratio else "–" for ratio in ratios),
                both("ttft_s", "p50"),
                both("ttft_s", "p95"),
                both("itl_s", "p95", 1000),
                both("queue_s", "max"),
                both("slowdown", "max"),
                rates,
                "–" if verdict.harm is None else str(verdict.harm),
                "–" if verdict.bound is None else str(verdict.bound),
            ]
        )
    heads = [
        *("", "", "best other", "mean", "P95", "P99", "TTFT P95", "TTFT P50, s", "TTFT P95, s"),
        *("ITL P95, ms", "longest wait, s", "max slowdown", "jobs/s finished"),
        *("plain TTFT P95 over stock's", "mean over clairvoyant's"),
    ]
    return format_markdown(heads, lines)


def _share(ours: Seeds, theirs: Seeds) -> tuple[Seeds, Seeds]:
    """The records of the seeds that both have."""
    both = [seed for seed in ours if seed in theirs]
    return {seed: ours[seed] for seed in both}, {seed: theirs[seed] for seed in both}


def _show(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def format_one_setting(by_row: Mapping[str, Mapping[Setting, Seeds]], heads: Sequence[str], most: int) -> str:
    """Who never tunes: the geometric mean and the worst row of the best settings that ran in all rows."""
    lines = [
        [setting.label + (" (adaptive)" if setting == OURS else ""), f"{mean:.2f}", f"{worst:.2f}", row]
        for setting, (mean, worst, row) in get_one_setting(by_row).items()
    ]
    return format_markdown(heads, lines[:most])


def describe_losses(verdict: Verdict) -> str:
    """A lost row in one line."""
    losses = ", ".join(f"{setting.label} ({ratio})" for setting, ratio in list(verdict.losses.items())[:3])
    return f"{verdict.row}: {losses}"


def describe_harm(verdict: Verdict, settings: Mapping[Setting, Seeds]) -> str:
    """A harmed row in one line, with the waits themselves, and how long all jobs take in all."""
    assert verdict.harm is not None and verdict.harm_by is not None
    both = _share(settings[OURS], settings[verdict.harm_by])
    waits = [get_mean(seeds, PLAIN_P95) for seeds in both]
    return (
        f"{verdict.row}: {verdict.harm} of {verdict.harm_by.label} "
        f"({_show(waits[0])} s against {_show(waits[1])} s; mean job time {compare(*both)})"
    )
