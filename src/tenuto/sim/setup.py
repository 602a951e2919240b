"""What is simulated: the options of a machine, and of a fleet of them, the same in every command."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal, get_args

from tenuto.core.engine import StepTokens, check_step_tokens, read_step_tokens
from tenuto.core.errors import ConfigError
from tenuto.core.settings import MAX_TIER_GB, Options, get_flag, option, parse_policy_options
from tenuto.sim.hardware.gpus import GPUS, get_gpu


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

    An option that is None gets vLLM's value on that GPU. The exception is `prefix_cache_retention_interval`,
    where None is itself a value. Raises ConfigError.
    """

    GROUP = "the machine"

    gpu: str = option("H100", f"the GPU to simulate: {', '.join(GPUS)}", metavar="NAME")
    model: str = option("llama-3.1-8b", "a bundled model, or a Hugging Face config.json", metavar="NAME|FILE")
    policy: str = "stock"
    options: Mapping[str, Any] = field(default_factory=dict)
    tp: int = option(1, "GPUs that share the model", minimum=1)
    dtype: str | None = option(
        None,
        "load the weights as float16, bfloat16 or fp8; with the first two, as in vLLM, weights that the "
        "checkpoint quantises stay as they are",
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
        1.0,
        "multiply the time of every step by X, to see what an error of the model would change",
        above=0,
        maximum=1e6,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of the GPU's memory for weights and KV cache, as in vLLM",
        metavar="SHARE",
        above=0,
        maximum=1,
        shown_default="0.92",
    )
    kv_tokens: int | None = option(
        None,
        "size of the KV cache, instead of what the memory holds (where windows slide: of all layer groups "
        "together)",
        minimum=1,
    )
    host_gb: float | None = option(
        None,
        "host memory for the KV of policies that use some; simulate and estimate then give stock vLLM's own",
        metavar="GIB",
        minimum=0,
        maximum=MAX_TIER_GB,
        shown_default="none; with --offload, and for LMCache, that of the published machine with this GPU",
    )
    disk_gb: float = option(0.0, "disk below the host memory", metavar="GIB", minimum=0, maximum=MAX_TIER_GB)
    offload: Literal["none", "async", "sync", "serial", "asked", "native"] | None = option(
        None,
        "copy KV to host memory beside the steps (async), while each step waits (sync), loads before and "
        "stores after each step's computation (serial), or when the policy says so (asked); native: vLLM's "
        "own host memory, beside the steps and with the order of eviction of --vllm, whatever the policy",
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
        "most tokens in a step, within that budget: a number, or adaptive, which chooses it for each step; "
        "adaptive:X weighs a second of a prompt's wait X times as much as one of a decoding turn (1)",
        metavar="adaptive[:X]|N",
        read=read_step_tokens,
        shown_default="what the policy wants: adaptive for tenuto, the whole budget for others",
    )
    keep_kv: bool = option(
        True, "let the policy keep KV by leases and in tiers, and set the size of the cache"
    )
    max_num_seqs: int | None = option(
        None, "most requests that run at a time, as in vLLM", minimum=1, shown_default="vLLM's for this GPU"
    )
    max_model_len: int | None = option(
        None, "longest prompt with its answer, in tokens", minimum=2, shown_default="the model's"
    )
    block_size: int = option(16, "tokens in a KV block", minimum=1)
    prefix_cache_retention_interval: int | None = option(
        0,
        "how often the end of a sliding window is cached, in tokens, as in vLLM; 0: where a prompt ends and "
        "where two prompts first differ; None: at every block",
        metavar="N|None",
        read=_read_interval,
        minimum=0,
    )
    long_prefill_token_threshold: int | None = option(
        None, "most tokens of one prompt in a step, as in vLLM; 0: no limit", minimum=0, shown_default="0"
    )
    vllm: Literal["0.32", "0.33"] = option(
        "0.32",
        "the release whose scheduler and own host memory are simulated, step by step, and whose start-up "
        "leaves the KV cache its size",
        flag="--vllm",
        choices=("0.32", "0.33"),
    )
    prefill_schedule_interval: int = option(
        1,
        "while requests decode, compute prompts in one of N steps only, as in vLLM 0.33 (with --vllm 0.33)",
        metavar="N",
        minimum=1,
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
    read_tool_calls: bool = option(
        True,
        "recognise tool calls in answers; without, tools are known from hints alone, as with clients whose "
        "format of calls the engine does not know",
    )
    limits: Literal["published", "plugin"] = option(
        "published",
        "published: a lease whose policy says so yields only when nothing else could run; plugin: every "
        "lease yields to an allocation, as inside vLLM",
    )

    fleet: Fleet | None = None
    """Several engines behind a router instead of one. The other options describe each of them."""

    @property
    def router(self) -> str | None:
        """The router's name; None for one engine."""
        return None if self.fleet is None else self.fleet.router

    @property
    def at_router(self) -> str:
        """What a policy's name is followed by: `@round-robin`; nothing for one engine."""
        return "" if self.fleet is None else f"@{self.fleet.router}"

    @property
    def engine_gpus(self) -> tuple[str, ...]:
        """The GPU of each engine."""
        return (self.gpu,) if self.fleet is None else tuple(gpu or self.gpu for gpu in self.fleet.servers)

    @property
    def gpu_names(self) -> str:
        """The GPUs of all engines: `H100` for one engine, else `4xH100`, or `2xH100+4xL40S`."""
        if self.fleet is None:
            return self.gpu
        return "+".join(f"{count}x{name}" for name, count in Counter(self.engine_gpus).items())

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "gpu", get_gpu(self.gpu).name)  # it may be in lower case
        check_step_tokens(self.step_tokens, "--step-tokens")
        if self.prefill_schedule_interval > 1 and self.vllm == "0.32":
            raise ConfigError(
                "--prefill-schedule-interval acts on one engine since vLLM 0.33: add --vllm 0.33"
            )
        if (self.max_num_batched_tokens or math.inf) < (self.max_num_seqs or 0):
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs, as in vLLM; got "
                f"{self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        if self.kv_tokens is not None and self.kv_tokens < 2 * self.block_size:
            raise ConfigError(
                f"--kv-tokens must be at least {2 * self.block_size}, two blocks; got {self.kv_tokens}"
            )


def write_options(setup: Setup) -> list[str]:
    """A setup as words of a command line: what is not the default, without the GPU and the model."""
    words = []
    for each in fields(setup):
        value = getattr(setup, each.name)
        if not each.metadata.get("is_option") or each.name in ("gpu", "model") or value == each.default:
            continue
        flag = get_flag(each)
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            words += [flag, str(value).removesuffix(".0") if isinstance(value, float) else str(value)]
    return words


# Fleets.

IDEAL = "ideal"
"""In place of a router's name: the yardstick (`tenuto.sim.fleet`)."""
MAX_SERVERS = 4096


def read_servers(text: str) -> tuple[str, ...]:
    """The GPU of each engine, "" for that of --gpu: from `4`, or from `H100:2,L40S`. Raises ConfigError."""
    gpus: list[str] = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = ("", part) if part.strip().isdecimal() else (part, "1" if part.strip() else "")
        if not count.strip().isdecimal() or not 1 <= int(count) <= MAX_SERVERS:
            raise ConfigError(
                f"--servers wants a number of engines (1 to {MAX_SERVERS}), or GPU:NUMBER,…, for example "
                f"H100:2,L40S:4; got {text!r}"
            )
        gpus += [get_gpu(name.strip()).name if name.strip() else ""] * int(count)
    if len(gpus) > MAX_SERVERS:
        raise ConfigError(f"--servers: at most {MAX_SERVERS} engines, got {len(gpus)}")
    return tuple(gpus)


def write_servers(gpus: Sequence[str]) -> str:
    """The text that `read_servers` reads as these GPUs."""
    runs = ((gpu, len(list(same))) for gpu, same in groupby(gpus))
    return ",".join(f"{gpu}:{number}" if gpu else str(number) for gpu, number in runs)


Kind = Literal["die", "drain", "join", "rejoin", "restart"]
_OF_AN_ENGINE = ("die", "drain", "rejoin")
_FORM = re.compile(r"(?P<kind>[a-z]+)(?::(?P<what>[^@]*))?@(?P<at_s>[0-9.eE+-]+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong in a fleet."""

    at_s: float
    kind: Kind
    what: str = ""
    """die, drain and rejoin: the engine's name; join: its GPU, or empty for the first engine's."""

    def __str__(self) -> str:
        return f"{self.kind}{':' + self.what if self.what else ''}@{self.at_s:g}"


def read_fault(text: str) -> Fault:
    """A fault from its text, such as `die:2@30`. Raises ConfigError."""
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in get_args(Kind):
        raise ConfigError(
            "--fault wants die:ENGINE@S, drain:ENGINE@S, rejoin:ENGINE@S, join@S, join:GPU@S or restart@S, "
            f"got {text!r}"
        )
    kind, what = match["kind"], match["what"] or ""
    if (kind in _OF_AN_ENGINE) != bool(what) and kind != "join":
        raise ConfigError(
            f"--fault {text}: die, drain and rejoin name an engine (0, 1, …), restart names none"
        )
    try:
        at_s = float(match["at_s"])
    except ValueError:
        raise ConfigError(f"--fault {text}: {match['at_s']!r} is not a time in seconds") from None
    if not 0 <= at_s < float("inf"):
        raise ConfigError(f"--fault {text}: the time must be 0 or more")
    return Fault(at_s, kind, what)  # type: ignore[arg-type]  # checked above


@dataclass(frozen=True, kw_only=True)
class FleetOptions(Options):
    """Several engines behind a router, checked. Raises ConfigError."""

    GROUP = "the fleet"

    servers: tuple[str, ...] = option(
        (),
        "several engines behind a router: how many, or unlike ones, for example H100:2,L40S:4; each with its "
        "own scheduler, policy and KV cache",
        metavar="N|GPU:N,…",
        read=read_servers,
        shown_default="one engine, no router",
    )
    router: str = option(
        "tenuto",
        "where turns go: a router's name (see docs/fleet.md), or file.py:Class; ideal: the yardstick, "
        "engines that share one queue and all KV at no cost. compare takes several, with commas",
        metavar="NAME",
        shown_default="tenuto with --servers, else no router",
    )
    router_options: tuple[str, ...] = option(
        (),
        "a router's option; may be repeated, and be for one router alone",
        flag="--router-option",
        metavar="[ROUTER:]KEY=VALUE",
        is_repeatable=True,
    )
    metrics_s: float = option(
        1.0, "the router reads the engines' metrics every S seconds", flag="--metrics-every", above=0
    )
    copy_gb_s: float | None = option(
        None,
        "bandwidth between two engines, 1e9 bytes a second, for KV of jobs that move",
        flag="--copy-gb-s",
        metavar="GB/S",
        above=0,
        shown_default="KV is not copied, but computed again",
    )
    faults: tuple[Fault, ...] = option(
        (),
        "what goes wrong after S seconds; may be repeated: die:ENGINE@S, drain:ENGINE@S (by number, from 0), "
        "rejoin:ENGINE@S (after either), join@S or join:GPU@S (one more), restart@S (the router loses its "
        "memory)",
        flag="--fault",
        metavar="WHAT@S",
        is_repeatable=True,
        read=lambda texts: tuple(map(read_fault, texts)),
    )

    def make_fleets(self) -> list[Fleet | None]:
        """A fleet for each router; only None without --servers. Raises ConfigError."""
        if not self.servers:
            for each in fields(self):
                if getattr(self, each.name) != each.default:
                    raise ConfigError(f"{get_flag(each)} is for several engines: say --servers too")
            return [None]
        faults = tuple(map(str, self.faults))
        names = [name.strip() for name in self.router.split(",") if name.strip()]
        if not names:
            raise ConfigError("--router is empty")
        return [
            Fleet(
                servers=self.servers,
                router=name,
                router_options=parse_policy_options(self.router_options, name, names),
                metrics_s=self.metrics_s,
                copy_gb_s=self.copy_gb_s,
                faults=faults,
            )
            for name in names
        ]

    def make_fleet(self) -> Fleet | None:
        """The one fleet; None without --servers. Raises ConfigError, for several routers too."""
        fleets = self.make_fleets()
        if len(fleets) > 1:
            raise ConfigError("--router: one, please; `tenuto compare` takes several")
        return fleets[0]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The options of a setup with several engines: see `FleetOptions`."""

    servers: tuple[str, ...]
    router: str = "tenuto"
    router_options: Mapping[str, Any] = field(default_factory=dict)
    metrics_s: float = 1.0
    copy_gb_s: float | None = None
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("a fleet needs an engine")
        if self.router == IDEAL and (self.faults or len(set(self.servers)) > 1 or self.router_options):
            raise ConfigError("--router ideal: for engines of one kind that do not fail, and without options")
