"""What one engine step computes, how long it takes, and the host time that is added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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

        Raises:
            ConfigError: a chunk has no tokens, or a context is negative.
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


class StepCost(Protocol):
    """How long steps take."""

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step; 0.0 for an empty batch. Called once per simulated step, so it must be fast."""
        ...


@dataclass(frozen=True)
class HostOverhead:
    """CPU time of one engine step: scheduling, input preparation, sampling, handing over outputs.

    With synchronous scheduling the GPU waits for it; with asynchronous scheduling (vLLM's default since
    0.14) the host prepares a step while the GPU runs the one before, so the slower of the two counts.

    Attributes:
        per_step_s: seconds of every step. Llama-3.2-1B takes 2.73 ms per token with one request at a time
            (vLLM pull request 17866, V1); 1.46 ms of it are GPU work on an H100 in the operator tables.
        per_request_s: seconds that every scheduled request adds. `schedule` and `update_from_output` of vLLM
            0.32's scheduler take 11 us per decode on a 2-core Xeon, linear from 128 to 512 requests; the
            worker passes over the same requests again to update its batch and to book sampled tokens.
        overlapped: whether scheduling is asynchronous.
    """

    per_step_s: float = 1.25e-3
    per_request_s: float = 20e-6
    overlapped: bool = False

    def __post_init__(self) -> None:
        if self.per_step_s < 0 or self.per_request_s < 0:
            raise ConfigError(f"host times must not be negative: {self.per_step_s} s, {self.per_request_s} s")


# A step of the whole model takes longer on the GPU than the sum of its operators timed one by one: clocks are
# lower under sustained load, there are gaps between kernels, and some small kernels are not timed. These are
# aiconfigurator's own corrections of such sums to measured end-to-end times
# (`prefill_latency_correction_scale`, `decode_latency_correction_scale`).
PREFILL_SCALE = 1.1
DECODE_SCALE = 1.08


class HostedStepCost:
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


@dataclass(frozen=True)
class ScaledStepCost:
    """Another step cost, with every step longer or shorter by one factor."""

    step_cost: StepCost
    factor: float

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step."""
        return self.step_cost.seconds(batch) * self.factor
