"""The wire: the formats of OpenAI and Anthropic, streamed and whole, read and written.

request     what requests share: messages, sampling, strict fields, refusals
response    what responses share: deltas and their sum, usage, event streams
openai_chat, openai_completions, openai_responses, anthropic_messages: one format each
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from tenuto.wire import anthropic_messages, openai_chat, openai_completions, openai_responses
from tenuto.wire.request import Body, MalformedError, Message, RequestError
from tenuto.wire.response import Delta, Head, Usage


class StreamWriter(Protocol):
    """Writes the events of one streamed response."""

    def write(self, delta: Delta) -> bytes:
        """The events of a piece of the answer."""

    def end(self, usage: Usage | None) -> bytes:
        """The events after the last token, with the usage if the client wants it."""

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that an error interrupts."""


class Format(Protocol):
    """One format: a module of this package."""

    PATH: str
    """Requests in this format go to this path, or to one that ends with it."""
    ID_PREFIX: str
    """The ids of responses begin with it."""
    LIMITS: tuple[str, ...]
    """Fields in which a request may limit its number of tokens; the first one counts."""

    MUST_LIMIT: bool
    """Every request says a limit. So the limit says nothing about the answer that is expected."""
    COUNTS_ALWAYS: bool
    """Streams have the counts of tokens, asked for or not."""

    def read_prompt(self, body: Body, *, strict: bool = True) -> str | list[int] | Iterator[Message]:
        """A request's prompt: text, token ids or messages. Raises RequestError."""

    def read_tools(self, body: Body) -> dict[str, Any]:
        """The schema of each tool's arguments, by the tool's name. Raises RequestError."""

    def read_tool_choice(self, body: Body) -> tuple[str, str | None]:
        """`none`, `auto`, `required` or `function`, and this function's name. Raises RequestError."""

    def read_logprobs(self, body: Body) -> int | None:
        """How many alternatives of each token to show; None: no probabilities. Raises RequestError."""

    def read_whole(self, body: Body) -> Delta:
        """Read a response that is not streamed."""

    def read_event(self, event: Body) -> Delta:
        """Read an event of a stream."""

    def write_whole(self, head: Head, delta: Delta) -> dict[str, Any]:
        """Write a response that is not streamed."""

    def Writer(self, head: Head) -> StreamWriter:
        """Begin a streamed response."""


FORMATS: dict[str, Format] = {
    each.PATH: each for each in (openai_chat, openai_completions, openai_responses, anthropic_messages)
}
PATHS = tuple(FORMATS)


def get_format(path: str) -> Format:
    """The format of requests to a path that ends with one of `PATHS`."""
    return next(form for end, form in FORMATS.items() if path.endswith(end))


def write_error(path: str, error: RequestError) -> dict[str, Any]:
    """The body that refuses a request to this path, as vLLM writes it."""
    is_own = anthropic_messages.PATH in path and not isinstance(error, MalformedError)
    return anthropic_messages.write_error(error) if is_own else error.to_json()
