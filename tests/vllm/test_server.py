"""A real vLLM server with a small model: what clients of every kind see."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from openai import AsyncOpenAI, OpenAI

from tenuto import cli
from tenuto.client.ab import LocalServer, run_server
from tenuto.client.address import ServerError
from tenuto.client.metrics import parse_page
from tests.vllm.live import (
    ADMIN_KEY,
    BLOCK_SIZE,
    ENV_INSIDE,
    MARKS,
    TTL_S,
    WORKER_INSIDE,
    get_command,
    get_free_port,
    get_page,
    make_text,
    wait_until_empty,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def stock_server(folder: Path) -> Iterator[LocalServer]:
    """The same server without Tenuto."""
    port = get_free_port()
    command = get_command(port, *WORKER_INSIDE)
    with run_server(command, port, folder / "stock.log", env=ENV_INSIDE) as running:
        yield running


def get_client(server: LocalServer, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120, **options)


def read_history(folder: Path, job: str) -> list[str]:
    """The job's events on file now, in order. Whole lines only: the engine may be writing the next one."""
    text = (folder / "trace.jsonl").read_text()
    records = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [r["event"] for r in records if r["kind"] == "job" and r["job"] == job]


def wait_for_event(folder: Path, job: str, event: str, limit_s: float = 60.0) -> list[str]:
    """The job's events once ``event`` is among them. A client may have its answer first."""
    end_s = time.monotonic() + limit_s
    while event not in (events := read_history(folder, job)):
        assert time.monotonic() < end_s, f"{job}: {events}, no {event}"
        time.sleep(0.05)
    return events


def test_verify_passes_and_leaves_nothing(server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--url", server.url, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"]
    assert [turn["tool"] for turn in verdict["turns"]] == ["ls", "cat", "grep", "git", "pytest"]
    assert all(turn["held_blocks"] == turn["expected_blocks"] for turn in verdict["turns"])
    wait_until_empty(server)


def test_verify_looks_at_its_own_job_only(
    server: LocalServer, stock_server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others have leases, get new ones meanwhile and hit the cache: on Tenuto and on stock vLLM."""
    for where, status in ((server, 0), (stock_server, 1)):
        is_over = threading.Event()

        def work(url: str = where.url, is_over: threading.Event = is_over) -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                body = {"model": "tiny", "prompt": [number % 3 + 100] * 70, "max_tokens": 2}
                hints = {"job_id": f"other-{number}", "tool": "ls"}
                httpx.post(f"{url}/v1/completions", json={**body, **hints}, timeout=60)

        others = threading.Thread(target=work)
        others.start()
        try:
            verify = ["verify", "--url", where.url, "--gap", "0.3"]
            assert cli.main(verify) == status, capsys.readouterr().out
        finally:
            is_over.set()
            others.join()
    wait_until_empty(server)


def test_verify_fails_against_stock(stock_server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--url", stock_server.url, "--gap", "0.3"]) == 1
    assert "NOT held" in capsys.readouterr().out


def test_verify_says_what_is_wrong_with_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--url", f"http://127.0.0.1:{get_free_port()}"]) == 2
    assert "tenuto: no answer from http://127.0.0.1" in capsys.readouterr().err


def test_a_job_over_plain_headers_hits_what_it_left(server: LocalServer) -> None:
    """Three jobs that fit the cache, at once: every later turn hits all full blocks of the turn before."""

    async def run_job(client: AsyncOpenAI, name: str) -> tuple[int, int]:
        messages: list[Any] = [{"role": "user", "content": make_text(name, 60)}]
        reusable = hit = previous = 0
        for turn in range(4):
            answer = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=8,
                temperature=0,
                extra_headers={"X-Session-ID": name},
                extra_body={"tool": "ls", "is_last_step": turn == 3},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            hit += answer.usage.prompt_tokens_details.cached_tokens or 0
            reusable += previous // BLOCK_SIZE * BLOCK_SIZE
            previous = answer.usage.prompt_tokens
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": make_text(f"{name}{turn}", 15)})
            await asyncio.sleep(0.5)
        return hit, reusable

    async def run_all() -> list[tuple[int, int]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(run_job(client, f"plain{n}") for n in range(3)))

    for hit, reusable in asyncio.run(run_all()):
        assert reusable > 1000
        assert hit >= 0.95 * reusable
    wait_until_empty(server)


def test_a_job_in_a_tool_call_leaves_the_cache_free_for_others(server: LocalServer) -> None:
    """Routers read vLLM's usage: what a lease holds and gives back is free memory."""
    body = {"model": "tiny", "prompt": make_text("idle", 60), "max_tokens": 4, "job_id": "idle", "tool": "ls"}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
    time.sleep(1.0)
    page = get_page(server)
    num_idle = page.total("tenuto:idle_retained_blocks")
    assert num_idle == page.total("tenuto:retained_blocks")
    assert num_idle is not None and num_idle > 5
    assert page.total("vllm:kv_cache_usage_perc") == 0
    wait_until_empty(server)


def test_jobs_that_overflow_the_cache_all_finish(server: LocalServer, folder: Path) -> None:
    """Ten jobs of twice the cache, duplicate ids, absurd hints, an aborted stream: all end clean."""

    async def run_job(client: AsyncOpenAI, n: int) -> int:
        hints: dict[str, Any] = [
            {"job_id": f"over{n}", "tool": "ls"},
            {"job_id": "same", "tool": "ls"},
            {"job_id": "x" * 10_000, "tool": "t" * 10_000, "expected_tool_seconds": 1e300},
            {"job_id": {"not": "an id"}, "tool": 5, "is_last_step": "perhaps", "tenant": ["t"]},
            {},
        ][n % 5]
        messages: list[Any] = [{"role": "user", "content": make_text(f"o{n}", 60)}]
        for turn in range(3):
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True, extra_body=hints
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if n == 7 and turn == 1 and text:
                    await stream.close()
                    break
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": make_text(f"o{n}t{turn}", 20)},
            ]
            await asyncio.sleep(0.2)
        return n

    async def run_all() -> list[int]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(run_job(client, n) for n in range(10)))

    assert asyncio.run(run_all()) == list(range(10))
    wait_until_empty(server)
    events = wait_for_event(folder, "over0", "lease-ended")
    assert {"arrived", "started", "finished", "lease-granted", "lease-ended"} <= set(events)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hello there", "max_tokens": 4}),
        ("/v1/responses", {"input": "hello there", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}),
    ],
)
@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-claude-code-session-id": "J"}, {}),
        ({"X-Session-ID": "J"}, {}),
        ({}, {"job_id": "J", "is_last_step": True}),
        ({}, {"vllm_xargs": {"job_id": "J"}}),
        ({}, {"metadata": {"session_id": "J"}}),
    ],
)
def test_every_endpoint_knows_its_job(
    server: LocalServer,
    folder: Path,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    fields: dict[str, Any],
) -> None:
    job = f"job{path.replace('/', '-')}-{len(headers)}-{'-'.join(fields)}-{'-'.join(headers)}"

    def name(value: Any) -> Any:
        return json.loads(json.dumps(value).replace('"J"', f'"{job}"'))

    response = httpx.post(
        f"{server.url}{path}",
        json={"model": "tiny", **body, **name(fields)},
        headers=name(headers),
        timeout=60,
    )
    assert response.status_code == 200, response.text
    assert wait_for_event(folder, job, "finished")[:3] == ["arrived", "started", "finished"]


def test_agents_that_share_a_routing_key_keep_their_own_leases(server: LocalServer) -> None:
    """Four agents of one application: one key, one system prompt, no id. Every turn hits its own lease."""
    system = {"role": "system", "content": "You are one of four agents. " * 12}

    def count_hits() -> float:
        page = get_page(server)
        return page.total("tenuto:leases_ended_total", reason="hit") or 0.0

    async def run_agent(client: AsyncOpenAI, number: int) -> None:
        messages: list[Any] = [system, {"role": "user", "content": make_text(f"task{number}", 12)}]
        for turn in range(6):
            answer = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=6,
                user="everybody",
                prompt_cache_key="application",
                extra_headers={"x-session-affinity": "application"},
                extra_body={"tool": "ls"},
            )
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": make_text(f"result{number}-{turn}", 4)},
            ]

    async def run_all() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(*(run_agent(client, number) for number in range(4)))

    wait_until_empty(server)
    before = count_hits()
    asyncio.run(run_all())
    wait_until_empty(server)
    assert count_hits() - before == 20


def test_features_keep_working(server: LocalServer) -> None:
    """N answers, structured output, a stop string, log-probabilities and streaming with usage."""
    client = get_client(server)
    messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
    job = {"job_id": "features", "tool": "ls"}
    chat: dict[str, Any] = {"model": "tiny", "messages": messages, "extra_body": job}
    both = client.chat.completions.create(**chat, n=2, max_tokens=6)
    assert len(both.choices) == 2
    # A model this small would fill an object with blanks, until its tokens are spent.
    schema = {"enum": [1, 2]}
    shaped = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=30,
        extra_body=job,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(shaped.choices[0].message.content or "") in (1, 2)
    text: dict[str, Any] = {"model": "tiny", "extra_body": job}
    stopped = client.completions.create(
        **text, prompt="1 2 3 4 5 6 7 8 9", max_tokens=20, temperature=0, stop=["\n", "1"]
    )
    assert stopped.choices[0].finish_reason in ("stop", "length")
    scored = client.completions.create(**text, prompt="one two", max_tokens=2, logprobs=1)
    assert scored.choices[0].logprobs is not None
    usage = None
    for chunk in client.chat.completions.create(
        **chat, max_tokens=5, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens >= 1
    wait_until_empty(server)


def test_a_killed_client_leaves_nothing(server: LocalServer) -> None:
    """A connection that is cut without a word, with a long answer under way and a turn waiting."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": make_text("killed", 40)}],
            "max_tokens": 800,
            "stream": True,
            "job_id": "killed",
            "ignore_eos": True,
        }
    )
    port = int(server.url.rsplit(":", 1)[1])
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert connection.recv(1000)
    wait_until_empty(server)


def ask_responses(server: LocalServer, text: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "input": text, "max_output_tokens": 4, **fields}
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=120)


def test_names_of_tenuto_s_own_copies_are_answered(server: LocalServer) -> None:
    """Requests named as Tenuto's own loads and stores load from host memory, while it fetches a job's KV."""
    names = ["tenuto-prefetch-0", "tenuto-prefetch-1", "tenuto-store-0", f"tenuto-{'0' * 32}"]
    texts = [make_text(f"own{n}", 80) for n in range(len(names))]
    for text in texts:
        ask_responses(server, text).raise_for_status()
    # A tool of its own: of others, the server has measured how long they take.
    away = {"job_id": "away", "tool": "away", "expected_tool_seconds": 20}
    prompt = {"model": "tiny", "prompt": make_text("away", 60), "max_tokens": 4, **away}
    httpx.post(f"{server.url}/v1/completions", json=prompt, timeout=120).raise_for_status()
    with httpx.Client(base_url=server.url) as client:
        # Host memory keeps what the GPU loses.
        client.post("/reset_prefix_cache").raise_for_status()
        before = parse_page(client.get("/metrics").text, at_s=0.0)
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(ask_responses, server, text, request_id=name)
                for text, name in zip(texts, names, strict=True)
            ]
            assert [each.result().status_code for each in asked] == [200] * len(names)
        wait_until_empty(server)
        after = parse_page(client.get("/metrics").text, at_s=0.0)
        loaded, fetched = "vllm:kv_offload_load_bytes_total", "tenuto:tier_prefetched_blocks_total"
        assert (after.total(loaded) or 0) > (before.total(loaded) or 0)
        end_s = time.monotonic() + 60.0
        while not parse_page(client.get("/metrics").text, at_s=0.0).total(fetched):
            assert time.monotonic() < end_s, "nothing was fetched"
            time.sleep(0.2)
    wait_until_empty(server)
    ask_responses(server, texts[0], request_id=names[0]).raise_for_status()
    wait_until_empty(server)


@pytest.mark.parametrize(
    "params",
    ["x", 7, 0.5, [], ["x"], {}, {"max_offload_tokens": -1, "max_load_tokens": 1e300}]
    + [{"kv_load_tiers": each} for each in ("x", [], [{"medium": 5}, 3, {"locality": []}], {"a": 1})]
    + [{"max_offload_tokens": "all", "do_remote_prefill": True, "do_remote_decode": "yes"}],
)
def test_what_a_client_says_of_transfers_ends_nothing(server: LocalServer, params: Any) -> None:
    """In the body, or as a field of `vllm_xargs`, which vLLM does not check."""
    for fields in ({"kv_transfer_params": params}, {"vllm_xargs": {"kv_transfer_params": params}}):
        body = {"model": "tiny", "prompt": make_text("transfer", 60), "max_tokens": 2, **fields}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        # vLLM itself answers 500 to some, before its engine sees them.
        assert answer.status_code in (200, 400, 500), answer.text
    wait_until_empty(server)


def test_same_greedy_tokens_as_stock(server: LocalServer, stock_server: LocalServer) -> None:
    """Held or not, preempted or not, in float32 the answer is the same."""
    answers = []
    for each in (server, stock_server):
        client = get_client(each)
        messages: list[Any] = [{"role": "user", "content": make_text("same", 50)}]
        texts = []
        for turn in range(3):
            answer = client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=10,
                temperature=0,
                extra_body={"job_id": "tokens", "tool": "ls", "is_last_step": turn == 2},
            )
            texts.append(answer.choices[0].message.content)
            messages += [
                {"role": "assistant", "content": texts[-1]},
                {"role": "user", "content": make_text(f"more{turn}", 10)},
            ]
        answers.append(texts)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3, "the model answers each prompt differently"


def control(server: LocalServer, action: str, *more: str, key: str = ADMIN_KEY) -> int:
    return cli.main(["control", action, "--url", server.url, "--admin-key", key, "--as", "test", *more])


def hold(server: LocalServer, job: str) -> None:
    """One turn of a job, which its policy keeps."""
    hints = {"job_id": job, "tool": "ls"}
    get_client(server).completions.create(
        model="tiny", prompt=make_text(job, 60), max_tokens=2, extra_body=hints
    )
    assert get_page(server).total("tenuto:retained_blocks")


def test_an_operator_switches_the_server_while_it_works(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every answer arrives, whatever is switched meanwhile; off gives all blocks back at once."""

    async def run_job(client: AsyncOpenAI, n: int) -> int:
        messages: list[Any] = [{"role": "user", "content": make_text(f"switch{n}", 40)}]
        for turn in range(4):
            answer = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=24,
                extra_body={"job_id": f"switch{n}", "tool": "ls", "ignore_eos": True},
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 24
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": make_text(f"s{n}{turn}", 15)},
            ]
        return n

    async def switch() -> None:
        for action, more in (
            ("off", ()),
            ("on", ()),
            ("set", ("--policy", "tenuto", "--limit", "max_lease_s=30")),
            ("shadow", ()),
            ("set", ("--policy", "continuum-fixed", "--option", f"ttl_s={TTL_S}", "--canary-share", "0.5")),
            ("on", ()),
            ("set", ("--no-canary",)),
        ):
            await asyncio.sleep(0.4)
            # On a machine that is busy with other things, a step may take longer than control waits.
            tries = [await asyncio.to_thread(control, server, action, *more)]
            while tries[-1] == 1 and len(tries) < 5:
                tries.append(await asyncio.to_thread(control, server, action, *more))
            assert tries[-1] == 0

    async def run_all() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(run_job(client, n) for n in range(6)), switch())

    assert asyncio.run(run_all())[:6] == list(range(6))
    hold(server, "kept")
    assert control(server, "off") == 0
    page = get_page(server)
    assert not page.total("tenuto:retained_blocks")
    assert page.total("tenuto:mode", mode="off", model_name="tiny") == 1
    assert control(server, "set", "--policy", "nope") == 2
    assert control(server, "on", key="wrong") == 2
    told = capsys.readouterr()
    assert "no policy 'nope'" in told.err
    assert "needs the operator's key" in told.err
    assert control(server, "on") == 0
    assert "changes since the start, the last at" in capsys.readouterr().out
    wait_until_empty(server)


def test_a_client_ends_its_job_without_a_turn(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(server, "complete")
    release = ["control", "release", "--url", server.url, "--job", "complete"]
    assert cli.main(release) == 0
    assert capsys.readouterr().out == "job complete: released\n"
    # An idle engine shows what changed without a further request.
    assert not get_page(server).total("tenuto:retained_blocks")
    assert cli.main(release) == 0
    assert capsys.readouterr().out == "job complete: nothing was kept for it\n"


def test_metrics_are_on_the_servers_own_page(server: LocalServer) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    for name in (
        "tenuto:retained_jobs",
        "tenuto:retained_blocks",
        "tenuto:leases_granted_total",
        'reason="hit"',
        'reason="expired"',
        'reason="revoked"',
        "tenuto:hit_tokens_total",
        "tenuto:recomputed_tokens_total",
        "tenuto:tool_time_seconds_bucket",
        "tenuto:queue_delay_seconds_bucket",
        "tenuto:admission_waits_total",
        "tenuto:decision_time_seconds_bucket",
    ):
        assert name in text
    assert 'model_name="tiny"' in text


def test_the_trace_is_complete_after_sigterm(server: LocalServer, folder: Path) -> None:
    """Last of all that use the server, in this file and in those before it: it is ended here."""
    client = get_client(server)
    hints = {"job_id": "bye", "tool": "x"}
    client.completions.create(model="tiny", prompt="bye " * 40, max_tokens=3, extra_body=hints)
    wait_for_event(folder, "bye", "lease-granted")
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    # vLLM kills its engine at once: the lease has no end, and everything before it is on file.
    assert read_history(folder, "bye") == ["arrived", "started", "finished", "lease-granted"]


def test_a_bad_setting_stops_the_start(folder: Path) -> None:
    """The server says which key, and does not wait for the first request to say it."""
    port = get_free_port()
    config = json.dumps({"tenuto": {"options": {"ttl": 3}}})
    scheduler = ("--scheduler-cls", "tenuto.vllm.Scheduler", "--additional-config", config)
    command = get_command(port, *WORKER_INSIDE, *scheduler)
    with pytest.raises(ServerError), run_server(command, port, folder / "bad.log", env=ENV_INSIDE):
        pass
    assert "unknown key 'ttl'; known keys: " in (folder / "bad.log").read_text()
