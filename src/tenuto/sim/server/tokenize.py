"""Tokens without an answer: `/tokenize`, `/detokenize`, and the count that Anthropic's clients ask for.

They count as the server itself does: the prompt of a request with the same messages has the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from tenuto.sim.server.generate import read_body
from tenuto.sim.server.request import Served, check_model, encode, render_chat
from tenuto.wire import anthropic_messages, openai_chat
from tenuto.wire.request import Body, RequestError, get_bool, get_list, get_string, parse_json

MAX_TOKENS = 2**25
"""Longest text that is tokenized, in tokens: as in vLLM it may be longer than the model's context."""


class TokenPages:
    """The handlers of the addresses."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def tokenize(self, http: web.Request) -> web.Response:
        """The tokens of a prompt or of messages."""
        return await self._answer(http, self._tokenize)

    async def detokenize(self, http: web.Request) -> web.Response:
        """The text of tokens."""
        return await self._answer(http, self._detokenize)

    async def count(self, http: web.Request) -> web.Response:
        """How many tokens messages in Anthropic's format are."""
        return await self._answer(http, self._count)

    async def _answer(self, http: web.Request, answer: Callable[[Body], dict[str, Any]]) -> web.Response:
        return web.json_response(await read_body(http, partial(self._read, answer)))

    def _read(self, answer: Callable[[Body], dict[str, Any]], raw: bytes) -> dict[str, Any]:
        try:
            body = parse_json(raw)
            check_model(get_string(body, "model"), self._served)
            return answer(body)
        except RecursionError:
            raise RequestError("the body is nested too deep") from None

    def _tokenize(self, body: Body) -> dict[str, Any]:
        tokenizer = self._served.tokenizer
        if "messages" in body:
            messages, tools = openai_chat.read_prompt(body), get_list(body, "tools")
            token_ids = render_chat(tokenizer, messages, tools, MAX_TOKENS)
        elif isinstance(body.get("prompt"), str):
            token_ids = encode(tokenizer, body["prompt"], MAX_TOKENS)
        else:
            raise RequestError("prompt must be a text, or messages a list", "prompt")
        wants_texts = get_bool(body, "return_token_strs")
        return {
            "count": len(token_ids),
            "max_model_len": self._served.max_model_len,
            "tokens": list(token_ids),
            "token_strs": [tokenizer.decode([each]) for each in token_ids] if wants_texts else None,
        }

    def _detokenize(self, body: Body) -> dict[str, Any]:
        token_ids, tokenizer = body.get("tokens"), self._served.tokenizer
        if not isinstance(token_ids, list) or not all(
            type(each) is int and 0 <= each < tokenizer.vocab_size for each in token_ids
        ):
            raise RequestError(
                f"tokens must be a list of token ids, each below {tokenizer.vocab_size}", "tokens"
            )
        return {"prompt": tokenizer.decode(token_ids)}

    def _count(self, body: Body) -> dict[str, Any]:
        messages, tools = anthropic_messages.read_prompt(body), get_list(body, "tools")
        number = len(render_chat(self._served.tokenizer, messages, tools, MAX_TOKENS))
        return {"input_tokens": number, "context_management": {"original_input_tokens": number}}
