"""The page: one HTML file that needs no network access."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from tenuto.report.html.ab_chart import make_ab_chart
from tenuto.report.html.axes import Looks
from tenuto.report.html.chart import Chart
from tenuto.report.html.colors import DARK, LIGHT
from tenuto.report.html.compare import Group, group_runs, sort_policies
from tenuto.report.html.fleet_charts import make_fleet_charts
from tenuto.report.html.hit_chart import make_hit_chart
from tenuto.report.html.jct_chart import make_jct_chart
from tenuto.report.html.panel_charts import make_cdf_chart, make_turn_chart
from tenuto.report.html.records import shorten
from tenuto.report.html.reproduce import make_recipe
from tenuto.report.html.sources import Sources
from tenuto.report.html.speed_chart import make_speed_up_chart
from tenuto.report.html.style import make_looks, styled
from tenuto.report.html.svg import to_inline_svg
from tenuto.report.html.time_charts import make_occupancy_chart
from tenuto.report.html.timeline import make_timeline
from tenuto.report.html.verdict import ReportVerdict, describe
from tenuto.report.html.winners import make_winner_map
from tenuto.report.html.words import count, describe_setting

MAX_SETTINGS = 12
"""Maximum number of settings with their own charts; each takes about 300 kB."""
MAX_OCCUPANCY = 8
MAX_SENTENCES = 4
"""Maximum number of sentences of one kind on the first screen. More are collapsed."""


@dataclass(frozen=True)
class Section:
    """A heading and the charts under it."""

    name: str
    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Report:
    """All that a report shows, before it is drawn."""

    sources: Sources
    groups: tuple[Group, ...]
    looks: Looks
    verdict: ReportVerdict
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Picture:
    chart: Chart
    wide: Markup
    narrow: Markup


def make_report(sources: Sources) -> Report:
    """What to show of what was read."""
    groups = group_runs(sources.runs)
    looks = make_looks(
        sort_policies(cell.policy for group in groups for cell in group.cells),
        faulty={run.policy for run in sources.runs if run.policy_faults},
    )
    notes = [*sources.notes, *_find_complaints(sources)]
    sections = [_make_map_section(groups, looks), _make_ab_section(sources, looks)]
    for number, group in enumerate(groups[:MAX_SETTINGS]):
        charts = [
            make(group, looks, f"{name}-{number + 1}")
            for name, make in (
                ("jct", make_jct_chart),
                ("speed-up", make_speed_up_chart),
                ("hits", make_hit_chart),
                ("turns", make_turn_chart),
                ("cdf", make_cdf_chart),
            )
        ]
        sections.append(
            _make_section(f"setting-{number + 1}", describe_setting(group), charts, group.setting.mark)
        )
    if len(groups) > MAX_SETTINGS:
        drawn = f"{MAX_SETTINGS} of {len(groups)} settings"
        notes.append(f"Charts are drawn for {drawn}; give fewer records to see the others.")
    sections.append(Section("fleet", "Several engines", tuple(make_fleet_charts(sources.runs))))
    seen = [detail for detail in sources.details if detail.samples]
    kv_charts = [
        replace(chart, mark=detail.mark)
        for index, detail in enumerate(seen[:MAX_OCCUPANCY])
        if (chart := make_occupancy_chart(detail, f"kv-{index + 1}"))
    ]
    sections.append(Section("kv", "KV cache over time", tuple(kv_charts)))
    if len(seen) > MAX_OCCUPANCY:
        notes.append(
            f"The KV cache is drawn for {MAX_OCCUPANCY} of {len(seen)} runs; give fewer to see the others."
        )
    return Report(
        sources,
        tuple(groups),
        looks,
        describe(sources.runs, groups),
        tuple(section for section in sections if section.charts),
        tuple(notes),
    )


def render_page(report: Report, say: Callable[[str], None] = lambda text: None) -> str:
    """The page as HTML. `say` hears how far it is."""
    sections, total = [], sum(len(section.charts) for section in report.sections)
    number = 0
    with styled():
        for section in report.sections:
            pictures = []
            for chart in section.charts:
                number += 1
                say(f"drawing {number} of {total}: {chart.title}")
                pictures.append(_draw(chart))
            sections.append({"name": section.name, "title": section.title, "pictures": pictures})
    say("writing the page")
    script = _read("timeline.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    first, more = _fold(report.verdict)
    # The command that asked for the others makes these too.
    arms = {id(run) for group in report.groups for run in group.arms}
    return _get_template().render(
        title=_make_title(report),
        verdict=first,
        more=more,
        notes=report.notes,
        sections=sections,
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


def _draw(chart: Chart) -> _Picture:
    wide, narrow = (
        Markup(
            to_inline_svg(chart.make_figure(is_narrow), f"{chart.name}-{'narrow' if is_narrow else 'wide'}")
        )
        for is_narrow in (False, True)
    )
    return _Picture(chart, wide, narrow)


def _fold(verdict: ReportVerdict) -> tuple[list[str], list[str]]:
    """Split the sentences into those on the first screen and the collapsed rest."""
    first = [verdict.headline]
    more: list[str] = []
    for sentences in (verdict.splits, verdict.speed_ups, verdict.places):
        first += sentences[:MAX_SENTENCES]
        more += sentences[MAX_SENTENCES:]
    return [*first, *verdict.caveats], more


def _make_map_section(groups: Sequence[Group], looks: Looks) -> Section:
    """A map for each workload, model and origin; GPUs side by side."""
    maps: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        maps.setdefault((*group.setting[:2], *group.setting[3:]), []).append(group)
    charts: list[Chart] = []
    for index, each in enumerate(list(maps.values())[:MAX_SETTINGS]):
        if chart := make_winner_map(each, looks, f"map-{index + 1}"):
            charts.append(replace(chart, mark=each[0].setting.mark))
    return Section("winners", "Winners", tuple(charts))


def _make_ab_section(sources: Sources, looks: Looks) -> Section:
    """The verdicts of `tenuto ab`. All runs of a comparison have one origin."""
    marks = {run.setting.mark for run in sources.runs if run.ab}
    charts = [
        make_ab_chart(verdict, looks, f"ab-{index + 1}")
        for index, verdict in enumerate(sources.verdicts[:MAX_SETTINGS])
    ]
    return _make_section("ab", "A/B comparison", charts, marks.pop() if len(marks) == 1 else "")


def _make_section(name: str, title: str, charts: Sequence[Chart | None], mark: str = "") -> Section:
    return Section(name, title, tuple(replace(chart, mark=mark) for chart in charts if chart is not None))


def _find_complaints(sources: Sources) -> list[str]:
    found = [f"{run.place} {run.complaint}." for run in sources.runs if run.complaint]
    if len(found) > 5:
        return [*found[:5], f"{count(len(found) - 5, 'run')} more are not whole either."]
    return found


def _make_title(report: Report) -> str:
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
