"""A chart is a spec: one function, listed once, and it is on the page and among the figures."""

from __future__ import annotations

import pytest

from tenuto.records.codec import Fields
from tenuto.records.load import read_sample, read_turn
from tenuto.report.html import charts
from tenuto.report.html.charts import OF_A_SETTING, make_sections, map_winners, plot_ab
from tenuto.report.html.compare import Group, group_runs
from tenuto.report.html.draw import draw
from tenuto.report.html.page import make_report, render_page
from tenuto.report.html.sources import AbRow, AbVerdict, Detail, Sources
from tenuto.report.html.spec import Axis, Bars, Chart, Grid, Looks, Panel, Series, make_looks
from tests.report.data import make_record, make_sample, make_turn
from tests.report.test_compare import read
from tests.report.test_validation import RECORD

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


def test_whatever_is_not_drawn_is_said() -> None:
    engines = {"engines": [{"name": name, "turns": 1} for name in "ab"]}
    runs = read(*(make_record("a", workload=f"w{n}", fleet=engines) for n in range(13)))
    turns = [read_turn(Fields("t:1", make_turn("job", 1, 0)))]
    samples = [read_sample(Fields("s:1", make_sample(at_s))) for at_s in (0, 1)]
    sources = Sources(
        runs=runs,
        details=[Detail("run", turns, samples)] * 13,
        verdicts=[AbVerdict("a", 6, ())] * 13,
        validations=[RECORD] * 13,
    )
    _, notes = make_sections(sources, group_runs(runs), make_looks(["a"]))
    assert [note.partition(" are drawn; give fewer")[0] for note in notes] == [
        "Measured and simulated: 12 of 13 validations",
        "Winners: 12 of 13 maps",
        "A/B comparison: 12 of 13 verdicts",
        "Charts of a setting: 12 of 13 settings",
        "Several engines: 12 of 13 runs",
        "KV cache over time: 12 of 13 runs",
        "A few jobs: 12 of 13 runs",
    ]


def test_a_wide_interval_of_a_comparison_leaves_its_ratios_apart() -> None:
    """Two pairs of runs may give an interval from 0 to millions: on such an axis all ratios are one dot."""
    rows = (AbRow("b", "mean job time", 1.2, 0.001, 5e6, ""), AbRow("b", "P95 job time", 0.8, 0.5, 1.9, ""))
    chart = plot_ab(AbVerdict("a", 2, rows), {}, "")
    assert chart is not None
    assert chart.panels[0].x.ends == (pytest.approx(0.8 / 3, abs=0.2), pytest.approx(3.6, abs=0.2))
    assert "beyond the picture" in chart.caption
    narrow = plot_ab(AbVerdict("a", 6, rows[1:]), {}, "")
    assert narrow is not None
    assert narrow.panels[0].x.ends == (pytest.approx(0.43), pytest.approx(1.97))
    assert "beyond the picture" not in narrow.caption
