"""Which steps of a server are timed: chunks after contexts, and decodes at contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNIT = 128
"""Contexts are multiples of it, so that they end with a block on every usual block size."""
FEWEST_CHUNK_TOKENS = 32
DEFAULT_MAX_CONTEXT = 16384
OUTPUT_TOKENS = 24
"""Of each timed decode; its steps are averaged."""


@dataclass(frozen=True)
class Prefill:
    """A chunk of new tokens after a cached context."""

    num_tokens: int
    num_context_tokens: int

    def describe(self, seconds: float) -> dict[str, Any]:
        """The step as a line of an observations file."""
        return {"prefills": [[self.num_tokens, self.num_context_tokens]], "decodes": [], "seconds": seconds}


@dataclass(frozen=True)
class Decode:
    """Conversations that decode at once, and the context each begins with."""

    num_decodes: int
    num_context_tokens: int

    def describe(self, seconds: float) -> dict[str, Any]:
        """The step half way through the answers, as a line of an observations file."""
        context = self.num_context_tokens + OUTPUT_TOKENS // 2
        return {"prefills": [], "decodes": [context] * self.num_decodes, "seconds": seconds}


TimedStep = Prefill | Decode


@dataclass(frozen=True)
class ProfilePlan:
    """Prefills by rising context, decodes by rising context and falling number."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        """All of them, in the order in which they are timed."""
        return (*self.prefills, *self.decodes)


def make_plan(step_tokens: int, max_context: int, max_batch: int, num_kv_tokens: int | None) -> ProfilePlan:
    """The steps to time: no chunk above `step_tokens`, no decodes that the KV cache cannot hold at once."""
    chunks = _double(FEWEST_CHUNK_TOKENS, step_tokens)
    contexts = [0, *(_double(4 * UNIT, max_context // UNIT * UNIT))]
    prefills = tuple(Prefill(n, c) for c in contexts for n in chunks if n + c <= max_context)
    batches = _double(1, max_batch)[::-1]
    # Half the cache: the rest keeps the prefixes of conversations that wait for their turn.
    room = num_kv_tokens // 2 if num_kv_tokens else max_batch * max_context
    decodes = tuple(
        Decode(n, c)
        for c in [UNIT, *contexts[1:]]
        for n in batches
        if n * (c + OUTPUT_TOKENS) <= room and c + OUTPUT_TOKENS < max_context
    )
    return ProfilePlan(prefills, decodes)


def get_max_context(wanted: int | None, max_model_len: int | None, num_kv_tokens: int | None) -> int:
    """The longest prompt to send, room for its answer left."""
    bounds = [wanted or DEFAULT_MAX_CONTEXT]
    if max_model_len is not None:
        bounds.append(max_model_len - OUTPUT_TOKENS - 1)
    if num_kv_tokens is not None:
        bounds.append(num_kv_tokens // 2)
    return min(bounds)


def _double(first: int, last: int) -> list[int]:
    """From first, twice as much each time, and the last; nothing where the last is below the first."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last] if values or first == last else []
