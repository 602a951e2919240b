"""A sweep: resumable, on several processes, with a winner in each cell."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
from tenuto.records.files import RESULTS
from tenuto.sim.compare import COLUMNS, Column, format_rows, make_rows, read_results
from tests.support.processes import run_on_a_full_disk

COMPARE = [
    *("compare", "--gpu", "L40S", "--policies", "stock,continuum-fixed", "--jps", "0.5,1", "--window", "6"),
    *("--step-cost", "roofline", "--kv-tokens", "50000", "--no-split"),
    *("--workers", "1"),
]


def test_a_sweep_and_its_resumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--out", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    rows = json.loads(output.out)
    assert [(row["jps"], row["policy"]) for row in rows] == [
        (0.5, "stock"),
        (0.5, "continuum-fixed"),
        (1.0, "stock"),
        (1.0, "continuum-fixed"),
    ]
    assert "4 of 4, 0:00 left" in output.err
    before = (tmp_path / RESULTS).read_text()
    assert len(before.splitlines()) == 4

    # What is there is not run again; what was cut off while it was written is.
    (tmp_path / RESULTS).write_text(before[: before.rindex("{") + 40])
    assert main([*COMPARE, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "3 of 4 runs done already" in output.err
    assert len(read_results(tmp_path)) == 4
    assert output.out.count("*") >= 2


@pytest.mark.parametrize("by_module", [False, True])
def test_what_named_a_file_that_has_changed_is_run_again(
    by_module: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    policy, trace, out = tmp_path / "mine_to_change.py", tmp_path / "jobs.jsonl", tmp_path / "out"
    table = tmp_path / "table.json"
    table.write_text("{}")
    policy.write_text(
        "from dataclasses import dataclass\nfrom tenuto import Policy, setting\n"
        "@dataclass\nclass Mine(Policy):\n    'Mine.'\n    table: str = setting('', 'a file')\n"
    )
    row = {"session": "a", "timestamp": 0, "input_length": 2000, "output_length": 10}
    trace.write_text(json.dumps(row) + "\n")
    machine = ["--gpu", "L40S", "--step-cost", "roofline", "--workers", "1", "--no-split"]
    mine = f"{policy.stem if by_module else policy}:Mine"
    policies = ["--policies", f"stock,{mine}", "--option", f"{mine}:table={table}"]

    def run() -> str:
        sweep = ["compare", *machine, *policies, "--workload", str(trace), "--out", str(out)]
        assert main(sweep) == 0
        # The new record takes the place of the old one.
        assert len((out / RESULTS).read_text().splitlines()) == 2
        return capsys.readouterr().err

    assert "done already" not in run()
    assert "2 of 2 runs done already" in run()
    policy.write_text(policy.read_text() + "\n# Another one.\n")
    assert "1 of 2 runs done already" in run()
    table.write_text("[]")
    assert "1 of 2 runs done already" in run()
    trace.write_text("".join(json.dumps({**row, "session": name}) + "\n" for name in "ab"))
    assert "done already" not in run()
    assert "2 of 2 runs done already" in run()


def test_what_another_version_ran_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--out", str(tmp_path)]) == 0
    *kept, last = map(json.loads, (tmp_path / RESULTS).read_text().splitlines())
    last["versions"]["tenuto"] = "0.1"
    last["job_s"]["mean"] = 999.0
    (tmp_path / RESULTS).write_text("".join(json.dumps(record) + "\n" for record in [*kept, last]))
    capsys.readouterr()
    assert main([*COMPARE, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "3 of 4 runs done already" in output.err and "999" not in output.out
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 4


def test_a_policy_whose_file_cannot_be_looked_for_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x" * 300, "x" * 300 + ".py", "no.such.module", "", ".relative"):
        assert main([*COMPARE, "--policies", f"{name}:Mine", "--out", str(tmp_path)]) == 2
        assert f"policy '{name}:Mine'" in capsys.readouterr().err


def test_a_column_that_is_added_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/design.md says: one line of `COLUMNS`."""
    seeds = Column(f" {'seeds':>6}", lambda row: f" {row['seeds']:6}")
    monkeypatch.setattr("tenuto.sim.compare.COLUMNS", (*COLUMNS, seeds))
    main([*COMPARE, "--policies", "stock", "--jps", "0.5", "--out", str(tmp_path)])
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert (head[-6:], row[-6:]) == (" seeds", "     1")


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    main([*COMPARE, "--out", str(tmp_path / "one")])
    main([*COMPARE[:-1], "2", "--out", str(tmp_path / "two")])
    one, two = (strip(read_results(tmp_path / name)) for name in ("one", "two"))
    assert one == two


def test_results_that_cannot_be_written_are_an_error_in_one_line(tmp_path: Path) -> None:
    ended = run_on_a_full_disk(*COMPARE, "--out", tmp_path)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert f"tenuto: --out: cannot write {tmp_path / RESULTS}: File too large" in ended.stderr


def test_a_folder_is_for_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main([*COMPARE, "--out", str(tmp_path)]) == 2
    os.close(handle)
    assert "another tenuto compare is using this folder" in capsys.readouterr().err
    assert main([*COMPARE, "--policies", "stock", "--jps", "1", "--out", str(tmp_path)]) == 0


def test_measured_results_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*COMPARE, "--policies", "stock", "--jps", "1", "--out", str(tmp_path)]
    assert main(line) == 0
    (record,) = read_results(tmp_path).values()
    text = json.dumps({**record, "client": {"interrupted": False}}) + "\n"
    (tmp_path / RESULTS).write_text(text)
    assert main(line) == 2
    assert "holds results of tenuto bench or ab; name another folder" in capsys.readouterr().err
    assert (tmp_path / RESULTS).read_text() == text


def test_a_foreign_results_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(DataError, match=r"results\.jsonl:1: gpu: is missing"):
        read_results(tmp_path)
    assert (tmp_path / RESULTS).read_text() == '{"a": 1}\n{"b": 2}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"garbage\n", "not valid JSON"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"null\n", "must be a JSON object, got None"),
        (b'{"kind": "run", "schema": 2, "config": {"gpu": "L40S"}}\n', "gpu: is missing"),
        (b'{"kind": "run", "schema": 3}\n', "schema: must be 2, got 3"),
    ],
)
def test_a_spoilt_line_is_named_and_nothing_is_touched(line: bytes, message: str, tmp_path: Path) -> None:
    main([*COMPARE, "--policies", "stock", "--out", str(tmp_path)])
    good = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(good + line)
    with pytest.raises(DataError, match=f"{RESULTS}:3: {message}"):
        read_results(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == good + line


@pytest.mark.parametrize("rest", [b'{"config": {"gp', b""])
def test_a_first_record_that_was_cut_off_is_no_record(rest: bytes, tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_bytes(rest)
    assert read_results(tmp_path) == {}
    assert (tmp_path / RESULTS).read_bytes() == b""


@pytest.mark.parametrize("rest", [b'{"config": {"gp', b"\xff", b""])
def test_what_was_cut_off_is_dropped_and_the_next_record_gets_a_line_of_its_own(
    rest: bytes, tmp_path: Path
) -> None:
    main([*COMPARE, "--policies", "stock", "--out", str(tmp_path)])
    good = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(good + rest if rest else good.rstrip(b"\n"))
    assert main([*COMPARE, "--out", str(tmp_path)]) == 0
    assert (tmp_path / RESULTS).read_bytes().startswith(good)
    assert len(read_results(tmp_path)) == 4


def test_a_name_given_twice_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                *COMPARE,
                "--gpu",
                "L40S,l40s",
                "--policies",
                "stock,stock",
                "--seeds",
                "1,1",
                "--out",
                str(tmp_path),
                "--json",
            ]
        )
        == 0
    )
    assert [row["seeds"] for row in json.loads(capsys.readouterr().out)] == [1, 1]
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 2


def test_ray_runs_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in: whoever has a cluster has Ray, the tests need not."""
    calls: list[str] = []
    stub = types.SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda address: calls.append(address),
        remote=lambda function: types.SimpleNamespace(remote=lambda cell: _Future(function(cell))),
        wait=lambda waiting, num_returns: (waiting[:1], waiting[1:]),
        get=lambda future: future.value,
    )
    monkeypatch.setitem(sys.modules, "ray", stub)
    assert main([*COMPARE, "--out", str(tmp_path), "--ray", "auto"]) == 0
    assert calls == ["auto"]
    assert len(read_results(tmp_path)) == 4


class _Future:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_without_ray_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*COMPARE, "--out", str(tmp_path), "--ray", "auto"]) == 2
    assert "pip install ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jps", "fast"], "--jps must be a number, got 'fast'"),
        (["--jps", ""], "--jps is empty: "),
        (["--gpu", "H3000"], "unknown GPU"),
        (["--policies", "stock,best"], "no policy 'best'"),
        (["--workload", "nowhere.jsonl"], "no such file"),
        (["--option", "ttl_s=-1"], "ttl_s"),
        (["--option", "continuum:ttl_s=1"], "no 'continuum'; did you mean continuum-fixed?"),
        (["--workers", "0"], "--workers must be at least 1"),
    ],
)
def test_nothing_runs_where_something_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_option_for_one_policy_alone(tmp_path: Path) -> None:
    assert main([*COMPARE, "--option", "continuum-fixed:ttl_s=1.5", "--out", str(tmp_path)]) == 0
    options = {
        record["policy"]: record["config"].get("options") for record in read_results(tmp_path).values()
    }
    assert options == {"stock": None, "continuum-fixed": {"ttl_s": 1.5}}


def make_record(policy: str, mean_s: float, seed: int = 1) -> dict[str, Any]:
    return {
        "gpu": "H100",
        "model": "m",
        "workload": "ab8",
        "jps": 1.0,
        "policy": policy,
        "seed": seed,
        "job_s": {"mean": mean_s, "p95": 2 * mean_s},
        "recomputed_tokens": 10,
        "prompt_tokens": 100,
    }


def test_the_winner_is_marked_and_so_is_a_tie() -> None:
    records = [make_record("stock", 20.0), make_record("a", 10.0), make_record("b", 10.1)]
    rows = make_rows(records)
    assert {row["policy"]: row["wins"] for row in rows} == {"stock": False, "a": True, "b": True}
    over_stock = {row["policy"]: row["over_stock"] for row in rows}
    assert over_stock == pytest.approx({"stock": 1.0, "a": 0.5, "b": 0.505})
    text = format_rows(rows)
    assert "10.00s*" in text
    assert "20.00s " in text


def test_a_fleet_is_compared_with_stock_behind_the_same_router() -> None:
    means = {"stock@random": 20.0, "tenuto@random": 10.0, "stock@ideal": 8.0, "tenuto@ideal": 6.0}
    rows = make_rows([make_record(policy, mean_s) for policy, mean_s in means.items()])
    assert [row["over_stock"] for row in rows] == pytest.approx([1.0, 0.5, 1.0, 0.75])


def test_seeds_are_averaged_as_ratios_are() -> None:
    [row] = make_rows([make_record("a", 4.0, seed=1), make_record("a", 9.0, seed=2)])
    assert row["mean_job_s"] == pytest.approx(6.0)  # √(4 · 9)
    assert (row["seeds"], row["lowest_mean_job_s"], row["highest_mean_job_s"]) == (2, 4.0, 9.0)


def test_a_seed_without_goodput_counts_in_its_mean() -> None:
    """Or the worst runs would make the mean better."""
    goods: list[list[float | None]] = [[0.0, 0.3], [0.0, 0.0], [None, None]]
    for good, mean in zip(goods, (0.15, 0.0, None), strict=True):
        records = [
            make_record("a", 4.0, seed) | {"goodput": {"turns_per_s": each}} for seed, each in enumerate(good)
        ]
        rows = make_rows(records)
        assert rows[0]["goodput_turns_per_s"] == mean
        assert ("goodput" in format_rows(rows)) == (mean is not None)


def strip(records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {k: v for k, v in record.items() if k != "wall_s"} for key, record in records.items()}
