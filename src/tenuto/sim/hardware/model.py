"""A model's sizes, and the bytes of its weights and its KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tenuto.core.errors import ConfigError
from tenuto.core.windows import STATE, Layers

KERNEL_BLOCK = 16
"""Tokens in the smallest block that attention kernels take."""
DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "mxfp4": 4.25 / 8,  # 4-bit values with one shared 8-bit exponent per 32 (OCP MX specification)
}


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one block table."""

    num_layers: int
    window: Layers
    """Their sliding window in tokens; None for full attention, "state" for a recurrent state."""


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """A gated delta net: for each value head a matrix of `key_dim` x `value_dim`, which each token updates.

    Source: Qwen3NextGatedDeltaNet @ transformers 4.57; MambaStateShapeCalculator.gated_delta_net_state_shape
    @ vLLM 0.32.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def num_matrix_values(self) -> int:
        """Values of the matrices of one layer."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def num_values(self) -> int:
        """Values of one layer's state: the matrices, and the convolution's last inputs."""
        return self.num_matrix_values + self._conv_channels * (self.conv_kernel - 1)

    @property
    def _conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def count_params(self, hidden_size: int) -> int:
        """Parameters of one layer: queries, keys, values, gates, the two rates of each head, the output."""
        value_size = self.num_value_heads * self.value_dim
        projections = self._conv_channels + value_size + 2 * self.num_value_heads + value_size
        return hidden_size * projections + self._conv_channels * self.conv_kernel


@dataclass(frozen=True, kw_only=True)
class Model:
    """One decoder-only transformer.

    A dense model is the case `num_experts == num_active_experts == 1`: its feed-forward is the one expert.
    `windows` has one entry per layer: the sliding window in tokens, None for full attention, "state" for a
    recurrent state; `state` is the size of these. `shared_intermediate_size` is that of an expert that all
    tokens use, `gates_attention` says whether attention's output is gated. `base_dtype` is
    what embeddings, norms and activations use; `attention_dtype` and `expert_dtype` the attention
    projections and the feed-forwards. Sizes are of the whole model unless a method takes `tp`.
    """

    name: str
    config_path: Path
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    num_experts: int
    num_active_experts: int
    windows: tuple[Layers, ...]
    tied_embeddings: bool
    base_dtype: str
    attention_dtype: str
    expert_dtype: str
    kv_cache_dtype: str
    shared_intermediate_size: int = 0
    gates_attention: bool = False
    state: StateLayer | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def attention_params(self) -> int:
        """Parameters of all layers' query, key, value and output projections, or what states have instead."""
        num_heads = 2 * (self.num_heads + self.num_kv_heads) + self.num_heads * self.gates_attention
        of_layer = self.hidden_size * num_heads * self.head_dim
        num_states = self.windows.count(STATE)
        of_state = 0 if self.state is None else self.state.count_params(self.hidden_size)
        return (self.num_layers - num_states) * of_layer + num_states * of_state

    @property
    def shared_expert_params(self) -> int:
        """Parameters of one layer's expert that all tokens use, and of its gate; 0 without one."""
        size = self.shared_intermediate_size
        return 3 * self.hidden_size * size + self.hidden_size if size else 0

    @property
    def expert_params(self) -> int:
        """Parameters of one gated feed-forward (gate, up and down): an expert, or a dense layer's MLP."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def router_params(self) -> int:
        """Parameters that choose the experts of one layer; a dense layer has none."""
        return self.hidden_size * self.num_experts if self.num_experts > 1 else 0

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding, and as many again of the output head unless they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_params(self) -> int:
        """All parameters of the text model, but for biases and the norms inside attention (under 0.04 %)."""
        per_layer = self.num_experts * self.expert_params + self.shared_expert_params + self.router_params
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.attention_params + self.num_layers * per_layer + self.embedding_params + norms

    def weights_bytes(self, tp: int = 1) -> int:
        """Bytes of the weights on one of `tp` GPUs."""
        attention = self.attention_params
        experts = self.num_layers * (self.num_experts * self.expert_params + self.shared_expert_params)
        others = self.num_params - attention - experts
        total = (
            attention * DTYPE_BYTES[self.attention_dtype]
            + experts * DTYPE_BYTES[self.expert_dtype]
            + others * DTYPE_BYTES[self.base_dtype]
        )
        return round(total / self.check_tp(tp))

    def kv_bytes_per_token_per_layer(self, tp: int = 1) -> int:
        """Bytes of one token's key and value in one layer, on one of `tp` GPUs; heads are not split."""
        heads = max(1, self.num_kv_heads // self.check_tp(tp))
        return int(2 * heads * self.head_dim * DTYPE_BYTES[self.kv_cache_dtype])

    def state_bytes_per_layer(self, tp: int = 1) -> int:
        """Bytes of one state in one layer, on one of `tp` GPUs; 0 for a model without states."""
        if self.state is None:
            return 0
        return int(self.state.num_values // self.check_tp(tp) * DTYPE_BYTES[self.base_dtype])

    def get_block_size(self, block_size: int, tp: int = 1) -> int:
        """Tokens in a KV block, if `block_size` were asked for: a block must be as large as a state.

        Source: platforms/interface.py:_align_hybrid_block_size @ vLLM 0.32, for kernels with blocks of 16.
        """
        unit = max(KERNEL_BLOCK, block_size)
        num_units = -(-self.state_bytes_per_layer(tp) // (unit * self.kv_bytes_per_token_per_layer(tp)))
        return max(block_size, num_units * unit)

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The layers as vLLM groups them into block tables, full attention first.

        A model with one kind of layer has one group. A hybrid has groups of equal size: the size of its
        smallest kind, or of its largest where they differ by less than half; the last group of a kind is
        padded. Source: kv_cache_utils.py:_get_kv_cache_groups_uniform_page_size @ vLLM 0.32.
        """
        num_by_window: dict[Layers, int] = {}
        for window in self.windows:
            num_by_window[window] = num_by_window.get(window, 0) + 1
        smallest, largest = min(num_by_window.values()), max(num_by_window.values())
        size = largest if largest < 1.5 * smallest else smallest
        # States last: they are a kind of their own, behind windows of any size.
        kinds = sorted(num_by_window.items(), key=lambda kind: math.inf if kind[0] == STATE else kind[0] or 0)
        return tuple(KvGroup(size, window) for window, num in kinds for _ in range(-(-num // size)))

    def check_tp(self, tp: int) -> int:
        """`tp` itself.

        Raises:
            ConfigError: the attention heads do not divide by it.
        """
        if tp < 1 or self.num_heads % tp:
            fits = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ConfigError(
                f"tensor parallel size {tp} does not divide {self.num_heads} heads; choose one of {fits}"
            )
        return tp
