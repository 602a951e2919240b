"""Parsers of what clients and models write: hints, bodies, tool calls, commands, options."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from experiments.fuzz.guard import Wrong
from tenuto.core.dispatcher import MAX_PARTS, read_arrival
from tenuto.core.errors import ConfigError
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.requests import (
    HINT_FIELDS,
    MAX_EXPECTED_TOOL_S,
    MAX_ID_CHARS,
    MAX_TOOL_CHARS,
    WISH_FIELD,
    Hints,
    are_xargs,
    get_header_fields,
    get_usable_fields,
    is_head,
    make_fields,
    parse_hints,
    read_hints,
    write_context_as_text,
)
from tenuto.core.settings import parse_option, parse_policy_options
from tenuto.core.tool_calls import MAX_COMMAND_CHARS, find_tool_call, is_cut
from tenuto.core.wish_dialects import DIALECTS, read_wish, read_wish_text
from tenuto.core.wishes import (
    MAX_KEEP_S,
    MAX_PROMPT_TOKENS,
    MAX_SPANS,
    WISH_HEADER,
    MarkFinder,
    Wish,
    judge,
    make_wish_header,
    write_wish,
)
from tenuto.vllm.middleware import HeadLines, Middleware, Ranks
from tenuto.vllm.settings import read_settings
from tenuto.vllm.tenants import (
    FIELD,
    HEADER_VARIABLE,
    SECRET_VARIABLE,
    TenantVerifier,
    make_introduction,
    sign,
    stamp,
)
from tenuto_predict import load_command_times

SECRET = {SECRET_VARIABLE: "the secret of the fuzzing"}
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_LEASE_S = 60.0
"""As the operator set it here."""
_MAX_JOB_CHARS = 2 * MAX_ID_CHARS + 1
_MAX_TEXT_CHARS = 100_000
"""An output's tail has at most some thousand tokens."""


def load_json(data: bytes) -> Any:
    """The JSON value of an input; its text if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else value


def _get_headers(value: Any) -> dict[str, str]:
    """Headers as a server has them: names in lower case, text that fits into Latin-1."""
    headers = value if isinstance(value, dict) else {}
    pairs = ((str(name).lower(), str(text)) for name, text in headers.items() if not isinstance(text, int))
    return {_to_latin(name): _to_latin(text) for name, text in pairs}


def _to_latin(text: str) -> str:
    return text.encode("latin-1", "replace").decode("latin-1")


def check_hints(hints: Hints) -> None:
    """Whatever was said, hints are bounded, printable, and say the same when they are sent on."""
    for text, most in (
        (hints.job_id, _MAX_JOB_CHARS),
        (hints.tenant, MAX_ID_CHARS),
        (hints.parent, MAX_ID_CHARS),
        (hints.conversation, _MAX_JOB_CHARS),
        (hints.tool, MAX_TOOL_CHARS),
    ):
        if text is not None and not (0 < len(text) <= most and text.replace("\t", "").isprintable()):
            raise Wrong(f"unbounded or unprintable: {text[:200]!r}")
    for seconds in (hints.expected_tool_s, hints.retain_s, hints.deadline_s):
        if seconds is not None and not 0 <= seconds <= MAX_EXPECTED_TOOL_S:
            raise Wrong(f"unbounded: {seconds}")
    if hints.wish is not None:
        check_wish(hints.wish)
    if hints.tenant is None and parse_hints(make_fields(hints)) != hints:
        raise Wrong(f"sent on as {make_fields(hints)}, {hints} is read as another")
    if not are_xargs(make_fields(hints)):
        raise Wrong(f"vLLM does not take {make_fields(hints)}")


def check_wish(wish: Wish) -> None:
    """Whatever was wished, it is bounded, and its marks are found, or not, within the prompt."""
    is_known = {wish.dialect, *wish.malformed} <= set(DIALECTS)
    if not is_known or len(wish.spans) > MAX_SPANS or not (wish.spans or wish.malformed):
        raise Wrong(f"not bounded: {wish}")
    finder = MarkFinder(lambda tokens: "a b " * len(tokens), lambda text: range(len(text)))
    found = wish.resolve(lambda mark: finder.find(mark, range(500)))
    for span in found.spans:
        is_within = span.num_tokens is None or 0 <= span.num_tokens <= MAX_PROMPT_TOKENS
        if not (0 < span.keep_s <= MAX_KEEP_S and is_within and span.mark is None):
            raise Wrong(f"unbounded: {span}")
    for has_tier in (False, True):
        _, text = make_wish_header(wish, judge(wish, 600.0, has_tier=has_tier)) or ("", "")
        if not (text.isascii() and text.isprintable() and len(text) < 400):
            raise Wrong(f"no header's text: {text!r}")


def read_wishes(data: bytes) -> None:
    """What a body wishes, in any dialect; and the text of a wish, whoever wrote it."""
    value = load_json(data)
    body = value if isinstance(value, dict) else {"messages": value, "kv_hints": value, "nvext": value}
    xargs = body.get("vllm_xargs")
    wish = read_wish(body, xargs if isinstance(xargs, dict) else {}, 0.0)
    if wish is not None:
        check_wish(wish)
        if read_wish_text(write_wish(wish)) != wish:
            raise Wrong(f"sent on, {wish} is read as another")
    written = read_wish_text(data.decode(errors="replace"))
    if written is not None:
        check_wish(written)


def read_hint_fields(data: bytes) -> None:
    """`vllm_xargs`, vLLM's session id, headers, and the tenant that only the server may sign."""
    value = load_json(data)
    fields = _get(value, "fields")
    check_hints(parse_hints(fields, _get(value, "session_id")))
    check_hints(parse_hints(get_header_fields(_get_headers(_get(value, "headers")))))
    with patch.dict(os.environ, SECRET):
        verifier = TenantVerifier()
        if not json.loads(verifier.answer(make_introduction()))["ok"]:
            raise Wrong("the server is not known to have tenants")
        _check_forgeries(verifier, fields if isinstance(fields, dict) else {}, data)


def _check_forgeries(verifier: TenantVerifier, fields: dict[str, Any], data: bytes) -> None:
    """Nobody but the server names the tenant: no field that came, and no signature that was altered."""
    signed = sign("acme")[FIELD]
    for each in (fields, *({**fields, FIELD: value} for value in forge(signed, data))):
        read = verifier.read(each)
        if read is not None:
            raise Wrong(f"the client chose its tenant: {read.get('tenant')!r} by {each.get(FIELD)!r}")
    read = verifier.read({**fields, FIELD: signed})
    if read is None or read.get("tenant") != "acme" or FIELD in read:
        raise Wrong("the tenant that was signed is not the one that was read")


def forge(signed: str, data: bytes) -> list[Any]:
    """What a client may write who has seen the signature of `acme`: altered, cut, or made up."""
    cut = len(data) % 64
    altered = signed[:cut] + signed[cut + 1 :]
    return [signed.replace("acme", "bob"), altered, signed[:cut], ":acme", "acme", "", 7]


def read_identity(data: bytes) -> None:
    """A whole request, as the simulated server and the proxy read it."""
    value = load_json(data)
    body = _get(value, "body")
    path = _get(value, "path")
    path = path if isinstance(path, str) else GENERATION_PATHS[len(data) % len(GENERATION_PATHS)]
    check_hints(
        read_hints(body if isinstance(body, dict) else {}, _get_headers(_get(value, "headers")), path)
    )


def pass_middleware(data: bytes) -> None:
    """A body in pieces through the middleware: nothing changes but `vllm_xargs` and the length.

    Halves of characters are replaced in what vLLM sends on to its engines. The tenant reaches the engine,
    whatever the body is.
    """
    path = GENERATION_PATHS[len(data) % len(GENERATION_PATHS)]
    headers = [(b"content-length", str(len(data)).encode()), (b"x-tenant", b"acme")]
    if len(data) % 3 == 0:
        headers.append((b"x-session-id", data[:40].replace(b"\n", b"").replace(b"\r", b"")))
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers}
    with patch.dict(os.environ, {**SECRET, HEADER_VARIABLE: "X-Tenant"}):
        received, scope, said = get_loop().run_until_complete(_pass_on(data, scope))
    length = dict(scope["headers"]).get(b"content-length")
    if length is not None and int(length) != len(received):
        raise Wrong(f"content-length {length.decode()} of a body of {len(received)} bytes")
    try:
        before = json.loads(data)
    except (ValueError, RecursionError):
        before = None
    if not isinstance(before, dict):
        if received != data:
            raise Wrong("a body that is no JSON object was changed")
        return
    for name in before.keys() & {"vllm_xargs", "kv_transfer_params"}:
        before[name] = _without_halves(before[name])
    after = json.loads(received)
    if repr({**before, "vllm_xargs": 0}) != repr({**after, "vllm_xargs": 0}) and received != data:
        raise Wrong("more than vllm_xargs was changed")
    xargs = before.get("vllm_xargs") or {}
    if repr(after) != repr(before) and not are_xargs(after["vllm_xargs"]):
        raise Wrong(f"vLLM does not take {after['vllm_xargs']!r}")
    usable = get_usable_fields(xargs) if isinstance(xargs, dict) else {}
    if isinstance(xargs, dict) and any(
        repr(after["vllm_xargs"].get(name)) != repr(xargs[name])
        for name in xargs
        if isinstance(after.get("vllm_xargs"), dict) and name not in ("tenuto_tenant", "agentic_context")
        # Unusable hints give way to what the rest of the request says.
        if name in usable or name not in HINT_FIELDS
    ):
        raise Wrong("what was in vllm_xargs is not there any more")
    sent = {name.decode(): value.decode("latin-1") for name, value in headers}
    given = {**before, "vllm_xargs": write_context_as_text(xargs)}
    _check_passed_wish(read_hints(given, sent, path, time.time()).wish, after, said)


def _without_halves(value: Any) -> Any:
    """The same JSON with a question mark for each half of a character."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _check_passed_wish(own: Wish | None, after: dict[str, Any], said: str | None) -> None:
    """The wish that the engine gets is the client's own and bounded; the answer promises what is allowed."""
    xargs = after.get("vllm_xargs")
    text = xargs.get(WISH_FIELD) if isinstance(xargs, dict) and are_xargs(xargs) else None
    wish = read_wish_text(text)
    if (wish is None) != (said is None):
        raise Wrong(f"the wish {text!r} is answered by {said!r}")
    if wish is None or said is None:
        return
    check_wish(wish)
    check_answer(said, asked_s=wish.keep_s, most_s=MAX_LEASE_S)
    if own is None or (own.dialect, own.malformed) != (wish.dialect, wish.malformed):
        raise Wrong(f"{own} became {wish}")


def check_answer(said: str, *, asked_s: float, most_s: float) -> None:
    """What a wish's header promises is no more than was asked and is allowed, and is called what it is."""
    result, *rest = said.split("; ")
    facts = dict(each.split("=", 1) for each in rest)
    gpu_s, below_s = (float(facts.get(name, 0)) for name in ("gpu", "below"))
    if gpu_s > most_s or below_s > MAX_KEEP_S or max(gpu_s, below_s) > math.ceil(asked_s):
        raise Wrong(f"more than is allowed, or than was asked: {said}")
    if result == "accepted" and max(gpu_s, below_s) < math.floor(asked_s):
        raise Wrong(f"it was clipped: {said}")
    if result == "refused" and max(gpu_s, below_s):
        raise Wrong(f"it was not refused: {said}")


async def _pass_on(data: bytes, scope: dict[str, Any]) -> tuple[bytes, dict[str, Any], str | None]:
    seen: dict[str, Any] = {}
    cut = len(data) // 3
    messages = [
        {"type": "http.request", "body": data[:cut], "more_body": True},
        {"type": "http.request", "body": data[cut:], "more_body": False},
    ]

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen["body"], seen["scope"] = body, scope
        given = load_json(body)
        xargs = given.get("vllm_xargs") if isinstance(given, dict) else None
        params = SimpleNamespace(extra_args=dict(xargs) if isinstance(xargs, dict) else None)
        stamp(params)
        read = TenantVerifier().read(params.extra_args)
        if read is None or read.get("tenant") != "acme":
            raise Wrong(f"the tenant does not reach the engine in {params.extra_args}")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if "body" not in seen:
            raise Wrong(f"the middleware answered by itself: {message}")
        seen["headers"] = dict(message["headers"])

    middleware = Middleware(app, dp_size=2)
    middleware._wishes._settings = read_settings({"tenuto": {"limits": {"max_lease_s": MAX_LEASE_S}}})
    await middleware(scope, receive, send)
    said = seen["headers"].get(WISH_HEADER.lower().encode())
    return seen["body"], seen["scope"], None if said is None else said.decode()


@cache
def get_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process."""
    return asyncio.new_event_loop()


def edit_head(data: bytes) -> None:
    """A body whose lines an operator drops and moves: no text but the head's changes, and no line is lost."""
    request = load_json(data)
    request = request if isinstance(request, dict) else {"messages": request}
    edited = HeadLines(["x-.*"], ["Today is .*"]).edit(request)
    json.dumps(edited)
    if not edited.keys() <= {"system", "instructions", "messages", "input"}:
        raise Wrong(f"{sorted(edited)} were changed")
    for name, after in edited.items():
        before = request[name]
        if sorted(_get_lines(before, kept=True)) != sorted(_get_lines(after, kept=True)):
            raise Wrong(f"lines of {name} that nobody named were changed")
        if (
            name in ("messages", "input")
            and before[_count_head(before) : -1] != after[_count_head(before) : -1]
        ):
            raise Wrong("a message behind the head was changed")
    if any(HeadLines(["x-.*"]).edit({**request, **edited})):
        raise Wrong("a line that was to be dropped is still there")


def _count_head(messages: list[Any]) -> int:
    """Messages before the first that is the model's, or is none."""
    is_first = (not isinstance(message, dict) or not is_head(message) for message in messages)
    return next((number for number, is_end in enumerate(is_first) if is_end), len(messages))


def _get_lines(value: Any, *, kept: bool) -> list[str]:
    """All lines of a value's texts but the empty ones; `kept`: without those that are dropped or moved."""
    if isinstance(value, str):
        lines = [line for line in value.split("\n") if line]
        return [line for line in lines if not (kept and re.fullmatch("x-.*|Today is .*", line))]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [line for each in inner for line in _get_lines(each, kept=kept)]


def route(data: bytes) -> None:
    """A request as a router sees it, and its way through the books of the data-parallel ranks."""
    value = load_json(data)
    body, headers = _get(value, "body"), _get_headers(_get(value, "headers"))
    body = body if isinstance(body, dict) else value if isinstance(value, dict) else {"prompt": value}
    path = GENERATION_PATHS[len(data) % len(GENERATION_PATHS)]
    arrival = read_arrival("turn", body, headers, path)
    if arrival.num_prompt_tokens < 1 or len(arrival.parts) > MAX_PARTS:
        raise Wrong(f"unbounded: {arrival.num_prompt_tokens} tokens in {len(arrival.parts)} parts")
    if any(part.num_tokens < 1 or len(part.name) > MAX_ID_CHARS for part in arrival.parts):
        raise Wrong("a part that is empty, or whose name is not bounded")
    ranks = Ranks(2, get_now_s=lambda: 1.0)
    for is_answered in (True, False):
        turn = ranks.open_turn(body, headers, path)
        if turn.rank not in (0, 1):
            raise Wrong(f"rank {turn.rank}")
        if is_answered:
            turn.hear({"type": "http.response.start", "status": 200})
            turn.hear({"type": "http.response.body", "body": b"x"})
        turn.close()
    if any(ranks.dispatcher.engines.ready[str(rank)].num_open for rank in range(2)):
        raise Wrong("a turn that is over is still open in the books")


def read_tool_call(data: bytes) -> None:
    """The text of an answer, and every tail of it that a reader begins with."""
    text = data.decode(errors="replace")[:_MAX_TEXT_CHARS]
    is_cut(text)
    for tail in (text, text[-400:]):
        call = find_tool_call(tail)
        if call is None:
            continue
        if not (0 < len(call.name) <= MAX_TOOL_CHARS and call.name.isprintable()):
            raise Wrong(f"unbounded or unprintable name: {call.name[:200]!r}")
        if call.command is not None:
            call.command.encode()
            if not 0 < len(call.command) <= MAX_COMMAND_CHARS:
                raise Wrong(f"a command of {len(call.command)} characters")


def read_shell_command(data: bytes) -> None:
    """A command line, and the time that is predicted for it."""
    read = load_command_times().read(data.decode(errors="replace"))
    if read.log_s is not None and not (math.isfinite(read.log_s) and math.isfinite(read.sd)):
        raise Wrong(f"predicted {read}")


def read_options(data: bytes) -> None:
    """One option per line, for one policy after the other."""
    names = get_policy_names()
    name = names[len(data) % len(names)]
    lines = data.decode(errors="replace").split("\n")
    for line in lines:
        try:
            parse_option(line)
        except ConfigError:
            continue
    known = [line for line in lines if "=" in line]
    load_policy(name, parse_policy_options(known, name))


def read_config(data: bytes) -> None:
    """The additional config of vLLM."""
    settings = read_settings(load_json(data))
    if not 0 <= settings.limits.max_leased_share <= 1 or not math.isfinite(settings.save_every_s):
        raise Wrong(f"out of range: {settings}")
