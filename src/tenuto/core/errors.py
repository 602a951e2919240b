"""All errors that Tenuto raises on purpose, and functions that make untrusted texts safe to print."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


class TenutoError(Exception):
    """Base of all errors raised on purpose; its message says what to do."""

    def __str__(self) -> str:
        """The message, safe to print and of bounded length for any quoted input."""
        return bound_message(super().__str__())


class ConfigError(TenutoError):
    """A setting is unknown, of the wrong type or out of range."""


class PolicyError(TenutoError):
    """A policy cannot be loaded, or breaks the policy contract."""


class NotFoundError(PolicyError):
    """No policy or router has this name, or its file or module does not exist."""


class IntegrityError(TenutoError):
    """An invariant of the block pool or of the leases does not hold; always a bug, never caused by input."""


class IncompatibleError(TenutoError):
    """Tenuto does not support this vLLM; the message lists what differs."""


class DataError(TenutoError):
    """An input file is malformed; the message names file, line and field."""


MAX_MESSAGE_CHARS = 2000
"""Longest error message. Without this bound, a message that quotes its input could be as long as the
input."""

_CONTROL = "\x00-\x09\x0b-\x1f\x7f-\x9f"
_INVISIBLE = "\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff"
"""Zero-width characters, line separators, direction marks, and what UTF-8 cannot encode."""
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
    # The beginning says where the error is. The end may say what to do.
    return f"{text[: MAX_MESSAGE_CHARS - 500]} … {text[-400:]}"


def suggest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of an error message: "; did you mean X?", or empty if no known name is similar.

    `cutoff`: the least similarity, from 0 (any name) to 1 (equal except for case).
    """
    by_folded, folded = {each.lower(): each for each in known}, str(name).lower()
    near = difflib.get_close_matches(folded, by_folded, n=len(by_folded) or 1, cutoff=cutoff)
    # A name that was cut short may be closer to another one: A100 is closer to H100 than to A100-80.
    longer = [each for each in by_folded if each in near and each.startswith(folded)]
    words = [each for each in by_folded if each in folded.split()]
    found = longer or near[:1] or words
    return f"; did you mean {' or '.join(by_folded[each] for each in found)}?" if found else ""


HIDDEN = "***"
KEY_FLAG = "--api-key"
_SECRET_FLAGS = (KEY_FLAG, "--hf-token")


def is_flag(argument: str, flag: str) -> bool:
    """Whether an argument is this flag of vLLM's, which accepts abbreviations that are not ambiguous."""
    name = argument.partition("=")[0].replace("_", "-")
    return flag.startswith(name) and len(name) > flag.rindex("-") + 1


def redact(arguments: Sequence[str]) -> list[str]:
    """The arguments of vLLM with the values of keys and tokens hidden; an option may have several values."""
    shown: list[str] = []
    is_key = wants_value = False
    for argument in arguments:
        # Of what begins with one dash, argparse takes negative numbers for values.
        looks_like_flag = argument.startswith("--") or (argument[:1] == "-" and argument[1:2].isalpha())
        if looks_like_flag and not wants_value:
            name, equals, _ = argument.partition("=")
            is_key = any(is_flag(argument, flag) for flag in _SECRET_FLAGS)
            # vLLM refuses a key that begins with a dash, but it is a key.
            wants_value = is_flag(argument, KEY_FLAG) and not equals
            shown.append(f"{name}={HIDDEN}" if is_key and equals else argument)
        else:
            shown.append(HIDDEN if is_key else argument)
            wants_value = False
    return shown
