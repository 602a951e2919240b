"""The rows of every table: machines under a load."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tenuto.sim.setup import Setup
from tenuto.workload.arrivals import arrival_times, within
from tenuto.workload.formats.tenuto_jsonl import write_tenuto_jsonl
from tenuto.workload.generators.agent import agent_jobs
from tenuto.workload.generators.swe_bench import SWE_BENCH
from tenuto.workload.load_options import LoadOptions
from tenuto.workload.schema import Job, Span, TurnSpec

ROOT = Path(__file__).parents[2]
OUT = ROOT / "experiments" / "out"
WEKA = ROOT.parent / "shared" / "traces" / "weka"

PUBLISHED = (
    *("stock", "stock-tuned", "offload-async", "continuum-fixed", "continuum", "contextserve", "infercept"),
    *("autellix", "autellix+", "sglang-lpm", "thunderagent", "concur", "break-even", "unbounded", "tenuto"),
)
LAYERED = (
    *("stock", "stock-tuned", "offload-async", "continuum/async", "contextserve/async", "infercept/asked"),
    *("autellix+", "sglang-lpm/async", "thunderagent/async", "concur/async", "break-even/asked", "tenuto"),
)
"""With the host tier, where the row has one, also for those whose authors left it out: POLICY/OFFLOAD."""
FEW = ("stock", "stock-tuned", "continuum/async", "thunderagent/async", "concur/async", "tenuto")
FACTORS = (0.25, 4.0)
DEFAULTS = {"stretch": 500.0, "max_idle_s": 600.0, "patience": 4.0}
"""The options of `tenuto`; a test holds them against the policy."""
OPTIONS = (
    "tenuto",
    *(f"tenuto?{key}={value * factor:g}" for key, value in DEFAULTS.items() for factor in FACTORS),
)
PARTS = ("FirstJobFirst", "FullSteps", "NoRetention", "NoPrice", "AnyoneTakes", "NoTier", "AlwaysLoads")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table: a machine under a load, for every policy."""

    title: str
    setup: Setup
    load: LoadOptions
    group: str = ""
    """The machine in a map of winners, with `column` across."""
    column: str = ""

    def place(self, policy: str, seed: int) -> tuple[Setup, LoadOptions]:
        """The row's run with a policy: POLICY, POLICY/OFFLOAD with that layer, POLICY?OPTION=NUMBER."""
        policy, _, option = policy.partition("?")
        name, _, offload = policy.partition("/")
        key, _, value = option.partition("=")
        options = {key: float(value)} if option else {}
        setup = dataclasses.replace(
            self.setup,
            policy=name,
            offload=offload or None,  # type: ignore[arg-type]  # `Setup` checks it
            options=options,
        )
        return setup, dataclasses.replace(self.load, seed=seed)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of docs/results.md."""

    title: str
    about: str
    policies: Sequence[str]
    make_rows: Callable[[], Iterable[Row]]


def make_ab8() -> Iterable[Row]:
    for gpu in ("A100-40", "L40S", "H100", "H200"):
        for jps in (1, 3, 6, 10, 15):
            yield Row(f"{gpu}, {jps}/s", Setup(gpu=gpu), LoadOptions(jps=jps), gpu, f"{jps}/s")


def make_agents(workload: str, loads: Mapping[str, tuple[float, ...]]) -> Iterable[Row]:
    for gpu, rates in loads.items():
        for host_gb in (0, 200):
            tier = f"{host_gb} GiB host" if host_gb else "no host tier"
            for jps, column in zip(rates, ("idle", "full", "overload"), strict=True):
                setup = Setup(gpu=gpu, host_gb=host_gb)
                load = LoadOptions(workload=workload, jps=jps, window_s=90)
                yield Row(f"{gpu}, {jps:g}/s, {tier}", setup, load, f"{gpu}, {tier}", column)


def make_weka() -> Iterable[Row]:
    for gpu in ("H200", "B200"):
        for jps in (0.05, 0.2):
            yield Row(
                f"{gpu}, {jps:g}/s", Setup(gpu=gpu), LoadOptions(workload=str(WEKA), jps=jps, window_s=600)
            )


def make_70b() -> Iterable[Row]:
    for jps in (0.5, 1, 2):
        setup = Setup(gpu="H100", model="llama-3.1-70b", tp=4, host_gb=200)
        yield Row(f"4 x H100, {jps:g}/s", setup, LoadOptions(jps=jps))


def make_sensitivity() -> Iterable[Row]:
    base = Setup(gpu="H100", host_gb=0)
    swe = LoadOptions(workload="swe-bench", jps=2, window_s=60)
    yield Row("swe-bench, H100, 2/s", base, swe)
    for share in (0.25, 0.5, 2):
        yield Row(f"KV x {share:g}", dataclasses.replace(base, kv_tokens=int(434_000 * share)), swe)
    for seats in (16, 32, 64):
        yield Row(f"{seats} seats", dataclasses.replace(base, max_num_seqs=seats), swe)
    for tokens in (2048, 16384):
        yield Row(f"steps of {tokens}", dataclasses.replace(base, max_num_batched_tokens=tokens), swe)
    for factor in (0.5, 2):
        yield Row(f"texts x {factor:g}", base, dataclasses.replace(swe, scale_lengths=factor))
    yield Row("host of 50 GiB", dataclasses.replace(base, host_gb=50), swe)
    yield Row("host of 50 GiB and a disk", dataclasses.replace(base, host_gb=50, disk_gb=1000), swe)
    for hints in ("job", "none", "tool-time", "wrong"):
        yield Row(f"hints: {hints}", base, dataclasses.replace(swe, hints=hints))
    for num_turns, jps in ((10, 2.0), (20, 0.8), (30, 0.4), (50, 0.15)):
        path = write_trace(f"turns-{num_turns}", make_jobs(jps, num_turns=num_turns))
        yield Row(f"{num_turns} turns, {jps:g}/s", base, LoadOptions(workload=str(path)))
    for chat_jps in (1.0, 4.0):
        path = write_trace(f"chats-{chat_jps:g}", [*make_jobs(1.5), *make_chats(chat_jps)])
        yield Row(f"1.5/s and {chat_jps:g} chats/s", base, LoadOptions(workload=str(path)))


def make_jobs(jps: float, *, num_turns: float = SWE_BENCH.turns_mean, seed: int = 42) -> list[Job]:
    """swe-bench's jobs for 60 s with another number of turns; texts stay as long as they are."""
    factor = num_turns / SWE_BENCH.turns_mean
    family = dataclasses.replace(
        SWE_BENCH,
        turns_mean=num_turns,
        turns_sd=factor * SWE_BENCH.turns_sd,
        # Every turn's prompt holds all before it: tokens per job grow with the square.
        tokens_mean=int(factor**2 * SWE_BENCH.tokens_mean),
        tokens_sd=int(factor**2 * SWE_BENCH.tokens_sd),
    )
    return agent_jobs(family, within(arrival_times("poisson", jps, seed), 60.0), seed)


def make_chats(jps: float, *, seed: int = 42) -> list[Job]:
    """People who chat for 60 s: 1 to 6 turns of some 300 tokens each way, half a minute between them."""
    jobs = []
    for n, arrival_s in enumerate(within(arrival_times("poisson", jps, seed + 1), 60.0)):
        rng = random.Random(f"chat/{seed}/{n}")
        turns: list[TurnSpec] = []
        for index in range(num_turns := rng.randint(1, 6)):
            asked = Span(f"chat-{n}/asked{index}", max(5, round(rng.lognormvariate(5, 1))))
            prompt = turns[-1].followed_by(asked) if turns else (Span("chat/system", 200), asked)
            answer = Span(f"chat-{n}/answer{index}", max(5, round(rng.lognormvariate(5.4, 0.7))))
            is_last = index == num_turns - 1
            turns.append(TurnSpec(prompt, answer, tool_s=0.0 if is_last else rng.lognormvariate(3.2, 0.6)))
        jobs.append(Job(f"chat-{n}", arrival_s, tuple(turns)))
    return jobs


def write_trace(name: str, jobs: Sequence[Job]) -> Path:
    path = OUT / "workloads" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tenuto_jsonl(path, jobs)
    return path


def make_ablation() -> Iterable[Row]:
    wanted = {
        *("H200, 3/s", "H200, 15/s", "A100-40, 3/s"),
        *("H100, 2/s, no host tier", "H100, 2/s, 200 GiB host"),
        *("H100, 1.2/s, no host tier", "H100, 1.2/s, 200 GiB host"),
    }
    for rows in (make_ab8(), TABLES["swe-bench"].make_rows(), TABLES["bfcl"].make_rows()):
        yield from (row for row in rows if row.title in wanted)


SWE_LOADS = {"A100-80": (0.5, 1.0, 2.0), "H100": (1.0, 2.0, 4.0), "B200": (2.0, 4.0, 8.0)}
BFCL_LOADS = {"A100-80": (0.2, 0.5, 1.0), "H100": (0.3, 0.6, 1.2), "B200": (0.6, 1.2, 2.4)}

TABLES = {
    "ab8": Table(
        "ab8: 8 turns, 45 s of arrivals",
        "Each GPU with the KV cache and the host memory of the published sweeps (the host only for policies "
        "that were published with one).",
        PUBLISHED,
        make_ab8,
    ),
    "swe-bench": Table(
        "swe-bench, 90 s of arrivals",
        "From an engine that is hardly busy to about three times what it can do. Where there is a host tier "
        "every policy has it, also those that were published without: the name behind the stroke says how.",
        LAYERED,
        lambda: make_agents("swe-bench", SWE_LOADS),
    ),
    "bfcl": Table("bfcl, 90 s of arrivals", "As before.", LAYERED, lambda: make_agents("bfcl", BFCL_LOADS)),
    "70b": Table("Llama-3.1-70B on 4 H100s, ab8", "200 GiB of host memory.", LAYERED, make_70b),
    "weka": Table(
        "Real Claude Code sessions (Weka), 600 s of arrivals",
        "150 sessions in their order; turns longer than the model's context are left out.",
        FEW,
        make_weka,
    ),
    "sensitivity": Table(
        "Sensitivity: swe-bench on an H100 at 2 jobs/s, 60 s, no host tier",
        "Hints: `job` the job's id alone, `none` nothing (jobs are recognised by content), `tool-time` the "
        "true tool time, `wrong` ten times too long and too short in turns; without a word the job's id and "
        "its last turn. Turns: texts stay, so prompts grow with their number. Chats: people who answer "
        "after half a minute, with no tool and no hint but the id.",
        FEW,
        make_sensitivity,
    ),
    "options": Table(
        "The options of `tenuto`, a quarter and four times their defaults",
        "Results should not hang on them: in the figure each option's ratio to its default, the mean over "
        "the rows and the range.",
        OPTIONS,
        make_ablation,
    ),
    "ablation": Table(
        "What each part of `tenuto` is worth",
        "`experiments/ablation.py` has the parts: `FirstJobFirst` orders by arrival, `FullSteps` leaves the "
        "step budget alone, `NoRetention` frees a finished turn, `NoPrice` never gives up a lease for its "
        "tool's time, `AnyoneTakes` lets any turn take any lease, `NoTier` has no host memory, `AlwaysLoads` "
        "waits for every load. The figures beside a part say what the job takes without it.",
        ("tenuto", *(f"experiments.ablation:{part}" for part in PARTS)),
        make_ablation,
    ),
}
