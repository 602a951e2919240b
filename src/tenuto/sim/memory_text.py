"""Where a machine's memory goes, as text."""

from __future__ import annotations

from collections import Counter

from tenuto.core.windows import STATE
from tenuto.sim.hardware.gpus import GIB
from tenuto.sim.memory import Context, Memory


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
    """Where a server reported another size than is computed, the computed one, and how to get it."""
    if memory.budget is None or memory.is_computed:
        return []
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
