"""OpenAI's plain completions: a prompt of text or token ids, and the text that continues it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenuto.wire.request import Body, RequestError
from tenuto.wire.response import DONE, Delta, Head, Usage, as_text, read_choice, write_event, write_usage

PATH = "/v1/completions"
LIMITS = ("max_completion_tokens", "max_tokens")
_MAX_ID = 2**32 - 1


def read_prompt(body: Body, *, strict: bool = True) -> str | list[int]:
    """The single prompt, as text or token ids; both may be empty. Raises RequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError("only one prompt per request is simulated", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise RequestError("prompt must be a text or a list of token ids, and not empty", "prompt")
    # The exact type is compared, because a bool is an int but not a token. This loop runs in C: prompts are
    # long.
    if prompt and (set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) > _MAX_ID):
        raise RequestError("prompt must be a text or a list of token ids", "prompt")
    return prompt


def write_prompt(token_ids: Iterable[str]) -> str:
    """The request's field for token ids that are written already, as JSON without the braces."""
    return f'"prompt": [{",".join(token_ids)}]'


def read_whole(body: Body) -> Delta:
    """Read a response that is not streamed."""
    choice, delta = read_choice(body)
    delta.text = as_text(choice.get("text")) or ""
    return delta


def read_event(event: Body) -> Delta:
    """Read an event of a stream."""
    return read_whole(event)


def write_whole(head: Head, delta: Delta) -> dict[str, Any]:
    """Write a response that is not streamed."""
    return {
        **_write_head(head),
        "choices": [_write_choice(delta)],
        "usage": write_usage(delta.usage or Usage(), "prompt_tokens", "completion_tokens"),
    }


class Writer:
    """Writes the events of one stream."""

    def __init__(self, head: Head) -> None:
        self._head = _write_head(head)

    def write(self, delta: Delta) -> bytes:
        """The event of a piece of the answer."""
        if not (delta.text or delta.finish_reason) and delta.token_ids is None:
            return b""
        return write_event({**self._head, "choices": [_write_choice(delta)]})

    def end(self, usage: Usage | None) -> bytes:
        """The events after the last token, with the usage if the client wants it."""
        if usage is None:
            return DONE
        counts = write_usage(usage, "prompt_tokens", "completion_tokens")
        return write_event({**self._head, "choices": [], "usage": counts}) + DONE

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that an error interrupts."""
        return write_event(error.to_json()) + DONE


def _write_head(head: Head) -> dict[str, Any]:
    return {"id": head.id, "created": head.created, "model": head.model, "object": "text_completion"}


def _write_choice(delta: Delta) -> dict[str, Any]:
    choice = {"index": 0, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
    ids = {"token_ids": delta.token_ids, "prompt_token_ids": delta.prompt_ids}
    return choice | {name: value for name, value in ids.items() if value is not None}
