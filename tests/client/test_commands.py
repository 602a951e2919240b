"""Tool calls as real commands: what they may do, how they end, and what turns make of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tenuto.client import commands as commands_module
from tenuto.client.commands import CommandRecord, CommandRunner, check_commands
from tenuto.client.options import BenchOptions
from tenuto.core.errors import ConfigError
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Job, Span, TurnSpec, Workload
from tenuto.workload.turn_driver import TurnDriver
from tests.client.conftest import Ran, read_lines
from tests.client.fake_server import FakeServer, Reply, Request

pytestmark = pytest.mark.slow


def make_job(*commands: str, job_id: str = "job") -> Job:
    """A job of one turn more than commands."""
    turns = [
        TurnSpec((Span("p", n + 1),), Span(f"o{n}", 2), tool="sh", command=command, tool_s=9.0)
        for n, command in enumerate(commands)
    ]
    return Job(job_id, 0.0, (*turns, TurnSpec((Span("p", 9),), Span("last", 2))))


def run_all(*commands: str, limit_s: float = 20.0) -> list[CommandRecord]:
    """Run a job's commands one after the other."""
    records: list[CommandRecord] = []

    async def run() -> None:
        with CommandRunner(limit_s, records.append) as runner:
            for index in range(len(commands)):
                await runner.run(make_job(*commands), index)

    asyncio.run(run())
    return records


def test_a_command_and_its_record() -> None:
    (record,) = run_all("echo out; echo err >&2; exit 3")
    assert (record.job, record.after_turn, record.command) == ("job", 1, "echo out; echo err >&2; exit 3")
    assert (record.end, record.exit_status, record.output_bytes) == ("exited", 3, 8)
    assert record.seconds > 0
    assert json.loads(json.dumps(asdict(record)))["exit_status"] == 3


def test_a_jobs_commands_share_a_folder_that_goes_away(tmp_path: Path) -> None:
    where = tmp_path / "where"
    first, second = run_all(
        f"pwd > {where}; echo x > left", "test -s left && test -z $(ls -A .. | grep -v tmp)"
    )
    assert (first.exit_status, second.exit_status) == (0, 0)
    folder = Path(where.read_text().strip())
    assert folder != Path.cwd()
    assert not folder.parent.exists()


def test_jobs_do_not_see_each_others_folders() -> None:
    records: list[CommandRecord] = []

    async def run() -> None:
        with CommandRunner(20.0, records.append) as runner:
            await runner.run(make_job("echo x > mine", job_id="../a"), 0)
            await runner.run(make_job("test ! -e mine", job_id="b"), 0)

    asyncio.run(run())
    assert [record.exit_status for record in records] == [0, 0]


def test_nothing_of_the_clients_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run_all(f"env > {tmp_path}/env; cat; cat > {tmp_path}/input")
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "HOME", "TMPDIR", "LANG"}
    assert (tmp_path / "input").read_text() == ""


def test_time_is_limited_and_all_processes_end(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (record,) = run_all(f"sleep 100 & echo $! > {pids}; trap '' TERM; sleep 100", limit_s=0.5)
    assert (record.end, record.exit_status) == ("timeout", -signal.SIGKILL)
    assert has_ended(int(pids.read_text()))


def test_what_a_command_leaves_running_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (record,) = run_all(f"sleep 100 & echo $! > {pids}")
    assert (record.end, record.exit_status) == ("exited", 0)
    assert record.seconds < 50
    assert has_ended(int(pids.read_text()))


def has_ended(pid: int) -> bool:
    """Whether a process is dead; one that was killed may take a moment."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(200):
        # Dead, though nobody may have asked for its status yet.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_module, "MAX_OUTPUT_BYTES", 1000)
    (record,) = run_all("while true; do echo too much of this; sleep 0.001; done")
    assert record.end == "too much output"
    assert record.output_bytes > 1000


def test_output_without_end_fills_no_disk() -> None:
    (record,) = run_all("yes")
    assert record.end == "too much output"
    assert 0 < record.output_bytes - commands_module.MAX_OUTPUT_BYTES <= commands_module.PIECE_BYTES


def test_what_holds_the_output_open_holds_nobody_up() -> None:
    started_s = time.monotonic()
    first, second = run_all("setsid sleep 5 & echo x", "head -c 300000 /dev/zero")
    assert (first.end, first.output_bytes) == ("exited", 2)
    assert (second.end, second.output_bytes) == ("exited", 300_000)
    assert time.monotonic() - started_s < 4


def test_a_command_that_cannot_start() -> None:
    nul, gone, after = run_all("echo \0", "rm -rf $HOME", "echo x")
    assert (nul.end, nul.exit_status) == ("not started", None)
    assert gone.end == "exited"
    assert after.end == "not started"


def make_workload(*jobs: Job) -> Workload:
    return Workload("w", jobs)


def test_a_turn_waits_for_its_command_and_no_longer() -> None:
    turn_driver = TurnDriver(make_workload(make_job("x", job_id="a")), runs_commands=True)
    (first,) = turn_driver.start()
    assert first.at_s == 0
    assert turn_driver.on_sent("a", 0, 0.0) == []
    assert turn_driver.on_finished("a", 0, 1.0) == []
    (second,) = turn_driver.on_returned("a", 0, 1.5)
    assert (second.turn, second.at_s) == (1, 1.5)  # not the 9 s it once took
    assert turn_driver.on_finished("a", 1, 2.0) == []
    assert turn_driver.is_over()


def test_a_turn_without_a_command_sleeps() -> None:
    turns = (TurnSpec((Span("p", 1),), Span("o", 1), tool_s=9.0), TurnSpec((Span("p", 2),), Span("q", 1)))
    turn_driver = TurnDriver(make_workload(Job("a", 0.0, turns)), runs_commands=True)
    turn_driver.start()
    (second,) = turn_driver.on_finished("a", 0, 1.0)
    assert second.at_s == 10.0


def test_a_failed_turn_drops_what_waits_for_its_command() -> None:
    turn_driver = TurnDriver(make_workload(make_job("x", job_id="a")), runs_commands=True)
    turn_driver.start()
    assert turn_driver.on_failed("a", 0, 1.0) == []
    assert turn_driver.is_over()


def test_workloads_without_commands_are_refused() -> None:
    assert check_commands(make_workload(make_job("x", "y"))) == 2
    with pytest.raises(ConfigError, match="no turn of w has a command"):
        check_commands(make_workload(make_job()))
    with pytest.raises(ConfigError, match="use --loop closed"):
        check_commands(Workload("w", (make_job(),), "open"))


@pytest.fixture
def command_trace(trace: Path) -> Path:
    """The common trace; its first job calls commands."""
    rows = read_lines(trace)
    for row in rows:
        if row["session"] == "job0" and row["tool"]:
            row["command"] = "echo hello; sleep 0.3"
            row["tool"] = "sh"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return trace


def test_a_run_with_commands(bench: Callable[..., Ran], command_trace: Path) -> None:
    ran = bench(load=LoadOptions(workload=str(command_trace)), run_commands=True)
    assert ran.result["jobs"] == 3
    lines = read_lines(ran.folder / "commands.jsonl")
    assert [(line["job"], line["after_turn"], line["end"]) for line in lines] == [
        ("job0", 1, "exited"), ("job0", 2, "exited"),
    ]  # fmt: skip
    assert ran.client["commands"] == {"run": 2, "failed": 0, "exited": 2}
    before, after = ran.get_turn("job0", 1), ran.get_turn("job0", 2)
    assert after["due_s"] - before["last_token_s"] >= lines[0]["seconds"] >= 0.3


def test_commands_run_only_when_asked(bench: Callable[..., Ran], command_trace: Path) -> None:
    ran = bench(load=LoadOptions(workload=str(command_trace)))
    assert not (ran.folder / "commands.jsonl").exists()
    assert ran.client["commands"] == {"run": 0, "failed": 0}


def test_control_c_ends_commands(bench: Callable[..., Ran], command_trace: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    rows = read_lines(command_trace)
    for row in rows:
        if row.get("command"):
            row["command"] = f"echo $$ > {pids}; kill -INT {os.getpid()}; sleep 100"
    command_trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = bench(load=LoadOptions(workload=str(command_trace)), run_commands=True)
    assert ran.client["interrupted"]
    assert [line["end"] for line in read_lines(ran.folder / "commands.jsonl")] == ["cancelled"]
    assert has_ended(int(pids.read_text()))


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("inf"), float("nan")])
def test_the_limit_must_be_one(limit_s: float) -> None:
    with pytest.raises(ConfigError, match="--command-limit must be"):
        BenchOptions(urls=("http://h",), command_limit_s=limit_s)


def refuse_lengths(request: Request) -> Reply:
    """As a server would: what forces a format cannot also force a length."""
    is_forced = "structured_outputs" in request.body
    return Reply(status=400 if is_forced and "min_tokens" in request.body else 200, num_tokens=3)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("json", {"json_object": True}),
        ("regex:[a-z]+", {"regex": "[a-z]+"}),
        ("FILE", {"json": {"type": "object"}}),
    ],
)
def test_forced_formats(
    bench: Callable[..., Ran], tmp_path: Path, text: str, field: dict[str, object]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    ran = bench(FakeServer(refuse_lengths), force_format=str(schema) if text == "FILE" else text)
    asked = [request for request in ran.server.requests if "probe" not in request.session]
    assert all(request.body["structured_outputs"] == field for request in asked)
    assert all(not {"min_tokens", "ignore_eos"} & request.body.keys() for request in asked)
    assert all(request.body["max_tokens"] == 6 for request in asked)
    # Answers are shorter than planned, and prompts are as planned all the same.
    assert ran.client["complaints"] == {}
    assert ran.result["output_tokens"] == 9 * 3
    assert ran.client["answers"] == "workload"
    assert {number: turn["prompt_tokens"] for number, turn in ran.result["by_turn"].items()} == {
        "1": 70,
        "2": 126,
        "3": 182,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("regex:[", "is not a regular expression"),
        ("regex:", "is empty"),
        ("nowhere.json", "wants json, regex:PATTERN or a file"),
    ],
)
def test_formats_that_are_none(bench: Callable[..., Ran], text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench(force_format=text)


def test_a_schema_that_is_none(bench: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON schema"):
        bench(force_format=str(tmp_path / "list.json"))
