"""Forces answers into a format with vLLM's structured output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError

REGEX = "regex:"


def read_format(text: str) -> dict[str, Any]:
    """Make the request's `structured_outputs` from an option's text. Raises ConfigError.

    `json` means any JSON object; `regex:PATTERN` is a pattern. Any other text names a JSON schema file.
    """
    if text == "json":
        return {"json_object": True}
    if text.startswith(REGEX):
        return {"regex": _check_pattern(text.removeprefix(REGEX))}
    try:
        schema = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--force-format wants json, regex:PATTERN or a file with a JSON schema; {text}: {error}"
        ) from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--force-format: {text} holds no JSON schema: not an object")
    return {"json": schema}


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--force-format: {pattern!r} is no regular expression: {error}") from error
    if not pattern:
        raise ConfigError("--force-format: the regular expression is empty")
    return pattern
