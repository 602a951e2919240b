"""`tenuto report`: read, draw, write."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.report.html.chart import Chart
from tenuto.report.html.compare import Winner
from tenuto.report.html.options import ReportOptions
from tenuto.report.html.page import Report, make_report, render_page
from tenuto.report.html.pairs import Contrast
from tenuto.report.html.sources import read_sources
from tenuto.report.html.style import styled
from tenuto.report.html.time_charts import make_still_timeline
from tenuto.report.html.trace_events import write_trace_events
from tenuto.report.html.words import count

MAX_STILL_TIMELINES = 8
DPI = 200


class _Progress:
    """Says on stderr how far it is, from the second second on."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= 2:
            self._said_s = now_s
            print(f"[report] {text}", file=sys.stderr, flush=True)


def run_report(options: ReportOptions) -> int:
    """Write what the options ask for; prints the verdict. Raises DataError or ConfigError."""
    say = _Progress()
    report = make_report(read_sources(options.records))
    _write_text(options.out, render_page(report, say), "--out")
    written = [f"{options.out}: the page, {options.out.stat().st_size / 1e6:.1f} MB"]
    if options.figures is not None:
        number = _write_figures(report, options.figures, say)
        written.append(f"{options.figures}: {count(number, 'picture')}, as PNG and SVG")
    if options.trace_events is not None:
        written.append(_write_events(report, options.trace_events))
    if options.as_json:
        print(json.dumps(summarise(report), indent=1))
    else:
        print("\n".join([*report.verdict.sentences, *report.notes, "", *written]))
    return 0


def summarise(report: Report) -> dict[str, Any]:
    """What the page says, in JSON types."""
    cells = []
    for group in report.groups:
        for load in group.loads:
            winner = group.try_winner(load)
            means = {
                policy: mean.middle
                for policy in group.policies
                if (cell := group.try_cell(policy, load)) and (mean := cell.get("mean_s"))
            }
            speed_ups = {
                policy: speed_up._asdict()
                for policy in group.policies
                if (speed_up := group.try_speed_up(policy, load))
            }
            cells.append(
                {
                    **group.setting._asdict(),
                    "jps": load,
                    "mean_s": means,
                    "speed_up": speed_ups,
                    "baseline": group.baseline,
                    "best": list(winner.policies) if winner else None,
                    "outcome": get_outcome(winner),
                    "doubts": list(group.get_doubts(load)),
                    "split": {
                        policy: {**asdict(split), "best": split.best.name}
                        for policy, split in group.get_splits(load).items()
                    },
                    "against": summarise_contrast(winner.against) if winner else None,
                }
            )
    return {
        "runs": len(report.sources.runs),
        "verdict": report.verdict.sentences,
        "notes": report.notes,
        "cells": cells,
    }


def get_outcome(winner: Winner | None) -> str | None:
    """`win`, `tie` (inside the interval nobody wins) or `open` (nothing is proved); None without rivals."""
    if winner is None:
        return None
    return "open" if winner.is_open else "tie" if winner.is_tie else "win"


def summarise_contrast(contrast: Contrast) -> dict[str, Any]:
    """How the best policy compares, in JSON types. Ratios are of job times: below 1 it is faster."""
    return {
        "policy": contrast.policy,
        "other": contrast.other,
        "mean": asdict(contrast.mean),
        "p95": contrast.p95 and asdict(contrast.p95),
        "differs": contrast.differs,
    }


def _write_text(path: Path, text: str, option: str) -> None:
    """Write a file atomically; a device or pipe is written directly. Raises ConfigError."""
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from error


def _write_figures(report: Report, folder: Path, say: _Progress) -> int:
    stills = [detail for detail in report.sources.details if detail.turns][:MAX_STILL_TIMELINES]
    charts: list[Chart] = [chart for section in report.sections for chart in section.charts]
    charts += [
        replace(chart, mark=detail.mark)
        for index, detail in enumerate(stills)
        if (chart := make_still_timeline(detail, f"timeline-{index + 1}"))
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with styled():
            for chart in charts:
                say(f"writing {chart.name}: {chart.title}")
                figure = chart.make_figure(False)
                figure.savefig(folder / f"{chart.name}.png", dpi=DPI)
                figure.savefig(folder / f"{chart.name}.svg", metadata={"Date": None, "Title": chart.title})
    except OSError as error:
        raise ConfigError(f"--figures: cannot write to {folder}: {error.strerror or error}") from error
    return len(charts)


def _write_events(report: Report, path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = write_trace_events(report.sources.details, path)
    except OSError as error:
        raise ConfigError(f"--trace-events: cannot write {path}: {error.strerror or error}") from error
    if not number:
        return f"{path}: no turns, as no turns.jsonl lay beside the records"
    return f"{path}: {count(number, 'event')}, for ui.perfetto.dev"
