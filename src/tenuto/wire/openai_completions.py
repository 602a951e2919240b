"""OpenAI's plain completions: a prompt of text or token ids, and the text that continues it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenuto.wire.request import Body, RequestError
from tenuto.wire.response import ChoiceWriter, Delta, Head, as_text, read_choice, write_choice_body

PATH = "/v1/completions"
ID_PREFIX = "cmpl"
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


read_event = read_whole
"""An event of a stream has the same form."""


def write_whole(head: Head, delta: Delta) -> dict[str, Any]:
    """Write a response that is not streamed."""
    return write_choice_body(head, "text_completion", _write_choice(delta), delta.usage)


class Writer(ChoiceWriter):
    """Writes the events of one stream."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "text_completion")

    def write(self, delta: Delta) -> bytes:
        """The event of a piece of the answer."""
        if not (delta.text or delta.finish_reason) and delta.token_ids is None:
            return b""
        return self._write({"choices": [_write_choice(delta)]})


def _write_choice(delta: Delta) -> dict[str, Any]:
    choice = {"index": 0, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
    ids = {"token_ids": delta.token_ids, "prompt_token_ids": delta.prompt_ids}
    return choice | {name: value for name, value in ids.items() if value is not None}
