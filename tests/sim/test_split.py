"""Where a gain over stock comes from, from times made by hand and on the simulator."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.sim.compare import (
    Arm,
    Cell,
    Timed,
    find_best_stock,
    format_rows,
    make_arms,
    make_grid,
    make_rows,
    read_results,
    split_gains,
)
from tenuto.sim.machine import build
from tenuto.sim.run import NO_EXTRAS
from tenuto.sim.setup import Setup
from tenuto.workload import LoadOptions


def make_record(policy: str, mean_s: float, seed: int = 1, **changes: Any) -> dict[str, Any]:
    record = {
        "gpu": "H100", "model": "m", "workload": "ab8", "jps": 1.0, "policy": policy, "seed": seed,
        "job_s": {"mean": mean_s, "p95": 2 * mean_s}, "recomputed_tokens": 0, "prompt_tokens": 100,
        "step_tokens": None, "step_cost": "tables", "config": {},
    }  # fmt: skip
    return {**record, **changes}


def make_arm_records(seed: int = 1, factor: float = 1.0) -> list[dict[str, Any]]:
    nothing = {"config": {"keep_kv": False}, "step_tokens": "adaptive"}
    return [
        make_record("stock", 25.0 * factor, seed, step_tokens="256"),
        make_record("stock", 12.0 * factor, seed, step_tokens="512"),
        make_record("stock", 15.0 * factor, seed, step_tokens="adaptive"),
        make_record("tenuto", 9.0 * factor, seed, **nothing),
    ]


def test_the_ratios_multiply_to_the_whole() -> None:
    """20 s → 15 s by steps → 9 s by order → 6 s by the cache."""
    records = [make_record("stock", 20.0), make_record("tenuto", 6.0, step_tokens="adaptive")]
    rows = make_rows(records, make_arm_records())
    assert [row["policy"] for row in rows] == ["stock", "stock @512", "tenuto"]
    *_, tenuto = rows
    split = [tenuto[f"{name}_ratio"] for name in ("steps", "order", "cache")]
    assert split == pytest.approx([0.75, 0.6, 2 / 3])
    assert tenuto["over_stock"] == pytest.approx(0.3) == split[0] * split[1] * split[2]
    assert (tenuto["best_stock"], tenuto["over_best_stock"]) == ("stock @512", pytest.approx(0.5))
    assert "0.30 1   =   0.75 ×  0.60 ×  0.67    0.50 of stock @512" in format_rows(rows)


def test_stock_stands_alone_where_its_own_steps_are_its_best() -> None:
    records = [make_record("stock", 10.0), make_record("tenuto", 6.0, step_tokens="adaptive")]
    rows = make_rows(records, make_arm_records())
    assert [row["policy"] for row in rows] == ["stock", "tenuto"]
    assert (rows[1]["best_stock"], rows[1]["over_best_stock"]) == ("stock", pytest.approx(0.6))


def test_runs_without_a_time_have_no_split() -> None:
    nothing = [Timed(Arm(policy, None, keeps_kv=True), 1, 0.0) for policy in ("stock", "tenuto")]
    assert find_best_stock(nothing, []) is None
    assert split_gains(nothing, []) == {}


def test_a_split_is_over_all_seeds_or_there_is_none() -> None:
    records = [
        make_record(policy, mean_s, seed, step_tokens=steps)
        for policy, steps, means in (("stock", None, (10.0, 40.0)), ("tenuto", "adaptive", (4.0, 9.0)))
        for seed, mean_s in enumerate(means, start=1)
    ]
    whole = make_rows(records, [*make_arm_records(1), *make_arm_records(2, factor=4.0)])
    # √(15·60) / √(10·40) = 30 / 20; √(9·36) / 30 = 18 / 30; √(4·9) / 18 = 6 / 18
    ratios = [whole[-1][f"{name}_ratio"] for name in ("steps", "order", "cache")]
    assert ratios == pytest.approx([1.5, 0.6, 1 / 3])
    assert make_rows(records, make_arm_records(1))[-1]["steps_ratio"] is None


def test_what_a_reader_must_know_is_marked_at_the_number() -> None:
    times = {f"job-{n}": 1.0 + n for n in range(12)}
    slow = {"offered_jps": 2.0, "finished_jps": 1.0, "job_times_s": times}
    rough = make_record("tenuto", 6.0, step_cost="roofline/pessimistic")
    rows = make_rows([make_record("stock", 20.0, **slow), rough, make_record("tenuto", 6.0, seed=2)])
    assert [row["marks"] for row in rows] == ["overloaded, one seed", "roofline"]
    lines = format_rows(rows).splitlines()
    assert "20.00s  o1 " in lines[1]
    assert "6.00s* r " in lines[2]
    assert [line[0] for line in lines if line[1:2] == ":" and line[0] != "*"] == ["o", "r", "1"]
    plain = format_rows(make_rows([make_record("a", 1.0), make_record("a", 1.0, seed=2)]))
    assert "roofline" not in plain and "seed may" not in plain


def test_which_runs_a_split_needs() -> None:
    setups = [Setup(gpu="H100", policy=name) for name in ("stock", "tenuto", "continuum")]
    cells = make_grid([(setup, NO_EXTRAS) for setup in setups], LoadOptions(), [1.0], [1, 2])
    load = LoadOptions(jps=1.0, seed=1)
    titles = [cell.title for cell in make_arms(cells) if cell.load.seed == 1]
    assert sorted(titles) == [
        "H100 continuum keeping no KV 1/s seed 1",
        *(f"H100 stock @{size} 1/s seed 1" for size in (1024, 2048, 256, 512, "adaptive")),
        "H100 tenuto keeping no KV 1/s seed 1",
    ]
    assert len(make_arms(cells)) == 2 * len(titles)
    assert make_arms([cell for cell in cells if cell.setup.policy != "stock"]) == []
    assert make_arms([cell for cell in cells if cell.setup.policy == "stock"]) == []
    # An A100's own steps have 2,048 tokens.
    small = [Cell(Setup(gpu="A100-80", policy=name), load) for name in ("stock", "continuum")]
    assert sorted(cell.setup.step_tokens or 0 for cell in make_arms(small)) == [0, 256, 512, 1024]
    # Who sets the steps of all has chosen them.
    given = [Cell(Setup(policy=name, step_tokens=512), load) for name in ("stock", "tenuto")]
    assert [cell.setup.policy for cell in make_arms(given)] == ["tenuto"]


def test_a_policy_that_keeps_nothing_decides_all_else() -> None:
    whole, none = (
        build(Setup(policy="contextserve", host_gb=1.0, keep_kv=keep_kv)) for keep_kv in (True, False)
    )
    assert whole.policy.overrides("retain") and whole.tiers is not None
    assert not none.policy.overrides("retain") and none.tiers is None
    assert none.policy.overrides("queue_key")
    asked = build(Setup(policy="contextserve", keep_kv=False, offload="async", host_gb=1.0))
    assert asked.tiers is not None  # it is the user's


COMPARE = [
    *("compare", "--gpu", "L40S", "--policies", "stock,tenuto", "--jps", "1", "--window", "6"),
    *("--step-cost", "roofline", "--kv-tokens", "50000", "--workers", "1"),
]


def test_compare_shows_the_split_unless_told_not_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*COMPARE, "--out", str(tmp_path), "--csv", str(tmp_path / "table.csv")]
    assert main([*line, "--json"]) == 0
    output = capsys.readouterr()
    assert (
        "note: 5 more runs beside the 2, to show where a gain comes from; --no-split leaves them out"
        in output.err
    )
    assert len(read_results(tmp_path)) == 7
    tenuto = json.loads(output.out)[-1]
    product = tenuto["steps_ratio"] * tenuto["order_ratio"] * tenuto["cache_ratio"]
    assert product == pytest.approx(tenuto["over_stock"])
    assert "roofline, one seed" in tenuto["marks"]
    with (tmp_path / "table.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    assert float(row["cache_ratio"]) == pytest.approx(tenuto["cache_ratio"])
    assert row["marks"] == tenuto["marks"]

    assert main([*line, "--no-split"]) == 0
    output = capsys.readouterr()
    assert "2 of 2 runs done already" in output.err
    assert "steps ×" not in output.out


SIMULATE = [
    *("simulate", "--gpu", "L40S", "--jps", "1", "--window", "6", "--step-cost", "roofline"),
    *("--kv-tokens", "50000"),
]


def test_simulate_says_what_stock_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def simulate(*arguments: str) -> dict[str, Any]:
        assert main([*SIMULATE, *arguments, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    alone = simulate("--policy", "stock")
    assert "stock" not in alone
    beside = simulate("--policy", "tenuto", "--step-tokens", "512", "--csv", str(tmp_path / "run.csv"))
    assert beside["stock"]["job_s"] == alone["job_s"]
    assert beside["job_s"] != alone["job_s"]
    with (tmp_path / "run.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["stock.job_s.mean"]) == alone["job_s"]["mean"]
    # Stock with other steps than its own is not stock as shipped.
    assert simulate("--policy", "stock", "--step-tokens", "256")["stock"]["job_s"] == alone["job_s"]
    assert "stock" not in simulate("--policy", "tenuto", "--no-beside-stock")

    assert main([*SIMULATE, "--policy", "tenuto"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"stock        job time mean {alone['job_s']['mean']:.2f} s, p95 ")
    assert re.search(r"; this run's mean / stock's = [\d.]+ \(roofline, one seed\)$", last)


def test_host_memory_that_is_given_is_stocks_too(capsys: pytest.CaptureFixture[str]) -> None:
    native = ["--policy", "stock", "--offload", "native", "--host-gb", "4"]
    assert main([*SIMULATE, *native, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["loaded_tokens"] > 0 and "stock" not in alone
    # A disk is Tenuto's alone.
    assert main([*SIMULATE, "--policy", "tenuto", "--host-gb", "4", "--disk-gb", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"stock        job time mean {alone['job_s']['mean']:.2f} s, ")
    assert last.endswith(" (with vLLM's own host memory, roofline, one seed)")
