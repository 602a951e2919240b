"""From names and sizes to a simulated engine: what `tenuto simulate`, `compare`, `plan` and `serve` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

from tenuto.core.asking import DecisionLog
from tenuto.core.errors import ConfigError
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy, load_policy
from tenuto.sim.config import EngineConfig, KvConfig, Offload
from tenuto.sim.gpus import GIB, Gpu, get_gpu
from tenuto.sim.kv_budget import ProfileRun, default_profile_run, kv_budget
from tenuto.sim.models import Model, load_model
from tenuto.sim.scheduler import PUBLISHED, Scheduler
from tenuto.sim.step_cost import (
    BACKENDS,
    FittedStepCost,
    HostOverhead,
    StepCost,
    default_backend,
    load_step_cost,
)
from tenuto.sim.tiers import Link, OffloadTiers, Tier

DEFAULT_UTILIZATION = 0.9
"""vLLM's `gpu_memory_utilization` in the releases of the published sweeps."""
UNBOUNDED_KV_TOKENS = 10**9
"""For yardsticks: more than any workload that finishes."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One simulated machine. Names as in the commands' options; None takes what vLLM would on that GPU."""

    gpu: str = "H100"
    model: str = "llama-3.1-8b"
    policy: str = "stock"
    options: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    step_cost: str | None = None
    """"tables", "roofline" or a file of `tenuto profile`; None takes tables where there are some."""
    gpu_memory_utilization: float | None = None
    kv_tokens: int | None = None
    host_gb: float | None = None
    """Host memory for offloaded KV in GiB, as LMCache and vLLM count it; None takes what the machine with
    that GPU had in the published sweeps."""
    disk_gb: float = 0.0
    offload: str | None = None
    """"sync", "async", "asked" or "none"; None takes what the policy wants."""
    link_gb_s: float | None = None
    max_step_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    long_prefill_token_threshold: int | None = None
    watermark: float | None = None
    async_scheduling: bool = False


@dataclass(frozen=True)
class Machine:
    """What a setup names, found and checked."""

    setup: Setup
    gpu: Gpu
    model: Model
    policy: Policy
    config: EngineConfig
    step_cost: StepCost
    tiers: OffloadTiers | None

    @property
    def step_cost_name(self) -> str:
        """Where step times come from: "tables", "roofline", or a file that `tenuto profile` wrote."""
        return self.setup.step_cost or default_backend(self.gpu)

    def make_scheduler(self, log: DecisionLog | None = None, limits: Limits = PUBLISHED) -> Scheduler:
        """The engine's scheduler, for one run."""
        return Scheduler(self.config, self.policy, limits, tiers=self.tiers, log=log)


def build(setup: Setup) -> Machine:
    """Find all that a setup names. Raises ConfigError or PolicyError saying what is wrong."""
    gpu, model = get_gpu(setup.gpu), load_model(setup.model)
    policy = load_policy(setup.policy, setup.options)
    offload = _get_offload(setup, policy)
    profile = _get_profile(setup, gpu)
    config = EngineConfig(
        kv=KvConfig(
            num_blocks=_get_num_blocks(setup, gpu, model, policy, profile),
            block_size=setup.block_size,
            windows=tuple(group.window for group in model.kv_groups()),
            max_model_len=setup.max_model_len or model.max_model_len,
            watermark=_get(setup.watermark, policy.wants.get("watermark"), 0.0),
        ),
        max_step_tokens=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
        long_prefill_token_threshold=_get(
            setup.long_prefill_token_threshold, policy.wants.get("long_prefill_token_threshold"), 0
        ),
        max_steps_in_flight=2 if setup.async_scheduling else 1,
        offload=offload,
    )
    step_cost = _load_step_cost(setup, gpu, model)
    fitted_link = step_cost.link_bytes_per_s if isinstance(step_cost, FittedStepCost) else None
    tiers = _make_tiers(setup, gpu, model, config, fitted_link) if offload is not None else None
    return Machine(setup, gpu, model, policy, config, step_cost, tiers)


def _load_step_cost(setup: Setup, gpu: Gpu, model: Model) -> StepCost:
    name = setup.step_cost or default_backend(gpu)
    if name in BACKENDS:
        host = HostOverhead(overlapped=setup.async_scheduling)
        return load_step_cost(name, gpu, model, setup.tp, host)
    # What was observed has the host's time in it already.
    return _load_fit(Path(name))


@cache
def _load_fit(path: Path) -> FittedStepCost:
    try:
        return FittedStepCost.load(path)
    except OSError as error:
        raise ConfigError(
            f"--step-cost is one of {', '.join(BACKENDS)}, or a file that `tenuto profile` wrote; "
            f"{path}: {error.strerror or error}"
        ) from error


def _get(given: Any, wanted: Any, default: Any) -> Any:
    return next(value for value in (given, wanted, default) if value is not None)


def _get_offload(setup: Setup, policy: Policy) -> Offload | None:
    offload = setup.offload or policy.wants.get("offload", "none")
    if offload == "none":
        return None
    for known in get_args(Offload):
        if offload == known:
            return cast(Offload, offload)
    raise ConfigError(f"offload must be one of none, {', '.join(get_args(Offload))}; got {offload!r}")


def _get_profile(setup: Setup, gpu: Gpu) -> ProfileRun:
    default = default_profile_run(gpu)
    return ProfileRun(
        max_num_batched_tokens=setup.max_step_tokens or default.max_num_batched_tokens,
        max_num_seqs=setup.max_num_seqs or default.max_num_seqs,
    )


def _get_num_blocks(setup: Setup, gpu: Gpu, model: Model, policy: Policy, profile: ProfileRun) -> int:
    if policy.wants.get("unbounded_kv"):
        return UNBOUNDED_KV_TOKENS // setup.block_size
    num_tokens = setup.kv_tokens
    if num_tokens is None and setup.gpu_memory_utilization is None and setup.tp == 1:
        num_tokens = dict(gpu.measured_kv_tokens).get(model.name)
    if num_tokens is not None:
        return num_tokens // setup.block_size
    utilization = setup.gpu_memory_utilization or DEFAULT_UTILIZATION
    budget = kv_budget(gpu, model, utilization=utilization, tp=setup.tp, profile=profile)
    return budget.num_blocks(setup.block_size)


def _make_tiers(
    setup: Setup, gpu: Gpu, model: Model, config: EngineConfig, fitted_link: float | None
) -> OffloadTiers | None:
    """Host memory and disk behind all GPUs of the machine together; `fitted_link` is in bytes per second."""
    host_gb = setup.host_gb
    if host_gb is None and gpu.host_memory_bytes is not None:
        host_gb = gpu.host_memory_bytes / GIB
    if not host_gb:
        return None
    # Every GPU copies its own share over its own link.
    token_bytes = model.kv_groups()[0].num_layers * model.kv_bytes_per_token_per_layer(setup.tp)
    chunk_bytes = config.offload_chunk_tokens * token_bytes
    given_link = setup.link_gb_s * 1e9 if setup.link_gb_s else None
    link_bytes_per_s = _get(given_link, fitted_link, gpu.host_link_bytes_per_s)
    tiers = [Tier("host", int(host_gb * GIB) // setup.tp, chunk_bytes, Link(link_bytes_per_s))]
    if setup.disk_gb:
        link = Link(DISK_BYTES_PER_S / setup.tp)
        tiers.append(Tier("disk", int(setup.disk_gb * GIB) // setup.tp, chunk_bytes, link))
    return OffloadTiers(tiers)


DISK_BYTES_PER_S = 6.5e9
"""Sequential reads of one data-center NVMe drive over PCIe Gen4 x4: 7.0 GB/s in Samsung's PM9A3 datasheet,
3.5-4.1 GB/s for writes; between the two, as the simulator's link carries both."""
