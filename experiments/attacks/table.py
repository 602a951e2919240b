"""What is measured under an attack, and how it is shown: the same in the simulator and on live servers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from experiments.attacks.plans import is_agent, is_long_probe, is_probe
from tenuto.records.metrics import add_up, get_job_times_s, summarise
from tenuto.records.schema import TurnRecord

HEAD = (
    "| attack | policy | probe: mean | P95 | worst | worst beside stock's | long probe: worst, beside stock's"
    " | new agent: worst, beside stock's | agents' hits | of those without the attack | agents' job time |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Outcome:
    """One run: a policy under an attack."""

    attack: str
    policy: str
    mean_s: float
    p95_s: float
    worst_s: float
    """How long the probe waited for its first step (simulator) or for its first token (live)."""
    long_s: float
    """The longest such wait of a plain request of several steps."""
    new_s: float
    """The longest such wait of an agent's first turn."""
    hits: float
    """The agents' hit tokens as a share of what they could reuse."""
    job_s: float
    """The agents' mean job time; jobs that did not end are left out."""
    turn_s: float
    """Mean time from a turn's first step (live: its first token) to its end: one turn of service."""
    end_s: float
    num_failed: int = 0
    """Turns that failed."""
    num_unfinished: int = 0
    """Turns that were sent and had no answer when the run was ended. Probes count with the time waited."""


def make_outcome(
    attack: str,
    policy: str,
    turns: Sequence[TurnRecord],
    get_wait_s: Callable[[TurnRecord], float],
    get_served_s: Callable[[TurnRecord], float | None],
) -> Outcome:
    """What a run's records say. `get_served_s`: when a turn's service began. Only turns that ended count."""
    waits_s = summarise(get_wait_s(turn) for turn in turns if is_probe(turn.job))
    assert waits_s is not None
    done = [turn for turn in turns if turn.status == "ok"]
    agents = [turn for turn in done if is_agent(turn.job)]
    return Outcome(
        attack=attack,
        policy=policy,
        mean_s=waits_s.mean,
        p95_s=waits_s.p95,
        worst_s=waits_s.max,
        long_s=max((get_wait_s(turn) for turn in turns if is_long_probe(turn.job)), default=0.0),
        new_s=max((get_wait_s(turn) for turn in turns if is_agent(turn.job) and turn.turn == 1), default=0.0),
        hits=(add_up(turn.hit_tokens for turn in agents) or 0)
        / (add_up(turn.reusable_tokens for turn in agents) or 1),
        job_s=statistics.fmean(get_job_times_s(agents).values()),
        turn_s=statistics.fmean((turn.last_token_s or 0.0) - (get_served_s(turn) or 0.0) for turn in done),
        end_s=max(turn.last_token_s or 0.0 for turn in done),
        num_failed=sum(turn.status == "failed" for turn in turns),
        num_unfinished=sum(turn.status == "cancelled" for turn in turns),
    )


def show(outcomes: Iterable[Outcome], *, as_json: bool) -> Iterator[str]:
    """Lines of a table, or of JSON, as the runs end. The first policy of each attack must be stock."""
    stock: dict[str, Outcome] = {}
    quiet: dict[str, Outcome] = {}
    if not as_json:
        yield HEAD
    for found in outcomes:
        if found.policy == "stock":
            stock[found.attack] = found
        if found.attack == "none":
            quiet[found.policy] = found
        beside = _divide(found.worst_s, stock[found.attack].worst_s)
        longs = _divide(found.long_s, stock[found.attack].long_s)
        news = _divide(found.new_s, stock[found.attack].new_s)
        kept = _divide(found.hits, quiet[found.policy].hits) if found.policy in quiet else None
        if as_json:
            more = {"long_beside_stock": longs, "new_beside_stock": news}
            yield json.dumps({**asdict(found), "worst_beside_stock": beside, **more, "hits_kept": kept})
            continue
        yield (
            f"| {found.attack} | {found.policy} | {found.mean_s:.2f} s | {found.p95_s:.2f} s "
            f"| {found.worst_s:.2f} s | {_write(beside, '.2f')} "
            f"| {found.long_s:.2f} s, {_write(longs, '.2f')} "
            f"| {found.new_s:.2f} s, {_write(news, '.2f')} "
            f"| {found.hits:.0%} | {_write(kept, '.0%')} "
            f"| {found.job_s:.1f} s |"
        )


def _divide(a: float, b: float) -> float | None:
    return a / b if b else None


def _write(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
