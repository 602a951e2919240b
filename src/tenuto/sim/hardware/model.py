"""A model's sizes, and the bytes of its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tenuto.core.errors import ConfigError

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "mxfp4": 4.25 / 8,  # 4-bit values with one shared 8-bit exponent per 32 (OCP MX specification)
}


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one block table: `window` is their sliding window, None for full attention."""

    num_layers: int
    window: int | None


@dataclass(frozen=True, kw_only=True)
class Model:
    """One decoder-only transformer.

    A dense model is the case `num_experts == num_active_experts == 1`: its feed-forward is the one expert.
    `windows` has one entry per layer: the sliding window in tokens, None for full attention. `base_dtype` is
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
    windows: tuple[int | None, ...]
    tied_embeddings: bool
    base_dtype: str
    attention_dtype: str
    expert_dtype: str
    kv_cache_dtype: str

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        return 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

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
        per_layer = self.attention_params + self.num_experts * self.expert_params + self.router_params
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * per_layer + self.embedding_params + norms

    def weights_bytes(self, tp: int = 1) -> int:
        """Bytes of the weights on one of `tp` GPUs."""
        attention = self.num_layers * self.attention_params
        experts = self.num_layers * self.num_experts * self.expert_params
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

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The layers as vLLM groups them into block tables, full attention first.

        A model with one kind of layer has one group. A hybrid has groups of equal size: the size of its
        smallest kind, or of its largest where they differ by less than half; the last group of a kind is
        padded. Source: kv_cache_utils.py:_get_kv_cache_groups_uniform_page_size @ vLLM 0.32.
        """
        num_by_window: dict[int | None, int] = {}
        for window in self.windows:
            num_by_window[window] = num_by_window.get(window, 0) + 1
        smallest, largest = min(num_by_window.values()), max(num_by_window.values())
        size = largest if largest < 1.5 * smallest else smallest
        kinds = sorted(num_by_window.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
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
