"""Chat messages as pieces that can be compared, and the tool calls in them.

A piece is a message in a normalised form: role, text and tool calls, without anything that clients add or
drop when they send an answer back. So the next prompt of a conversation begins with the pieces of this one,
followed by the pieces of its answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.core.requests.tool_calls import find_tool_call
from tenuto.core.types import ToolCall

TEXT_PIECE_CHARS = 256
"""A prompt that is one text is split into pieces of this length."""
CHARS_PER_TOKEN = 4
"""Used if token counts are missing. About the average for English and code in the common vocabularies."""
_TAIL_CHARS = 65_536
"""A tool call is searched for only in this many characters at the end of an output."""
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_]\w*=(?:\"[^\"]*\"|'[^']*'|\S*)\s+")
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.:+-]{0,63}")


def cut_text(text: str) -> list[str]:
    """A text in pieces of one length; only the last may be shorter."""
    return [text[at : at + TEXT_PIECE_CHARS] for at in range(0, len(text), TEXT_PIECE_CHARS)]


def write_message(message: Mapping[str, Any]) -> str:
    """A chat message as a piece."""
    written = [write_call(name, arguments) for name, arguments in get_calls(message)]
    return write_piece(message.get("role"), read_text(message.get("content")), written)


def write_piece(role: Any, text: str, calls: list[str]) -> str:
    """The form that all messages are compared in."""
    return "\x00".join([str(role), text, *calls])


def write_call(name: Any, arguments: Any) -> str:
    """A tool call; arguments as an object or as the JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"{name}\x01{arguments}"
    return f"{name}\x01{json.dumps(arguments, sort_keys=True)}"


def read_text(content: Any) -> str:
    """The text of a message's content; parts that are no text stand as their JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else json.dumps(part, sort_keys=True)
        for part in parts
    )


def get_calls(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Name and arguments of each tool call of a chat message."""
    calls = message.get("tool_calls")
    functions = [
        call["function"]
        for call in (calls if isinstance(calls, list) else [])
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    return [(function.get("name"), function.get("arguments")) for function in functions]


def find_tool(text: str, calls: Sequence[tuple[Any, Any]]) -> ToolCall | None:
    """The tool call that an answer ends with: the last of `calls`, or what its text shows."""
    if not calls:
        return find_tool_call(text[-_TAIL_CHARS:])
    name, arguments = calls[-1]
    try:
        decoded = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        call = json.dumps({"name": name, "arguments": decoded})
    except (ValueError, RecursionError):
        call = json.dumps({"name": name, "arguments": {}})
    return find_tool_call(f"<tool_call>\n{call}\n</tool_call>")


def get_plain_tool(tool: ToolCall) -> str:
    """A tool's name that reveals nothing else.

    A shell command's first word may be an assignment (of a key, say) or a path with a user's name in it.
    """
    name = tool.name
    if "=" in name and tool.command is not None:
        words = _skip_assignments(tool.command).split(None, 1)
        name = words[0] if words else ""
    name = name.rsplit("/", 1)[-1]
    return name if _PLAIN_NAME.fullmatch(name) else "other"


def _skip_assignments(command: str) -> str:
    while match := _ASSIGNMENT.match(command):
        command = command[match.end() :]
    return command
