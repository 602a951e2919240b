"""The GPUs of the simulator: published sizes and rates, and the share of each rate that kernels reach.

`memory_bytes` is what CUDA reports to PyTorch (the "total capacity" of an out-of-memory message), not the
advertised size: vLLM multiplies the reported one by `gpu_memory_utilization`.

The efficiencies are those of Llama-3.1-8B in bf16 in the measured operator tables of aiconfigurator-core
0.12.0. Shares of `flops` are for GEMMs and causal attention of one 8,192-token prefill. Shares of
`memory_bytes_per_s` are for the weight reads of a one-token step and the KV reads of 64 decodes at 8,192
tokens. A GPU without tables has the efficiencies of a GPU with the same die: see `replace` below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tenuto.core.errors import ConfigError, suggest

GIB = 1024**3
MIB = 1024**2

# Host to device copies of pinned memory over PCIe x16, as nvbandwidth measures them:
PCIE_GEN4_BYTES_PER_S = 25.1e9  # A100, NVIDIA/nvbandwidth issue 42 (theoretical: 31.5e9)
PCIE_GEN5_BYTES_PER_S = 52.8e9  # H100, NVIDIA/nvbandwidth issue 24 (theoretical: 63.0e9)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model, and the host memory of the machine it was published in.

    Attributes:
        memory_bytes: device memory as CUDA reports it.
        flops: dense bf16 tensor-core rate with fp32 accumulation, per second (no sparsity).
        fp8_flops: the same for fp8; None where the tensor cores have none.
        memory_bytes_per_s: device memory bandwidth.
        gemm_efficiency: share of `flops` that large GEMMs reach.
        attention_efficiency: share of `flops` that causal prefill attention reaches.
        weight_read_efficiency: share of the bandwidth that one-token GEMMs reach.
        kv_read_efficiency: share of the bandwidth that decode attention reaches.
        peer_bytes_per_s: one direction to another GPU of the machine (NVLink, else PCIe).
        host_link_bytes_per_s: copies between this GPU and host memory, one direction.
        host_memory_bytes: host memory for KV offload in the published machine, in the GiB that LMCache's
            `max_local_cpu_size` counts; None where none was named.
        table_system: the machine's name in aiconfigurator-core; None if it has no measured tables.
        measured_kv_tokens: KV cache that vLLM made in the published sweeps, by model name (one GPU, bf16).
    """

    name: str
    memory_bytes: int
    flops: float
    fp8_flops: float | None
    memory_bytes_per_s: float
    gemm_efficiency: float
    attention_efficiency: float
    weight_read_efficiency: float
    kv_read_efficiency: float
    peer_bytes_per_s: float
    host_link_bytes_per_s: float
    host_memory_bytes: int | None = None
    table_system: str | None = None
    measured_kv_tokens: tuple[tuple[str, int], ...] = ()


# NVIDIA RTX Blackwell PRO whitepaper (Workstation Edition).
_RTXPRO6000 = Gpu(
    name="RTXPRO6000",
    memory_bytes=97_250 * MIB,
    flops=503.8e12,
    fp8_flops=1007.6e12,
    memory_bytes_per_s=1.792e12,
    gemm_efficiency=0.79,
    attention_efficiency=0.55,
    weight_read_efficiency=0.80,
    kv_read_efficiency=0.84,
    peer_bytes_per_s=PCIE_GEN5_BYTES_PER_S,
    host_link_bytes_per_s=PCIE_GEN5_BYTES_PER_S,
    table_system="rtx_pro_6000_server",
)
# NVIDIA A100 datasheet, the SXM module with 80 GB of HBM2e.
_A100_80 = Gpu(
    name="A100-80",
    memory_bytes=int(79.15 * GIB),
    flops=312e12,
    fp8_flops=None,
    memory_bytes_per_s=2.039e12,
    gemm_efficiency=0.85,
    attention_efficiency=0.56,
    weight_read_efficiency=0.67,
    kv_read_efficiency=0.72,
    peer_bytes_per_s=300e9,
    host_link_bytes_per_s=PCIE_GEN4_BYTES_PER_S,
    table_system="a100_sxm",
)
# NVIDIA H100 datasheet, the SXM module.
_H100 = Gpu(
    name="H100",
    memory_bytes=81_089 * MIB,
    flops=989.4e12,
    fp8_flops=1978.9e12,
    memory_bytes_per_s=3.35e12,
    gemm_efficiency=0.75,
    attention_efficiency=0.60,
    weight_read_efficiency=0.82,
    kv_read_efficiency=0.93,
    peer_bytes_per_s=450e9,
    host_link_bytes_per_s=PCIE_GEN5_BYTES_PER_S,
    host_memory_bytes=400 * GIB,
    table_system="h100_sxm",
    measured_kv_tokens=(("llama-3.1-8b", 434_000),),
)

_GPUS = (
    # Sizes and rates: NVIDIA RTX Blackwell architecture whitepaper.
    replace(
        _RTXPRO6000,
        name="RTX5090",
        memory_bytes=int(31.36 * GIB),
        flops=209.5e12,
        fp8_flops=419e12,
        table_system=None,
        measured_kv_tokens=(("llama-3.1-8b", 5402 * 16),),
    ),
    _RTXPRO6000,
    # NVIDIA A100 datasheet, the PCIe card with 40 GB of HBM2.
    replace(
        _A100_80,
        name="A100-40",
        memory_bytes=40_326 * MIB,
        memory_bytes_per_s=1.555e12,
        peer_bytes_per_s=PCIE_GEN4_BYTES_PER_S,
        host_memory_bytes=200 * GIB,
        table_system=None,
        measured_kv_tokens=(("llama-3.1-8b", 139_000),),
    ),
    _A100_80,
    # NVIDIA L40S datasheet.
    Gpu(
        name="L40S",
        memory_bytes=int(44.40 * GIB),
        flops=362.05e12,
        fp8_flops=733e12,
        memory_bytes_per_s=0.864e12,
        gemm_efficiency=0.58,
        attention_efficiency=0.51,
        weight_read_efficiency=0.82,
        kv_read_efficiency=0.84,
        peer_bytes_per_s=PCIE_GEN4_BYTES_PER_S,
        host_link_bytes_per_s=PCIE_GEN4_BYTES_PER_S,
        host_memory_bytes=100 * GIB,
        table_system="l40s",
        measured_kv_tokens=(("llama-3.1-8b", 208_000),),
    ),
    _H100,
    # NVIDIA H200 datasheet, the SXM module: the die of the H100.
    replace(
        _H100,
        name="H200",
        memory_bytes=143_156 * MIB,
        memory_bytes_per_s=4.8e12,
        gemm_efficiency=0.73,
        attention_efficiency=0.58,
        weight_read_efficiency=0.75,
        kv_read_efficiency=0.91,
        table_system="h200_sxm",
        measured_kv_tokens=(("llama-3.1-8b", 868_000),),
    ),
    # NVIDIA Blackwell datasheet, one GPU of an HGX B200. The host link is PCIe Gen6 capable; hosts are Gen5.
    Gpu(
        name="B200",
        memory_bytes=182_631 * MIB,
        flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes_per_s=7.7e12,
        gemm_efficiency=0.69,
        attention_efficiency=0.46,
        weight_read_efficiency=0.68,
        kv_read_efficiency=0.90,
        peer_bytes_per_s=900e9,
        host_link_bytes_per_s=PCIE_GEN5_BYTES_PER_S,
        host_memory_bytes=200 * GIB,
        table_system="b200_sxm",
    ),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _GPUS})


def get_gpu(name: str) -> Gpu:
    """The GPU of that name, upper or lower case. Raises ConfigError that lists the known ones."""
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise ConfigError(f"unknown GPU {name!r}; choose one of {', '.join(GPUS)}{suggest(name, GPUS)}")
    return gpu
