"""Models: sizes, and the bytes of weights and KV cache; by name, or from a Hugging Face `config.json`.

Bundled configs (`configs/*.json`) hold the published numbers and nothing else. Any other `config.json` of a
known `model_type` works by path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError, DataError, suggest
from tenuto.core.windows import STATE, Layers
from tenuto.records.codec import Fields, show
from tenuto.records.files import read_first

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
    """A gated delta net: each value head has a matrix of `key_dim` x `value_dim` that every token updates.

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

    A dense model has `num_experts == num_active_experts == 1`: its feed-forward is the one expert. `windows`
    has one entry per layer: the sliding window in tokens, None for full attention, or "state" for a recurrent
    state. `state` is the size of these states. `shared_intermediate_size` is the size of an expert that all
    tokens use. `gates_attention` says whether attention's output is gated. `base_dtype` is the type of
    embeddings, norms and activations, `attention_dtype` that of attention projections, `expert_dtype` that of
    feed-forwards. Sizes are of the whole model unless a method takes `tp`.
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
        """Parameters of all layers' query, key, value and output projections, or of recurrent states."""
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
    def num_params(self) -> int:
        """All parameters of the text model, except biases and norms inside attention (under 0.04 %)."""
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        per_layer = self.num_experts * self.expert_params + self.shared_expert_params + router
        # The output head may be tied to the token embedding.
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.attention_params + self.num_layers * per_layer + embeddings + norms

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
        """Tokens in a KV block if `block_size` is requested. A block must be at least as large as a state.

        Source: platforms/interface.py:_align_hybrid_block_size @ vLLM 0.32, for kernels with blocks of 16.
        """
        unit = max(KERNEL_BLOCK, block_size)
        num_units = -(-self.state_bytes_per_layer(tp) // (unit * self.kv_bytes_per_token_per_layer(tp)))
        return max(block_size, num_units * unit)

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The layers as vLLM groups them into block tables, full attention first.

        A model with one kind of layer has one group. A hybrid model has groups of equal size: the number of
        layers of its rarest kind, or of its most frequent kind if they differ by less than half. The last
        group of a kind is padded. Source: kv_cache_utils.py:_get_kv_cache_groups_uniform_page_size @ vLLM
        0.32.
        """
        num_by_window = Counter(self.windows)
        smallest, largest = min(num_by_window.values()), max(num_by_window.values())
        size = largest if largest < 1.5 * smallest else smallest
        # States come last, after windows of any size.
        kinds = sorted(num_by_window.items(), key=lambda kind: math.inf if kind[0] == STATE else kind[0] or 0)
        return tuple(KvGroup(size, window) for window, num in kinds for _ in range(-(-num // size)))

    def check_tp(self, tp: int) -> int:
        """`tp` itself. Raises ConfigError if vLLM cannot divide the attention heads by it."""
        if tp < 1 or not self.can_split(tp):
            fits = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.can_split(n))
            raise ConfigError(
                f"tensor parallel size {tp} does not divide {self.num_heads} heads and "
                f"{self.num_kv_heads} KV heads; choose one of {fits}"
            )
        return tp

    def can_split(self, tp: int) -> bool:
        """Whether `tp` GPUs get as many heads each, and whole KV heads, or copies of one.

        Source: models/qwen2.py:Qwen2Attention @ vLLM 0.32.
        """
        kv_heads = self.num_kv_heads
        return self.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


CONFIGS = Path(__file__).parent / "configs"

_BASE_DTYPES = ("float32", "bfloat16", "float16")

MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
    *("gpt_oss", "gemma3", "gemma3_text"),
)

# Gemma-3's published configs leave out what equals the defaults of transformers' Gemma3TextConfig.
_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


def bundled_models() -> tuple[str, ...]:
    """Names of the models whose config ships with Tenuto."""
    return tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def load_model(source: str | Path, *, dtype: str | None = None, kv_cache_dtype: str | None = None) -> Model:
    """The model of a bundled name or of a `config.json` (the file, or the folder that holds it).

    `dtype`: type of the loaded weights, if not the config's ("fp8": linear layers only; weights that the
    checkpoint quantises keep their type otherwise). `kv_cache_dtype`: that of the KV cache, if not that of
    the activations. Raises ConfigError, which lists the known names, or
    names the field that is missing, has the wrong type, or describes something that is not simulated.
    """
    path = _config_path(source)
    try:
        config = read_first(path)
        # A multimodal model nests the sizes of its language model; only those are read.
        values = {**config.values, **config.optional_part("text_config").values}
        defaults = _GEMMA3_DEFAULTS if values.get("model_type") in ("gemma3", "gemma3_text") else {}
        values = {**defaults, **{field: value for field, value in values.items() if value is not None}}
        return _parse(path, Fields(str(path), values), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    except DataError as error:
        raise ConfigError(str(error)) from error


def _config_path(source: str | Path) -> Path:
    bundled = {name: CONFIGS / f"{name}.json" for name in bundled_models()}
    if str(source).lower() in bundled:
        return bundled[str(source).lower()]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    # In a hub's name, neither the owner before the name nor the kind of tuning after it changes a size.
    owner, _, name = str(source).lower().rpartition("/")
    name = name.removesuffix("-instruct").removesuffix("-it")
    if name in bundled and not owner.startswith((".", "/")) and "/" not in owner:
        return bundled[name]
    raise ConfigError(
        f"unknown model {str(source)!r}; choose one of {', '.join(bundled)}, "
        f"or give the path of a config.json{suggest(source, bundled)}"
    )


def _read_size(fields: Fields, field: str) -> int:
    return fields.integer(field, 1)


def _choose(fields: Fields, field: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, which must be one of `choices`."""
    if value not in choices:
        raise fields.error(field, f"is {show(value)}; known are {', '.join(choices)}")
    return str(value)


def _parse(path: Path, fields: Fields, *, dtype: str | None, kv_cache_dtype: str | None) -> Model:
    model_type = _choose(fields, "model_type", fields.values.get("model_type"), MODEL_TYPES)
    hidden_size, num_heads = _read_size(fields, "hidden_size"), _read_size(fields, "num_attention_heads")
    head_dim = _read_size(fields, "head_dim") if "head_dim" in fields else hidden_size // num_heads
    # The first Llamas had no groups of heads, and their configs no field for them.
    has_no_groups = model_type == "llama" and "num_key_value_heads" not in fields
    num_experts, num_active, intermediate_size = _feed_forward(fields, model_type)
    base, attention, expert = _dtypes(fields, dtype)
    kv = _choose(fields, "kv_cache_dtype", kv_cache_dtype or base, (*_BASE_DTYPES, "fp8"))
    is_next = model_type == "qwen3_next"
    return Model(
        name=path.parent.name if path.name == "config.json" else path.stem,
        config_path=path,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_heads if has_no_groups else _read_size(fields, "num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=_read_size(fields, "vocab_size"),
        max_model_len=_read_size(fields, "max_position_embeddings"),
        num_experts=num_experts,
        num_active_experts=num_active,
        windows=_windows(fields, model_type),
        tied_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        base_dtype=base,
        attention_dtype=attention,
        expert_dtype=expert,
        kv_cache_dtype=kv,
        shared_intermediate_size=_read_size(fields, "shared_expert_intermediate_size") if is_next else 0,
        gates_attention=is_next,
        state=_state(fields) if is_next else None,
    )


def _state(fields: Fields) -> StateLayer:
    return StateLayer(
        num_key_heads=_read_size(fields, "linear_num_key_heads"),
        num_value_heads=_read_size(fields, "linear_num_value_heads"),
        key_dim=_read_size(fields, "linear_key_head_dim"),
        value_dim=_read_size(fields, "linear_value_head_dim"),
        conv_kernel=_read_size(fields, "linear_conv_kernel_dim"),
    )


def _feed_forward(fields: Fields, model_type: str) -> tuple[int, int, int]:
    """Experts, experts that one token uses, and the intermediate size of one."""
    if model_type in ("qwen3_moe", "qwen3_next"):
        for field, dense_layers in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            if fields.values.get(field, dense_layers) != dense_layers:
                raise fields.error(
                    field, f"must be {dense_layers!r}: layers without experts are not modelled"
                )
        sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    elif model_type == "gpt_oss":
        sizes = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    else:
        return 1, 1, _read_size(fields, "intermediate_size")
    num_experts, num_active, intermediate_size = (_read_size(fields, each) for each in sizes)
    return num_experts, num_active, intermediate_size


def _windows(fields: Fields, model_type: str) -> tuple[Layers, ...]:
    """Per layer, the sliding window; None for full attention, "state" for a recurrent state."""
    num_layers = _read_size(fields, "num_hidden_layers")
    if fields.values.get("use_sliding_window"):
        raise fields.error("use_sliding_window", "must be false: Qwen's windowed layers are not modelled")
    periods = {"gemma3": "sliding_window_pattern", "qwen3_next": "full_attention_interval"}
    others = {"gemma3": "sliding_attention", "qwen3_next": "linear_attention"}
    kind = model_type.removesuffix("_text")
    if "layer_types" in fields:
        kinds = fields.values.get("layer_types")
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error("layer_types", f"must have one entry per layer ({num_layers}): {kinds!r}")
        known = ("full_attention", others.get(kind, "sliding_attention"))
        kinds = [_choose(fields, "layer_types", each, known) for each in kinds]
    elif kind in periods:
        period = _read_size(fields, periods[kind])
        kinds = [others[kind] if (i + 1) % period else "full_attention" for i in range(num_layers)]
    else:
        slides = model_type == "mistral" and "sliding_window" in fields
        kinds = ["sliding_attention" if slides else "full_attention"] * num_layers
    window = _read_size(fields, "sliding_window") if "sliding_attention" in kinds else None
    of_kind: dict[str, Layers] = {"sliding_attention": window, "linear_attention": STATE}
    return tuple(of_kind.get(each) for each in kinds)


def _dtypes(fields: Fields, dtype: str | None) -> tuple[str, str, str]:
    """Types of the embeddings and activations, of the attention projections, and of the experts."""
    base = fields.values.get("torch_dtype", fields.values.get("dtype", "bfloat16"))
    base = _choose(fields, "torch_dtype", dtype if dtype in _BASE_DTYPES else base, _BASE_DTYPES)
    if dtype is not None:
        _choose(fields, "dtype", dtype, (*_BASE_DTYPES, "fp8"))
    if dtype == "fp8":
        return base, dtype, dtype
    # As in vLLM, another type is that of what the checkpoint did not quantise.
    quantization = fields.optional_part("quantization_config").values
    if not quantization:
        return base, base, base
    field = "quantization_config.quant_method"
    method = _choose(fields, field, quantization.get("quant_method"), ("fp8", "mxfp4"))
    return base, base if method == "mxfp4" else method, method
