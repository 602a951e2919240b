"""The view: one picture, lines for a log, JSON, a server that goes and comes back."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from typing import Any

import httpx
import pytest
from rich.console import Console

from tenuto.cli import main
from tenuto.cli.live import TopOptions
from tenuto.client.metrics import connect, parse_page
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.report import top
from tenuto.report.top import Watch, Window, make_line, make_screen, make_spark, make_state, watch
from tests.report.top.conftest import FakeMetrics, FakeServer


def make_busy_state(metrics: FakeMetrics, *, has_canary: bool = False) -> dict[str, Any]:
    """Large numbers everywhere: what could break the layout."""
    window = Window(60)
    window.add(parse_page(metrics.text(), 0.0))
    if has_canary:
        metrics.add_group("policy", 4, 1000, 800)
    for engine in metrics.engines:
        metrics.of("vllm:num_requests_running", engine).set(1024)
        metrics.of("vllm:num_requests_waiting", engine).set(123456)
        metrics.of("vllm:kv_cache_usage_perc", engine).set(0.669)
        for name in ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prefix_cache_queries"):
            metrics.of(name, engine).inc(1e9)
        metrics.of("vllm:prefix_cache_hits", engine).inc(9e8)
        metrics.of("vllm:time_to_first_token_seconds", engine).observe(9)
        if "tenuto:retained_blocks" in metrics.text():
            metrics.of("tenuto:retained_blocks", engine).set(33)
            metrics.of("tenuto:idle_retained_blocks", engine).set(33)
            metrics.of("tenuto:recomputed_tokens", engine).inc(1e9)
            metrics.of("tenuto:tool_time_seconds", engine).observe(5)
            metrics.of("tenuto:next_lease_deadline_timestamp_seconds", engine).set(599)
            for why in ("hit", "expired", "revoked", "superseded", "replaced", "job-ended", "reset"):
                metrics.ended.labels("tiny", engine, why).inc(1e5)
            metrics.of("tenuto:oldest_waiting_timestamp_seconds", engine).set(1e-9)
            metrics.of("tenuto:overdue_turns", engine).inc(2e5)
            metrics.refused.labels("tiny", engine, "tenant-leases").inc(3e5)
            metrics.reclaims.labels("tiny", engine, "fair-share").inc(2e5)
            metrics.reclaims.labels("tiny", engine, "overdue-turn").inc(1e5)
            metrics.of("tenuto:active_tenants", engine).set(3)
            metrics.of("tenuto:largest_tenant_share", engine).set(0.9)
            for tenant, count in (("key-0123456789abcdef", 27), ("(others)", 3)):
                metrics.tenants.labels("tiny", engine, tenant).set(count)
    window.add(parse_page(metrics.text(), 2.0))
    return make_state(window, {"url": "http://localhost:8000", "vllm": "0.32.0"})


def render(state: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    earlier = [
        {**state, "requests": {"running": running}, "leases": {"blocks": 0.0}, "hits": {"ratio": 0.5}}
        for running in [1, 2, None, 4]
    ]
    console.print(make_screen([*earlier, state]))
    return console.export_text()


@pytest.mark.parametrize("engines", [1, 12])
@pytest.mark.parametrize("has_tenuto", [True, False])
def test_the_picture_fits_a_terminal(engines: int, *, has_tenuto: bool) -> None:
    lines = render(make_busy_state(FakeMetrics(engines, has_tenuto=has_tenuto))).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= (36 if engines > 1 else 24)
    text = "\n".join(lines)
    assert "KV cache" in text
    assert ("next ends in" in text) == has_tenuto
    assert ("without Tenuto's scheduler" in text) == (not has_tenuto)


def test_the_picture_says_what_is_there() -> None:
    metrics = FakeMetrics()
    state = make_busy_state(metrics)
    text = render(state)
    for words in (
        "vLLM 0.32.0 · Tenuto 0.1.0 · policy continuum-fixed · tiny",
        "1,024 running, 123,456 waiting",
        "running 67% leased 33% free 0%",
        "next ends in 597.0 s",
        "90% of prompt tokens",
        "the longest for 2.0 s",
        "150000.0/s not granted: its tenant has limits.max_tenant_leases already",
        "100000.0/s taken back: its tenant used more than its fair share",
        "3 active; leased: key-0123456789abcdef 90%, (others) 10%",
    ):
        assert words in " ".join(text.split())
    bar = next(line for line in text.splitlines() if line.startswith("KV cache"))
    assert (bar.count("█"), bar.count("▓"), bar.count("░")) == (27, 13, 0)
    assert "leases 0 blocks 33" in make_line(state)


def test_a_simulated_server_is_called_that() -> None:
    state = make_busy_state(FakeMetrics())
    state["server"]["vllm"] = "tenuto-0.1.0-sim"
    assert "\nsimulated server · Tenuto 0.1.0 · policy" in render(state)


def test_names_in_brackets_are_text() -> None:
    metrics = FakeMetrics(2)
    window = Window(60)
    window.add(parse_page(metrics.text(), 0.0))
    metrics.ended.labels("tiny", "0", "[/b]").inc(4)
    window.add(parse_page(metrics.text(), 2.0))
    state = make_state(window, {"url": "http://[fd00::1]:8000", "vllm": "0.32.0"})
    # As they are named if there are several servers.
    for engine, name in zip(state["engines"], ("[fd00::1]:8000/0", "[fd00::2]:8000/0"), strict=True):
        engine["engine"] = name
    text = render(state)
    for words in ("http://[fd00::1]:8000\n", "[fd00::1]:8000/0", "[fd00::2]:8000/0", "ended: [/b] 2.0/s"):
        assert words in text


def test_the_picture_shows_the_mode_and_a_canary() -> None:
    metrics = FakeMetrics()
    metrics.mode.labels("tiny", "0", "on").set(0)
    metrics.mode.labels("tiny", "0", "shadow").set(1)
    state = make_busy_state(metrics, has_canary=True)
    text = render(state)
    assert "policy continuum-fixed (SHADOW)" in text
    assert "would hold" in text
    assert "canary" in text
    assert max(map(len, text.splitlines())) <= 80
    assert make_line(state).endswith("mode shadow")


def test_the_picture_shows_what_became_of_wishes_if_there_were_any() -> None:
    metrics = FakeMetrics()
    assert "wishes" not in render(make_busy_state(metrics))
    for result, number in (("accepted", 3), ("clipped", 4), ("refused", 0)):
        metrics.wishes.labels("tiny", "0", "openai", result).inc(number)
        metrics.wishes.labels("tiny", "0", "nvext", result).inc(number)
    metrics.malformed.labels("tiny", "0", "openai").inc(2)
    text = " ".join(render(make_busy_state(metrics)).split())
    assert "wishes 6 accepted, 8 clipped, 2 malformed" in text


@pytest.mark.parametrize("bounds", [["+Inf"], ["1.0"], ["-Inf", "+Inf"]])
def test_tool_times_with_hardly_any_bucket(bounds: list[str]) -> None:
    gauge = 'vllm:num_requests_running{engine="0"} 1\ntenuto:info{policy="p",version="1"} 1\n'
    lines = [f'tenuto:tool_time_seconds_bucket{{le="{bound}"}} 5\n' for bound in bounds]
    window = Window(60)
    window.add(parse_page(gauge, 0.0))
    window.add(parse_page(gauge + "".join(lines), 2.0))
    assert "tools" in render(make_state(window, {"url": "u", "vllm": None}))


def test_sparks() -> None:
    assert make_spark([0, 1, 2, None, 4]) == "▁▂▄ █"
    assert make_spark([0.5, 2.0], highest=1.0) == "▄█"
    assert make_spark([None, 0]) == " ▁"
    assert len(make_spark([1.0] * 500)) == 30


# The command.


def test_once(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", server.url, "--once", "--interval", "0.1"]) == 0
    assert "policy continuum-fixed" in capsys.readouterr().out
    assert main(["top", "--url", server.url + "/", "--once", "--interval", "0.1", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["server"]["vllm"] == "0.32.0"
    assert state["window_s"] > 0


def test_once_without_a_server(server: FakeServer) -> None:
    with pytest.raises(TenutoError, match="no answer from"):
        watch(["http://127.0.0.1:1"], once=True)
    with pytest.raises(TenutoError, match=r"from http://127[.]0[.]0[.]1:1/a, http://127[.]0[.]0[.]1:1/b: "):
        watch(["http://127.0.0.1:1/a", "http://127.0.0.1:1/b"], once=True)
    server.metrics.status = 503
    with pytest.raises(TenutoError, match="status 503"):
        watch([server.url], once=True)
    server.metrics.status, server.body = 200, "hello 1\n"
    with pytest.raises(TenutoError, match="is this a vLLM server"):
        watch([server.url], once=True)


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_times_of_a_server_whose_clock_differs(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ahead_s: float
) -> None:
    server.metrics.of("tenuto:oldest_waiting_timestamp_seconds").set(time.time() - 30)
    server.metrics.of("tenuto:next_lease_deadline_timestamp_seconds").set(time.time() + 60)
    clock = _Clock(time.sleep)
    clock.time = lambda: time.time() + ahead_s  # type: ignore[attr-defined]
    monkeypatch.setattr(top, "time", clock)
    assert main(["top", "--url", server.url, "--once", "--interval", "0.1", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["requests"]["longest_wait_s"] == pytest.approx(30, abs=5)
    assert state["leases"]["next_deadline_in_s"] == pytest.approx(60, abs=5)


def stop_after(monkeypatch: pytest.MonkeyPatch, looks: int, before: Callable[[int], None]) -> None:
    """Ctrl-C after that many looks; `before` each pause it may change the world."""
    pauses = iter(range(1, looks + 1))

    def sleep(seconds: float) -> None:
        number = next(pauses)
        if number == looks:
            raise KeyboardInterrupt
        before(number)

    monkeypatch.setattr(top, "time", _Clock(sleep))


class _Clock:
    """The time module, with another sleep."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_a_server_that_goes_and_comes_back(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(number: int) -> None:
        server.metrics.status = 503 if number == 1 else 200

    stop_after(monkeypatch, 3, change)
    out = io.StringIO()
    with redirect_stdout(out):
        assert watch([server.url]) == 0
    lines = out.getvalue().splitlines()
    assert "running 0 waiting 0" in lines[0]
    assert lines[1].endswith("/metrics answers with status 503 (trying again)")
    assert "running 0 waiting 0" in lines[2]


def test_json_lines(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(number: int) -> None:
        server.metrics.status = 500

    stop_after(monkeypatch, 2, change)
    out = io.StringIO()
    with redirect_stdout(out):
        watch([server.url], as_json=True)
    states = [json.loads(line) for line in out.getvalue().splitlines()]
    assert "requests" in states[0]
    assert "status 500" in states[1]["problem"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_picture_and_its_trouble(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(number: int) -> None:
        server.metrics.status = 500

    monkeypatch.setenv("TERM", "xterm-256color")
    stop_after(monkeypatch, 2, change)
    out = _Terminal()
    with redirect_stdout(out):
        watch([server.url])
    first, _, rest = out.getvalue().partition("status 500")
    assert "KV cache" in first and "trying again" not in first
    # The last picture stays, marked with its age.
    assert re.search(r"This is .*s old; trying again", rest)
    assert "KV cache" in rest


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stop_after(monkeypatch, 2, lambda number: None)
    out = _Terminal()
    with redirect_stdout(out):
        watch([server.url])
    assert out.getvalue().count("running 0 waiting 0") == 2


@pytest.mark.slow
def test_while_a_busy_server_lets_a_look_wait_the_last_picture_stays(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(number: int) -> None:
        server.delay_s = 1.0 if number == 1 else 0.0

    monkeypatch.setenv("TERM", "xterm-256color")
    stop_after(monkeypatch, 3, change)
    out = _Terminal()
    with redirect_stdout(out):
        watch([server.url], interval_s=0.3)
    first, _, rest = out.getvalue().partition(f"no answer from {server.url} for")
    assert "KV cache" in first
    assert re.search(r"This is .*s old; trying again", rest)
    assert rest.count("KV cache") >= 2, "the picture while it waits, and the next one"
    assert "old" not in rest[rest.rindex("requests") :], "it answered in the end"


def test_several_servers_are_one_picture(server: FakeServer) -> None:
    with closing(FakeServer(FakeMetrics())) as other:
        out = io.StringIO()
        with redirect_stdout(out):
            watch([server.url, other.url], once=True, as_json=True, interval_s=0.1)
    both = json.loads(out.getvalue())
    out = io.StringIO()
    with redirect_stdout(out):
        watch([server.url, other.url], once=True, as_json=True, interval_s=0.1)
    one = json.loads(out.getvalue())
    assert both["cache"]["blocks"] == 2 * one["cache"]["blocks"] > 0
    names = [engine["engine"] for engine in both["engines"]]
    assert names == sorted(f"{each.url.removeprefix('http://')}/0" for each in (server, other))
    assert "(no answer)" in one["server"]["url"]


def test_a_router_s_engines_join_and_leave(server: FakeServer) -> None:
    """While the router gives no list, its engines are those that it named last."""

    def see() -> list[str]:
        return watched.look()["server"]["url"].split(", ")

    with closing(FakeServer(FakeMetrics())) as first, closing(FakeServer(FakeMetrics())) as second:
        server.engines = [first.url]
        with closing(connect(server.url, None)) as client:
            watched = Watch([client], "router", 60)
            assert see() == [first.url]
            server.engines = [first.url, second.url]
            assert see() == [first.url, second.url]
            server.engines = []
            assert see() == [first.url, second.url]
            server.engines = [second.url]
            assert see() == [second.url]


def test_a_server_without_metrics_is_left_out(server: FakeServer) -> None:
    with closing(FakeServer(FakeMetrics())) as other:
        other.body = "<html>It works!</html>"
        with closing(connect(server.url, None)) as first, closing(connect(other.url, None)) as second:
            state = Watch([first, second], "both", 60).look()
    assert [each["engine"] for each in state["engines"]] == [f"{server.url.removeprefix('http://')}/0"]


def test_servers_are_asked_at_the_same_time(metrics: FakeMetrics) -> None:
    both = threading.Barrier(2)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            both.wait(timeout=10)
        return httpx.Response(200, text=metrics.text())

    clients = [
        httpx.Client(base_url=f"http://{name}", transport=httpx.MockTransport(answer)) for name in "ab"
    ]
    assert len(Watch(clients, "both", 60).look()["engines"]) == 2


def test_one_that_hangs_is_named_and_the_others_do_not_wait_for_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "OTHERS_WAIT_S", 0.2)
    with closing(FakeServer(FakeMetrics())) as other:
        urls = [server.url, other.url]
        with closing(connect(server.url, None)) as first, closing(connect(other.url, None)) as second:
            watched = Watch([first, second], "both", 60)
            assert "no answer" not in make_line(watched.look())
            other.delay_s = 2.0
            began_s = time.monotonic()
            state = watched.look()
            assert time.monotonic() - began_s < 1.5
        assert make_line(state).endswith(f"no answer from {other.url}")
        server.engines = urls
        with closing(connect(server.url, None)) as client:
            began_s = time.monotonic()
            assert Watch([client], "router", 60).look()["server"]["no_answer"] == [other.url]
            assert time.monotonic() - began_s < 1.5


def test_what_nobody_expects_is_told_as_it_is(metrics: FakeMetrics) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise RuntimeError("nobody expects this")

    client = httpx.Client(base_url="http://a", transport=httpx.MockTransport(fail))
    with pytest.raises(RuntimeError, match="nobody expects this"):
        Watch([client], "one", 60).look()


def test_servers_of_one_host_differ_by_their_paths(server: FakeServer) -> None:
    with (
        closing(connect(f"{server.url}/a", None)) as first,
        closing(connect(f"{server.url}/b", None)) as second,
    ):
        state = Watch([first, second], "both", 60).look()
    host = server.url.removeprefix("http://")
    assert [engine["engine"] for engine in state["engines"]] == [f"{host}/a/0", f"{host}/b/0"]


def test_a_version_controls_no_terminal(server: FakeServer) -> None:
    server.metrics.version = "0.32\\u001b]0;title\\u0007"
    with closing(connect(server.url, None)) as client:
        assert Watch([client], "x", 60).look()["server"]["vllm"] == "0.32 ]0;title"


def test_a_server_of_several_that_answers_again_did_not_do_all_its_work_just_now(server: FakeServer) -> None:
    with closing(FakeServer(FakeMetrics())) as other:
        other.metrics.of("vllm:prompt_tokens").inc(1e9)
        with closing(connect(server.url, None)) as first, closing(connect(other.url, None)) as second:
            watched = Watch([first, second], "both", 60)
            rates = []
            for status in (200, 503, 200, 200):
                other.metrics.status = status
                rates.append(watched.look()["requests"]["prompt_tokens_per_s"])
    assert rates == [None, None, None, 0.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"urls": ("localhost:8000",)}, "--url"),
        ({"urls": ("http://h:99999",)}, "--url"),
        ({"urls": ("http://h",), "api_key": "sk-1\nsk-2"}, "API key [^1]* not allowed"),
        ({"urls": ("http://x",), "interval_s": 0.0}, "--interval"),
        ({"urls": ("http://x",), "window_s": float("nan")}, "--window"),
    ],
)
def test_bad_options(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TopOptions(**options)
