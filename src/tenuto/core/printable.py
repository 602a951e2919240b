"""Makes texts that strangers wrote safe to print on a terminal and into a log."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 2000
"""Longest error message. A message that quotes an input may otherwise be as long as the input."""

_CONTROL = "\x00-\x09\x0b-\x1f\x7f-\x9f"
_INVISIBLE = "\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff"
"""Zero-width characters, line separators, changes of direction, and what UTF-8 cannot encode."""
_UNPRINTABLE = re.compile(f"[\n{_CONTROL}{_INVISIBLE}]+")
_UNPRINTABLE_IN_LINES = re.compile(f"[{_CONTROL}{_INVISIBLE}]+")


def clean(text: str) -> str:
    """Make an untrusted text safe to print: remove control, direction and surrogate characters."""
    return _UNPRINTABLE.sub(" ", text).strip()


def bound_message(text: str) -> str:
    """Make a message of several lines safe to print, and cut its middle out if it is too long."""
    text = _UNPRINTABLE_IN_LINES.sub(" ", text)
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    # The beginning says where it is, and the end may say what to do.
    return f"{text[: MAX_MESSAGE_CHARS - 500]} … {text[-400:]}"
