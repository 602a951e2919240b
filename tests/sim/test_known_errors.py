"""How sure a prediction is: the figures are those of the fidelity page, and every command says them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import median

import pytest

from experiments.tables.fidelity import PUBLISHED, format_errors
from tenuto.cli import main
from tenuto.sim.fidelity import (
    FITTED,
    LEAST_MARGIN,
    OTHERS,
    ROOFLINE,
    STOCK,
    TABLES_ONLY,
    KnownError,
    get_error,
    get_margin,
)
from tenuto.sim.setup import Fleet, Setup

DOCS = Path(__file__).parents[2] / "docs"
CELL = re.compile(r"^\| (\S+) \| (\S+) \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+)% \|", re.MULTILINE)


def read_cells() -> dict[tuple[str, bool], list[float]]:
    """The errors in the page's table, by machine and whether it is stock."""
    found: dict[tuple[str, bool], list[float]] = {}
    for gpu, system, percent in CELL.findall((DOCS / "fidelity.md").read_text(encoding="utf-8")):
        found.setdefault((gpu, system == "stock"), []).append(float(percent) / 100)
    return found


def check(known: KnownError, errors: list[float]) -> None:
    assert known.num_cells == len(errors)
    assert known.median == pytest.approx(median(map(abs, errors)), abs=6e-4)
    assert (known.low, known.high) == pytest.approx((min(errors), max(errors)), abs=6e-4)


def test_errors_are_those_of_the_page() -> None:
    cells = read_cells()
    for gpu in ("H200", "H100"):
        check(STOCK[gpu], cells[gpu, True])
        check(OTHERS[gpu], cells[gpu, False])
    check(ROOFLINE, cells["A100-40", True])
    assert cells.keys() == {
        (gpu, is_stock) for gpu in ("H200", "H100", "A100-40") for is_stock in (True, False)
    }


def test_the_command_sums_up_what_is_meant_to_be_a_system() -> None:
    assert set(PUBLISHED) == {"H200", "H100", "A100-40"}
    errors = {"stock": 0.02, "continuum-prototype": -0.1, "continuum-fixed": 9.0, "offload-sync": 0.3}
    rows = [{"gpu": "H100", "policy": policy, "error": error} for policy, error in errors.items()]
    assert format_errors(rows).splitlines()[2:] == [
        "| H100, stock | 1 | 2.0% | +2.0% to +2.0% |",
        "| H100, other policies | 2 | 20.0% | -10.0% to +30.0% |",
    ]


def test_the_error_of_a_fit_is_that_of_the_real_engine() -> None:
    page = (DOCS / "lab.md").read_text(encoding="utf-8")
    section = page.partition("## On the real engine")[2].partition("\n## ")[0]
    check(
        FITTED,
        [float(percent) / 100 for percent in re.findall(r"\(([+-][\d.]+) %\) \|$", section, re.MULTILINE)],
    )


def test_a_machine_is_as_sure_as_what_is_known_of_it() -> None:
    assert get_error("H100", "stock", "tables") is STOCK["H100"]
    assert get_error("H100", "stock @512", "tables") is STOCK["H100"]
    assert get_error("2xH100", "stock@random", "tables") is STOCK["H100"]
    assert get_error("H100", "tenuto", "tables/pessimistic") is OTHERS["H100"]
    assert get_error("L40S", "stock", "tables") is TABLES_ONLY
    assert get_error("2xH100+2xL40S", "stock", "tables") is TABLES_ONLY
    assert get_error("4xH100", "stock", "tables") is STOCK["H100"]
    assert get_error("RTX5090", "tenuto", "roofline") is ROOFLINE
    assert get_error("2xH100+2xA100-40", "stock", "roofline, tables") is ROOFLINE
    assert get_error("H100", "stock", "roofline/optimistic") is ROOFLINE


@pytest.mark.parametrize(
    "path", ["costs.json", "tables.json", "my-roofline-fit.json", "/data/roofline/h100.json"]
)
def test_the_name_of_a_file_does_not_change_how_sure_its_step_times_are(path: str) -> None:
    assert get_error("L40S", "stock", path) is FITTED


def test_a_margin_is_what_such_predictions_were_too_fast() -> None:
    assert get_margin(Setup(gpu="H100")) == LEAST_MARGIN
    assert get_margin(Setup(gpu="L40S")) == 0.22
    assert get_margin(Setup(gpu="H100", step_cost="roofline")) == 0.22
    assert get_margin(Setup(gpu="H100", fleet=Fleet(servers=("", "L40S")))) == 0.22


QUICK = ("--gpu", "H100", "--jps", "2", "--window", "3", "--step-cost", "roofline", "--workload", "requests")


def test_every_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *QUICK, "--policy", "stock"]) == 0
    assert f"known error  of mean job times like these: {ROOFLINE}" in capsys.readouterr().out
    table = tmp_path / "run.csv"
    assert main(["simulate", *QUICK, "--policy", "stock", "--json", "--csv", str(table)]) == 0
    assert json.loads(capsys.readouterr().out)["known_error"] == ROOFLINE.to_json()
    [row] = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    assert float(row["known_error.low"]) == ROOFLINE.low
    sweep = ["compare", *QUICK, "--policies", "stock", "--workers", "1", "--out", str(tmp_path)]
    assert main(sweep) == 0
    assert f"  {ROOFLINE}: H100 stock" in capsys.readouterr().out
    assert main([*sweep, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["known_error"] == ROOFLINE.to_json()


@pytest.mark.slow
def test_a_plan_says_it_and_leaves_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *QUICK, "--policies", "stock", "--p95", "20", "--no-sensitivity", "--workers", "1"]
    words += ["--max-sim-jobs", "300"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"  H100 stock: {ROOFLINE}" in said and "Margins: H100 22%." in said
    assert "less a margin of 22%" in said
    assert main([*words, "--margin", "0.3", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    assert plan["margin"] == 0.3 and plan["known_error"] == ROOFLINE.to_json()
