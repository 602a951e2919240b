"""Step times from measured operator tables.

A step is the sum of four parts, each read from the tables once per size and then remembered:

    everything but attention and the output head, by the step's tokens        exact
    the output head, by the step's requests                                    exact
    prefill attention, by chunks, mean length and (query, key) pairs           linear between lengths
    decode attention, by decodes and mean context                              linear between contexts
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.mixed import StepParts

# Four lengths per doubling, up to 256K tokens; beyond, the last slope is continued.
LENGTHS = tuple(sorted({round(2 ** (quarter / 4)) for quarter in range(4 * 18 + 1)}))


class OperatorTables(Protocol):
    """Measured seconds of the parts of a step, for one model on one kind of GPU."""

    def linear_s(self, num_tokens: int) -> float:
        """Everything but attention and the output head, for that many tokens in a step."""
        ...

    def head_s(self, num_requests: int) -> float:
        """The output head for that many requests."""
        ...

    def prefill_attention_s(self, num_chunks: int, num_tokens: int, num_context_tokens: int) -> float:
        """Attention of equal prefill chunks: their tokens, each after that much context."""
        ...

    def decode_attention_s(self, num_decodes: int, num_context_tokens: int) -> float:
        """Attention of decodes at equal contexts."""
        ...


class TableStepCost:
    """Step times interpolated from operator tables: GPU work alone, `HostedStepCost` adds the host."""

    def __init__(self, tables: OperatorTables) -> None:
        self._tables = tables
        self._linear_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}
        self._prefill_s_per_pair: dict[int, _Curve] = {}
        self._decode_attention_s: dict[int, _Curve] = {}
        self._prefill_fixed_s = _prefill_fixed_s(tables)

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step on the GPU; 0.0 for an empty batch."""
        others_s, prefill_attention_s, decode_attention_s = self.get_parts(batch)
        return others_s + prefill_attention_s + decode_attention_s

    def get_parts(self, batch: StepBatch) -> StepParts:
        """The parts of one step; all 0.0 for an empty batch."""
        num_tokens = batch.num_prefill_tokens + batch.num_decodes
        if num_tokens == 0:
            return StepParts(0.0, 0.0, 0.0)
        linear_s = self._linear_s.get(num_tokens)
        if linear_s is None:
            linear_s = self._linear_s[num_tokens] = self._tables.linear_s(num_tokens)
        num_requests = batch.num_prefills + batch.num_decodes
        head_s = self._head_s.get(num_requests)
        if head_s is None:
            head_s = self._head_s[num_requests] = self._tables.head_s(num_requests)
        prefill_s = decode_s = 0.0
        if batch.num_prefills:
            num_cached = batch.num_prefill_tokens + batch.num_prefill_context_tokens
            s_per_pair = self._prefill_curve(batch.num_prefills).at(num_cached / batch.num_prefills)
            prefill_s = self._prefill_fixed_s + s_per_pair * batch.num_prefill_pairs
        if batch.num_decodes:
            decode_s = self._decode_curve(batch.num_decodes).at(
                batch.num_decode_context_tokens / batch.num_decodes
            )
        return StepParts(linear_s + head_s, prefill_s, decode_s)

    def _prefill_curve(self, num_chunks: int) -> _Curve:
        curve = self._prefill_s_per_pair.get(num_chunks)
        if curve is None:

            def s_per_pair(length: int) -> float:
                whole_s = self._tables.prefill_attention_s(num_chunks, length, 0)
                return (whole_s - self._prefill_fixed_s) / (num_chunks * length * length / 2)

            curve = self._prefill_s_per_pair[num_chunks] = _Curve(s_per_pair)
        return curve

    def _decode_curve(self, num_decodes: int) -> _Curve:
        curve = self._decode_attention_s.get(num_decodes)
        if curve is None:
            tables = self._tables
            curve = _Curve(lambda length: tables.decode_attention_s(num_decodes, length))
            self._decode_attention_s[num_decodes] = curve
        return curve


def _prefill_fixed_s(tables: OperatorTables) -> float:
    """Seconds of prefill attention that do not depend on its pairs: rotary embedding and cache write.

    The tables scale the kernel's time by the share of a sequence's pairs that a chunk visits. So two chunks
    that end at the same length give two equations: whole = fixed + kernel, last = fixed + share * kernel.
    """
    length = 64
    whole_s = tables.prefill_attention_s(1, length, 0)
    last_s = tables.prefill_attention_s(1, 1, length - 1)
    share = 1 - ((length - 1) / length) ** 2
    return (last_s - share * whole_s) / (1 - share)


class _Curve:
    """A function of a length, linear between `LENGTHS`, read there on first use."""

    def __init__(self, read: Callable[[int], float]) -> None:
        self._read = read
        self._values: list[float | None] = [None] * len(LENGTHS)

    def at(self, length: float) -> float:
        i = min(max(bisect_right(LENGTHS, length) - 1, 0), len(LENGTHS) - 2)
        left, right = self._value(i), self._value(i + 1)
        position = max(length, LENGTHS[0])
        return left + (right - left) * (position - LENGTHS[i]) / (LENGTHS[i + 1] - LENGTHS[i])

    def _value(self, i: int) -> float:
        value = self._values[i]
        if value is None:
            value = self._values[i] = self._read(LENGTHS[i])
        return value
