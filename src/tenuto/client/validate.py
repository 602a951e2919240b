"""`tenuto validate`: is Tenuto faster on this machine, by how much, and did the simulator predict it?

    start stock ─► noise ─► profile ─► simulator: load, step size ─► alternating runs ─► record
                     │                                                 │  after each: plain requests
                     └ too much: stop            3 pairs vary too much ┘  after Tenuto's first: verify

All measurements are those of other commands: step times as in `tenuto profile`, alternating runs and their
intervals as in `tenuto ab`, leases as in `tenuto verify`. The simulator runs the same jobs on the same
machine, with the step times of the profile. The simulator also chooses the load: the highest rate at which
stock still finishes its jobs soon after the last one arrived. The same command again continues where it
stopped.

validation.json    the record, made to be published: no text of requests, no paths, no host names
costs.json         the fitted step times
ab/                the runs, as `tenuto ab` writes them
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tenuto.client.ab import (
    AbFolder,
    Conclusion,
    Ready,
    Servers,
    Slot,
    check_port,
    conclude,
    ending_as_interrupt,
    measure_run,
    run_slots,
)
from tenuto.client.ab_verdict import MEASURES as AB_MEASURES
from tenuto.client.ab_verdict import (
    Comparison,
    Measure,
    Values,
    compare,
    compare_one,
    describe_caches,
    describe_faults,
    describe_lag,
    find_invalid,
    get_reach,
)
from tenuto.client.address import ServerError
from tenuto.client.metrics import connect, explain, read_cache_state, try_get_json
from tenuto.client.options import AbOptions, Arm, BenchOptions, Kind, ProfileOptions, ValidateOptions
from tenuto.client.profile import get_max_context, run_profile
from tenuto.client.profile import make_plan as make_profile_plan
from tenuto.client.verify import read_model, verify
from tenuto.core import console
from tenuto.core.console import count
from tenuto.core.errors import ConfigError, DataError, TenutoError, redact, suggest
from tenuto.records.files import RunFiles, read_first, write_whole, writing
from tenuto.records.load import read_validation
from tenuto.records.metrics import HITS, Runs, get_geometric_mean
from tenuto.records.schema import (
    ValidatedArm,
    ValidatedLoad,
    ValidatedMachine,
    ValidatedRatio,
    ValidatedServer,
    ValidationRecord,
)
from tenuto.records.text import MIN_PAIRS
from tenuto.sim.compare import STEP_SIZES, TIE
from tenuto.sim.compare import STOCK as STOCK_POLICY
from tenuto.sim.cost.fitted import find_poor, fit_step_cost, get_errors, read_observations
from tenuto.sim.hardware.models import load_model
from tenuto.sim.machine import build
from tenuto.sim.plan import get_most_jps
from tenuto.sim.run import get_isolated_time_s
from tenuto.sim.run import run as simulate
from tenuto.sim.setup import Setup
from tenuto.vllm.launch import check_model, find_config, find_vllm
from tenuto.workload.load import GENERATORS, LoadOptions, make_workload

STOCK, WELL_SET, TENUTO = "stock", "stock-well-set", "tenuto"
QUICK_PAIRS, MOST_PAIRS = 2, 12
GOOD_RUN_S, LONG_RUN_S, LEAST_RUN_S = 40.0, 90.0, 12.0
"""Seconds of a run: the least on fresh servers; the longest, above which more pairs are made; the least of
all."""
START_S, STOP_S, END_S = 60.0, 5.0, 30.0
"""Assumed seconds of a server's start before the first one, of its stop, and of the predictions and the
page."""
SCALES = (1.0, 0.5, 0.25, 0.1, 0.05)
"""Factors to shorten the jobs' texts, tried in order until enough jobs fit into a run."""
MIN_JOBS = 8
LOADS = (1.4, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Rates to try, relative to the capacity of a machine that computes no token twice."""
SLACK = 1.25
"""Stock is just about full if it takes this many times as long to finish the jobs as they take to arrive."""


# The machine.


def look_at_machine() -> tuple[ValidatedMachine, list[str]]:
    """Facts about this machine, and what disturbs measurements on it now, one sentence each."""
    gpus = _ask_gpus("--query-gpu=name,driver_version,memory.total")
    processes = _ask_gpus("--query-compute-apps=pid")
    load, cores, cpu = os.getloadavg()[0], os.cpu_count(), None
    with contextlib.suppress(OSError):
        cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine = ValidatedMachine(
        gpu=gpus[0][0] if gpus else None,
        driver=gpus[0][1] if gpus else None,
        gpu_memory_mib=int(gpus[0][2]) if gpus and gpus[0][2].isdecimal() else None,
        cpu=cpu[1] if cpu else platform.machine(),
        cores=cores,
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        load_before=round(load, 2),
        gpu_processes=len(processes) if gpus else None,
    )
    found = []
    if processes:
        found.append(f"the GPU is used by {count(len(processes), 'other process')}")
    if load > max(1.0, 0.25 * (cores or 1)):
        found.append(
            f"the load average was {load:.1f} on {cores} cores before anything was started: end what else "
            "computes here (top names it)"
        )
    return machine, [*found, *find_throttling()]


def find_throttling() -> list[str]:
    """A sentence if a GPU is throttled because it is hot."""
    reasons = ("hw_thermal_slowdown", "sw_thermal_slowdown")
    rows = _ask_gpus("--query-gpu=" + ",".join(f"clocks_throttle_reasons.{each}" for each in reasons))
    is_hot = any("Active" in row for row in rows)
    return ["a GPU was throttled because of heat: check its cooling"] if is_hot else []


def _ask_gpus(query: str) -> list[list[str]]:
    """Rows of `nvidia-smi`; empty without an NVIDIA GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


# The server.


def find_sizes(options: ValidateOptions) -> str | None:
    """The model for the simulator; None while its files are not on this machine. Raises ConfigError."""
    config = options.config or find_config(options.model)
    if config is None:
        return None
    try:
        load_model(config)
    except ConfigError as error:
        raise ConfigError(f"{error}. --config names a model of the same sizes that is simulated") from error
    return str(config)


def read_server(url: str, options: ValidateOptions, start_s: float | None) -> ValidatedServer:
    """Facts about a server, as it reports them or else from its arguments. Raises TenutoError."""
    try:
        with connect(url, None, timeout_s=60.0) as client:
            _, max_model_len = read_model(client)
            state = read_cache_state(client)
            version = try_get_json(client, "/version").get("version")
            config = try_get_json(client, "/server_info?config_format=json").get("vllm_config") or {}
    except httpx.HTTPError as error:
        raise ServerError(explain(error)) from error
    scheduler = config.get("scheduler_config") or {}

    def get(name: str) -> int:
        value, flag = scheduler.get(name), f"--{name.replace('_', '-')}"
        if type(value) is not int:
            value = _get_number(options.serve_args, flag)
        if value is None:
            raise ConfigError(f"the server does not say its {name}: add {flag} N to --serve-args")
        return value

    if len(state.engines) > 1:
        raise ConfigError(
            f"the server has {len(state.engines)} engines (data parallel); validate one of them: leave "
            "--data-parallel-size out of --serve-args"
        )
    gpus = (config.get("parallel_config") or {}).get("world_size")
    return ValidatedServer(
        engine=options.engine,
        version=str(version) if version is not None else None,
        model=os.path.basename(os.path.abspath(options.model)),  # of "." too
        block_size=state.block_size,
        # vLLM includes its null block in the cache's size.
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


def _get_number(arguments: Sequence[str], flag: str) -> int | None:
    for place, each in enumerate(arguments):
        name, equals, value = each.partition("=")
        if name == flag:
            value = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
            return int(value) if value.isdecimal() else None
    return None


def describe_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """The flags without their values, which may name files or hosts. Numbers stay."""
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
    """How the available time is divided."""

    pairs: int
    runs_per_start: int
    run_s: float
    """Seconds of one run, from the first arrival to the last answer."""
    num_starts: int

    def describe(self, num_arms: int) -> str:
        """The plan in one line."""
        return (
            f"{count(self.pairs, 'pair')}: {self.pairs * num_arms} runs of about {self.run_s:.0f} s on "
            f"{count(self.num_starts, 'server start')}"
        )


def make_plan(left_s: float, start_s: float, num_arms: int, burst_s: float, *, quick: bool = False) -> Plan:
    """Divide the remaining time among the runs. Raises ConfigError if it is too little.

    Each run gets a fresh server if there is time for that, else several runs share one start.
    """

    def divide(pairs: int, per_start: int) -> Plan:
        blocks = math.ceil(pairs / per_start)
        # One block ends with the arm with which the next begins, so they can share a server.
        starts = num_arms * blocks - (blocks - 1 if per_start > 1 else 0)
        rest_s = left_s - END_S - starts * (start_s + STOP_S + burst_s)
        return Plan(pairs, per_start, rest_s / (pairs * num_arms) - burst_s, starts)

    fewest = QUICK_PAIRS if quick else MIN_PAIRS
    # At least two blocks: the second has the reverse order, so a drift of the machine cancels out.
    plans = [divide(fewest, per_start) for per_start in range(1, fewest // 2 + 1)]
    plan = next((plan for plan in plans if plan.run_s >= GOOD_RUN_S), plans[-1])
    while plan.runs_per_start == 1 and plan.run_s > LONG_RUN_S and plan.pairs < MOST_PAIRS and not quick:
        plan = divide(plan.pairs + 2, 1)
    least_s = LEAST_RUN_S / 2 if quick else LEAST_RUN_S
    if plan.run_s < least_s:
        missing_s = (least_s - plan.run_s) * plan.pairs * num_arms
        start = f"if a server takes {start_s:.0f} s to start" if start_s else "even if servers start at once"
        raise ConfigError(
            f"{left_s / 60:.0f} minutes are too few {start}; give --minutes {math.ceil(missing_s / 60)} more"
        )
    return plan._replace(run_s=min(plan.run_s, LONG_RUN_S))


@dataclass(frozen=True)
class Forecast:
    """The simulator's predictions for each arm under a load."""

    setup: Setup
    """Stock with its own settings."""

    def choose_load(self, options: ValidateOptions, run_s: float) -> LoadOptions:
        """The load under which stock is just about full, for a run of `run_s` seconds. Raises ConfigError."""
        longest = min(self.setup.max_model_len or math.inf, (self.setup.kv_tokens or 0) / 2)
        load = LoadOptions(workload=options.workload, jps=1.0, seed=options.seed)
        is_trace = options.workload not in GENERATORS
        for scale in SCALES:
            load = replace(load, scale_lengths=scale)
            most_jps = get_most_jps(self.setup, load)
            sample = replace(load, window_s=60.0)
            if is_trace:
                # A run has the trace's own jobs, each once, so all that it may reach are looked at.
                sample = replace(load, jps=None, max_jobs=math.ceil(LOADS[0] * most_jps * run_s))
            jobs = make_workload(sample).jobs
            turns = (turn for job in jobs for turn in job.turns)
            if max(turn.num_prompt_tokens + turn.num_output_tokens for turn in turns) > longest:
                continue
            job = max(jobs, key=lambda each: each.turns[-1].num_prompt_tokens)
            cost = build(self.setup).step_cost
            alone_s = get_isolated_time_s(job, cost.seconds, self.setup.max_num_batched_tokens or 1)
            most_s = (run_s - alone_s) / SLACK
            # Jobs must arrive during a quarter of the run at least.
            least_s = max(alone_s / (4 - SLACK), MIN_JOBS / most_jps)
            if most_s <= least_s:
                continue
            num_jobs = sum(each.parent is None for each in jobs) if is_trace else math.inf
            if num_jobs < most_jps * least_s:
                raise ConfigError(
                    f"{options.workload} has {count(int(num_jobs), 'job')}; "
                    "at the rate that fills this machine, a run "
                    f"needs {math.ceil(most_jps * least_s)}: record more jobs, or name a generator"
                )
            return self._find_rate(load, most_jps, alone_s, most_s, num_jobs)
        raise ConfigError(
            f"no {options.workload} jobs fit: the server takes {longest:.0f} tokens, and a run lasts "
            f"{run_s:.0f} s; give --minutes more, or a shorter --workload"
        )

    def _find_rate(
        self, load: LoadOptions, most_jps: float, alone_s: float, most_s: float, num_jobs: float
    ) -> LoadOptions:
        for share in LOADS:
            jps = float(f"{share * most_jps:.2g}")
            # A trace may run out of jobs earlier. The machine would be idle for the rest of the run.
            window_s = float(f"{min(most_s, num_jobs / jps):.3g}")
            load = replace(load, jps=jps, window_s=window_s)
            ends_s = [self.simulate(STOCK, None, load, n)["makespan_s"] for n in range(3)]
            if statistics.fmean(ends_s) <= SLACK * window_s + alone_s:
                break
        return load

    def choose_steps(self, load: LoadOptions) -> int | None:
        """Stock's best step size under the load; None if its own size is about as good."""
        fewest, own = self.setup.max_num_seqs or 1, self.setup.max_num_batched_tokens or 1
        means_s: dict[int | None, float] = {}
        for size in (None, *(size for size in STEP_SIZES if fewest <= size < own)):
            runs = [self.simulate(STOCK, size, load, n)["job_s"]["mean"] for n in range(3)]
            means_s[size] = get_geometric_mean(runs)
        best = min(means_s, key=lambda size: means_s[size])
        return best if means_s[best] * TIE < means_s[None] else None

    def simulate(self, arm: str, step_tokens: int | None, load: LoadOptions, repeat: int) -> dict[str, Any]:
        """The record of one simulated run."""
        change: dict[str, Any] = {"policy": "tenuto"} if arm == TENUTO else {"step_tokens": step_tokens}
        setup = replace(self.setup, **change)
        return simulate(setup, replace(load, seed=load.seed + repeat)).record


# The validation.


RECORD, COSTS, PLAIN = "validation.json", "costs.json", "plain.json"
OVERTIME = 1.1
"""A run that takes longer than this multiple of its planned time is given up."""
PROFILE_SHARE = 0.15
NUM_BURSTS, USERS, PLAIN_JOBS = 3, 4, 8
PLAIN_TOKENS, FEW_TOKENS, PROMPT_TOKENS = 64, 16, 4
"""Output tokens of a plain request; the same on a slow machine; prompt tokens for each output token."""
BURST_S = 15.0
"""Longest intended time of a burst of plain requests, in seconds."""
MAX_LOAD = 2.0
"""Largest load average per core. With more, servers mostly wait for other processes."""
MAX_NOISE = 0.35
"""Largest difference between identical bursts on an idle server. With more, no verdict is possible."""
WIDEST = 0.10
"""An interval that is at most this wide is informative even if it includes 1."""
MAIN = AB_MEASURES[0]
MEASURES = ("mean_job_s", "p95_job_s", "mean_ttft_s", "p95_ttft_s")
PLAIN_MEASURE = Measure("plain_itl_s", "time between tokens of plain requests")
"""Its ratio bounds the cost of the hook in vLLM's scheduler."""


def run_validate(options: ValidateOptions) -> tuple[ValidationRecord, bool]:
    """Validate. Returns the record, which is also written to the folder, and whether Ctrl-C ended it.

    Raises TenutoError if nothing could be measured. Earlier measurements are kept.
    """
    machine, disturbances = look_at_machine()
    check(options, machine, disturbances)
    run = _Validation(options, machine, disturbances)
    is_interrupted = False
    late = threading.Timer(OVERTIME * options.limit_s, run.end_late)
    late.daemon = True
    try:
        with ending_as_interrupt():
            late.start()
            try:
                run.prepare()
                run.make_runs()
            finally:
                late.cancel()
    except KeyboardInterrupt:
        if run.record is None or run.record.load is None:
            if run.stopped is None:
                raise
            raise TenutoError(
                "time was up before the first run: give --minutes more, or end what else computes here"
            ) from None
        if run.stopped is None:
            run.say("interrupted; the same command continues from here")
            is_interrupted, run.stopped = True, "it was interrupted"
    except TenutoError:
        if run.record is not None and run.record.load is not None:
            run.stopped = "a server failed"
            run.finish()
        raise
    return run.finish(), is_interrupted


def check(options: ValidateOptions, machine: ValidatedMachine, disturbances: Sequence[str]) -> None:
    """Check, before a server is started, for all that would make it fail. Raises TenutoError."""
    if options.engine == "vllm" and shutil.which(find_vllm()) is None:
        raise TenutoError(
            "there is no `vllm` command here. Install Tenuto beside your vLLM, or vLLM here: pip install "
            "'tenuto[vllm]'. --engine sim shows without vLLM what this command does"
        )
    if options.engine == "vllm":
        check_model(options.model)
    if options.workload not in GENERATORS and not Path(options.workload).exists():
        near = suggest(options.workload, GENERATORS)
        raise ConfigError(f"--workload {options.workload}: no such file, nor a generator{near}")
    find_sizes(options)
    check_port(options.port)
    load, cores = machine.load_before or 0.0, machine.cores or 1
    if load > MAX_LOAD * cores and not options.despite_noise:
        raise TenutoError(
            f"the load average is {load:.1f} on {cores} cores: no verdict can come of it. End what computes "
            "here (`top` names it), wait a minute, and try again; or --despite-noise"
        )
    sets_memory = any(each.startswith("--gpu-memory-utilization") for each in options.serve_args)
    if machine.gpu_processes and not sets_memory and options.engine == "vllm":
        raise TenutoError(
            f"{disturbances[0]}. vLLM wants most of the GPU's memory: end them (`nvidia-smi` names them), "
            "choose a free GPU with CUDA_VISIBLE_DEVICES, or say how much memory it may take: "
            '--serve-args "--gpu-memory-utilization 0.5"'
        )


@dataclass
class _Validation:
    options: ValidateOptions
    machine: ValidatedMachine
    disturbances: list[str]
    stopped: str | None = None
    record: ValidationRecord | None = None
    started_s: float = field(default_factory=time.monotonic)
    has_measured: bool = False
    """Whether this call has added to the record. If not, how it began says nothing about the runs."""

    @property
    def known(self) -> ValidationRecord:
        """The record. It is there once a server has said what it is."""
        assert self.record is not None
        return self.record

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def left_s(self) -> float:
        return self.options.limit_s - self.passed_s

    def say(self, text: str) -> None:
        clock = f"{console.format_time(self.passed_s)}, {math.ceil(max(0.0, self.left_s) / 60)} min left"
        console.say(f"validate {clock}", text)

    def end_late(self) -> None:
        """End the current run as Ctrl-C does, because it takes much longer than planned."""
        self.stopped = "time was up"
        # Shells make background processes ignore SIGINT.
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def ab(self) -> AbOptions:
        record, options = self.record, self.options
        arms = record.arms if record else (ValidatedArm(name=STOCK), ValidatedArm(name=TENUTO))
        is_sim = options.engine == "sim"
        stock: tuple[Kind, str] = ("sim", STOCK_POLICY) if is_sim else ("vllm", "")
        tenuto: tuple[Kind, str] = ("sim" if is_sim else "policy", "tenuto")
        return AbOptions(
            arms=tuple(Arm(arm.name, *(tenuto if arm.name == TENUTO else stock)) for arm in arms),
            model=options.model,
            serve_args=options.serve_args,
            arm_args={
                arm.name: ("--max-num-batched-tokens", str(arm.step_tokens))
                for arm in arms
                if arm.step_tokens is not None
            },
            port=options.port,
            start_limit_s=options.start_limit_s,
            bench=BenchOptions(urls=("http://127.0.0.1",), load=self.load, gpu=self.machine.gpu),
            out=options.out / "ab",
            repeats=max(1, record.pairs_planned if record else 1),
            runs_per_start=record.runs_per_start if record else 1,
        )

    @property
    def load(self) -> LoadOptions:
        found = self.record.load if self.record else None
        chosen = {"jps": 1.0} if found is None else asdict(found)
        # As given now: the folder of the runs refuses others.
        return LoadOptions(**{**chosen, "workload": self.options.workload, "seed": self.options.seed})

    @cached_property
    def forecast(self) -> Forecast:
        server, options = self.known.server, self.options
        return Forecast(
            Setup(
                model=find_sizes(options) or options.model,
                policy=STOCK_POLICY,
                step_cost=str(options.out / COSTS),
                kv_tokens=server.kv_tokens,
                block_size=server.block_size,
                max_model_len=server.max_model_len,
                max_num_batched_tokens=server.max_num_batched_tokens,
                max_num_seqs=server.max_num_seqs,
                async_scheduling=server.async_scheduling,
                vllm="0.33" if (server.version or "").startswith("0.33") else "0.32",
                offload="none",
                limits="plugin" if options.engine == "vllm" else "published",
            )
        )

    # Before the runs.

    def prepare(self) -> None:
        """Profile one server, then choose the load and the arms; or read an earlier choice."""
        options = self.options
        with writing(options.out, is_folder=True):
            (options.out / "logs").mkdir(parents=True, exist_ok=True)
        if (options.out / RECORD).exists() and (options.out / COSTS).exists():
            self.record = read_validation(read_first(options.out / RECORD))
            if self.record.load is not None:
                self.say(f"continuing with {options.out}")
                return
        num_arms = 3
        runs_s = self.left_s * (1 - PROFILE_SHARE)
        make_plan(runs_s, 0.0, num_arms, 0.0, quick=options.quick)
        with contextlib.suppress(ConfigError):  # printed again once the start has been timed
            plan = make_plan(runs_s - START_S, START_S, num_arms, 5, quick=options.quick)
            self.say(
                f"plan for {options.limit_s / 60:g} minutes, if a server starts in {START_S:.0f} s: noise "
                f"and profile {PROFILE_SHARE * options.limit_s / 60:.0f} min, {plan.describe(num_arms)}, page"
            )
        for each in self.disturbances:
            self.say(f"disturbed: {each}")
        number = len(list((options.out / "logs").glob("profile-*.log"))) + 1
        ab = self.ab
        with Servers(ab, lambda arm: options.out / "logs" / f"profile-{number}.log", self.say) as servers:
            starting_s = time.monotonic()
            with self._explaining(), servers.open(ab.arms[0]) as server:
                start_s = time.monotonic() - starting_s
                self.has_measured = True
                self.record = ValidationRecord(
                    verdict="no verdict",
                    day=date.today().isoformat(),
                    minutes=0.0,
                    plain_tokens=FEW_TOKENS,
                    machine=self.machine,
                    server=read_server(server.url, options, round(start_s, 1)),
                )
                burst_s, noise, token_s = self._measure_noise(server.url)
                self.record = replace(self.record, noise=round(noise, 3))
                if noise > MAX_NOISE and not options.despite_noise:
                    self.stopped = (
                        f"noise: identical requests to an idle server took up to {noise:.0%} longer than "
                        "others"
                    )
                    return
                self._profile(server, token_s)
        self._choose(start_s, burst_s, num_arms)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Add advice to the error of a server that lacks memory."""
        try:
            yield
        except ServerError as error:
            if re.search(r"out of memory|less than desired|No available memory|cache blocks", str(error)):
                raise ServerError(
                    f"{error}\nThere is not enough free memory: end what holds it (`nvidia-smi`, `top`), or "
                    'set --serve-args "--gpu-memory-utilization 0.5" or a smaller --max-model-len.'
                ) from error
            raise

    def _measure_noise(self, url: str) -> tuple[float, float, float]:
        """Seconds of a burst, relative difference of equal bursts, approximate seconds per prompt token."""
        self._burst(url, 0)  # warm-up
        begin_s = time.monotonic()
        self._burst(url, 1)
        is_slow = (time.monotonic() - begin_s) * PLAIN_TOKENS / FEW_TOKENS > BURST_S
        self.record = replace(self.known, plain_tokens=FEW_TOKENS if is_slow else PLAIN_TOKENS)
        begin_s = time.monotonic()
        bursts = [self._burst(url, 2 + number) for number in range(NUM_BURSTS)]
        burst_s = (time.monotonic() - begin_s) / NUM_BURSTS
        means = [burst["latency_s"]["mean"] for burst in bursts]
        token_s = max(burst["ttft_s"]["max"] for burst in bursts)
        token_s /= USERS * PROMPT_TOKENS * self.known.plain_tokens
        noise = max(means) / min(means) - 1
        self.say(f"identical bursts of requests differ by {noise:.0%}")
        return burst_s, noise, token_s

    def _burst(self, url: str, number: int) -> dict[str, Any]:
        """Send a few plain requests, which belong to no job."""
        num_tokens = self.known.plain_tokens
        load = LoadOptions(
            workload="random",
            users=USERS,
            max_jobs=PLAIN_JOBS,
            seed=number,
            hints="none",
            random_input_len=PROMPT_TOKENS * num_tokens,
            random_output_len=num_tokens,
            random_range_ratio=0.0,
        )
        with RunFiles(None) as files:
            result = measure_run(BenchOptions(urls=(url,), load=load, metrics_interval_s=0.0), files)
        if result["turns"]["ok"] != result["turns"]["planned"] or result["itl_s"] is None:
            raise ServerError(f"{url} failed plain requests: {result['client']['failed_attempts']}")
        return result

    def _profile(self, server: Ready, token_s: float) -> None:
        """Time as many of the server's steps as there is time for, and fit them."""
        known = self.known.server
        room_s = PROFILE_SHARE * self.options.limit_s
        for wanted in (16384, 8192, 4096, 2048, 1024):
            profile = ProfileOptions(
                url=server.url,
                step_tokens=max(512, known.max_num_batched_tokens),
                max_context=wanted,
                max_batch=max(2, min(16, known.max_num_seqs)),
                limit_s=room_s / 2,
            )
            context = get_max_context(wanted, known.max_model_len, known.kv_tokens)
            plan = make_profile_plan(profile.step_tokens, context, profile.max_batch, known.kv_tokens)
            num_tokens = sum(each.num_tokens for each in plan.prefills)
            num_tokens += sum(each.num_decodes * each.num_context_tokens for each in plan.decodes)
            if num_tokens * token_s <= room_s / 2:
                break
        self.say(f"profile: contexts up to {context} tokens")
        observations = self.options.out / "observations.jsonl"
        run_profile(profile, observations)
        steps, copies = read_observations(observations)
        cost = fit_step_cost(steps, copies)
        poor = find_poor(cost, steps, copies)
        replace(cost, poor=poor).save(self.options.out / COSTS)
        errors = {kind: round(error, 4) for kind, error in get_errors(cost, steps).items()}
        self.record = replace(self.known, fit_error=errors, poor_fit=bool(poor), notes=poor)

    def _choose(self, start_s: float, burst_s: float, num_arms: int) -> None:
        options = self.options
        plan = make_plan(self.left_s, start_s, num_arms, burst_s, quick=options.quick)
        load = self.forecast.choose_load(options, plan.run_s)
        steps = self.forecast.choose_steps(load)
        arms = [ValidatedArm(name=STOCK)]
        if steps is not None:
            arms.append(ValidatedArm(name=WELL_SET, step_tokens=steps))
        else:
            plan = make_plan(self.left_s, start_s, 2, burst_s, quick=options.quick)._replace(run_s=plan.run_s)
        arms.append(ValidatedArm(name=TENUTO))
        assert load.jps is not None and load.window_s is not None
        self.record = replace(
            self.known,
            arms=tuple(arms),
            pairs_planned=plan.pairs,
            runs_per_start=plan.runs_per_start,
            load=ValidatedLoad(
                workload=load.workload if load.workload in GENERATORS else "a recording",
                jps=load.jps,
                window_s=load.window_s,
                scale_lengths=load.scale_lengths,
                seed=load.seed,
            ),
        )
        self._write()
        tuned = f"stock's best step size is {steps} tokens" if steps else "stock's own step size is best"
        self.say(f"plan: {plan.describe(len(arms))}, then the page; {tuned}")
        self.say(
            f"load: {load.jps:g} jobs/s of {load.workload} for {load.window_s:g} s, lengths × "
            f"{load.scale_lengths:g}: about what stock can do"
        )

    # The runs.

    def make_runs(self) -> None:
        """Run the arms alternately until all is done, time is up, or noise makes a verdict impossible."""
        if self.stopped is not None or self.record is None:
            return
        with AbFolder(self.ab) as folder, self._explaining():

            def after(slot: Slot, server: Ready) -> bool:
                self._note_load(sum(map(folder.has_run, folder.slots)))
                self._ask_more(folder, slot, server)
                if slot.repeat and (why := self._find_hopeless(folder)):
                    self.stopped = why
                elif self.left_s < END_S and slot != folder.slots[-1]:
                    self.stopped = "time was up"
                return self.stopped is None

            run_slots(folder, after)

    def _note_load(self, num_runs: int) -> None:
        """Add the load average to the mean over all runs, of earlier calls too. `num_runs`: with this one."""
        self.has_measured = True
        machine, load = self.known.machine, os.getloadavg()[0]
        before = load if machine.load_mean is None else machine.load_mean
        mean = round(before + (load - before) / num_runs, 2)
        self.record = replace(self.known, machine=replace(machine, load_mean=mean))

    def _ask_more(self, folder: AbFolder, slot: Slot, server: Ready) -> None:
        """Send plain requests to measure the hook's cost. Once, verify that leases are held."""
        if slot.arm in (STOCK, TENUTO):
            burst = self._burst(server.url, slot.repeat)
            path = folder.get_run(slot) / PLAIN
            path.write_text(json.dumps({"itl_s": burst["itl_s"]["p50"]}), encoding="utf-8")
        if slot.arm == TENUTO and self.known.verify is None:
            found: Any = "not shown"
            try:
                verdict = verify(server.url)
                if verdict.ok and all(turn.gap in ("held", "end") for turn in verdict.turns):
                    found = "held"
                elif not verdict.ok and not verdict.is_disturbed:
                    found = "not held"
            except (httpx.HTTPError, DataError) as error:
                self.say(f"verify: {error}")
            self.record = replace(self.known, verify=found)
            self.say(f"verify: {found}")
        self._write()

    def _find_hopeless(self, folder: AbFolder) -> str | None:
        """Why all planned pairs will not suffice for a verdict; None if they may."""
        if self.options.despite_noise or self.options.quick:
            return None
        found = conclude(folder)
        stocks = [arm.name for arm in self.known.arms if arm.name != TENUTO]
        pairs = found.pairs.values()
        ratios = [[pair[TENUTO][MAIN.name] / pair[stock][MAIN.name] for pair in pairs] for stock in stocks]
        planned = self.known.pairs_planned
        if not all(is_hopeless(each, planned) for each in ratios):
            return None
        return (
            f"noise: after {count(len(found.pairs), 'pair')} the ratios vary so much that "
            f"{planned} pairs would not "
            "show a difference as small as this one"
        )

    # The end.

    def finish(self) -> ValidationRecord:
        """Compare the arms, predict with the simulator, and write the record."""
        record = self.known
        verdict: Any = "no verdict"
        ratios: list[ValidatedRatio] = []
        if record.load is not None:
            with AbFolder(self.ab) as folder:
                found = conclude(folder)
                if folder.failure is not None:
                    self.say(f"not all was written: {folder.failure}")
                record = self._predict(record, found)
                comparisons = self._compare(record, found)
                verdict = judge(each for each, _ in comparisons)
                ratios = [_make_ratio(*each) for each in comparisons]
                if plain := _read_plain(folder):
                    threshold = folder.options.threshold
                    ratios.append(_make_ratio(compare_one(plain, (STOCK, TENUTO), PLAIN_MEASURE, threshold)))
            notes = dict.fromkeys([*record.notes, *_make_notes(found.done)])
            versions: dict[str, str | None] = {}
            for run in (run for runs in found.done.values() for run in runs):
                versions |= run["versions"]
            record = replace(record, notes=tuple(notes), versions=versions)
        self.record = replace(
            record,
            verdict=verdict,
            stopped=self.stopped,
            ratios=tuple(ratios),
        )
        if self.has_measured:
            self.record = self._describe_call(self.known)
        self._write()
        return self.record

    def _describe_call(self, record: ValidationRecord) -> ValidationRecord:
        """Add to a record how long this call took, and what disturbed it."""
        if self.stopped is not None and self.stopped.startswith("noise"):
            self.disturbances += find_throttling()
        machine, cores = record.machine, self.machine.cores or 1
        load = os.getloadavg()[0] if machine.load_mean is None else machine.load_mean
        what = "with the servers and the client"
        found = [each for each in (*record.disturbances, *self.disturbances) if not each.endswith(what)]
        if load > MAX_LOAD * cores:
            found.append(f"the load average was {load:.1f} on {cores} cores, {what}")
        return replace(
            record,
            minutes=round(record.minutes + self.passed_s / 60, 1),
            machine=replace(machine, load_mean=round(load, 2)),
            disturbances=tuple(dict.fromkeys(found)),
        )

    def _predict(self, record: ValidationRecord, found: Conclusion) -> ValidationRecord:
        """Add each arm's measurements, and the simulator's predictions for the same seeds, to the record."""
        arms = []
        for arm in record.arms:
            self.say(f"simulating {count(len(found.pairs), 'run')} of {arm.name}")
            runs = [self.forecast.simulate(arm.name, arm.step_tokens, self.load, n) for n in found.pairs]
            pairs = [pair[arm.name] for pair in found.pairs.values()]
            values: Any = {name: tuple(round(pair[name], 4) for pair in pairs) for name in MEASURES}
            arms.append(
                replace(
                    arm,
                    **values,
                    simulated_job_s=tuple(round(run["job_s"]["mean"], 4) for run in runs),
                    reused_share=_get_reused_share(found.done[arm.name]),
                    simulated_reused_share=_get_reused_share(runs),
                )
            )
        return replace(record, arms=tuple(arms))

    def _compare(self, record: ValidationRecord, found: Conclusion) -> list[tuple[Comparison, float | None]]:
        """Tenuto compared with each stock arm, and the predicted ratio of mean job times."""
        predicted_s = {arm.name: arm.simulated_job_s for arm in record.arms}
        is_valid = all(each.is_valid for each in found.comparisons)
        comparisons = []
        for baseline in (name for name in predicted_s if name != TENUTO):
            two = [{name: pair[name] for name in (baseline, TENUTO)} for pair in found.pairs.values()]
            both = zip(predicted_s[TENUTO], predicted_s[baseline], strict=True)
            simulated = get_geometric_mean([own_s / other_s for own_s, other_s in both]) if two else None
            comparisons += [
                (each, simulated if each.measure is MAIN else None)
                for each in compare(two, self.ab.threshold, is_valid=is_valid)
                if each.measure.name in MEASURES
            ]
        return comparisons

    def _write(self) -> None:
        with writing(path := self.options.out / RECORD):
            write_whole(path, json.dumps(self.known.to_json(), indent=1) + "\n")


def judge(comparisons: Iterable[Comparison]) -> Any:
    """The verdict against stock with its own settings, by mean job time."""
    main = next((each for each in comparisons if (each.baseline, each.measure) == (STOCK, MAIN)), None)
    if main is None or not (main.is_valid and main.estimate.is_trusted and main.estimate.excludes_one):
        return "no verdict"
    if not main.differs:
        return "no difference"
    return "faster" if main.estimate.ratio < 1 else "slower"


def is_hopeless(ratios: Sequence[float], num_planned: int) -> bool:
    """Whether `num_planned` pairs that vary as these do would show neither a difference nor its absence.

    Used from the third pair on. The expected interval is Student's, with the variance so far.
    """
    if not MIN_PAIRS // 2 <= len(ratios) < num_planned:
        return False
    logs = [math.log(ratio) for ratio in ratios]
    reach = get_reach(logs, num_planned)
    return reach > math.log1p(WIDEST) and abs(statistics.fmean(logs)) < reach


def _make_notes(done: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Notes on the runs that a reader must know, without text from the servers."""
    lines = [*find_invalid(done), *describe_faults(done), *describe_lag(done), *describe_caches(done)]
    for arm, runs in done.items():
        planned = sum(run["turns"]["planned"] for run in runs)
        if lost := planned - sum(run["turns"]["ok"] for run in runs):
            lines.append(
                f"{arm} lost {lost} of {count(planned, 'turn')}; their jobs are left out on all arms."
            )
    return lines


def _make_ratio(each: Comparison, simulated: float | None = None) -> ValidatedRatio:
    estimate = each.estimate
    return ValidatedRatio(
        arm=each.arm,
        baseline=each.baseline,
        measure=each.measure.name,
        ratio=round(estimate.ratio, 4),
        low=None if estimate.low is None else round(estimate.low, 4),
        high=None if estimate.high is None else round(estimate.high, 4),
        pairs=estimate.num_pairs,
        differs=each.differs,
        words=each.describe(),
        simulated=None if simulated is None else round(simulated, 4),
    )


def _read_plain(folder: AbFolder) -> list[dict[str, Values]]:
    """The time between tokens of plain requests, by pair and arm."""
    pairs = []
    for repeat in range(folder.options.repeats):
        paths = {arm: folder.get_run(Slot(repeat, arm)) / PLAIN for arm in (STOCK, TENUTO)}
        if all(path.exists() for path in paths.values()):
            pairs.append(
                {arm: {PLAIN_MEASURE.name: read_first(path).number("itl_s")} for arm, path in paths.items()}
            )
    return [pair for pair in pairs if all(value for values in pair.values() for value in values.values())]


def _get_reused_share(runs: Runs) -> float | None:
    share = HITS(runs)
    return None if share is None else round(share, 4)
