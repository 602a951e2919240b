"""What `tenuto validate` must know before its runs: machine, sizes of a server, plan of time, load.

The plan divides the time among runs. The load is the simulator's choice: the highest rate at which stock
still finishes its jobs soon after the last one arrived.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tenuto.client.local_server import ServerError
from tenuto.client.metrics import connect, read_cache_state
from tenuto.client.options import ValidateOptions
from tenuto.client.verify import read_model
from tenuto.core.errors import ConfigError, redact
from tenuto.records.metrics import get_geometric_mean
from tenuto.records.schema import ValidatedMachine, ValidatedServer
from tenuto.records.text import MIN_PAIRS
from tenuto.sim.compare import STEP_SIZES, TIE
from tenuto.sim.hardware.models import load_model
from tenuto.sim.machine import build
from tenuto.sim.plan import get_most_jps
from tenuto.sim.run import get_isolated_time_s
from tenuto.sim.run import run as simulate
from tenuto.sim.setup import Setup
from tenuto.vllm.launch import find_config
from tenuto.workload.load import LoadOptions, make_workload

STOCK, WELL_SET, TENUTO = "stock", "stock-well-set", "tenuto"
QUICK_PAIRS, MOST_PAIRS = 2, 12
GOOD_RUN_S, LONG_RUN_S, LEAST_RUN_S = 40.0, 90.0, 12.0
"""Runs on fresh servers last so long at least; longer ones make room for more pairs; shorter show nothing."""
START_S, STOP_S, END_S = 60.0, 5.0, 30.0
"""Guesses: of a server's start before the first one, of its stop, and of the predictions and the page."""
SCALES = (1.0, 0.5, 0.25, 0.1, 0.05)
"""Lengths of the jobs' texts, until enough of them fit into a run."""
MIN_JOBS = 8
LOADS = (1.4, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Rates to try, over that of a machine that computes no token twice."""
SLACK = 1.25
"""Stock may take so much longer to finish the jobs than they take to arrive: it is just about full."""


# The machine.


def look_at_machine() -> tuple[ValidatedMachine, list[str]]:
    """What this machine is, and what disturbs measurements on it now, a sentence each."""
    gpus = _ask_gpus("--query-gpu=name,driver_version,memory.total")
    processes = _ask_gpus("--query-compute-apps=pid")
    load, cores = os.getloadavg()[0], os.cpu_count()
    machine = ValidatedMachine(
        gpu=gpus[0][0] if gpus else None,
        driver=gpus[0][1] if gpus else None,
        gpu_memory_mib=int(gpus[0][2]) if gpus and gpus[0][2].isdecimal() else None,
        cpu=_read_cpu(),
        cores=cores,
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        load_before=round(load, 2),
        gpu_processes=len(processes) if gpus else None,
    )
    found = []
    if processes:
        found.append(f"{len(processes)} other processes use the GPU")
    if load > max(1.0, 0.25 * (cores or 1)):
        found.append(
            f"the load average was {load:.1f} on {cores} cores before anything was started: end what else "
            "computes here (top names it)"
        )
    return machine, [*found, *find_throttling()]


def find_throttling() -> list[str]:
    """A sentence if a GPU slows itself down because it is hot."""
    reasons = ("hw_thermal_slowdown", "sw_thermal_slowdown")
    rows = _ask_gpus("--query-gpu=" + ",".join(f"clocks_throttle_reasons.{each}" for each in reasons))
    if any("Active" in row for row in rows):
        return ["a GPU was slowed down by heat: see to its cooling"]
    return []


def _ask_gpus(query: str) -> list[list[str]]:
    """Rows of `nvidia-smi`; none where there is no such GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def _read_cpu() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return found[1] if found else platform.machine()
    return platform.machine()


# The server.


def find_sizes(options: ValidateOptions) -> str | None:
    """What the simulator takes for the model; None as long as it is not here. Raises ConfigError."""
    config = options.config or find_config(options.model)
    if config is None:
        return None
    try:
        load_model(config)
    except ConfigError as error:
        raise ConfigError(f"{error}. --config names a model of the same sizes that is simulated") from error
    return str(config)


def read_server(url: str, options: ValidateOptions, start_s: float | None) -> ValidatedServer:
    """What a server says of itself, and else its arguments. Raises TenutoError."""
    try:
        with connect(url, None) as client:
            _, max_model_len = read_model(client)
            state = read_cache_state(client)
            version = _get_json(client, "/version").get("version")
            config = _get_json(client, "/server_info?config_format=json").get("vllm_config") or {}
    except httpx.HTTPError as error:
        raise ServerError(f"{url} does not say what it is: {error}") from error
    scheduler = config.get("scheduler_config") or {}

    def get(name: str) -> int:
        value = scheduler.get(name)
        if type(value) is not int:
            value = _get_number(options.serve_args, f"--{name.replace('_', '-')}")
        if value is None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"the server does not say its {name}: add {flag} N to --serve-args")
        return value

    if len(state.engines) > 1:
        raise ConfigError(
            f"the server has {len(state.engines)} engines (data parallel); validate one of them: leave "
            "--data-parallel-size out of --serve-args"
        )
    parallel = config.get("parallel_config") or {}
    gpus = parallel.get("world_size")
    return ValidatedServer(
        engine=options.engine,
        version=str(version) if version is not None else None,
        model=Path(options.model).name,
        block_size=state.block_size,
        # vLLM counts its null block in the size of the cache.
        kv_tokens=(state.num_blocks + 1) * state.block_size,
        gpus=gpus if type(gpus) is int else 1,
        max_model_len=max_model_len or get("max_model_len"),
        max_num_batched_tokens=get("max_num_batched_tokens"),
        max_num_seqs=get("max_num_seqs"),
        async_scheduling=scheduler.get("async_scheduling", "--no-async-scheduling" not in options.serve_args)
        is not False,
        flags=describe_flags(options.serve_args),
        start_s=start_s,
    )


def _get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    try:
        answer = client.get(path, timeout=60.0)
        found = answer.json() if answer.is_success else {}
    except (httpx.HTTPError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _get_number(arguments: Sequence[str], flag: str) -> int | None:
    for place, each in enumerate(arguments):
        name, equals, value = each.partition("=")
        if name == flag:
            value = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
            return int(value) if value.isdecimal() else None
    return None


def describe_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """The flags without values, as these may name files or hosts; numbers stay."""
    shown: list[str] = []
    for each in redact(arguments):
        name, equals, value = each.partition("=") if each.startswith("-") else ("", "", each)
        if name:
            shown.append(name)
        if (equals or not name) and shown and re.fullmatch(r"\d+(\.\d+)?", value):
            shown[-1] += f"={value}"
    return tuple(shown)


# The plan.


class Plan(NamedTuple):
    """How the time is divided."""

    pairs: int
    runs_per_start: int
    run_s: float
    """Of one run, from the first arrival to the last answer."""
    num_starts: int

    def describe(self, num_arms: int) -> str:
        """In a line."""
        return (
            f"{self.pairs} pairs: {self.pairs * num_arms} runs of about {self.run_s:.0f} s on "
            f"{self.num_starts} server starts"
        )


def make_plan(left_s: float, start_s: float, num_arms: int, burst_s: float, *, quick: bool = False) -> Plan:
    """Divide what is left among the runs. Raises ConfigError if that is too little.

    Fresh servers for all runs if there is time for them, else several runs on one start.
    """

    def divide(pairs: int, per_start: int) -> Plan:
        blocks = math.ceil(pairs / per_start)
        # Two blocks in a row begin and end with the same arm, and share its server if it stays up.
        starts = num_arms * blocks - (blocks - 1 if per_start > 1 else 0)
        rest_s = left_s - END_S - starts * (start_s + STOP_S + burst_s)
        return Plan(pairs, per_start, rest_s / (pairs * num_arms) - burst_s, starts)

    fewest = QUICK_PAIRS if quick else MIN_PAIRS
    # Two blocks at least: a drift of the machine meets the second, in reverse order, from the other side.
    plans = [divide(fewest, per_start) for per_start in range(1, fewest // 2 + 1)]
    plan = next((plan for plan in plans if plan.run_s >= GOOD_RUN_S), plans[-1])
    while plan.runs_per_start == 1 and plan.run_s > LONG_RUN_S and plan.pairs < MOST_PAIRS and not quick:
        plan = divide(plan.pairs + 2, 1)
    least_s = LEAST_RUN_S / 2 if quick else LEAST_RUN_S
    if plan.run_s < least_s:
        missing_s = (least_s - plan.run_s) * plan.pairs * num_arms
        raise ConfigError(
            f"there is too little time: a server takes {start_s:.0f} s to start, and {left_s / 60:.0f} "
            f"minutes are left; give --minutes {math.ceil(missing_s / 60)} more"
        )
    return plan._replace(run_s=min(plan.run_s, LONG_RUN_S))


@dataclass(frozen=True)
class Forecast:
    """The simulator's part: what it says of each arm under a load."""

    setup: Setup
    """Stock as it is."""

    def get_setup(self, arm: str, step_tokens: int | None) -> Setup:
        """The machine of an arm."""
        if arm == TENUTO:
            return replace(self.setup, policy="tenuto")
        return replace(self.setup, step_tokens=step_tokens)

    def choose_load(self, options: ValidateOptions, run_s: float) -> LoadOptions:
        """The load under which stock is just about full, and whose run takes so long. Raises ConfigError."""
        longest = min(self.setup.max_model_len or math.inf, (self.setup.kv_tokens or 0) / 2)
        load = LoadOptions(workload=options.workload, jps=1.0, seed=options.seed)
        for scale in SCALES:
            load = replace(load, scale_lengths=scale, window_s=None)
            job = max(
                make_workload(replace(load, window_s=60.0)).jobs,
                key=lambda each: each.turns[-1].num_prompt_tokens,
            )
            last = max(turn.num_prompt_tokens + turn.num_output_tokens for turn in job.turns)
            if last > longest:
                continue
            cost = build(self.setup).step_cost
            alone_s = get_isolated_time_s(job, cost, self.setup.max_num_batched_tokens or 1)
            window_s = round((run_s - alone_s) / SLACK, 1)
            most_jps = get_most_jps(self.setup, load)
            if window_s > run_s / 4 and most_jps * window_s >= MIN_JOBS:
                return self._find_rate(replace(load, window_s=window_s), most_jps, alone_s)
        raise ConfigError(
            f"no {options.workload} jobs fit: the server takes {longest:.0f} tokens, and a run lasts "
            f"{run_s:.0f} s; give --minutes more, or a shorter --workload"
        )

    def _find_rate(self, load: LoadOptions, most_jps: float, alone_s: float) -> LoadOptions:
        window_s = load.window_s or 0.0
        for share in LOADS:
            load = replace(load, jps=float(f"{share * most_jps:.2g}"))
            ends_s = [self.simulate(STOCK, None, load, n)["makespan_s"] for n in range(3)]
            if statistics.fmean(ends_s) <= SLACK * window_s + alone_s:
                break
        return load

    def choose_steps(self, load: LoadOptions) -> int | None:
        """Stock's best step size under the load; None if its own is about as good."""
        fewest, own = self.setup.max_num_seqs or 1, self.setup.max_num_batched_tokens or 1
        means_s: dict[int | None, float] = {}
        for size in (None, *(size for size in STEP_SIZES if fewest <= size < own)):
            runs = [self.simulate(STOCK, size, load, n)["job_s"]["mean"] for n in range(3)]
            means_s[size] = get_geometric_mean(runs)
        best = min(means_s, key=lambda size: means_s[size])
        return best if means_s[best] * TIE < means_s[None] else None

    def simulate(self, arm: str, step_tokens: int | None, load: LoadOptions, repeat: int) -> dict[str, Any]:
        """The record of one simulated run."""
        return simulate(self.get_setup(arm, step_tokens), replace(load, seed=load.seed + repeat)).record
