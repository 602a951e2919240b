"""Answers as OpenAI's API sends them: whole, or as a stream of events."""

from __future__ import annotations

import json
import time
from typing import Any

from tenuto.sim.server.ask import Ask
from tenuto.sim.server.content import TokenIds
from tenuto.sim.server.engine import ServedTurn
from tenuto.sim.server.errors import RequestError
from tenuto.sim.server.tokenizer import Words

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
