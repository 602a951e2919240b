"""Presets: named combinations of a policy and engine settings.

A preset makes no decisions itself. Its name can be used in place of a policy's (`--policy offload-async`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tenuto.core.steps import StepTokens

OffloadMode = Literal["async", "sync", "serial", "asked"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Engine settings that a policy or a preset asks for. The user's own settings override them."""

    order: Literal["fcfs", "priority"] = "fcfs"
    """vLLM's `--scheduling-policy`. With "priority", a request's own priority comes before every key."""
    offload: OffloadMode | None = None
    """How the KV cache is copied to the tiers below the GPU: in parallel with the steps (async), inside each
    step (sync), before and after each step's computation (serial), or when `retain` and `reconsider` ask for
    it (asked)."""
    long_prefill_token_threshold: int | None = None
    """The most tokens of one prompt in a step, while other requests wait or run."""
    watermark: float | None = None
    """Share of the KV cache blocks that must stay free when a request starts."""
    step_tokens: StepTokens | None = None
    """The most tokens of a step: "adaptive", or a number; None for the engine's own budget."""
    unbounded_kv: bool = False
    """Whether the KV cache is unlimited; only the simulator supports this."""
    scheduler: Literal["vllm", "continuum-fork"] = "vllm"
    """Whose scheduler the simulator imitates where the two differ: vLLM's, or that of the fork of vLLM 0.10.2
    that is the Continuum prototype. Only the simulator supports this."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A policy by its name, and the engine's settings that make the preset."""

    policy: str
    engine: EngineSettings
    help: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the policy that belong to the preset; options that are given override them."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "priority": Preset(
            policy="stock",
            engine=EngineSettings(order="priority"),
            help="vLLM's own priority scheduling: smaller priority first, then earlier arrival.",
            source="vllm/v1/core/sched/request_queue.py@0.32; as `--scheduling-policy priority`",
        ),
        # A prompt's cap of 512 tokens leaves a step's budget of 2,048 or 8,192 to others. A watermark of 0.01
        # was vLLM's default before V1; it avoids nearly all preemptions. Known weakness: the cap is per
        # prompt, not per step. Sixteen long prompts still fill a step of 8,192, and each needs 16 times as
        # many.
        "stock-tuned": Preset(
            policy="stock",
            engine=EngineSettings(long_prefill_token_threshold=512, watermark=0.01, offload="async"),
            help="Stock vLLM as a good operator sets it: capped prompts, a small reserve, KV in host memory.",
            source="vLLM 0.32's --long-prefill-token-threshold, --watermark and --kv-offloading-size",
        ),
        # Starts every turn that fits, as stock does. Under overload, turns evict each other, and the tier
        # fills with the blocks of all turns.
        "offload-async": Preset(
            policy="stock",
            engine=EngineSettings(offload="async"),
            help="Stock vLLM with its own offloading: KV is copied to host memory beside the steps.",
            source="vllm/v1/kv_offload and the offloading connector@0.32",
        ),
        # Good until the link saturates; then every step of every request waits for it.
        "offload-sync": Preset(
            policy="stock",
            engine=EngineSettings(offload="sync"),
            help="Stock vLLM with LMCache: every step waits for its copies to and from host memory.",
            source="LMCache 0.3.7 behind vLLM (`start_load_kv` and `wait_for_save` around the forward pass)",
        ),
        # The paper's engine swaps preempted turns to the CPU, so this preset is closer to it than `autellix`.
        # Known weakness: under overload, the tier cannot hold all active jobs; then everything is recomputed.
        "autellix+": Preset(
            policy="autellix",
            engine=EngineSettings(offload="async"),
            help="Autellix with KV in host memory: a preempted turn loads what it lost.",
            source="arXiv 2502.13965, section 4.2.2",
        ),
        # What the published sweeps measured. The prototype reads an answer's tool call from its only ```bash
        # block. The 20 tokens that follow random text have none, so nothing was pinned in these sweeps: what
        # remains is the order by jobs. `continuum-fixed` alone is what the prototype does where it is told
        # the tool.
        "continuum-prototype": Preset(
            policy="continuum-fixed",
            engine=EngineSettings(scheduler="continuum-fork"),
            help="The public Continuum prototype as its sweeps ran it: no pin without a call in the answer.",
            source="estimate_with_func.py and sched/scheduler.py in vllm/v1/core of the fork of vLLM 0.10.2 "
            "that accompanies arXiv 2511.02230",
            options=MappingProxyType({"tools": "shown"}),
        ),
        # Only useful work remains here. A slower policy wastes work; a faster policy has a better order. No
        # real server has such a cache.
        "unbounded": Preset(
            policy="job-order",
            engine=EngineSettings(unbounded_kv=True),
            help="An oracle: jobs in the order of their arrival, with a KV cache that never fills.",
            source="this project",
        ),
    }
)
