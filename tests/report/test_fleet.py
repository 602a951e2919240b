"""Several engines on the page: what each did, and what the router did."""

from __future__ import annotations

import shlex
from typing import Any

from tenuto.cli import parse
from tenuto.records.codec import Fields
from tenuto.records.load import read_run
from tenuto.report.html.charts import plot_fleets, plot_speed_ups
from tenuto.report.html.compare import group_runs
from tenuto.report.html.draw import draw
from tenuto.report.html.page import make_recipe
from tenuto.report.html.sources import Run, make_run
from tenuto.report.html.spec import make_looks
from tests.report.data import make_record
from tests.report.test_compare import read

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
    (chart,) = plot_fleets([make({"engines": engines, "moves": 1, "moved_tokens": 5000, "resent": 0})])
    assert chart.caption.endswith(
        "1 move of jobs, with 5,000 tokens of context; 0 turns sent again because an engine failed."
    )


def test_what_makes_no_sense_draws_nothing_or_little() -> None:
    assert plot_fleets([make({"engines": 3}), make({}), make({"engines": [1, "x"]})]) == []
    (chart,) = plot_fleets([make({"engines": [{}, {}]})])
    assert draw(chart).axes
    assert chart.title == "2 engines"


def make_behind(policy: str, router: str, seed: int, mean_s: float, **fleet: Any) -> dict[str, Any]:
    """A simulated run behind a router, with the configuration that the simulator writes."""
    named = {} if router == "tenuto" else {"router": router}
    config = {
        "gpu": "H100", "policy": policy, "workload": "ab8", "jps": 6.0, "seed": seed,
        "async_scheduling": True, "fleet": {"servers": ["", ""], **named, **fleet},
    }  # fmt: skip
    return make_record(f"{policy}@{router}", 6.0, seed, gpu="2xH100", mean_s=mean_s, config=config)


SWEEP = [
    make_behind(policy, router, seed, mean_s)
    for policy, router, mean_s in (
        ("stock", "random", 10.0), ("stock", "tenuto", 8.0),
        ("tenuto", "random", 5.0), ("tenuto", "tenuto", 2.0),
    )
    for seed in (1, 2)
]  # fmt: skip


def test_routers_are_compared_and_stock_behind_the_same_one_is_the_baseline() -> None:
    (group,) = group_runs(read(*SWEEP))
    assert group.setting.variant == "async_scheduling true, servers 2"
    winner = group.try_winner(6.0)
    assert winner is not None and (winner.policies, winner.against.other) == (
        ("tenuto@tenuto",),
        "stock@tenuto",
    )
    speed_ups = {
        policy: found.middle for policy in group.policies if (found := group.try_speed_up(policy, 6.0))
    }
    assert speed_ups == {"stock@random": 1, "stock@tenuto": 1, "tenuto@random": 2, "tenuto@tenuto": 4}
    chart = plot_speed_ups(group, make_looks(group.policies))
    assert chart is not None and chart.title.startswith(
        "How many times faster than stock behind the same router"
    )
    assert [row[0] for row in chart.table.rows] == ["tenuto@random", "tenuto@tenuto"]


def test_the_only_stock_is_the_baseline_behind_every_router() -> None:
    (group,) = group_runs(read(*(each for each in SWEEP if each["policy"] != "stock@tenuto")))
    assert group.baseline == group.get_baseline("tenuto@tenuto") == "stock@random"


def test_a_router_s_options_are_part_of_the_policy_s_name() -> None:
    options = {"by_metrics": True}
    runs = read(
        make_behind("stock", "least-loaded", 1, 4.0, router_options=options),
        make_behind("tenuto", "least-loaded", 1, 2.0, router_options=options),
        make_behind("stock", "least-loaded", 1, 8.0),
    )
    (group,) = group_runs(runs)
    name = "{}@least-loaded (least-loaded:by_metrics=true)"
    assert group.get_baseline(name.format("tenuto")) == name.format("stock")
    assert "stock@least-loaded" in group.policies


def test_the_commands_that_make_a_fleet_s_runs_again() -> None:
    fleet = {"servers": ["H100", "H100", "L40S"], "router_options": {"by_metrics": True}, "copy_gb_s": 25.0}
    alone = make_behind("tenuto", "least-loaded", 3, 5.0, **fleet, faults=["die:0@30", "join@60"])
    commands = make_recipe(read(*SWEEP, alone), {}).commands
    assert commands == (
        "tenuto compare --gpu H100 --policies stock,tenuto --jps 6 --seed 1,2 --router random,tenuto "
        "--servers 2 --workload ab8 --out sweep",
        "tenuto simulate --router least-loaded --servers H100:2,L40S:1 --router-option by_metrics=true "
        "--copy-gb-s 25 --fault die:0@30 --fault join@60 --gpu H100 --policy tenuto --workload ab8 --jps 6 "
        "--seed 3",
    )
    for command in commands:
        parse(shlex.split(command)[1:])
