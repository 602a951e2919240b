"""Step times from first principles: every operator is as fast as its arithmetic or its memory traffic allows.

Used for GPUs and models without measured tables. `tenuto.sim.hardware.gpus` has each GPU's published rates
and the shares of them that kernels reach; the constants below are the same for all GPUs.
"""

from __future__ import annotations

from tenuto.core.windows import STATE
from tenuto.sim.cost.batch import PartedCost, StepBatch, StepParts
from tenuto.sim.hardware.gpus import Gpu
from tenuto.sim.hardware.models import DTYPE_BYTES, Model

# Norms (2), activation, rotary embedding, cache write and attention (2 kernels) of a layer: none takes less
# than its launch. 3 us is aiconfigurator's constant for memory-bound kernels.
_SMALL_KERNELS_PER_LAYER = 7
_KERNEL_LAUNCH_S = 3e-6
# Share of the peer bandwidth a ring all-reduce reaches, and its fixed time: 33.5 MB over four H200s take
# 180 us and 0.5 MB 10 us in aiconfigurator's NCCL tables.
_ALL_REDUCE_EFFICIENCY = 0.62
_ALL_REDUCE_LATENCY_S = 10e-6
# Share of the memory bandwidth that element-wise kernels reach (aiconfigurator's systems/*.yaml).
_ELEMENTWISE_EFFICIENCY = 0.8
# Decay 1, two products and one update of two operations each.
_STATE_FLOPS_PER_VALUE = 7


class RooflineStepCost(PartedCost):
    """Step times of one model on `tp` GPUs of a kind: GPU work alone, `HostedStepCost` adds the host."""

    def __init__(self, gpu: Gpu, model: Model, tp: int = 1) -> None:
        """Raises ConfigError if `tp` does not divide the model's heads."""
        model.check_tp(tp)
        self._model = model
        shared_params = model.num_layers * model.shared_expert_params
        # An expert that all tokens use is priced like attention's projections.
        self._attention_params = (model.attention_params + shared_params) / tp
        self._expert_params = model.num_layers * model.expert_params / tp
        self._attention_bytes = self._attention_params * DTYPE_BYTES[model.attention_dtype]
        self._expert_bytes = self._expert_params * DTYPE_BYTES[model.expert_dtype]
        self._head_params = model.vocab_size * model.hidden_size / tp
        self._head_bytes = self._head_params * DTYPE_BYTES[model.base_dtype]
        gemm_flops = gpu.fp8_flops if model.attention_dtype == "fp8" and gpu.fp8_flops else gpu.flops
        self._gemm_flops_per_s = gemm_flops * gpu.gemm_efficiency
        self._head_flops_per_s = gpu.flops * gpu.gemm_efficiency
        self._weight_bytes_per_s = gpu.memory_bytes_per_s * gpu.weight_read_efficiency
        # A pair costs a multiply-add per head dimension for its score, and another for its value.
        flops_per_pair = 4 * model.num_heads * model.head_dim / tp
        self._s_per_pair = flops_per_pair / (gpu.flops * gpu.attention_efficiency)
        kv_bytes_per_s = gpu.memory_bytes_per_s * gpu.kv_read_efficiency
        self._s_per_context_token = model.kv_bytes_per_token_per_layer(tp) / kv_bytes_per_s
        self._num_layers_by_window = {
            window: model.windows.count(window) for window in model.windows if window != STATE
        }
        # A token changes each value of a state, reads it twice (for the change, and for its answer), and lets
        # it decay. A decode's state is read from memory and written back.
        num_states = model.windows.count(STATE)
        num_values = 0 if model.state is None else model.state.num_matrix_values
        state_flops = _STATE_FLOPS_PER_VALUE * num_states * num_values / tp
        self._s_per_state_token = state_flops / (gpu.flops * gpu.attention_efficiency)
        self._s_per_state = 2 * num_states * model.state_bytes_per_layer(tp) / kv_bytes_per_s
        self._s_per_step, self._s_per_token = _small_kernels(gpu, model, tp)

    def get_parts(self, batch: StepBatch) -> StepParts:
        """See `PartedCost`."""
        num_tokens = batch.num_prefill_tokens + batch.num_decodes
        if num_tokens == 0:
            return StepParts(0.0, 0.0, 0.0)
        others_s = self._others_s(num_tokens, batch.num_prefills + batch.num_decodes)
        decode_attention_s = self._decode_attention_s(batch.num_decodes, batch.num_decode_context_tokens)
        return StepParts(others_s, self._prefill_attention_s(batch), decode_attention_s)

    def price_stretch(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> list[float]:
        """See `StepCost`."""
        others_s = self._others_s(num_decodes, num_decodes)
        contexts = range(num_context_tokens, num_context_tokens + num_steps * num_decodes, num_decodes)
        return [others_s + self._decode_attention_s(num_decodes, each) for each in contexts]

    def _others_s(self, num_tokens: int, num_requests: int) -> float:
        return (
            self._s_per_step
            + self._s_per_token * num_tokens
            + self._gemm_s(num_tokens)
            + self._head_s(num_requests)
        )

    def _gemm_s(self, num_tokens: int) -> float:
        num_experts, num_active = self._model.num_experts, self._model.num_active_experts
        s_per_param = 2 * num_tokens / self._gemm_flops_per_s
        attention_read_s = self._attention_bytes / self._weight_bytes_per_s
        # The model assumes that tokens choose experts independently: few tokens read few experts' weights.
        num_used = num_experts * (1 - (1 - num_active / num_experts) ** num_tokens)
        expert_read_s = num_used * self._expert_bytes / self._weight_bytes_per_s
        if num_experts == 1:
            arithmetic_s = (self._attention_params + self._expert_params) * s_per_param
            return max(arithmetic_s, attention_read_s + expert_read_s)
        # A tile of a grouped GEMM has few tokens of one expert: arithmetic does not hide its weight reads.
        expert_s = num_active * self._expert_params * s_per_param + expert_read_s
        return max(self._attention_params * s_per_param, attention_read_s) + expert_s

    def _head_s(self, num_requests: int) -> float:
        arithmetic_s = 2 * self._head_params * num_requests / self._head_flops_per_s
        return max(arithmetic_s, self._head_bytes / self._weight_bytes_per_s)

    def _prefill_attention_s(self, batch: StepBatch) -> float:
        if batch.num_prefills == 0:
            return 0.0
        num_pairs = 0.0
        for window, num_layers in self._num_layers_by_window.items():
            visited = batch.num_prefill_pairs if window is None else _windowed_pairs(batch, window)
            num_pairs += num_layers * visited
        return num_pairs * self._s_per_pair + batch.num_prefill_tokens * self._s_per_state_token

    def _decode_attention_s(self, num_decodes: int, num_context_tokens: int) -> float:
        num_visited = 0
        for window, num_layers in self._num_layers_by_window.items():
            visited = num_context_tokens
            if window is not None:  # all contexts are taken to have the mean length
                visited = min(visited, window * num_decodes)
            num_visited += num_layers * visited
        return num_visited * self._s_per_context_token + num_decodes * self._s_per_state


def _windowed_pairs(batch: StepBatch, window: int) -> float:
    """Pairs within a sliding window. All chunks and contexts are taken to have the mean length."""
    n = batch.num_prefill_tokens / batch.num_prefills
    c = batch.num_prefill_context_tokens / batch.num_prefills
    growing = min(max(window - c, 0), n)  # tokens that see all tokens before them
    return batch.num_prefills * (growing * (c + growing / 2) + (n - growing) * window)


def _small_kernels(gpu: Gpu, model: Model, tp: int) -> tuple[float, float]:
    """Seconds per step and seconds per token of all but GEMMs and attention: launches, norms, all-reduces."""
    base_bytes = DTYPE_BYTES[model.base_dtype]
    # Two norms read and write the hidden state and its residual; the activation reads two and writes one.
    norms = 2 * 4 * model.hidden_size
    activation = 3 * model.num_active_experts * model.intermediate_size / tp
    elementwise_s = (norms + activation) * base_bytes / (gpu.memory_bytes_per_s * _ELEMENTWISE_EFFICIENCY)
    # A layer reduces after attention and after its feed-forward; a ring sends 2 * (tp - 1) / tp of the data.
    ring_bytes = 2 * 2 * (tp - 1) / tp * model.hidden_size * base_bytes
    reduce_s = ring_bytes / (gpu.peer_bytes_per_s * _ALL_REDUCE_EFFICIENCY)
    launch_s = _SMALL_KERNELS_PER_LAYER * _KERNEL_LAUNCH_S + (2 * _ALL_REDUCE_LATENCY_S if tp > 1 else 0.0)
    return model.num_layers * launch_s, model.num_layers * (elementwise_s + reduce_s)
