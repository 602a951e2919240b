"""What only a client knows of a run. The metrics that every engine has are in `tenuto.records.metrics`.

None where a client cannot know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tenuto.client.load.commands import CommandRecord
from tenuto.client.servers.scrape import Totals
from tenuto.records import metrics
from tenuto.records.schema import TurnCounts, TurnRecord
from tenuto.workload.schema import Workload


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened, as far as the client saw it."""

    workload: Workload
    records: Sequence[TurnRecord]
    growth: Totals | None
    """How much the server's metrics grew; None if it shows none."""
    block_size: int | None
    """Tokens per KV block, where the server tells."""
    is_exact: bool
    """Prompts were token ids, of exactly the planned length."""
    is_interrupted: bool = False
    loop_lags_s: Sequence[float] = ()
    """How late the event loop woke a timer, sampled all through the run."""
    commands: Sequence[CommandRecord] = ()
    """Tool calls that were really run."""

    @property
    def done(self) -> list[TurnRecord]:
        """The turns that succeeded, in the order of their ends."""
        return [record for record in self.records if record.status == "ok"]

    @property
    def num_turns(self) -> dict[str, int]:
        """Turns of each job."""
        return {job.job_id: len(job.turns) for job in self.workload.jobs}

    @property
    def parents(self) -> dict[str, str | None]:
        """The job that started each job."""
        return {job.job_id: job.parent for job in self.workload.jobs}


def get_prompt_tokens(outcome: Outcome, record: TurnRecord) -> int:
    """As planned where token ids were sent, else as the server counted."""
    planned = record.planned_prompt_tokens or 0
    return planned if outcome.is_exact or record.prompt_tokens is None else record.prompt_tokens


def get_hit_tokens(outcome: Outcome) -> int | None:
    """As the answers say; if one does not, as the server's metrics say: found in cache, and loaded."""
    said = metrics.add_up(record.hit_tokens for record in outcome.done)
    found = _get_growth(outcome, "vllm:prefix_cache_hits_total")
    return said if said is not None or found is None else found + (get_loaded_tokens(outcome) or 0)


def get_recomputed_tokens(outcome: Outcome) -> int | None:
    """Reusable tokens that were not hit, and what preemptions took.

    A client does not see the second. Where there were preemptions the count is the server's, if it has one.
    """
    missed = metrics.add_up(record.recomputed_tokens for record in outcome.done)
    if missed is not None and not get_preemptions(outcome):
        return missed
    counted = _get_growth(outcome, "tenuto:recomputed_tokens_total")
    return missed if counted is None else counted


def get_notes(outcome: Outcome) -> tuple[str, ...]:
    """What a reader of the record must know."""
    preemptions = get_preemptions(outcome)
    if preemptions and _get_growth(outcome, "tenuto:recomputed_tokens_total") is None:
        return (
            f"recomputed tokens do not hold what {preemptions} preemptions took: the server does not tell",
        )
    return ()


def get_policy_faults(outcome: Outcome) -> int | None:
    """Hooks of the server's policy that failed, as the server counts."""
    return _get_growth(outcome, "tenuto:policy_faults_total")


def get_preemptions(outcome: Outcome) -> int | None:
    """Turns that lost their blocks and waited again, as the server counts."""
    return _get_growth(outcome, "vllm:num_preemptions_total")


def get_loaded_tokens(outcome: Outcome) -> int | None:
    """Prompt tokens that came from a tier below the GPU, or from another instance, as the server counts."""
    return _get_growth(outcome, "vllm:external_prefix_cache_hits_total")


def count_turns(outcome: Outcome) -> TurnCounts:
    """The turns that were planned, by how they ended."""
    ends = Counter(record.status for record in outcome.records)
    planned = sum(outcome.num_turns.values())
    return TurnCounts(
        planned=planned,
        ok=ends["ok"],
        ok_after_retries=sum(record.status == "ok" and bool(record.failures) for record in outcome.records),
        failed=ends["failed"],
        cancelled=ends["cancelled"],
        not_sent=planned - len(outcome.records),
    )


def count_failures(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Failed attempts by kind, retried ones included, with the first one's words."""
    return _group((each.kind, each.detail) for record in outcome.records for each in record.failures)


def count_complaints(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Complaints about answers by kind, with the first one's words."""
    complaints = (each for record in outcome.records for each in record.complaints)
    return _group((kind, detail) for kind, _, detail in (each.partition(": ") for each in complaints))


def count_commands(outcome: Outcome) -> dict[str, int]:
    """Commands that were run, by how they ended; `failed` exited with a status other than 0."""
    ends: Counter[str] = Counter(each.end for each in outcome.commands)
    failed = sum(each.end == "exited" and each.exit_status != 0 for each in outcome.commands)
    return {"run": len(outcome.commands), "failed": failed, **ends}


def _group(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, object]]:
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for kind, detail in pairs:
        counts[kind] += 1
        first.setdefault(kind, detail)
    return {kind: {"count": count, "first": first[kind]} for kind, count in counts.most_common()}


def _get_growth(outcome: Outcome, name: str) -> int | None:
    growth: Mapping[str, float] = outcome.growth or {}
    return round(growth[name]) if name in growth else None
