"""Hiding API keys in command lines that are printed or kept."""

from __future__ import annotations

from collections.abc import Sequence

HIDDEN = "***"


def redact(arguments: Sequence[str]) -> list[str]:
    """The arguments with every value of `--api-key` hidden; the option may have several values."""
    shown: list[str] = []
    is_key = False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument.partition("=")
            is_key = name.replace("_", "-") == "--api-key"
            shown.append(f"{name}={HIDDEN}" if is_key and equals else argument)
        else:
            shown.append(HIDDEN if is_key else argument)
    return shown
