"""Removes lines that change from turn to turn from a prompt's head, or moves them to the prompt's end.

Some clients put a billing line, a date or a counter into the instructions. All text after it is then computed
again in each turn. An operator may select such lines by regular expressions. A line is edited only if it is
in the head of the conversation (before the model's first answer) and an expression matches the whole line.
Nothing else in a request changes. Without expressions, requests are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.requests import MAX_HEAD_MESSAGES, is_head

DROP_VARIABLE = "TENUTO_DROP_LINES"
MOVE_VARIABLE = "TENUTO_MOVE_LINES"
"""Environment variables: a JSON list of regular expressions."""


class HeadLines:
    """The lines to remove and the lines to move."""

    def __init__(self, drop: Sequence[str] = (), move: Sequence[str] = ()) -> None:
        self._drop = [_compile(each, DROP_VARIABLE) for each in drop]
        self._move = [_compile(each, MOVE_VARIABLE) for each in move]

    def __bool__(self) -> bool:
        """Whether there are any expressions."""
        return bool(self._drop or self._move)

    def edit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The members of a request that change, with their new values. Never raises.

        If the last message has no text, lines cannot be moved and stay where they are.
        """
        name = "messages" if isinstance(request.get("messages"), list) else "input"
        messages = request.get(name)
        messages = messages if isinstance(messages, list) else []
        editor = _Editor(self._drop, self._move if _add_lines(messages, ["x"]) is not None else ())
        edited = {key: editor.edit_content(request[key]) for key in _BESIDE if key in request}
        if messages:
            edited[name] = _add_lines(editor.edit_messages(messages), editor.moved)
        # Compare by identity first: NaN, which Python's JSON reader accepts, is not equal to itself.
        return {key: new for key, new in edited.items() if new is not request[key] and new != request[key]}


_BESIDE = ("system", "instructions")


class _Editor:
    """Edits the texts of one request, and collects the lines that move."""

    def __init__(self, drop: Sequence[re.Pattern[str]], move: Sequence[re.Pattern[str]]) -> None:
        self.moved: list[str] = []
        self._drop = drop
        self._move = move

    def edit_messages(self, messages: list[Any]) -> list[Any]:
        edited = list(messages)
        for index, message in enumerate(messages[:MAX_HEAD_MESSAGES]):
            if not isinstance(message, dict) or not is_head(message):
                break
            if "content" in message:
                edited[index] = {**message, "content": self.edit_content(message["content"])}
        return edited

    def edit_content(self, content: Any) -> Any:
        if isinstance(content, list):
            return [
                self.edit_content(part) if isinstance(part, str) else self._edit_part(part)
                for part in content
            ]
        return self._edit_text(content) if isinstance(content, str) else content

    def _edit_part(self, part: Any) -> Any:
        if _holds_text(part):
            return {**part, "text": self._edit_text(part["text"])}
        return part

    def _edit_text(self, text: str) -> str:
        kept = []
        for line in text.split("\n"):
            if any(pattern.fullmatch(line) for pattern in self._drop):
                continue
            if any(pattern.fullmatch(line) for pattern in self._move):
                self.moved.append(line)
                continue
            kept.append(line)
        return "\n".join(kept)


def read_head_lines(environment: Mapping[str, str]) -> HeadLines:
    """The operator's expressions. Raises ConfigError naming the variable."""
    return HeadLines(*(_read_patterns(environment, name) for name in (DROP_VARIABLE, MOVE_VARIABLE)))


def _read_patterns(environment: Mapping[str, str], name: str) -> list[str]:
    try:
        patterns = json.loads(environment.get(name) or "[]")
    except ValueError:
        patterns = None
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"{name} must be a JSON list of regular expressions, got {environment[name]!r}")
    return patterns


def _compile(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}: {pattern!r} is not a regular expression: {error}") from None


def _add_lines(messages: list[Any], lines: Sequence[str]) -> list[Any] | None:
    """The messages with these lines at the end of the last one; None if that holds no text."""
    if not lines:
        return messages
    last = messages[-1] if messages else None
    content = last.get("content") if isinstance(last, dict) else None
    added = "\n" + "\n".join(lines)
    if isinstance(content, str):
        content += added
    elif isinstance(content, list) and content and _holds_text(content[-1]):
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + added}]
    else:
        return None
    return [*messages[:-1], {**messages[-1], "content": content}]


def _holds_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
