"""The paper's figures: every cell can be built, points by hand, and one small figure from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.figures import __main__ as command
from experiments.figures.figures import FIGURES, Figure
from experiments.figures.points import make_points
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_cells_that_can_be_built(name: str) -> None:
    quick, full = (list(FIGURES[name].make_cells(quick=is_quick)) for is_quick in (True, False))
    assert 0 < len(quick) < len(full)
    assert len({cell.key for *_, cell in full}) == len(full)
    setups = {cell.setup.policy: cell.setup for *_, cell in quick}
    for setup in setups.values():
        build(replace(setup, step_cost="roofline"))


def test_points_by_hand() -> None:
    records = [
        {
            "job_s": {"mean": 10.0, "p95": 20.0},
            "jobs": 2,
            "makespan_s": 20.0,
            "job_times_s": {"a": 4, "b": 16},
        },
        {
            "job_s": {"mean": 20.0, "p95": 40.0},
            "jobs": 2,
            "makespan_s": 40.0,
            "job_times_s": {"a": 5, "b": 35},
        },
    ]
    [point] = make_points(((("w", "p", 1.0), record) for record in records), timeout_s=30.0)
    assert (point.seeds, point.mean_job_s, point.p95_job_s) == (2, 15.0, 30.0)
    assert (point.lowest_mean_job_s, point.highest_mean_job_s) == (10.0, 20.0)
    assert point.throughput_jps == pytest.approx((0.1 + 0.05) / 2)
    assert point.timed_out_share == 0.25


def test_a_figure_is_drawn_and_its_data_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    tiny = Figure(
        "tiny", "jobs/s", "jps", (1.0, 2.0), (1.0, 2.0), Setup(gpu="L40S", step_cost="roofline"),
        quick_policies=("stock", "tenuto"), loads={"random": LoadOptions(workload="random")},
        quick_window_s=4.0,
    )  # fmt: skip
    monkeypatch.setattr(command, "FIGURES", {"8": tiny})
    monkeypatch.setattr(command, "KEPT", tmp_path / "kept")
    path = command.make_figure("8", tmp_path / "out", quick=True, timeout_s=1.5, workers=1)
    assert path.read_text().lstrip().startswith("<?xml")
    data = json.loads(path.with_suffix(".json").read_text())
    assert [(point["policy"], point["value"]) for point in data["points"]] == [
        ("stock", 1.0), ("stock", 2.0), ("tenuto", 1.0), ("tenuto", 2.0)
    ]  # fmt: skip
    assert data["simulated"]
    assert all(0 <= point["timed_out_share"] <= 1 for point in data["points"])
