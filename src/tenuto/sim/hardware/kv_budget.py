"""How many KV blocks vLLM makes: the memory it may use, minus the memory that its start-up profile run uses.

Source: gpu_worker.py:determine_available_memory, _dummy_sampler_run of both model runners and
kv_cache_utils.py:get_kv_cache_config_from_groups @ vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.gpus import GIB, MIB, Gpu
from tenuto.sim.hardware.models import DTYPE_BYTES, Model

DEFAULT_UTILIZATION = 0.92
"""vLLM's `gpu_memory_utilization`: config/cache.py @ vLLM 0.30 to 0.33."""

# Bytes per logit, for every sequence slot and vocabulary entry, while the profile run samples.
# Releases that filter with a Triton kernel (0.19 for one) hold bf16 (2) and fp32 (4) logits, probabilities
# (4) and noise (4). vLLM 0.33 profiles with every sampling option, and holds as much: bf16 (2) and fp32 (4)
# logits, and inside FlashInfer the logits after top-k (4) and their probabilities (4).
FILTERING_SAMPLER_BYTES_PER_LOGIT = 14
# Model runner V2, the default for all models since 0.29, adds the noise in the kernel that finds the largest
# logit. vLLM 0.30 to 0.32 profile it without sampling options, so bf16 logits (2) are all that it holds.
PLAIN_SAMPLER_BYTES_PER_LOGIT = 2
# Tensors of model runner V2 that stay: how often each token was in the answer (an int32), and whether it was
# in the prompt (a bit). Source: v1/worker/gpu/sample/penalties.py @ vLLM 0.32.
PENALTY_BYTES_PER_LOGIT = 4.125

CUDA_GRAPH_SHARE = 0.02
"""Share of a GPU's memory for CUDA graphs: an estimate, see `default_profile_run`."""

# Kernels and libraries loaded outside PyTorch's allocator: 0.04 GiB in vLLM's own log of a Llama-3.1-8B start
# (weights 14.99, peak increase 1.19, non-torch 0.04 GiB). The CUDA context is not in it: vLLM takes its
# baseline after creating the context.
NON_TORCH_BYTES = 41 * MIB

MOST_GPUS = 8
"""The GPUs of a usual server."""


class ModelTooLargeError(ConfigError):
    """A model leaves no memory for its KV cache."""


@dataclass(frozen=True, kw_only=True)
class ProfileRun:
    """The settings that vLLM's start-up profile run depends on.

    Attributes:
        max_num_batched_tokens: tokens of its one forward pass.
        max_num_seqs: sequences it samples from.
        sampler_bytes_per_logit: what the sampler holds at its peak, per sequence and vocabulary entry.
        penalty_bytes_per_logit: what the sampler keeps for penalties, counted alike.
        non_torch_bytes: memory taken outside PyTorch's allocator.
        cuda_graph_bytes: what vLLM sets aside for CUDA graphs: nothing before 0.21, since then what it
            measures at its start. Its log names it.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    sampler_bytes_per_logit: float
    penalty_bytes_per_logit: float = 0.0
    non_torch_bytes: int = NON_TORCH_BYTES
    cuda_graph_bytes: int = 0


def default_profile_run(gpu: Gpu, release: Literal["0.32", "0.33"] = "0.32") -> ProfileRun:
    """The defaults of vLLM's API server on that GPU; those of 0.32 are those of 0.30 and 0.31 too.

    CUDA graphs get 2 % of the GPU's memory. That is an estimate, because their size cannot be computed: logs
    name 0.1 to 0.6 GiB on consumer cards, several GiB on large ones, and sometimes far more. The default
    utilization rose by 0.02 in the releases that began to count them.
    """
    num_tokens, num_seqs = _get_batch_defaults(gpu)
    return ProfileRun(
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        sampler_bytes_per_logit=(
            PLAIN_SAMPLER_BYTES_PER_LOGIT if release == "0.32" else FILTERING_SAMPLER_BYTES_PER_LOGIT
        ),
        penalty_bytes_per_logit=PENALTY_BYTES_PER_LOGIT,
        cuda_graph_bytes=int(CUDA_GRAPH_SHARE * gpu.memory_bytes),
    )


def _get_batch_defaults(gpu: Gpu) -> tuple[int, int]:
    """The most tokens and sequences of a step. Source: arg_utils.py:get_batch_defaults @ vLLM 0.32."""
    if gpu.memory_bytes >= 160 * GIB:
        return 16_384, 1024
    if gpu.memory_bytes >= 70 * GIB and not gpu.name.startswith("A100"):
        return 8192, 1024
    return 2048, 256


@dataclass(frozen=True, kw_only=True)
class KvBudget:
    """Where one GPU's memory goes; `kv_bytes` is what is left for the KV cache.

    `kv_bytes_per_token` counts the layers of one KV group (of a model with one kind of layer: all of them),
    because a block holds the tokens of one group. Bytes are of one GPU, for any tensor parallel size.
    """

    total_bytes: int
    utilization: float
    weights_bytes: int
    activation_bytes: int
    penalty_bytes: int
    non_torch_bytes: int
    cuda_graph_bytes: int
    kv_bytes_per_token: int

    @property
    def kv_bytes(self) -> int:
        """Bytes for KV blocks."""
        taken = (
            self.weights_bytes
            + self.activation_bytes
            + self.penalty_bytes
            + self.non_torch_bytes
            + self.cuda_graph_bytes
        )
        return int(self.total_bytes * self.utilization) - taken

    def num_blocks(self, block_size: int = 16) -> int:
        """Blocks of `block_size` tokens that fit."""
        return self.kv_bytes // (block_size * self.kv_bytes_per_token)

    def explain(self) -> str:
        """The breakdown, one line per part."""
        parts = (
            ("device memory", self.total_bytes),
            (f"  usable at {self.utilization:g}", int(self.total_bytes * self.utilization)),
            ("- weights", self.weights_bytes),
            ("- activations", self.activation_bytes),
            ("- penalties", self.penalty_bytes),
            ("- non-torch", self.non_torch_bytes),
            ("- CUDA graphs", self.cuda_graph_bytes),
            ("= KV cache", self.kv_bytes),
        )
        return "\n".join(f"{name:<18}{size / GIB:8.2f} GiB" for name, size in parts)


def kv_budget(
    gpu: Gpu, model: Model, *, utilization: float, tp: int = 1, profile: ProfileRun | None = None
) -> KvBudget:
    """Where the memory of one GPU of `tp` goes at this `gpu_memory_utilization`, as vLLM computes it.

    `profile` is vLLM's default for that GPU unless given. Raises ModelTooLargeError if the model leaves no
    memory for the KV cache, ConfigError for a `tp` that does not divide the model's heads.
    """
    run = profile or default_profile_run(gpu)
    # The rotary table: one row of cosines and sines per position.
    rotary_bytes = int(model.max_model_len * model.head_dim * DTYPE_BYTES[model.base_dtype])

    def make(tp: int) -> KvBudget:
        return KvBudget(
            total_bytes=gpu.memory_bytes,
            utilization=utilization,
            weights_bytes=model.weights_bytes(tp) + rotary_bytes,
            activation_bytes=_activation_bytes(model, run, tp),
            # Every GPU keeps the counts of the whole vocabulary.
            penalty_bytes=int(run.max_num_seqs * model.vocab_size * run.penalty_bytes_per_logit),
            non_torch_bytes=run.non_torch_bytes,
            cuda_graph_bytes=run.cuda_graph_bytes,
            kv_bytes_per_token=model.kv_groups()[0].num_layers * model.kv_bytes_per_token_per_layer(tp),
        )

    budget = make(tp)
    if budget.kv_bytes <= 0:
        lines = [f"{model.name} leaves no KV cache on {gpu.name} (tp {tp}):", budget.explain()]
        for more in range(tp + 1, MOST_GPUS + 1):
            if model.can_split(more) and make(more).kv_bytes > 0:
                lines.append(f"with --tp {more} it is {make(more).kv_bytes / GIB:.1f} GiB")
                break
        raise ModelTooLargeError("\n".join(lines))
    return budget


def _activation_bytes(model: Model, run: ProfileRun, tp: int) -> int:
    """Peak of the profile run: its widest layer, or its sampler on top of the final hidden states."""
    base_bytes = DTYPE_BYTES[model.base_dtype]
    hidden = model.hidden_size * base_bytes
    # Residual, layer input, and the feed-forward's gate, up and product, for every expert a token uses.
    feed_forward = 3 * model.num_active_experts * model.intermediate_size / tp * base_bytes
    layer = run.max_num_batched_tokens * (2 * hidden + feed_forward)
    # The logits are gathered from all GPUs before sampling, so tensor parallelism does not shrink this.
    sampler = run.max_num_seqs * (model.vocab_size * run.sampler_bytes_per_logit + 2 * hidden)
    return int(max(layer, run.max_num_batched_tokens * hidden + sampler))
