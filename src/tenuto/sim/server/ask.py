"""What a request asks for: its prompt's tokens, and the plan of its answer. No I/O, so it is thread-safe.

The simulated model answers with words without meaning, and calls tools on request. A prompt at temperature
0, or with a `seed`, always gets the same answer; otherwise each answer is different. A tool is called when
the request's `tool_choice` demands or names one, or when its `vllm_xargs` contain `sim_tool`. The call's
arguments are `sim_arguments`, or a minimal value that the tool's schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Any

from tenuto.core.requests.hints import Hints
from tenuto.core.requests.identity import read_hints
from tenuto.sim.server.body import (
    Body,
    RequestError,
    Sampling,
    encode,
    get_list,
    get_object,
    get_string,
    parse_json,
    read_prompt,
    read_sampling,
    render_chat,
    write_call,
)
from tenuto.sim.server.tokens import TokenIds, Tokenizer, make_token_ids

MAX_SCHEMA_DEPTH = 8


@dataclass(frozen=True)
class Call:
    """A tool call in an answer, with its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerPlan:
    """An answer before its words are chosen."""

    num_words: int
    call: Call | None
    call_ids: TokenIds
    finish_reason: str
    """ "stop", "length" or "tool_calls"."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole answer."""
        return self.num_words + len(self.call_ids)


def plan_answer(
    tokenizer: Tokenizer, sampling: Sampling, room: int, default_tokens: int, call: Call | None = None
) -> AnswerPlan:
    """Decide how long an answer is and how it ends.

    `room` is how many tokens fit into the model's context, `default_tokens` the length of an answer without
    `max_tokens`. Raises RequestError if `max_tokens` is more than the room.
    """
    limit = _get_limit(sampling, room)
    call_ids = tokenizer.encode("" if call is None else write_call(call.name, call.arguments))
    if call is not None and len(call_ids) <= limit:
        num_tokens = limit if sampling.ignore_eos else min(limit, max(len(call_ids), sampling.min_tokens))
        return AnswerPlan(num_tokens - len(call_ids), call, call_ids, "tool_calls")
    # A call that does not fit is truncated. Then it is plain text and no longer a call.
    runs_on = call is not None or sampling.ignore_eos or sampling.max_tokens is not None
    num_tokens = limit if runs_on else min(limit, max(default_tokens, sampling.min_tokens))
    return AnswerPlan(num_tokens, None, tokenizer.encode(""), "length" if num_tokens == limit else "stop")


def choose_words(tokenizer: Tokenizer, plan: AnswerPlan, seed: str, *, begins: bool) -> TokenIds:
    """Return the answer's tokens. With `begins`, there is no blank before the first word."""
    random, words = Random(seed), tokenizer.words
    token_ids = plan.call_ids[:0]
    if plan.num_words:
        token_ids.append(random.choice(words.first if begins else words.other))
        token_ids.extend(random.choices(words.other, k=plan.num_words - 1))
    return token_ids + plan.call_ids


def get_seed(sampling: Sampling, prompt: TokenIds, request_id: str) -> str:
    """Return the seed from which the random words of an answer follow."""
    if sampling.seed is None:
        return request_id
    return f"{blake2b(prompt.tobytes(), digest_size=16).hexdigest()}/{sampling.seed}"


def read_call(body: Body, tools: Sequence[Any]) -> Call | None:
    """Return the tool call that a chat request asks for, or None. Raises RequestError."""
    schemas = _read_tools(tools)
    name = _get_demanded(body, list(schemas))
    if name is None:
        return None
    if name not in schemas:
        raise RequestError(f"there is no tool {name!r} among the request's tools", "tools")
    arguments = (body.get("vllm_xargs") or {}).get("sim_arguments")
    if arguments is None:
        return Call(name, json.dumps(make_value(schemas[name])))
    if not isinstance(arguments, str) or not _is_object(arguments):
        raise RequestError("vllm_xargs.sim_arguments must be a JSON object, as a string", "vllm_xargs")
    return Call(name, arguments)


def make_value(schema: Any, depth: int = 0) -> Any:
    """Return a small value that fits a JSON schema. Only types, enums and required members are considered."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return {}
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    plain = {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}
    if isinstance(kind, str) and kind in plain:
        return plain[kind]
    members, required = schema.get("properties"), schema.get("required")
    if not isinstance(members, Mapping) or not isinstance(required, list):
        return {}
    return {name: make_value(members.get(name), depth + 1) for name in required if isinstance(name, str)}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _get_limit(sampling: Sampling, room: int) -> int:
    if sampling.max_tokens is None:
        return room
    if sampling.max_tokens > room:
        raise RequestError(
            f"max_tokens={sampling.max_tokens} is too large: the model's context leaves {room} tokens",
            "max_tokens",
        )
    return sampling.max_tokens


def _read_tools(tools: Sequence[Any]) -> dict[str, Any]:
    """Return each tool's schema by its name."""
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{index}].function.name must be a text", f"tools[{index}]")
        schemas[name] = function.get("parameters")
    return schemas


def _get_demanded(body: Body, names: Sequence[str]) -> str | None:
    """Return the name of the tool to call, or None."""
    choice = body.get("tool_choice")
    wanted = (body.get("vllm_xargs") or {}).get("sim_tool")
    if isinstance(choice, dict):
        function = get_object(choice, "function") or {}
        name = function.get("name")
        if not isinstance(name, str):
            raise RequestError("tool_choice.function.name must be a text", "tool_choice")
        return name
    if choice not in (None, "none", "auto", "required"):
        raise RequestError('tool_choice must be "none", "auto", "required" or a function', "tool_choice")
    if choice == "required" and not names:
        raise RequestError('tool_choice "required" needs tools', "tool_choice")
    if choice == "none":
        return None
    if wanted is not None:
        return str(wanted)
    return names[0] if choice == "required" else None


CHAT_PATH = "/v1/chat/completions"
DEFAULT_COMPLETION_TOKENS = 16
"""Length of a plain completion without `max_tokens`: OpenAI's default."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The properties of the served model that requests depend on."""

    model_name: str
    max_model_len: int
    answer_tokens: int
    """Length of a chat answer without `max_tokens`."""
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request for an answer."""

    is_chat: bool
    sampling: Sampling
    hints: Hints
    prompt_ids: TokenIds
    plan: AnswerPlan


def read_ask(raw: bytes, headers: Mapping[str, str], path: str, served: Served) -> Ask:
    """Read a request. Raises RequestError that says what is wrong with it."""
    try:
        return _read_ask(parse_json(raw), headers, path, served)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None


def _read_ask(body: Body, headers: Mapping[str, str], path: str, served: Served) -> Ask:
    model = get_string(body, "model")
    if model not in (None, served.model_name):
        raise RequestError(f"the model {model[:80]!r} is not served here", "model", status=404)
    sampling = read_sampling(body)
    is_chat = path.endswith(CHAT_PATH)
    prompt_ids = _read_chat(body, served) if is_chat else _read_plain(body, served)
    room = served.max_model_len - len(prompt_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens, the model's context is {served.max_model_len}",
            "prompt",
        )
    call = read_call(body, get_list(body, "tools")) if is_chat else None
    if not is_chat and sampling.max_tokens is None:
        most = max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)
        sampling = replace(sampling, max_tokens=min(most, room))
    return Ask(
        is_chat=is_chat,
        sampling=sampling,
        hints=read_hints(body, headers, path),
        prompt_ids=prompt_ids,
        plan=plan_answer(served.tokenizer, sampling, room, served.answer_tokens, call),
    )


def _read_chat(body: Body, served: Served) -> TokenIds:
    messages = get_list(body, "messages")
    if not messages:
        raise RequestError("messages must be a list that is not empty", "messages")
    return render_chat(served.tokenizer, messages, get_list(body, "tools"), served.max_model_len)


def _read_plain(body: Body, served: Served) -> TokenIds:
    prompt = read_prompt(body)
    if isinstance(prompt, str):
        return encode(served.tokenizer, prompt, served.max_model_len)
    highest = max(prompt)
    if highest >= served.tokenizer.vocab_size:
        raise RequestError(f"token id {highest} is out of vocabulary", "prompt")
    return make_token_ids(prompt)
