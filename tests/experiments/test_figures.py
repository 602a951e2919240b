"""The paper's figures: every cell can be built, verdicts by hand, and one small figure from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.decision_code import CODE
from experiments.figures import __main__ as command
from experiments.figures import page
from experiments.figures.figures import FIGURES, IN_TIME, MEAN, PAPER, PLAIN, Claim, Figure, Panel
from experiments.figures.points import keep, make_points
from experiments.json_lines import read_lines
from tenuto.sim.fleet import check_machines
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

TINY = Setup(gpu="L40S", step_cost="roofline", host_gb=0.0)
RANDOM = LoadOptions(workload="random")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_cells_that_can_be_built(name: str) -> None:
    quick, full = (list(FIGURES[name].make_cells(quick=is_quick)) for is_quick in (True, False))
    assert 0 < len(quick) < len(full)
    assert len({cell.key for _, cell in full}) == len(full)
    assert {place.policy for place, _ in quick} == {place.policy for place, _ in full}
    assert {place.panel for place, _ in quick} == {place.panel for place, _ in full}
    setups = {(cell.setup.policy, str(cell.setup.options)): cell.setup for _, cell in quick}
    for setup in setups.values():
        check_machines(replace(setup, step_cost="roofline"))


def test_the_papers_figures_have_its_policies() -> None:
    offloaded = {"vLLM", "Autellix+", "InferCept", "Continuum"}
    assert {*PAPER["8"].policies.values()} >= {"vLLM", "Autellix", "Continuum"}
    for name in ("9", "10", "12", "13", "14"):
        assert {*PAPER[name].policies.values()} >= offloaded, name
    assert list(PAPER["15"].policies.values())[:4] == ["vLLM", "Program FCFS", "Static TTL", "Continuum"]


def test_repeated_turns_are_as_much_shorter() -> None:
    panel = Panel("a", TINY, replace(RANDOM, jps=1.0), (2.0,), (2.0,), "repeats")
    _, load = panel.place("stock", 4.0, 42)
    assert (load.scale_turns, load.scale_lengths) == (4.0, 0.25)


def test_a_job_is_in_time_up_to_fifteen_minutes() -> None:
    record = {
        "jobs": 4, "job_s": {"mean": 700.0, "p90": 1000.0, "p95": 1000.0}, "finished_jps": 0.1,
        "job_times_s": {"a": 100, "b": 800, "c": 900, "d": 1000}, "versions": {},
        "recomputed_tokens": 10, "prompt_tokens": 40,
    }  # fmt: skip
    kept = keep(record)
    assert (kept["in_time_share"], kept["recomputed_share"]) == (0.75, 0.25)


def make_records(panel: str, value: float, means_s: dict[str, float], seed: int = 42) -> list[dict[str, Any]]:
    return [
        {"panel": panel, "policy": policy, "value": value, "seed": seed, MEAN: mean_s, IN_TIME: mean_s / 100}
        for policy, mean_s in means_s.items()
    ]


BOTH = (Claim("continuum", "stock"), Claim("continuum", "autellix", "right"))
MADE_UP = Figure(
    "made up", "jobs/s",
    tuple(Panel(title, TINY, RANDOM, (1.0,), (1.0,)) for title in ("left", "right")),
    PLAIN, "", BOTH, (1.5, 2.0),
)  # fmt: skip
IDLE = {"stock": 10.0, "autellix": 10.0, "continuum": 10.4, "tenuto": 10.0}
BUSY = {"stock": 20.0, "autellix": 25.0, "continuum": 10.0, "tenuto": 9.0}


def test_order_and_gain_are_judged_where_policies_differ() -> None:
    records = [*make_records("left", 1.0, IDLE), *make_records("right", 1.0, BUSY)]
    points = make_points(MADE_UP, records)
    assert page.format_order(MADE_UP, points) == (
        "agrees (Continuum below vLLM at 1 of 1; Continuum below Autellix at 1 of 1)"
    )
    assert page.format_gain(MADE_UP, points) == "agrees: 2.00 times, published 1.5 to 2"


def test_a_wrong_order_and_a_gain_outside_are_said() -> None:
    slow = {**BUSY, "continuum": 26.0}
    points = make_points(MADE_UP, make_records("right", 1.0, slow))
    assert page.format_order(MADE_UP, points).startswith("differs (Continuum below vLLM at 0 of 1")
    assert page.format_gain(MADE_UP, points).startswith("differs: 0.77 times")


def test_more_jobs_in_time_are_better() -> None:
    figure = replace(MADE_UP, measures=(IN_TIME,), claims=BOTH[:1])
    points = make_points(figure, make_records("right", 1.0, BUSY))
    assert page.format_order(figure, points) == "differs (Continuum below vLLM at 0 of 1)"


def test_a_point_has_the_seeds_that_all_policies_have() -> None:
    records = [*make_records("left", 1.0, IDLE), *make_records("left", 1.0, BUSY, seed=43)]
    [point] = make_points(MADE_UP, records)
    assert (point.seeds, point.measures["stock"][MEAN]) == (2, 15.0)
    [point] = make_points(MADE_UP, records[:-1])
    assert (point.seeds, point.measures["stock"][MEAN]) == (1, 10.0)
    assert make_points(MADE_UP, records[:3]) == []


def test_a_figure_is_run_drawn_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("tiny", TINY, RANDOM, (1.0, 2.0), (1.0, 2.0))
    figure = Figure("tiny", "jobs/s", (panel,), PLAIN, "nothing", BOTH, windows_s=(4.0, 4.0))
    for module in (command, page):
        monkeypatch.setattr(module, "FIGURES", {"8": figure})
        monkeypatch.setattr(module, "PAPER", {"8": figure})
    monkeypatch.setattr(command, "DONE", tmp_path / "out" / "done.jsonl")
    monkeypatch.setattr(command, "RECORDS", tmp_path / "figures.jsonl")
    monkeypatch.setattr(command, "PICTURES", tmp_path)
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# A page\n", encoding="utf-8")
    records = command.run_figure("8", quick=True, workers=1)
    monkeypatch.setattr(command, "run_cell", None)
    with command.DONE.open("a") as file:
        file.write("[cut off")
    assert command.run_figure("8", quick=True, workers=1) == records  # nothing runs again
    for _ in range(2):
        command.write("8", records)  # the second time it replaces the first
    kept = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [(each["policy"], each["value"]) for each in kept] == [
        (policy, value) for value in (1.0, 2.0) for policy in PLAIN
    ]
    # Runs with adaptive steps have a part of their own for what chooses them.
    parts = {each["policy"]: each["code"].count("-") + 1 for each in kept}
    assert parts == dict.fromkeys(PLAIN, 3) | {"tenuto": 4}
    assert (tmp_path / "continuum_8.svg").read_text().lstrip().startswith("<?xml")
    text = (tmp_path / "page.md").read_text()
    assert text.count("| tiny | 1 |") == 1 and text.count("<!-- overview -->") == 1


def test_the_page_is_what_the_records_say() -> None:
    """If it is not: `python -m experiments.figures N --quick --write`."""
    records, text = read_lines(command.RECORDS), page.PAGE.read_text(encoding="utf-8")
    for name in (*PAPER, *dict.fromkeys(record["figure"] for record in records)):
        section = page.format_figure(name, command.select(records, name))
        # The last line says which code made it, and changes with the code.
        assert section.partition(CODE)[0] in text, name
    assert command.make_overview(records) in text
