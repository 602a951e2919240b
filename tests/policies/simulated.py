"""Small simulated engines for the policies' scenarios: steps of one second, jobs in a line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tenuto.core.loader import load_policy
from tenuto.records.schema import TurnRecord
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.kv import KvConfig
from tenuto.sim.simulation import Clients, Simulation
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier
from tenuto.workload.schema import Job, Span, TurnSpec, Workload


class OneSecondSteps(StepCost):
    """Every step takes one second, whatever is in it."""

    def seconds(self, batch: StepBatch) -> float:
        return 1.0


class PrefillSteps(StepCost):
    """A step takes a second, and more for the tokens of prompts."""

    def __init__(self, tokens_per_s: float = 100.0) -> None:
        self._tokens_per_s = tokens_per_s

    def seconds(self, batch: StepBatch) -> float:
        return 1.0 + batch.num_prefill_tokens / self._tokens_per_s


def make_job(
    name: str,
    outputs: Sequence[int],
    *,
    arrival_s: float = 0.0,
    prompt: int = 8,
    tool_tokens: int = 4,
    tool_s: float = 0.0,
) -> Job:
    """A job whose turns write so many tokens each and read `tool_tokens` after each tool call."""
    turns = []
    spans: tuple[Span, ...] = (Span(f"{name}-task", prompt),)
    for number, num_tokens in enumerate(outputs):
        output = Span(f"{name}-output-{number}", num_tokens)
        is_last = number == len(outputs) - 1
        tool = {} if is_last else {"tool": "ls", "tool_s": tool_s}
        turns.append(TurnSpec(spans, output, **tool))
        spans = (*spans, output, Span(f"{name}-tool-{number}", tool_tokens))
    return Job(name, arrival_s, tuple(turns))


def make_simulation(
    policy: str,
    jobs: Iterable[Job],
    *,
    options: dict | None = None,
    num_blocks: int = 1000,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    threshold: int = 0,
    host_blocks: int = 0,
    cost: object | None = None,
) -> Simulation:
    """An engine with blocks of 4 tokens, `num_blocks` of them usable, and a fast host tier if asked for."""
    config = EngineConfig(
        kv=KvConfig(num_blocks=num_blocks + 1, block_size=4),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=threshold,
        offload="async" if host_blocks else None,
        offload_chunk_tokens=4,
    )
    tiers = None
    if host_blocks:
        tiers = OffloadTiers([Tier("host", host_blocks, 1, Link(bytes_per_s=1e6))])
    scheduler = Scheduler(config, load_policy(policy, options), tiers=tiers)
    return Simulation.of_one(scheduler, cost or OneSecondSteps(), Clients(Workload("w", tuple(jobs))))  # type: ignore[arg-type]


def simulate(policy: str, jobs: Iterable[Job], **engine) -> list[TurnRecord]:
    """Run jobs to their end; the policy must not have failed anywhere."""
    simulation = make_simulation(policy, jobs, **engine)
    records = simulation.run()
    assert simulation.scheduler.driver.num_policy_faults == 0
    return records


def get_ends_s(records: Iterable[TurnRecord]) -> dict[str, float]:
    """When each job ended, by its name, in the order of the names."""
    ends_s: dict[str, float] = {}
    for record in records:
        ends_s[record.job] = max(record.last_token_s or 0.0, ends_s.get(record.job, 0.0))
    return dict(sorted(ends_s.items()))


def count_recomputed(records: Iterable[TurnRecord]) -> int:
    """Tokens that were computed again."""
    return sum(record.recomputed_tokens or 0 for record in records)
