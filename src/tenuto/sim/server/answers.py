"""Answers requests: each goes through the engine, and its tokens are sent as they are generated.

An answer is sent as OpenAI's API sends it: whole, or as a stream of events.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from tenuto.core.requests.identity import make_job_header
from tenuto.core.requests.tool_calls import find_tool_call
from tenuto.sim.server.ask import Ask, Served, choose_words, get_seed, read_ask
from tenuto.sim.server.body import RequestError, write_call
from tenuto.sim.server.engine import Pacer, ServedRequest, ServedTurn
from tenuto.sim.server.tokens import ContentTree, TokenIds, Words

DONE = b"data: [DONE]\n\n"


class Reply:
    """Writes one answer, up to the tokens that the engine has computed."""

    def __init__(
        self, ask: Ask, answer_ids: TokenIds, request_id: str, model_name: str, words: Words
    ) -> None:
        self._ask = ask
        self._plan = ask.plan
        self._answer_ids = answer_ids
        self._words = words
        self._object = "chat.completion" if ask.is_chat else "text_completion"
        self._head = {"id": request_id, "created": int(time.time()), "model": model_name}

    def write_whole(self, turn: ServedTurn) -> dict[str, Any]:
        """Return the response to a request that does not stream."""
        sampling, plan = self._ask.sampling, self._plan
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": plan.finish_reason}
        body = {**self._head, "object": self._object, "choices": [choice], "usage": self._get_usage(turn)}
        text = self._spell(0, plan.num_words)
        if self._ask.is_chat:
            calls = {} if plan.call is None else {"tool_calls": [self._write_call()]}
            content = text if text or plan.call is None else None
            choice["message"] = {"role": "assistant", "content": content, **calls}
        else:
            choice["text"] = text
        if sampling.returns_ids:
            choice["token_ids"] = list(self._answer_ids)
            (body if self._ask.is_chat else choice)["prompt_token_ids"] = list(self._ask.prompt_ids)
        return body

    def write_events(self, start: int, end: int) -> bytes:
        """Return the events for the answer's tokens from `start` up to, but not including, `end`."""
        text, is_last = self._spell(start, end), end == self._plan.num_tokens
        returns_ids = self._ask.sampling.returns_ids
        choice: dict[str, Any] = {"index": 0}
        events = []
        if self._ask.is_chat:
            if start == 0:
                events.append(self._write_opening())
            choice["delta"] = {"content": text} if text else {}
            if is_last and self._plan.call is not None:
                choice["delta"]["tool_calls"] = [{"index": 0, **self._write_call()}]
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice["finish_reason"] = self._plan.finish_reason if is_last else None
        if returns_ids:
            choice["token_ids"] = list(self._answer_ids[start:end])
            if start == 0 and not self._ask.is_chat:
                choice["prompt_token_ids"] = list(self._ask.prompt_ids)
        if text or is_last or returns_ids:
            events.append(self._write_event({"choices": [choice]}))
        return b"".join(events)

    def write_end(self, turn: ServedTurn) -> bytes:
        """Return the events after the last token."""
        if not self._ask.sampling.includes_usage:
            return DONE
        return self._write_event({"choices": [], "usage": self._get_usage(turn)}) + DONE

    def write_failure(self, error: Exception) -> bytes:
        """Return the end of a stream that an error interrupts."""
        refusal = RequestError(f"the server failed: {type(error).__name__}", status=500)
        return b"data: %b\n\n" % json.dumps(refusal.to_json()).encode() + DONE

    def _write_opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        event: dict[str, Any] = {"choices": [choice]}
        if self._ask.sampling.returns_ids:
            event["prompt_token_ids"] = list(self._ask.prompt_ids)
        return self._write_event(event)

    def _write_event(self, event: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._ask.is_chat else self._object
        return b"data: %b\n\n" % json.dumps({**self._head, "object": kind, **event}).encode()

    def _write_call(self) -> dict[str, Any]:
        call = self._plan.call
        assert call is not None
        return {
            "id": f"call-{self._head['id']}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _get_usage(self, turn: ServedTurn) -> dict[str, Any]:
        num_prompt_tokens = len(self._ask.prompt_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": turn.num_tokens,
            "total_tokens": num_prompt_tokens + turn.num_tokens,
            "prompt_tokens_details": {"cached_tokens": turn.num_hit_tokens},
        }

    def _spell(self, start: int, end: int) -> str:
        """Return the text of these tokens, without the tokens of a tool call."""
        begins = self._ask.is_chat and start == 0
        return self._words.spell(self._answer_ids[start : min(end, self._plan.num_words)], begins=begins)


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
