"""What steps that mix prefill with decoding may cost more, or less, than the sum of their operators.

The operator tables time each kernel alone, so a mixed step is priced as the sum of its parts. No public
measurement of such steps settles what they really take. Two variants give the bounds:

    optimistic    the attention of prefill and of decoding overlap wholly: the longer of the two counts
    pessimistic   a fixed time per layer, as only steps of pure decoding have a full CUDA graph;
                  each chunk reads the keys and values of its context once more, as if it decoded;
                  and the attention of decoding takes 1.28 times as long

Steps that only decode cost the same in all of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from tenuto.sim.cost.batch import StepBatch

Variant = Literal["optimistic", "pessimistic"]
VARIANTS: tuple[Variant, ...] = ("optimistic", "pessimistic")

PIECEWISE_S_PER_LAYER = 128e-6
"""Seconds that a step takes more with piecewise graphs than with a full one, per layer. vLLM pull request
25444: 10 requests of 1,024 and 128 tokens on a model of 48 layers run at 4.07 requests a second with
piecewise graphs and at 5.98 with full ones, so 786 ms lie between them in 128 steps. That model has small
experts, so that little GPU work hides the host's. On a dense model of 1.5 billion parameters and 28 layers
the median time per token fell by 7 % (pull request 16072): of 13 ms, as its profile shows, 33 µs a layer."""
SERIAL_ATTENTION = 1.28
"""Attention of a mixed step, relative to a kernel that fuses prefill and decoding (POD-Attention, arXiv
2410.18038: 28 % faster in the mean)."""


class StepParts(NamedTuple):
    """Seconds of a step's parts, as if each ran alone."""

    others_s: float
    """Everything but attention."""
    prefill_attention_s: float
    decode_attention_s: float


class PartedCost(Protocol):
    """A step cost that can name its parts."""

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step on the GPU: the sum of its parts."""
        ...

    def get_parts(self, batch: StepBatch) -> StepParts:
        """The parts of one step."""
        ...


class MixedStepCost:
    """Step times under a variant's assumptions: GPU work alone, `HostedStepCost` adds the host."""

    def __init__(self, cost: PartedCost, variant: Variant, num_layers: int) -> None:
        self._cost = cost
        self._is_optimistic = variant == "optimistic"
        self._fixed_s = num_layers * PIECEWISE_S_PER_LAYER

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step; 0.0 for an empty batch."""
        if not batch.num_prefills:
            return self._cost.seconds(batch)
        parts = self._cost.get_parts(batch)
        if self._is_optimistic:
            return parts.others_s + max(parts.prefill_attention_s, parts.decode_attention_s)
        reads = StepBatch(0, 0, 0, 0.0, batch.num_prefills, batch.num_prefill_context_tokens)
        return (
            parts.others_s
            + parts.prefill_attention_s
            + self._cost.get_parts(reads).decode_attention_s
            + SERIAL_ATTENTION * parts.decode_attention_s
            + self._fixed_s
        )


def split_variant(name: str | None) -> tuple[str | None, Variant | None]:
    """A step cost's name, as `--step-cost` takes it, in its source and its variant; None where unsaid."""
    source, _, variant = (name or "").rpartition("/")
    for each in VARIANTS:
        if variant == each and source in ("", "tables", "roofline"):
            return source or None, each
    return name, None
