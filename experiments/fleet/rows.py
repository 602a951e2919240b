"""The rows of the fleet table: engines, policy and load of each, and one run of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from experiments.decision_code import Code, digest_code
from tenuto.records.metrics import get_percentile
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Fleet, Setup, read_servers
from tenuto.workload import Job, LoadOptions, Span, TurnSpec, Workload, make_workload
from tenuto.workload.schema import After

OURS, IDEAL = "tenuto", "ideal"
BLIND = ("random", "round-robin", "least-loaded", "power-of-two")
RIVALS = ("sticky-least-loaded", "cache-aware", "kv-aware", "consistent-hash")

Make = Callable[[int], Workload]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    servers: str
    load: LoadOptions
    policy: str = "tenuto"
    kv_tokens: int | None = None
    rivals: tuple[str, ...] = RIVALS
    faults: tuple[str, ...] = ()
    make: Make | None = None
    """Makes the workload from a seed, where no generator does."""
    counts: str = ""
    """Only jobs whose id begins with this count."""
    from_s: float = 0.0
    """Only jobs that arrive after this count."""

    @property
    def routers(self) -> tuple[str, ...]:
        """Who competes; the yardstick needs engines of one kind."""
        is_plain = ":" not in self.servers and not self.faults
        return (*((IDEAL,) if is_plain else ()), OURS, *self.rivals)

    def place(self, router: str, seed: int) -> tuple[Setup, LoadOptions]:
        """One run."""
        setup = Setup(
            policy=self.policy,
            step_cost="roofline",
            kv_tokens=self.kv_tokens,
            host_gb=0.0,
            offload="none",
            fleet=Fleet(servers=read_servers(self.servers), router=router, faults=self.faults),
        )
        return setup, dataclasses.replace(self.load, seed=seed)


def make_hot_tenant(seed: int) -> Workload:
    """ab8 of two tenants. One sends as many jobs as the engines can do, the other a sixth of that."""
    loads = {"hot": (7.5, seed), "cold": (1.25, seed + 1)}
    jobs = []
    for tenant, (jps, own_seed) in loads.items():
        made = make_workload(LoadOptions(jps=jps, window_s=20.0, seed=own_seed)).jobs
        jobs += [_rename(job, f"{tenant}-{job.job_id}", tenant) for job in made]
    return Workload("hot tenant", tuple(sorted(jobs, key=lambda job: job.arrival_s)))


def _rename(job: Job, name: str, tenant: str) -> Job:
    def rename(span: Span) -> Span:
        return span if span.content_id == "system" else Span(f"{name}:{span.content_id}", span.num_tokens)

    turns = tuple(
        dataclasses.replace(turn, prompt=tuple(map(rename, turn.prompt)), output=rename(turn.output))
        for turn in job.turns
    )
    return dataclasses.replace(job, job_id=name, turns=turns, tenant=tenant)


def make_sub_agents(seed: int) -> Workload:
    """Jobs that read a long text and start four sub-agents on it, each with three turns of its own."""
    arrivals = make_workload(LoadOptions(jps=1.1, window_s=40.0, seed=seed)).jobs
    jobs = [job for n, each in enumerate(arrivals) for job in _make_family(f"p{n}", each.arrival_s)]
    return Workload("sub-agents", tuple(jobs))


def _make_family(name: str, arrival_s: float) -> list[Job]:
    text = (Span("system", 400), Span(f"{name}/text", 12_000))
    parent = Job(name, arrival_s, _make_turns(name, text, 2, ()))
    started = (After(name, 0, "finished", 0.2),)
    children = [
        Job(
            f"{name}/{n}",
            arrival_s,
            _make_turns(f"{name}/{n}", (*text, Span(f"{name}/{n}/task", 200)), 3, started),
            parent=name,
        )
        for n in range(4)
    ]
    return [parent, *children]


def _make_turns(
    name: str, prompt: tuple[Span, ...], num: int, first: Iterable[After]
) -> tuple[TurnSpec, ...]:
    turns: list[TurnSpec] = []
    for index in range(num):
        if turns:
            prompt = turns[-1].followed_by(Span(f"{name}/tool{index}", 1200))
        last = index == num - 1
        turns.append(
            TurnSpec(
                prompt,
                Span(f"{name}/out{index}", 100),
                tool=None if last else "tool",
                tool_s=0.0 if last else 1.5,
                after=tuple(first) if index == 0 else (),
            )
        )
    return tuple(turns)


def _ab8(title: str, servers: str, jps: float, window_s: float = 25.0, **row: Any) -> Row:
    hints = row.pop("hints", "last")
    return Row(title, servers, LoadOptions(jps=jps, window_s=window_s, hints=hints), **row)


STOCK: dict[str, Any] = {"policy": "stock"}
TIGHT: dict[str, Any] = {"policy": "stock", "kv_tokens": 100_000}
ROWS = (
    _ab8("ab8, 80 %", "4", 7.2, rivals=(*RIVALS, *BLIND)),
    _ab8("ab8, 50 %", "4", 4.5),
    _ab8("ab8, 80 %", "16", 28.8, 12.0),
    Row("swe-bench, 80 %", "4", LoadOptions(workload="swe-bench", jps=4.0, window_s=40.0)),
    Row("bfcl, 80 %", "4", LoadOptions(workload="bfcl", jps=1.5, window_s=80.0)),
    _ab8("ab8, 80 %, stock engines", "4", 6.0, **STOCK),
    _ab8("ab8, stock engines with 100k tokens of KV", "4", 6.0, **TIGHT),
    Row(
        "swe-bench, unlike engines",
        "H100:2,L40S:2",
        LoadOptions(workload="swe-bench", jps=2.2, window_s=50.0),
    ),
    _ab8("ab8, unlike engines", "H100:2,L40S:2", 4.4),
    Row("sub-agents on a long text", "4", LoadOptions(), make=make_sub_agents),
    Row("a hot tenant, the other's jobs", "4", LoadOptions(), make=make_hot_tenant, counts="cold"),
    _ab8("ab8, an engine of 8 dies, jobs after that", "8", 12.0, 30.0, faults=("die:0@12",), from_s=19.0),
    _ab8("the same without the death", "8", 12.0, 30.0, faults=("join@1000",), from_s=19.0),
    _ab8("ab8, clients without ids, stock engines with 100k tokens of KV", "4", 5.0, hints="none", **TIGHT),
    _ab8("ab8, 130 %, stock engines", "4", 12.0, 15.0, **STOCK),
)
"""Of what four engines finish at most: 9 ab8 jobs a second, 5 of swe-bench, 1.9 of bfcl; a job of ab8 takes
about 7 s, so `from_s` is the time that one job takes after the death."""


class Key(NamedTuple):
    """One run: a row's number, a router, a seed."""

    row: int
    router: str
    seed: int


def get_code(number: int, router: str, seed: int) -> Code:
    """The present code of a run."""
    row = ROWS[number]
    return digest_code(*row.place(router, seed), None if row.make is None else row.make.__module__)


def measure(key: Key) -> dict[str, Any]:
    """Run it; what is kept."""
    number, router, seed = key
    row = ROWS[number]
    setup, load = row.place(router, seed)
    workload = row.make(seed) if row.make is not None else None
    outcome = run(setup, load, extras=Extras(workload=workload))
    record, arrivals_s = outcome.record, {job.job_id: job.arrival_s for job in outcome.workload.jobs}
    times_s = [
        time_s
        for job, time_s in record["job_times_s"].items()
        if job.startswith(row.counts) and arrivals_s[job] >= row.from_s
    ]
    fleet = record["fleet"]
    return {
        "row": number,
        "title": row.title,
        "router": router,
        "seed": seed,
        "jobs": len(times_s),
        "mean_s": round(fmean(times_s), 4),
        "p95_s": round(get_percentile(times_s, 95), 4),
        "recomputed": round(record["recomputed_tokens"] / record["prompt_tokens"], 4),
        "moves": fleet["moves"],
        "held": fleet["held"],
        "imbalance": round(fleet["imbalance"], 3),
        "resent": fleet["resent"],
        "code": str(get_code(*key)),
    }
