"""Races: what still has to run, what the records say, and that an interrupted race goes on."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from experiments import decision_code
from experiments.decision_code import Code
from experiments.results import runs as runs_module
from experiments.results import screen
from experiments.results.mixed import KINDS, make_mixed
from experiments.results.race import find_missing
from experiments.results.race_tables import describe_harm, describe_losses, format_race
from experiments.results.row import Row, Table
from experiments.results.rows import RACE, TABLES
from experiments.results.runs import (
    Place,
    Race,
    begin_with_kept,
    confirm,
    get_key,
    read_runs,
    run_place,
    say_code_of,
    shorten,
)
from experiments.results.settings import BOUND, OURS, STEPS, Setting, group
from experiments.results.verdicts import get_one_setting, judge
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.workload.load import GENERATORS, LoadOptions

SEEDS = (42, 1, 2)


def make(policy: str, step: Any, mean: float, seed: int = 42, **figures: float) -> dict[str, Any]:
    def stats(at_95: float, mean: float = 0.1) -> dict[str, float]:
        return {"mean": mean, "p50": mean, "p90": at_95, "p95": at_95, "p99": at_95, "max": at_95}

    return {
        "row": "R",
        "policy": policy,
        "step": step,
        "seed": seed,
        "job_s": stats(figures.get("p95", 20.0), mean),
        "ttft_s": stats(figures.get("ttft", 1.0)),
        "plain_ttft_s": stats(figures.get("plain", 0.1)),
        **{name: stats(2.0) for name in ("itl_s", "queue_s", "slowdown")},
        "finished_jps": 1.5,
        "policy_faults": 0,
        "workload": "chat",
    }


def judge_these(*records: dict[str, Any]) -> Any:
    verdict = judge("R", {setting: seeds for (_, setting), seeds in group(records).items()})
    assert verdict is not None
    return verdict


def test_each_policy_stands_at_its_best_size() -> None:
    verdict = judge_these(
        make("tenuto", None, 10.0),
        make("stock", None, 30.0),
        make("stock", 512, 15.0),
        make("continuum/async", None, 12.0),
        make("continuum/async", 1024, 11.0),
        make(BOUND, 512, 8.0),
        make(BOUND, None, 9.0),
    )
    assert verdict.best == {
        "stock": Setting("stock", 512),
        "continuum/async": Setting("continuum/async", 1024),
    }
    assert verdict.rival.label == "continuum @1,024"
    assert verdict.ratio.mean == pytest.approx(10 / 11) and verdict.outcome == "won"
    assert verdict.bound.mean == pytest.approx(10 / 8)


@pytest.mark.parametrize(
    ("mean", "p95", "ttft", "outcome"),
    [
        (9.9, 20.0, 1.0, "tied"),
        (9.0, 20.0, 1.0, "lost"),
        (9.0, 20.1, 1.0, "behind"),  # pays for it in P95
        (9.0, 20.0, 1.1, "behind"),  # or in TTFT
        (10.5, 5.0, 0.1, "won"),
    ],
)
def test_a_row_is_lost_to_one_that_is_better_and_pays_nothing_for_it(
    mean: float, p95: float, ttft: float, outcome: str
) -> None:
    verdict = judge_these(make("tenuto", None, 10.0), make("concur/async", 2048, mean, p95=p95, ttft=ttft))
    assert verdict.outcome == outcome
    assert (Setting("concur/async", 2048) in verdict.losses) == (outcome == "lost")


def test_a_row_can_be_lost_to_a_setting_that_is_not_the_best_in_the_mean() -> None:
    fast = make("concur/async", 512, 8.0, p95=30.0)
    verdict = judge_these(make("tenuto", None, 10.0), fast, make("concur/async", 1024, 9.5))
    assert verdict.rival == Setting("concur/async", 512)
    assert verdict.outcome == "lost" and list(verdict.losses) == [Setting("concur/async", 1024)]
    assert describe_losses(verdict) == "R: concur @1,024 (1.05)"


def test_plain_requests_are_harmed_against_stock_at_any_size() -> None:
    ours, stock = make("tenuto", None, 10.0, plain=0.112), make("stock", 512, 20.0, plain=0.1)
    verdict = judge_these(ours, make("stock", None, 20.0, plain=0.2), stock)
    assert verdict.is_harmed and verdict.harm_by == Setting("stock", 512)
    found = {setting: seeds for (_, setting), seeds in group([ours, stock]).items()}
    assert (
        describe_harm(verdict, found) == "R: 1.12 of stock @512 (0.112 s against 0.1 s; mean job time 0.50)"
    )
    assert not judge_these(make("tenuto", None, 10.0, plain=0.109), stock).is_harmed
    agents = {**make("tenuto", None, 10.0, plain=9.0), "workload": "bfcl"}
    assert judge_these(agents, stock).harm is None


def test_seeds_are_compared_one_by_one() -> None:
    ours = [make("tenuto", None, 10.0), make("tenuto", None, 100.0, seed=1)]
    stock = [make("stock", None, 20.0), make("stock", None, 125.0, seed=1)]
    assert str(judge_these(*ours, *stock).ratio) == "0.63 (0.50-0.80)"
    # A verdict is on those that ran all seeds, but each policy's best is known from the seeds it ran.
    verdict = judge_these(*ours, *stock, make("concur/async", None, 9.0))
    assert verdict.rival == Setting("stock") and not verdict.losses
    assert verdict.best["concur/async"] == Setting("concur/async")


def test_of_equals_the_same_is_named_whichever_ran_first() -> None:
    rivals = [make(policy, None, 11.0) for policy in ("stock", "continuum/async", "autellix+")]
    for order in (rivals, rivals[::-1]):
        assert judge_these(make("tenuto", None, 10.0), *order).rival == Setting("autellix+")


def test_one_setting_for_all_rows_flatters_those_that_were_left_out() -> None:
    def put(*records: dict[str, Any]) -> dict[Setting, dict[int, Any]]:
        return {setting: seeds for (_, setting), seeds in group(records).items()}

    by_row = {
        # Seed 1 was read first, but only ours ran it.
        "A": put(
            make("tenuto", None, 99.0, seed=1),
            make("tenuto", None, 10.0),
            make("stock", 512, 20.0),
            make("concur/async", None, 40.0),
        ),
        "B": put(make("tenuto", None, 10.0), make("stock", 512, 5.0), make(BOUND, None, 1.0)),
    }
    found = get_one_setting(by_row)
    half = pytest.approx(2**0.5)
    assert found[OURS] == (half, 2.0, "B") and found[Setting("stock", 512)] == (half, 2.0, "A")
    # At 512, concur may have been as good as stock was.
    by_row["B"] |= put(make("concur/async", None, 10.0))
    found = get_one_setting(by_row)
    assert found[Setting("concur/async", 512)] == (half, 2.0, "A")
    assert found[Setting("concur/async", None)] == (pytest.approx(8**0.5), 4.0, "A")


# What runs.


def race(means: dict[tuple[str, Any], float]) -> dict[Setting, dict[int, Any]]:
    """Run a race whose results are given by policy and size of steps; what ran."""
    policies = ("stock", "far", "near", BOUND, "tenuto")
    found: dict[Setting, dict[int, Any]] = {}
    while missing := find_missing(policies, STEPS, SEEDS, found):
        assert len(set(missing)) == len(missing)
        for setting, seed in missing:
            assert seed not in found.get(setting, {})
            mean = means.get((setting.policy, setting.step), means.get((setting.policy, "any"), 10.0))
            found.setdefault(setting, {})[seed] = make(setting.policy, setting.step, mean, seed=seed)
    return found


def get_steps(found: dict[Setting, Any], policy: str) -> set[Any]:
    return {setting.step for setting in found if setting.policy == policy}


def test_a_policy_that_is_far_behind_runs_once() -> None:
    found = race({("far", "any"): 51.0, ("near", "any"): 11.0, ("stock", "any"): 60.0})
    assert get_steps(found, "far") == {None}
    assert get_steps(found, "near") == set(STEPS)
    # Stock and the bound run at all sizes, whatever they come to.
    assert get_steps(found, "stock") == get_steps(found, BOUND) == set(STEPS)


def test_a_size_that_saves_a_policy_is_found() -> None:
    found = race({("far", None): 45.0, ("far", 1024): 15.0, ("far", 512): 9.0, ("stock", "any"): 60.0})
    assert set(found[Setting("far", 512)]) == set(SEEDS)


def test_a_policy_that_is_stock_in_a_row_runs_at_two_sizes() -> None:
    found = race({("stock", "any"): 12.0, ("near", "any"): 12.01})
    assert get_steps(found, "near") == {None, 1024}


def test_only_what_matters_runs_with_further_seeds() -> None:
    means = {("stock", "any"): 30.0, ("far", "any"): 14.0, ("near", "any"): 11.0, ("near", 2048): 10.0}
    thrice = {setting for setting, seeds in race(means).items() if set(seeds) == set(SEEDS)}
    assert {OURS, Setting("stock"), Setting("near", 2048), Setting(BOUND)} <= thrice
    assert not any(setting.policy == "far" for setting in thrice)
    assert Setting("near", 512) not in thrice


def make_row(jps: float = 2.0) -> Row:
    setup = Setup(gpu="L40S", step_cost="roofline", kv_tokens=40_000, host_gb=0)
    return Row("R", setup, LoadOptions(workload="requests", jps=jps, window_s=3))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table("Title", "About.", ("stock", "tenuto"), lambda: [make_row()], STEPS)
    monkeypatch.setitem(TABLES, "try", table)
    return table


def test_a_run_is_kept_under_what_defines_it(table: Table, tmp_path: Path) -> None:
    record = run_place(Place("try", "R", Setting("stock", 512), 7))
    path = tmp_path / "try.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record)[:50])  # cut off by an interruption
    assert list(read_runs(path, [make_row()])) == [("R", Setting("stock", 512))]
    assert read_runs(path, [make_row(jps=3.0)]) == {}  # the row is another one now
    assert record["plain_ttft_s"]["p95"] > 0 and record["itl_s"]["p95"] > 0 <= record["queue_s"]["max"]
    again = run_place(Place("try", "R", Setting("stock", 512), 7))
    assert {**record, "cpu_s": 0} == {**again, "cpu_s": 0}


def test_a_fresh_clone_goes_on_from_the_kept_records(tmp_path: Path) -> None:
    kept, path = tmp_path / "kept.jsonl", tmp_path / "out" / "try.jsonl"
    begin_with_kept(path, kept)
    assert not path.exists()
    kept.write_text("kept\n")
    begin_with_kept(path, kept)
    assert path.read_text() == "kept\n"
    path.write_text("newer\n")
    begin_with_kept(path, kept)
    assert path.read_text() == "newer\n"


class Inline:
    """A pool that runs everything at once, in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


def test_an_interrupted_race_goes_on_and_is_written_down(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs_module, "ProcessPoolExecutor", Inline)
    path = tmp_path / "out" / "try.jsonl"
    race = Race("try", [make_row()], table.policies, table.steps, (42, 1), path, workers=1)
    runs = race.run()
    lines = path.read_text().splitlines()
    names = {(each["policy"], each["step"], each["seed"]) for each in map(json.loads, lines)}
    assert len(lines) == len(names) >= 7
    assert "1 of 1 rows" in capsys.readouterr().err.splitlines()[-1]
    path.write_text("\n".join(lines[:3]) + "\n")
    again = race.run()
    assert {key: set(seeds) for key, seeds in again.items()} == {
        key: set(seeds) for key, seeds in runs.items()
    }
    assert len(path.read_text().splitlines()) == len(lines)
    # What other code ran is run again, and kept until then.
    older = [json.dumps({**json.loads(line), "code": "0-0-0"}) for line in lines[:3]]
    path.write_text("\n".join([*older, *lines[3:]]) + "\n")
    race.run()
    assert len(path.read_text().splitlines()) == len(lines) + 3
    assert say_code_of("try", read_runs(path, race.rows)).count("Older") == 0
    section = format_race(table, [make_row(), Row("S", Setup(), LoadOptions(jps=1))], runs)
    assert "Not run yet: S." in section and "| R | " in section


def test_figures_are_shortened() -> None:
    stats = dict.fromkeys(("mean", "min", "p50", "p90", "p95", "p99", "max"), 1.23456789)
    assert shorten(stats) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 1.2346)
    assert shorten({"tenuto": "1"}) == {"tenuto": "1"} and shorten(None) is None


def test_every_kind_of_traffic_has_a_generator_and_a_machine() -> None:
    rows = list(make_mixed())
    assert {kind.workload for kind in KINDS} <= set(GENERATORS)
    assert len({row.title for row in rows}) == len(rows) == len({get_key(row, OURS, 1) for row in rows})
    for policy in RACE:
        setup, _ = rows[0].place(policy, 1, 512)
        assert build(setup).config.max_step_tokens == 512


def test_the_screen_counts_what_the_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [make("tenuto", None, 10.0), make("stock", 512, 9.0), make(BOUND, None, 8.0)]
    table = Table("T", "A", (), lambda: [make_row()], STEPS)
    monkeypatch.setattr(screen, "TABLES", {"try": table})
    monkeypatch.setitem(TABLES, "try", table)  # whatever runs before this test
    monkeypatch.setattr(screen, "read_records", lambda name: group(records))
    text = screen.format_screen()
    assert text.startswith("In 1 rows, ") and "loses 1." in text and "- try, R: stock @512 (1.11)" in text
    assert "| `try` | 1 | 0 | 0 | 0 | 1 | 0 of 1 | 1.11 | 1.11 (R; stock @512) | 1.25 |" in text
    monkeypatch.setattr(screen, "read_records", lambda name: {})
    assert screen.format_screen() == "No race has run yet."


@pytest.mark.slow
def test_kept_runs_of_a_table_that_come_out_the_same_are_not_older(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decision_code, "SAME", tmp_path / "same.txt")
    decision_code._read_same.cache_clear()
    row = next(iter(TABLES["bfcl"].make_rows()))
    record = run_place(Place("bfcl", row.title, Setting("stock"), 42))
    present = Code.of(record)
    older = {**record, "code": f"{present.engine}-before-{present.rules}"}
    assert confirm("bfcl", [{**older, "jobs": 3}], 1) == 1
    assert row.title in capsys.readouterr().out and Code.of(older) != present
    assert confirm("bfcl", [older], 1) == 0
    assert Code.of(older) == present
    decision_code._read_same.cache_clear()
