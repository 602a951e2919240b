"""Controls how a trace records the commands of tools: not at all, as a salted hash, or in full.

Agents write passwords and tokens into command lines. With hashes, equal commands in one trace can still be
recognised. The salt is random and is never written, so a guess cannot be checked against a hash.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Literal

Commands = Literal["none", "hash", "full"]
COMMANDS: tuple[Commands, ...] = ("none", "hash", "full")

_TYPE = "ToolCall"
_DIGEST_BYTES = 8


class CommandHider:
    """Replaces the commands in records of a decision log. Each instance uses one salt."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._salt = os.urandom(16)

    def hide(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record in the form that may be written. The given record is not changed."""
        if self._commands == "full" or "inputs" not in record:
            return record
        return {**record, "inputs": self._hide_in(record["inputs"])}

    def _hide_in(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._hide_in(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == _TYPE:
            return {**value, "command": self._shorten(value.get("command"))}
        return {name: self._hide_in(each) for name, each in value.items()}

    def _shorten(self, command: Any) -> str | None:
        if command is None or self._commands == "none":
            return None
        text = str(command).encode(errors="replace")
        return "hash-" + hashlib.blake2b(text, key=self._salt, digest_size=_DIGEST_BYTES).hexdigest()
