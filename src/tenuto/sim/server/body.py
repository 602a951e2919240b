"""Reads a request's body field by field, and its messages as the model's chat template writes them.

Fields that only steer sampling are accepted and change nothing. Fields that would change the form of the
answer, and that the simulation cannot serve, are refused by name. One template serves all models:

    <|system|>…<|end|><|user|>…<|end|><|assistant|>

Each part is tokenized separately, so its tokens do not depend on its neighbours. Therefore a conversation's
next prompt begins with the tokens of its previous prompt and of the answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.core.errors import TenutoError
from tenuto.core.requests.foreign import write_context_as_text
from tenuto.core.requests.identity import are_xargs
from tenuto.sim.server.tokens import TokenIds, Tokenizer, make_token_ids

_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 413: "RequestTooLargeError"}


class RequestError(TenutoError):
    """A request is refused: the HTTP status, the reason, and the field that caused it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.status},
        }


Body = Mapping[str, Any]

_MAX_ID = 2**32 - 1
_NOT_SIMULATED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_embeds": (),
    "audio": (),
}
"""Fields that are refused, each with the values besides null that are harmless and so accepted."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How many tokens are generated, and how they are sent."""

    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    is_stream: bool
    includes_usage: bool
    returns_ids: bool
    seed: int | None
    """Equal prompts with equal seeds get equal answers. None: each answer is different."""
    priority: int
    cache_salt: str | None


def parse_json(raw: bytes) -> Body:
    """Parse the body as a JSON object. Raises RequestError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def read_sampling(body: Body) -> Sampling:
    """Read the fields that chat and plain completions share. Raises RequestError that names the field."""
    for name, harmless in _NOT_SIMULATED.items():
        value = body.get(name)
        # Types are compared too, because 1 == True.
        if value is not None and (type(value), value) not in [(type(each), each) for each in harmless]:
            raise RequestError(f"{name}={_show(value)} is not simulated; leave it out", name)
    kind = (get_object(body, "response_format") or {}).get("type", "text")
    if kind != "text":
        raise RequestError(f"response_format {_show(kind)} is not simulated", "response_format")
    xargs = body.get("vllm_xargs")
    if xargs is not None and not are_xargs(write_context_as_text(xargs)):
        raise RequestError("vllm_xargs must be an object of strings, numbers or lists of them", "vllm_xargs")
    max_tokens = get_int(body, "max_completion_tokens", 1)
    max_tokens = get_int(body, "max_tokens", 1) if max_tokens is None else max_tokens
    min_tokens = get_int(body, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens={min_tokens} is more than max_tokens={max_tokens}", "min_tokens")
    seed = get_int(body, "seed")
    is_greedy = _get_number(body, "temperature") == 0
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=get_bool(body, "ignore_eos"),
        is_stream=get_bool(body, "stream"),
        includes_usage=get_bool(get_object(body, "stream_options") or {}, "include_usage"),
        returns_ids=get_bool(body, "return_token_ids"),
        seed=0 if is_greedy else seed,
        priority=get_int(body, "priority") or 0,
        cache_salt=get_string(body, "cache_salt"),
    )


def read_prompt(body: Body) -> str | list[int]:
    """Read the single prompt of a completion, as text or token ids. Raises RequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError("only one prompt per request is simulated", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text or a list of token ids, and not empty", "prompt")
    # The exact type is compared, because a bool is an int but not a token. This loop runs in C: prompts are
    # long.
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) > _MAX_ID:
        raise RequestError("prompt must be a text or a list of token ids", "prompt")
    return prompt


def get_list(body: Body, name: str) -> Sequence[Any]:
    """Return a list; an empty one if the field is missing. Raises RequestError."""
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestError(f"{name} must be a list, got {_show(value)}", name)
    return value or ()


def get_object(body: Body, name: str) -> Body | None:
    """Return an object, or None if the field is missing. Raises RequestError."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {_show(value)}", name)
    return value


def get_string(body: Body, name: str) -> str | None:
    """Return a non-empty string, or None if the field is missing. Raises RequestError."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise RequestError(f"{name} must be a text that is not empty, got {_show(value)}", name)
    return value


def get_bool(body: Body, name: str) -> bool:
    """Return a boolean; False if the field is missing. Raises RequestError."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_show(value)}", name)
    return bool(value)


def get_int(body: Body, name: str, minimum: int | None = None) -> int | None:
    """Return an integer, or None if the field is missing. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**63:
        raise RequestError(f"{name} must be a whole number, got {_show(value)}", name)
    if minimum is not None and value < minimum:
        raise RequestError(f"{name} must be at least {minimum}, got {value}", name)
    return value


def _get_number(body: Body, name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise RequestError(f"{name} must be a number, got {_show(value)}", name)
    return value


def _show(value: Any) -> str:
    # Hostile values can be very long, and some cannot be printed at all.
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > 2**63:
        return "a huge number"
    return repr(value)[:80]


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
END = "<|end|>"


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], tools: Sequence[Any], max_tokens: int
) -> TokenIds:
    """Return the tokens of these messages, ready for the assistant's answer.

    Raises RequestError that names the wrong message, or if there are more than `max_tokens` tokens.
    """
    token_ids = make_token_ids()
    for part in _get_parts(messages, tools):
        token_ids += encode(tokenizer, part, max_tokens - len(token_ids))
    return token_ids


def encode(tokenizer: Tokenizer, text: str, max_tokens: int) -> TokenIds:
    """Return a text's token ids. Raises RequestError if there are more than `max_tokens`."""
    # Texts that are far too long are refused without tokenizing them.
    too_long = tokenizer.max_chars is not None and len(text) > max(0, max_tokens) * tokenizer.max_chars
    token_ids = make_token_ids() if too_long else tokenizer.encode(text)
    if too_long or len(token_ids) > max_tokens:
        raise RequestError("the prompt is longer than the model's context (max_model_len)", "prompt")
    return token_ids


def write_call(name: str, arguments: str) -> str:
    """Return a tool call as the model writes it."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _get_parts(messages: Sequence[Any], tools: Sequence[Any]) -> Iterator[str]:
    if tools:
        yield from ("<|system|>", json.dumps(tools), END)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object", where)
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
        yield f"<|{role}|>"
        yield from _get_content(message.get("content"), f"{where}.content")
        yield from _get_calls(message.get("tool_calls"), f"{where}.tool_calls")
        yield END
    yield "<|assistant|>"


def _get_content(content: Any, where: str) -> Iterator[str]:
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", where)
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}] holds no text; only text is simulated", f"{where}[{index}]")
        yield text


def _get_calls(calls: Any, where: str) -> Iterator[str]:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", where)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments", "{}") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise RequestError(
                f"{where}[{index}].function must have a name and arguments, both strings", where
            )
        yield write_call(name, arguments)
