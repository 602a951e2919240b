"""Commands on one simulated machine: `simulate`, `serve --engine sim`, `memory`; and what others share."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tenuto.cli.command import Command, Given, Part, needing, policy_options
from tenuto.core.console import Progress, count
from tenuto.core.errors import ConfigError
from tenuto.core.loader import load_policy
from tenuto.core.settings import Options, option, parse_policy_options
from tenuto.sim.hardware.gpus import GPUS
from tenuto.sim.server import ServerOptions
from tenuto.sim.setup import FleetOptions, Setup
from tenuto.workload.load import LoadOptions


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """The options of one policy."""

    GROUP = "the policy"

    policy: str = option("tenuto", "see `tenuto policies`, or file.py:Class", metavar="NAME")
    options: tuple[str, ...] = policy_options(
        "a policy's option; may be repeated, and be for one policy alone"
    )

    def read_setup(self, given: Given) -> Setup:
        """The setup of the machine with this policy."""
        options = parse_policy_options(self.options, self.policy)
        fleet = given.read(FleetOptions).make_fleet()
        return given.read(Setup, policy=self.policy, options=options, fleet=fleet)


@dataclass(frozen=True, kw_only=True)
class GridOptions(Options):
    """The options of a grid: every kind of GPU with every policy."""

    GROUP = "what is compared"

    gpus: tuple[str, ...] = option(
        MISSING, f"the GPUs to simulate, of {', '.join(GPUS)}", flag="--gpu", metavar="A,B,…"
    )
    policies: tuple[str, ...] = option(
        MISSING, "see `tenuto policies`, or file.py:Class", metavar="A,B,…", alias="--policy"
    )
    options: tuple[str, ...] = policy_options(
        "a policy's option; may be repeated, and be for one policy alone"
    )

    def read_setups(self, given: Given, **known: Any) -> list[Setup]:
        """A machine for each GPU and policy, or a fleet for each of them with each router.

        `known`: options of the fleet that are not from the command line.
        """
        fleets = given.read(FleetOptions, **known).make_fleets()
        options = {
            policy: parse_policy_options(self.options, policy, self.policies) for policy in self.policies
        }
        setups: dict[Any, Setup] = {}
        for gpu, policy, number in itertools.product(self.gpus, self.policies, range(len(fleets))):
            setup = given.read(Setup, gpu=gpu, policy=policy, options=options[policy], fleet=fleets[number])
            if setup.gpu not in setup.engine_gpus:
                raise ConfigError(f"--gpu {gpu}: --servers names no such GPU; leave it out")
            # A fleet whose GPUs have names is the same for each of them.
            setups.setdefault((setup.engine_gpus, policy, number), setup)
        return list(setups.values())


def say_notes(notes: Iterable[str]) -> None:
    """Print the notes about the machines, each once."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr, flush=True)


_OF_STOCK = (
    *("job_s", "slowdown", "ttft_s", "reused_tokens", "reusable_tokens", "recomputed_tokens"),
    *("offered_jps", "finished_jps", "step_cost"),
)
"""The fields of stock's run in JSON and CSV."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """The options of the result."""

    GROUP = "the result"

    out: Path | None = option(None, "write result, turns and occupancy here", metavar="DIR", is_written=True)
    trace: Path | None = option(None, "write every step, job and decision, as a server's trace (JSONL)")
    as_json: bool = option(False, "print the record as JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write the result as a row of CSV too", is_written=True)
    ledger: Path | None = option(
        None, "write what each job and tenant used as CSV, as `tenuto ledger` does", is_written=True
    )
    beside_stock: bool = option(
        True, "also run stock as shipped on the same load, and say what it would do; one more run"
    )
    strict: bool = option(False, "stop with an error when the policy raises or gives a wrong answer")


def _run_simulate(given: Given) -> int:
    from tenuto.records.text import format_beside, format_run, print_text, write_csv
    from tenuto.records.trace import TraceOptions, TraceWriter
    from tenuto.sim.compare import make_stock
    from tenuto.sim.fidelity import get_error
    from tenuto.sim.run import GC_THRESHOLD, Extras, Occupancy, check_replaceable, run, write_run

    gc.set_threshold(*GC_THRESHOLD)
    options = given.read(SimulateOptions)
    setup = given.read(PolicyOptions).read_setup(given)
    load = given.read(LoadOptions)
    if options.out:
        check_replaceable(options.out)
    occupancy = Occupancy() if options.out else None
    watch = occupancy if setup.fleet is None else None  # several engines have no common KV cache
    policy = load_policy(setup.policy, setup.options)
    # The commands are in the workload's own file, so hiding them here would hide nothing.
    whole = TraceOptions(commands="full")
    trace = TraceWriter(str(options.trace), policy, setup.policy, whole) if options.trace else None
    progress = Progress()
    try:
        log = trace.write if trace else None
        extras = Extras(
            strict=options.strict,
            tell=_make_tell(progress, ""),
            trace=trace,
            keeps_ledger=options.ledger is not None,
        )
        outcome = run(setup, load, extras=extras, watch=watch, log=log)
    finally:
        progress.clear()
        if trace:
            trace.close()
    record = outcome.record
    say_notes(record["notes"])
    error = get_error(record["gpu"], record["policy"], record["step_cost"])
    table = options.ledger if str(options.ledger) == "-" else options.csv
    try:
        if not options.as_json:
            print_text(f"{format_run(record)}\nknown error  of mean job times like these: {error}", table)
        record = {**record, "known_error": error.to_json()}
        shipped = make_stock(replace(setup, step_tokens=None, keep_kv=True))
        if options.beside_stock and setup != shipped:
            with progress.cleared():
                extras = Extras(tell=_make_tell(progress, "stock, to compare with: "))
                stock = run(shipped, load, extras=extras).record
            record = {**record, "stock": {name: stock[name] for name in _OF_STOCK}}
            if not options.as_json:
                print_text(format_beside(record, stock), table)
        if options.as_json:
            print(json.dumps(record))
    finally:
        # Where the text goes may be closed already (`| head`), or the user waits no longer for stock.
        if options.out and occupancy:
            write_run(options.out, outcome, occupancy)
        if options.ledger:
            from tenuto.client.control import join_ranks

            write_csv(options.ledger, join_ranks(outcome.ledgers)[0], without=())
        if options.csv:
            write_csv(options.csv, [record])
    if trace and trace.has_failed:
        raise ConfigError(f"--trace {options.trace} ends early: it could not be written")
    return 0


def _make_tell(progress: Progress, what: str) -> Callable[[float, int, int], None]:
    def tell(now_s: float, num_done: int, num_turns: int) -> None:
        progress.tell(
            lambda: f"{what}{now_s:.0f} s simulated, {num_done} of {count(num_turns, 'turn')} finished"
        )

    return tell


SIMULATE = Command(
    summary="""\
Run one workload on one simulated GPU: vLLM's scheduler decision by decision, GPU time from measured tables.
It needs no GPU and no vLLM.
""",
    examples="""\
  tenuto simulate --gpu H200 --policy continuum-fixed --jps 6
  tenuto simulate --gpu H100 --policy tenuto --workload sessions/ --jps 0.05 --out runs/mine
  tenuto simulate --gpu A100-80 --policy stock --offload async --host-gb 200 --workload swe-bench --jps 1
""",
    options=(Part(PolicyOptions), Part(LoadOptions), Part(FleetOptions), Part(Setup), Part(SimulateOptions)),
    run=_run_simulate,
    notes="""\
It prints the result, and next to it the result of stock as shipped on the same load, unless --no-beside-stock
is given. With --host-gb, that stock has vLLM's own host memory, of the same size. If stock's steps are too
large, a smaller step size may gain as much: `tenuto compare` shows it.
With --out DIR it also writes every turn (turns.jsonl) and the KV cache over time (occupancy.jsonl), for
`tenuto report` and `tenuto analyze`.
""",
    main=("gpu", "model", "policy", "workload", "jps", "window_s", "seed", "out", "as_json", "beside_stock"),
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Which engine."""

    engine: Literal["sim"] = option(MISSING, "the simulated engine")


def _run_serve_sim(given: Given) -> int:
    from tenuto.sim.machine import build

    given.read(EngineOptions)
    policy = given.read(PolicyOptions)
    options = given.read(ServerOptions)
    with needing("sim"):
        from tenuto.sim.server.app import run_server
    return run_server(build(policy.read_setup(given)), options)


SERVE_SIM = Command(
    summary="""\
Serve a simulated engine behind an OpenAI-compatible server, as vLLM would serve a real one.
It is for tests of clients, routers and benchmarks without a GPU. The model's answers are made up.
""",
    examples="""\
  tenuto serve --engine sim --gpu H200 --model llama-3.1-8b --policy continuum-fixed
      in real time, on port 8000; then: tenuto verify --url http://localhost:8000
  tenuto serve --engine sim --gpu A100-80 --model qwen3-32b --tp 2 --speed 10
      ten simulated seconds a second; waits of the clients, such as tool calls, do not shrink by themselves
""",
    options=(Part(EngineOptions), Part(PolicyOptions), Part(ServerOptions), Part(Setup)),
    run=_run_serve_sim,
    notes="""\
Scheduler, KV cache and policy are those of `tenuto simulate`. Jobs are known, and hints are read, as in
`tenuto serve MODEL`.

Prompts: text, token ids, or chat messages (text only). The tokenizer is made up too, unless --tokenizer names
a real one.
Answers: words without meaning, as many as `max_tokens` says (without it: 16 in a completion, --answer-tokens
in a chat). A prompt gets the same answer each time at temperature 0 or with a `seed`. `stop` is never met. A
request has one choice.
Tools: one is called when `tool_choice` demands it, or when the request says
"vllm_xargs": {"sim_tool": NAME, "sim_arguments": JSON}, or the headers X-Sim-Tool and X-Sim-Arguments.
""",
    main=(
        *("engine", "policy", "gpu", "model", "host"),
        *("port", "speed", "served_model_name", "api_key", "trace"),
    ),
)


_MEMORY_USES = (
    *("gpu", "model", "tp", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "kv_tokens", "host_gb"),
    *("link_gb_s", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "step_cost"),
    "vllm",
)
"""The machine's options that affect memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """The options of `tenuto memory`."""

    GROUP = "the jobs"

    context: tuple[int, ...] | None = option(
        None,
        "tokens of a job's context: prompt, answers and tools' outputs",
        minimum=1,
        shown_default="8000,30000,100000, or less if the model takes less",
    )
    as_json: bool = option(False, "print JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write a row for each context as CSV too", is_written=True)


def _run_memory(given: Given) -> int:
    from tenuto.records.text import print_text, write_csv
    from tenuto.sim.memory import format_memory, measure_memory

    options = given.read(MemoryOptions)
    memory = measure_memory(given.read(Setup), options.context)
    if options.csv:
        write_csv(options.csv, map(dataclasses.asdict, memory.contexts))
    print_text(json.dumps(memory.to_json()) if options.as_json else format_memory(memory), options.csv)
    return 0


_MEMORY_LEAVES_OUT = tuple(
    field.name for field in dataclasses.fields(Setup) if field.name not in _MEMORY_USES
)

MEMORY = Command(
    summary="""\
Say how much KV cache a GPU has for a model, what a lease on a job's context locks, and how many jobs fit.
It computes what vLLM would do at its start. Nothing is simulated, and no GPU is needed.
""",
    examples="""\
  tenuto memory --gpu H100 --model llama-3.1-8b --context 30000
  tenuto memory --gpu B200 --tp 4 --model llama-3.1-70b --kv-cache-dtype fp8 --context 8000,30000,100000
  tenuto memory --gpu L40S --model gemma-3-12b --context 16000 --json
""",
    options=(Part(MemoryOptions), Part(Setup, without=_MEMORY_LEAVES_OUT)),
    run=_run_memory,
    notes="""\
The size of the KV cache follows vLLM's start-up: the memory that --gpu-memory-utilization allows, less the
weights, the activations, the counts for penalties, what lies outside PyTorch, and CUDA graphs, for which 2 %
of the memory are an estimate. For some GPUs with llama-3.1-8b, it is the size that a server reported, of
which the parts are not known; --gpu-memory-utilization 0.92 computes it there too. Give --kv-tokens to use
the size that your own server's log names.
""",
    main=(
        *("gpu", "model", "context", "tp", "kv_cache_dtype"),
        *("gpu_memory_utilization", "kv_tokens", "max_model_len", "host_gb", "as_json"),
    ),
)
