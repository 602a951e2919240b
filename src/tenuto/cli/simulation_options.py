"""The options of `tenuto simulate`, `compare` and `plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.gpus import GPUS, get_gpu
from tenuto.sim.machine import LIMITS, Setup
from tenuto.workload.hints import HINTS
from tenuto.workload.load_options import LoadOptions

_SIMULATE_TEXT = """\
Run one workload on one simulated GPU: vLLM's scheduler decision by decision, GPU time from measured tables.
Prints the result; with --out DIR also every turn (turns.jsonl) and the KV cache over time (occupancy.jsonl).
"""

_SIMULATE_EXAMPLES = """\
examples:
  tenuto simulate --gpu H200 --policy continuum-fixed --jps 6
  tenuto simulate --gpu H100 --policy tenuto --workload sessions/ --jps 0.05 --out runs/mine
  tenuto simulate --gpu A100-80 --policy stock --offload async --host-gb 200 --workload swe-bench --jps 1
"""

_COMPARE_TEXT = """\
Run a sweep: every GPU × policy × load × seed, on all cores. Ends with a table that marks the winner of each
cell; DIR/results.jsonl has a record per run. Runs that are in it already are not run again, so a sweep that
was stopped goes on where it was.
"""

_COMPARE_EXAMPLES = """\
examples:
  tenuto compare --gpu H200 --jps 1,3,6,10,15 --policies stock,continuum-fixed,tenuto --out runs/h200
  tenuto compare --gpu A100-80,H100 --workload swe-bench --window 300 --jps 0.5,1,2 --policies stock,tenuto \\
      --seeds 1,2,3 --out runs/swe
"""


_PLAN_TEXT = """\
Find the fewest GPUs, of which kind and with which policy, that keep the P95 job time within a target. It
searches over the simulator: machines are independent behind a router with session affinity.
"""

_PLAN_EXAMPLES = """\
examples:
  tenuto plan --gpu H100,H200,L40S --workload swe-bench --window 300 --jps 4 --p95 60 --policies stock,tenuto
"""


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """What is simulated; the same names and meanings in every command."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--model", default="llama-3.1-8b", help="a bundled model, or a Hugging Face config.json"
    )
    machine.add_argument(
        "--tp", type=int, default=1, metavar="N", help="GPUs that share the model (default 1)"
    )
    machine.add_argument(
        "--dtype",
        metavar="NAME",
        help="load the weights as float16, bfloat16 or fp8 (default: as its config says)",
    )
    machine.add_argument(
        "--kv-cache-dtype", metavar="NAME", help="of the KV cache, e.g. fp8 (default: the model's)"
    )
    machine.add_argument(
        "--step-cost",
        metavar="NAME|FILE",
        help="how long steps take: tables (measured; the default where the GPU has them and "
        "aiconfigurator-core is installed), roofline, or a file that `tenuto profile` wrote",
    )
    machine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="as vLLM's; sets the KV cache (default 0.9)",
    )
    machine.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="size of the KV cache, instead (of layer groups together, where windows slide)",
    )
    machine.add_argument(
        "--host-gb",
        type=float,
        metavar="GIB",
        help="host memory for offloaded KV (default: the published machine's)",
    )
    machine.add_argument(
        "--disk-gb", type=float, default=0.0, metavar="GIB", help="disk behind it (default none)"
    )
    machine.add_argument(
        "--offload",
        choices=("none", "async", "sync", "asked"),
        help="copy KV to host memory beside the steps, waiting in each step, or when the policy says so "
        "(default: what the policy wants)",
    )
    machine.add_argument(
        "--link-gb-s", type=float, metavar="GB/S", help="bandwidth between GPU and host memory"
    )
    machine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step")
    machine.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests that run at a time")
    machine.add_argument("--max-model-len", type=int, metavar="N")
    machine.add_argument("--long-prefill-token-threshold", type=int, metavar="N")
    machine.add_argument("--async-scheduling", action="store_true", help="schedule a step while one runs")
    machine.add_argument(
        "--limits",
        choices=tuple(LIMITS),
        default="published",
        help="published: a lease whose policy says so yields only when nothing else could run (default); "
        "plugin: every lease yields to an allocation, as inside vLLM",
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """What it is given to do, the load itself apart."""
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--workload",
        default="ab8",
        metavar="NAME|PATH",
        help="ab8, swe-bench, bfcl, or a trace (default ab8)",
    )
    load.add_argument("--window", type=float, metavar="S", help="jobs arrive for so long (default 45 s)")
    load.add_argument("--arrival", default="poisson", metavar="KIND", help="poisson, gamma:CV or fixed")
    load.add_argument(
        "--loop", choices=("closed", "open"), default="closed", help="tool times, or recorded times"
    )
    load.add_argument(
        "--hints",
        default="last",
        choices=tuple(HINTS),
        help="what clients say about a job: nothing, its id, also whether a turn is its last (default), also "
        "the tool's name, also how long the tool will take, or a wrong time",
    )
    load.add_argument(
        "--scale-lengths", type=float, default=1.0, metavar="X", help="multiply all text lengths"
    )
    load.add_argument(
        "--scale-rate", type=float, default=1.0, metavar="X", help="let a trace's jobs come faster"
    )
    load.add_argument("--max-jobs", type=int, metavar="N", help="only the first N jobs and what they start")


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """All of `tenuto simulate`."""
    parser.add_argument("--gpu", default="H100", help=f"one of {', '.join(GPUS)} (default H100)")
    parser.add_argument("--policy", default="tenuto", help="see `tenuto policies` (default tenuto)")
    _add_policy_option(parser)
    parser.add_argument("--jps", type=float, metavar="X", help="jobs arriving per second")
    parser.add_argument("--seed", type=int, default=42)
    add_load_options(parser)
    add_machine_options(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write result, turns and occupancy here")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write every decision with its inputs, as JSONL"
    )
    parser.add_argument("--json", action="store_true", help="print the record instead of text")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """All of `tenuto compare`."""
    parser.add_argument("--gpu", required=True, metavar="A,B,…", help=f"of {', '.join(GPUS)}")
    parser.add_argument("--policies", required=True, metavar="A,B,…", help="see `tenuto policies`")
    _add_policy_option(parser)
    parser.add_argument("--jps", default="", metavar="X,Y,…", help="jobs arriving per second")
    parser.add_argument("--seed", "--seeds", dest="seeds", default="42", metavar="N,M,…")
    add_load_options(parser)
    add_machine_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results.jsonl goes here")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run on a Ray cluster instead (auto: the one around)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """All of `tenuto plan`."""
    parser.add_argument("--gpu", required=True, metavar="A,B,…", help=f"of {', '.join(GPUS)}")
    parser.add_argument("--policies", default="stock,tenuto", metavar="A,B,…", help="(default stock,tenuto)")
    _add_policy_option(parser)
    parser.add_argument(
        "--jps", type=float, required=True, metavar="X", help="jobs arriving per second, in all"
    )
    parser.add_argument("--p95", type=float, required=True, metavar="S", help="P95 job time to keep, seconds")
    parser.add_argument("--max-machines", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--seed", type=int, default=42)
    add_load_options(parser)
    add_machine_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_policy_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="[POLICY:]KEY=VALUE",
        help="a policy's option; may be repeated, and be for one policy alone",
    )


def read_setup(parsed: argparse.Namespace, gpu: str, policy: str) -> Setup:
    """The setup that options name."""
    return Setup(
        gpu=get_gpu(gpu).name,
        model=parsed.model,
        policy=policy,
        options=_read_policy_options(parsed.option, policy),
        tp=parsed.tp,
        dtype=parsed.dtype,
        kv_cache_dtype=parsed.kv_cache_dtype,
        step_cost=parsed.step_cost,
        gpu_memory_utilization=parsed.gpu_memory_utilization,
        kv_tokens=parsed.kv_tokens,
        host_gb=parsed.host_gb,
        disk_gb=parsed.disk_gb,
        offload=parsed.offload,
        link_gb_s=parsed.link_gb_s,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        max_num_seqs=parsed.max_num_seqs,
        max_model_len=parsed.max_model_len,
        long_prefill_token_threshold=parsed.long_prefill_token_threshold,
        async_scheduling=parsed.async_scheduling,
        limits=parsed.limits,
    )


def read_load(parsed: argparse.Namespace, jps: float | None, seed: int) -> LoadOptions:
    """The load that options name."""
    return LoadOptions(
        workload=parsed.workload,
        jps=jps,
        seed=seed,
        window_s=parsed.window,
        arrival=parsed.arrival,
        loop=parsed.loop,
        scale_lengths=parsed.scale_lengths,
        scale_rate=parsed.scale_rate,
        hints=parsed.hints,
        max_jobs=parsed.max_jobs,
    )


def read_list(text: str, kind: Callable[[str], Any], option: str) -> list[Any]:
    """A comma-separated list; raises ConfigError naming the option."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _read_policy_options(given: Sequence[str], policy: str) -> dict[str, Any]:
    options = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option wants KEY=VALUE or POLICY:KEY=VALUE, got {text!r}")
        whose, colon, name = key.rpartition(":")
        if colon and whose != policy:
            continue
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


@dataclass(frozen=True)
class CommandOptions:
    """What one command's help says, and what adds its options; named as in the modules of other commands."""

    DESCRIPTION: str
    EPILOG: str
    add_options: Callable[[argparse.ArgumentParser], None]


SIMULATE = CommandOptions(_SIMULATE_TEXT, _SIMULATE_EXAMPLES, add_simulate_options)
COMPARE = CommandOptions(_COMPARE_TEXT, _COMPARE_EXAMPLES, add_compare_options)
PLAN = CommandOptions(_PLAN_TEXT, _PLAN_EXAMPLES, add_plan_options)
