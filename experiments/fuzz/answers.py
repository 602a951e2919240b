"""Parsers of what others send over HTTP: answers and pages of servers, and requests to our own."""

from __future__ import annotations

from functools import cache
from typing import Any

from experiments.fuzz.guard import Wrong
from experiments.fuzz.requests import GENERATION_PATHS, check_hints
from tenuto.client.http import AnswerStream, RequestFailed
from tenuto.client.metrics import parse_page
from tenuto.proxy import exchange as recorded
from tenuto.proxy.exchange import Exchange, Unreadable
from tenuto.proxy.proxy import UsageFilter, ask_for_usage
from tenuto.report.top import Window, make_state
from tenuto.sim.server.request import Served, read_request
from tenuto.sim.server.tokens import PieceTokenizer
from tenuto.wire import get_format

_CONTENT_TYPES = ("text/event-stream", "application/json")
_ENCODINGS = ("", "", "", "gzip", "deflate")


def ask_simulated_server(data: bytes) -> None:
    """A request's body; the answer's plan must stay within the model's context."""
    path = GENERATION_PATHS[len(data) % 2]
    request = read_request(data, {"x-session-id": "s"}, path, get_served())
    check_hints(request.hints)
    if not 0 < len(request.prompt_ids) < get_served().max_model_len:
        raise Wrong(f"a prompt of {len(request.prompt_ids)} tokens")


@cache
def get_served() -> Served:
    """A model that the simulated server serves."""
    return Served(
        model_name="tiny", max_model_len=4096, answer_tokens=32, tokenizer=PieceTokenizer(vocab_size=1000)
    )


def read_recorded_request(data: bytes) -> None:
    """A request's body, as the recording proxy reads and changes it."""
    path = GENERATION_PATHS[len(data) % len(GENERATION_PATHS)]
    ask_for_usage(path, data)
    exchange = _make_exchange(path, b"")
    exchange.add_request(data)
    try:
        request = recorded.read_request(exchange)
    except Unreadable:
        return
    check_hints(request.hints)


def read_answers(data: bytes) -> None:
    """An answer in any format, as the proxy and the bench's client read it, in pieces of any size."""
    exchange = _make_exchange(GENERATION_PATHS[0], data)
    passed = UsageFilter()
    out = b"".join(passed.feed(piece) for _, piece in exchange.chunks) + passed.finish()
    if len(out) > len(data) or (b'"usage"' not in data and out != data):
        raise Wrong("the client would get other bytes than the server sent")
    for path in GENERATION_PATHS:
        exchange.path = path
        try:
            response = recorded.read_response(exchange)
            recorded.find_tool_call(response)
            recorded.get_pieces(response, path)
        except Unreadable:
            pass
        stream = AnswerStream(get_format(path))
        try:
            for at_s, piece in exchange.chunks:
                stream.feed(piece, at_s)
            stream.finish()
        except RequestFailed as error:
            str(error).encode()


def _make_exchange(path: str, answer: bytes) -> Exchange:
    exchange = Exchange(path=path, headers={"x-session-id": "s"}, arrival_s=1.0, start_s=0.0, status=200)
    exchange.content_type = _CONTENT_TYPES[len(answer) % len(_CONTENT_TYPES)]
    exchange.content_encoding = _ENCODINGS[len(answer) % len(_ENCODINGS)]
    size = 1 + len(answer) // 4
    for number, start in enumerate(range(0, len(answer), size)):
        exchange.add_answer(answer[start : start + size], 2.0 + number)
    exchange.end, exchange.end_s = "whole", 10.0
    return exchange


def read_metrics_page(data: bytes) -> None:
    """A server's page twice, and the state that `tenuto top` makes of it."""
    window = Window(60.0)
    for at_s in (1.0, 2.0):
        window.add(parse_page(data.decode(errors="replace"), at_s))
    state: dict[str, Any] = make_state(window, {"url": "http://x", "version": None})
    repr(state)
