"""Finds the tool call at the end of a turn, in the tail of its decoded output (with special tokens).

Only the tool's name and its command are needed, so one small reader serves many models. The formats differ in
the marker in front of a call; `FORMS` is a table of the markers. The reader tries, in this order: gpt-oss
messages, marked calls, a bare call that is the whole text, and a fenced block. If there are several calls,
the *last* one is used: the agent waits for all of them, and even a short tail contains the last one.

The name of a shell call is the first word of its command, unchanged (`cd` for `cd /src && make`), as in
Continuum. What follows a `=` or `<` in it is left out (`TOKEN=` for `TOKEN=x make`): it may be a secret. The
result also contains the whole command, for policies that need more than the name.

The output is untrusted text: nothing here raises, and the time is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tenuto.core.requests import get_bounded_tool
from tenuto.core.types import ToolCall

# The forms of calls: those of vLLM's tool parsers (0.33, `vllm/tool_parsers` and `vllm/parser`).

Found = tuple[str, Any]
"""A tool's name and its arguments: decoded JSON, or text in the format's own syntax."""

_MAX_OPENINGS = 4
"""How many opening markers are tried, from the end: the last one may be inside an argument of the call."""
_MAX_READ_CHARS = 2**17
"""How many characters are read after all opening markers together. The engine waits for that."""
_MAX_VALUES = 1024
"""How many JSON values in a row, and how many brackets and strings in Python's syntax, are read: each takes
far longer than a character."""
_MAX_SEPARATOR_CHARS = 48
"""Most characters between a tool's name and its JSON arguments."""

_JSON = json.JSONDecoder(strict=False)
_JSON_NEXT = re.compile(r"[\s;,]*+(?=[\[{])")
_NAME = re.compile(r"[\s\"'=:]*+([\w.:/-]++)")
_MISTRAL_NAME = re.compile(r"\s*+[\w.-]++\s*+(?:\[ARGS\]|\[CALL_ID\]|\{)")
_GLM_NAME = re.compile(r"\s*+([\w.:/-]++)\s*+(?:<arg_key>|<tool_sep>|\Z)")
_ARG_TYPE = re.compile(r"<arg_type>[^<>]{0,48}</arg_type>")
_PYTHON_LIST = re.compile(r"\[\s*+[A-Za-z_][\w.]*+\(")
_PYTHON_NAME_AT_END = re.compile(r"[A-Za-z_][\w.]*\Z")
_PYTHON_TOKEN = re.compile(r"\"(?:[^\"\\]++|\\.)*+\"?|'(?:[^'\\]++|\\.)*+'?|[()\[\]{}]", re.DOTALL)
_MAX_PYTHON_NAME_CHARS = 128


def decode_json(text: str) -> Any:
    """The last of the JSON objects and lists at the start of a text, or None."""
    value, position = None, 0
    try:
        for _ in range(_MAX_VALUES):
            if (match := _JSON_NEXT.match(text, position)) is None:
                break
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


def _read_llama(text: str) -> Found | None:
    """Read JSON, or `name.call(argument="x")`, in which Llama 3 calls the tools that it knows itself."""
    name, call, arguments = text.partition(".call(")
    return (name, arguments) if call and name.strip().isidentifier() else read_json(text)


def _read_mistral(text: str) -> Found | None:
    """Read a JSON list, or, since tokenizer v11, `name[ARGS]{…}`."""
    return _read_named(text) if _MISTRAL_NAME.match(text) else read_json(text)


def _read_hermes(text: str) -> Found | None:
    """Read JSON or GLM's syntax: a name, then pairs of `<arg_key>` and `<arg_value>`."""
    match = _GLM_NAME.match(text)
    return read_json(text) if match is None else (match[1], text[match.end(1) :])


def _read_k2_horizon(text: str) -> Found | None:
    """Read JSON or GLM's syntax, in tags of their own, in which arguments may have a type."""
    return _read_hermes(_ARG_TYPE.sub("", text.replace("ifm|", "")))


def _read_apertus(text: str) -> Found | None:
    """Read a list of `{name: arguments}`."""
    value = decode_json(text)
    last = value[-1] if isinstance(value, list) and value else None
    return next(iter(last.items())) if isinstance(last, dict) and last else None


def _read_plamo(text: str) -> Found | None:
    """Read a name, its end, a declaration of the arguments' syntax, and the arguments in JSON."""
    name, end, rest = text.partition("<|plamo:end_tool_name:plamo|>")
    return (name, rest.partition("<|plamo:msg|>")[2]) if end else None


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
    for token in islice(_PYTHON_TOKEN.finditer(text, first), _MAX_VALUES):
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
    """Reads the text from the opening marker to the closing one or the end; None if it is not a call."""


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
    Form("<tool_call>", "</tool_call>", _read_hermes),  # Hermes, Qwen, Granite 4; GLM 4.5 ff., Hunyuan 3 ff.
    Form("<ifm|tool_call>", "</ifm|tool_call>", _read_k2_horizon),
    Form("<|plamo:begin_tool_name:plamo|>", "<|plamo:end_tool_arguments:plamo|>", _read_plamo),
    Form("<|tools_prefix|>", "<|tools_suffix|>", _read_apertus),
    Form("<dots_function_call>", "</dots_function_call>", read_json),
    Form("<|function_call|>", None, read_json),  # GigaChat 3
    Form("function call<|role_sep|>", None, read_json),  # GigaChat 3, older templates
    Form("<longcat_tool_call>", "</longcat_tool_call>", read_json),
    Form("<tool_calls>", "</tool_calls>", read_json),  # Jamba, Hunyuan
    Form("<|content_invoke_tool_json|>", None, read_json),  # Inkling
    Form("<|START_ACTION|>", "<|END_ACTION|>", read_json),  # Cohere
    Form("<|action_start|><|plugin|>", "<|action_end|>", read_json),  # InternLM 2
    Form("<|tool_call|>", None, read_json),  # Granite 3
    Form("<function_call>", None, read_json),  # Granite 20B
    Form("<|python_tag|>", None, _read_llama),  # Llama 3
    Form("functools", None, read_json),  # Phi-4 mini
    Form("<|python_start|>", "<|python_end|>", _read_python),  # Llama 4
    Form("<|tool_call_start|>", "<|tool_call_end|>", _read_python),  # LFM 2
    Form("<function_calls>", "</function_calls>", _read_python),  # OLMo 3
)
"""The forms, in the order in which they are tried: a tag that wraps another tag comes after it."""


def find_marked(text: str) -> Found | None:
    """The last call in the first form that has a call in the text."""
    num_left = _MAX_READ_CHARS
    for form in FORMS:
        start = len(text)
        for _ in range(_MAX_OPENINGS):
            start = text.rfind(form.opening, 0, start)
            if start < 0:
                break
            if num_left <= 0:
                return None
            num_left -= len(text) - start
            body = text[start + len(form.opening) :]
            if form.closing is not None and form.closing in body:
                body = body[: body.rfind(form.closing)]
            found = form.read(body)
            if found is not None:
                return found
    return None


# The reader.

MAX_COMMAND_CHARS = 4096
"""Longer commands are truncated, so that a file in a heredoc does not stay in memory."""

_THINKING = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    *((f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think", "think_fast", "think_faster")),  # K2 Horizon
)
_SUFFIX = re.compile(r"(</?(?:think|tool_calls?|tool_sep|arg_key|arg_value)):[^\s<>]{1,32}(?=>)")
"""What Hunyuan 3 and 4 write at the end of the tags that other models have too: `<tool_call:x9>`."""
_END_TOKENS = re.compile(r"(?:\s++|<[|｜][^<>]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>|<turn\|>|\[e~\[)++\Z")
_MAX_END_CHARS = 200

_MESSAGE_END = re.compile(r"<\|(?:start|end|call|eom)\|>")
_MAX_HEADER_CHARS = 256
_RECIPIENT = re.compile(r"to=([\w.-]+)")
_NOT_TOOLS = frozenset({"assistant", "user", "self", "commentary", "all"})

_SHELL_TAGS = frozenset({"bash", "sh", "shell", "zsh", "mswea_bash_command"})
"""Tags of fenced blocks that contain shell commands; the last is mini-swe-agent 2's own tag."""
_FENCE = re.compile(r"\s*+`{3,}+\s*+([^\s`]*+)[^`]*+\Z")
"""A fence and its tag, the first word after it: `bash` in ```bash title="x". Code in a line is no fence."""
_JSON_TAGS = frozenset({"json", "tool_call"})

_MAYBE_SECRET = re.compile(r"(?<=[=<]).*", re.DOTALL)
_SHELL_NAMES = ("bash", "shell", "terminal", "command", "cmd", "exec")
"""If a tool's name contains one of these, its argument `command` is a shell command.

The check is needed because other tools, such as editors, also have an argument `command`.
"""
_COMMAND_START = re.compile(
    r"(?:(?<=[=\"'>{,(])|(?<=, ))(?:command|cmd)\"?"
    r"(?:=[\"']|:<\|\"\|>|:<escape>|</arg_key>\s{0,9}<arg_value>|[^<>\n]{0,40}(?:>|<\|sep\|>))"
)
_COMMAND_END = re.compile(r"</[^<>/]{0,16}(?:parameter|param|arg_value)>|<\|close\|>|<\|\"\|>|<escape>")
_STRING_END = re.compile(r"[\"']\s{0,9}(?:,|\Z)")

_OPENINGS: dict[str, list[str]] = {"<|call|>": ["<|message|>"]}
"""For each closing marker, the opening markers that may belong to it."""
for _form in FORMS:
    if _form.closing is not None:
        _OPENINGS.setdefault(_form.closing, []).append(_form.opening)

_THOUGHT_STARTS, _THOUGHT_ENDS = (frozenset(marks) for marks in zip(*_THINKING, strict=True))
_CLOSINGS = {
    **dict(_THINKING),
    **{form.opening: form.closing for form in FORMS},
    "<|message|>": "<|call|>",
    "```": "\n```",
}
"""By the marker that opens a thought, a call or a fenced block: the marker that closes it."""
_THOUGHT_END = re.compile("|".join(map(re.escape, _THOUGHT_ENDS)))
_MARKS = re.compile("|".join(map(re.escape, [*_THOUGHT_ENDS, *_CLOSINGS])))
_BARE_START = re.compile(r"\s*+[\[{](?!/?THINK\])")


def find_tool_call(text: str) -> ToolCall | None:
    """The tool call at the end of a turn, or None. `text` is the turn's output or the tail of it."""
    text = _drop_thinking(text)[0]
    before, marker, body = text.rpartition("<|message|>")
    if marker:
        # gpt-oss and Muse: only the last message matters, and its header names the recipient.
        header = _MESSAGE_END.split(before[-_MAX_HEADER_CHARS:])[-1]
        match = _RECIPIENT.search(header)
        recipient = match[1] if match else "user"
        if recipient not in _NOT_TOOLS:
            return _make_call(recipient, body.partition("<|call|>")[0])
        if recipient == "self" or "analysis" in header:
            return None
        text = body
    found = find_marked(text)
    if found is None:
        text = _drop_end_tokens(text)
        found = read_bare(text)
    return _find_fenced(text) if found is None else _make_call(*found)


def is_cut(text: str) -> bool:
    """Whether the text contains only the end of a call, so that a longer tail is needed.

    It may be true for other texts, such as a structured answer. Then a longer tail is read without need.
    """
    text, ends_thinking = _drop_thinking(text)
    if ends_thinking:
        # The marker of this thought may be quoted by a call that began before the text.
        return True
    ends = {closing: text.rfind(closing) for closing in _OPENINGS if closing in text}
    for closing, end in ends.items():
        if all(text.find(opening, 0, end) < 0 for opening in _OPENINGS[closing]):
            return True
    body = _drop_end_tokens(text)
    blocks, ends_open = _get_blocks(body)
    if ends_open and blocks[-1][0] == "":
        # The number of fences is odd: one of them closed a block that began before the text.
        return True
    # Arguments may contain an opening marker. Some calls have no closing marker, and some have no marker.
    ends_call = bool(ends) or body.endswith(("}", "]"))
    return ends_call and find_tool_call(text) is None


def _drop_thinking(text: str) -> tuple[str, bool]:
    """The text without what the model thought, and whether its last thought has no end.

    Markers inside a call stay: arguments may quote them.
    """
    text = _SUFFIX.sub(r"\1", text)
    if not any(marker in text for markers in _THINKING for marker in markers):
        return text, False
    kept: list[str] = []
    start = position = 0
    may_be_bare = _drop_end_tokens(text).endswith(("}", "]"))
    marks = _MARKS
    while match := marks.search(text, position):
        if may_be_bare and position == start and _BARE_START.match(text, start):
            break
        mark = match[0]
        closing = _CLOSINGS.get(mark)
        end = text.find(closing, match.end()) if closing else -1
        position = match.end() if end < 0 or closing is None else end + len(closing)
        if mark in _THOUGHT_STARTS:
            kept.append(text[start : match.start()])
            start = position
            if end < 0:
                return "".join(kept), True
        elif mark not in _THOUGHT_ENDS:
            if end < 0:
                # The rest belongs to the call, unless all of this was a thought.
                marks = _THOUGHT_END
        elif not kept:
            # The opening marker is in the prompt, or before the tail.
            start = position
    return "".join(kept) + text[start:], False


def _drop_end_tokens(text: str) -> str:
    return text[:-_MAX_END_CHARS] + _END_TOKENS.sub("", text[-_MAX_END_CHARS:])


def _get_blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """The fenced blocks of a text, as pairs (tag, content), and whether the last block is still open."""
    blocks: list[tuple[str, str]] = []
    tag: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        info = fence[1].lower() if fence else None
        if info is None:
            lines.append(line)
        elif tag is None or (tag == "" and info):
            # A tag inside an untagged block: the fence before it closed a block that began before the text.
            tag, lines = info, []
        elif info:
            lines.append(line)
        else:
            blocks.append((tag, "\n".join(lines)))
            tag = None
    if tag is not None:
        blocks.append((tag, "\n".join(lines)))
    return blocks, tag is not None


def _find_fenced(text: str) -> ToolCall | None:
    """The last block that is a shell script or a call in JSON."""
    for tag, content in reversed(_get_blocks(text)[0]):
        call = _make_shell_call(content) if tag in _SHELL_TAGS else None
        if tag in _JSON_TAGS and (found := read_json(content)) is not None:
            call = _make_call(*found)
        if call is not None:
            return call
    return None


def _make_call(name: str, arguments: Any) -> ToolCall | None:
    """A call of bounded size; None if the name is not usable."""
    name = re.sub(r":\d{1,9}$", "", name.strip().removeprefix("functions."))  # Kimi numbers its calls
    if isinstance(arguments, str) and (decoded := decode_json(arguments)) is not None:
        arguments = decoded
    if any(part in name.lower() for part in _SHELL_NAMES):
        command = _get_command(arguments)
        if command is not None:
            return _make_shell_call(command)
    bounded = get_bounded_tool(name)
    if bounded is None:
        return None
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            arguments = ""
    return ToolCall(bounded, _bound_command(arguments))


def _make_shell_call(command: str) -> ToolCall | None:
    # Commands often begin with a comment that says what they are for, or with `#!/bin/bash`.
    lines = (line.split(None, 1) for line in command.splitlines())
    words = [words[0] for words in lines if words]
    first = next((word for word in words if not word.startswith("#")), words[0] if words else "")
    # `PASSWORD=x make test`, `<<<x sudo -S make`: names are stored and shown, so they must not contain a
    # possible secret.
    name = get_bounded_tool(_MAYBE_SECRET.sub("", first, 1))
    return None if name is None else ToolCall(name, _bound_command(command))


def _bound_command(command: str) -> str | None:
    # JSON strings may contain lone surrogates, which cannot be encoded in a log.
    return command.strip()[:MAX_COMMAND_CHARS].encode(errors="replace").decode() or None


def _get_command(arguments: Any) -> str | None:
    if isinstance(arguments, dict):
        command = arguments.get("command", arguments.get("cmd"))
        if isinstance(command, list) and all(isinstance(word, str) for word in command):
            # Codex writes ["bash", "-lc", "make test"].
            is_wrapped = len(command) == 3 and command[1] in ("-c", "-lc")
            command = command[2] if is_wrapped else " ".join(command)
        return command if isinstance(command, str) and command.strip() else None
    match = _COMMAND_START.search(arguments) if isinstance(arguments, str) else None
    if match is None:
        return None
    closing = _STRING_END if match[0].endswith(('="', "='")) else _COMMAND_END
    end = closing.search(arguments, match.end())
    return arguments[match.end() : end.start() if end else None].strip() or None
