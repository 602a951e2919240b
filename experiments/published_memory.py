"""The KV cache of simulated machines in experiments: that of the releases behind the published sweeps.

All kept records were made with it. Later releases leave another size, and so does the default now.
"""

from __future__ import annotations

from dataclasses import replace

from tenuto.sim.hardware.gpus import Gpu, get_gpu
from tenuto.sim.hardware.kv_budget import ProfileRun, default_profile_run, kv_budget
from tenuto.sim.hardware.models import load_model
from tenuto.sim.machine import limit_profile, try_get_kv_tokens
from tenuto.sim.setup import Setup

UTILIZATION = 0.9
"""vLLM's `gpu_memory_utilization` in these releases."""
# Bytes per logit. They filter top-k and top-p by sorting: they hold bf16 (2) and fp32 (4) logits, sorted
# values (4) and their indices (8), and inside torch.sort unsorted indices (8) and CUB's second buffers of
# both (4 + 8).
SORTING_SAMPLER_BYTES_PER_LOGIT = 38


def published_profile_run(gpu: Gpu) -> ProfileRun:
    """The profile run of these releases. They set nothing aside for penalties and CUDA graphs."""
    return replace(
        default_profile_run(gpu),
        sampler_bytes_per_logit=SORTING_SAMPLER_BYTES_PER_LOGIT,
        penalty_bytes_per_logit=0.0,
        cuda_graph_bytes=0,
    )


def with_published_kv(setup: Setup) -> Setup:
    """The setup with that size, unless it gives one itself or a server reported one. Raises ConfigError.

    For the machine of a run, not for a record's key: keys name what was asked for. A fleet gets one size, so
    its GPUs must be of one kind.
    """
    gpu = get_gpu(setup.gpu)
    model = load_model(setup.model, dtype=setup.dtype, kv_cache_dtype=setup.kv_cache_dtype)
    if try_get_kv_tokens(setup, gpu, model) is not None:
        return setup
    budget = kv_budget(
        gpu,
        model,
        utilization=setup.gpu_memory_utilization or UTILIZATION,
        tp=setup.tp,
        profile=limit_profile(setup, published_profile_run(gpu)),
    )
    block_size = model.get_block_size(setup.block_size, setup.tp)
    return replace(setup, kv_tokens=budget.num_blocks(block_size) * block_size)
