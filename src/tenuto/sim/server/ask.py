"""Turns the bytes of a request into what the engine needs. It has no I/O and no shared state: thread-safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tenuto.core.requests.hints import Hints
from tenuto.core.requests.identity import read_hints
from tenuto.sim.server.answer import AnswerPlan, plan_answer, read_call
from tenuto.sim.server.body import (
    Body,
    Sampling,
    get_list,
    get_string,
    parse_json,
    read_prompt,
    read_sampling,
)
from tenuto.sim.server.content import TokenIds, make_token_ids
from tenuto.sim.server.errors import RequestError
from tenuto.sim.server.template import encode, render_chat
from tenuto.sim.server.tokenizer import Tokenizer

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
