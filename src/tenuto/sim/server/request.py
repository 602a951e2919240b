"""What a request asks for: its prompt's tokens, and the plan of its answer. No I/O, so it is thread-safe.

The simulated model answers with words without meaning, and calls tools on request. A prompt at temperature
0, or with a `seed`, always gets the same answer; otherwise each answer is different. A tool is called when
the request's `tool_choice` demands or names one, or when its `vllm_xargs` contain `sim_tool`, and its prompt
has fewer results of tools than `sim_calls`. The call's arguments are `sim_arguments`, or a minimal value that
the tool's schema allows. Headers may say the same (`X-Sim-Tool`), for agents that can add no field.

Fields that only steer sampling change nothing; values that vLLM refuses are refused. Fields that would
change the form of the answer, and that the simulation cannot serve, are refused by name. One chat template
serves all models:

    <|system|>…<|end|><|user|>…<|end|><|assistant|>

Each part is tokenized separately, so its tokens do not depend on its neighbours. Therefore a conversation's
next prompt begins with the tokens of its previous prompt and of the answer.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Any

from tenuto.core.requests import Hints, are_xargs, read_hints, write_context_as_text
from tenuto.core.wishes import Mark
from tenuto.sim.server.tokens import TokenIds, Tokenizer, make_token_ids
from tenuto.wire import Format, anthropic_messages, get_format, openai_chat
from tenuto.wire.request import (
    Body,
    MalformedError,
    Message,
    RequestError,
    Sampling,
    check_not_null,
    check_ranges,
    check_stop,
    get_list,
    get_object,
    get_string,
    parse_json,
    read_sampling,
    show,
)
from tenuto.wire.response import Call, as_object

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
class GenerateRequest:
    """One request for an answer."""

    format: Format
    is_chat: bool
    """The prompt is messages, so the answer begins a message."""
    sampling: Sampling
    hints: Hints
    prompt_ids: TokenIds
    plan: AnswerPlan
    num_logprobs: int | None
    """How many alternatives of each token are shown; None: no probabilities."""
    body: Body


def read_request(raw: bytes, headers: Mapping[str, str], path: str, served: Served) -> GenerateRequest:
    """Read a request. Raises RequestError that says what is wrong with it."""
    try:
        return _read_request(parse_json(raw), headers, path, served)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None


def check_model(name: str | None, served: Served) -> None:
    """Raise RequestError if this model is not the served one. None: the request names none."""
    if name not in (None, served.model_name):
        raise RequestError(f"the model {name[:80]!r} is not served here", "model", status=404)


def _read_request(body: Body, headers: Mapping[str, str], path: str, served: Served) -> GenerateRequest:
    check_model(get_string(body, "model"), served)
    form = get_format(path)
    _refuse_not_simulated(body)
    sampling = read_sampling(body, form.LIMITS)
    if form.PATH == anthropic_messages.PATH:
        check_ranges(body, ("temperature", "top_p", "top_k"))  # as vLLM, it ignores the other fields
    else:
        check_ranges(body)
        check_stop(body)
        check_not_null(body)
    if form.PATH == openai_chat.PATH:
        if body.get("tools") == []:
            raise RequestError("tools must not be an empty list; leave it out", "tools")
        if body.get("tool_choice") == "auto" and not body.get("tools"):
            raise RequestError('tool_choice "auto" needs tools', "tool_choice")
    if form.COUNTS_ALWAYS:
        sampling = replace(sampling, includes_usage=True, counts_pieces=True)
    elif body.get("stream_options") and not sampling.is_stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    if form.MUST_LIMIT and sampling.max_tokens is None:
        raise MalformedError(f"{form.LIMITS[0]} is missing", form.LIMITS[0])
    if sampling.max_tokens is not None and sampling.max_tokens > served.max_model_len:
        raise RequestError(
            f"max_tokens={sampling.max_tokens} is more than the model's context of {served.max_model_len}",
            "max_tokens",
        )
    prompt = form.read_prompt(body)
    is_chat = not isinstance(prompt, str | list)
    prompt_ids = tokenize(prompt, body, served)
    room = served.max_model_len - len(prompt_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens, the model's context is {served.max_model_len}",
            "prompt",
        )
    call = read_call(body, form, headers) if is_chat else None
    if not is_chat and sampling.max_tokens is None:
        most = max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)
        sampling = replace(sampling, max_tokens=min(most, room))
    return GenerateRequest(
        format=form,
        is_chat=is_chat,
        sampling=sampling,
        hints=_read_hints(body, headers, path, form, served),
        prompt_ids=prompt_ids,
        plan=plan_answer(
            served.tokenizer, sampling, room, served.answer_tokens, call, fills_limit=not form.MUST_LIMIT
        ),
        num_logprobs=form.read_logprobs(body),
        body=body,
    )


def _read_hints(body: Body, headers: Mapping[str, str], path: str, form: Format, served: Served) -> Hints:
    """The hints. The ends of the client's cache wishes are in tokens."""
    hints = read_hints(body, headers, path, time.time())
    if hints.wish is None or all(span.mark is None for span in hints.wish.spans):
        return hints
    prompt = form.read_prompt(body)
    parts: tuple[str, ...] = (str(prompt),)
    if not isinstance(prompt, str | list):
        parts = tuple(_get_parts(prompt, get_list(body, "tools")))
    wish = hints.wish.resolve(lambda mark: count_before(mark, parts, served.tokenizer))
    return replace(hints, wish=wish)


def count_before(mark: Mark, parts: Sequence[str], tokenizer: Tokenizer) -> int:
    """The number of tokens before a mark in a prompt of these parts; 0 if the mark is not found."""
    num_chars = sum(map(len, parts))
    if mark.share >= 1.0:
        return sum(len(tokenizer.encode(part)) for part in parts)
    found: tuple[float, int, int] | None = None
    start = 0
    for number, part in enumerate(parts):
        # The last one that ends before the place, and the first one that ends after it.
        place = min(max(0, int(mark.share * num_chars) - start), len(part))
        for at in (part.rfind(mark.tail, 0, place), part.find(mark.tail, max(0, place - len(mark.tail) + 1))):
            end = at + len(mark.tail)
            far = abs(start + end - mark.share * num_chars)
            if at >= 0 and mark.tail:
                found = min(found or (far, number, end), (far, number, end))
        start += len(part)
    if found is None:
        return 0
    _, last, end = found
    before = [*parts[:last], parts[last][:end]]
    return sum(len(tokenizer.encode(part)) for part in before)


_NOT_SIMULATED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "background": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_embeds": (),
    "audio": (),
}
"""Fields that are refused, each with the values besides null that are harmless and so accepted."""


def _refuse_not_simulated(body: Body) -> None:
    for name, harmless in _NOT_SIMULATED.items():
        value = body.get(name)
        # Types are compared too, because 1 == True.
        if value is not None and (type(value), value) not in [(type(each), each) for each in harmless]:
            raise RequestError(f"{name}={show(value)} is not simulated; leave it out", name)
    get_object(body, "response_format")
    for name, field in (("response_format", None), ("text", "format"), ("output_config", "format")):
        asked = as_object(body.get(name))
        kind = (asked if field is None else as_object(asked.get(field))).get("type", "text")
        if kind != "text":
            raise RequestError(f"{name} {show(kind)} is not simulated", name)
    xargs = body.get("vllm_xargs")
    if xargs is not None and not are_xargs(write_context_as_text(xargs)):
        raise MalformedError(
            "vllm_xargs must be an object of strings, numbers or lists of them", "vllm_xargs"
        )


# The prompt.


def tokenize(prompt: str | list[int] | Iterable[Message], body: Body, served: Served) -> TokenIds:
    """Return the tokens of a request's prompt. Raises RequestError, also if it is longer than the context."""
    if not prompt:
        raise RequestError("prompt must be a text or a list of token ids, and not empty", "prompt")
    if isinstance(prompt, str):
        return encode(served.tokenizer, prompt, served.max_model_len)
    if not isinstance(prompt, list):
        return render_chat(served.tokenizer, prompt, get_list(body, "tools"), served.max_model_len)
    highest = max(prompt)
    if highest >= served.tokenizer.vocab_size:
        raise RequestError(f"token id {highest} is out of vocabulary", "prompt")
    return make_token_ids(prompt)


END = "<|end|>"


def render_chat(
    tokenizer: Tokenizer, messages: Iterable[Message], tools: Sequence[Any], max_tokens: int
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


def write_call(call: Call) -> str:
    """Return a tool call as the model writes it."""
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'


def _get_parts(messages: Iterable[Message], tools: Sequence[Any]) -> Iterator[str]:
    if tools:
        yield from ("<|system|>", json.dumps(tools), END)
    for number, message in enumerate(messages):
        yield f"<|{message.role}|>"
        for index, part in enumerate(message.parts):
            if not isinstance(part, str):
                where = f"messages[{number}].content[{index}]"
                raise RequestError(f"{where} holds no text; only text is simulated", where)
            yield part
        for name, arguments in message.calls:
            yield write_call(
                Call(None, name, arguments if isinstance(arguments, str) else json.dumps(arguments))
            )
        yield END
    yield "<|assistant|>"


# The answer.


@dataclass(frozen=True)
class AnswerPlan:
    """An answer before its words are chosen."""

    num_words: int
    call: Call | None
    """A complete tool call."""
    call_ids: TokenIds
    finish_reason: str
    """ "stop", "length" or "tool_calls"."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole answer."""
        return self.num_words + len(self.call_ids)


def plan_answer(
    tokenizer: Tokenizer,
    sampling: Sampling,
    room: int,
    default_tokens: int,
    call: Call | None = None,
    *,
    fills_limit: bool = True,
) -> AnswerPlan:
    """Decide how long an answer is and how it ends.

    `room` is how many tokens fit into the model's context, `default_tokens` the length of an answer without
    `max_tokens`, and of any answer that does not fill its limit. An answer ends where there is no more room,
    as in vLLM. Raises RequestError if `min_tokens` is more than the room.
    """
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    if sampling.min_tokens > limit:
        raise RequestError(
            f"min_tokens={sampling.min_tokens} is too large: the model's context leaves {room} tokens",
            "min_tokens",
        )
    call_ids = tokenizer.encode("" if call is None else write_call(call))
    if call is not None and len(call_ids) <= limit:
        num_tokens = limit if sampling.ignore_eos else min(limit, max(len(call_ids), sampling.min_tokens))
        return AnswerPlan(num_tokens - len(call_ids), call, call_ids, "tool_calls")
    # A call that does not fit is truncated. Then it is plain text and no longer a call.
    has_length = sampling.max_tokens is not None and fills_limit
    runs_on = call is not None or sampling.ignore_eos or has_length
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
    seed = 0 if sampling.is_greedy else sampling.seed
    if seed is None:
        return request_id
    return f"{blake2b(prompt.tobytes(), digest_size=16).hexdigest()}/{seed}"


def read_call(body: Body, form: Format, headers: Mapping[str, str]) -> Call | None:
    """Return the tool call that a chat request asks for, or None. Raises RequestError."""
    schemas = form.read_tools(body)
    choice, name = form.read_tool_choice(body)
    if choice == "none":
        return None
    xargs = {
        field: headers.get("x-" + field.replace("_", "-"))
        for field in ("sim_tool", "sim_arguments", "sim_calls")
    } | dict(body.get("vllm_xargs") or {})
    most = xargs.get("sim_calls")
    if most is not None:
        if not re.fullmatch("[0-9]{1,9}", str(most)):
            raise RequestError("sim_calls must be a whole number of calls", "vllm_xargs")
        prompt = form.read_prompt(body)
        if sum(isinstance(each, Message) and each.role == "tool" for each in prompt) >= int(most):
            return None
    if name is None and xargs["sim_tool"] is not None:
        name = str(xargs["sim_tool"])
    if name is None and choice == "required":
        name = next(iter(schemas), None)
    if name is None:
        return None
    if name not in schemas:
        raise RequestError(f"there is no tool {name!r} among the request's tools", "tools")
    arguments = xargs["sim_arguments"]
    if arguments is None:
        return Call(0, name, json.dumps(make_value(schemas[name])))
    if not isinstance(arguments, str) or not _is_object(arguments):
        raise RequestError("sim_arguments must be a JSON object, as a string", "vllm_xargs")
    return Call(0, name, arguments)


MAX_SCHEMA_DEPTH = 8


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
    # Each name once: names that are repeated at every level would take time with the power of the depth.
    names = dict.fromkeys(name for name in required if isinstance(name, str))
    return {name: make_value(members.get(name), depth + 1) for name in names}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except ValueError:
        return False


def _refuse_constant(name: str) -> object:
    # Messages has arguments as a value, and what it sends must be JSON.
    raise ValueError(f"{name} is not JSON")
