"""Builds a simulated engine from names and sizes, for `tenuto simulate`, `compare`, `plan` and `serve`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tenuto.core.engine import StepTokens, get_prompt_weight
from tenuto.core.errors import ConfigError
from tenuto.core.limits import Limits
from tenuto.core.loader import get_engine_settings, load_policy
from tenuto.core.policy import EngineSettings, Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.sim.cost import BACKENDS, default_backend, load_step_cost
from tenuto.sim.cost.batch import VARIANTS, HostOverhead, ScaledStepCost, StepCost, split_variant
from tenuto.sim.cost.fitted import FittedStepCost
from tenuto.sim.cost.tables import NoTablesError
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import PUBLISHED, Scheduler
from tenuto.sim.hardware.gpus import GIB, PCIE_GEN4_BYTES_PER_S, Gpu, get_gpu
from tenuto.sim.hardware.kv_budget import (
    DEFAULT_UTILIZATION,
    MOST_GPUS,
    KvBudget,
    ProfileRun,
    default_profile_run,
    kv_budget,
)
from tenuto.sim.hardware.models import CONFIGS, Model, load_model
from tenuto.sim.kv import KvConfig
from tenuto.sim.setup import Setup
from tenuto.sim.tiers.offloader import Offload
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier

UNBOUNDED_KV_TOKENS = 10**9
"""A KV cache size for unlimited-memory baselines: larger than any workload that finishes can fill."""
LIMITS: Mapping[str, Limits] = MappingProxyType({"published": PUBLISHED, "plugin": Limits()})
"""The rules for leases: as in the published engines, or as in vLLM with Tenuto's plugin."""


@dataclass(frozen=True)
class Machine:
    """The parts that a setup names, resolved and checked."""

    setup: Setup
    gpu: Gpu
    model: Model
    policy: Policy
    config: EngineConfig
    step_cost: StepCost
    step_cost_name: str
    """Where step times come from: "tables", "roofline", or a file that `tenuto profile` wrote."""
    host_gb: float
    """Host memory for KV, in GiB, of all GPUs of the machine together; 0 if none."""
    link: Link
    """Between each GPU and the host memory."""
    tiers: OffloadTiers | None
    limits: Limits
    notes: tuple[str, ...]
    """Messages for the user: about rough estimates, and about features that the policy wants but does not
    get."""

    def make_scheduler(self, log: DecisionLog | None = None, *, strict: bool = False) -> Scheduler:
        """The engine's scheduler for one run. With `strict`, a fault of the policy raises PolicyError."""
        return Scheduler(self.config, self.policy, self.limits, tiers=self.tiers, log=log, strict=strict)


def build(setup: Setup, policy: Policy | None = None) -> Machine:
    """Build the machine that a setup describes. Raises ConfigError or PolicyError that says what is wrong.

    `policy`, if given, is used unchanged instead of the one that the setup names.
    """
    gpu = get_gpu(setup.gpu)
    model = load_model(setup.model, dtype=setup.dtype, kv_cache_dtype=setup.kv_cache_dtype)
    policy = load_policy(setup.policy, setup.options) if policy is None else policy
    wanted = get_engine_settings(setup.policy, policy)
    if not setup.keep_kv:
        policy = _keep_nothing(policy)
        wanted = replace(wanted, offload=None, unbounded_kv=False)
    notes: list[str] = []
    offload = _get_offload(setup, model, wanted, notes)
    host_gb = _get_host_gb(setup, gpu, offload, notes)
    if not host_gb:
        without = (("--disk-gb", setup.disk_gb), ("--link-gb-s", setup.link_gb_s))
        unused = " and ".join(flag for flag, value in without if value)
        notes += [f"policy {setup.policy} makes no use of {unused} without host memory"] if unused else []
    profile = _get_profile(setup, gpu)
    block_size = model.get_block_size(setup.block_size, setup.tp)
    num_blocks = _get_num_blocks(setup, gpu, model, wanted, notes)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache of {model.name} on {gpu.name} (tp {setup.tp}) holds fewer than two blocks of "
            f"{block_size:,} tokens; lower --block-size, or give it more memory"
        )
    config = EngineConfig(
        kv=KvConfig(
            vllm_release=setup.vllm,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=tuple(group.window for group in model.kv_groups()),
            retention_interval=setup.prefix_cache_retention_interval,
            max_model_len=setup.max_model_len or model.max_model_len,
            watermark=_get(setup.watermark, wanted.watermark, 0.0),
            # vLLM 0.10.2, which the fork is made from, admits a turn as soon as its first tokens fit.
            reserve_full_sequence=wanted.scheduler == "vllm",
        ),
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
        step_tokens=_get_step_tokens(setup, model, wanted, notes),
        long_prefill_token_threshold=_get(
            setup.long_prefill_token_threshold, wanted.long_prefill_token_threshold, 0
        ),
        prefill_schedule_interval=setup.prefill_schedule_interval,
        order=wanted.order,
        scheduler=wanted.scheduler,
        # The fork's vLLM schedules a step after the one before.
        max_steps_in_flight=2 if setup.async_scheduling and wanted.scheduler == "vllm" else 1,
        read_tool_calls=setup.read_tool_calls,
        offload=offload,
        # Where layers differ, and in vLLM's own host memory, tiers hold single blocks. Without a tier it does
        # not matter.
        offload_chunk_tokens=(
            block_size
            if any(model.windows) or offload == "native" or not host_gb
            else setup.offload_chunk_tokens
        ),
    )
    step_cost, step_cost_name = _load_step_cost(
        setup, gpu, model, notes, is_async=config.max_steps_in_flight > 1
    )
    link = _make_link(setup, gpu, step_cost)
    if setup.step_cost_factor != 1.0:
        step_cost = ScaledStepCost(step_cost, setup.step_cost_factor)
    tiers = _make_tiers(setup, model, config, link, host_gb) if host_gb else None
    return Machine(
        setup=setup,
        gpu=gpu,
        model=model,
        policy=policy,
        config=config,
        step_cost=step_cost,
        step_cost_name=step_cost_name,
        host_gb=host_gb,
        link=link,
        tiers=tiers,
        limits=LIMITS[setup.limits],
        notes=tuple(notes),
    )


def _get_step_tokens(
    setup: Setup, model: Model, wanted: EngineSettings, notes: list[str]
) -> StepTokens | None:
    """The bound of a step's tokens. With states no size is chosen step by step, as in the plugin."""
    step_tokens = setup.step_tokens or wanted.step_tokens
    if model.state is None or get_prompt_weight(step_tokens) is None:
        return step_tokens
    notes.append("steps have vLLM's own budget: a state is cached only where a chunk ends at a block's end")
    return None


def _keep_nothing(policy: Policy) -> Policy:
    """The same policy, but no turn's KV is retained: its `retain` is that of stock."""
    cls = type(policy)
    made = copy.copy(policy)
    made.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, "retain": Policy.retain})
    return made


def check_step_costs(setups: Iterable[Setup]) -> None:
    """Raise ConfigError where a file of step times, which are of one kind of GPU, stands for several."""
    gpus: dict[str, set[str]] = {}
    for setup in setups:
        source, _ = split_variant(setup.step_cost)
        if source is not None and source not in BACKENDS and Path(source).is_file():
            gpus.setdefault(source, set()).update(setup.engine_gpus)
    for path, kinds in gpus.items():
        if len(kinds) > 1:
            raise ConfigError(
                f"--step-cost {path} has the step times of one kind of GPU, not of {', '.join(sorted(kinds))}"
            )


def _load_step_cost(
    setup: Setup, gpu: Gpu, model: Model, notes: list[str], *, is_async: bool
) -> tuple[StepCost, str]:
    source, variant = split_variant(setup.step_cost)
    name = source or default_backend(gpu)
    if name not in BACKENDS:
        # Observed step times already include the host's time.
        fit = _load_fit(Path(name))
        notes += [f"{name}: {reason}" for reason in fit.poor]
        return fit, name
    host = HostOverhead(overlapped=is_async)

    def load(name: str) -> tuple[StepCost, str]:
        cost = load_step_cost(name, gpu, model, setup.tp, host, variant=variant)
        return cost, name if variant is None else f"{name}/{variant}"

    if source is None:
        why = f"aiconfigurator-core has no measured times of {model.name} on it (tp {setup.tp})"
        if name == "tables":
            try:
                return load(name)
            except NoTablesError:
                name = "roofline"
        elif gpu.table_system is not None:
            why = "for measured ones, pip install 'tenuto[tables]'"
        notes.append(f"step times on {gpu.name} are a roofline's, with larger errors: {why}")
    return load(name)


@cache
def _load_fit(path: Path) -> FittedStepCost:
    if not path.is_file():
        raise ConfigError(
            f"--step-cost is one of {', '.join((*BACKENDS, *VARIANTS))}, or a file that `tenuto profile` "
            f"wrote; {path}: No such file or directory"
        )
    return FittedStepCost.load(path)


def _get(given: Any, wanted: Any, default: Any) -> Any:
    return next(value for value in (given, wanted, default) if value is not None)


def _get_offload(setup: Setup, model: Model, wanted: EngineSettings, notes: list[str]) -> Offload | None:
    """How KV is offloaded; None also if the policy wants it but this model cannot have tiers here."""
    offload = setup.offload or wanted.offload or "none"
    if offload == "none":
        return None
    if any(model.windows) and offload in ("sync", "serial"):
        why = f"{model.name} has layers with windows or states, and LMCache 0.3.7 has full attention only"
        if setup.offload is not None:
            raise ConfigError(f"--offload {offload} is LMCache's; {why}: choose async")
        notes.append(f"policy {setup.policy} runs without tiers below the GPU: {why}")
        return None
    if any(model.windows) and offload == "asked":
        notes.append(f"every turn is stored below the GPU: {model.name} has layers with windows or states")
        offload = "async"
    return offload


def _get_host_gb(setup: Setup, gpu: Gpu, offload: Offload | None, notes: list[str]) -> float:
    """Host memory for KV, in GiB.

    Without --host-gb, what `tenuto serve` does with the policy: none. Where --offload asks for it, and for
    LMCache, which is nothing without it, it is that of the published machine with this GPU.
    """
    who, host_gb = f"policy {setup.policy}", setup.host_gb
    if offload is None:
        if host_gb and setup.offload is None:
            notes.append(
                f"{who} uses none of the host memory; offload-async is stock vLLM with it, and --offload "
                "async gives it to any policy"
            )
        return 0.0
    if host_gb is None:
        if setup.offload is None and offload in ("async", "asked"):
            notes.append(f"{who} has no host memory for KV, as `tenuto serve` by default: add --host-gb GIB")
            return 0.0
        if gpu.host_memory_bytes is None:
            notes.append(
                f"{who} runs without tiers below the GPU: how much host memory a machine with {gpu.name} has "
                "is not known; say it with --host-gb"
            )
            return 0.0
        host_gb = gpu.host_memory_bytes / GIB
        notes.append(
            f"{who} has {host_gb:g} GiB of host memory for KV, as the published machine with {gpu.name}; "
            "--host-gb changes it"
        )
    if host_gb and offload in ("sync", "serial") and gpu.host_link_bytes_per_s <= PCIE_GEN4_BYTES_PER_S:
        notes.append(
            "copies inside the steps are simulated as too fast on PCIe Gen4: the published LMCache took 1.5 "
            "to 2.1 times as long on an A100-40 (1.4 to 1.7 with --offload serial; docs/fidelity.md)"
        )
    return host_gb


def _get_profile(setup: Setup, gpu: Gpu) -> ProfileRun:
    return limit_profile(setup, default_profile_run(gpu, setup.vllm))


def limit_profile(setup: Setup, default: ProfileRun) -> ProfileRun:
    """A profile run with the limits of steps that the setup gives."""
    return replace(
        default,
        max_num_batched_tokens=setup.max_num_batched_tokens or default.max_num_batched_tokens,
        max_num_seqs=setup.max_num_seqs or default.max_num_seqs,
    )


def get_max_num_batched_tokens(setup: Setup) -> int:
    """The most tokens of a step: as the setup says, else vLLM's default on this GPU. Raises ConfigError."""
    return _get_profile(setup, get_gpu(setup.gpu)).max_num_batched_tokens


def _get_num_blocks(setup: Setup, gpu: Gpu, model: Model, wanted: EngineSettings, notes: list[str]) -> int:
    block_size = model.get_block_size(setup.block_size, setup.tp)
    if wanted.unbounded_kv:
        return UNBOUNDED_KV_TOKENS // block_size
    if setup.kv_tokens is not None:
        notes += _find_excess(setup.kv_tokens, setup.tp, gpu, model)
    num_tokens = try_get_kv_tokens(setup, gpu, model)
    if num_tokens is not None:
        return num_tokens // block_size
    return get_kv_budget(setup, gpu, model).num_blocks(block_size)


def try_get_kv_tokens(setup: Setup, gpu: Gpu, model: Model) -> int | None:
    """The size of the KV cache that is given, or that a server reported; None if it is to be computed."""
    # The sizes that the servers reported hold for the published model with its own data types.
    is_published = (
        model.config_path.parent == CONFIGS and setup.dtype is None and setup.kv_cache_dtype is None
    )
    num_tokens = setup.kv_tokens
    if num_tokens is None and setup.gpu_memory_utilization is None and setup.tp == 1 and is_published:
        num_tokens = dict(gpu.measured_kv_tokens).get(model.name)
    return num_tokens


def _find_excess(num_tokens: int, tp: int, gpu: Gpu, model: Model) -> Iterator[str]:
    """A note if weights and a given KV cache need more than a GPU has: no error, as it may be a stand-in."""

    def count_bytes(tp: int) -> int:
        token_bytes = model.kv_groups()[0].num_layers * model.kv_bytes_per_token_per_layer(tp)
        return model.weights_bytes(tp) + num_tokens * token_bytes

    if count_bytes(tp) <= gpu.memory_bytes:
        return
    more = (each for each in range(tp + 1, MOST_GPUS + 1) if model.can_split(each))
    fitting = next((each for each in more if count_bytes(each) <= gpu.memory_bytes), None)
    yield (
        f"{model.name} and the given KV cache do not fit on {gpu.name} (tp {tp}): they need "
        f"{count_bytes(tp) / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB"
        + ("" if fitting is None else f"; they fit with --tp {fitting}")
    )


def get_kv_budget(setup: Setup, gpu: Gpu, model: Model) -> KvBudget:
    """What uses a GPU's memory, as vLLM computes it. Raises ConfigError."""
    utilization = setup.gpu_memory_utilization or DEFAULT_UTILIZATION
    return kv_budget(gpu, model, utilization=utilization, tp=setup.tp, profile=_get_profile(setup, gpu))


def _make_link(setup: Setup, gpu: Gpu, step_cost: StepCost) -> Link:
    """The link to host memory: as given, else as it was measured with the steps, else the GPU's."""
    if setup.link_gb_s:
        return Link(setup.link_gb_s * 1e9)
    if isinstance(step_cost, FittedStepCost) and step_cost.link is not None:
        latency_s, s_per_byte = step_cost.link.coefficients
        return Link(1 / s_per_byte, latency_s)
    return Link(gpu.host_link_bytes_per_s)


def _make_tiers(setup: Setup, model: Model, config: EngineConfig, link: Link, host_gb: float) -> OffloadTiers:
    """Make the tiers: host memory and disk, shared by all GPUs of the machine."""
    # Each GPU copies its own share over its own link.
    token_bytes = model.kv_groups()[0].num_layers * model.kv_bytes_per_token_per_layer(setup.tp)
    chunk_bytes = config.offload_chunk_tokens * token_bytes
    tiers = [Tier("host", int(host_gb * GIB) // setup.tp, chunk_bytes, link)]
    if setup.disk_gb:
        link = Link(DISK_BYTES_PER_S / setup.tp)
        tiers.append(Tier("disk", int(setup.disk_gb * GIB) // setup.tp, chunk_bytes, link))
    return OffloadTiers(tiers)


DISK_BYTES_PER_S = 6.5e9
"""Sequential reads of one data-center NVMe drive over PCIe Gen4 x4: 7.0 GB/s in Samsung's PM9A3 datasheet,
and 3.5-4.1 GB/s for writes. The value lies between the two, because the simulator's link carries both."""
