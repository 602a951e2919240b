"""`tenuto record` and `tenuto replay` as commands: signals, disks, and the same lengths again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.cli import main
from tenuto.workload import load_workload
from tests.client.fake_server import FakeServer, Reply, Request

pytestmark = pytest.mark.slow

MEASURED = (0, 3)
"""Exit statuses of a bench with all answers; 3: this machine was too busy for good figures."""
CHAT = {"model": "fake", "prompt": [1, 2, 3] * 20, "max_tokens": 4, "stream": True}


@contextmanager
def fake_server(server: FakeServer) -> Iterator[str]:
    """The server on a thread of its own; its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def recorder(url: str, out: Path | str, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and where it listens."""
    command = [
        sys.executable,
        "-m",
        "tenuto.cli",
        "record",
        "--url",
        url,
        "--out",
        str(out),
        "--port",
        "0",
        *more,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        while " passes to " not in first:
            assert first, "the command ended at once"
            first = process.stderr.readline()
        yield process, first.split()[1]
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def ask(url: str, session: str = "s") -> int:
    content = json.dumps(CHAT).encode()
    answer = httpx.post(
        f"{url}/v1/completions", content=content, headers={"X-Session-ID": session}, verify=False
    )
    return answer.status_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_recording_whole(tmp_path: Path, number: int) -> None:
    out = tmp_path / "deep" / "trace.jsonl"
    with fake_server(FakeServer()) as server, recorder(server, out) as (process, url):
        assert [ask(url) for _ in range(3)] == [200, 200, 200]
        status, said = end(process, number)
    assert status == 0
    assert "3 turns in" in said
    (job,) = load_workload(out).jobs
    assert [turn.num_prompt_tokens for turn in job.turns] == [60, 60, 60]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_cuts_answers_and_still_writes_their_lines(tmp_path: Path, number: int) -> None:
    out = tmp_path / "trace.jsonl"
    with (
        fake_server(FakeServer(lambda request: Reply(fault="hang midway"))) as server,
        recorder(server, out) as (process, url),
        httpx.Client(headers={"X-Session-ID": "s"}, verify=False, timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=CHAT) as answer,
    ):
        pieces = answer.iter_raw()
        next(pieces)
        process.send_signal(number)
        assert process.stderr is not None
        # It stops listening before it waits for the answer.
        address = httpx.URL(url)
        while True:
            try:
                socket.create_connection((address.host, address.port or 80)).close()
            except ConnectionError:
                break
        status, said = end(process, number)
        with pytest.raises(httpx.TransportError):
            list(pieces)
    assert status == 0
    assert "Traceback" not in said
    assert "answers under way were cut" in said
    _, failed = map(json.loads, out.read_text().splitlines())
    assert failed["why"] == "recording ended"


def test_the_address_that_it_prints_is_one_that_clients_take(tmp_path: Path) -> None:
    """That of IPv6 has brackets."""
    with (
        fake_server(FakeServer()) as server,
        recorder(server, tmp_path / "trace.jsonl", "--host", "::1") as (process, url),
    ):
        assert ask(url) == 200
        assert end(process)[0] == 0


def test_a_killed_recorder_leaves_whole_lines(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with fake_server(FakeServer()) as server, recorder(server, out) as (process, url):
        for _ in range(5):
            ask(url)
        while out.read_text().count("\n") < 5:
            pass
        process.kill()
        process.wait()
    assert out.read_text().endswith("\n")
    assert len(load_workload(out).jobs[0].turns) >= 4


def test_a_full_disk_ends_the_recording_and_no_traffic() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full to stand for a full disk")
    with fake_server(FakeServer()) as server, recorder(server, "/dev/full") as (process, url):
        assert [ask(url) for _ in range(3)] == [200, 200, 200]
        status, said = end(process)
    assert status == 1
    assert "0 turns in" in said
    assert "4 lost" in said


def test_a_full_disk_is_told_of_once(recording: Any) -> None:
    async def run() -> Any:
        async with recording("http://127.0.0.1:9", out=Path("/dev/full")) as record:
            pass
        return record

    (said,) = asyncio.run(run()).said
    assert "No space left on device; traffic goes on" in said


def test_a_recording_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.jsonl"
    out.write_text("precious\n")
    assert main(["record", "--url", "http://127.0.0.1:9", "--out", str(out)]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert out.read_text() == "precious\n"
    assert main(["record", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "trace.jsonl" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(FakeServer()) as server:
        port = server.rpartition(":")[2]
        out = str(tmp_path / "t.jsonl")
        arguments = ["record", "--url", "http://127.0.0.1:9", "--out", out, "--port", port]
        assert main(arguments) == 2
    assert "cannot listen" in capsys.readouterr().err
    # The same command with a free port does not need another name for the recording.
    assert (tmp_path / "t.jsonl").read_text() == ""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_recorder_that_would_ask_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """While the server is down, its port is free: the recorder would take it, and pass requests to itself."""
    arguments = ["record", "--url", f"http://{host}:8001/v1", "--out", str(tmp_path / "t.jsonl")]
    assert main(arguments) == 2
    assert "--port 8001 is the server's own; choose another" in capsys.readouterr().err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two jobs of three turns that share a system prompt."""
    rows = []
    for n in range(2):
        spans: list[list[Any]] = [["system", 48], [f"task{n}", 31 + n]]
        for turn in range(3):
            row = {
                "session": f"job{n}",
                "input_length": sum(length for _, length in spans),
                "output_length": 24 + turn,
                "prompt": list(spans),
                "output": f"out{n}/{turn}",
                "timestamp": 50 * n + 100 * turn,
            }
            rows.append(row | ({"delay": 30} if turn else {}))
            spans += [[f"out{n}/{turn}", 24 + turn], [f"tool{n}/{turn}", 40]]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def get_lengths(server: FakeServer) -> dict[str, list[int]]:
    """Prompt lengths by job, the runs' own marks taken off, without the client's probe."""
    lengths: dict[str, list[int]] = {}
    for request in server.requests:
        job = request.session.rpartition("/")[2]
        if job != "probe":
            lengths.setdefault(job, []).append(len(request.prompt))
    return lengths


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_replay_has_the_recorded_lengths(tmp_path: Path, trace: Path, loop: str, capsys: Any) -> None:
    """bench → record → replay: what the server is asked is of the same lengths, turn by turn."""
    out = tmp_path / "recorded.jsonl"
    first, second = FakeServer(), FakeServer()
    with fake_server(first) as server, recorder(server, out) as (process, url):
        assert main(["bench", "--url", url, "--workload", str(trace), "--run-id", "r"]) in MEASURED
        assert end(process)[0] == 0
    with fake_server(second) as server:
        assert main(["replay", str(out), "--url", server, "--run-id", "again", "--loop", loop]) in MEASURED
    capsys.readouterr()
    wanted = get_lengths(first)
    assert wanted == {"job0": [79, 143, 208], "job1": [80, 144, 209]}
    assert get_lengths(second) == wanted
    recorded = {job.job_id: job for job in load_workload(out).jobs}
    assert {len(job.turns) for name, job in recorded.items() if not name.endswith("probe")} == {3}
    for turn in recorded["r/job1"].turns[1:]:
        assert turn.prompt[-2].content_id.startswith("out")  # it quotes the answer before


def test_replays_hit_what_the_recorded_run_hit(tmp_path: Path, trace: Path, capsys: Any) -> None:
    """With the answers known by their ids, a replay repeats what the first run repeated, to the block."""
    out = tmp_path / "recorded.jsonl"
    first, second = FakeServer(), FakeServer()
    with fake_server(first) as server, recorder(server, out) as (process, url):
        assert main(["bench", "--url", url, "--workload", str(trace), "--run-id", "r"]) in MEASURED
        assert end(process)[0] == 0
    with fake_server(second) as server:
        assert main(["replay", str(out), "--url", server, "--run-id", "again"]) in MEASURED
    capsys.readouterr()
    assert second._num_hit_tokens == first._num_hit_tokens > 0


def test_a_replay_wants_a_server_or_decisions(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace)]) == 2
    assert "--url" in capsys.readouterr().err


def test_a_recording_of_failures_alone_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recorded.jsonl"

    def refuse(request: Request) -> Any:
        return Reply(status=429)

    with fake_server(FakeServer(refuse)) as server, recorder(server, out) as (process, url):
        assert ask(url) == 429
        assert end(process)[0] == 0
    assert main(["replay", str(out), "--url", "http://127.0.0.1:9"]) == 2
    assert "has a recording's notes, but no turn" in capsys.readouterr().err
