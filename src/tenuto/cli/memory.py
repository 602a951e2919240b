"""`tenuto memory`: how much KV cache there is, what a lease locks, and how many jobs fit."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part
from tenuto.core.settings import Options, option
from tenuto.sim.setup import Setup

_SUMMARY = """\
Say how much KV cache a GPU has for a model, what a lease on a job's context locks, and how many jobs fit.
It computes what vLLM would do at its start. Nothing is simulated, and no GPU is needed.
"""

_EXAMPLES = """\
examples:
  tenuto memory --gpu H100 --model llama-3.1-8b --context 30000
  tenuto memory --gpu B200 --tp 4 --model llama-3.1-70b --kv-cache-dtype fp8 --context 8000,30000,100000
  tenuto memory --gpu L40S --model gemma-3-12b --context 16000 --json
"""

_NOTES = """\
The size of the KV cache follows vLLM's start-up: the memory that --gpu-memory-utilization allows, less the
weights, the activations and what lies outside PyTorch. For some GPUs with llama-3.1-8b, it is the size that a
server reported, of which the parts are not known; --gpu-memory-utilization 0.9 computes it there too. Give
--kv-tokens to use the size that your own server's log names.
"""

_USED = (
    *("gpu", "model", "tp", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "kv_tokens", "host_gb"),
    *("link_gb_s", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "step_cost"),
)
"""The machine's options that affect memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """The options of `tenuto memory`."""

    GROUP = "the jobs"

    context: tuple[int, ...] = option(
        (8_000, 30_000, 100_000), "tokens of a job's context: prompt, answers and tools' outputs", minimum=1
    )
    as_json: bool = option(False, "print JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write a row for each context as CSV too", is_written=True)


def run(given: Given) -> int:
    """Compute, and print."""
    from tenuto.records.text import write_csv
    from tenuto.sim.memory import format_memory, measure_memory

    options = given.read(MemoryOptions)
    memory = measure_memory(given.read(Setup), options.context)
    if options.csv:
        write_csv(options.csv, map(dataclasses.asdict, memory.contexts))
    print(json.dumps(memory.to_json()) if options.as_json else format_memory(memory))
    return 0


_UNUSED = tuple(field.name for field in dataclasses.fields(Setup) if field.name not in _USED)

MEMORY = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(MemoryOptions), Part(Setup, without=_UNUSED)),
    run,
    notes=_NOTES,
    main=(
        *("gpu", "model", "context", "tp", "kv_cache_dtype"),
        *("gpu_memory_utilization", "kv_tokens", "max_model_len", "host_gb", "as_json"),
    ),
)
