"""Answers requests: each goes through the engine, and its tokens are sent as they are generated.

An answer is sent in the request's format (`tenuto.wire`): whole, or as a stream of events.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import log
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from tenuto.core.requests import make_job_header
from tenuto.core.tool_calls import find_tool_call
from tenuto.core.wishes import make_wish_header
from tenuto.sim.server.engine import Pacer, ServedRequest, ServedTurn
from tenuto.sim.server.request import (
    GenerateRequest,
    Served,
    check_model,
    choose_words,
    encode,
    get_seed,
    read_request,
    render_chat,
    write_call,
)
from tenuto.sim.server.tokens import ContentTree, TokenIds, Tokenizer
from tenuto.wire import anthropic_messages, openai_chat
from tenuto.wire.request import Body, MalformedError, RequestError, get_bool, get_list, get_string, parse_json
from tenuto.wire.response import Delta, Head, Logprob, Usage

T = TypeVar("T")
LARGE_BODY_BYTES = 2**17
"""A larger body is parsed in a thread, so that the event loop can keep sending tokens."""


async def read_body(http: web.Request, read: Callable[[bytes], T]) -> T:
    """The result of `read` for a request's body, in a thread if the body is large. Raises RequestError."""
    if http.content_type.lower() != "application/json":
        raise MalformedError("the Content-Type must be application/json, as for vLLM")
    try:
        raw = await http.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from None
    return read(raw) if len(raw) < LARGE_BODY_BYTES else await asyncio.to_thread(read, raw)


class Generator:
    """Answers requests with one engine."""

    def __init__(self, pacer: Pacer, served: Served) -> None:
        self._pacer = pacer
        self._served = served
        self._content = ContentTree()
        self._numbers = itertools.count()
        self._run_id = uuid.uuid4().hex[:12]

    async def answer(self, http: web.Request) -> web.StreamResponse:
        """Handle a request for an answer. If the client disconnects, its turn ends."""
        request = await self._read(http)
        turn_id = f"{request.format.ID_PREFIX}-{self._run_id}{next(self._numbers)}"
        engine_request, answer_ids = self._make_engine_request(request, turn_id)
        head = Head(turn_id, self._served.model_name, int(time.time()), request.body)
        block_size = self._pacer.engine.scheduler.config.kv.block_size
        answer = Answer(request, answer_ids, head, self._served.tokenizer, block_size)
        news = asyncio.Event()
        hints, driver = request.hints, self._pacer.engine.scheduler.driver
        found = make_job_header(hints.name), make_wish_header(hints.wish, driver.judge_wish(hints))
        headers = dict(header for header in found if header is not None)
        turn = self._pacer.submit(engine_request, news.set)
        try:
            await _wait(turn, news)
            if request.sampling.is_stream:
                return await _stream(http, turn, news, answer, headers)
            while not turn.is_finished:
                await _wait(turn, news)
            return web.json_response(answer.write_whole(turn), headers=headers)
        finally:
            self._pacer.abort(turn)

    async def _read(self, http: web.Request) -> GenerateRequest:
        # If a header occurs several times, the first one counts, as in vLLM.
        headers = {name.lower(): http.headers[name] for name in http.headers}
        return await read_body(http, lambda raw: read_request(raw, headers, http.path, self._served))

    def _make_engine_request(self, request: GenerateRequest, turn_id: str) -> tuple[ServedRequest, TokenIds]:
        plan, sampling, tokenizer = request.plan, request.sampling, self._served.tokenizer
        seed = get_seed(sampling, request.prompt_ids, turn_id)
        prompt = self._content.place(request.prompt_ids)
        output, answer_ids = self._content.place_answer(
            prompt, lambda number: choose_words(tokenizer, plan, f"{seed}/{number}", begins=request.is_chat)
        )
        call, salt = plan.call, None
        if sampling.cache_salt is not None:
            # Cached blocks keep it, and a client may send megabytes.
            salt = blake2b(sampling.cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()
        tool = None if call is None else find_tool_call(write_call(call))
        engine_request = ServedRequest(
            turn_id=turn_id,
            prompt=prompt,
            output=output,
            arrival_s=0.0,
            priority=sampling.priority,
            hints=request.hints,
            tool=tool,
            # An answer that ends at its length limit does not say whether the job continues.
            is_last=None if plan.finish_reason == "length" else tool is None,
            key=salt,
            prompt_ids=request.prompt_ids,
            ends_by="length" if plan.finish_reason == "length" else "stop",
        )
        return engine_request, answer_ids


@dataclass
class Answer:
    """Writes one answer, up to the tokens that the engine has computed."""

    request: GenerateRequest
    token_ids: TokenIds
    head: Head
    tokenizer: Tokenizer
    block_size: int

    def __post_init__(self) -> None:
        self._writer = self.request.format.Writer(self.head)

    def write_whole(self, turn: ServedTurn) -> dict[str, object]:
        """Return the response to a request that does not stream."""
        delta = self._make_delta(0, self.request.plan.num_tokens)
        delta.usage = self._get_usage(turn, turn.num_tokens)
        return self.request.format.write_whole(self.head, delta)

    def write_events(self, turn: ServedTurn, start: int, end: int) -> bytes:
        """Return the events for the answer's tokens from `start` up to, but not including, `end`."""
        delta = self._make_delta(start, end)
        if self.request.sampling.counts_pieces:
            delta.usage = self._get_usage(turn, end)
        return self._writer.write(delta)

    def write_end(self, turn: ServedTurn) -> bytes:
        """Return the events after the last token."""
        wanted = self.request.sampling.includes_usage
        return self._writer.end(self._get_usage(turn, turn.num_tokens) if wanted else None)

    def write_failure(self, error: Exception) -> bytes:
        """Return the end of a stream that an error interrupts."""
        return self._writer.fail(RequestError(f"the server failed: {type(error).__name__}", status=500))

    def _make_delta(self, start: int, end: int) -> Delta:
        request, plan = self.request, self.request.plan
        # The tokens of a tool call are not in the text.
        token_ids = self.token_ids[start : min(end, plan.num_words)]
        words = self.tokenizer.words
        delta = Delta(text=words.spell(token_ids, begins=request.is_chat and start == 0))
        if end == plan.num_tokens:
            delta.finish_reason = plan.finish_reason
            delta.calls = [] if plan.call is None else [plan.call]
        if request.sampling.returns_ids:
            delta.token_ids = list(self.token_ids[start:end])
            delta.prompt_ids = list(request.prompt_ids) if start == 0 else None
        if request.num_logprobs is not None:
            delta.logprobs = [
                self._make_logprob(token_id, request.num_logprobs) for token_id in self.token_ids[start:end]
            ]
        return delta

    def _make_logprob(self, token_id: int, num_shown: int) -> Logprob:
        """Made up from the token's id: it is the likeliest, and the words after it share half of the rest."""
        likelihood, words = 0.5 + token_id % 499 / 1000, self.tokenizer.words.other
        others = (words[(token_id + number) % len(words)] for number in range(num_shown + 1))
        ids = [token_id, *(each for each in others if each != token_id)][:num_shown]
        chances = [likelihood] + [(1 - likelihood) / 2**number for number in range(1, num_shown)]
        top = [(self._spell(each), log(chance)) for each, chance in zip(ids, chances, strict=False)]
        return Logprob(self._spell(token_id), log(likelihood), top)

    def _spell(self, token_id: int) -> str:
        return self.tokenizer.words.get_token(token_id) or self.tokenizer.decode([token_id])

    def _get_usage(self, turn: ServedTurn, num_tokens: int) -> Usage:
        num_prompt = len(self.request.prompt_ids)
        # Only full blocks are cached.
        num_written = num_prompt // self.block_size * self.block_size - turn.num_hit_tokens
        return Usage(num_prompt, num_tokens, turn.num_hit_tokens, max(0, num_written))


async def _wait(turn: ServedTurn, news: asyncio.Event) -> None:
    """Wait for the next tokens. Raises the turn's error if it has one."""
    await news.wait()
    news.clear()
    if turn.error is not None:
        raise turn.error


async def _stream(
    http: web.Request, turn: ServedTurn, news: asyncio.Event, answer: Answer, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send tokens as they are generated; several at once if the client or this process is slow."""
    kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**kind, **headers})
    if http.version < HttpVersion11:
        response.force_close()  # HTTP/1.0 has no other end of a stream, and aiohttp forgets it
    # If the client has disconnected, `Generator.answer` ends its turn.
    with suppress(ConnectionResetError):
        await response.prepare(http)
        async for data in _write(turn, news, answer):
            await response.write(data)
        await response.write_eof()
    return response


async def _write(turn: ServedTurn, news: asyncio.Event, answer: Answer) -> AsyncIterator[bytes]:
    """Write the pieces of a stream. Call it once the first tokens exist."""
    num_sent = 0
    while True:
        num_tokens, is_finished = turn.num_tokens, turn.is_finished
        events = answer.write_events(turn, num_sent, num_tokens)
        if is_finished:
            yield events + answer.write_end(turn)
            return
        yield events
        num_sent = num_tokens
        try:
            await _wait(turn, news)
        except Exception as error:
            # It is too late to send an HTTP error status.
            yield answer.write_failure(error)
            return


MAX_TOKENS = 2**25
"""Longest text that is tokenized, in tokens: as in vLLM it may be longer than the model's context."""


class TokenPages:
    """Tokens without an answer: `/tokenize`, `/detokenize`, and the count that Anthropic's clients ask for.

    They count like the server itself: the prompt of a request with the same messages has the same tokens.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    def make_handler(self, answer: Callable[[Body], dict[str, Any]]) -> Handler:
        """The handler of a page with this answer, one of the methods below."""

        async def handle(http: web.Request) -> web.Response:
            return web.json_response(await read_body(http, partial(self._read, answer)))

        return handle

    def _read(self, answer: Callable[[Body], dict[str, Any]], raw: bytes) -> dict[str, Any]:
        try:
            body = parse_json(raw)
            check_model(get_string(body, "model"), self._served)
            return answer(body)
        except RecursionError:
            raise RequestError("the body is nested too deep") from None

    def tokenize(self, body: Body) -> dict[str, Any]:
        """The tokens of a prompt or of messages."""
        tokenizer = self._served.tokenizer
        if "messages" in body:
            messages, tools = openai_chat.read_prompt(body), get_list(body, "tools")
            token_ids = render_chat(tokenizer, messages, tools, MAX_TOKENS)
        elif isinstance(body.get("prompt"), str):
            token_ids = encode(tokenizer, body["prompt"], MAX_TOKENS)
        else:
            raise MalformedError("prompt must be a text, or messages a list", "prompt")
        wants_texts = get_bool(body, "return_token_strs")
        return {
            "count": len(token_ids),
            "max_model_len": self._served.max_model_len,
            "tokens": list(token_ids),
            "token_strs": [tokenizer.decode([each]) for each in token_ids] if wants_texts else None,
        }

    def detokenize(self, body: Body) -> dict[str, Any]:
        """The text of tokens."""
        token_ids, tokenizer = body.get("tokens"), self._served.tokenizer
        if not isinstance(token_ids, list) or not all(
            type(each) is int and 0 <= each < tokenizer.vocab_size for each in token_ids
        ):
            raise MalformedError(
                f"tokens must be a list of token ids, each below {tokenizer.vocab_size}", "tokens"
            )
        return {"prompt": tokenizer.decode(token_ids)}

    def count(self, body: Body) -> dict[str, Any]:
        """The number of tokens of messages in Anthropic's format."""
        messages, tools = anthropic_messages.read_prompt(body), get_list(body, "tools")
        number = len(render_chat(self._served.tokenizer, messages, tools, MAX_TOKENS))
        return {"input_tokens": number, "context_management": {"original_input_tokens": number}}
