"""Writes the line of one turn: the request, the answer, and its relation to other turns."""

from __future__ import annotations

from itertools import count
from typing import Any

from tenuto.core.types import ToolCall
from tenuto.proxy.answered import Answered
from tenuto.proxy.asked import Asked
from tenuto.proxy.exchange import Exchange
from tenuto.proxy.sessions import Lane, Sessions
from tenuto.proxy.tokens import Tokenizer
from tenuto.workload.formats.conversations import (
    BLOCK_TOKENS,
    CHARS_PER_TOKEN,
    TOKENS_START,
    Contents,
    Hasher,
    Pieces,
    get_plain_tool,
)
from tenuto.workload.schema import Prompt, Span


class TurnWriter:
    """Makes the lines of one recording's turns, in the order in which the turns ended."""

    def __init__(
        self, hasher: Hasher, contents: Contents, sessions: Sessions, tokenizer: Tokenizer, keep_text: bool
    ) -> None:
        self._hasher = hasher
        self._contents = contents
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._keep_text = keep_text
        self._numbers = count(1)

    def make_row(
        self, exchange: Exchange, asked: Asked, answered: Answered, job: tuple[str | None, str | None]
    ) -> dict[str, Any]:
        """Make the line, without its timestamp, and remember the turn."""
        complaints: list[str] = []
        token_ids = self._find_ids(exchange, asked, answered, complaints)
        output_ids = self._find_output_ids(exchange, asked, answered, has_ids=token_ids is not None)
        if token_ids is None:
            pieces = self._hasher.hash_texts(asked.pieces)
            num_prompt = _count_prompt(asked, answered, complaints)
        else:
            pieces, num_prompt = self._hasher.hash_tokens(token_ids), len(token_ids)
        key, lane = self._sessions.find(job, exchange.arrival_s, pieces, token_ids)
        output = Span(f"out{next(self._numbers)}", _count_output(answered, output_ids))
        prompt = self._contents.resolve(pieces, num_prompt)
        if token_ids is None:
            after = self._hasher.hash_texts(answered.get_pieces(exchange.path), pieces.hashes[-1])
            self._contents.remember((*prompt, output), after, 0, num_prompt)
            self._sessions.remember(key, pieces, None, ())
        else:
            self._remember_tokens(key, pieces, token_ids, (*prompt, output), output_ids or [])
        row = {
            **_describe_job(lane, exchange),
            "input_length": num_prompt,
            "output_length": output.num_tokens,
            **self._describe_tool(answered.find_tool()),
            "prompt": prompt,
            "output": output.content_id,
            **_describe_answer(exchange, asked, answered, num_prompt),
            "complaints": complaints or None,
            "blocks_of": "messages" if token_ids is None else f"{BLOCK_TOKENS} tokens",
            **self._describe_blocks(lane, pieces),
            **(_describe_text(asked, answered) if self._keep_text else {}),
        }
        lane.num_turns += 1
        lane.last_arrival_s, lane.last_end_s = exchange.arrival_s, exchange.end_s
        lane.last_hashes = pieces.hashes
        return {name: value for name, value in row.items() if value is not None}

    def _find_ids(
        self, exchange: Exchange, asked: Asked, answered: Answered, complaints: list[str]
    ) -> list[int] | None:
        """The prompt's token ids: as sent by the client, repeated in the answer, or from /tokenize."""
        known = asked.token_ids or answered.prompt_ids or None
        said = answered.num_prompt_tokens
        if known is not None:
            if said not in (None, len(known)):
                complaints.append(f"prompt count: {len(known)} tokens sent, {said} counted")
            return known
        if asked.tokenize is None:
            return None
        made = self._tokenizer.try_tokenize(asked.tokenize, exchange.headers)
        if made is not None and said not in (None, len(made)):
            # The prompt contains images, or its template has settings that /tokenize is not told about. These
            # are not the prompt's token ids.
            complaints.append(f"prompt count: /tokenize makes {len(made)} tokens, {said} counted")
            return None
        return made

    def _find_output_ids(
        self, exchange: Exchange, asked: Asked, answered: Answered, *, has_ids: bool
    ) -> list[int] | None:
        if answered.token_ids is not None:
            return answered.token_ids
        if not has_ids or not answered.is_plain or not answered.text:
            return None
        ask = {"prompt": answered.text, "add_special_tokens": False}
        if asked.model is not None:
            ask["model"] = asked.model
        return self._tokenizer.try_tokenize(ask, exchange.headers)

    def _remember_tokens(
        self, key: str, pieces: Pieces, token_ids: list[int], whole: Prompt, output_ids: list[int]
    ) -> None:
        """Remember a prompt and its answer by their blocks. `whole` is the spans of both."""
        *prompt, output = whole
        held = output_ids[: output.num_tokens]
        start = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        last_full = pieces.hashes[start // BLOCK_TOKENS - 1 : start // BLOCK_TOKENS] or [TOKENS_START]
        after = self._hasher.hash_tokens([*token_ids[start:], *held], last_full[0])
        spans = (*prompt, Span(output.content_id, len(held))) if held else tuple(prompt)
        self._contents.remember(spans, after, 0, start)
        full = [each for each, size in zip(after.hashes, after.weights, strict=True) if size == BLOCK_TOKENS]
        self._sessions.remember(key, pieces, token_ids, full)

    def _describe_tool(self, tool: ToolCall | None) -> dict[str, str]:
        if tool is None:
            return {}
        row = {"tool": get_plain_tool(tool)}
        return {**row, "command": tool.command} if self._keep_text and tool.command else row

    def _describe_blocks(self, lane: Lane, pieces: Pieces) -> dict[str, Any]:
        """The salted hashes that come after those shared with the session's previous turn."""
        num_same = self._sessions.count_same(lane, pieces)
        return {
            "num_same_blocks": num_same,
            "block_hashes": [each.hex() for each in pieces.hashes[num_same:]],
        }


def _count_prompt(asked: Asked, answered: Answered, complaints: list[str]) -> int:
    """The server's count if there is one, but at least the number of pieces."""
    if answered.num_prompt_tokens is not None:
        return max(len(asked.pieces), answered.num_prompt_tokens)
    complaints.append("no usage: the prompt's length is a guess from its text")
    return max(len(asked.pieces), sum(map(len, asked.pieces)) // CHARS_PER_TOKEN)


def _count_output(answered: Answered, output_ids: list[int] | None) -> int:
    """The number of ids received; otherwise the count of the server, its tokenizer or its events."""
    if answered.token_ids is not None:
        return len(answered.token_ids)
    known = answered.num_output_tokens or (len(output_ids) if output_ids else 0) or answered.num_events
    return known or max(1, len(answered.text) // CHARS_PER_TOKEN)


def _describe_job(lane: Lane, exchange: Exchange) -> dict[str, Any]:
    first = lane.num_turns == 0
    row: dict[str, Any] = {"session": lane.session, "tenant": lane.tenant}
    if not first:
        row["delay"] = round(max(0.0, exchange.arrival_s - lane.last_end_s) * 1000, 3)
        return row
    row["parent"] = lane.parent
    if lane.after is not None:
        session, turn, delay_s = lane.after
        row["after"] = [
            {"session": session, "turn": turn, "event": "sent", "delay": round(delay_s * 1000, 3)}
        ]
    return row


def _describe_answer(exchange: Exchange, asked: Asked, answered: Answered, num_prompt: int) -> dict[str, Any]:
    cached = answered.num_cached_tokens
    first_s = answered.first_token_s if asked.is_stream else None
    return {
        "model": asked.model,
        "path": exchange.endpoint,
        "status": exchange.status,
        "ttft_ms": None if first_s is None else round((first_s - exchange.arrival_s) * 1000, 3),
        "latency_ms": round((exchange.end_s - exchange.arrival_s) * 1000, 3),
        "cached_tokens": cached if cached is not None and cached <= num_prompt else None,
        "is_last_step": asked.hints.is_last,
    }


def _describe_text(asked: Asked, answered: Answered) -> dict[str, Any]:
    return {"prompt_text": asked.pieces or None, "answer_text": answered.text}
