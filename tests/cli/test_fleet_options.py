"""The fleet's options on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.cli import main

SMALL = ["--gpu", "H100", "--step-cost", "roofline", "--jps", "3", "--window", "2"]
FLEET = ["simulate", *SMALL, "--policy", "stock", "--servers", "2"]


def test_simulate_writes_what_each_engine_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--router", "power-of-two", "--router-option", "seed=7", "--fault", "drain:1@1"]
    assert main([*FLEET, *arguments, "--out", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [engine["name"] for engine in record["fleet"]["engines"]] == ["0", "1"]
    assert record["config"]["fleet"] == {
        "servers": ["", ""],
        "router": "power-of-two",
        "router_options": {"seed": 7},
        "faults": ["drain:1@1"],
    }
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert {turn["engine"] for turn in turns} == {"0", "1"}
    assert main(["analyze", str(tmp_path)]) == 0
    assert not (tmp_path / "occupancy.jsonl").exists(), "that is of one engine"


def test_the_text_says_what_became_of_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLEET, "--fault", "die:1@1", "--no-beside-stock"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fleet ")]
    assert line.startswith("fleet        2 engines (engine 1 died), ")
    assert "turns sent again" in line and "imbalance " in line


def test_compare_has_a_line_for_each_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", *SMALL, "--policies", "stock", "--servers", "2", "--out", str(tmp_path)]
    assert main([*arguments, "--router", "tenuto,random", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "stock@tenuto" in out and "stock@random" in out and "2xH100" in out
    assert main([*arguments, "--router", "random", "--json"]) == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2, "it was there already"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--router", "random"], "say --servers too"),
        (["--servers", "2", "--router", "random,tenuto"], "takes several"),
        (["--servers", "2", "--router", "randon"], "did you mean random"),
        (["--servers", "2", "--router", "tenuto", "--router-option", "fil=1"], "unknown key 'fil'"),
        (["--servers", "2", "--fault", "explode:0@1"], "--fault wants"),
        (["--servers", "2", "--fault", "die:5@1"], "no engine '5'"),
        (["--servers", "H100:1,L40S:1", "--router", "ideal"], "of one kind"),
        (["--servers", "nogpu:2"], "nogpu"),
        (["--servers", "2", "--trace", "t.jsonl"], "leave --trace or --servers out"),
        (["--servers", "2", "--model", "gpt-oss-20b", "--copy-gb-s", "50"], "full attention"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *SMALL, "--policy", "stock", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_check_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-router", "tenuto", "--option", "fill=0.8"]) == 0
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from tenuto.core.router import Router\n"
        "@dataclass\nclass Mine(Router):\n    '''Mine.'''\n"
        "    def route(self, turn, fleet):\n        return 3\n"
    )
    assert main(["check-router", f"{file}:Mine"]) == 1
    assert "neither Send nor Hold" in capsys.readouterr().err


def test_gpus_that_no_server_has_are_an_error_and_a_fleet_of_named_ones_runs_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--step-cost", "roofline", "--jps", "3", "--window", "2", "--policies", "stock", "--json"]
    compare = ["compare", *load, "--workers", "1", "--out", str(tmp_path / "c")]
    assert main([*compare, "--gpu", "H100,L40S", "--servers", "H100:2"]) == 2
    assert "--gpu L40S: --servers names no such GPU" in capsys.readouterr().err
    assert main([*compare, "--gpu", "H100,L40S", "--servers", "H100:1,L40S:1"]) == 0
    assert len((tmp_path / "c" / "results.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_said_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["simulate", *SMALL, "--out", str(tmp_path / "file" / "d")]) == 2
    shown = capsys.readouterr()
    assert "cannot write" in shown.err and not shown.out


def test_a_list_that_is_given_twice_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["compare", *SMALL, "--workers", "1", "--out", str(tmp_path / "c"), "--json"]
    assert main([*small, "--policies", "stock", "--policies", "priority"]) == 0
    shown = capsys.readouterr().err
    assert "--policies is given twice, and the last counts; for several: --policies stock,priority" in shown


@pytest.mark.parametrize(
    ("command", "page"),
    [
        (["simulate", "--gpu", "H100"], "tenuto simulate --help-all"),
        (["simulate", "--gpu", "H3", "--jps", "1"], "simulate --help"),
        (["serve", "--engine", "sim", "--gpu", "H3", "--model", "m"], "serve --engine sim --help"),
    ],
)
def test_an_error_names_the_page_that_has_the_option(
    command: list[str], page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err.rstrip().endswith(page)


def test_a_generator_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "ab8", str(tmp_path / "out.jsonl")]) == 2
    assert "ab8: no such file or folder" in capsys.readouterr().err
