"""Chooses the steps of a server to time: prefill chunks after contexts, and decodes at contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNIT = 128
"""Contexts are multiples of this number of tokens, so they end at a block boundary for usual block sizes."""
FEWEST_CHUNK_TOKENS = 32
DEFAULT_MAX_CONTEXT = 16384
OUTPUT_TOKENS = 24
"""Output tokens of each timed decode. The time per step is the average over them."""


@dataclass(frozen=True)
class Prefill:
    """A chunk of new tokens after a cached context."""

    num_tokens: int
    num_context_tokens: int

    def describe(self, seconds: float) -> dict[str, Any]:
        """The step as one line of an observations file."""
        return {"prefills": [[self.num_tokens, self.num_context_tokens]], "decodes": [], "seconds": seconds}


@dataclass(frozen=True)
class Decode:
    """Conversations that decode at the same time, and the context with which each begins."""

    num_decodes: int
    num_context_tokens: int

    def describe(self, seconds: float) -> dict[str, Any]:
        """The step in the middle of the answers, as one line of an observations file."""
        context = self.num_context_tokens + OUTPUT_TOKENS // 2
        return {"prefills": [], "decodes": [context] * self.num_decodes, "seconds": seconds}


TimedStep = Prefill | Decode


@dataclass(frozen=True)
class ProfilePlan:
    """Prefills sorted by rising context; decodes sorted by rising context and falling batch size."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        """All steps, in the order in which they are timed."""
        return (*self.prefills, *self.decodes)


def make_plan(step_tokens: int, max_context: int, max_batch: int, num_kv_tokens: int | None) -> ProfilePlan:
    """Choose the steps: no chunk above `step_tokens`, and no decodes that do not fit into the KV cache."""
    chunks = _double(FEWEST_CHUNK_TOKENS, step_tokens)
    contexts = [0, *(_double(4 * UNIT, max_context // UNIT * UNIT))]
    prefills = tuple(Prefill(n, c) for c in contexts for n in chunks if n + c <= max_context)
    batches = _double(1, max_batch)[::-1]
    # Use half of the cache. The rest keeps the prefixes of conversations that wait for their turn.
    room = num_kv_tokens // 2 if num_kv_tokens else max_batch * max_context
    decodes = tuple(
        Decode(n, c)
        for c in [UNIT, *contexts[1:]]
        for n in batches
        if n * (c + OUTPUT_TOKENS) <= room and c + OUTPUT_TOKENS < max_context
    )
    return ProfilePlan(prefills, decodes)


def get_max_context(wanted: int | None, max_model_len: int | None, num_kv_tokens: int | None) -> int:
    """The longest prompt that can be sent and leaves room for its answer, in tokens."""
    bounds = [wanted or DEFAULT_MAX_CONTEXT]
    if max_model_len is not None:
        bounds.append(max_model_len - OUTPUT_TOKENS - 1)
    if num_kv_tokens is not None:
        bounds.append(num_kv_tokens // 2)
    return min(bounds)


def _double(first: int, last: int) -> list[int]:
    """Numbers from first to last, each twice the one before, and last itself. Empty if last < first."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last] if values or first == last else []
