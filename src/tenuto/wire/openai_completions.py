"""OpenAI's plain completions: a prompt of text or token ids, and the text that continues it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tenuto.wire.request import Body, MalformedError, RequestError, get_num_logprobs
from tenuto.wire.response import ChoiceWriter, Delta, Head, Logprob, as_text, read_choice, write_choice_body

PATH = "/v1/completions"
ID_PREFIX = "cmpl"
LIMITS = ("max_tokens",)
MUST_LIMIT = False
COUNTS_ALWAYS = False
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
        raise MalformedError("prompt must be a text or a list of token ids, and not empty", "prompt")
    # The exact type is compared, because a bool is an int but not a token. This loop runs in C: prompts are
    # long.
    if prompt and (set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) > _MAX_ID):
        raise MalformedError("prompt must be a text or a list of token ids", "prompt")
    return prompt


def read_tools(body: Body) -> dict[str, Any]:
    """There are no tools."""
    return {}


def read_tool_choice(body: Body) -> tuple[str, str | None]:
    """There are no tools."""
    return "none", None


def read_logprobs(body: Body) -> int | None:
    """How many of each token's alternatives are wanted; None: no probabilities at all."""
    return None if body.get("logprobs") is False else get_num_logprobs(body, "logprobs")


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
        self._num_chars = 0

    def write(self, delta: Delta) -> bytes:
        """The event of a piece of the answer."""
        if not (delta.text or delta.finish_reason) and delta.token_ids is None:
            return b""
        choice = _write_choice(delta, self._num_chars)
        self._num_chars += sum(len(each.token) for each in delta.logprobs or ())
        return self._write({"choices": [choice]}, delta.usage)


def _write_choice(delta: Delta, start: int = 0) -> dict[str, Any]:
    """`start`: how many characters came before."""
    logprobs = None if delta.logprobs is None else _write_logprobs(delta.logprobs, start)
    choice = {"index": 0, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
    ids = {"token_ids": delta.token_ids, "prompt_token_ids": delta.prompt_ids}
    return choice | {name: value for name, value in ids.items() if value is not None}


def _write_logprobs(logprobs: Sequence[Logprob], start: int) -> Mapping[str, Any]:
    tokens = [each.token for each in logprobs]
    return {
        "text_offset": list(accumulate(map(len, tokens), initial=start))[:-1],
        "token_logprobs": [each.value for each in logprobs],
        "tokens": tokens,
        # The token itself is among them, whether they were asked for or not.
        "top_logprobs": [{each.token: each.value, **dict(each.top)} for each in logprobs],
    }
