"""`tenuto report`: read, draw, write. The page is one HTML file that needs no network access."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from tenuto.client.options import AbOptions, BenchOptions
from tenuto.core.console import Progress, count
from tenuto.core.errors import clean
from tenuto.core.settings import get_flag
from tenuto.records.files import Say, spare_other, write_whole, writing
from tenuto.records.metrics import group_by
from tenuto.records.text import MIN_PAIRS, name_machine
from tenuto.report.html.charts import MAX_ROWS, Section, make_sections
from tenuto.report.html.compare import Group, group_runs, sort_policies
from tenuto.report.html.draw import draw, styled, to_inline_svg
from tenuto.report.html.sources import Run, Sources, read_sources
from tenuto.report.html.spec import DARK, LIGHT, Looks, Table, format_seconds, make_looks, shorten
from tenuto.report.html.timeline import make_timeline, write_trace_events
from tenuto.report.html.verdict import ReportVerdict, describe
from tenuto.sim.setup import FleetOptions, Setup
from tenuto.workload.load import LoadOptions

MAX_SENTENCES = 4
"""Maximum number of sentences of one kind on the first screen. More are collapsed."""
DPI = 200
PAGE_BEGIN = b"<!doctype html>"


def run_report(
    records: Sequence[Path],
    *,
    out: Path,
    figures: Path | None = None,
    trace_events: Path | None = None,
    as_json: bool = False,
) -> int:
    """Write the page and the other wanted files, and print the verdict. Raises DataError or ConfigError."""
    with Progress("report").cleared() as progress:
        with writing(out):
            spare_other(out, PAGE_BEGIN)
        report = make_report(read_sources(records))
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, render_page(report, progress.tell))
        written = [f"{out}: the page, {out.stat().st_size / 1e6:.1f} MB"]
        if figures is not None:
            with writing(figures, "--figures", is_folder=True):
                number = _write_figures(report, figures, progress.tell)
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
        "outcome": winner and winner.outcome,  # None without rivals
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


def _write_figures(report: Report, folder: Path, say: Say) -> int:
    charts = [chart for section in report.sections for chart in section.charts]
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        for chart in charts:
            say(f"writing {chart.name}: {chart.title}")
            figure = draw(chart)
            figure.savefig(folder / f"{chart.name}.png", dpi=DPI)
            figure.savefig(folder / f"{chart.name}.svg", metadata={"Date": None, "Title": chart.title})
    return len(charts)


# How to reproduce what the page shows: the commands, versions and seeds that the records name.

MAX_COMMANDS = 12
_BENCH = {field.name: field for field in dataclasses.fields(BenchOptions)}
_FIELDS = _BENCH | {
    field.name: field
    for options in (Setup, FleetOptions, LoadOptions, AbOptions)
    for field in dataclasses.fields(options)
}
"""The options of `tenuto simulate`, `bench` and `ab`, by the names of their fields."""
_ON_BY_DEFAULT = {field.name for field in dataclasses.fields(Setup) if field.default is True}
SWEEPS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "simulate": (
        "compare",
        {"gpu": "--gpu", "policy": "--policies", "jps": "--jps", "seed": "--seed", "router": "--router"},
    ),
    "bench": ("bench", {"jps": "--jps"}),
}
"""By command of a run: the command of a grid of runs, and the fields of which it takes lists, as options."""
OF_KEYS = {"options": "--option", "router_options": "--router-option"}
"""Fields that hold options by key, and the flag for each of these."""


@dataclass(frozen=True)
class Recipe:
    """Commands, sentences and the list of runs."""

    commands: tuple[str, ...]
    lines: tuple[str, ...]
    table: Table


def make_recipe(runs: Sequence[Run], policies: Mapping[str, str]) -> Recipe:
    """The recipe of all runs. `policies`: the label of each policy."""
    calls = [call for run in runs if (call := try_call(run))]
    commands = list(dict.fromkeys(map(clean, _make_commands(calls))))
    lines = []
    if len(commands) > MAX_COMMANDS:
        lines.append(
            f"These are {MAX_COMMANDS} of {len(commands):,} commands; the list of all runs names the others."
        )
    if without := len(runs) - len(calls):
        lines.append(f"{without:,} of {count(len(runs), 'record')} do not say how they were made.")
    if seeds := sorted({run.seed for run in runs if run.seed is not None}):
        lines.append(f"Seeds: {', '.join(map(str, seeds[:20]))}{', …' if len(seeds) > 20 else ''}.")
    lines += _describe_versions(runs)
    rows = tuple(_make_row(run, policies) for run in runs[:MAX_ROWS])
    if len(runs) > MAX_ROWS:
        lines.append(f"The list below shows {MAX_ROWS} of {len(runs):,} runs.")
    columns = ("Policy", "GPU", "Jobs/s", "Seed", "Jobs", "Mean JCT", "Took", "Record")
    return Recipe(tuple(commands[:MAX_COMMANDS]), tuple(lines), Table(columns, rows))


class Call(NamedTuple):
    """The command of a run, and its options by the names of their fields."""

    command: str
    options: Mapping[str, Any]
    file: str
    """The file of its record."""

    @property
    def point(self) -> dict[str, Any]:
        """The options of which a sweep takes lists; none if it can be in no sweep."""
        _, axes = SWEEPS.get(self.command, ("", {}))
        point = {name: {"router": "", **self.options}.get(name) for name in axes}
        has_keys = any(self.options.get(name) for name in OF_KEYS)
        return {} if has_keys or not all(isinstance(v, str | int | float) for v in point.values()) else point

    @property
    def rest(self) -> dict[str, Any]:
        """Its other options, which are equal in all runs of a sweep."""
        point = self.point
        return {name: value for name, value in self.options.items() if name not in point}


def _make_commands(calls: Sequence[Call]) -> list[str]:
    """A command for each whole grid of runs, and one for each of the others."""
    found: list[tuple[str, list[str]]] = []
    left: list[Call] = []
    by_rest = group_by(calls, lambda call: (call.command, json.dumps(call.rest, sort_keys=True)))
    for members in by_rest.values():
        # Runs made one by one beside a sweep must not hide it.
        for part in [members] if _try_grid(members) else group_by(members, lambda call: call.file).values():
            if (grid := _try_grid(part)) is None:
                left += part
                continue
            command, options = SWEEPS[part[0].command]
            lists = {options[name]: _join(values) for name, values in grid.items()}
            words = [word for option, values in lists.items() if values for word in (option, values)]
            found.append((command, [*words, *_make_options(part[0].rest), "--out", "sweep"]))
    found += [(call.command, _make_options(call.options)) for call in left]
    return [shlex.join(["tenuto", command, *words]) for command, words in found]


def _try_grid(calls: Sequence[Call]) -> dict[str, list[object]] | None:
    """The values on each axis if the runs form a complete grid. A single run is not a grid."""
    points = dict.fromkeys(tuple(call.point.values()) for call in calls)
    values = (list(dict.fromkeys(each)) for each in zip(*points, strict=True))
    axes = dict(zip(calls[0].point, values, strict=True))
    return axes if 1 < len(points) == math.prod(map(len, axes.values())) else None


def _join(values: Sequence[object]) -> str:
    """A list as the command line takes it: numbers ascend."""
    if all(isinstance(value, int | float) for value in values):
        values = sorted(values)  # type: ignore[type-var]
    return ",".join(map(_to_word, values))


def _to_json(value: object) -> str:
    """A value of an option, as `parse_option` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def _to_word(value: object) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def try_call(run: Run) -> Call | None:
    """The command that makes this run again, if its record says enough."""
    # A record's place is its file, and its line or index if the file holds several.
    file = re.sub(r"(:\d+|\[\d+\])$", "", run.place)
    config = run.record.config
    if run.ab and run.ab.options.get("arms"):
        told = run.ab.options
        load = {**config, "seed": told.get("first_seed", run.seed)}
        options = {name: told[name] for name in ("arms", "model", "serve_args", "arm_args") if name in told}
        options |= {**load, "repeats": told.get("repeats", MIN_PAIRS), "out": "ab"}
        return Call("ab", options, file)
    if "url" in run.client:
        options = {"urls": str(run.client["url"]).split(",")}
        options |= {"workload": run.setting.workload, "jps": run.jps, "seed": run.seed}
        how = {name: value for name, value in run.client.items() if name in _BENCH and name != "run_id"}
        options |= {name: value for name, value in how.items() if value != _BENCH[name].default}
        return Call("bench", {**options, **config}, file)
    return Call("simulate", config, file) if config else None


def _make_options(values: Mapping[str, object]) -> list[str]:
    words = []
    for name, value in values.items():
        if name in OF_KEYS and isinstance(value, dict):
            words += [word for key in value for word in (OF_KEYS[name], f"{key}={_to_json(value[key])}")]
        elif name in _FIELDS and _FIELDS[name].metadata.get("is_repeatable") and isinstance(value, list):
            words += [word for each in value for word in (_get_flag(name), _to_word(each))]
        elif name == "serve_args" and isinstance(value, list):
            words += [f"--serve-args={shlex.join(map(_to_word, value))}"] if value else []
        elif name in _ON_BY_DEFAULT:
            words += [] if value else ["--no-" + _get_flag(name).removeprefix("--")]
        elif value is True:
            words.append(_get_flag(name))
        elif isinstance(value, list | tuple):
            words += [_get_flag(name), *map(_to_word, value)] if value else []
        elif value is not None and value is not False:
            words += [_get_flag(name), _to_word(value)]
    return words


def _get_flag(name: str) -> str:
    """How the command line names a field; a field that is no longer there keeps its name."""
    return get_flag(_FIELDS[name]) if name in _FIELDS else "--" + name.replace("_", "-")


def _describe_versions(runs: Sequence[Run]) -> list[str]:
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.record.versions.items():
            found.setdefault(clean(name), set()).add(clean(version or ""))
    if not found:
        return ["The records name no versions."]
    parts = [f"{name} {' and '.join(sorted(versions))}" for name, versions in sorted(found.items())]
    return [f"Versions: {'; '.join(parts)}."]


def _make_row(run: Run, policies: Mapping[str, str]) -> tuple[str, ...]:
    return (
        policies.get(run.policy, run.policy),
        shorten(run.setting.gpu),
        "–" if run.jps is None else f"{run.jps:g}",
        "–" if run.seed is None else str(run.seed),
        "–" if run.record.jobs is None else f"{run.record.jobs:,}",
        format_seconds(run.mean_s),
        format_seconds(run.record.wall_s),
        run.place,
    )
