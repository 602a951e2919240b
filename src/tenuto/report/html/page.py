"""`tenuto report`: read, draw, write. The page is one HTML file that needs no network access."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tenuto.records.files import write_whole, writing
from tenuto.records.text import name_machine
from tenuto.report.html.charts import Section, make_sections
from tenuto.report.html.compare import Group, Winner, group_runs, sort_policies
from tenuto.report.html.draw import draw, styled, to_inline_svg
from tenuto.report.html.reproduce import make_recipe
from tenuto.report.html.sources import Sources, read_sources
from tenuto.report.html.spec import DARK, LIGHT, Looks, count, make_looks, shorten
from tenuto.report.html.timeline import make_timeline, write_trace_events
from tenuto.report.html.verdict import ReportVerdict, describe

MAX_SENTENCES = 4
"""Maximum number of sentences of one kind on the first screen. More are collapsed."""
DPI = 200
Say = Callable[[str], None]
"""Called with the progress in words."""


def run_report(
    records: Sequence[Path],
    *,
    out: Path,
    figures: Path | None = None,
    trace_events: Path | None = None,
    as_json: bool = False,
) -> int:
    """Write the page and the other wanted files, and print the verdict. Raises DataError or ConfigError."""
    say = _Progress()
    report = make_report(read_sources(records))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, render_page(report, say))
    written = [f"{out}: the page, {out.stat().st_size / 1e6:.1f} MB"]
    if figures is not None:
        with writing(figures, "--figures", is_folder=True):
            number = _write_figures(report, figures, say)
        written.append(f"{figures}: {count(number, 'picture')}, as PNG and SVG")
    if trace_events is not None:
        with writing(trace_events, "--trace-events"):
            trace_events.parent.mkdir(parents=True, exist_ok=True)
            number = write_trace_events(report.sources.details, trace_events)
        found = f"{count(number, 'event')}, for ui.perfetto.dev"
        written.append(
            f"{trace_events}: {found if number else 'no turns, as no turns.jsonl lay beside the records'}"
        )
    if as_json:
        print(json.dumps(summarise(report), indent=1))
    else:
        print("\n".join([*report.verdict.sentences, *report.notes, "", *written]))
    return 0


class _Progress:
    """Prints progress to stderr, after the first second."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= 2:
            self._said_s = now_s
            print(f"[report] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Report:
    """All that a report shows, before it is drawn."""

    sources: Sources
    groups: tuple[Group, ...]
    looks: Looks
    verdict: ReportVerdict
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


def make_report(sources: Sources) -> Report:
    """Prepare the parts of the records that the page shows."""
    groups = group_runs(sources.runs)
    looks = make_looks(
        sort_policies(cell.policy for group in groups for cell in group.cells),
        faulty={run.policy for run in sources.runs if run.record.policy_faults},
    )
    complaints = [f"{run.place} {run.complaint}." for run in sources.runs if run.complaint]
    if len(complaints) > 5:
        complaints[5:] = [f"{count(len(complaints) - 5, 'run')} more are not whole either."]
    sections, left_out = make_sections(sources, groups, looks)
    return Report(
        sources,
        tuple(groups),
        looks,
        describe(sources.runs, groups, sources.validations),
        tuple(sections),
        (*sources.notes, *complaints, *left_out),
    )


def render_page(report: Report, say: Say = lambda text: None) -> str:
    """The page as HTML."""
    total = sum(len(section.charts) for section in report.sections)
    pictures: dict[str, dict[str, Markup]] = {}
    with styled():
        for section in report.sections:
            for chart in section.charts:
                say(f"drawing {len(pictures) + 1} of {total}: {chart.title}")
                pictures[chart.name] = {
                    name: Markup(to_inline_svg(chart, is_narrow=name == "narrow"))
                    for name in ("wide", "narrow")
                }
    say("writing the page")
    script = _read("timeline.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    first, more = _fold(report.verdict)
    # The command of the other runs makes these too.
    arms = {id(run) for group in report.groups for run in group.arms}
    return _get_template().render(
        title=_make_title(report),
        verdict=first,
        more=more,
        notes=report.notes,
        sections=report.sections,
        pictures=pictures,
        timeline=make_timeline(report.sources.details),
        reproduce=make_recipe(
            [run for run in report.sources.runs if id(run) not in arms],
            {policy: look.label for policy, look in report.looks.items()},
        ),
        light=LIGHT,
        dark=DARK,
        css=Markup(_read("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _fold(verdict: ReportVerdict) -> tuple[list[str], list[str]]:
    """Split the sentences into those on the first screen and the collapsed rest."""
    first = [verdict.headline]
    more: list[str] = []
    for sentences in (verdict.splits, verdict.places, verdict.speed_ups):
        first += sentences[:MAX_SENTENCES]
        more += sentences[MAX_SENTENCES:]
    return [*first, *verdict.caveats], more


def _make_title(report: Report) -> str:
    if validations := report.sources.validations:
        machines = dict.fromkeys(map(name_machine, validations))
        return f"Tenuto validation: {shorten(', '.join(machines))}"
    workloads = sorted({group.setting.workload for group in report.groups})
    if not workloads:
        return "Tenuto report"
    shown = ", ".join(map(shorten, workloads[:3])) + (", …" if len(workloads) > 3 else "")
    return f"Tenuto report: {shown}"


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _get_template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_read("page.html.j2"))


def summarise(report: Report) -> dict[str, Any]:
    """What the page says, in JSON types."""
    return {
        "runs": len(report.sources.runs),
        "verdict": report.verdict.sentences,
        "notes": report.notes,
        "cells": [_summarise_load(group, load) for group in report.groups for load in group.loads],
    }


def _summarise_load(group: Group, load: float | None) -> dict[str, Any]:
    winner = group.try_winner(load)
    means, speed_ups = {}, {}
    for policy in group.policies:
        cell, speed_up = group.try_cell(policy, load), group.try_speed_up(policy, load)
        if cell and (mean := cell.get("job_s", "mean")):
            means[policy] = mean.middle
        if speed_up:
            speed_ups[policy] = speed_up._asdict()
    return {
        **group.setting._asdict(),
        "jps": load,
        "mean_s": means,
        "speed_up": speed_ups,
        "baseline": group.baseline,
        "best": list(winner.policies) if winner else None,
        "outcome": _get_outcome(winner),
        "doubts": list(group.get_doubts(load)),
        "split": {
            policy: {**asdict(split), "best": split.best.name}
            for policy, split in group.get_splits(load).items()
        },
        # Ratios are of job times: below 1 the best policy is faster.
        "against": winner and {
            "policy": winner.against.policy,
            "other": winner.against.other,
            "mean": asdict(winner.against.mean),
            "p95": winner.against.p95 and asdict(winner.against.p95),
            "differs": winner.against.differs,
        },
    }  # fmt: skip


def _get_outcome(winner: Winner | None) -> str | None:
    """`win`, `tie` (1 is inside the interval) or `open` (nothing is proved); None without rivals."""
    if winner is None:
        return None
    return "open" if winner.is_open else "tie" if winner.is_tie else "win"


def _write_figures(report: Report, folder: Path, say: Say) -> int:
    """Every picture of the page as a file. Raises OSError."""
    charts = [chart for section in report.sections for chart in section.charts]
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        for chart in charts:
            say(f"writing {chart.name}: {chart.title}")
            figure = draw(chart)
            figure.savefig(folder / f"{chart.name}.png", dpi=DPI)
            figure.savefig(folder / f"{chart.name}.svg", metadata={"Date": None, "Title": chart.title})
    return len(charts)
