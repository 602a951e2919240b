"""`tenuto bench --jps 2,4`: a folder of runs, taken up again, that report and analyze read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.client import bench
from tenuto.core.errors import TenutoError
from tests.client.conftest import read_lines
from tests.client.fake_server import FakeServer, serving

pytestmark = pytest.mark.slow
LOAD = ("--workload", "requests", "--max-jobs", "3", "--scale-lengths", "0.01")


def test_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    with serving(FakeServer()) as url:
        where = ("bench", "--url", url, *LOAD, "--out", str(out))
        assert main([*where, "--jps", "40,80", "--csv", str(tmp_path / "s.csv")]) == 0
        text = capsys.readouterr().out
        assert main([*where, "--jps", "40,80,160", "--json"]) == 0  # goes on
        printed = capsys.readouterr()
        assert main([*where, "--jps", "40,80", "--model", "fake", "--json"]) == 0
        capsys.readouterr()
        for other in (
            *(("--seed", "7"), ("--prompts", "words"), ("--answers", "workload"), ("--model", "other")),
            *(("--retries", "1"), ("--force-format", "json")),
        ):
            assert main([*where, "--jps", "40,80,320", *other]) == 2
            assert "holds a run of another load or server, or with other settings" in capsys.readouterr().err
    header, first, second, *_ = text.splitlines()
    assert header.split()[:3] == ["jobs/s", "done/s", "jobs"]
    assert (first.split()[0], first.split()[2], second.split()[0]) == ("40", "3/3", "80")
    assert [result["jps"] for result in json.loads(printed.out)] == [40, 80, 160]
    assert "40 jobs/s is there already" in printed.err and "3 of 3: 160 jobs/s" in printed.err
    assert [result["jps"] for result in read_lines(out / "results.jsonl")] == [40, 80, 160]
    assert len(read_lines(out / "jps-160" / "turns.jsonl")) == 3
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 3
    assert main(["analyze", str(out)]) == 0
    assert "160" in capsys.readouterr().out
    assert main(["report", str(out), "--out", str(tmp_path / "p.html"), "--json"]) == 0
    assert [cell["jps"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [40, 80, 160]


@pytest.mark.parametrize(
    ("given", "shown"), [("1,2,1", "1,2,1"), ("3.000001,3.000002", "3,3; loads must differ in six digits")]
)
def test_a_load_named_twice(capsys: pytest.CaptureFixture[str], given: str, shown: str) -> None:
    assert main(["bench", "--url", "http://h", *LOAD, "--jps", given]) == 2
    assert f"--jps names a load twice: {shown}" in capsys.readouterr().err


def test_without_a_folder_it_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer()) as url:
        assert main(["bench", "--url", url, *LOAD, "--jps", "40,80", "--goodput", "ttft:60000"]) == 0
    assert "good/s" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("stop", [TenutoError("the server is gone"), KeyboardInterrupt()])
def test_what_was_measured_is_printed_if_the_server_ends_between_two_loads(
    stop: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_one, calls = bench._run_one, iter([None, stop])

    def run(*given: Any) -> Any:
        if error := next(calls):
            raise error
        return run_one(*given)

    monkeypatch.setattr(bench, "_run_one", run)
    with serving(FakeServer()) as url:
        table = tmp_path / "t.csv"
        status = main(["bench", "--url", url, *LOAD, "--jps", "40,80,160", "--csv", str(table), "--json"])
    assert status == (130 if isinstance(stop, KeyboardInterrupt) else 2)
    shown = capsys.readouterr()
    assert [result["jps"] for result in json.loads(shown.out)] == [40]
    assert "ends before 80 jobs/s" in shown.err
    assert len(table.read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_to_ends_no_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    with serving(FakeServer()) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "write_whole", fail_to_write)
        status = main(["bench", "--url", url, *LOAD, "--jps", "40,80", "--out", str(out), "--json"])
    assert status == 1
    shown = capsys.readouterr()
    assert [result["jps"] for result in json.loads(shown.out)] == [40, 80]
    assert shown.err.count("not all was written") == 2


def fail_to_write(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("other", [{"client": None}, {"client": {"lag": 1}, "ab": {}}])
def test_results_of_another_command_are_left_alone(
    other: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(other) + "\n"
    (tmp_path / "results.jsonl").write_text(text)
    assert main(["bench", "--url", "http://h", *LOAD, "--jps", "40,80", "--out", str(tmp_path)]) == 2
    assert "holds results of another command; name another folder" in capsys.readouterr().err
    assert (tmp_path / "results.jsonl").read_text() == text


def test_invalid_loads_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.client.result.FLOOR_S", -1.0)
    monkeypatch.setattr("tenuto.client.result.MAX_SHARE", -1.0)
    with serving(FakeServer()) as url:
        assert main(["bench", "--url", url, *LOAD, "--jps", "40,80"]) == 3
    sent, read = (line for line in capsys.readouterr().out.splitlines() if line.startswith("INVALID"))
    assert sent.startswith("INVALID at 40, 80 jobs/s: in the first, this client sent turns late: ")
    assert read.startswith("INVALID at 40, 80 jobs/s: in the first, this client read answers late, ")
