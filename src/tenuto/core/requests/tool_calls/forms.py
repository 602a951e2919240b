"""A table of the markers that models put around tool calls, and a reader for each syntax of the call itself.

The formats are those of vLLM's tool parsers (0.33, `vllm/tool_parsers` and `vllm/parser`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Found = tuple[str, Any]
"""A tool's name and its arguments: decoded JSON, or text in the format's own syntax."""

_MAX_OPENINGS = 4
"""How many opening markers are tried, from the end: the last one may be inside an argument of the call."""
_MAX_SEPARATOR_CHARS = 48
"""Most characters between a tool's name and its JSON arguments."""

_JSON = json.JSONDecoder(strict=False)
_JSON_NEXT = re.compile(r"[\s;,]*+(?=[\[{])")
_NAME = re.compile(r"[\s\"'=:]*+([\w.:/-]++)")
_MISTRAL_NAME = re.compile(r"\s*+[\w.-]++\s*+(?:\[ARGS\]|\[CALL_ID\]|\{)")
_GLM_NAME = re.compile(r"\s*+([\w.:/-]++)\s*+(?:<arg_key>|<tool_sep>|\Z)")
_PYTHON_LIST = re.compile(r"\[\s*+[A-Za-z_][\w.]*+\(")
_PYTHON_NAME_AT_END = re.compile(r"[A-Za-z_][\w.]*\Z")
_PYTHON_TOKEN = re.compile(r"\"(?:[^\"\\]++|\\.)*+\"?|'(?:[^'\\]++|\\.)*+'?|[()\[\]{}]", re.DOTALL)
_MAX_PYTHON_NAME_CHARS = 128


def decode_json(text: str) -> Any:
    """The last of the JSON objects and lists at the start of a text, or None."""
    value, position = None, 0
    try:
        while match := _JSON_NEXT.match(text, position):
            value, position = _JSON.raw_decode(text, match.end())
    except (ValueError, RecursionError):
        pass
    return value


def read_json(text: str) -> Found | None:
    """Read `{"name": …, "arguments": …}`, a list of such objects, or either in OpenAI's wrappers."""
    value = decode_json(text)
    if isinstance(value, dict) and "tool_calls" in value:
        value = value["tool_calls"]
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    for key in ("arguments", "parameters", "args", "input"):
        if isinstance(name, str) and key in value:
            return name, value[key]
    return None


def read_bare(text: str) -> Found | None:
    """Read a call that is the whole text, without a marker.

    Llama writes such calls, and guided decoding enforces them.
    """
    text = text.strip()
    if not (text.startswith(("{", "[")) and text.endswith(("}", "]"))):
        return None
    return _read_python(text) if _PYTHON_LIST.match(text) else read_json(text)


def _read_named(text: str) -> Found | None:
    """Read `name`, an optional separator, then arguments in JSON or in the format's own syntax."""
    match = _NAME.match(text)
    if match is None:
        return None
    brace = text.find("{", match.end(), match.end() + _MAX_SEPARATOR_CHARS)
    return match[1], text[max(brace, match.end()) :]


def _read_mistral(text: str) -> Found | None:
    """Read a JSON list, or, since tokenizer v11, `name[ARGS]{…}`."""
    return _read_named(text) if _MISTRAL_NAME.match(text) else read_json(text)


def _read_hermes(text: str) -> Found | None:
    """Read JSON, or GLM's syntax: a name, then pairs of `<arg_key>` and `<arg_value>`."""
    match = _GLM_NAME.match(text)
    return read_json(text) if match is None else (match[1], text[match.end(1) :])


def _read_tag(text: str) -> Found | None:
    """Read a name at the end of a tag, then one tag per argument."""
    match = _NAME.match(text)
    if match is None:
        return None
    end = text.find(">", match.end(), match.end() + _MAX_SEPARATOR_CHARS)
    return None if end < 0 or "<" in text[match.end() : end] else (match[1], text[end + 1 :])


def _read_python(text: str) -> Found | None:
    """Read `[name(argument="x"), …]`, or one such call per line. Does not use Python's own parser."""
    found, name, start, depth = None, None, 0, 0
    first = len(text) - len(text.lstrip().removeprefix("["))
    for token in _PYTHON_TOKEN.finditer(text, first):
        if token[0] in ("(", "[", "{"):
            if depth == 0 and token[0] == "(":
                before = text[max(0, token.start() - _MAX_PYTHON_NAME_CHARS) : token.start()]
                match = _PYTHON_NAME_AT_END.search(before)
                name, start = match and match[0], token.end()
            depth += 1
        elif token[0] in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                break
            if depth == 0 and name:
                found, name = (name, text[start : token.start()]), None
    return found


@dataclass(frozen=True, slots=True)
class Form:
    """One way to mark a tool call."""

    opening: str
    closing: str | None
    """None if nothing marks the end."""
    read: Callable[[str], Found | None]
    """Reads the text between the markers, or up to the end of the text; returns None if it is no call."""


FORMS = (
    Form("<|tool_call_begin|>", "<|tool_call_end|>", _read_named),  # Kimi K2
    Form("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _read_named),  # DeepSeek V3
    Form("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _read_named),  # DeepSeek V3.1
    Form("<|tool_call>call:", "<tool_call|>", _read_named),  # Gemma 4
    Form("<start_function_call>call:", "<end_function_call>", _read_named),  # FunctionGemma
    Form("<|open|>call tool=", "<|close|>call<|sep|>", _read_named),  # Kimi K3
    Form("[TOOL_CALLS]", None, _read_mistral),
    Form("invoke name=", "invoke>", _read_tag),  # Anthropic, DeepSeek V3.2 and V4, MiniMax, Step 3, Muse
    Form("<function=", "</function>", _read_tag),  # Qwen3-Coder, Seed-OSS, Nemotron 3, OpenHands
    Form("<function name=", "</function>", _read_tag),  # MiniCPM 5
    Form("<tool_call>", "</tool_call>", _read_hermes),  # Hermes, Qwen, Granite 4; GLM 4.5 and later
    Form("<longcat_tool_call>", "</longcat_tool_call>", read_json),
    Form("<tool_calls>", "</tool_calls>", read_json),  # Jamba, Hunyuan
    Form("<|content_invoke_tool_json|>", None, read_json),  # Inkling
    Form("<|START_ACTION|>", "<|END_ACTION|>", read_json),  # Cohere
    Form("<|action_start|><|plugin|>", "<|action_end|>", read_json),  # InternLM 2
    Form("<|tool_call|>", None, read_json),  # Granite 3
    Form("<function_call>", None, read_json),  # Granite 20B
    Form("<|python_tag|>", None, read_json),  # Llama 3
    Form("functools", None, read_json),  # Phi-4 mini
    Form("<|python_start|>", "<|python_end|>", _read_python),  # Llama 4
    Form("<|tool_call_start|>", "<|tool_call_end|>", _read_python),  # LFM 2
    Form("<function_calls>", "</function_calls>", _read_python),  # OLMo 3
)
"""The forms, in the order in which they are tried: a tag that wraps another tag comes after it."""


def find_marked(text: str) -> Found | None:
    """The last call in the first form that has a call in the text."""
    for form in FORMS:
        start = len(text)
        for _ in range(_MAX_OPENINGS):
            start = text.rfind(form.opening, 0, start)
            if start < 0:
                break
            body = text[start + len(form.opening) :]
            if form.closing is not None and form.closing in body:
                body = body[: body.rfind(form.closing)]
            found = form.read(body)
            if found is not None:
                return found
    return None
