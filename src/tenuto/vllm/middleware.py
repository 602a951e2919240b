"""Middleware that tells the scheduler which job a request belongs to.

    vllm serve MODEL --scheduler-cls tenuto.vllm.Scheduler --middleware tenuto.vllm.Middleware

vLLM passes only `vllm_xargs` and its own session id to the scheduler. Clients name their jobs in many other
ways. The middleware copies these names into `vllm_xargs`, by the rules of `tenuto.core.requests`.
It does not copy vLLM's own session id, because vLLM passes that itself.

The middleware also tells the engine the tenant of every request (`tenuto.vllm.tenants`), and it answers
requests under /tenuto/ (`tenuto.vllm.control_http`). A server that has tenants but cannot send them to its
engines does not start.

Responses get a header with the job's name on this server (`JOB_HEADER`), for routers with header affinity. If
the request has a cache wish, another header says what becomes of it (`WishAnswers`).

Everything else passes through unchanged: other paths, bodies that are not a JSON object, are too large or
have too many values in `vllm_xargs`, and requests without new names. If a header names the job, all its
requests still go to one data-parallel rank. A body is read as vLLM reads it: in UTF-8, 16 or 32; its
`Content-Encoding` is ignored. vLLM runs middleware before it checks an API key. The middleware therefore
reads and parses a body only when the application asks for it, which is after that check. The number of bytes
that it reads is bounded.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.core.control import CHANGEABLE
from tenuto.core.dispatcher import Dispatcher, FleetLimits, read_arrival
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.limits import Limits
from tenuto.core.loader import load_policy, load_router
from tenuto.core.requests import (
    MAX_HEAD_MESSAGES,
    Hints,
    are_xargs,
    get_new_fields,
    get_own_session_id,
    is_head,
    make_job_header,
    parse_hints,
    write_context_as_text,
)
from tenuto.core.router import EngineInfo, draw
from tenuto.core.types import LeaseRefusal
from tenuto.core.wishes import judge, make_wish_header
from tenuto.vllm import tenants
from tenuto.vllm.compat.process import get_engine_client, get_own_config, watch_requests
from tenuto.vllm.control_http import (
    STOCK,
    ControlAddresses,
    Message,
    Receive,
    Scope,
    Send,
    ask_engines,
    get_headers,
    read_body,
    send_json,
)
from tenuto.vllm.settings import Settings, read_settings
from tenuto.vllm.tenants import TenantReader

App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 8 * 2**20
"""Larger bodies pass through without being parsed. A million tokens of text take about half this size."""

MAX_VALUES = 10_000
"""Most values of a field that is written again, which takes far longer than to parse it."""

DP_SIZE_VARIABLE = "TENUTO_DP_SIZE"
"""Environment variable with the server's `--data-parallel-size`. If set, each job stays on one rank."""
DP_CHOICE_VARIABLE = "TENUTO_DP_CHOICE"
"""How a job's rank is chosen: `name` (the default) by a hash of its name, `load` by the ranks' work."""

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_UNREAD_PATHS = ("/inference/v1/generate", "/v1/chat/completions/batch", "/cohere/v2/chat", "/invocations")
"""Other ways to generate. Their bodies are not read, so only headers name their jobs."""
_RANK_HEADER = "x-data-parallel-rank"
_SENT_ON = ("vllm_xargs", "kv_transfer_params")

logger = logging.getLogger("vllm.tenuto")


class Middleware:
    """ASGI middleware that copies the name of a request's job to where the scheduler gets it."""

    def __init__(self, app: App, dp_size: int | None = None) -> None:
        self.app = app
        self._dp_size = _get_dp_size() if dp_size is None else dp_size
        chooses_by_load = self._dp_size > 1 and os.environ.get(DP_CHOICE_VARIABLE) == "load"
        self._ranks = Ranks(self._dp_size) if chooses_by_load else None
        self._head_lines = read_head_lines(os.environ)
        self._tenants = TenantReader(app)
        self._wishes = WishAnswers(has_tenants=self._tenants.has_tenants)
        self._control = ControlAddresses(self._tenants, self._wishes.follow)
        self._watched: Any = None
        """The client of the engines whose requests are signed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection. Responses of the application get additional headers and no other change."""
        problem = self._tenants.find_hidden_check(scope)
        if problem is None and not self._tenants.has_tenants:
            await self._handle(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            problem = problem or await self._introduce(scope)
            if problem is not None:
                logger.error("tenuto: the server does not start: %s", problem)
                await receive()
                await send({"type": "lifespan.startup.failed", "message": f"tenuto: {problem}"})
                return
        elif problem := problem or self._watch(scope):
            await _refuse(scope, send, problem)
            return
        with tenants.carry(self._tenants.get(get_headers(scope), scope.get("headers", ()))):
            await self._handle(scope, receive, send)

    def _watch(self, scope: Scope) -> str | None:
        """Sign all requests to the engines from now on; return the reason if that is not possible."""
        client = get_engine_client(scope)
        if client is None or client is self._watched:
            return None
        problem = tenants.find_secret_problem()
        if problem is None and not watch_requests(client, tenants.stamp):
            problem = "Tenuto does not know this vLLM's engine client, so tenants cannot reach the engines"
        if problem is None:
            self._watched = client
        return problem

    async def _introduce(self, scope: Scope) -> str | None:
        """Tell the engines that this server has tenants. Return the reason if they cannot verify them."""
        problem, client = self._watch(scope), get_engine_client(scope)
        if problem is not None or client is None:
            return problem
        answers = await ask_engines(client, tenants.INTRODUCE, tenants.make_introduction())
        if not answers:
            return "Tenuto does not know this vLLM's engine client, so it cannot tell the engines of tenants"
        # Stock vLLM keeps nothing for jobs, so it need not know the tenants.
        wrong = [f"rank {rank['rank']}: {rank['error']}" for rank in answers if not rank["ok"]]
        return "; ".join(each for each in wrong if not each.endswith(STOCK)) or None

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = self._control.find(scope)
        if address is not None:
            await self._control(address, scope, receive, send)
        elif not _is_generation(scope):
            await self.app(scope, receive, send)
        else:
            scope = {**scope, "headers": list(scope["headers"])}
            found = _Found()
            receive = self._read_when_asked(scope, receive, found)
            try:
                await self.app(scope, receive, found.wrap(send))
            finally:
                if found.turn is not None:
                    found.turn.close()

    def _read_when_asked(self, scope: Scope, receive: Receive, found: _Found) -> Receive:
        """A `receive` that returns the rewritten request. It reads nothing before the application asks.

        The API key check refuses a request without asking for its body, so that body is never read.
        """
        pending: list[Message] | None = None

        async def read() -> Message:
            nonlocal pending
            if pending is None:
                is_read = scope["path"].endswith(_PATHS)
                body, after = await read_body(receive, MAX_BODY_BYTES if is_read else 0)
                if after is None:
                    body = self._rewrite(scope, body, found)
                else:
                    self._place_by_headers(scope, found)
                pending = [{"type": "http.request", "body": body, "more_body": after is not None}]
                # The rest of a body that is too large, or the message that the client disconnected.
                pending += [] if after is None else [after]
            return pending.pop(0) if pending else await receive()

        return read

    def _rewrite(self, scope: Scope, body: bytes, found: _Found) -> bytes:
        """The body with the request's hints added to `vllm_xargs`; the same body if there are no new hints.

        Also updates the headers in the scope: the content length and the data-parallel rank.
        """
        parsed = _parse(body)
        if parsed is None:
            return body
        request, text = parsed
        if _holds_many(request.get("vllm_xargs")):
            self._place_by_headers(scope, found)
            return body
        headers = get_headers(scope)
        added = dict(self._head_lines.edit(request)) if self._head_lines else {}
        added |= _replace_surrogates(request, text)
        request = {**request, **added}
        xargs = request.get("vllm_xargs")
        given = {} if xargs is None else xargs
        xargs = write_context_as_text(given)
        # vLLM will refuse other `vllm_xargs` with its own error message.
        is_usable = are_xargs(xargs)
        own_session_id = get_own_session_id(request, headers, scope["path"])
        fields = get_new_fields(request, headers, xargs, own_session_id, time.time()) if is_usable else {}
        if is_usable and (fields or xargs is not given):
            added["vllm_xargs"] = xargs = {**xargs, **fields}
        if added:
            body = _append_members(text, added)
            if "content-length" in headers:
                _set_header(scope, "content-length", str(len(body)))
        if not is_usable:
            return body
        self._place({**request, "vllm_xargs": xargs}, own_session_id, scope, found)
        return body

    def _place_by_headers(self, scope: Scope, found: _Found) -> None:
        """As `_place`, for a request whose body is not read; only if a header names the job."""
        headers = get_headers(scope)
        own_session_id = get_own_session_id({}, headers, scope["path"])
        fields = get_new_fields({}, headers, {}, own_session_id)
        if own_session_id is not None or "job_id" in fields:
            self._place({"vllm_xargs": fields}, own_session_id, scope, found, is_read=False)

    def _place(
        self,
        request: Mapping[str, Any],
        own_session_id: str | None,
        scope: Scope,
        found: _Found,
        *,
        is_read: bool = True,
    ) -> None:
        """Choose the request's data-parallel rank, and the headers of its response."""
        xargs, headers = request["vllm_xargs"], get_headers(scope)
        # The choice of rank must not trust the tenant that a client claims, either.
        known = {**xargs, "tenant": tenants.get_carried()} if self._tenants.has_tenants else xargs
        hints = parse_hints(known, own_session_id)
        headers_found = make_job_header(hints.name), self._wishes.make_header(get_engine_client(scope), hints)
        found.headers = [header for header in headers_found if header is not None]
        job_id = hints.job_id or hints.conversation
        if _RANK_HEADER in headers:
            return
        if self._ranks is not None:
            found.turn = self._ranks.open_turn(
                {**request, "vllm_xargs": known}, headers, scope["path"], is_read=is_read
            )
            _set_header(scope, _RANK_HEADER, str(found.turn.rank))
        elif self._dp_size > 1 and job_id is not None:
            _set_header(scope, _RANK_HEADER, str(draw(job_id) % self._dp_size))


class _Found:
    """What the middleware found in one request."""

    headers: Sequence[tuple[str, str]] = ()
    """Headers to add to its response."""
    turn: RankedTurn | None = None

    def wrap(self, send: Send) -> Send:
        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), text.encode()) for name, text in self.headers]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            if self.turn is not None:
                self.turn.hear(message)
            await send(message)

        return send_with_name


def _get_dp_size() -> int:
    value = os.environ.get(DP_SIZE_VARIABLE, "1")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{DP_SIZE_VARIABLE} must be a positive number, got {value!r}")
    return int(value)


def _is_generation(scope: Scope) -> bool:
    return bool(
        scope["type"] == "http"
        and scope["method"] == "POST"
        # Compare the end of the path, because the path may begin with the server's root path.
        and scope["path"].endswith(_PATHS + _UNREAD_PATHS)
    )


def _parse(body: bytes) -> tuple[dict[str, Any], bytes] | None:
    """The request as vLLM's `json.loads` reads it, and its text in UTF-8; None if it is not an object."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        request = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return (request, text.encode(errors="surrogatepass")) if isinstance(request, dict) else None


def _holds_many(value: Any) -> bool:
    """Whether the lists and objects in a JSON value hold over `MAX_VALUES` values. Counts no further."""
    num_values, level = 0, [value]
    while level:
        inner = [each for each in level if isinstance(each, dict | list)]
        num_values += sum(map(len, inner))
        if num_values > MAX_VALUES:
            return True
        level = [
            *itertools.chain.from_iterable(
                each.values() if isinstance(each, dict) else each for each in inner
            )
        ]
    return False


def _replace_surrogates(request: Mapping[str, Any], text: bytes) -> dict[str, Any]:
    """The fields that vLLM sends on to its engines, without halves of characters; empty if they have none.

    Its messages to the engines are UTF-8, which cannot hold these. vLLM would answer 500.
    """
    if b"\\u" not in text and b"\xed" not in text:
        return {}
    replaced = {}
    for name in _SENT_ON:
        if _holds_many(request.get(name)):
            continue
        try:
            field = json.dumps(request.get(name), ensure_ascii=False)
            clean = field.encode(errors="replace")
            if b"?" in clean and clean.decode() != field:
                replaced[name] = json.loads(clean)
        except (ValueError, RecursionError):
            continue
    return replaced


def _append_members(text: bytes, members: Mapping[str, Any]) -> bytes:
    """Add members to a JSON object without changing its other bytes.

    If the object already has a member of the same name, JSON parsers use the last one, which is the new one.
    """
    start = text.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + json.dumps(members).encode()[1:]


def _set_header(scope: Scope, name: str, value: str) -> None:
    """Replace or add a header in place, because the application may hold a reference to the list."""
    kept = [each for each in scope["headers"] if each[0].decode("latin-1").lower() != name]
    scope["headers"][:] = [*kept, (name.encode(), value.encode())]


async def _refuse(scope: Scope, send: Send, problem: str) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1011, "reason": "tenants"})
        return
    error = {"message": f"tenuto: {problem}", "type": "Service Unavailable", "param": None, "code": 503}
    await send_json(send, 503, {"error": error})


ROUTER = "tenuto"


class Ranks:
    """The data-parallel ranks behind one API server, as a fleet; chooses one for each request.

    Tenuto's router for fleets decides. A job stays with its KV cache. A new job goes where its work will
    finish soonest. A job moves only between two turns, if that gains more than computing its context again
    costs. One process keeps the router's state, so this needs `--api-server-count 1`.
    """

    def __init__(self, size: int, get_now_s: Callable[[], float] = time.monotonic) -> None:
        self.get_now_s = get_now_s
        self._numbers = itertools.count()
        # Turns are not held back here, because the engine has its own admission.
        self.dispatcher = Dispatcher(load_router(ROUTER), FleetLimits(max_held=0))
        for rank in range(size):
            self.dispatcher.join(EngineInfo(str(rank)), get_now_s())

    def open_turn(
        self, request: Mapping[str, Any], headers: Mapping[str, str], path: str, *, is_read: bool = True
    ) -> RankedTurn:
        """Choose the rank of a request. If its prompt is not read, it counts as long as its job's context."""
        turn_id = str(next(self._numbers))
        arrival = read_arrival(turn_id, request, headers, path)
        if not is_read and arrival.job_id is not None:
            num_tokens = self.dispatcher.get_num_context_tokens(arrival.job_id)
            arrival = arrival._replace(num_prompt_tokens=max(1, num_tokens))
        (sending,) = self.dispatcher.arrive(arrival, self.get_now_s())
        return RankedTurn(self, turn_id, int(sending.engine))


@dataclass(eq=False)
class RankedTurn:
    """One request that was sent to a rank, until its response is complete."""

    _ranks: Ranks
    _turn_id: str
    rank: int
    _num_pieces: int = 0
    _is_refused: bool = False

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message of the response. Each body message counts as one token, as in vLLM's streams."""
        dispatcher, now_s = self._ranks.dispatcher, self._ranks.get_now_s()
        if message["type"] == "http.response.start":
            self._is_refused = message.get("status", 200) >= 400
        elif message["type"] == "http.response.body" and not self._is_refused:
            if not self._num_pieces:
                dispatcher.first_token(self._turn_id, now_s)
            self._num_pieces += 1
            if not message.get("more_body", False):
                dispatcher.finish(self._turn_id, now_s, self._num_pieces)

    def close(self) -> None:
        """The request is over: its response is complete, or the client left."""
        self._ranks.dispatcher.abort(self._turn_id, self._ranks.get_now_s())


class WishAnswers:
    """Makes the response header about a request's cache wish, from the settings of the engines behind it.

    The API server writes it before the engine has seen the request. It knows the settings at start and
    operators' changes through this process. The metrics and the trace have what became of each wish.
    """

    def __init__(self, *, has_tenants: bool = False) -> None:
        self._has_tenants = has_tenants
        self._client: Any = None
        self._settings: Settings | None = None
        """The settings in force; None if nothing is kept here."""
        self._has_tier = False
        self._status: Mapping[str, Any] | None = None
        """After the latest change by an operator; None before any."""

    def make_header(self, client: Any, hints: Hints) -> tuple[str, str] | None:
        """The header for a request with these hints; None if it has no wish. `client`: the AsyncLLM."""
        wish = hints.wish
        if wish is None:
            return None
        if client is not self._client:
            self._client = client
            self._read(client)
        limits = Limits() if self._settings is None else self._settings.limits
        most_s = limits.get_longest_s(hints.retain_s)
        refusal = LeaseRefusal.LAST_TURN if hints.is_last else None
        refusal = refusal if self._keeps(hints) else LeaseRefusal.POLICY
        has_tier = self._has_tier and limits.max_wished_share > 0
        return make_wish_header(wish, judge(wish, most_s, has_tier=has_tier, refusal=refusal))

    def follow(self, status: Mapping[str, Any]) -> None:
        """An operator changed what runs. `status`: as of `Control.get_status`."""
        self._status = status
        if self._settings is not None:
            self._settings = read_settings({"tenuto": {name: status[name] for name in CHANGEABLE}})

    def _read(self, client: Any) -> None:
        found = get_own_config(client)
        config, self._has_tier = (None, False) if found is None else found
        self._settings = None if found is None else read_settings(config)
        if self._status is not None:
            self.follow(self._status)

    def _keeps(self, hints: Hints) -> bool:
        """Whether the settings allow to keep anything for a request with these hints."""
        settings = self._settings
        if settings is None or settings.mode != "on" or (self._has_tenants and hints.tenant is None):
            return False
        if not settings.canary.selects(hints.job_id or "", hints.tenant, hints.group):
            return False
        try:
            return load_policy(settings.policy, settings.options).overrides("retain")
        except TenutoError as error:
            logger.warning("tenuto: the header of wishes: %s", error)
            return False


# Lines in a prompt's head that change. Some clients put a billing line, a date or a counter into the
# instructions. All text after it is then computed again in each turn. An operator may select such lines by
# regular expressions. A line is edited only if it is in the head of the conversation (before the model's
# first answer) and an expression matches the whole line. Nothing else in a request changes. Without
# expressions, requests are not read.

DROP_VARIABLE = "TENUTO_DROP_LINES"
MOVE_VARIABLE = "TENUTO_MOVE_LINES"
"""Environment variables: a JSON list of regular expressions."""


class HeadLines:
    """The lines to remove from a prompt's head, and those to move to the prompt's end."""

    def __init__(self, drop: Sequence[str] = (), move: Sequence[str] = ()) -> None:
        self._drop = [_compile(each, DROP_VARIABLE) for each in drop]
        self._move = [_compile(each, MOVE_VARIABLE) for each in move]

    def __bool__(self) -> bool:
        """Whether there are any expressions."""
        return bool(self._drop or self._move)

    def edit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The members of a request that change, with their new values. Never raises.

        If the last message has no text, or the model continues it, lines stay where they are.
        """
        name = "messages" if isinstance(request.get("messages"), list) else "input"
        messages = request.get(name)
        messages = messages if isinstance(messages, list) else []
        move = self._move if _add_lines(messages, ["x"]) is not None else ()
        moved: list[str] = []

        def edit_text(text: Any) -> Any:
            if not isinstance(text, str):
                return text
            kept: list[str] = []
            for line in text.split("\n"):
                if any(pattern.fullmatch(line) for pattern in self._drop):
                    continue
                is_moved = any(pattern.fullmatch(line) for pattern in move)
                (moved if is_moved else kept).append(line)
            return "\n".join(kept)

        def edit_content(content: Any) -> Any:
            if not isinstance(content, list):
                return edit_text(content)
            return [
                {**part, "text": edit_text(part["text"])} if _holds_text(part) else edit_text(part)
                for part in content
            ]

        edited = {key: edit_content(request[key]) for key in ("system", "instructions") if key in request}
        if messages:
            after = list(messages)
            for index, message in enumerate(messages[:MAX_HEAD_MESSAGES]):
                if not isinstance(message, dict) or not is_head(message):
                    break
                if "content" in message:
                    after[index] = {**message, "content": edit_content(message["content"])}
            edited[name] = _add_lines(after, moved)
        # Compare by identity first: NaN, which Python's JSON reader accepts, is not equal to itself.
        return {key: new for key, new in edited.items() if new is not request[key] and new != request[key]}


def read_head_lines(environment: Mapping[str, str]) -> HeadLines:
    """The operator's expressions. Raises ConfigError naming the variable."""
    return HeadLines(*(_read_patterns(environment, name) for name in (DROP_VARIABLE, MOVE_VARIABLE)))


def _read_patterns(environment: Mapping[str, str], name: str) -> list[str]:
    try:
        patterns = json.loads(environment.get(name) or "[]")
    except ValueError:
        patterns = None
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"{name} must be a JSON list of regular expressions, got {environment[name]!r}")
    return patterns


def _compile(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}: {pattern!r} is not a regular expression: {error}") from None


def _add_lines(messages: list[Any], lines: Sequence[str]) -> list[Any] | None:
    """The messages with these lines at the end of the last one; None if the client has no text there."""
    if not lines:
        return messages
    last = messages[-1] if messages else None
    if isinstance(last, dict) and last.get("role") in ("assistant", "model"):
        return None  # The model goes on with this text, as if it were its own.
    content = last.get("content") if isinstance(last, dict) else None
    added = "\n" + "\n".join(lines)
    if isinstance(content, str):
        content += added
    elif isinstance(content, list) and content and _holds_text(content[-1]):
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + added}]
    else:
        return None
    return [*messages[:-1], {**messages[-1], "content": content}]


def _holds_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
