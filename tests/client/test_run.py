"""`tenuto bench` as a command: options, exit status, files, interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import parse as parse_command
from tenuto.client import bench as run_module
from tenuto.client import probe
from tenuto.client.address import ServerError
from tenuto.client.bench import run_bench
from tenuto.client.options import BenchOptions
from tenuto.core.errors import ConfigError
from tenuto.records.files import RunFiles
from tenuto.records.schema import RunRecord
from tenuto.workload.load import LoadOptions
from tests.client.conftest import Ran, read_lines
from tests.client.fake_server import FakeServer, Reply, Request, serving

pytestmark = pytest.mark.slow


def parse(*arguments: str) -> BenchOptions:
    return parse_command(["bench", *arguments])[1].read(BenchOptions)


def test_options_as_parsed() -> None:
    options = parse(
        *("--url", "http://h:1", "--workload", "bfcl", "--jps", "2", "--window", "9", "--seed", "3"),
        *(
            "--arrival",
            "gamma:2",
            "--scale-lengths",
            "0.4",
            "--scale-rate",
            "2",
            "--max-jobs",
            "5",
            "--timeout",
            "60",
        ),
        *("--retries", "1", "--hints", "tool", "--policy", "stock", "--gpu", "H200", "--out", "d", "--json"),
        *("--model", "m", "--api-key", "k", "--prompts", "words", "--answers", "workload", "--run-id", "r"),
    )
    load = LoadOptions(
        workload="bfcl",
        jps=2.0,
        window_s=9.0,
        seed=3,
        arrival="gamma:2",
        scale_lengths=0.4,
        scale_rate=2.0,
        max_jobs=5,
        hints="tool",
    )
    assert options == BenchOptions(
        urls=("http://h:1",), load=load, model="m", api_key="k", prompts="words", answers="workload",
        timeout_s=60.0, retries=1, run_id="r", policy="stock", gpu="H200", out=Path("d"), as_json=True,
    )  # fmt: skip
    plain = parse("--url", "http://h:1", "--users", "3", "--loop", "open")
    assert plain.load == LoadOptions(users=3, loop="open")
    assert plain == BenchOptions(
        urls=("http://h:1",), load=plain.load, api_key=os.environ.get("OPENAI_API_KEY")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "localhost:8000"], "--url must be an address"),
        (["--url", "http://"], "--url must be an address"),
        (["--url", "http://h:99999"], "--url must be an address"),
        (["--url", "http://h:80a"], "--url must be an address"),
        (["--url", "http://user:secret@h"], "--url must not hold a user or password, which results"),
        (["--url", "http://h", "--api-key", "a\nb"], "API key .* has characters not allowed"),
        (["--url", "http://h", "--timeout", "0"], "--timeout must be"),
        (["--url", "http://h", "--timeout", "inf"], "--timeout must be"),
        (["--url", "http://h", "--retries", "-1"], "--retries must be"),
        (["--url", "http://h", "--metrics-interval", "-1"], "--metrics-interval must be"),
        (["--url", "http://h", "--metrics-interval", "nan"], "--metrics-interval must be"),
    ],
)
def test_options_out_of_range(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(*arguments)


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for name in ("--url", "--workload", "--jps", "--users", "--loop", "--prompts", "--hints", "--out"):
        assert name in text


def test_a_whole_run(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    with serving(server) as url:
        where = ("--url", f"{url}/v1", "--workload", str(trace), "--out", str(tmp_path / "a"))
        also = ("--csv", str(tmp_path / "a.csv"), "--goodput", "e2el:60000")
        assert run_bench(parse(*where, *also, "--json", "--policy", "none", "--gpu", "G")) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert json.loads((tmp_path / "a" / "result.json").read_text()) == result
    names = [field.name for field in dataclasses.fields(RunRecord)]
    assert list(result) == ["kind", "schema", *(name for name in names if name != "fleet")]  # one server
    assert (result["policy"], result["gpu"], result["model"], result["jps"]) == ("none", "G", "fake", None)
    assert (result["simulated"], result["jobs"], result["seed"]) == (False, 3, 42)
    assert result["versions"]["server"] == "0.0.fake"
    assert result["stored_tokens"] is None
    assert 0 < result["makespan_s"] < result["wall_s"]
    assert len(read_lines(tmp_path / "a" / "turns.jsonl")) == 9
    assert "3 jobs of" in printed.err
    assert result["itl_s"]["min"] >= 0
    assert (result["goodput"]["turns"], result["goodput"]["share"]) == (9, 1.0)
    header, row = (tmp_path / "a.csv").read_text().splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["jobs"] == "3"


def test_a_run_in_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_one(request: Request) -> Reply:
        return Reply(status=500 if "job1" in request.session and len(request.prompt) == 126 else 200)

    with serving(FakeServer(fail_one)) as url:
        assert run_bench(parse("--url", url, "--workload", str(trace))) == 1
    text = capsys.readouterr().out
    assert "jobs         2 of 3 finished" in text
    assert "turns        7 of 9 ok, 1 failed, 1 not sent" in text
    assert "failed attempts: 1 × http 500: made-up 500" in text


def test_the_servers_metrics_are_followed(bench: Callable[..., Ran]) -> None:
    server = FakeServer()

    def preempt(request: Request) -> Reply:
        server.num_preemptions += "probe" not in request.session
        return Reply()

    server._behave = preempt
    ran = bench(server)
    assert ran.result["preemptions"] == 9
    assert ran.result["loaded_tokens"] is None
    assert ran.client["metrics_growth"]["vllm:prefix_cache_hits_total"] == ran.result["hit_tokens"]
    (sample,) = ran.samples
    assert sample["vllm:num_preemptions_total"] == 0
    assert sample["at_s"] < 1


def test_the_servers_metrics_may_be_left_alone(bench: Callable[..., Ran]) -> None:
    ran = bench(metrics_interval_s=0)
    assert ran.samples == []
    assert ran.client["metrics_growth"]["vllm:prefix_cache_hits_total"] == ran.result["hit_tokens"]


def test_control_c_keeps_what_there_is(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def interrupt(request: Request) -> Reply:
        if "job2" in request.session:
            os.kill(os.getpid(), signal.SIGINT)
            return Reply(fault="hang")
        return Reply(ttft_s=10.0 if len(request.prompt) == 182 else 0.0)

    with serving(FakeServer(interrupt)) as url:
        where = ("--url", url, "--workload", str(trace), "--out", str(tmp_path / "a"), "--json")
        assert run_bench(parse(*where)) == 130
    result = json.loads(capsys.readouterr().out)
    turns = read_lines(tmp_path / "a" / "turns.jsonl")
    assert result["client"]["interrupted"] is True
    assert result["turns"]["ok"] == sum(turn["status"] == "ok" for turn in turns) >= 1
    assert result["turns"]["cancelled"] == sum(turn["status"] == "cancelled" for turn in turns) >= 1
    assert result["turns"]["not_sent"] == 9 - len(turns)
    assert result["client"]["failed_attempts"] == {}
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_under_nohup_a_lost_terminal_does_not_matter(trace: Path) -> None:
    def hang_up(request: Request) -> Reply:
        os.kill(os.getpid(), signal.SIGHUP)
        return Reply()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving(FakeServer(hang_up)) as url:
            assert run_bench(parse("--url", url, "--workload", str(trace), "--json")) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_control_c_after_the_load_loses_nothing(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_signals: int,
) -> None:
    """The impatient press twice, or while the server's last counts are read."""
    monkeypatch.setattr(run_module, "SETTLE_S", 60.0)

    def interrupt(request: Request) -> Reply:
        if len(request.prompt) == 182 and num_signals == 2:
            os.kill(os.getpid(), signal.SIGINT)
            return Reply(fault="hang")
        if num_signals == 1 and len(server.requests) == 9:
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Reply()

    server = FakeServer(interrupt)
    give_page = server._get_page

    def give_late(path: str) -> str | None:
        if path == "/metrics" and num_signals == 2 and len(server.requests) > 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(1.0)
        return give_page(path)

    monkeypatch.setattr(server, "_get_page", give_late)
    started_s = time.monotonic()
    with serving(server) as url:
        out = ("--out", str(tmp_path / "a"), "--metrics-interval", "0", "--json")
        assert run_bench(parse("--url", url, "--workload", str(trace), *out)) == 130
    assert time.monotonic() - started_s < 30
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["client"]["metrics_growth"] is None
    assert result["client"]["interrupted"] is True
    assert result["turns"]["ok"] >= (9 if num_signals == 1 else 3)


@pytest.mark.parametrize("max_model_len", ["big", True, -1, 0])
def test_a_context_length_that_is_none_bounds_nothing(bench: Callable[..., Ran], max_model_len: Any) -> None:
    assert bench(FakeServer(max_model_len=max_model_len)).result["jobs"] == 3


def test_a_format_that_the_server_does_not_know_is_said_before_the_load(bench: Callable[..., Ran]) -> None:
    server = FakeServer(refuse("structured_outputs"))
    with pytest.raises(ServerError, match=r"http 400.*leave --force-format out"):
        bench(server, force_format="json")
    assert len(server.requests) == 1


def refuse(what: str) -> Callable[[Request], Reply]:
    return lambda request: Reply(status=400 if what in request.body else 200)


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (refuse("prompt"), "http 400: made-up 400; if it takes no token ids, try --prompts words"),
        (lambda request: Reply(status=500), "http 500: made-up 500"),
        (lambda request: Reply(fault="no event stream"), "malformed: .*It works!"),
        (
            lambda request: Reply(usage={"prompt_tokens": 200}),
            "counts 200 tokens in a prompt of 64 token ids",
        ),
    ],
)
def test_a_server_that_cannot_be_measured(
    bench: Callable[..., Ran], behave: Callable[[Request], Reply], words: str
) -> None:
    with pytest.raises(ServerError, match=words):
        bench(FakeServer(behave))


def test_a_server_that_refuses_ids_takes_words(bench: Callable[..., Ran]) -> None:
    assert bench(FakeServer(refuse("prompt")), prompts="words").result["jobs"] == 3


def test_the_probe_is_patient(bench: Callable[..., Ran]) -> None:
    replies = iter([Reply(status=503), Reply(fault="reset")])
    assert bench(FakeServer(lambda request: next(replies, Reply()))).client["failed_attempts"] == {}


def test_a_busy_server_is_asked_three_times_and_the_pauses_are_said(
    bench: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses_s: list[float | None] = []
    monkeypatch.setattr(probe, "get_pause_s", lambda attempt, after_s, seed: pauses_s.append(after_s) or 0.0)
    server = FakeServer(lambda request: Reply(status=503, headers={"Retry-After": "7"}))
    with pytest.raises(ServerError, match=r"did not answer a short request: http 503: made-up 503$"):
        bench(server)
    assert len(server.requests) == 3
    assert pauses_s == [7.0, 7.0], "none after the last"
    assert capsys.readouterr().err.count("made-up 503; it asks to wait") == 2


@pytest.mark.parametrize(("hints", "is_last"), [("tool", True), ("job", None)])
def test_the_probe_says_that_it_is_its_job_s_last_turn(
    bench: Callable[..., Ran], trace: Path, hints: str, is_last: bool | None
) -> None:
    """Else a server would lease its blocks, and might count that lease as one of the load's."""
    server = FakeServer()
    bench(server, LoadOptions(workload=str(trace), hints=hints))
    assert server.requests[0].body.get("vllm_xargs", {}).get("is_last_step") == is_last


def test_a_model_that_is_not_served(bench: Callable[..., Ran]) -> None:
    with pytest.raises(ServerError, match="no model 'other'; it serves fake"):
        bench(model="other")


def test_nobody_listens(trace: Path) -> None:
    with pytest.raises(ServerError, match=r"127.0.0.1:9 does not answer \(connect: .*is the server up"):
        run_bench(parse("--url", "http://127.0.0.1:9", "--workload", str(trace)))


def test_turns_longer_than_the_context(bench: Callable[..., Ran]) -> None:
    with pytest.raises(
        ConfigError, match=r"job 'job0' turn 3 has 188 tokens, the server takes 187; .*--scale-lengths"
    ):
        bench(FakeServer(max_model_len=187))
    assert bench(FakeServer(max_model_len=188)).result["jobs"] == 3


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFiles(tmp_path / "deep" / "a"):
            pass  # nothing was run: the folder is still free
    (tmp_path / "deep" / "a" / "turns.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds a run already"), RunFiles(tmp_path / "deep" / "a"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"), RunFiles(tmp_path / "file"):
        pass


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with RunFiles(tmp_path) as files:
        files.write_result({"job_s": 1})
        before = (tmp_path / "result.json").read_text()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # no room for more
        try:
            files.write_result({"job_s": list(range(1000))})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files.problem == "result.json: [Errno 27] File too large"
    assert (tmp_path / "result.json").read_text() == before


class FullDisk:
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


def test_a_full_disk_does_not_end_the_run(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Any] = []

    def fill(self: RunFiles) -> RunFiles:
        self._folder = tmp_path
        self._files = {"turns.jsonl": FullDisk()}  # type: ignore[dict-item]
        opened.append(self)
        return self

    monkeypatch.setattr(RunFiles, "__enter__", fill)
    with serving(FakeServer()) as url:
        assert run_bench(parse("--url", url, "--workload", str(trace), "--json")) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["jobs"] == 3
    assert "turns.jsonl: [Errno 28] No space left on device" in printed.err
    assert opened


def test_the_result_is_shown_before_a_table_that_cannot_be_written(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ("--csv", "/dev/full", "--json")
    with serving(FakeServer()) as url, pytest.raises(ConfigError, match="--csv: cannot write /dev/full"):
        run_bench(parse("--url", url, "--workload", str(trace), *full))
    assert json.loads(capsys.readouterr().out)["jobs"] == 3
