"""Several engines on the page: what each did, and what the router did."""

from __future__ import annotations

from typing import Any

from tenuto.records.codec import Fields
from tenuto.records.load import read_run
from tenuto.report.html.charts import plot_fleets
from tenuto.report.html.draw import draw
from tenuto.report.html.sources import Run, make_run
from tests.report.data import make_record

NAMES = ("name", "jobs", "turns", "computed_tokens", "output_tokens", "busy_s", "died")
ENGINES = [
    dict(zip(NAMES, values, strict=True))
    for values in (("0", 3, 6, 600, 60, 3.0, True), ("1", 1, 2, 200, 20, 1.0, False))
]
FLEET = {"engines": ENGINES, "moves": 1, "moved_tokens": 5000, "copied_tokens": 0, "held": 2, "resent": 1}


def make(fleet: Any) -> Run:
    return make_run(read_run(Fields("r:1", make_record("tenuto", fleet=fleet))), "here")


def test_what_each_engine_did_and_what_moving_cost() -> None:
    (chart,) = plot_fleets([make(FLEET), make(None), make({"engines": ENGINES[:1]})])
    assert chart.title == "2 engines: the busiest did 1.50 times the mean"
    assert "1 move of jobs, with 5,000 tokens of context" in chart.caption
    assert "2 turns held back at first" in chart.caption
    assert chart.table.rows[0] == ("0", "3", "6", "600", "60", "3", "yes")
    assert draw(chart, is_narrow=True).axes and draw(chart).axes


def test_a_bench_knows_less() -> None:
    engines = [
        {"name": "http://a:8000", "turns": 6, "computed_tokens": None},
        {"name": "http://b:8000", "turns": 2},
    ]
    (chart,) = plot_fleets([make({"engines": engines, "imbalance": 1.5})])
    assert "an engine's turns" in chart.caption
    assert "does not say what the router did" in chart.caption
    assert chart.table.rows[1] == ("http://b:8000", "–", "2", "–", "–", "–", "")


def test_what_makes_no_sense_draws_nothing_or_little() -> None:
    assert plot_fleets([make({"engines": 3}), make({}), make({"engines": [1, "x"]})]) == []
    (chart,) = plot_fleets([make({"engines": [{}, {}]})])
    assert draw(chart).axes
