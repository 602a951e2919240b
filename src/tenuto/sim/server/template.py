"""The chat template: one fixed template for all models.

    <|system|>…<|end|><|user|>…<|end|><|assistant|>

Each part is tokenized separately, so its tokens do not depend on its neighbours. Therefore a conversation's
next prompt begins with the tokens of its previous prompt and of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tenuto.sim.server.content import TokenIds, make_token_ids
from tenuto.sim.server.errors import RequestError
from tenuto.sim.server.tokenizer import Tokenizer

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
