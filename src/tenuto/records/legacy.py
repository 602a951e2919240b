"""Converts records of Tenuto 0.1, which have no `schema`, to the current schema.

Every renamed key is in this module and nowhere else. Fields that 0.1 did not write stay missing.
"""

from __future__ import annotations

import re

from tenuto.records.fields import Fields

_POLICY_ROOMS = ("tenuto.policies", "tenuto.learn")
_MS = 1e12
"""Largest time in milliseconds."""
_RENAMED_IN_RUN = {"tokens_loaded": "loaded_tokens", "tokens_stored": "stored_tokens"}
_RENAMED_IN_TURN = {"intended_s": "due_s", "cached_tokens": "hit_tokens"}
_RENAMED_IN_SAMPLE = {
    "running": "running_blocks",
    "retained": "leased_blocks",
    "cached": "cached_blocks",
    "free": "free_blocks",
    "host": "host_blocks",
    "disk": "disk_blocks",
    "num_running": "running_turns",
    "num_waiting": "waiting_turns",
    "num_leases": "leases",
}
_RENAMED_IN_CLIENT = {"scale": "scale_lengths", "speed": "scale_rate"}
_FROM_CLIENT = {"turn_latency_s": "latency_s", "tpot_s": "tpot_s", "output_tokens": "output_tokens",
                "block_size": "block_size", "jobs_planned": "jobs_planned", "turns": "turns"}  # fmt: skip


def is_legacy(fields: Fields) -> bool:
    """Whether Tenuto 0.1 wrote this record."""
    return "schema" not in fields


def name_policy(policy: str) -> str:
    """Return a policy's current name from the header of a trace. 0.1 wrote the old path of its class."""
    module, _, _ = policy.partition(":")
    room, _, name = module.rpartition(".")
    return name.replace("_plus", "+").replace("_", "-") if room in _POLICY_ROOMS else policy


def upgrade_turn(fields: Fields) -> Fields:
    """Convert a line of turns.jsonl."""
    upgraded = fields.rename(_RENAMED_IN_TURN)
    if "due_s" not in upgraded:
        upgraded.values["due_s"] = fields.number("sent_s")
    return upgraded


def upgrade_sample(fields: Fields) -> Fields:
    """Convert a line of occupancy.jsonl."""
    return fields.rename(_RENAMED_IN_SAMPLE)


def upgrade_run(fields: Fields) -> Fields:
    """Convert a result record. Raises DataError if a renamed field has a value of the wrong type."""
    upgraded = fields.rename(_RENAMED_IN_RUN)
    values, client = upgraded.values, fields.optional_part("client")
    for old, new in _FROM_CLIENT.items():
        if old in client:
            values.setdefault(new, client.values[old])
    values.setdefault("jobs_planned", values.get("jobs"))
    if "client" in fields:
        values["client"] = client.rename(_RENAMED_IN_CLIENT).values
    values["by_turn"] = _make_turn_means(fields)
    durations_s = fields.optional(fields.numbers, "job_durations") or ()
    values["job_times_s"] = _name_jobs(client, durations_s)
    values["job_s"] = _make_job_stats(fields, durations_s)
    return upgraded


def _make_job_stats(fields: Fields, durations_s: tuple[float, ...]) -> dict[str, float] | None:
    names = {"mean": "avg_duration_s", "p50": "median_duration_s"}
    names |= {f"p{percent}": f"p{percent}_duration_s" for percent in (90, 95, 99)}
    found = {new: fields.optional(fields.number, old) for new, old in names.items()}
    known = {name: value for name, value in found.items() if value is not None}
    return {**known, **({"max": max(durations_s)} if durations_s else {})} or None


def _make_turn_means(fields: Fields) -> dict[str, object]:
    latencies, prompts = (
        fields.optional_part(name) for name in ("per_turn_avg_latency_ms", "per_turn_avg_prompt_tokens")
    )
    means: dict[str, object] = {}
    for key in latencies.values:
        if not re.fullmatch("[1-9][0-9]{0,8}", key):
            raise latencies.error(key, "must be the number of a turn")
        latency_ms = latencies.number(key, _MS) if key in latencies else None
        means[key] = {
            "latency_s": None if latency_ms is None else latency_ms / 1000,
            "prompt_tokens": prompts.values.get(key),
        }
    return means


def _name_jobs(client: Fields, durations_s: tuple[float, ...]) -> dict[str, float]:
    """Return job times by job name. If the record lacks the names (0.1's simulator), they are numbered."""
    names = client.values.get("finished_jobs")
    if not isinstance(names, list) or not len(set(map(str, names))) == len(names) == len(durations_s):
        names = [f"job {number}" for number in range(1, len(durations_s) + 1)]
    return {str(name): duration_s for name, duration_s in zip(names, durations_s, strict=True)}
