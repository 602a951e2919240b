"""What is written down: jobs, lengths, what prompts share; and what must never be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web

from tenuto.core.errors import ConfigError
from tenuto.proxy import RecordOptions
from tenuto.proxy import exchange as exchange_module
from tenuto.proxy import recorder as recorder_module
from tenuto.proxy.exchange import Exchange
from tenuto.proxy.recorder import Recorder, RecordingFile
from tenuto.workload import count_shared_tokens, load_workload
from tenuto.workload.formats.conversations import HASH_BYTES
from tests.proxy.conftest import Model, encode, make_client, render, serving_with

PATH = "/v1/chat/completions"
SECRETS = (
    "sk-PLANTEDKEY",
    "PLANTEDSYSTEM",
    "PLANTEDTASK",
    "PLANTEDANSWER",
    "PLANTEDFILE",
    "PLANTEDOUTPUT",
    "hunter2",
)
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


def call_bash(command: str, text: str | None = None) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


class Agent:
    """Sends its whole conversation again with each turn, as agents do."""

    def __init__(self, url: str, task: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        system = "you are PLANTEDSYSTEM " + "and behave well " * 10
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task},
        ]
        self._url = url
        self._headers = {"Authorization": "Bearer sk-PLANTEDKEY", **(headers or {})}
        self._fields = fields

    async def ask(self, output: str | None = None) -> httpx.Response:
        if output is not None:
            self.messages.append({"role": "tool", "tool_call_id": "c1", "content": output})
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, **self._fields}
        async with make_client() as client:
            answer = await client.post(self._url + PATH, json=body, headers=self._headers)
        if answer.status_code == 200 and not self._fields.get("stream"):
            # What clients add and drop on the way: the text stays.
            message = answer.json()["choices"][0]["message"]
            self.messages.append({**message, "refusal": None, "annotations": []})
        return answer


async def run_two_jobs(url: str, model: Model, headers: dict[str, str] | None = None) -> None:
    looking = "PLANTEDANSWER I shall look " + "and think " * 12
    model.answers = [
        call_bash("API_KEY=hunter2 /home/PLANTEDFILE/bin/grep -r x PLANTEDFILE"),
        {
            "role": "assistant",
            "content": f"{looking}\n\n```bash\nls PLANTEDFILE\n```",
        },
        {"role": "assistant", "content": "done with PLANTEDANSWER"},
        {"role": "assistant", "content": "the other PLANTEDANSWER"},
    ]
    agent = Agent(url, "PLANTEDTASK number one please", headers)
    await agent.ask()
    await agent.ask("PLANTEDOUTPUT " * 40)
    await agent.ask("PLANTEDOUTPUT again")
    await Agent(url, "PLANTEDTASK number two", headers).ask()


@pytest.mark.parametrize("tokenizes", [True, False])
def test_jobs_are_known_by_their_content(recording: Any, tokenizes: bool) -> None:
    model = Model(tokenizes=tokenizes)

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            await run_two_jobs(record.url, model)
        return record

    record = asyncio.run(run())
    first, second, third, other = record.turns
    assert [turn["session"] for turn in record.turns] == ["job-1", "job-1", "job-1", "job-2"]
    asked = [len(encode(render(body["messages"], True))) for body in model.requests]
    assert [turn["input_length"] for turn in record.turns] == asked
    assert first["tool"] == "grep"
    assert second["tool"] == "ls"
    assert "tool" not in third
    assert "delay" not in first
    assert second["delay"] >= 0
    assert third["blocks_of"] == ("16 tokens" if tokenizes else "messages")
    one, two = load_workload(record.path).jobs
    shared = count_shared_tokens((*one.turns[0].prompt, one.turns[0].output), one.turns[1].prompt)
    assert shared >= len(encode(render(one_messages(model, 0), False))) // 16 * 16
    # The second answer is plain text, so its tokens are known to be the next prompt's.
    whole = (*one.turns[1].prompt, one.turns[1].output)
    assert count_shared_tokens(whole, one.turns[2].prompt) > one.turns[1].num_prompt_tokens
    assert 16 <= count_shared_tokens(one.turns[0].prompt, two.turns[0].prompt) < other["input_length"]


@pytest.mark.parametrize("tokenizes", [True, False])
@pytest.mark.parametrize(
    ("tenants", "answers"),
    [((None, None), ("yes " * 40, "no " * 40)), (("acme", "bolt"), ("yes " * 40, "yes " * 40))],
    ids=["by their answers", "by their tenants"],
)
def test_jobs_that_begin_alike_are_told_apart(
    recording: Any, tenants: tuple[str | None, ...], answers: tuple[str, ...], tokenizes: bool
) -> None:
    model = Model(tokenizes=tokenizes)

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            agents = [Agent(record.url, "one task", tenant=tenant) for tenant in tenants]
            for output in (None, "so it is", "and so on"):
                for agent, answer in zip(agents, answers, strict=True):
                    model.answers = [{"role": "assistant", "content": answer}]
                    await agent.ask(output)
        return record

    turns = asyncio.run(run()).turns
    assert [turn["session"] for turn in turns] == ["job-1", "job-2"] * 3
    assert [turn.get("tenant") for turn in turns] == [*tenants] * 3


@pytest.mark.parametrize(
    ("more", "usage"),
    [({"reasoning": "hm " * 40}, None), ({}, {"completion_tokens_details": {"reasoning_tokens": 40}})],
    ids=["shown", "hidden"],
)
def test_prompts_do_not_repeat_an_answer_with_reasoning(recording: Any, more: Any, usage: Any) -> None:
    model = Model(usage=usage)
    model.answers = [{"role": "assistant", "content": "I look", **more}]

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            agent = Agent(record.url, "a task")
            await agent.ask()
            await agent.ask("what it saw " * 40)
        return record

    (job,) = load_workload(asyncio.run(run()).path).jobs
    first, second = job.turns
    assert count_shared_tokens((*first.prompt, first.output), second.prompt) == first.num_prompt_tokens


def one_messages(model: Model, number: int) -> list[dict[str, Any]]:
    return list(model.requests[number]["messages"])


@pytest.mark.parametrize("options", [{}, {"tokens": "text"}, {"salt": "known"}, {"hide_ids": True}])
@pytest.mark.parametrize("tokenizes", [True, False])
def test_no_text_header_or_key_is_ever_written(recording: Any, options: Any, tokenizes: bool) -> None:
    model = Model(tokenizes=tokenizes)

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server, **options) as record:
            await run_two_jobs(record.url, model)
            async with make_client() as client:
                # Failures quote what they choke on, and keys stand in odd places.
                await client.post(f"{record.url}{PATH}?key=sk-PLANTEDKEY", content=b"PLANTEDTASK {")
                await client.post(
                    f"{record.url}/sk-PLANTEDKEY{PATH}",
                    json={"messages": "PLANTEDTASK", "api_key": "sk-PLANTEDKEY"},
                )
        return record

    record = asyncio.run(run())
    assert len(record.turns) == 4
    assert len(record.failed) == 2
    for secret in SECRETS:
        assert secret not in record.text
        assert not any(secret in said for said in record.said)
    assert record.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"POST %b HTTP/1.1\r\nHost: a\r\nAuthorization : Bearer sk-PLANTEDKEY\r\n\r\n",
        b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nPLANTEDTASK\r\n",
    ],
)
def test_malformed_requests_are_refused_and_not_logged(
    recording: Any, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp logs the line that is wrong."""

    async def run() -> Any:
        async with serving_with(Model().handle) as server, recording(server) as record:
            address = urlsplit(record.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(sent.replace(b"%b", PATH.encode()))
            answer = b""
            while b" 400 " not in answer and (piece := await asyncio.wait_for(reader.read(65536), 30)):
                answer += piece
            writer.close()
        return record, answer

    record, answer = asyncio.run(run())
    assert b" 400 " in answer
    for secret in SECRETS:
        assert secret not in caplog.text
        assert secret not in record.text


def test_text_is_kept_when_asked_for_but_no_key(recording: Any) -> None:
    model = Model()

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server, keep_text=True) as record:
            await run_two_jobs(record.url, model)
        return record

    record = asyncio.run(run())
    assert record.rows[0]["text"] is True
    assert "sk-PLANTEDKEY" not in record.text
    for text in ("PLANTEDSYSTEM", "PLANTEDTASK", "PLANTEDANSWER", "PLANTEDOUTPUT"):
        assert text in record.text
    assert record.turns[1]["command"] == "ls PLANTEDFILE"
    assert load_workload(record.path).jobs[0].turns[1].command == "ls PLANTEDFILE"


def test_hashes_agree_within_a_salt_and_nowhere_else(recording: Any) -> None:
    async def run(**options: Any) -> set[str]:
        model = Model(tokenizes=True)
        async with serving_with(model.handle) as server, recording(server, **options) as record:
            await run_two_jobs(record.url, model)
        return {each for turn in record.turns for each in turn["block_hashes"]}

    same, again = asyncio.run(run(salt="a")), asyncio.run(run(salt="a"))
    assert same == again
    assert not same & asyncio.run(run(salt="b"))
    assert not asyncio.run(run()) & asyncio.run(run())


def test_clients_may_name_their_jobs(recording: Any) -> None:
    model = Model()
    headers = {"X-Session-ID": "task-7"}

    async def run(**options: Any) -> Any:
        async with serving_with(model.handle) as server, recording(server, **options) as record:
            await Agent(record.url, "one", headers).ask()
            await Agent(record.url, "another thing altogether", headers).ask()
            await Agent(record.url, "one", job_id="task-7", tenant="acme").ask()
        return record

    turns = asyncio.run(run()).turns
    assert [turn["session"] for turn in turns] == ["task-7", "task-7", "task-7~2"]
    assert [turn.get("tenant") for turn in turns] == [None, None, "acme"]
    assert "parent" not in turns[2]  # the same id of another tenant is another job
    hidden = asyncio.run(run(hide_ids=True))
    assert "task-7" not in hidden.text
    assert "acme" not in hidden.text
    assert [turn["session"] == hidden.turns[0]["session"] for turn in hidden.turns] == [True, True, False]


def test_turns_that_overlap_are_jobs_of_their_own(recording: Any) -> None:
    model = Model()

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            headers = {"X-Session-ID": "s"}
            await Agent(record.url, "first", headers).ask()
            model.gate = asyncio.Event()
            asking = [asyncio.create_task(Agent(record.url, f"sub {n}", headers).ask()) for n in range(3)]
            while len(model.requests) < 4:
                await asyncio.sleep(0.01)
            model.gate.set()
            await asyncio.gather(*asking)
        return record

    record = asyncio.run(run())
    assert sorted(turn["session"] for turn in record.turns) == ["s", "s", "s~2", "s~3"]
    jobs = {job.job_id: job for job in load_workload(record.path).jobs}  # the references hold
    assert jobs["s~2"].parent == jobs["s~3"].parent == "s"


class Exchanges:
    """A recorder that is handed exchanges with times of the test's own."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._file = RecordingFile(out, print)
        self._recorder = Recorder(RecordOptions(url="http://h:1", out=out, tokens="text"), self._file, print)

    def add(self, session: str, start_s: float, end_s: float, num_messages: int = 1) -> None:
        """A stream whose last event comes at its end. Its body ends a second later."""
        exchange = Exchange(PATH, {"x-session-id": session}, start_s, 0.0, end="whole", status=200)
        exchange.content_type = "text/event-stream"
        messages = [{"role": "user", "content": f"{number}"} for number in range(num_messages)]
        exchange.add_request(json.dumps({"messages": messages, "stream": True}).encode())
        event = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
        exchange.add_answer(event, start_s)
        exchange.add_answer(b"data: [DONE]\n\n", end_s)
        exchange.add_answer(b": ping\n\n", end_s + 0.5)
        exchange.end_s = end_s + 1
        self._recorder.submit(exchange)

    def end(self) -> list[dict[str, Any]]:
        """The lines of the turns."""
        self._recorder.close()
        self._file.close()
        return [json.loads(line) for line in self._out.read_text().splitlines()[1:]]


def test_an_answer_ends_with_its_last_event_and_not_with_its_body(tmp_path: Path) -> None:
    exchanges = Exchanges(tmp_path / "t.jsonl")
    exchanges.add("agent", 0.0, 0.5)
    exchanges.add("agent", 1.0, 1.5)
    first, second = exchanges.end()
    assert [turn["session"] for turn in (first, second)] == ["agent", "agent"]
    assert [turn["latency_ms"] for turn in (first, second)] == [500, 500]
    assert second["delay"] == 500


def test_a_job_goes_on_when_the_hashes_of_its_last_prompt_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_HASH_BYTES", 5 * HASH_BYTES)
    exchanges = Exchanges(tmp_path / "t.jsonl")
    for start_s, (session, num_messages) in enumerate([("a", 3), ("a", 4), ("b", 2), ("a", 5)]):
        exchanges.add(session, start_s, start_s + 0.5, num_messages)
    turns = exchanges.end()
    assert [turn["session"] for turn in turns] == ["a", "a", "b", "a"]
    assert [turn["num_same_blocks"] for turn in turns] == [0, 3, 0, 0]
    assert [len(turn["block_hashes"]) for turn in turns] == [3, 1, 2, 5]


def test_jobs_beside_each_other_count_among_those_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_JOBS", 2)
    exchanges = Exchanges(tmp_path / "t.jsonl")
    for session, start_s, end_s in (("a", 0, 2), ("a", 1, 2), ("b", 3, 4), ("a", 5, 6)):
        exchanges.add(session, start_s, end_s)
    assert [turn["session"] for turn in exchanges.end()] == ["a", "a~2", "b", "a~3"]


def test_names_of_sessions_are_unique_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_JOBS", 1)
    monkeypatch.setattr(recorder_module, "MAX_NAMES", 4)
    exchanges = Exchanges(tmp_path / "t.jsonl")
    for number, session in enumerate(["a", "b", "a", "b", "a", "c", "a~2", "b"]):
        exchanges.add(session, number, number + 0.5)
    sessions = [turn["session"] for turn in exchanges.end()]
    assert sessions[:4] == ["a", "b", "a~2", "b~2"] and len(set(sessions)) == 8


@pytest.mark.parametrize(
    ("usage", "complaint"),
    [
        ({"prompt_tokens": 10**9, "completion_tokens": 10**9}, "no usage"),
        ({"prompt_tokens": -5, "completion_tokens": -1}, "no usage"),
        ({"prompt_tokens": "many", "completion_tokens": None}, "no usage"),
        ({"prompt_tokens": True, "completion_tokens": 1.5}, "no usage"),
        ({"prompt_tokens": 0, "completion_tokens": 0}, "no usage"),
        ({"prompt_tokens": 1}, None),
        ({"prompt_tokens_details": {"cached_tokens": 10**6}}, "cached count"),
        ({"prompt_tokens_details": "x"}, None),
    ],
)
def test_a_server_that_lies_about_its_usage(
    recording: Any, usage: dict[str, Any], complaint: str | None
) -> None:
    model = Model(usage=usage)

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            agent = Agent(record.url, "count me")
            await agent.ask()
            await agent.ask("and go on")
        return record

    record = asyncio.run(run())
    assert len(record.turns) == 2
    for turn in record.turns:
        assert "cached_tokens" not in turn
        assert (complaint is None) == ("complaints" not in turn)
        assert complaint is None or turn["complaints"][0].startswith(complaint)
        assert turn["output_length"] >= 1
    assert len(load_workload(record.path).jobs[0].turns) == 2


def test_a_count_that_contradicts_the_tokens_is_complained_about(recording: Any) -> None:
    model = Model(tokenizes=True, usage={"prompt_tokens": 7})

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            await Agent(record.url, "count me").ask()
        return record

    (turn,) = asyncio.run(run()).turns
    assert "7 counted" in turn["complaints"][0]
    assert turn["blocks_of"] == "messages"


def test_an_answer_with_more_tokens_than_the_server_counts_is_complained_about(recording: Any) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "text": "a b", "token_ids": [5, 6, 7], "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 1}})

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            await client.post(f"{record.url}/v1/completions", json={"prompt": [1, 2]})
        return record

    (turn,) = asyncio.run(run()).turns
    assert (turn["output_length"], turn["complaints"]) == (3, ["output count: 3 tokens came, 1 counted"])


def test_a_tokenizer_that_hangs_is_asked_once(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "TOKENIZE_LIMIT_S", 0.05)
    model = Model()
    asked = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        if request.path == "/tokenize":
            asked += 1
            await asyncio.Event().wait()
        return await model.handle(request)

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record:
            for _ in range(3):
                await Agent(record.url, "task").ask()
        return record

    record = asyncio.run(run())
    assert asked == 1
    assert len(record.turns) == 3
    assert "hangs" in record.said[0]


def test_an_answer_that_is_too_large_to_be_read_has_a_line_however_large_it_is(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is kept, so it does not count as waiting to be written."""
    monkeypatch.setattr(exchange_module, "MAX_BODY_BYTES", 1_000)
    monkeypatch.setattr(recorder_module, "MAX_WAITING_BYTES", 2_000)

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 50_000)

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            body = {"messages": [{"role": "user", "content": "x"}]}
            assert len((await client.post(record.url + PATH, json=body)).content) == 50_000
        return record

    record = asyncio.run(run())
    assert [failed["why"] for failed in record.failed] == ["too large to be read"]
    assert (record.recorder.num_lost, record.said) == (0, [])


@pytest.mark.parametrize("flags", [{}, {"ask_usage": True, "name_jobs": True}])
def test_a_body_of_millions_of_values_passes_and_is_not_parsed(
    recording: Any, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool]
) -> None:
    """While it is parsed, no other thread runs: 64 MB of numbers would stop all traffic for seconds."""
    monkeypatch.setattr(exchange_module, "MAX_COMMAS", 1_000)
    parsed, bodies = [], []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda data: (parsed.append(len(data)), loads(data))[1])

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    async def run() -> Any:
        async with (
            serving_with(handle) as server,
            recording(server, **flags) as record,
            make_client() as client,
        ):
            body = b'{"stream": true, "messages": [' + b"1," * 1_001 + b"1]}"
            await client.post(record.url + PATH, content=body)
            assert bodies == [body]
        return record

    record = asyncio.run(run())
    assert [failed["why"] for failed in record.failed] == ["its body has too many values"]
    assert not [size for size in parsed if size > 1_000]


def test_requests_under_way_share_the_room_for_their_bodies(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can open hundreds of connections, and need no key for that."""
    monkeypatch.setattr(exchange_module.Room.__init__, "__defaults__", (1_500,))
    are_here = asyncio.Barrier(2)

    async def handle(request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        if model != "alone":
            await are_here.wait()
        return web.json_response({"error": "no key"}, status=401)

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:

            def post(model: str) -> Any:
                body = {"model": model, "messages": [{"role": "user", "content": "x" * 1000}]}
                return client.post(record.url + PATH, json=body)

            await asyncio.gather(post("one"), post("two"))
            for _ in range(2):
                await post("alone")
        return record

    # The status is the reason in each case. A request that was kept has a model.
    record = asyncio.run(run())
    models = [failed.get("model") for failed in record.failed]
    assert sorted(models[:2], key=str)[0] is None and {*models[:2]} < {None, "one", "two"}
    assert models[2:] == ["alone", "alone"]
    assert (record.recorder.num_lost, record.said) == (0, [])


@pytest.mark.parametrize("flags", [{"ask_usage": True}, {"name_jobs": True}])
def test_without_room_for_its_body_a_request_passes_as_it_is(
    recording: Any, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool]
) -> None:
    """Another client may have taken all room, and may never send the rest of its bodies."""
    monkeypatch.setattr(exchange_module.Room.__init__, "__defaults__", (100,))
    bodies: list[bytes] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.json_response({"choices": []})

    async def run() -> None:
        async with (
            serving_with(handle) as server,
            recording(server, **flags) as record,
            make_client() as client,
        ):
            for size in (200, 3_000_000):
                body = {"messages": [{"role": "user", "content": "x" * size}], "stream": True}
                content = json.dumps(body).encode()
                answer = await client.post(record.url + PATH, content=content)
                assert (answer.status_code, bodies.pop()) == (200, content)

    asyncio.run(run())


def test_a_text_in_the_place_of_the_model_s_name_is_not_written_down(recording: Any) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"error": "there is no such model"}, status=404)

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            for model in ("m", "secret " * 100):
                body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
                await client.post(record.url + PATH, json=body)
        return record

    record = asyncio.run(run())
    assert [failed.get("model") for failed in record.failed] == ["m", None]
    assert "secret" not in record.text


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices": [{"text": "x", "token_ids": []}], "prompt_token_ids": []}',
        b"",
        b"[]",
        b"null",
        b'{"choices": 3}',
        b'{"choices": [null]}',
        b"\xff",
        b"{" * 5000,
    ],
)
def test_hostile_answers_pass_and_have_a_line(recording: Any, answer: bytes) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            body = {"messages": [{"role": "user", "content": "x"}]}
            assert (await client.post(record.url + PATH, json=body)).content == answer
        return record

    record = asyncio.run(run())
    assert record.recorder.num_lost == 0
    assert len(record.rows) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [1]},
        {"messages": {"role": "user"}},
        {"prompt": [1, "x"]},
        {"prompt": [-1]},
        {"prompt": [[1], [2]]},
        {"prompt": [10**30]},
        {"prompt": ""},
        {"input": 7},
        {},
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_hostile_requests_pass_and_have_a_line(recording: Any, path: str, body: Any) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"got": await request.json()})

    async def run() -> Any:
        async with (
            serving_with(handle) as server,
            recording(server, tokens="text") as record,
            make_client() as client,
        ):
            answer = await client.post(record.url + path, json=body)
            assert answer.json() == {"got": body}
        return record

    record = asyncio.run(run())
    assert record.recorder.num_lost == 0
    assert len(record.failed) == 1


@pytest.mark.parametrize(("number", "num_turns"), [(1, 1), (2, 0)])
def test_a_request_for_several_answers_is_no_turn(recording: Any, number: int, num_turns: int) -> None:
    model = Model()

    async def run() -> Any:
        async with serving_with(model.handle) as server, recording(server) as record:
            await Agent(record.url, "task", n=number).ask()
        return record

    record = asyncio.run(run())
    assert len(record.turns) == num_turns
    assert [row["why"] for row in record.failed] == ["it asks for several answers"] * (1 - num_turns)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_a_prompt_that_begins_on_the_server_is_no_turn(recording: Any, field: str) -> None:
    """Its tokens are counted whole. Two conversations that go on with one word share no more than that."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"output": [], "usage": {"input_tokens": 9000, "output_tokens": 5}})

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            for body in ({"input": "a poem"}, {"input": "continue", field: "r1"}):
                await client.post(f"{record.url}/v1/responses", json=body)
        return record

    record = asyncio.run(run())
    assert len(record.turns) == 1
    (row,) = record.failed
    assert "only the server has" in row["why"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "localhost:8000"}, "--url"),
        ({"url": "http://h/?x=1"}, "--url"),
        ({"port": 70000}, "--port"),
        ({"salt": ""}, "--salt"),
    ],
)
def test_options_are_checked(tmp_path: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RecordOptions(**{"url": "http://h:1", "out": tmp_path / "x", **change})
