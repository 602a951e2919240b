"""What a stranger may send: values, names and hints that no honest client would.

Everything comes from the random generator that is passed in, so a seed makes the same values again.
"""

from __future__ import annotations

import random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 0.0, -0.0, 0.5, 2**31, -(2**31), 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 1e308, -1e308,
    1e-320, float("inf"), float("-inf"), float("nan"), 10**400, True, False, None,
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\t", "\x00", "a", "é", "0", "-1", "1e999", "nan", "true", "null", "{}", "[]", "../../x",
    "%s%n", "\u202e", "\ud800", "\U0001f600", "'\"`$(x)", "<|call|>", "</s>", "\\", "\r\n", "key=", "=", ":",
)  # fmt: skip
HINT_NAMES = (
    "job_id",
    "is_last_step",
    "tool",
    "expected_tool_seconds",
    "tenant",
    "session_id",
    "tenuto_tenant",
)
REQUEST_IDS = (
    "tenuto-prefetch-{}", "tenuto-store-{}", "tenuto-{:032x}", "tenuto-{}", "\tturn:{}", "resp_{}",
    "0_cmpl-{}", "conv-{:024x}", "digest-{:032x}", "\t{}", "{}",
)  # fmt: skip
"""Names of requests, which clients choose: those that Tenuto and vLLM give, or gave, to what is their own."""


def make_request_id(rng: random.Random, number: int) -> str:
    """A request's id. It differs from others if the number does."""
    return rng.choice(REQUEST_IDS).format(number)


def make_text(rng: random.Random, max_chars: int = 40) -> str:
    """A short text, rarely a long one; any code point, lone surrogates among them."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(TEXTS)
    if kind < 0.43:
        return rng.choice(("x", "\u202e", "(", "a ", "```", "{", "\\")) * rng.choice((127, 128, 129, 5000))
    chars = (
        rng.choice((rng.randrange(32, 127), rng.randrange(0x11000))) for _ in range(rng.randrange(max_chars))
    )
    return "".join(map(chr, chars))


def make_value(rng: random.Random, depth: int = 3) -> Any:
    """A JSON value, with the numbers that Python's JSON adds; rarely nested deeply."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.7 or depth == 0:
        return make_text(rng)
    if kind < 0.85:
        return [make_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {make_text(rng, 8): make_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def make_hints(rng: random.Random, names: tuple[str, ...] = HINT_NAMES) -> dict[str, Any]:
    """Hint fields, of which some hold what they should and others anything."""
    return {name: make_value(rng) for name in names if rng.random() < 0.5}
