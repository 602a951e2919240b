"""Answers requests: each goes through the engine, and its tokens are sent as they are generated."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from aiohttp import web

from tenuto.core.requests.identity import make_job_header
from tenuto.core.requests.tool_calls import find_tool_call
from tenuto.sim.server.answer import choose_words, get_seed
from tenuto.sim.server.ask import Ask, Served, read_ask
from tenuto.sim.server.content import ContentTree, TokenIds
from tenuto.sim.server.engine import ServedRequest, ServedTurn
from tenuto.sim.server.pace import Pacer
from tenuto.sim.server.replies import Reply
from tenuto.sim.server.template import write_call

LARGE_BODY_BYTES = 2**17
"""A larger body is parsed in a thread, so that the event loop can send tokens meanwhile."""


class Generator:
    """Answers requests with one engine."""

    def __init__(self, pacer: Pacer, served: Served) -> None:
        self._pacer = pacer
        self._served = served
        self._content = ContentTree()
        self._numbers = itertools.count()
        self._run_id = uuid.uuid4().hex[:12]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle a request for an answer. If the client disconnects, its turn ends."""
        ask = await self._read(request)
        # Ids increase with the arrival time, because ties between turns are broken by id.
        turn_id = f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{self._run_id}{next(self._numbers):09d}"
        engine_request, answer_ids = self._make_request(ask, turn_id)
        reply = Reply(ask, answer_ids, turn_id, self._served.model_name, self._served.tokenizer.words)
        news = asyncio.Event()
        header = make_job_header(ask.hints.name)
        headers = {} if header is None else dict([header])
        turn = self._pacer.submit(engine_request, news.set)
        try:
            await _wait(turn, news)
            if ask.sampling.is_stream:
                return await _stream(request, turn, news, reply, headers)
            while not turn.is_finished:
                await _wait(turn, news)
            return web.json_response(reply.write_whole(turn), headers=headers)
        finally:
            self._pacer.abort(turn)

    async def _read(self, request: web.Request) -> Ask:
        raw = await request.read()
        # If a header occurs several times, the first one counts, as in vLLM.
        headers = {name.lower(): request.headers[name] for name in request.headers}
        if len(raw) < LARGE_BODY_BYTES:
            return read_ask(raw, headers, request.path, self._served)
        return await asyncio.to_thread(read_ask, raw, headers, request.path, self._served)

    def _make_request(self, ask: Ask, turn_id: str) -> tuple[ServedRequest, TokenIds]:
        """Make the engine's request and the tokens of its future answer."""
        plan, sampling, tokenizer = ask.plan, ask.sampling, self._served.tokenizer
        seed = get_seed(sampling, ask.prompt_ids, turn_id)
        prompt = self._content.place(ask.prompt_ids)
        output, answer_ids = self._content.place_answer(
            prompt, lambda number: choose_words(tokenizer, plan, f"{seed}/{number}", begins=ask.is_chat)
        )
        call = plan.call
        tool = None if call is None else find_tool_call(write_call(call.name, call.arguments))
        request = ServedRequest(
            turn_id=turn_id,
            prompt=prompt,
            output=output,
            arrival_s=0.0,
            priority=sampling.priority,
            hints=ask.hints,
            tool=tool,
            # An answer that ends at its length limit does not say whether the job continues.
            is_last=None if plan.finish_reason == "length" else tool is None,
            key=sampling.cache_salt,
            prompt_ids=ask.prompt_ids,
            ends_by="length" if plan.finish_reason == "length" else "stop",
        )
        return request, answer_ids


async def _wait(turn: ServedTurn, news: asyncio.Event) -> None:
    """Wait for the next tokens. Raises the turn's error if it has one."""
    await news.wait()
    news.clear()
    if turn.error is not None:
        raise turn.error


async def _stream(
    request: web.Request, turn: ServedTurn, news: asyncio.Event, reply: Reply, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send tokens as they are generated; several at once if the client or this process is slow."""
    kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**kind, **headers})
    # If the client has disconnected, `answer` ends its turn.
    with suppress(ConnectionResetError):
        await response.prepare(request)
        async for data in _write(turn, news, reply):
            await response.write(data)
        await response.write_eof()
    return response


async def _write(turn: ServedTurn, news: asyncio.Event, reply: Reply) -> AsyncIterator[bytes]:
    """Write the pieces of a stream. Call it once the first tokens exist."""
    num_sent = 0
    while True:
        num_tokens, is_finished = turn.num_tokens, turn.is_finished
        events = reply.write_events(num_sent, num_tokens)
        if is_finished:
            yield events + reply.write_end(turn)
            return
        yield events
        num_sent = num_tokens
        try:
            await _wait(turn, news)
        except Exception as error:
            # It is too late to send an HTTP error status.
            yield reply.write_failure(error)
            return
