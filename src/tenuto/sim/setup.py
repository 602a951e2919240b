"""The options of one simulated machine, the same in every command that simulates one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option
from tenuto.core.steps import StepTokens, check_step_tokens, read_step_tokens
from tenuto.sim.fleet.options import Fleet
from tenuto.sim.hardware.gpus import GPUS


def _read_interval(text: str) -> int | None:
    """The value as vLLM spells it. Raises ConfigError."""
    if text == "None":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--prefix-cache-retention-interval must be a whole number or None, got {text!r}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Setup(Options):
    """One simulated machine, checked.

    An option that is None gets vLLM's value on that GPU; only of `prefix_cache_retention_interval` None is
    itself a value. Raises ConfigError.
    """

    GROUP = "the machine"

    gpu: str = option("H100", f"the GPU to simulate: {', '.join(GPUS)}", metavar="NAME")
    model: str = option("llama-3.1-8b", "a bundled model, or a Hugging Face config.json", metavar="NAME|FILE")
    policy: str = "stock"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The policy's own options."""
    tp: int = option(1, "GPUs that share the model", minimum=1)
    dtype: str | None = option(
        None,
        "load the weights as float16, bfloat16 or fp8",
        metavar="NAME",
        shown_default="as the model's config says",
    )
    kv_cache_dtype: str | None = option(
        None, "type of the KV cache, e.g. fp8", metavar="NAME", shown_default="the model's"
    )
    step_cost: str | None = option(
        None,
        "how long steps take: tables (measured; aiconfigurator-core must be installed), roofline, or a file "
        "that `tenuto profile` wrote; optimistic or pessimistic, alone or as tables/pessimistic: other "
        "assumptions on steps that mix prefill with decoding",
        metavar="NAME|FILE",
        shown_default="tables where there are some, else roofline",
    )
    step_cost_factor: float = option(
        1.0, "multiply the time of every step by X, to see what an error of the model would change", above=0
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of the GPU's memory for weights and KV cache, as in vLLM",
        metavar="SHARE",
        above=0,
        maximum=1,
        shown_default="0.9",
    )
    kv_tokens: int | None = option(
        None,
        "size of the KV cache, instead of what the memory holds (where windows slide: of all layer groups "
        "together)",
        minimum=1,
    )
    host_gb: float | None = option(
        None,
        "host memory for offloaded KV",
        metavar="GIB",
        minimum=0,
        shown_default="that of the machine with this GPU in the published sweeps",
    )
    disk_gb: float = option(0.0, "disk behind the host memory", metavar="GIB", minimum=0)
    offload: Literal["none", "async", "sync", "serial", "asked"] | None = option(
        None,
        "copy KV to host memory beside the steps (async), while each step waits (sync), loads before and "
        "stores after each step's computation (serial), or when the policy says so (asked)",
        shown_default="what the policy wants",
    )
    offload_chunk_tokens: int = option(
        256,
        "tokens that are copied as one piece, whole blocks: 256 in LMCache, a block in vLLM's own connector "
        "(and always, where layers have windows or states)",
        minimum=1,
    )
    link_gb_s: float | None = option(
        None,
        "bandwidth between GPU and host memory, 1e9 bytes a second",
        flag="--link-gb-s",
        metavar="GB/S",
        above=0,
        shown_default="that of the GPU",
    )
    max_num_batched_tokens: int | None = option(
        None, "most tokens in a step, as in vLLM", minimum=1, shown_default="vLLM's for this GPU"
    )
    step_tokens: StepTokens | None = option(
        None,
        "most tokens in a step, within that budget: a number, or adaptive, which chooses it for each step",
        metavar="adaptive|N",
        read=read_step_tokens,
        shown_default="what the policy wants: adaptive for tenuto, the whole budget for others",
    )
    keep_kv: bool = option(
        True, "let the policy keep KV: by leases, and in the tiers and the size of the cache that it wants"
    )
    max_num_seqs: int | None = option(
        None, "most requests that run at a time, as in vLLM", minimum=1, shown_default="vLLM's for this GPU"
    )
    max_model_len: int | None = option(
        None, "longest prompt with its answer, in tokens", minimum=1, shown_default="the model's"
    )
    block_size: int = option(16, "tokens in a KV block", minimum=1)
    prefix_cache_retention_interval: int | None = option(
        0,
        "how often the end of a sliding window is cached, in tokens, as in vLLM; 0: where a prompt ends and "
        "where prompts part; None: at every block",
        metavar="N|None",
        read=_read_interval,
        minimum=0,
    )
    long_prefill_token_threshold: int | None = option(
        None, "most tokens of one prompt in a step, as in vLLM; 0: no limit", minimum=0, shown_default="0"
    )
    watermark: float | None = option(
        None,
        "share of the KV blocks that starting a request leaves free, as in vLLM",
        metavar="SHARE",
        minimum=0,
        below=1,
        shown_default="0",
    )
    async_scheduling: bool = option(True, "schedule a step while another one runs, as vLLM does by default")
    limits: Literal["published", "plugin"] = option(
        "published",
        "published: a lease whose policy says so yields only when nothing else could run; plugin: every "
        "lease yields to an allocation, as inside vLLM",
    )

    fleet: Fleet | None = None
    """Several engines behind a router instead of one; each is as the other options say."""

    def __post_init__(self) -> None:
        """Check the bounds, and that the KV cache holds at least two blocks."""
        super().__post_init__()
        check_step_tokens(self.step_tokens, "--step-tokens")
        if self.kv_tokens is not None and self.kv_tokens < 2 * self.block_size:
            raise ConfigError(
                f"--kv-tokens must be at least {2 * self.block_size}, two blocks; got {self.kv_tokens}"
            )
