"""Notes that a reader of the verdict needs besides the numbers: errors, caches, delays of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_CLIENT_LAG_S = 0.05
"""Limit in seconds for the P99 of a run's sending lag. Above it, client delays distort the measured times."""
_LOST = ("failed", "cancelled", "not_sent")


def describe_errors(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One sentence per arm that lost turns, or one if no arm did. `results`: by arm, its runs' results."""
    lines = []
    for arm, runs in results.items():
        planned = sum(run["turns"]["planned"] for run in runs)
        lost = sum(run["turns"][kind] for run in runs for kind in _LOST)
        if lost:
            kinds = {kind: each for run in runs for kind, each in run["client"]["failed_attempts"].items()}
            first = next((f" (first: {kind}: {each['first']})" for kind, each in kinds.items()), "")
            lines.append(
                f"Errors: {arm} lost {lost} of {planned} turns{first}; jobs that failed on one arm are left "
                "out on all."
            )
    idle = [arm for arm, runs in results.items() if not runs]
    if idle and not lines:
        return [f"Errors: none in the runs that ended; {', '.join(idle)} had none."]
    return lines or ["Errors: none."]


def describe_complaints(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Describe where an arm's answers or counts differ from what was requested."""
    lines = []
    for arm, runs in results.items():
        for kind in dict.fromkeys(kind for run in runs for kind in run["client"]["complaints"]):
            these = [run["client"]["complaints"][kind] for run in runs if kind in run["client"]["complaints"]]
            lines.append(
                f"Complaint: {arm}: {sum(each['count'] for each in these)} × {kind}: {these[0]['first']}"
            )
    return lines


def describe_faults(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One sentence for each arm on which hooks of the policy failed."""
    lines = []
    for arm, runs in results.items():
        counts = [run.get("policy_faults") or 0 for run in runs]
        if any(counts):
            lines.append(
                f"Policy faults: on {arm}, hooks of the policy failed {sum(counts)} times in "
                f"{sum(map(bool, counts))} of {len(runs)} runs; the engine's default was used instead. The "
                "verdict is not about the policy alone."
            )
    return lines


def describe_lag(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Say whether the client's delays were so large that its times do not describe the servers."""
    lags = [run["client"]["send_lag_s"] for runs in results.values() for run in runs]
    worst_s = max((lag["p99"] for lag in lags if lag is not None), default=0.0)
    if worst_s <= MAX_CLIENT_LAG_S:
        return []
    return [
        f"The client itself was late: P99 of its sending lag was up to {worst_s * 1000:.0f} ms. Its "
        "machine is too busy, with the servers or with others."
    ]


def find_invalid(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One sentence for each arm with runs whose figures do not describe its server."""
    lines = []
    for arm, runs in results.items():
        reasons = [run["client"]["invalid"] for run in runs if run["client"].get("invalid")]
        if reasons:
            lines.append(
                f"INVALID: {len(reasons)} of {len(runs)} runs of {arm}: {reasons[0][0]}. To run them again, "
                "remove their folders and give the same command."
            )
    return lines


def describe_caches(not_emptied: Sequence[str]) -> list[str]:
    """Name the arms whose caches were not emptied before a run."""
    if not not_emptied:
        return []
    return [
        f"The prefix cache of {', '.join(not_emptied)} could not be emptied between runs. No run hits what "
        "another left there, as all content is its own, but it starts with the cache full. For vLLM, start "
        "the server with VLLM_SERVER_DEV_MODE=1."
    ]
