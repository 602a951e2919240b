"""How much KV cache a machine has, how much of it a job takes, and how many jobs fit; no simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.windows import STATE, count_tail_blocks, get_window
from tenuto.sim.cost.batch import split_prompt
from tenuto.sim.hardware.gpus import GIB
from tenuto.sim.hardware.kv_budget import KvBudget
from tenuto.sim.hardware.models import KvGroup
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.machine import Machine, build, get_kv_budget
from tenuto.sim.setup import Setup


@dataclass(frozen=True)
class Group(KvGroup):
    """Layers that share one block table. Bytes are of one GPU."""

    bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class Context:
    """A job with this many tokens of context, its last answer included."""

    num_tokens: int
    blocks_running: int
    """Blocks while a turn runs."""
    blocks_leased: int
    """Blocks that a lease holds during a tool call: full blocks, and of a sliding window those that it still
    covers. By default vLLM caches windows at the end of the prompt. Then the last answer's blocks are not
    held."""
    leased_bytes: int
    """Bytes of these blocks on one GPU."""
    leased_share: float
    """Their share of the KV cache."""
    jobs_leased: int
    """How many such leases the KV cache holds, with nothing running."""
    jobs_running: int
    """How many such turns run at a time: bound by the KV cache or by `max_num_seqs`."""
    compute_s: float
    """Seconds to compute the context again, with nothing else running."""
    load_s: float | None
    """Seconds to load it from host memory over an idle link; None for hybrid models."""
    jobs_in_host: int | None
    """How many such contexts the host memory holds; None without host memory."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What uses the memory of a machine."""

    gpu: str
    model: str
    tp: int
    dtype: str
    kv_cache_dtype: str
    source: str
    """The source of the size of the KV cache."""
    block_size: int
    num_blocks: int
    kv_bytes: int
    """Of one GPU."""
    kv_tokens: int
    """Tokens that the KV cache holds; where windows slide, of all layer groups together."""
    max_model_len: int
    max_num_seqs: int
    host_bytes: int
    """Host memory for KV, of all GPUs together; 0 if none is given."""
    step_cost: str
    budget: KvBudget | None
    """The computed parts; None if the size was given. A server that reported its own size had other parts."""
    groups: tuple[Group, ...]
    contexts: tuple[Context, ...]
    notes: tuple[str, ...]

    @property
    def is_computed(self) -> bool:
        """Whether the size of the KV cache is what the computed parts leave."""
        return self.budget is not None and self.budget.num_blocks(self.block_size) == self.num_blocks

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self)
        if self.budget is not None:
            values["budget"]["kv_bytes"] = self.budget.kv_bytes
        return values


_CONTEXTS = (8_000, 30_000, 100_000)


def measure_memory(setup: Setup, contexts: tuple[int, ...] | None = None) -> Memory:
    """What uses a machine's memory, and what jobs of these contexts take. Raises ConfigError.

    Without contexts: short, middle and long ones, as far as the model takes them.
    """
    machine = build(replace(setup, policy="stock", offload="none"))
    kv = machine.make_scheduler().kv
    model, tp = machine.model, setup.tp
    token_bytes = model.kv_bytes_per_token_per_layer(tp)
    groups = tuple(
        Group(group.num_layers, group.window, group.num_layers * token_bytes) for group in model.kv_groups()
    )
    budget = get_kv_budget(setup, machine.gpu, model) if setup.kv_tokens is None else None
    num_blocks, block_size = machine.config.kv.num_blocks, machine.config.kv.block_size
    memory = Memory(
        gpu=machine.gpu.name,
        model=model.name,
        tp=tp,
        dtype=model.attention_dtype,
        kv_cache_dtype=model.kv_cache_dtype,
        source=_get_source(budget, num_blocks, block_size),
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_size * groups[0].bytes_per_token,
        kv_tokens=num_blocks * block_size,
        max_model_len=machine.config.kv.max_model_len,
        max_num_seqs=machine.config.max_num_seqs,
        host_bytes=int((setup.host_gb or 0.0) * GIB),
        step_cost=machine.step_cost_name,
        budget=budget,
        groups=groups,
        contexts=(),
        notes=(*machine.notes, *_find_refusals(machine, kv)),
    )
    if contexts is None:
        contexts = tuple(sorted({min(each, memory.max_model_len) for each in _CONTEXTS}))
    return replace(memory, contexts=tuple(_measure_context(memory, machine, kv, each) for each in contexts))


def _find_refusals(machine: Machine, kv: KvCache) -> Iterator[str]:
    """Notes about lengths with which vLLM does not start, although they can be simulated."""
    longest, of_model, fitting = kv.config.max_model_len, machine.model.max_model_len, kv.count_most_tokens()
    if longest > of_model:
        yield (
            f"vLLM refuses --max-model-len {longest}, unless its --hf-overrides scale the positions: "
            f"{machine.model.name} has {of_model:,}"
        )
    if fitting < longest:
        yield (
            f"vLLM does not start: a request of {longest:,} tokens must fit, and the KV cache holds "
            f"{fitting:,}; add --max-model-len {fitting} or less"
        )


def _get_source(budget: KvBudget | None, num_blocks: int, block_size: int) -> str:
    if budget is None:
        return "as given"
    if budget.num_blocks(block_size) == num_blocks:
        return "computed from the memory, as vLLM does"
    return "as a server with this GPU and model reported it"


def _measure_context(memory: Memory, machine: Machine, kv: KvCache, num_tokens: int) -> Context:
    if num_tokens > memory.max_model_len:
        raise ConfigError(
            f"--context {num_tokens}: {memory.model} takes {memory.max_model_len} tokens at most"
        )
    running, most = kv.count_most_blocks(num_tokens), machine.config.max_num_batched_tokens
    # The last token of an answer is never computed, and a lease holds full blocks only.
    full = (num_tokens - 1) // memory.block_size
    windows = [get_window(group.window) for group in memory.groups]
    leased = sum(
        full if window is None else min(full, count_tail_blocks(window, memory.block_size))
        for window in windows
    )
    leased_bytes = leased * memory.block_size * memory.groups[0].bytes_per_token
    usable = memory.num_blocks - 1  # the null block
    # What a tier keeps of a window depends on where hits may end. Only a simulation shows that.
    is_uniform = all(group.window is None for group in memory.groups)
    host_bytes = memory.host_bytes // memory.tp if is_uniform else 0
    return Context(
        num_tokens=num_tokens,
        blocks_running=running,
        blocks_leased=leased,
        leased_bytes=leased_bytes,
        leased_share=leased / usable,
        jobs_leased=usable // leased if leased else 0,
        jobs_running=min(usable // running, memory.max_num_seqs),
        compute_s=sum(map(machine.step_cost.seconds, split_prompt(num_tokens, most))),
        load_s=machine.link.get_done_s(leased_bytes, 0.0) if is_uniform else None,
        jobs_in_host=host_bytes // leased_bytes if host_bytes and leased_bytes else None,
    )


def format_memory(memory: Memory) -> str:
    """The budget, the layer groups, and a row for each context."""
    gpus = f"{memory.tp} × {memory.gpu}" if memory.tp > 1 else memory.gpu
    lines = [f"{memory.model} on {gpus}: weights {memory.dtype}, KV cache {memory.kv_cache_dtype}", ""]
    if memory.is_computed and memory.budget is not None:
        lines += [f"{memory.budget.explain()}{'  (of each GPU)' if memory.tp > 1 else ''}", ""]
    lines += [
        f"KV cache {memory.source}: {memory.kv_bytes / GIB:.2f} GiB of each GPU,",
        f"{memory.num_blocks:,} blocks of {memory.block_size} tokens, {memory.kv_tokens:,} tokens",
        *_format_computed(memory),
        *(_format_groups(memory)),
        "",
        f"{'context':>9} {'running':>9} {'leased':>9} {'GiB':>7} {'share':>7} {'leases':>8} {'run at':>8} "
        f"{'compute':>9} {'load':>9} {'in host':>8}",
        f"{'tokens':>9} {'blocks':>9} {'blocks':>9} {'':>7} {'of KV':>7} {'that fit':>8} {'a time':>8} "
        f"{'again':>9} {'from host':>9} {'memory':>8}",
        *(_format_context(context) for context in memory.contexts),
        "",
        "A lease holds a job's cache during its tool call. It gives blocks back when running turns need",
        "them.",
        f"Times: one job alone, step times from the {memory.step_cost}; loads over an idle link.",
        *(f"note: {note}" for note in memory.notes),
    ]
    if memory.groups[1:]:
        lines.append(
            "Layers differ: blocks of all groups come from one pool. Of a sliding window, a lease holds the "
            "blocks that the next token sees. What host memory is worth to them, only a simulation tells."
        )
    return "\n".join(lines)


def _format_computed(memory: Memory) -> list[str]:
    """What is estimated in a computed size; or the computed size, where a server reported another."""
    if memory.budget is None:
        return []
    if memory.is_computed:
        # Where layers differ, the log counts tokens of the longest requests, not of blocks.
        where = (
            "num_gpu_blocks x block_size on its page /metrics"
            if memory.groups[1:]
            else 'the line "GPU KV cache size" of its log'
        )
        return [
            "CUDA graphs are an estimate: vLLM measures them at its start. A server's own KV cache is in",
            f"{where}: give it with --kv-tokens",
        ]
    option = f"--gpu-memory-utilization {memory.budget.utilization:g}"
    return [f"({option} would compute {memory.budget.kv_bytes / GIB:.2f} GiB instead)"]


def _format_groups(memory: Memory) -> list[str]:
    lines = []
    for group, count in Counter(memory.groups).items():
        groups = f"{count} groups of " if count > 1 else ""
        size = f"{group.bytes_per_token / 1024:g} KiB a token on each GPU"
        if group.window == STATE:
            attention, size = "a recurrent state", "a block for each state"
        elif group.window is None:
            attention = "full attention"
        else:
            attention = f"a window of {group.window:,} tokens"
        lines.append(f"  {groups}{group.num_layers} layers, {attention}: {size}")
    return lines


def _format_context(context: Context) -> str:
    load = "–" if context.load_s is None else f"{context.load_s:.3f} s"
    host = "–" if context.jobs_in_host is None else f"{context.jobs_in_host:,}"
    return (
        f"{context.num_tokens:>9,} {context.blocks_running:>9,} {context.blocks_leased:>9,} "
        f"{context.leased_bytes / GIB:>7.2f} {context.leased_share:>7.1%} {context.jobs_leased:>8,} "
        f"{context.jobs_running:>8,} {f'{context.compute_s:.2f} s':>9} {load:>9} {host:>8}"
    )
