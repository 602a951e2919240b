"""The table of step costs: which rows run, and what a line says."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.results import step_cost_table
from experiments.results.row import Row, Table
from experiments.results.rows import RACES, TABLES
from experiments.results.settings import STEPS, group
from experiments.results.step_costs import RIVALS, get_title, make_step_costs
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

STATS = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 1.0)


def make_rows() -> list[Row]:
    return [Row(f"R{n}", Setup(), LoadOptions(jps=n)) for n in range(1, 9)]


def make_records(row: str, ours: float, others: float, best: float) -> list[dict[str, Any]]:
    """Ours, all rivals at the default size, and one of them at a size that is better."""

    def make(policy: str, step: Any, mean: float) -> dict[str, Any]:
        job_s = {**STATS, "mean": mean, "p95": 9.0 if step else 1.0}
        return {
            "row": row,
            "policy": policy,
            "step": step,
            "seed": 42,
            "workload": "swe-bench",
            "job_s": job_s,
            "ttft_s": STATS,
        }

    rivals = [make(policy, None, others) for policy in RIVALS]
    return [make("tenuto", None, ours), *rivals, make("autellix+", 512, best)]


def test_some_rows_of_each_race_run_under_both_bounds() -> None:
    rows = list(TABLES["step-costs"].make_rows())
    assert len({row.title for row in rows}) == len(rows) < 50
    races = [row.title.partition(",")[0] for row in rows]
    assert set(races) == set(RACES)
    assert {row.setup.step_cost for row in rows} == {"optimistic", "pessimistic"}
    # The rows are those of the races, but for the cost.
    titles = {(name, row.title) for name, make in RACES.items() for row in make()}
    assert {(race, row.title.partition(": ")[2]) for race, row in zip(races, rows, strict=True)} <= titles


def test_a_line_compares_with_each_rival_at_its_best_size(monkeypatch: pytest.MonkeyPatch) -> None:
    races = {"try": make_rows}
    assert [row.title for row in make_step_costs(races)] == [
        get_title("try", cost, row) for cost in ("optimistic", "pessimistic") for row in ("R2", "R7")
    ]
    table = Table("Title", "About.", RIVALS, lambda: make_step_costs(races), STEPS)
    default = group([*make_records("R2", 10.0, 20.0, 8.0), *make_records("R7", 10.0, 20.0, 16.0)])
    monkeypatch.setattr(step_cost_table, "read_records", lambda name: default)
    costly = [
        each
        for cost, ours in (("optimistic", 9.0), ("pessimistic", 12.0))
        for each in make_records(get_title("try", cost, "R2"), ours, 20.0, 9.0)
    ]
    text = step_cost_table.format_step_costs(table, races, group(costly))
    lines = text.splitlines()[-3:]
    # R7 has not run under the bounds, so no line counts it.
    assert lines[0].startswith(
        "| `try` | optimistic | 1 | 0 / 1 / 0 / 0 | 1.00 (1.00) | R2; autellix+ @512 |"
    )
    assert "| (default) | 1 | 0 / 0 / 1 / 0 | 1.25 (1.25) |" in lines[1]
    assert "| pessimistic | 1 | 0 / 0 / 1 / 0 | 1.33 (1.33) |" in lines[2]
    assert lines[2].split("|")[7].strip() == "0.60 (0.60)"


def test_a_rival_that_has_not_run_leaves_the_row_out(monkeypatch: pytest.MonkeyPatch) -> None:
    races = {"try": make_rows}
    table = Table("Title", "About.", RIVALS, lambda: make_step_costs(races), STEPS)
    default = group(each for each in make_records("R2", 1.0, 2.0, 2.0) if each["policy"] != "stock")
    monkeypatch.setattr(step_cost_table, "read_records", lambda name: default)
    both = [
        each
        for cost in ("optimistic", "pessimistic")
        for each in make_records(get_title("try", cost, "R2"), 1.0, 2.0, 2.0)
    ]
    assert "`try`" not in step_cost_table.format_step_costs(table, races, group(both))
