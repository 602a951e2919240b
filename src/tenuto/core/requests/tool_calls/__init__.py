"""Finds the tool call at the end of a turn, in the tail of its decoded output (with special tokens).

Only the tool's name and its command are needed, so one small reader serves many models. The formats differ
in the marker in front of a call; `forms.py` has a table of the markers. The reader tries, in this order:
gpt-oss messages, marked calls, a bare call that is the whole text, and a fenced block. If there are several
calls, the *last* one is used: the agent waits for all of them, and a short tail always contains the last.

The name of a shell call is the first word of its command, unchanged (`cd` for `cd /src && make`), as in
Continuum. If the first word is an assignment, its value is left out (`TOKEN=` for `TOKEN=x make`). The result
also contains the whole command, for policies that need more than the name.

The output is untrusted text: nothing here raises, and the time is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tenuto.core.requests.hints import get_bounded_tool
from tenuto.core.requests.tool_calls.forms import FORMS, decode_json, find_marked, read_bare, read_json
from tenuto.core.types import ToolCall

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
)
_END_TOKENS = re.compile(r"(?:\s|<[|｜][^<>]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>|<turn\|>|\[e~\[)+\Z")
_MAX_END_CHARS = 200

_MESSAGE_END = re.compile(r"<\|(?:start|end|call|eom)\|>")
_MAX_HEADER_CHARS = 256
_RECIPIENT = re.compile(r"to=([\w.-]+)")
_NOT_TOOLS = frozenset({"assistant", "user", "self", "commentary", "all"})

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_SHELL_TAGS = frozenset({"bash", "sh", "shell", "zsh", "mswea_bash_command"})
"""Tags of fenced blocks that contain shell commands; the last is mini-swe-agent 2's own tag."""
_JSON_TAGS = frozenset({"json", "tool_call"})

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


def find_tool_call(text: str) -> ToolCall | None:
    """The tool call at the end of a turn, or None. `text` is the turn's output or the tail of it."""
    text = _drop_thinking(text)
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

    Sometimes true for a text that needs no longer tail, such as a structured answer. The only cost is that
    a longer tail is read.
    """
    text = _drop_thinking(text)
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


def _drop_thinking(text: str) -> str:
    for opening, closing in _THINKING:
        end = text.find(closing)
        # The opening marker may be in the prompt, or before the tail.
        is_inside = end >= 0 and text.find(opening, 0, end) < 0
        position = end + len(closing) if is_inside else 0
        kept = []
        while (start := text.find(opening, position)) >= 0:
            kept.append(text[position:start])
            end = text.find(closing, start)
            # Still thinking where it never closes.
            position = end + len(closing) if end >= 0 else len(text)
        text = "".join(kept) + text[position:]
    return text


def _drop_end_tokens(text: str) -> str:
    return text[:-_MAX_END_CHARS] + _END_TOKENS.sub("", text[-_MAX_END_CHARS:])


def _get_blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """The fenced blocks of a text, as pairs (tag, content), and whether the last block is still open."""
    blocks: list[tuple[str, str]] = []
    tag: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = line.strip()
        info = fence.strip("`").strip().lower() if fence.startswith("```") else None
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
    words = command.split(None, 1)
    first = words[0] if words else ""
    # `PASSWORD=x make test`: names are stored and shown, so they must not contain a possible secret.
    assigned = _ASSIGNMENT.match(first)
    name = get_bounded_tool(assigned[0] if assigned else first)
    return None if name is None else ToolCall(name, _bound_command(command))


def _bound_command(command: str) -> str | None:
    # JSON strings may contain lone surrogates, which cannot be encoded in a log.
    return command.strip()[:MAX_COMMAND_CHARS].encode(errors="replace").decode() or None


def _get_command(arguments: Any) -> str | None:
    """The shell command among a tool's arguments."""
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
