"""The command that compares many seeds: its lines, its exit status, and that it finds a difference."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from experiments.differential.__main__ import main
from tests.differential import compare
from tests.differential.cases import DRAWN, Case


@pytest.mark.parametrize("name", ["scheduler/small cache/1", *DRAWN])
def test_a_run_that_is_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "7", "--case", name]) == 0
    shown = capsys.readouterr()
    (line,) = map(json.loads, shown.out.splitlines())
    assert (line["case"], line["seed"], line["differs"]) == (name, 7, None)
    assert line["equal_steps"] > 150
    assert "1/1 runs, 0 differ" in shown.err


def test_a_run_that_differs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make_other_side(case: Case) -> object:
        return make(replace(case, setup=replace(case.setup, max_num_seqs=1)))

    make = compare._make_sim_side
    monkeypatch.setattr(compare, "_make_sim_side", make_other_side)
    assert main(["--seeds", "1", "--case", "scheduler/small cache/1"]) == 1
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["equal_steps"] < 20
    assert line["differs"].startswith("num_tokens: from item 1 on, vLLM has [(")


def test_a_case_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--case", "nothing"])
    assert "--list prints" in capsys.readouterr().err
