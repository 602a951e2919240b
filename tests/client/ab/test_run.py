"""`tenuto ab` as a command, against servers whose times are known."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.client import ab as run_module
from tenuto.client.ab import LocalServer, run_ab, run_server
from tenuto.client.ab_verdict import MEASURES
from tenuto.client.address import ServerError
from tenuto.client.http import Answer
from tenuto.client.options import AbOptions, Arm, BenchOptions
from tenuto.client.result import Flight, Outcome, Sending, make_result, make_turn_record
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.records.files import TURNS, RunFiles
from tenuto.report.html.sources import read_sources
from tenuto.wire.response import Usage
from tenuto.workload import Workload
from tenuto.workload.turn_driver import Due
from tests.client.ab.conftest import parse
from tests.client.conftest import read_lines
from tests.client.fake_server import FakeServer, Reply, Request, serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
QUICK = ("--repeats", "1", "--warmup-jobs", "0")


def read_verdict(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((folder / "ab" / "verdict.json").read_text())
    return verdict


def get_comparison(folder: Path, measure: str = "mean_job_s") -> dict[str, Any]:
    (found,) = [each for each in read_verdict(folder)["comparisons"] if each["measure"] == measure]
    return found


def name_arms(first: str, second: str) -> tuple[str, ...]:
    return ("--arm", f"a={first}", "--arm", f"b={second}")


SENDING = Sending(is_exact=False)


def measure_by_heart(slower: dict[str, float]) -> Callable[..., Any]:
    """In place of a load on a server: turns of about 2 s, by the arm's label so much slower; no clock."""

    async def measure(options: BenchOptions, workload: Workload, files: RunFiles) -> dict[str, Any]:
        rng = random.Random(f"{options.policy}/{options.load.seed}")
        records = []
        for job in workload.jobs:
            now_s = job.arrival_s
            for index, turn in enumerate(job.turns):
                first_s = now_s + 1.0 * slower.get(options.policy or "", 1.0) * rng.uniform(0.97, 1.03)
                last_s = first_s + 1.0 * slower.get(options.policy or "", 1.0)
                answer = Answer(first_s, last_s, (1,) * turn.num_output_tokens, "", Usage(1, 6, 0))
                before = job.turns[index - 1] if index else None
                flight = Flight(Due(job, index, now_s), before, now_s, [], answer)
                records.append(make_turn_record(flight, "ok", SENDING))
                files.add(TURNS, records[-1].to_json())
                now_s = last_s + turn.tool_s
        outcome = Outcome(workload=workload, records=records, sending=SENDING, growth=None)
        facts = {"gpu": None, "jps": None, "seed": options.load.seed, "wall_s": 1.0}
        return make_result(outcome, {}, model="m", policy=options.policy, **facts).to_json()

    return measure


def test_equal_arms_and_a_planted_slowdown(
    options: Callable[..., AbOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_module, "measure", measure_by_heart({"slow": 1.2, "fast": 0.8}))
    monkeypatch.setattr(run_module, "empty_cache", lambda url, api_key, engines=(): True)
    monkeypatch.setattr(run_module, "check_arm", lambda arm, api_key: None)
    arms = [word for name in ("a", "b", "slow", "fast") for word in ("--arm", f"{name}=http://h")]
    assert run_ab(options(*arms)) == 0
    found = {(each["arm"], each["measure"]): each for each in read_verdict(tmp_path)["comparisons"]}
    assert not any(found["b", measure.name]["differs"] for measure in MEASURES)
    # A job is three turns of 2 s, 20 % slower or faster, and two tools of 0.04 s.
    for arm, ratio in (("slow", (3 * 2.4 + 0.08) / 6.08), ("fast", (3 * 1.6 + 0.08) / 6.08)):
        assert all(found[arm, measure.name]["differs"] for measure in MEASURES)
        job, turn = found[arm, "mean_job_s"], found[arm, "mean_turn_s"]
        assert job["low"] < ratio < job["high"]
        assert turn["ratio"] == pytest.approx(1.2 if arm == "slow" else 0.8, abs=0.01)
    text = capsys.readouterr().out
    assert "6 of 6 pairs" in text
    assert "b against a: no difference in job time was seen." in text
    assert "slow against a: a is faster than slow." in text
    assert "fast against a: fast is faster than a." in text
    assert "Errors: none." in text


def test_runs_alternate_on_the_same_load(options: Callable[..., AbOptions], tmp_path: Path) -> None:
    seen: list[tuple[str, int, str]] = []

    def watch(name: str) -> Callable[[Request], Reply]:
        def behave(request: Request) -> Reply:
            seen.append((name, len(request.prompt), request.session))
            return Reply()

        return behave

    with serving(FakeServer(watch("a"))) as a, serving(FakeServer(watch("b"))) as b:
        assert run_ab(options(*name_arms(a, b), "--repeats", "2")) == 0
    order = list(dict.fromkeys((name, session.split("/")[0]) for name, _, session in seen))
    # A server's first run is preceded by a warm-up; no two runs share an id, and so no content.
    assert [name for name, _ in order] == ["a", "a", "b", "b", "b", "a"]
    assert len({run for _, run in order}) == 6
    lengths = [sorted(n for _, n, session in seen if session.split("/")[0] == run) for _, run in order]
    assert lengths[1] == lengths[3] == lengths[4] == lengths[5]
    rows = read_lines(tmp_path / "ab" / "results.jsonl")
    assert [(row["policy"], row["seed"], row["ab"]["repeat"]) for row in rows] == [
        ("a", 42, 1), ("b", 42, 1), ("b", 43, 2), ("a", 43, 2),
    ]  # fmt: skip


def test_the_first_line_says_how_many_runs_there_are_and_how_long_they_take(
    options: Callable[..., AbOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        run_ab(options(*name_arms(a, b), "--repeats", "2", "--warmup-jobs", "0"))
        first, *others = capsys.readouterr().err.splitlines()
        assert first == "[ab] runs to make: 4, of about 1 s or more each: 1 min or more"
        assert "[ab] repeat 1 of 2: b; about 1 min left" in others
        run_ab(options(*name_arms(a, b), "--repeats", "3", "--warmup-jobs", "0"))
        assert "[ab] runs to make: 2, of about" in capsys.readouterr().err
    sim = ("--arm", "a=sim:stock", "--arm", "b=sim:tenuto", "--model", "llama-3.1-8b")
    assert run_module.describe_length(options(*sim), 12).endswith(", and the starts of servers")


def test_the_report_reads_the_results(options: Callable[..., AbOptions], tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        run_ab(options(*name_arms(a, b), *QUICK))
    sources = read_sources([tmp_path / "ab" / "results.jsonl"])
    assert [run.policy for run in sources.runs] == ["a", "b"]
    assert len(read_sources([tmp_path / "ab"]).runs) == 2


def test_a_full_disk_hides_neither_the_verdict_nor_the_first_cause(
    options: Callable[..., AbOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fill(folder: object, name: str, values: object) -> None:
        folder.problem = f"{name}: full"  # type: ignore[attr-defined]

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "full")

    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        arms = (*name_arms(a, b), "--warmup-jobs", "0", "--repeats")
        run_ab(options(*arms, "1"))
        capsys.readouterr()
        monkeypatch.setattr(RunFiles, "add", fill)
        monkeypatch.setattr(run_module, "write_whole", refuse)
        with pytest.raises(ConfigError, match=r"002-b/turns\.jsonl: full; whole runs are kept, and the same"):
            run_ab(options(*arms, "2"))
    assert "b against a:" in capsys.readouterr().out


def test_caches_are_emptied_where_that_can_be(
    options: Callable[..., AbOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, unkind = FakeServer(), FakeServer()
    unkind.num_resets = None
    with serving(kind) as a, serving(unkind) as b:
        assert run_ab(options(*name_arms(a, b), *QUICK)) == 0
    assert kind.num_resets == 1
    assert "The prefix cache of b could not be emptied" in capsys.readouterr().out


def test_jobs_that_fail_on_one_arm_are_left_out_on_all(
    options: Callable[..., AbOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_one(request: Request) -> Reply:
        return Reply(status=500 if "job1" in request.session else 200)

    with serving(FakeServer()) as a, serving(FakeServer(fail_one)) as b:
        assert run_ab(options(*name_arms(a, b), *QUICK)) == 1
    (result, other) = read_lines(tmp_path / "ab" / "results.jsonl")
    durations_s = result["job_times_s"]
    assert list(other["job_times_s"]) == ["job0", "job2"]
    (value,) = get_comparison(tmp_path)["baseline_values"]
    assert value == pytest.approx((durations_s["job0"] + durations_s["job2"]) / 2)
    text = capsys.readouterr().out
    assert "Errors: b lost 3 of 9 turns (first: http 500: made-up 500)" in text


def test_turns_of_sub_agents_count(tmp_path: Path) -> None:
    """Also those of a sub-agent's own sub-agent."""
    end = {"session": "sub", "turn": 0, "event": "finished", "delay": 0}
    rows: list[dict[str, Any]] = [
        {"session": "main", "timestamp": 0, "tool": "task"},
        {"session": "sub", "timestamp": 10, "parent": "main"},
        {"session": "subsub", "timestamp": 20, "parent": "sub"},
        {"session": "main", "delay": 10, "after": [end]},
    ]
    trace = tmp_path / "family.jsonl"
    lengths = {"input_length": 64, "output_length": 2}
    trace.write_text("".join(json.dumps(row | lengths) + "\n" for row in rows))

    def delay(request: Request) -> Reply:
        return Reply(ttft_s=1.0 if "sub" in request.session else 0.0)

    with serving(FakeServer(delay)) as a, serving(FakeServer(delay)) as b:
        out = ("--workload", str(trace), "--out", str(tmp_path / "ab"))
        assert run_ab(parse(*out, *name_arms(a, b), *QUICK)) == 0
    turns = read_lines(tmp_path / "ab" / "runs" / "001-a" / "turns.jsonl")
    roots = {turn["job"]: turn.get("root") for turn in turns}
    assert roots == {"main": None, "sub": "main", "subsub": "main"}
    (mean_s,) = get_comparison(tmp_path, "mean_ttft_s")["values"]
    assert mean_s >= 0.5, "two of four turns took a second"


def test_nothing_in_common(
    options: Callable[..., AbOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: Request) -> Reply:
        return Reply(status=200 if "probe" in request.session else 500)

    with serving(FakeServer()) as a, serving(FakeServer(fail)) as b:
        assert run_ab(options(*name_arms(a, b), *QUICK)) == 1
    assert read_verdict(tmp_path)["comparisons"] == []
    printed = capsys.readouterr()
    assert "0 of 1 pair of runs" in printed.out
    assert "no job finished on all arms" in printed.err


@pytest.fixture
def terminal() -> Iterator[None]:
    """That a lost terminal ends this process, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_control_c_gives_the_verdict_so_far_and_the_rest_can_follow(
    options: Callable[..., AbOptions],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    has_struck = False

    def interrupt(request: Request) -> Reply:
        nonlocal has_struck
        if "002-b" in request.session and "job1" in request.session and not has_struck:
            has_struck = True
            os.kill(os.getpid(), number)
            return Reply(fault="hang")
        return Reply()

    with serving(FakeServer()) as a, serving(FakeServer(interrupt)) as b:
        chosen = options(*name_arms(a, b), "--repeats", "3", "--warmup-jobs", "0")
        assert run_ab(chosen) == 130
        assert read_verdict(tmp_path)["pairs"] == 1
        assert "1 of 3 pairs of runs" in capsys.readouterr().out
        ours = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        assert ours == handlers
        assert run_ab(chosen) == 0
    assert "2 of 6 runs done already" in capsys.readouterr().err
    assert read_verdict(tmp_path)["pairs"] == 3
    assert (tmp_path / "ab" / "cut" / "002-b-1" / "turns.jsonl").exists()


def test_more_repeats_can_be_added(options: Callable[..., AbOptions], tmp_path: Path) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        run_ab(options(*name_arms(a, b), *QUICK))
        run_ab(options(*name_arms(a, b), *QUICK, "--repeats", "2"))
        assert read_verdict(tmp_path)["pairs"] == 2
        with pytest.raises(ConfigError, match="another hints"):
            run_ab(options(*name_arms(a, b), *QUICK, "--hints", "job"))


def test_the_verdict_as_json(
    options: Callable[..., AbOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        run_ab(options(*name_arms(a, b), *QUICK, "--json"))
    assert json.loads(capsys.readouterr().out) == read_verdict(tmp_path)


def get_free_port() -> int:
    """A port that is free, and so is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def replace_servers(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """Let a command of ours stand in for vLLM; PORT in it is the port."""

    def make(arm: Arm, model: str, port: int, serve_args: object) -> list[str]:
        return [word.replace("PORT", str(port)) for word in command]

    monkeypatch.setattr(run_module, "make_command", make)
    monkeypatch.chdir(ROOT)


FAKE = (sys.executable, "-m", "tests.client.fake_server", "--port", "PORT")
LOCAL = ("--arm", "a=vllm", "--arm", "b=policy:stock", "--model", "m")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ((), "a-1 a-2 b-1 b-2"),
        (("--keep-up",), "a-1 b-1"),
        (("--runs-per-start", "2"), "a-1 b-1"),
        # A A B B, B B A A: b's server serves both blocks.
        (("--runs-per-start", "2", "--repeats", "4"), "a-1 a-2 b-1"),
    ],
)
def test_servers_are_started_and_stopped(
    options: Callable[..., AbOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    wanted: str,
) -> None:
    replace_servers(monkeypatch, *FAKE)
    started: list[LocalServer] = []

    @contextmanager
    def watch(*arguments: Any, **options: Any) -> Iterator[LocalServer]:
        with run_server(*arguments, **options) as server:
            started.append(server)
            yield server

    monkeypatch.setattr(run_module, "run_server", watch)
    port = get_free_port()
    assert run_ab(options(*LOCAL, *QUICK, "--repeats", "2", "--port", str(port), *more)) == 0
    logs = sorted(path.stem for path in (tmp_path / "ab" / "logs").iterdir())
    assert logs == wanted.split()
    assert len(started) == len(logs)
    assert all(server.process.poll() is not None for server in started)


def test_no_proxy_of_the_environment_stands_between(
    options: Callable[..., AbOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    replace_servers(monkeypatch, *FAKE)
    server = FakeServer()
    with serving(server) as url:
        arms = name_arms("vllm", url)
        start = ("--port", str(get_free_port()), "--start-limit", "20")
        assert run_ab(options(*arms, *QUICK, *start, "--model", "fake")) == 0
    assert server.num_resets == 1


def test_a_server_that_does_not_start(
    options: Callable[..., AbOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_servers(monkeypatch, sys.executable, "-c", "print('no GPU found'); raise SystemExit(3)")
    with pytest.raises(ServerError, match=r"--arm a: .* status 3:\nno GPU found\nThe whole log: .*a-1.log"):
        run_ab(options(*LOCAL, *QUICK, "--port", str(get_free_port())))


def test_a_server_that_hangs_at_its_start(
    options: Callable[..., AbOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_servers(monkeypatch, sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(ServerError, match="not up after 1 s"):
        run_ab(options(*LOCAL, *QUICK, "--port", str(get_free_port()), "--start-limit", "1"))


def test_no_such_command(options: Callable[..., AbOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    replace_servers(monkeypatch, "/nowhere/vllm")
    with pytest.raises(Exception, match=r"pip install 'tenuto\[vllm\]'"):
        run_ab(options(*LOCAL, *QUICK, "--port", str(get_free_port())))


def test_a_port_that_is_taken(options: Callable[..., AbOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    replace_servers(monkeypatch, *FAKE)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is not free"):
            run_ab(options(*LOCAL, *QUICK, "--port", str(port)))


def test_a_server_that_dies_in_a_run(
    options: Callable[..., AbOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_servers(monkeypatch, *FAKE, "--num-answers", "5")
    with pytest.raises(ServerError, match=r"died with status 1; its log: .*a-1\.log"):
        run_ab(options(*LOCAL, *QUICK, "--port", str(get_free_port())))
    # What it answered is there, but not as a run.
    assert len(read_lines(tmp_path / "ab" / "runs" / "001-a" / "turns.jsonl")) > 0
    assert not (tmp_path / "ab" / "runs" / "001-a" / "result.json").exists()


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_managers_farewell_and_a_lost_terminal_stop_the_server_too(
    options: Callable[..., AbOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    pid = tmp_path / "pid"
    replace_servers(
        monkeypatch,
        *(sys.executable, "-c"),
        f"import os, signal, time; open({str(pid)!r}, 'w').write(str(os.getpid()));"
        f"time.sleep(0.5); os.kill(os.getppid(), {number.value}); time.sleep(60)",
    )
    assert run_ab(options(*LOCAL, *QUICK, "--port", str(get_free_port()))) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_full_disk_leaves_no_half_of_a_run(
    options: Callable[..., AbOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RunFiles, name: str, values: object) -> None:
        self.problem = "turns.jsonl: no space left on device"

    monkeypatch.setattr(RunFiles, "add", fail)
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        with pytest.raises(ConfigError, match="no space left on device"):
            run_ab(options(*name_arms(a, b), *QUICK))
        assert not (tmp_path / "ab" / "runs" / "001-a" / "result.json").exists()
        monkeypatch.undo()
        assert run_ab(options(*name_arms(a, b), *QUICK)) == 0


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("http://127.0.0.1:9", r"--arm b: no answer from http://127.0.0.1:9/.*is the server up"),
        ("sim:nobody", "--arm b: no policy 'nobody'; choose one of"),
        ("policy:continuum-fixed,ttl=3", "--arm b: .*'ttl'"),
    ],
)
def test_an_arm_that_cannot_run_is_found_before_any_load(
    options: Callable[..., AbOptions], tmp_path: Path, what: str, words: str
) -> None:
    server = FakeServer()
    with serving(server) as url, pytest.raises(TenutoError, match=words):
        run_ab(options(*name_arms(url, what), *QUICK, "--model", "fake"))
    assert server.requests == []
    assert not (tmp_path / "ab").exists()


def test_a_server_that_names_no_models_can_be_an_arm(
    options: Callable[..., AbOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    give_page = server._get_page
    monkeypatch.setattr(server, "_get_page", lambda path: None if "models" in path else give_page(path))
    with serving(server) as url:
        assert run_ab(options(*name_arms(url, url), *QUICK, "--model", "fake")) == 0


@pytest.mark.slow
def test_simulated_servers_have_the_gpu_that_is_named_and_the_verdict_says_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ab"
    arms = ("--arm", "a=sim:stock", "--arm", "b=sim:tenuto", "--model", "llama-3.1-8b", "--gpu", "L40S")
    load = ("--workload", "requests", "--max-jobs", "2", "--jps", "20", "--scale-lengths", "0.01")
    assert main(["ab", *arms, *load, "--repeats", "1", "--warmup-jobs", "0", "--out", str(out)]) in (0, 1, 3)
    assert "Simulated: the servers computed nothing" in capsys.readouterr().out
    logs = [path.read_text() for path in (out / "logs").iterdir()]
    assert logs and all("simulated L40S" in text for text in logs)
