"""A chart is a spec: one function, listed once, and it is on the page and among the figures."""

from __future__ import annotations

import pytest

from tenuto.report.html import charts
from tenuto.report.html.charts import OF_A_SETTING, map_winners
from tenuto.report.html.compare import Group, group_runs
from tenuto.report.html.draw import draw
from tenuto.report.html.page import make_report, render_page
from tenuto.report.html.sources import Sources
from tenuto.report.html.spec import Axis, Bars, Chart, Grid, Looks, Panel, Series, make_looks
from tests.report.data import make_record
from tests.report.test_compare import read

RECORDS = [make_record(policy, load, seed) for policy in "ab" for load in (1.0, 2.0) for seed in (1, 2)]


def plot_preemptions(group: Group, looks: Looks) -> Chart | None:
    """What a newcomer would add: how often each policy preempts, at the first load."""
    cells = [cell for policy in group.policies if (cell := group.try_cell(policy, group.loads[0]))]
    counts = [(row, 0.0, 7.0 + cell.get("preemptions").middle) for row, cell in enumerate(cells)]  # type: ignore[union-attr]
    rows = Axis(places={row: looks[cell.policy].label for row, cell in enumerate(cells)})
    bars = Bars("p3", "preemptions", counts, 0.5)
    panel = Panel(marks=[bars], x=Axis(label="planted", ends=(0, 9)), y=rows, has_rows=True)
    return Chart(name="planted", title="Preemptions", caption="Fewer are better.", panels=[panel])


def test_a_planted_chart_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "OF_A_SETTING", (*OF_A_SETTING, plot_preemptions))
    report = make_report(Sources(runs=read(*RECORDS)))
    (section,) = (each for each in report.sections if each.name == "setting-1")
    assert section.charts[-1].name == "planted-1"
    assert section.charts[-1].mark == "simulated"  # like every picture of numbers that nobody measured
    page = render_page(report)
    assert page.count('id="planted-1"') == 1
    assert page.count(">planted</text>") == 2  # for wide screens and for narrow ones
    (axes,) = draw(section.charts[-1]).axes
    assert [bar.get_width() for bar in axes.patches] == [7.0, 7.0]


def test_every_spec_says_what_it_shows() -> None:
    groups = group_runs(read(*RECORDS))
    looks = make_looks(groups[0].policies)
    made = [make(groups[0], looks) for make in OF_A_SETTING] + [map_winners(groups, looks)]
    names = [chart.name for chart in made if chart is not None]
    assert names == ["jct", "hits", "turns", "cdf", "map"]  # without a baseline there is no speed-up
    for chart in made:
        if chart is None:
            continue
        assert chart.title and chart.caption and chart.table.rows
        assert {len(row) for row in chart.table.rows} == {len(chart.table.columns)}
        for panel in chart.panels:
            if isinstance(panel, Grid):
                continue
            assert panel.x.label and panel.y.label
            for mark in panel.marks:
                assert isinstance(mark, Series) and len(mark.at) == len(mark.values) > 0
                for ends in (mark.ranges, mark.bands):
                    assert not ends or len(ends) == len(mark.values)
