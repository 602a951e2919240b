"""Writing `dynamo.agentic_mooncake` (see `workload.agentic_mooncake`).

Jobs that wait for each other, and a job with those it started, are one play; every job is a session of it.
`not_before_ms` is on the workload's own clock, so that a play begins when it arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from tenuto.workload.convert.blocks import BlockIds
from tenuto.workload.convert.times import get_sent_times
from tenuto.workload.formats.agentic_mooncake import SCHEMA, VERSION
from tenuto.workload.formats.tenuto_jsonl import to_ms
from tenuto.workload.schema import Event, Job

MAIN = "main"
"""The session of a play's first job."""
_TRIGGERS: dict[Event, str] = {"sent": "dispatch", "finished": "completion"}


def make_agentic_mooncake(jobs: Sequence[Job], block_size: int) -> Iterator[dict[str, object]]:
    """The header, then a row per turn."""
    digest = hashlib.blake2b(repr([(job.job_id, job.arrival_s) for job in jobs]).encode(), digest_size=16)
    yield {
        "schema": SCHEMA,
        "version": VERSION,
        "block_size": block_size,
        "hash_id_scope": "local",
        "source": {"format": "tenuto", "digest": digest.hexdigest()},
    }
    times = get_sent_times(jobs)
    for members in find_plays(jobs):
        play_id, sessions = _name_play(members)
        ids = BlockIds(block_size)
        for job in members:
            for index, turn in enumerate(job.turns):
                yield {
                    "request_id": _name_request(job.job_id, index),
                    "play_id": play_id,
                    "session_id": sessions[job.job_id],
                    "model": str(turn.extra.get("model") or "unknown"),
                    "input_length": turn.num_prompt_tokens,
                    "output_length": turn.num_output_tokens,
                    "hash_ids": ids.make(turn.prompt, with_last=True),
                    "not_before_ms": to_ms(times[job.job_id][index]),
                    "dependencies": list(_make_dependencies(job, index)),
                }


def find_plays(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that hang together, by parents and by what waits for what; each with its first job first."""
    leader = {job.job_id: job.job_id for job in jobs}

    def find(job_id: str) -> str:
        while leader[job_id] != job_id:
            leader[job_id] = leader[leader[job_id]]
            job_id = leader[job_id]
        return job_id

    for job in jobs:
        others = {event.job_id for turn in job.turns for event in turn.after}
        for other in sorted(others | ({job.parent} if job.parent is not None else set())):
            leader[find(job.job_id)] = find(other)
    plays: dict[str, list[Job]] = {}
    for job in jobs:
        plays.setdefault(find(job.job_id), []).append(job)
    return [sorted(members, key=_waits) for members in plays.values()]


def _waits(job: Job) -> bool:
    return job.parent is not None or bool(job.turns[0].after)


def _name_play(members: Sequence[Job]) -> tuple[str, dict[str, str]]:
    """A play and its sessions by job: read again they are called PLAY/SESSION, and such names stay."""
    first = members[0].job_id
    play = first.removesuffix(f"/{MAIN}") or first
    sessions = {job.job_id: job.job_id.removeprefix(f"{play}/") or job.job_id for job in members}
    sessions[first] = MAIN
    if len(set(sessions.values())) < len(members):
        return first, {**{job.job_id: f"{number}" for number, job in enumerate(members)}, first: MAIN}
    return play, sessions


def _name_request(job_id: str, index: int) -> str:
    return f"{job_id}#{index}"


def _make_dependencies(job: Job, index: int) -> Iterator[dict[str, object]]:
    turn = job.turns[index]
    if index:
        yield {
            "request_id": _name_request(job.job_id, index - 1),
            "trigger": "completion",
            "delay_ms": to_ms(job.turns[index - 1].tool_s),
            "relation": "sequence",
        }
    # The parent's event first: a reader takes a session's first dependency for who started it.
    for event in sorted(turn.after, key=lambda each: each.job_id != job.parent):
        yield {
            "request_id": _name_request(event.job_id, event.turn),
            "trigger": _TRIGGERS[event.event],
            "delay_ms": to_ms(event.delay_s),
            "relation": "join" if index else "spawn",
        }


def name_agentic(jobs: Sequence[Job]) -> dict[str, str]:
    """What each job is called when it is read again."""
    named = [_name_play(members) for members in find_plays(jobs)]
    return {job_id: f"{play}/{session}" for play, sessions in named for job_id, session in sessions.items()}
