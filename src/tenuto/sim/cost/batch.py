"""What all step costs share: the contents of a step, the host's time, and the bounds of mixed steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tenuto.core.errors import ConfigError


class StepBatch(NamedTuple):
    """One step in numbers: the sums over its requests on which its duration depends.

    A prefill chunk computes `n` tokens of a request that has `c` tokens in the KV cache; a decode computes
    one token at context `c`.

    Attributes:
        num_prefills: chunks.
        num_prefill_tokens: sum of n.
        num_prefill_context_tokens: sum of c over the chunks.
        num_prefill_pairs: sum of n * (c + n / 2): how many (query, key) pairs causal attention visits.
        num_decodes: decodes.
        num_decode_context_tokens: sum of c over the decodes.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_prefill_context_tokens: int
    num_prefill_pairs: float
    num_decodes: int
    num_decode_context_tokens: int

    @classmethod
    def of(cls, prefills: Iterable[tuple[int, int]] = (), decodes: Iterable[int] = ()) -> StepBatch:
        """The batch of these chunks, as (tokens, context tokens), and these decodes, as context tokens.

        Raises ConfigError if a chunk has no tokens, or a context is negative.
        """
        chunks, contexts = list(prefills), list(decodes)
        if any(n < 1 or c < 0 for n, c in chunks) or any(c < 0 for c in contexts):
            raise ConfigError(
                f"chunks need 1 token or more and contexts 0 or more, got {chunks} and {contexts}"
            )
        return cls(
            num_prefills=len(chunks),
            num_prefill_tokens=sum(n for n, _ in chunks),
            num_prefill_context_tokens=sum(c for _, c in chunks),
            num_prefill_pairs=sum(n * (c + n / 2) for n, c in chunks),
            num_decodes=len(contexts),
            num_decode_context_tokens=sum(contexts),
        )


class StepCost(ABC):
    """How long steps take."""

    @abstractmethod
    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step; 0.0 for an empty batch. Called once per simulated step, so it must be fast."""

    def price_stretch(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> list[float]:
        """Seconds of each of some steps that decode for the same requests, one after the other.

        `num_context_tokens`: the sum of their contexts in the first step; each step adds one token to each.
        Most steps are in a stretch, so costs have a faster way, which equals this one to the last bit.
        """
        stop = num_context_tokens + num_steps * num_decodes
        contexts = range(num_context_tokens, stop, num_decodes)
        return [self.seconds(StepBatch(0, 0, 0, 0.0, num_decodes, context)) for context in contexts]


@dataclass(frozen=True)
class HostOverhead:
    """CPU time of one engine step: scheduling, input preparation, sampling, handing over outputs.

    With synchronous scheduling the GPU waits for it. With asynchronous scheduling (vLLM's default since
    0.14), the host prepares a step while the GPU runs the one before, so the slower of the two counts.

    Attributes: per_step_s: seconds of every step. Llama-3.2-1B takes 2.73 ms per token with one request at a
    time (vLLM pull request 17866, V1); 1.46 ms of it are GPU work on an H100 in the operator tables.
    per_request_s: seconds that every scheduled request adds. `schedule` and `update_from_output` of vLLM
    0.32's scheduler take 11 us per decode on a 2-core Xeon, linear from 128 to 512 requests. The worker
    handles the same requests again, to update its batch and to store sampled tokens. overlapped: whether
    scheduling is asynchronous.
    """

    per_step_s: float = 1.25e-3
    per_request_s: float = 20e-6
    overlapped: bool = False


# A step of the whole model takes longer on the GPU than the sum of its operators timed one by one: clocks are
# lower under sustained load, there are gaps between kernels, and some small kernels are not timed. These are
# aiconfigurator's own corrections of such sums to measured end-to-end times
# (`prefill_latency_correction_scale`, `decode_latency_correction_scale`).
PREFILL_SCALE = 1.1
DECODE_SCALE = 1.08


class HostedStepCost(StepCost):
    """The step of a whole model, host time included, from the sum of its operators."""

    def __init__(self, gpu_cost: StepCost, host: HostOverhead) -> None:
        self.gpu_cost = gpu_cost
        self.host = host

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step, host time included; 0.0 for an empty batch."""
        num_requests = batch.num_prefills + batch.num_decodes
        if num_requests == 0:
            return 0.0
        gpu_s = self.gpu_cost.seconds(batch) * (PREFILL_SCALE if batch.num_prefills else DECODE_SCALE)
        host_s = self.host.per_step_s + self.host.per_request_s * num_requests
        return max(gpu_s, host_s) if self.host.overlapped else gpu_s + host_s

    def price_stretch(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> list[float]:
        """See `StepCost`."""
        scale, host_s = DECODE_SCALE, self.host.per_step_s + self.host.per_request_s * num_decodes
        gpu_s = self.gpu_cost.price_stretch(num_decodes, num_context_tokens, num_steps)
        if self.host.overlapped:
            return [own_s if (own_s := each_s * scale) > host_s else host_s for each_s in gpu_s]
        return [each_s * scale + host_s for each_s in gpu_s]


@dataclass(frozen=True)
class ScaledStepCost(StepCost):
    """Another step cost, multiplied by one factor."""

    step_cost: StepCost
    factor: float

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step."""
        return self.step_cost.seconds(batch) * self.factor

    def price_stretch(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> list[float]:
        """See `StepCost`."""
        times_s = self.step_cost.price_stretch(num_decodes, num_context_tokens, num_steps)
        return [each_s * self.factor for each_s in times_s]


def split_prompt(num_tokens: int, max_step_tokens: int, num_cached: int = 0) -> Iterator[StepBatch]:
    """The steps that compute the uncached rest of a prompt with nothing else running."""
    for start in range(num_cached, num_tokens, max_step_tokens):
        yield StepBatch.of(prefills=[(min(max_step_tokens, num_tokens - start), start)])


# Steps that mix prefill with decoding.

Variant = Literal["optimistic", "pessimistic"]
VARIANTS: tuple[Variant, ...] = ("optimistic", "pessimistic")

PIECEWISE_S_PER_LAYER = 128e-6
"""Extra seconds per layer of a step with piecewise CUDA graphs instead of a full one. vLLM pull request
25444: 10 requests of 1,024 and 128 tokens on a model of 48 layers run at 4.07 requests a second with
piecewise graphs and at 5.98 with full ones, so 786 ms lie between them in 128 steps. That model has small
experts, so that little GPU work hides the host's. On a dense model of 1.5 billion parameters and 28 layers
the median time per token fell by 7 % (pull request 16072): of 13 ms, as its profile shows, 33 µs a layer."""
SERIAL_ATTENTION = 1.28
"""Time of a mixed step's attention, relative to a kernel that fuses prefill and decoding (POD-Attention,
arXiv 2410.18038: 28 % faster on average)."""


class StepParts(NamedTuple):
    """Seconds of a step's parts, as if each ran alone."""

    others_s: float
    """Everything but attention."""
    prefill_attention_s: float
    decode_attention_s: float


class PartedCost(StepCost):
    """A step cost that can name its parts."""

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step on the GPU: the sum of its parts. 0.0 for an empty batch."""
        others_s, prefill_attention_s, decode_attention_s = self.get_parts(batch)
        return others_s + prefill_attention_s + decode_attention_s

    @abstractmethod
    def get_parts(self, batch: StepBatch) -> StepParts:
        """The parts of one step; all 0.0 for an empty batch."""


class MixedStepCost(StepCost):
    """Step times under a variant's assumptions: GPU work alone, `HostedStepCost` adds the host.

    The operator tables time each kernel alone, so a mixed step is priced as the sum of its parts. No public
    measurement settles what such steps really take. Two variants give the bounds:

        optimistic    attention of prefill and of decoding overlap fully: the longer of the two counts
        pessimistic   a fixed time per layer, as only steps of pure decoding have a full CUDA graph;
                      each chunk reads the keys and values of its context once more, as if it decoded;
                      and the attention of decoding takes 1.28 times as long

    Steps that only decode take the same time in all variants.
    """

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

    def price_stretch(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> list[float]:
        """See `StepCost`."""
        return self._cost.price_stretch(num_decodes, num_context_tokens, num_steps)


def split_variant(name: str | None) -> tuple[str | None, Variant | None]:
    """Split a name as `--step-cost` takes it into source and variant; None for a missing part."""
    source, _, variant = (name or "").rpartition("/")
    for each in VARIANTS:
        if variant == each and source in ("", "tables", "roofline"):
            return source or None, each
    return name, None
