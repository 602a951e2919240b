"""What requests of all formats share: messages, sampling, strict readers of single fields, refusals.

Requests are untrusted. What is wrong raises RequestError, which names the field in OpenAI's words. A format's
`read_prompt` has two ways: `strict`, for a server that refuses what it does not know; not strict, for a
recorder of what another server took: then odd parts of messages stay as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tenuto.core.errors import TenutoError

T = TypeVar("T")
Body = Mapping[str, Any]
"""A request's body, or an object within it."""

_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 413: "RequestTooLargeError"}


class RequestError(TenutoError):
    """A request is refused: the HTTP status, the reason, and the field that caused it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status

    @property
    def kind(self) -> str:
        """The error's type, as vLLM names it."""
        return _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        return write_error(str(self), self.kind, self.status, param=self.param)


class MalformedError(RequestError):
    """The body does not have the form that the API's schema demands: vLLM's framework refuses it."""

    kind = "Bad Request"

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response. `param` is a path from the body, without brackets."""
        place = re.sub(r"\[(\d+)\]", r".\1", "body" if self.param is None else f"body.{self.param}")
        return write_error(str(self), self.kind, self.status, param=place)


def write_error(message: str, kind: str, code: int, **more: Any) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, **more, "code": code}}


def parse_json(raw: bytes) -> Body:
    """Parse the body as a JSON object. Raises RequestError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise MalformedError("the body must be a JSON object")
    return body


class Message(NamedTuple):
    """One message of a prompt."""

    role: Any
    parts: Sequence[Any]
    """Its content: texts as `str`, other parts as they were sent."""
    calls: Sequence[tuple[Any, Any]] = ()
    """Name and arguments of each tool call, as they were sent."""

    @property
    def text(self) -> str:
        """Its content as one text. Parts that are not text appear as their JSON."""
        return "".join(
            each if isinstance(each, str) else json.dumps(each, sort_keys=True) for each in self.parts
        )


def read_parts(content: Any) -> list[Any]:
    """The parts of a message's content; texts as `str`."""
    if content is None:
        return []
    parts = content if isinstance(content, list) else [content]
    return [
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else part
        for part in parts
    ]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How many tokens a request wants, how they are drawn, and how they are sent."""

    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    is_stream: bool
    includes_usage: bool
    """The stream ends with the counts of tokens."""
    counts_pieces: bool
    """Each piece of the stream carries the counts so far."""
    returns_ids: bool
    is_greedy: bool
    """At temperature 0, equal prompts get equal answers."""
    seed: int | None
    priority: int
    cache_salt: str | None


def read_sampling(body: Body, limits: Sequence[str]) -> Sampling:
    """Read what the formats share. `limits`: where the format may say `max_tokens`. Raises RequestError."""
    given = (get_int(body, name, 1) for name in limits)
    max_tokens = next((each for each in given if each is not None), None)
    stream = get_object(body, "stream_options") or {}
    includes_usage = get_bool(stream, "include_usage")
    min_tokens = get_int(body, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens={min_tokens} is more than max_tokens={max_tokens}", "min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=get_bool(body, "ignore_eos"),
        is_stream=get_bool(body, "stream"),
        includes_usage=includes_usage,
        counts_pieces=get_bool(stream, "continuous_usage_stats") and includes_usage,
        returns_ids=get_bool(body, "return_token_ids"),
        is_greedy=_get(body, "temperature", object, "a number", _is_number) == 0,
        seed=get_int(body, "seed"),
        priority=get_int(body, "priority") or 0,
        cache_salt=get_string(body, "cache_salt"),
    )


_NOT_NULL: Mapping[str, type] = {
    "ignore_eos": bool,
    "min_tokens": int,
    "priority": int,
    "request_id": str,
    "skip_special_tokens": bool,
}
"""Fields of OpenAI's formats that vLLM refuses if they are null, and their types."""


def check_not_null(body: Body) -> None:
    """Refuse nulls, and other types, where vLLM does. Raises RequestError."""
    for name, kind in _NOT_NULL.items():
        if name in body and not isinstance(body[name], kind):
            raise MalformedError(f"{name} must be of type {kind.__name__}, got {show(body[name])}", name)


_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("from 0 to 2", lambda value: 0 <= value <= 2),
    "top_p": ("above 0, and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number of 1 or more; 0 and -1 mean all", lambda value: value >= -1 and value % 1 == 0),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "presence_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "repetition_penalty": ("above 0", lambda value: value > 0),
}
"""What vLLM allows (`SamplingParams` in vllm/sampling_params.py@0.32)."""


def check_ranges(body: Body, names: Iterable[str] = tuple(_RANGES)) -> None:
    """Refuse values of these sampling fields that vLLM refuses. Raises RequestError."""
    for name in names:
        words, is_allowed = _RANGES[name]
        value = _get(body, name, object, "a number", _is_number)
        if isinstance(value, int | float) and not is_allowed(value):
            raise RequestError(f"{name} must be {words}; got {show(value)}", name)


def check_stop(body: Body) -> None:
    """Refuse stop strings that are no strings, or empty. Raises RequestError."""
    stop = body.get("stop")
    texts = stop if isinstance(stop, list) else [stop]
    if stop is not None and not all(isinstance(each, str) for each in texts):
        raise MalformedError("stop must be a text, or a list of texts", "stop")
    if "" in texts:
        raise RequestError("stop must not have an empty text", "stop")


MAX_LOGPROBS = 20
"""vLLM's default of `--max-logprobs`."""


def get_num_logprobs(body: Body, name: str) -> int | None:
    """Return how many of a token's alternatives a request wants to see. Raises RequestError."""
    number = get_int(body, name, 0)
    if number is not None and number > MAX_LOGPROBS:
        raise RequestError(f"{name}={number} is more than {MAX_LOGPROBS}, the most that are shown", name)
    return number


def write_openai_request(model: str, max_tokens: int) -> dict[str, Any]:
    """The fields beside the prompt of a streamed request for a chat answer or a completion, with usage."""
    return {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
    }


def get_objects(body: Body, name: str) -> list[dict[str, Any]]:
    """Return a list of objects that is not empty. Raises RequestError."""
    values = get_list(body, name)
    if not values:
        refuse = RequestError if body.get(name) == [] else MalformedError
        raise refuse(f"{name} must be a list that is not empty", name)
    for index, each in enumerate(values):
        if not isinstance(each, dict):
            raise MalformedError(f"{name}[{index}] must be an object", f"{name}[{index}]")
    return values


def get_list(body: Body, name: str) -> list[Any]:
    """Return a list; an empty one if the field is missing. Raises RequestError."""
    return _get(body, name, list, "a list") or []


def get_tool_name(tool: Body, where: str, place: str = "") -> str:
    """Return a tool's name, which stands at `place` in the item `where`. Raises RequestError."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedError(f"{where}{place}.name must be a text", where)
    return name


def get_object(body: Body, name: str) -> Body | None:
    """Return an object, or None if the field is missing. Raises RequestError."""
    return _get(body, name, dict, "an object")


def get_string(body: Body, name: str) -> str | None:
    """Return a non-empty string, or None if the field is missing. Raises RequestError."""
    return _get(body, name, str, "a text that is not empty", bool)


def get_bool(body: Body, name: str) -> bool:
    """Return a boolean; False if the field is missing. Raises RequestError."""
    return bool(_get(body, name, bool, "true or false"))


def get_int(body: Body, name: str, minimum: int | None = None) -> int | None:
    """Return an integer, or None if the field is missing. Raises RequestError."""
    value = _get(
        body, name, int, "a whole number", lambda each: type(each) is int and -(2**63) <= each < 2**63
    )
    if value is not None and minimum is not None and value < minimum:
        raise RequestError(f"{name} must be at least {minimum}, got {value}", name)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _get(
    body: Body, name: str, kind: type[T], what: str, is_right: Callable[[T], bool] = lambda value: True
) -> T | None:
    value = body.get(name)
    if value is None or (isinstance(value, kind) and is_right(value)):
        return value
    raise MalformedError(f"{name} must be {what}, got {show(value)}", name)


def show(value: Any) -> str:
    """A value in an error message. Hostile values can be very long, and some cannot be printed at all."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > 2**63:
        return "a huge number"
    return repr(value)[:80]
